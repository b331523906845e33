"""How far a refresh has come, on stderr: on a terminal a bar, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dbsync.cli_show import count, say
from dbsync.requests import QUEUED, Refresh

_LINE_SECONDS = 5.0


class View(AbstractContextManager["View"], Protocol):
    def show(self, refresh: Refresh) -> None: ...


def view(console: Console, *, bar: bool) -> View:
    return Bar(console) if bar and console.is_terminal else Lines()


class Pace:
    """Rows a second since we began to look: what an earlier run of a refresh did says nothing of this one."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def words(self, refresh: Refresh, now: float) -> str:
        if refresh.state == QUEUED:
            return "waiting for its turn"
        if self._began is None:
            self._began = (now, refresh.rows)
        since, before = self._began
        done = f"{count(refresh.rows, 'row')} in {count(refresh.chunks, 'chunk')}"
        if refresh.rows <= before or now <= since:
            return done
        rate = (refresh.rows - before) / (now - since)
        left = max((refresh.estimated_rows or 0) - refresh.rows, 0) / rate
        remaining = f", about {duration(left)} left" if left else ""
        return f"{done}, {rate:,.0f} rows/s{remaining}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Lines:
    """For a log: nothing while it is quick."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._next = time.monotonic() + _LINE_SECONDS

    def show(self, refresh: Refresh) -> None:
        now = time.monotonic()
        words = self._pace.words(refresh, now)
        if now >= self._next:
            self._next = now + _LINE_SECONDS
            say(f"refresh {refresh.id}: {words}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Bar:
    """For a person; it goes away when the refresh is over."""

    def __init__(self, console: Console) -> None:
        self._pace = Pace()
        columns = TextColumn("refresh"), BarColumn(), TextColumn("{task.description}")
        # What the Batcher writes to stdout is data, and stays there.
        self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task: TaskID = self._progress.add_task("", total=None)

    def show(self, refresh: Refresh) -> None:
        # Statistics may be old: there may be more rows than expected, and a bar must not be full before the end.
        total = max(refresh.estimated_rows or 0, refresh.rows + 1) if refresh.rows else None
        words = self._pace.words(refresh, time.monotonic())
        self._progress.update(self._task, total=total, completed=refresh.rows, description=words)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
