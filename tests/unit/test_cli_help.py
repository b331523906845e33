"""Every command and flag is documented, every flag of a setting names its variables, and no secret has a flag."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dbsync.cli import app
from dbsync.cli_flags import Invocation
from dbsync.config import ENVIRONMENT, Variable
from dbsync.errors import ConfigError

README = Path(__file__).parents[2] / "README.md"
COMMANDS = sorted(app.commands)
FLAGS = sorted(
    {
        (name, flag)
        for name, command in app.commands.items()
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
        if flag.startswith("--")
    }
)
BY_FLAG = {"--" + variable.field.replace("_", "-"): variable for variable in ENVIRONMENT}
YES_OR_NO = [variable.field for variable in ENVIRONMENT if variable.is_yes_or_no]


def option_of(command: str, flag: str) -> click.Option:
    (option,) = (one for one in app.commands[command].params if flag in (*one.opts, *one.secondary_opts))
    assert isinstance(option, click.Option)
    return option


def test_the_commands() -> None:
    assert {"init", "check", "run", "refresh", "status", "teardown", "demo"} <= set(COMMANDS)


def test_the_readme_has_every_command_and_every_flag() -> None:
    readme = README.read_text(encoding="utf-8")
    promised = [f"dbsync {command}" for command in COMMANDS] + sorted({flag for _, flag in FLAGS})
    assert [words for words in promised if not re.search(rf"(?<![\w-]){words}(?![\w-])", readme)] == []


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_every_flag_has_help_and_one_of_a_setting_names_its_variables(command: str, flag: str) -> None:
    text = option_of(command, flag).help
    assert text
    if variable := BY_FLAG.get(flag):
        assert all(name in text for name in variable.names)


@pytest.mark.parametrize("secret", [variable for variable in ENVIRONMENT if variable.secret], ids=lambda one: one.field)
def test_a_secret_has_no_flag_but_its_variable_is_in_the_help(secret: Variable) -> None:
    assert secret.field not in {option.name for command in app.commands.values() for option in command.params}
    for command in ("init", "check", "run", "refresh", "status", "teardown"):
        told = CliRunner().invoke(app, [command, "--help"]).output
        assert all(name in told for name in secret.names)


def test_every_setting_that_a_run_uses_has_a_flag() -> None:
    flags = {flag for command, flag in FLAGS if command == "run"}
    secret = {flag for flag, variable in BY_FLAG.items() if variable.secret}
    assert set(BY_FLAG) - secret <= flags


def test_a_flag_wins_over_its_variable_which_is_then_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBSYNC_REPLSLOT", "Not A Slot")
    with pytest.raises(ConfigError, match="DBSYNC_REPLSLOT"):
        Invocation().settings()
    assert Invocation({"slot": "mine"}).settings().slot == "mine"


def test_the_default_is_not_taken_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DBSYNC_CHUNK_ROWS", raising=False)
    assert not Invocation().says("chunk_rows")
    assert Invocation({"chunk_rows": 7}).says("chunk_rows")
    monkeypatch.setenv("DBSYNC_CHUNK_ROWS", "7")
    assert Invocation().says("chunk_rows")


def test_a_run_copies_first_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DBSYNC_SNAPSHOT", raising=False)
    assert snapshot_of("run") == "initial"
    assert snapshot_of("run", "--snapshot", "never") == "never"
    assert snapshot_of("refresh") == "never"
    monkeypatch.setenv("DBSYNC_SNAPSHOT", "never")
    assert snapshot_of("run") == "never"
    assert snapshot_of("run", "--snapshot", "initial") == "initial"
    assert "[DBSYNC_SNAPSHOT; default: initial]" in str(option_of("run", "--snapshot").help)


@pytest.mark.parametrize("command", ["run", "refresh"])
@pytest.mark.parametrize("name", YES_OR_NO)
def test_a_yes_or_no_is_a_flag_and_its_variable_takes_true_and_false(
    monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    flag, variable = name.replace("_", "-"), f"DBSYNC_{name.upper()}"
    monkeypatch.delenv(variable, raising=False)
    assert given(command, name) is False
    assert given(command, name, f"--{flag}") is True
    monkeypatch.setenv(variable, "true")
    assert given(command, name) is True
    assert given(command, name, f"--no-{flag}") is False
    monkeypatch.setenv(variable, "sometimes")
    with pytest.raises(ConfigError, match=f"{variable}='sometimes' cannot be used: it takes true or false"):
        given(command, name)


def given(command: str, name: str, *arguments: str) -> object:
    invocation = Invocation()
    app.commands[command].make_context(command, [*arguments], obj=invocation)
    return getattr(invocation.settings(), name)


def snapshot_of(command: str, *arguments: str) -> str:
    invocation = Invocation()
    app.commands[command].make_context(command, [*arguments], obj=invocation)
    return invocation.settings().snapshot


def test_a_flag_wins_over_its_part_of_the_connection_string(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_CONNSTR", "postgresql://app:geheim@db:5433/shop?hostaddr=10.0.0.1&sslmode=require")
    conninfo = Invocation({"host": "other", "dbname": "mine"}).settings().conninfo()
    assert {"host=other", "dbname=mine", "user=app", "port=5433", "sslmode=require"} <= set(conninfo.split())
    assert "hostaddr" not in conninfo


def test_help_imports_nothing_that_takes_long() -> None:
    code = "import sys, dbsync.cli; sys.exit(not {'pyspark', 'pyarrow', 'rich'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_it_shows_the_help() -> None:
    told = CliRunner().invoke(app, [])
    assert told.exit_code == 0
    assert all(command in told.output for command in COMMANDS)
    assert "130  interrupted" in told.output
