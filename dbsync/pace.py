"""How fast a refresh reads: as fast as it can, unless the source is at work.

Changes that come while a window is open wait until it closes, and what reads a table takes from the source what others
need. So while transactions go on, windows are small, only one is on its way, and after each comes a rest.
"""

from __future__ import annotations

import time

_BUSY_COMMITS_A_SECOND = 20.0
_LOOK_SECONDS = 0.5
_ROWS_WHEN_BUSY = 20_000
_BYTES_WHEN_BUSY = 4 * 1024 * 1024
_ROWS_A_READER = 10_000
_WINDOWS_ON_THE_WAY = 4


class Pace:
    """Told how many transactions the log has shown, and what each window came to. `rest` is in times of the reading."""

    def __init__(self, rest: float) -> None:
        self._rest = rest
        self._looked, self._commits = time.monotonic(), 0
        self._not_before = 0.0
        self._row_bytes = 0.0
        self.is_busy = False

    def look(self, commits: int) -> None:
        """`commits` are those of others, since dbsync reads."""
        seconds = time.monotonic() - self._looked
        if seconds >= _LOOK_SECONDS:
            self.is_busy = (commits - self._commits) / seconds >= _BUSY_COMMITS_A_SECOND
            self._looked, self._commits = time.monotonic(), commits

    def may_open(self, on_the_way: int) -> bool:
        """Whether another window may be opened beside so many."""
        if not self.is_busy:
            return on_the_way < _WINDOWS_ON_THE_WAY
        return on_the_way == 0 and time.monotonic() >= self._not_before

    def rows(self, most: int) -> int:
        """How many the next window is to have."""
        if not self.is_busy:
            return most
        fitting = int(_BYTES_WHEN_BUSY / self._row_bytes) if self._row_bytes else _ROWS_WHEN_BUSY
        return max(1, min(most, _ROWS_WHEN_BUSY, fitting))

    def readers(self, rows: int, most: int) -> int:
        """How many are to read so many rows."""
        return max(1, min(most, rows // _ROWS_A_READER)) if self.is_busy else most

    def read(self, seconds: float, rows: int, size_bytes: int) -> None:
        """A window was read."""
        if rows:
            self._row_bytes = size_bytes / rows
        self._not_before = time.monotonic() + self._rest * seconds
