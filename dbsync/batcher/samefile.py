"""A database that is a file has a name, and the name may come to mean another file, or none, while it is written.

The operating system goes on with the file that was opened, wherever it is by then, and a database that is opened anew
makes an empty one where there is none. Either would take batches that nobody finds again.
"""

from __future__ import annotations

from pathlib import Path

from dbsync.errors import BatcherError


class SameFile:
    """The file at `path`, which has to stay the one it was when it was first opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[int, int] | None = None

    def opened(self) -> None:
        """It was opened; the first time tells which one it is."""
        if self._known is None:
            self._known = self._found()

    def forget(self) -> None:
        """Whichever it is when it is opened the next time."""
        self._known = None

    def check(self) -> None:
        """Before it is opened anew, and before a batch counts."""
        if self._known is None:
            return
        found = self._found()
        if found is None:
            raise BatcherError(
                f"The file {self._path} was moved or deleted while dbsync kept it in step.",
                "Put it back: dbsync goes on when it is there.",
            )
        if found != self._known:
            raise BatcherError(
                f"The file {self._path} is another one than dbsync has kept in step so far.",
                "Put the right one there, and start dbsync again: it goes on where that one ends.",
                retryable=False,
            )

    def _found(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino
