"""The windows on their way, shared by the thread that reads the log and the one that re-reads tables.

A lock around `window.Windows`, and the two things that need one: waiting for what the other thread does, and taking a
snapshot so that it cannot overtake another one. Commits are forgotten by a snapshot of now; rows are read under a
snapshot of their own. Both are taken here, under the lock, so of any two it is known which is the older.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

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

    def expect(self, id: str, relation: int) -> None:
        with self._changed:
            self._windows.expect(id, relation)

    def snapshot(self, id: str, take: TakeSnapshot) -> None:
        """Take the snapshot the window is read under."""
        with self._changed:
            self._windows.see(id, take())

    def read(self, id: str, rows: WindowRows) -> None:
        with self._changed:
            self._windows.read(id, rows)
            self._changed.notify_all()

    def void(self, id: str, reason: str) -> None:
        with self._changed:
            self._windows.void(id, reason)
            self._changed.notify_all()

    def forget(self, id: str) -> None:
        with self._changed:
            self._windows.forget(id)

    def window(self, id: str) -> Window:
        with self._changed:
            return self._windows.all[id]

    def wait(self, until: Callable[[], object], seconds: float) -> None:
        """Until something here changed such that the condition holds, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: until() or self._closed, seconds)

    # For the thread that reads the log.

    def mark(self, id: str, mark: str, position: Position) -> Window | None:
        with self._changed:
            window = self._windows.mark(id, mark, position)
            self._changed.notify_all()
            return window

    def wait_until_read(self, window: Window) -> bool:
        """For a window whose rows are needed at its low mark: until they are there. False when they do not count."""
        with self._changed:
            self._changed.wait_for(lambda: window.is_read or window.state is State.VOID or self._closed)
            return window.state is not State.VOID and window.is_read and self._windows.check(window)

    def interrupt(self, reason: str) -> None:
        with self._changed:
            self._windows.interrupt(reason)
            self._changed.notify_all()

    def commit(self, commit: Commit) -> None:
        with self._changed:
            self.commits += bool(commit.relations)
            self._windows.commit(commit)

    def applied(self, superseded: Mapping[str, int]) -> None:
        with self._changed:
            self._windows.applied(superseded)
            self._changed.notify_all()

    def replay(self) -> None:
        with self._changed:
            self._windows.replay()

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
