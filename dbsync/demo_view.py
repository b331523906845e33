"""What the demo shows while it runs: on a terminal a panel that changes, elsewhere a line every few seconds.

It looks ten times a second, often enough to see a window open and close. Every refresh is told of when it has ended.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from psycopg import sql
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table as Grid

from dbsync.batcher.duckdb import DuckDBBatcher
from dbsync.cli_show import count
from dbsync.connection import connect
from dbsync.requests import INITIAL, Refresh, RefreshResult, Requests
from dbsync.syncer import Status, Syncer

_LOOK_SECONDS = 0.1
_LINE_SECONDS = 5.0
_RATE_SECONDS = 5.0
_STRIP_LOOKS = 50
_MOST_REFRESHES = 1000


class View:
    """Shows a Syncer at work. `tables` is how many are to be copied at first."""

    def __init__(self, syncer: Syncer, batcher: DuckDBBatcher, tables: int, console: Console) -> None:
        self._syncer = syncer
        self._batcher = batcher
        self._tables = tables
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._stack = ExitStack()
        self._refreshes: list[Refresh] = []
        self._told: set[int] = set()
        self._changes: deque[tuple[float, int]] = deque()
        self._open: deque[int] = deque([0] * _STRIP_LOOKS, _STRIP_LOOKS)
        self._next_line = time.monotonic() + _LINE_SECONDS

    def __enter__(self) -> Self:
        self._requests = Requests(self._stack.enter_context(connect(self._syncer.settings)), self._syncer.settings)
        if self._live:
            self._stack.enter_context(_log_above(self._live))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def closed_windows(self) -> int:
        return sum(refresh.chunks for refresh in self._refreshes)

    @property
    def first_copy_is_over(self) -> bool:
        copies = self._first_copies()
        return len(copies) >= self._tables and all(copy.is_over for copy in copies)

    def show_until(self, phase: str, over: Callable[[], bool]) -> None:
        """Until it is over, or dbsync itself is."""
        while self._syncer.running and not over():
            self._look(phase)
            time.sleep(_LOOK_SECONDS)

    def show_last(self, phase: str) -> None:
        """How it all ended, whenever the last line was."""
        self._next_line = 0.0
        self._look(phase)

    def tell(self, what: str, query: str, result: RefreshResult) -> None:
        """Of a refresh that has ended; from any thread."""
        windows = count(result.chunks, "window") + (f" and {result.voided:,} void" if result.voided else "")
        self._say(
            f"{what} in {result.seconds:.1f} s, {count(result.rows, 'row')} in {windows},"
            f" {result.superseded:,} overtaken by newer changes: {query}"
        )

    def _look(self, phase: str) -> None:
        status = self._syncer.status()
        self._open.append(status.open_windows)
        self._refreshes = self._requests.recent(_MOST_REFRESHES)
        self._tell_of_copies()
        rate = self._rate(status.totals.changes)
        if self._live is None and time.monotonic() < self._next_line:
            return
        facts = {"now": phase, **_stream_facts(status, rate), **self._window_facts(status)}
        facts["target"] = count(_target_rows(self._batcher), "row")
        if self._live:
            self._live.update(self._panel(facts), refresh=True)
        else:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._say("; ".join(f"{name} {value}" for name, value in facts.items()))

    def _tell_of_copies(self) -> None:
        for copy in self._first_copies():
            if copy.is_over and copy.id not in self._told:
                self._told.add(copy.id)
                self.tell(f"First copy {copy.state}", copy.query, copy.result)

    def _window_facts(self, status: Status) -> dict[str, str]:
        copies, all = self._first_copies(), self._refreshes
        expected = sum(copy.rows if copy.is_over else max(copy.estimated_rows or 0, copy.rows) for copy in copies)
        rows = sum(copy.rows for copy in copies)
        return {
            "first copy": f"{sum(copy.is_over for copy in copies)} of {count(self._tables, 'table')}, "
            + (f"{rows:,} rows" if self.first_copy_is_over else f"{rows:,} of about {expected:,} rows"),
            "windows": f"{status.open_windows} open now, {self.closed_windows:,} closed,"
            f" {sum(one.voided for one in all):,} void and read again",
            "re-read": f"{count(sum(one.rows for one in all), 'row')},"
            f" {sum(one.superseded for one in all):,} of them overtaken by newer changes",
        }

    def _first_copies(self) -> list[Refresh]:
        return [refresh for refresh in self._refreshes if refresh.kind == INITIAL]

    def _rate(self, changes: int) -> float:
        """Changes a second lately: batches come in lumps."""
        now = time.monotonic()
        self._changes.append((now, changes))
        while len(self._changes) > 2 and self._changes[1][0] < now - _RATE_SECONDS:
            self._changes.popleft()
        since, before = self._changes[0]
        return (changes - before) / (now - since) if now > since else 0.0

    def _panel(self, facts: dict[str, str]) -> Panel:
        grid = Grid.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(f"[bold]{name}", value)
            if name == "windows":
                grid.add_row("", "".join("█" if windows else "·" for windows in self._open))
        return Panel(grid, title="PostgreSQL → Spark → DuckDB", expand=False)

    def _say(self, words: str) -> None:
        self._console.print(escape(words), highlight=False, soft_wrap=True)


@contextmanager
def _log_above(live: Live) -> Iterator[None]:
    """Start the panel; what goes to the log meanwhile stands above it, not across it."""
    before = sys.stderr
    handlers = [h for h in logging.root.handlers if isinstance(h, logging.StreamHandler) and h.stream is before]
    with live:
        for handler in handlers:
            handler.setStream(sys.stderr)
        try:
            yield
        finally:
            for handler in handlers:
                handler.setStream(before)


def _stream_facts(status: Status, rate: float) -> dict[str, str]:
    totals, last = status.totals, status.last_batch
    facts = {
        "changes": f"{totals.changes:,} in {totals.batches:,} batches, {rate:,.0f} a second",
        "reduced to": f"{count(totals.upserts, 'upsert')} and {count(totals.deletes, 'delete')}",
    }
    if last:
        facts["last batch"] = (
            f"{count(last.changes, 'change')} to {count(last.upserts, 'upsert')} and {count(last.deletes, 'delete')},"
            f" in {last.seconds:.2f} s"
        )
    facts["lag"] = f"{(status.lag_bytes or 0) / 1024**2:,.1f} MB, {status.lag_seconds or 0:.1f} s"
    return facts


def _target_rows(batcher: DuckDBBatcher) -> int:
    with batcher.cursor() as cursor:
        there = cursor.execute(
            "SELECT database_name, schema_name, table_name FROM duckdb_tables() WHERE schema_name = 'shop'"
        ).fetchall()
        tables = [sql.Identifier(*names).as_string(None) for names in there]
        return sum(cursor.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in tables)
