"""Folders of this process alone, which vanish with it.

A folder is locked as long as its process lives. One that a crash left behind is therefore recognised by its unlocked
lock file, and removed by the next process that makes one beside it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dbsync.errors import ConfigError, DbsyncError

_TRIES = 5


class PrivateFolder:
    """A folder below `parent`, or below one of this user's in the temporary folder. Made when it is first asked for."""

    def __init__(self, parent: Path | None = None) -> None:
        self._is_default = parent is None
        self._parent = parent or Path(tempfile.gettempdir()) / f"dbsync-{os.getuid()}"
        self._path: Path | None = None
        self._lock: IO[bytes] | None = None
        self._making = threading.Lock()

    @property
    def path(self) -> Path:
        with self._making:
            if self._path is None:
                with disk_errors(self._parent):
                    self._path = self._make()
            return self._path

    def close(self) -> None:
        """Remove the folder, and the parent in the temporary folder when it was the last one there."""
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
            if self._is_default:
                with suppress(OSError):
                    self._parent.rmdir()
        if self._lock:
            self._lock.close()
            self._lock = None

    def _make(self) -> Path:
        for _ in range(_TRIES):
            self._parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._distrust_others()
            self._remove_abandoned()
            with suppress(FileNotFoundError):  # the last other one just took the parent with it
                return self._make_locked()
        raise FileNotFoundError(f"{self._parent} does not stay")

    def _make_locked(self) -> Path:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        # Under another name until it is locked, or it could be taken for an abandoned one.
        unlocked = self._parent / f"new-{name}"
        unlocked.mkdir(mode=0o700)
        self._lock = (unlocked / "lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return unlocked.rename(self._parent / f"run-{name}")

    def _distrust_others(self) -> None:
        # What lies in a spool is unpickled, and the name of the default parent can be guessed.
        if self._is_default and self._parent.stat().st_uid != os.getuid():
            raise DbsyncError(
                f"The folder {self._parent} belongs to somebody else.",
                "Remove it, or name another folder with DBSYNC_SPOOL_DIR or TMPDIR.",
            )

    def _remove_abandoned(self) -> None:
        for folder in self._parent.glob("run-*-*"):
            # Locked: its process lives. Gone: somebody else removed it.
            with suppress(OSError), (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say which folder could not be used, and how to choose another."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = DbsyncError if is_full or error.errno == errno.EIO else ConfigError
        raise kind(
            f"The folder {path} cannot be used: {error.strerror or error}.",
            f"{'Free some space there' if is_full else 'See that dbsync may write there'},"
            " or name another folder with DBSYNC_SPOOL_DIR or TMPDIR.",
        ) from error
