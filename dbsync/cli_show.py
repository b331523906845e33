"""What the commands print: data on stdout, words on stderr, styles only where there is a terminal that wants them."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from psycopg import errors

from dbsync import control
from dbsync.check import Check, Level, size
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.control import SlotState
from dbsync.lsn import LSN
from dbsync.requests import Refresh, Requests

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_KEYS = (
    "id",
    "kind",
    "state",
    "query",
    "rows",
    "superseded",
    "chunks",
    "voided",
    "estimated_rows",
    "message",
    "requested_by",
    "requested_at",
    "started_at",
    "finished_at",
)

_QUERY_WIDTH = 80
_MARKS: dict[Level, tuple[str, str, str]] = {
    "ok": ("✓", "ok  ", "green"),
    "warn": ("!", "warn", "yellow"),
    "fail": ("✗", "FAIL", "red"),
}


def say(words: str) -> None:
    click.echo(words, err=True)


def words_console() -> Console:
    """Where a bar or a panel goes: like all words, to stderr."""
    from rich.console import Console

    return Console(stderr=True)


def configure_logging(level: str, mask: Callable[[str], str] = str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Masking(mask))
    handler.addFilter(_is_told_by_the_log)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("dbsync").setLevel(level.upper())


class _Masking(logging.Formatter):
    """Takes out what is secret where others' words are told: a driver may quote what it was given."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        words = super().format(record)
        # Ordinary lines are of dbsync's own words, which a password like "postgres" must not make unreadable.
        return words if record.levelno == logging.INFO else self._mask(words)


def _is_told_by_the_log(record: logging.LogRecord) -> bool:
    # Py4J tells of every broken connection to a JVM that is being shut down, partly through the root logger.
    if Path(record.pathname).parent.name == "py4j":
        return False
    # What ends a run is raised as well, and then told once, with its hint.
    return not (record.name == "dbsync.syncer" and record.levelno >= logging.ERROR)


def print_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, default=str))


@dataclass(frozen=True, slots=True)
class Overview:
    """What is there of dbsync's in the source, as PostgreSQL sees it: it needs no dbsync that runs."""

    source: str
    server_lsn: LSN
    publication: str
    published: bool
    tables: list[str]
    schema: str
    wm_table: str
    marked: bool
    slot_name: str
    slot: SlotState | None
    set_up: bool
    refreshes: list[Refresh] | None

    def as_dict(self) -> dict[str, Any]:
        """The documented keys of `dbsync status --json`."""
        columns = [name for name in SlotState.__dataclass_fields__ if name != "name"]
        slot = {name: getattr(self.slot, name, None) for name in columns}
        return {
            "set_up": self.set_up,
            "source": self.source,
            "server_lsn": str(self.server_lsn),
            "publication": {"name": self.publication, "exists": self.published, "tables": self.tables},
            "control": {"schema": self.schema, "table": self.wm_table, "exists": self.marked},
            "slot": {
                "name": self.slot_name,
                "exists": self.slot is not None,
                **{name: str(value) if isinstance(value, LSN) else value for name, value in slot.items()},
            },
            "refreshes": None if self.refreshes is None else [_shown(refresh) for refresh in self.refreshes],
        }


def look(settings: Settings) -> Overview:
    with connect(settings) as conn:
        publication = control.publication(conn, settings)
        marks = control.own_table(conn, settings, control.MARKS)
        requests = control.own_table(conn, settings, control.REFRESHES)
        slot = control.slot_state(conn, settings)
        usable = slot is not None and (slot.plugin, slot.database) == (control.PLUGIN, conn.info.dbname)
        return Overview(
            source=settings.describe(),
            server_lsn=control.current_lsn(conn),
            publication=settings.publication,
            published=publication is not None,
            tables=[f"{schema}.{name}" for schema, name in control.published_tables(conn, settings)],
            schema=settings.ctrl_namespace,
            wm_table=settings.wm_table,
            marked=marks is not None,
            slot_name=settings.slot,
            slot=slot,
            set_up=bool(
                usable
                and (marks and marks.ours)
                and (requests and requests.ours)
                and (publication and publication.covers_marks)
            ),
            refreshes=_refreshes(conn, settings) if requests else [],
        )


def _refreshes(conn: Connection, settings: Settings) -> list[Refresh] | None:
    try:
        return Requests(conn, settings).recent()
    except errors.InsufficientPrivilege:
        return None


def _shown(refresh: Refresh) -> dict[str, Any]:
    plain = refresh.as_dict()
    return {name: plain[name] for name in REFRESH_KEYS}


def show_overview(overview: Overview, as_json: bool) -> None:
    if as_json:
        print_json(overview.as_dict())
    else:
        lines = [*_overview_lines(overview), *_refresh_lines(overview.refreshes)]
        print_lines([(f"{name:<14}", "bold"), (value, "")] for name, value in lines)


def _overview_lines(overview: Overview) -> Iterable[tuple[str, str]]:
    absent = "" if overview.published else ", which does not exist"
    yield "source", overview.source
    yield "publication", overview.publication + absent
    for number, table in enumerate(overview.tables):
        yield ("" if number else "tables"), table
    yield "control table", f"{overview.schema}.{overview.wm_table}{'' if overview.marked else ', not created yet'}"
    slot = overview.slot
    if slot is None:
        yield "slot", f"{overview.slot_name}, not created yet"
        return
    reader = f"read through PostgreSQL process {slot.active_pid}" if slot.active else "not being read"
    yield "slot", f"{slot.name}, {reader}"
    yield "acknowledged", str(slot.confirmed_flush_lsn or "nothing")
    yield "end of log", str(overview.server_lsn)
    yield "lag", _size(slot.lag_bytes)
    yield "held WAL", f"{_size(slot.held_bytes)}, {slot.wal_status or 'not known'}"


def _refresh_lines(refreshes: Sequence[Refresh] | None) -> Iterable[tuple[str, str]]:
    if refreshes is None:
        yield "refreshes", "this role may not read them"
    for number, refresh in enumerate(refreshes or ()):
        yield ("" if number else "refreshes"), _refresh_line(refresh)


def _refresh_line(refresh: Refresh) -> str:
    began, ended = refresh.started_at, refresh.finished_at
    took = f"{((ended or datetime.now(UTC)) - began).total_seconds():,.1f} s" if began else "not begun"
    counts = f"{count(refresh.rows, 'row')}, {count(refresh.chunks, 'chunk')}, {took}"
    query = textwrap.shorten(refresh.query, _QUERY_WIDTH, placeholder=" …")
    return f"{refresh.id} {refresh.state}: {counts}: {query}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(number: int | None) -> str:
    return "not known" if number is None else size(number)


def show_checks(checks: Sequence[Check]) -> None:
    symbols = _can_show("".join(symbol for symbol, _, _ in _MARKS.values()))
    width = max(len(line.name) for line in checks)
    print_lines(_check_lines(checks, symbols, width))


def _check_lines(checks: Sequence[Check], symbols: bool, width: int) -> Iterable[list[tuple[str, str]]]:
    for line in checks:
        symbol, word, colour = _MARKS[line.level]
        mark = symbol if symbols else word
        yield [(mark, colour), (f" {line.name:<{width}}  ", "bold"), (line.detail, "")]
        if line.fix:
            yield [(" " * (len(mark) + width + 3) + line.fix, "cyan")]


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def print_lines(lines: Iterable[Sequence[tuple[str, str]]]) -> None:
    """Lines of styled pieces; rich leaves the styles out where there is no terminal or NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)
