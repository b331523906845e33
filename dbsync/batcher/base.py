"""What users subclass to keep a target in step: final upserts and deletes, a batch at a time.

In a batch: truncates, then deletes, then upserts; no id is both deleted and upserted. `commit` is called when all of
it has been handed over, and only when it has returned is the slot acknowledged. A batch that failed is handed over
again from its `begin`, and after a crash the changes since the last acknowledged batch come again in new batches, so
every call must bear being repeated. A large batch comes in several calls a type.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbsync.lsn import LSN
from dbsync.relation import Relation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Which batch this is. `last_lsn` is what `position()` should give once it is committed."""

    number: int
    first_lsn: LSN
    last_lsn: LSN
    relations: Mapping[str, Relation] = field(default_factory=dict)  # by document type, for types that mirror a table


class Batcher:
    """The target. Override what it can do; `batch_upsert` and `batch_delete` must be there."""

    distributed = False
    """True: the Batcher is pickled and called on the executors, a partition at a time; begin, commit, position and
    batch_truncate are still called in the process that reads."""

    accepts_partial = False
    """True: a document may lack columns that did not change, so the target must merge it into what it has."""

    log_name = ""
    """Which log the positions belong to: set before `position` is asked. A target that several dbsyncs write to keeps
    a position under each of these names."""

    appends = False
    """True: rows of tables without a key may come as documents with an id made from their place in the log."""

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define batch_upsert(doctype, docs)")

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define batch_delete(doctype, ids)")

    def batch_truncate(self, doctype: str) -> None:
        """All documents of the type are gone; called before this batch's deletes and upserts of the type."""
        logger.warning(
            "%s was truncated in the source, but %s does not define batch_truncate: its old documents stay.",
            doctype,
            type(self).__name__,
        )

    def begin(self, batch: BatchInfo) -> None:
        """Before the first call of a batch."""

    def commit(self, batch: BatchInfo) -> None:
        """After the last call of a batch; what it raises keeps the batch from being acknowledged."""

    def position(self) -> LSN | None:
        """The `last_lsn` of the newest batch the target holds, if the target stores it; asked at every start."""
        return None

    def close(self) -> None:
        """dbsync has stopped: let go of files and connections. The next `begin` may open them again."""
