"""Names for what is sent in a batch, by which a receiver knows what it has already.

The same content has the same name each time the same batch is tried, and another name in every other batch. Names made
of content and LSN would not do: after a crash the log is cut into other batches, and some of them may be what they were
before. A receiver that drops those and takes the others would put an older state of a record after a newer one.
"""

from __future__ import annotations

import hashlib
import uuid

from dbsync.batcher.base import BatchInfo
from dbsync.lsn import LSN


class BatchKey:
    """Told of each attempt at a batch by `begin`; travels to the executors with the Batcher that has it."""

    def __init__(self) -> None:
        self._batch: tuple[int, LSN, LSN] | None = None
        self._salt = uuid.uuid4().bytes

    def begin(self, batch: BatchInfo) -> None:
        attempted = (batch.number, batch.first_lsn, batch.last_lsn)
        if attempted != self._batch:
            self._batch, self._salt = attempted, uuid.uuid4().bytes

    def name(self, content: bytes) -> str:
        return hashlib.sha256(self._salt + content).hexdigest()
