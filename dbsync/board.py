"""The windows on their way, shared by the thread that reads the log and the one that re-reads tables.

A lock around `window.Windows`, and the two things that need one: waiting for what the other thread does, and taking a
snapshot so that it cannot overtake another one. Commits are forgotten by a snapshot of now; rows are read under a
snapshot of their own. Both are taken here, under the lock, so of any two it is known which is the older.

What a window has read lies on disk, and is removed from there as soon as neither the window nor a batch needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from dbsync.lsn import LSN
from dbsync.spool import Position, WindowRows
from dbsync.window import Commit, Snapshot, State, Window, Windows

TakeSnapshot = Callable[[], Snapshot]


class WindowBoard:
    def __init__(self) -> None:
        self._windows = Windows()
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self.commits = 0  # so far, of transactions that changed a table

    # For the thread that re-reads.

    def expect(self, id: str, relation: int) -> int:
        """Before the low mark is written; which reading of its refresh the window is part of."""
        with self._changed:
            return self._windows.expect(id, relation).reading

    def snapshot(self, id: str, take: TakeSnapshot) -> None:
        """Take the snapshot the window is read under."""
        with self._changed:
            self._windows.see(id, take())

    def read(self, id: str, rows: WindowRows) -> None:
        with self._telling() as windows:
            windows.read(id, rows)

    def void(self, id: str, reason: str) -> None:
        with self._telling() as windows:
            windows.void(id, reason)

    def forget(self, id: str) -> None:
        with self._telling() as windows:
            windows.forget(id)

    def window(self, id: str) -> Window:
        with self._changed:
            return self._windows.all[id]

    def wait(self, until: Callable[[], object], seconds: float) -> None:
        """Until something here changed such that the condition holds, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: until() or self._closed, seconds)

    # For the thread that reads the log.

    def mark(self, id: str, mark: str, position: Position) -> Window | None:
        """The window as the mark leaves it: the other thread may void it, or forget it, at any moment."""
        with self._telling() as windows:
            window = windows.mark(id, mark, position)
            return window and replace(window)

    def wait_until_read(self, id: str) -> WindowRows | None:
        """For a window whose rows go into the batch at its low mark: wait for them. None when they do not count."""
        with self._telling() as windows:
            window = windows.all.get(id)
            if window is None:
                return None
            self._changed.wait_for(lambda: window.is_read or window.state is State.VOID or self._closed)
            counts = window.state is not State.VOID and window.is_read and windows.check(window)
            rows: WindowRows | None = windows.place(window) if counts else None
            return rows

    def interrupt(self, reason: str) -> None:
        with self._telling() as windows:
            windows.interrupt(reason)

    def commit(self, commit: Commit) -> None:
        with self._changed:
            self.commits += bool(commit.relations)
            self._windows.commit(commit)

    def applied(self, superseded: Mapping[str, int]) -> None:
        with self._telling() as windows:
            windows.applied(superseded)

    def replay(self) -> None:
        with self._telling() as windows:
            windows.replay()

    def prune(self, take: TakeSnapshot) -> LSN | None:
        """Forget commits that everybody sees; up to where the slot may be acknowledged, if something holds it."""
        with self._changed:
            if len(self._windows.unseen):
                self._windows.prune(take())
            return self._windows.unseen.hold_lsn

    def hidden_now(self, take: TakeSnapshot, relation: int, before: LSN) -> Commit | None:
        """Take a snapshot; a commit of the log before that place that it does not see, if there is one."""
        with self._changed:
            return self._windows.unseen.hidden_from(take(), relation, before)

    @property
    def unseen(self) -> int:
        return len(self._windows.unseen)

    @property
    def open(self) -> int:
        with self._changed:
            return len(self._windows.open)

    def close(self) -> None:
        """Nobody reads the log any more; who waits is let go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def _telling(self) -> Iterator[Windows]:
        """Something happens to windows: who waits hears of it, and rows that are of no more use are removed."""
        with self._changed:
            yield self._windows
            self._changed.notify_all()
            while self._windows.dropped:
                self._windows.dropped.pop().discard()
