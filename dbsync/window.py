"""Watermark windows: which re-read rows count, and where in the log they stand.

A window is a low mark, a read under one snapshot, and a high mark. Its rows stand at the low mark: what the log holds
for their keys before it is older, what it holds after it is newer. Rows are released by the high mark, and only when
nothing can have made them stale or incomplete:

- The marks are ours and each came once, low first, and the reading was over before the high mark was written.
- No transaction that changed the table stands in the log before the low mark and is invisible to the snapshot. A commit
  is in the log before others can see it, so such a transaction's change would lose to the older row. `Unseen` remembers
  commits until a snapshot shows them; the slot must not be acknowledged past the first of them (`hold_lsn`), so that
  after a restart they come again and the memory needs no storage.
- The table was not rewritten, truncated or altered meanwhile; whoever reads says so with `void`.

Everything else is void, is thrown away, and is read again. Rows that a batch has already cannot be taken out of it.
They are right where they stand, but once they are read again the same keys come twice: `Window.reading` tells.

Nothing here does I/O or knows the time. What was read and is of no more use is `dropped`, for whoever can delete it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dbsync.lsn import LSN

XID_SPACE = 1 << 32
LOW, HIGH = "low", "high"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a transaction can see, as pg_current_snapshot() tells it: 64-bit transaction ids."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Whether a transaction known to have committed is visible."""
        return xid < self.xmax and xid not in self.running


def widen(xid: int, near: int) -> int:
    """The 64-bit id of a 32-bit one that lies within half the id space of `near`."""
    candidate = near - near % XID_SPACE + xid
    if candidate > near + XID_SPACE // 2:
        return candidate - XID_SPACE if candidate >= XID_SPACE else candidate
    return candidate + XID_SPACE if candidate < near - XID_SPACE // 2 else candidate


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction seen in the log, with the tables it changed."""

    xid: int  # 32 bits, as pgoutput has it
    lsn: LSN  # of the commit
    relations: frozenset[int]

    def seen_by(self, snapshot: Snapshot) -> bool:
        return snapshot.sees(widen(self.xid, snapshot.xmax))


class Unseen:
    """Commits that stand in the log and are not yet known to be visible to everybody."""

    def __init__(self) -> None:
        self._commits: dict[int, Commit] = {}

    def __len__(self) -> int:
        return len(self._commits)

    def remember(self, commit: Commit) -> None:
        self._commits[commit.xid] = commit

    def prune(self, now: Snapshot, waiting: Iterable[Window]) -> None:
        """Forget what is visible now, but for what a window that waits to be released was read without."""
        windows = list(waiting)
        self._commits = {
            xid: commit
            for xid, commit in self._commits.items()
            if not commit.seen_by(now) or any(window.lacks(commit) for window in windows)
        }

    def hidden_from(self, snapshot: Snapshot, relation: int, before: LSN) -> Commit | None:
        """A commit that changed the relation, stands before that place, and is invisible to the snapshot."""
        for commit in self._commits.values():
            if relation in commit.relations and commit.lsn < before and not commit.seen_by(snapshot):
                return commit
        return None

    @property
    def hold_lsn(self) -> LSN | None:
        """The place up to which the slot may be acknowledged; None where nothing holds it."""
        return min((commit.lsn for commit in self._commits.values()), default=None)


class State(Enum):
    EXPECTED = "expected"  # its low mark is not yet read from the log
    OPEN = "open"  # between its marks
    RELEASED = "released"  # its rows are in a batch
    APPLIED = "applied"  # and that batch is in the target
    VOID = "void"  # to be read again


@dataclass(slots=True)
class Window:
    """One window, from before its low mark is written until its rows are applied or thrown away."""

    id: str
    relation: int
    content: Any = None  # what was read; this module only passes it on
    snapshot: Snapshot | None = None
    state: State = State.EXPECTED
    low: tuple[int, int] | None = None  # commit LSN and ordinal
    reason: str | None = None  # why it is void
    is_read: bool = False
    superseded: int = 0  # rows that lost to a newer change
    reading: int = 0  # windows of one refresh and one reading never hold the same key
    is_placed: bool = False  # a batch has its rows

    def lacks(self, commit: Commit) -> bool:
        """Whether its rows may have to be thrown away for this commit's sake.

        One behind the low mark never voids it; where that mark is not read yet, all there are may stand before it.
        """
        if self.snapshot is None or self.relation not in commit.relations:
            return False
        return (self.low is None or commit.lsn < self.low[0]) and not commit.seen_by(self.snapshot)


@dataclass(slots=True)
class Windows:
    """All windows that are on their way, fed with marks and commits in log order."""

    unseen: Unseen = field(default_factory=Unseen)
    dropped: list[Any] = field(default_factory=list)  # contents that nobody needs any more
    _windows: dict[str, Window] = field(default_factory=dict)
    _left: dict[str, Any] = field(default_factory=dict)  # contents that only a batch still needs
    _reading: int = 0

    def expect(self, id: str, relation: int) -> Window:
        """Before the low mark is written."""
        window = self._windows[id] = Window(id, relation, reading=self._reading)
        return window

    def see(self, id: str, snapshot: Snapshot) -> None:
        """The rows are being read under this snapshot. Must be told before any later snapshot is given to `prune`."""
        self._windows[id].snapshot = snapshot

    def read(self, id: str, content: Any) -> None:
        """The rows are all there; before the high mark is written."""
        window = self._windows[id]
        window.content = content
        window.is_read = True
        if window.state is State.VOID:
            self._let_go(window)

    def place(self, window: Window) -> Any:
        """A batch gets the rows; it keeps them, whatever becomes of the window."""
        window.is_placed = True
        return window.content

    def void(self, id: str, reason: str) -> None:
        """What was read does not count."""
        if window := self._windows.get(id):
            self._void(window, reason)

    def forget(self, id: str) -> None:
        """Nobody waits for the window any more; its marks are foreign from now on."""
        if window := self._windows.pop(id, None):
            self._let_go(window)

    def mark(self, id: str, mark: str, position: tuple[int, int]) -> Window | None:
        """A mark stands in the log: the window it belongs to, with its state after that; None for a foreign mark."""
        window = self._windows.get(id)
        if window is None or window.state is State.VOID:
            return window
        if mark == LOW and window.state is State.EXPECTED:
            window.state = State.OPEN
            window.low = position
        elif mark == HIGH and window.state is State.OPEN:
            self._close(window)
        else:
            self._void(window, f"its {mark} mark came out of order")
        return window

    def interrupt(self, reason: str) -> None:
        """The log cannot be cut where it must be while these are open: they are read again."""
        for window in self.open:
            self._void(window, reason)

    def commit(self, commit: Commit) -> None:
        """A transaction stands in the log."""
        if commit.relations:
            self.unseen.remember(commit)

    def prune(self, now: Snapshot) -> None:
        self.unseen.prune(now, self._unsettled())

    def applied(self, superseded: Mapping[str, int]) -> None:
        """The batch with these windows is in the target; of each, so many rows lost to a newer change."""
        for id, rows in superseded.items():
            self._left.pop(id, None)
            if (window := self._windows.get(id)) and window.state is State.RELEASED:
                window.state, window.superseded, window.content = State.APPLIED, rows, None

    def replay(self) -> None:
        """The log is read again from what was acknowledged: marks that were read and not applied come once more.

        No batch is left by then that could have rows of a window.
        """
        for window in self._unsettled():
            window.state, window.low, window.is_placed = State.EXPECTED, None, False
        self.dropped += self._left.values()
        self._left.clear()

    def check(self, window: Window) -> bool:
        """Whether the rows of a window that was read count: no commit before its low mark is hidden from them."""
        assert window.snapshot is not None
        assert window.low is not None
        hidden = self.unseen.hidden_from(window.snapshot, window.relation, LSN(window.low[0]))
        if hidden:
            self._void(
                window,
                f"transaction {hidden.xid} is in the log at {hidden.lsn}, but was not yet visible when they were read",
            )
        return hidden is None

    @property
    def open(self) -> list[Window]:
        return [window for window in self._windows.values() if window.state is State.OPEN]

    @property
    def all(self) -> Mapping[str, Window]:
        return self._windows

    def _unsettled(self) -> list[Window]:
        return [w for w in self._windows.values() if w.state in (State.EXPECTED, State.OPEN, State.RELEASED)]

    def _close(self, window: Window) -> None:
        if not window.is_read or window.snapshot is None:
            return self._void(window, "its high mark came before it was read")
        if self.check(window):
            window.state = State.RELEASED
            self.place(window)
        return None

    def _void(self, window: Window, reason: str) -> None:
        window.state = State.VOID
        window.reason = window.reason or reason
        self._let_go(window)

    def _let_go(self, window: Window) -> None:
        """Nobody asks the window for its rows any more. Those a batch has may be read again beside themselves."""
        if window.content is None:
            return
        if window.is_placed:
            self._left[window.id] = window.content
            self._reading += 1
        else:
            self.dropped.append(window.content)
        window.content = None
