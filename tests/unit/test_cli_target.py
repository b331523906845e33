"""The target on the command line: what it is called, what must not stand there, what does not go with `--batcher`."""

from __future__ import annotations

import logging

import pytest
from recording import RecordingBatcher

from dbsync import Settings
from dbsync.cli_flags import Invocation, make_syncer, target_name
from dbsync.errors import ConfigError

OWN = "recording:RecordingBatcher"


def invocation(**flags: object) -> Invocation:
    """Flags over the environment, as the command has them."""
    made = Invocation(dict(flags))
    made.settings()
    return made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def no_target_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DBSYNC_TO", "DBSYNC_SOFT_DELETE", "DBSYNC_DROP_COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_a_target_is_called_by_where_it_is_whoever_logs_in_there() -> None:
    assert target_name(Settings(), None) == "echo:"
    assert target_name(Settings(to="postgresql://a:geheim@HOST/shop"), None) == "postgresql://HOST/shop"
    assert target_name(Settings(to="postgresql://HOST/shop?user=b&password=geheim"), None) == "postgresql://HOST/shop"
    assert target_name(Settings(to="postgresql://HOST/other"), None) == "postgresql://HOST/other"
    assert target_name(Settings(to="postgresql://HOST/shop"), OWN) == OWN


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:geheim@localhost/shop",
        "postgresql://localhost/shop?user=u&password=geheim",
        "mysql://localhost/shop?password=geheim",
        "webhook+http://localhost/services/T0/B0/geheim9",
    ],
)
def test_a_password_on_the_command_line_is_warned_of(caplog: pytest.LogCaptureFixture, url: str) -> None:
    given = invocation(to=url)
    make_syncer(given, given.settings(), None, None)
    (told,) = warnings(caplog)
    assert told.startswith("--to holds what nobody should read")
    assert "DBSYNC_TO" in told
    assert "geheim" not in told


def test_a_password_in_the_variable_is_where_it_should_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBSYNC_TO", "postgresql://user:geheim@localhost/shop")
    make_syncer(invocation(), invocation().settings(), None, None)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ({"to": "echo:"}, "--to"),
        ({"soft_delete": True}, "--soft-delete"),
        ({"drop_columns": True}, "--drop-columns"),
        ({"soft_delete": True, "drop_columns": True}, "--soft-delete, --drop-columns"),
    ],
)
def test_flags_that_a_batcher_of_yours_would_not_hear_of_are_refused(flags: dict[str, object], given: str) -> None:
    asked = invocation(**flags)
    with pytest.raises(ConfigError, match=f"{given} (is|are) for targets that dbsync knows, and --batcher is") as told:
        make_syncer(asked, asked.settings(), None, OWN)
    assert told.value.hint == "Leave one or the other out."


def test_variables_that_a_batcher_of_yours_does_not_hear_of_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBSYNC_TO", "postgresql://user:geheim@localhost/shop")
    monkeypatch.setenv("DBSYNC_SOFT_DELETE", "yes")
    monkeypatch.setenv("DBSYNC_DROP_COLUMNS", "no")
    syncer = make_syncer(invocation(), invocation().settings(), None, OWN)
    assert type(syncer.batcher).__name__ == RecordingBatcher.__name__
    assert warnings(caplog) == [
        "What DBSYNC_TO, DBSYNC_SOFT_DELETE says is left out: --batcher is a target of your own."
    ]


def test_names_and_column_lists_go_for_a_batcher_of_yours_too(caplog: pytest.LogCaptureFixture) -> None:
    asked = invocation(target_prefix="x_", exclude_columns=("*.password",), soft_delete=False)
    make_syncer(asked, asked.settings(), None, OWN)
    assert warnings(caplog) == []
