"""What targets that append have in common: a journal, whole batches in it, and from time to time a file for readers.

A batch goes to the end of the journal. It counts from the moment `_dbsync/state.json` is replaced by one that names the
journal, how much of it holds, and the position in the log; before that all of the batch is on the disk. So whatever a
crash leaves, the next start cuts the journal off where it holds, and position and data agree: each batch is in the
folder exactly once. When a journal is large or old enough it becomes what readers see.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.folder import TargetFolder, checked_folder, folder_errors, sync, sync_folder
from dbsync.errors import BatcherError
from dbsync.lsn import LSN

logger = logging.getLogger(__name__)

ROTATE_BYTES = 64 * 1024 * 1024
ROTATE_SECONDS = 60.0
_STATE = "state.json"


class JournalBatcher(Batcher):
    """Appends to the journal; a subclass says what, and how a journal becomes a file for readers."""

    appends = True
    # Rows of a table without a key are welcome too: nothing has to be found again.

    def __init__(
        self, folder: str | Path, *, rotate_bytes: int = ROTATE_BYTES, rotate_seconds: float = ROTATE_SECONDS
    ) -> None:
        self.path = checked_folder(Path(folder))
        self._folder = TargetFolder(self.path)
        self._rotate_bytes = rotate_bytes
        self._rotate_seconds = rotate_seconds
        self._lock = threading.Lock()  # the timer finishes journals too
        self._timer: threading.Timer | None = None
        self._state: dict[str, Any] = {}
        self._part: IO[bytes] | None = None
        self._number = 0  # of the journal
        self._began = 0.0
        self._batch: BatchInfo | None = None
        self._rows = 0  # how many there are, over all files

    @abstractmethod
    def _publish(self, part: Path, number: int) -> None:
        """Make of the whole journal what readers see, and remove it. Called again where a crash came between."""

    def position(self) -> LSN | None:
        with self._lock:
            self._close_part()
            self._state = {}
            self._open()
        found = self._state["positions"].get(self.log_name)
        return None if found is None else LSN(found)

    def begin(self, batch: BatchInfo) -> None:
        with self._lock:
            self._open()
            self._cut()  # first: what a batch that failed has left here must not come before readers
            if self._is_due():
                self._finish()
            self._rows = self._state["rows"]
            self._batch = batch

    def commit(self, batch: BatchInfo) -> None:
        with self._lock:
            self._commit(batch)
            self._batch = None
            if self._is_due():
                self._finish_later_if_it_fails()

    def close(self) -> None:
        """Throw away an unfinished batch, give readers the rest, and let go of the folder."""
        with self._lock:
            self._batch = None
            try:
                if self._part is not None:
                    self._cut()
                    self._finish()
            finally:
                self._close_part()
                self._folder.close()
                self._state = {}

    @property
    def _lsn(self) -> LSN:
        return self._in_batch.last_lsn

    @property
    def _in_batch(self) -> BatchInfo:
        if self._batch is None:
            raise BatcherError(
                f"{type(self).__name__} was called outside a batch.", "Call begin first.", retryable=False
            )
        return self._batch

    def _append(self, data: Any) -> None:
        """Write to the end of the journal. Unbuffered: what a full disk refuses must not come later."""
        with folder_errors(self.path):
            if self._part is None:
                self._number = self._state["journal"] + 1
                self._part = self._part_path(self._number).open("wb", buffering=0)
                self._began = time.monotonic()
            left = memoryview(data).cast("B")
            while left:
                left = left[self._part.write(left) :]

    def _commit(self, batch: BatchInfo) -> None:
        positions = self._state["positions"]
        last = max(batch.last_lsn, LSN(positions.get(self.log_name, 0)))
        changed = {"positions": {**positions, self.log_name: str(last)}, "rows": self._rows}
        if self._part is not None:
            with folder_errors(self.path):
                sync(self._part)
                sync_folder(self._folder.ours)
                changed |= {"journal": self._number, "bytes": self._part.tell()}
        state = {**self._state, **changed, **self._more_state()}
        try:
            self._folder.store(_STATE, state)
        except BatcherError as error:
            if not error.retryable:  # the batch may count: nothing must be touched before the state was read again
                self._close_part()
                self._state = {}
            raise
        self._state = state
        if self._part is not None and self._timer is None:
            self._wait(self._rotate_seconds)

    def _more_state(self) -> dict[str, Any]:
        """What a subclass has to remember, as of this batch."""
        return {}

    def _open(self) -> None:
        """Take the folder, with what a crash left in it."""
        if self._state:
            return
        self._folder.open()
        state = {"positions": {}, "journal": 0, "bytes": 0, "rows": 0, **self._folder.load(_STATE)}
        held = self._part_path(state["journal"])
        with folder_errors(self.path):
            for part in self._folder.ours.glob("*.part"):
                if part != held:
                    part.unlink()
            if held.exists():
                with held.open("r+b") as file:
                    file.truncate(state["bytes"])
                self._publish(held, state["journal"])
        self._state = state

    def _cut(self) -> None:
        """Take back what was written and not committed."""
        if self._part is None:
            return
        with folder_errors(self.path):
            if self._number != self._state["journal"]:
                self._close_part()
                self._part_path(self._number).unlink(missing_ok=True)
            else:
                self._part.seek(self._state["bytes"])
                self._part.truncate()

    def _is_due(self) -> bool:
        return self._part is not None and (
            self._part.tell() >= self._rotate_bytes or time.monotonic() >= self._began + self._rotate_seconds
        )

    def _finish(self) -> None:
        if self._part is None:
            return
        part = self._part_path(self._number)
        with folder_errors(self.path):
            if part.exists():  # or the last try came as far as that
                self._publish(part, self._number)
        self._close_part()

    def _finish_later_if_it_fails(self) -> None:
        # The batch is in the journal and counts: what fails here must not bring it again.
        try:
            self._finish()
        except BatcherError as error:
            logger.warning("%s It is tried again.", error)
            self._wait(self._rotate_seconds)

    def _wait(self, seconds: float) -> None:
        """Finish the journal also when no batch comes any more."""
        self._stop_waiting()
        self._timer = threading.Timer(seconds, self._over_time)
        self._timer.daemon = True
        self._timer.start()

    def _over_time(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread() and self._batch is None:
                self._finish_later_if_it_fails()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_part(self) -> None:
        self._stop_waiting()
        part, self._part = self._part, None
        if part is not None:
            with suppress(OSError):
                part.close()

    def _part_path(self, number: int) -> Path:
        return self._folder.ours / f"{number:012}.part"


def renamed(new: Path, final: Path) -> None:
    """Give a file that is on the disk the name that readers look for."""
    new.replace(final)
    sync_folder(final.parent)
