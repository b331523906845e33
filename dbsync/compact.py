"""From what happened to what is: one Spark job a batch, for all types together, and the Batcher that gets it.

Events are grouped by `(type, id)` in the order `(commit LSN, ordinal)`: by Spark SQL where they are many
(`manyevents`), in a single stage where they are few (`fewevents`). The executors open what is left and put it where the
driver gets it, or hand it to a Batcher that is `distributed` (`finish`).

Insert and delete in one batch are a delete: after a crash the target may already hold the row.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from dbsync import fewevents, manyevents
from dbsync.batcher import Batcher
from dbsync.errors import BatcherError, DbsyncError
from dbsync.finish import (
    DELETES,
    DELETES_TURN,
    FAILED,
    INCOMPLETE,
    SUPERSEDED,
    TEXTS,
    UNOPENED,
    UPSERTS_TURN,
    Chunk,
    Finish,
    batcher_error,
    columns_of,
)
from dbsync.fold import Final
from dbsync.spark import reason, why_spark_ended
from dbsync.spool import Batch

logger = logging.getLogger(__name__)

# What one call of a Batcher gets at the most.
CALL_DOCS = 50_000
CALL_BYTES = 32 * 1024 * 1024

Complete: TypeAlias = "Callable[[list[Final]], Iterable[Final]]"


@dataclass(frozen=True, slots=True)
class Applied:
    """What a batch came to."""

    upserts: int = 0
    deletes: int = 0
    truncates: int = 0
    superseded: Mapping[int, int] = field(default_factory=dict)  # re-read rows that lost to a newer event, by window


def apply(spark: SparkSession, batch: Batch, batcher: Batcher, complete: Complete) -> Applied:
    """Reduce the batch and hand it over: truncates, deletes, upserts. `complete` finds values that no event carried."""
    for doctype in batch.truncates:
        call(batcher.batch_truncate, doctype)
    if not batch.segments and not any(rows.segments for rows, _ in batch.windows):
        return Applied(truncates=len(batch.truncates))
    hand_over = _apply_on_executors if batcher.distributed else _apply_here
    try:
        done = hand_over(spark, batch, batcher, complete)
    except pickle.PicklingError as error:
        raise _unsendable(error, batcher) from error
    except (PySparkException, Py4JError, OSError, EOFError) as error:
        if ended := why_spark_ended(spark):
            raise ended from error
        raise DbsyncError(f"Spark could not compact batch {batch.number}: {reason(error)}.", retryable=True) from error
    return Applied(done.upserts, done.deletes, len(batch.truncates), dict(done.superseded))


def _unsendable(error: Exception, batcher: Batcher) -> BatcherError:
    return BatcherError(
        f"{type(batcher).__name__} is distributed, but cannot be sent to an executor: {error}.",
        "Keep connections, locks and open files out of its attributes until it runs there.",
        retryable=False,
    )


def _apply_here(spark: SparkSession, batch: Batch, batcher: Batcher, complete: Complete) -> _Handover:
    handover = _Handover(batch, batcher, complete)
    found = _chunks(spark, batch, Finish(batch, batcher.accepts_partial), [None])
    # Upserts wait until the deletes of all partitions are through: a unique value may have moved from one to the other.
    for chunk in sorted(found, key=lambda chunk: chunk.kind not in (DELETES, SUPERSEDED)):
        if chunk.kind != DELETES:
            handover.flush_deletes()
        handover.take(chunk)
    handover.flush()
    return handover


def _apply_on_executors(spark: SparkSession, batch: Batch, batcher: Batcher, complete: Complete) -> _Handover:
    handover = _Handover(batch, batcher, complete)
    turns = [DELETES_TURN, UPSERTS_TURN] if batch.deletes else [UPSERTS_TURN]
    for chunk in _chunks(spark, batch, Finish(batch, batcher.accepts_partial, batcher), turns):
        handover.take_report(chunk)
    handover.flush()
    return handover


def _chunks(spark: SparkSession, batch: Batch, finish: Finish, turns: Sequence[str | None]) -> Iterable[Chunk]:
    chunks = fewevents.chunks if fewevents.is_handful(batch) else manyevents.chunks
    return chunks(spark, batch, finish, turns)


class _Handover:
    """Gathers chunks to calls of the Batcher: one a type while they are small, several when they are not."""

    def __init__(self, batch: Batch, batcher: Batcher, complete: Complete) -> None:
        self._relations = batch.relations
        self._layouts = batch.layouts
        self._batcher = batcher
        self._complete = complete
        self._ids: dict[str, list[str]] = {}
        self._docs: dict[str, dict[str, Any]] = {}
        self._bytes = 0
        self.upserts = 0
        self.deletes = 0
        self.superseded: Counter[int] = Counter()

    def take(self, chunk: Chunk) -> None:
        content = chunk.content()
        if chunk.kind == SUPERSEDED:
            self.superseded.update(content)
        elif chunk.kind == DELETES:
            self._ids.setdefault(chunk.type, []).extend(content)
        elif chunk.kind == INCOMPLETE:
            for final in self._complete(content):
                if final.doc is not None:
                    self._docs.setdefault(final.type, {})[final.id] = final.doc
        elif chunk.kind == TEXTS:
            of, ids, texts = content
            opened = columns_of(of, self._relations, self._layouts).documents(texts)
            self._docs.setdefault(chunk.type, {}).update(zip(ids, opened, strict=True))
        else:
            docs = {id: pickle.loads(doc) for id, doc in content.items()} if chunk.kind == UNOPENED else content
            self._docs.setdefault(chunk.type, {}).update(docs)
        self._bytes += chunk.size
        waiting = max(map(len, itertools.chain(self._ids.values(), self._docs.values())), default=0)
        if self._bytes >= CALL_BYTES or waiting >= CALL_DOCS:
            self.flush()

    def take_report(self, chunk: Chunk) -> None:
        """A chunk of a Batcher that ran on an executor: how many, or what it could not do there."""
        if chunk.kind == FAILED:
            error, trace = chunk.content()
            logger.debug("on an executor: %s", trace)
            raise error
        if chunk.kind in (INCOMPLETE, SUPERSEDED):
            self.take(chunk)
        elif chunk.kind == DELETES:
            self.deletes += chunk.records
        else:
            self.upserts += chunk.records

    def flush_deletes(self) -> None:
        for doctype, ids in self._ids.items():
            call(self._batcher.batch_delete, doctype, ids)
            self.deletes += len(ids)
        self._ids = {}

    def flush(self) -> None:
        self.flush_deletes()
        for doctype, docs in self._docs.items():
            call(self._batcher.batch_upsert, doctype, docs)
            self.upserts += len(docs)
        self._docs, self._bytes = {}, 0


def call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the user's Batcher; what it raises is a BatcherError."""
    try:
        return method(*args)
    except Exception as error:
        raise batcher_error(method, error) from error
