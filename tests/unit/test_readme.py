"""The README promises what is there: commands, flags, variables, files, names, and code that is Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

import dbsync
from dbsync import control
from dbsync.cli import app
from dbsync.config import ENVIRONMENT, Variable
from dbsync.handler import Change, MessageHandler

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in BLOCKS if language == "python"]
TABLE_ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in README.splitlines() if line[:1] == "|"
]


def options() -> list[click.Parameter]:
    return [option for command in app.commands.values() for option in command.params]


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[embedded]' && .venv/bin/dbsync demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ],
)
def test_the_two_commands_stand_there_as_they_are_typed(command: str) -> None:
    assert f"```sh\n{command}\n```" in README


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert (
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest"
        in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    )


@pytest.mark.parametrize("variable", ENVIRONMENT, ids=lambda variable: variable.field)
def test_every_variable_is_in_the_table_with_its_default(variable: Variable) -> None:
    names = ", ".join(f"`{name}`" for name in variable.names)
    (row,) = (row for row in TABLE_ROWS if row[0] == names)
    assert row[1].strip("`") == variable.default
    assert row[2]


def test_every_variable_of_ours_it_names_exists() -> None:
    known = {name for variable in ENVIRONMENT for name in variable.names}
    assert set(re.findall(r"\b(?:DEFAULT_)?DBSYNC_\w+|\bPOSTGRES_\w+", README)) <= known


def test_every_command_and_flag_it_names_exists() -> None:
    commands = set(re.findall(r"`dbsync ([a-z]+)", README))
    commands |= {
        name for language, text in BLOCKS if language == "sh" for name in re.findall(r"\bdbsync ([a-z]+)", text)
    }
    assert commands == set(app.commands)
    flags = {flag for option in options() for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= flags


def test_every_file_it_names_exists() -> None:
    linked = re.findall(r"\]\(([\w./-]+)\)", README)
    scripts = [f"examples/{name}" for name in re.findall(r"`(\w+\.py)`", README)]
    statements = [f"sql/{name}" for name in re.findall(r"`(\w+\.sql)`", README)]
    assert linked
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py")} - {"examples/source.py"} == set(
        scripts
    )
    assert [name for name in [*linked, *scripts, *statements] if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[0])
def test_its_code_is_python_and_imports_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "dbsync":
            assert {alias.name for alias in node.names} <= set(dbsync.__all__)


def test_the_first_code_is_no_longer_than_ten_lines_or_so() -> None:
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 11


def test_every_method_of_a_handler_and_every_field_of_a_change_is_told() -> None:
    methods = [name for name in vars(MessageHandler) if name.startswith("handle_")]
    fields = [f"msg.{name}" for name in Change._fields]
    assert [name for name in methods + fields if f"`{name}`" not in README] == []


def test_the_names_in_its_sql_are_the_defaults() -> None:
    settings = dbsync.Settings()
    statements = "\n".join(text for language, text in BLOCKS if language == "sql")
    ours = {settings.ctrl_namespace, settings.publication, settings.slot, control.REFRESH_TABLE}
    assert set(re.findall(r"\bdbsync_\w+", statements)) == ours


def test_it_names_no_absolute_path_and_no_address() -> None:
    assert not re.search(r"(?<![\w.`'])/(?:usr|home|tmp|etc|var|opt|root|work)\b", README)
    # The forms of target URLs stand there, with no host that is anybody's.
    hosts = set(re.findall(r"://([\w.-]+)", README))
    assert hosts <= {"HOST", "localhost", "user"}
