"""One Spark job a batch, for all types together: from what happened to what is.

Events are grouped by `(type, id)` in the order `(commit LSN, ordinal)`. Where no event of the batch lacks values, the
newest event of a record is its final state and SQL finds it by keys and places alone: bodies stay in the spool, and the
executors read those of the survivors from there. Otherwise events are replayed a record at a time (`fold`).
Rows that were re-read are events at their low mark; those whose key nothing else in the batch touched are final as they
are and pass by without a shuffle. Executors leave the documents in the spool as pickled chunks and report where; or,
for a Batcher that is `distributed`, hand them to it right there. So Spark's driver holds reports, not documents,
however large a batch or a row is.

Insert and delete in one batch are a delete: after a crash the target may already hold the row.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import marshal
import pickle
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, coalesce, col, lit, max_by, shiftright, when
from pyspark.sql.functions import max as newest_of

from dbsync.batcher import Batcher
from dbsync.columns import FrameColumns, LineColumns
from dbsync.errors import BatcherError, DbsyncError
from dbsync.fold import Event, Final, Opener, fold
from dbsync.private import disk_errors
from dbsync.spark import map_in_arrow, reason, why_spark_ended
from dbsync.spool import BLOCK_BITS, DELETED, FRAME, FULL, LINE, PARTIAL, PICKLE, ROW_BITS, Batch, SegmentReader, Source

logger = logging.getLogger(__name__)

EVENTS = (
    "type string, id string, lsn long, ordinal long, rank long, at long, op byte, form byte, relation int,"
    " body binary, prior string"
)
CHUNKS = "kind byte, type string, records int, payload binary, path string, offset long, size long"

# Kinds of chunk.
DELETES, UPSERTS, UNOPENED, TEXTS, INCOMPLETE, FAILED, SUPERSEDED = range(7)

ROWS_AT_A_TIME = 4_096
BYTES_AT_A_TIME = 16 * 1024 * 1024

CHUNK_DOCS = 5_000
CHUNK_BYTES = 4 * 1024 * 1024
PARTITION_BYTES = 16 * 1024 * 1024
PARTITION_EVENTS = 1_000_000
SMALL_EVENTS = 5_000
PLACES_AT_A_TIME = 65_536
INLINE_BYTES = 64 * 1024  # a chunk up to this size comes with its report and not by way of a file
BROADCAST_EVENTS = 300_000  # up to this many, the keys that were touched are sent to where the re-read rows are

# What one call of a Batcher gets at the most.
CALL_DOCS = 50_000
CALL_BYTES = 32 * 1024 * 1024

Of: TypeAlias = "tuple[int | None, int | None]"  # the number of a window, or of a relation
Complete = Callable[[list[Final]], Iterable[Final]]


class Chunk(NamedTuple):
    """Final states of one kind and type. What is too large to come along lies in a file of the spool."""

    kind: int
    type: str
    records: int
    payload: bytes | None
    path: str | None = None
    offset: int = 0
    size: int = 0

    def content(self) -> Any:
        load = marshal.loads if self.kind == TEXTS else pickle.loads
        if self.path is None:
            return load(self.payload or b"")
        with disk_errors(Path(self.path).parent), Path(self.path).open("rb") as file:
            file.seek(self.offset)
            return load(file.read(self.size))


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
        _fit(spark, batch)
        done = hand_over(final_states(spark, batch), batch, batcher, complete)
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


def _fit(spark: SparkSession, batch: Batch) -> None:
    """Set how much Spark takes up at a time: it counts rows, and the widest may be as large as PostgreSQL allows."""
    rows = max(1, min(ROWS_AT_A_TIME, BYTES_AT_A_TIME // max(1, batch.widest_bytes)))
    spark.conf.set("spark.sql.shuffle.partitions", str(_partitions(spark, batch)))
    spark.conf.set("spark.sql.parquet.columnarReaderBatchSize", str(rows if _folds(batch) else ROWS_AT_A_TIME))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows if _folds(batch) else PLACES_AT_A_TIME))


def _partitions(spark: SparkSession, batch: Batch) -> int:
    """As many shuffle partitions as the batch deserves: one for a small one, never more in each than fits a worker."""
    if batch.events <= SMALL_EVENTS:
        return 1
    parts = -(-batch.size_bytes // PARTITION_BYTES) if _folds(batch) else -(-batch.events // PARTITION_EVENTS)
    return max(spark.sparkContext.defaultParallelism, parts)


class States(NamedTuple):
    """A batch reduced: records several events speak of, and re-read rows that nothing else speaks of.

    Both are places in the spool, with the window whose row of the same record came to nothing.
    """

    reduced: DataFrame | None
    folds: bool  # `reduced` holds events in order that are still to be folded, and not one place a record
    untouched: DataFrame | None


def final_states(spark: SparkSession, batch: Batch) -> States:
    """The batch reduced by (type, id)."""
    rows = _reread_rows(spark, batch)
    if not batch.segments:
        return States(*_reduce_rows(rows, batch))
    events = _counted(spark.read.schema(EVENTS).parquet(*batch.segments), batch)
    untouched = None
    if rows is not None and batch.events <= BROADCAST_EVENTS and _keys_are_distinct(batch):
        touched = broadcast(events.select("type", "id").distinct())
        untouched = rows.join(touched, ["type", "id"], "left_anti")
        rows = rows.join(touched, ["type", "id"], "left_semi")
    events = events if rows is None else events.unionByName(rows)
    folds = _folds(batch)
    return States(_in_order(spark, events, batch) if folds else _newest(events, batch), folds, untouched)


def _reduce_rows(rows: DataFrame | None, batch: Batch) -> tuple[DataFrame | None, bool, DataFrame | None]:
    if rows is None or _keys_are_distinct(batch):
        return None, False, rows
    folds = _folds(batch)
    return (_in_order(rows.sparkSession, rows, batch) if folds else _newest(rows, batch)), folds, None


def _folds(batch: Batch) -> bool:
    return batch.partials > 0 or any(rows.layout.left_out for rows, _ in batch.windows)


def _keys_are_distinct(batch: Batch) -> bool:
    """Whether no key can have been re-read twice: windows of one refresh read disjoint ranges."""
    refreshes: dict[str, set[int]] = {}
    for rows, _ in batch.windows:
        refreshes.setdefault(rows.layout.relation.doctype, set()).add(rows.refresh)
    return all(len(found) == 1 for found in refreshes.values())


def _newest(events: DataFrame, batch: Batch) -> DataFrame:
    """Where the newest event of each record lies, in the order of the spool."""
    window = newest_of(when(col("form") == LINE, col("relation")))
    # Numbers only, so that Spark aggregates by hashing; with a body in it, it would sort all of them twice.
    newest = events.groupBy("type", "id").agg(max_by("at", "rank").alias("at"), window.alias("window"))
    places = newest.select("at", "window")
    if batch.events > SMALL_EVENTS:
        places = places.repartition(shiftright("at", BLOCK_BITS))
    return places.sortWithinPartitions("at")


def _reread_rows(spark: SparkSession, batch: Batch) -> DataFrame | None:
    """The rows of all windows of the batch as events at their low mark."""
    found: DataFrame | None = None
    placed = zip(batch.windows, batch.ranks, batch.first_sources, strict=True)
    for index, ((rows, (lsn, ordinal)), rank, first) in enumerate(placed):
        if not rows.segments:
            continue
        events = spark.read.schema("id string, row long, body binary").parquet(*rows.segments)
        events = events.select(
            lit(rows.layout.relation.doctype).alias("type"),
            "id",
            lit(int(lsn)).cast("long").alias("lsn"),
            lit(int(ordinal)).cast("long").alias("ordinal"),
            lit(rank).cast("long").alias("rank"),
            (col("row") + lit(first << ROW_BITS)).alias("at"),
            lit(PARTIAL if rows.layout.left_out else FULL).cast("byte").alias("op"),
            lit(LINE).cast("byte").alias("form"),
            lit(index).alias("relation"),
            "body",
            lit(None).cast("string").alias("prior"),
        )
        found = events if found is None else found.unionByName(events)
    return None if found is None else _counted(found, batch)


def _counted(events: DataFrame, batch: Batch) -> DataFrame:
    """Without what a TRUNCATE made void, and without a transaction that was not read to its end."""
    if batch.cut_lsn is not None:
        events = events.where(col("lsn") <= int(batch.cut_lsn))
    for doctype, (lsn, ordinal) in batch.truncates.items():
        at = int(lsn)
        before = (col("lsn") < at) | ((col("lsn") == at) & (col("ordinal") < ordinal))
        events = events.where((col("type") != doctype) | ~before)
    return events


def _in_order(spark: SparkSession, events: DataFrame, batch: Batch) -> DataFrame:
    """Events of a record, and of the records it took values from, together and in order."""
    if batch.lineage:
        rows = [(doctype, id, root) for (doctype, id), root in batch.lineage.items()]
        roots = spark.createDataFrame(rows, "type string, id string, root string")
        events = events.join(broadcast(roots), ["type", "id"], "left")
    else:
        events = events.withColumn("root", lit(None).cast("string"))
    events = events.withColumn("root", coalesce("root", "id"))
    ordered = events.repartition("type", "root").sortWithinPartitions("type", "root", "lsn", "ordinal")
    return ordered.select("type", "id", "op", "form", "relation", "body", "prior", "root")


def _finished(states: States, batch: Batch, finish: _Finish) -> DataFrame:
    """Chunks of all final states."""
    parts = []
    if states.reduced is not None:
        parts.append(map_in_arrow(states.reduced, finish.folding(states.folds), CHUNKS))
    if states.untouched is not None:
        plain = states.untouched.select("at", lit(None).cast("int").alias("window"))
        parts.append(map_in_arrow(plain, finish.folding(False), CHUNKS))
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


def _apply_here(states: States, batch: Batch, batcher: Batcher, complete: Complete) -> _Handover:
    handover = _Handover(batch, batcher, complete)
    chunks = _collect(_finished(states, batch, _Finish(batch, batcher.accepts_partial)))
    # Upserts wait until the deletes of all partitions are through: a unique value may have moved from one to the other.
    for chunk in sorted(chunks, key=lambda chunk: chunk.kind not in (DELETES, SUPERSEDED)):
        if chunk.kind != DELETES:
            handover.flush_deletes()
        handover.take(chunk)
    handover.flush()
    return handover


def _apply_on_executors(states: States, batch: Batch, batcher: Batcher, complete: Complete) -> _Handover:
    handover = _Handover(batch, batcher, complete)
    if batch.deletes and states.reduced is not None:
        reduced = states.reduced.persist()
        try:
            _run_on_executors(States(reduced, states.folds, None), batch, batcher, "deletes", handover)
            _run_on_executors(states._replace(reduced=reduced), batch, batcher, "upserts", handover)
        finally:
            reduced.unpersist()
    else:
        _run_on_executors(states, batch, batcher, "upserts", handover)
    handover.flush()
    return handover


def _run_on_executors(states: States, batch: Batch, batcher: Batcher, turn: str, handover: _Handover) -> None:
    for chunk in _collect(_finished(states, batch, _Finish(batch, batcher.accepts_partial, batcher, turn))):
        handover.take_report(chunk)


def _collect(chunks: DataFrame) -> list[Chunk]:
    return [Chunk(*row) for row in chunks.collect()]


class _Handover:
    """Gathers chunks to calls of the Batcher: one a type while they are small, several when they are not."""

    def __init__(self, batch: Batch, batcher: Batcher, complete: Complete) -> None:
        self._frames = [FrameColumns(relation) for relation in batch.relations]
        self._lines = [LineColumns(layout.relation, layout.columns) for layout in batch.layouts]
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
            opened = columns_of(of, self._frames, self._lines).documents(texts)
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


def columns_of(of: Of, frames: list[FrameColumns], lines: list[LineColumns]) -> FrameColumns | LineColumns:
    """Whose columns they are: a window's, or a relation's."""
    window, relation = of
    if window is not None:
        return lines[window]
    assert relation is not None
    return frames[relation]


def call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the user's Batcher; what it raises is a BatcherError."""
    try:
        return method(*args)
    except Exception as error:
        raise batcher_error(method, error) from error


def batcher_error(method: Callable[..., Any], error: Exception) -> DbsyncError:
    """What a Batcher raised, with the method's name; what it raised as ours stays as it is."""
    if isinstance(error, DbsyncError):
        return error
    return BatcherError(f"{method.__qualname__} raised {type(error).__name__}: {error}")


Sorted = tuple[int, str, Any, int]  # kind of chunk, type, content (by id, or the columns' texts), size


class _Finish:
    """Runs on the executors: final states in, chunks out."""

    def __init__(
        self, batch: Batch, accepts_partial: bool, batcher: Batcher | None = None, turn: str | None = None
    ) -> None:
        self._relations = batch.relations
        self._layouts = batch.layouts
        self._folds = False
        self._accepts_partial = accepts_partial
        self._batcher = batcher
        self._turn = turn
        self._folder = batch.folder
        self._sources = batch.sources
        self._first_window = len(batch.segments)
        self._frames = [FrameColumns(relation) for relation in batch.relations]
        self._lines = [LineColumns(layout.relation, layout.columns) for layout in batch.layouts]

    def folding(self, folds: bool) -> _Finish:
        copied = copy.copy(self)
        copied._folds = folds
        return copied

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        gc.disable()  # rows hold no cycles, and looking for some among so many takes its time
        try:
            yield from self._reports(batches)
        finally:
            gc.enable()

    def _reports(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opener = Opener(self._relations, self._layouts)
        superseded: Counter[int] = Counter()
        finals = self._folded(batches, opener, superseded) if self._folds else self._found(batches, opener, superseded)
        with _Parked(self._folder) as parked:
            for kind, doctype, content in _chunks(finals):
                if report := self._deliver(kind, doctype, content, parked):
                    yield _record_batch(report)
        if superseded and self._turn != "deletes":
            yield _record_batch(Chunk(SUPERSEDED, "", 0, pickle.dumps(superseded)))

    def _folded(self, batches: Iterator[pa.RecordBatch], opener: Opener, superseded: Counter[int]) -> Iterator[Sorted]:
        def events() -> Iterator[tuple[str, Event]]:
            for batch in batches:
                columns = [batch.column(name).to_pylist() for name in Event._fields]
                yield from zip(batch.column("root").to_pylist(), map(Event, *columns), strict=True)

        groups = itertools.groupby(events(), key=lambda found: (found[1].type, found[0]))
        for final in fold(((event for _, event in group) for _, group in groups), opener, superseded):
            yield self._sort(final)

    def _found(self, batches: Iterator[pa.RecordBatch], opener: Opener, superseded: Counter[int]) -> Iterator[Sorted]:
        """Open what lies at the places that are left."""
        rows_of = SegmentReader()
        for batch in batches:
            places = batch.column("at").to_numpy()
            numbers, rows = places >> ROW_BITS, places & ((1 << ROW_BITS) - 1)
            lost = batch.column("window").filter(pa.array(numbers < self._first_window))
            superseded.update(lost.drop_null().to_pylist())
            ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for start, end in itertools.pairwise([0, *ends]):
                if start == end:
                    continue
                source = self._sources[int(numbers[start])]
                if self._turn == "deletes" and source.window is not None:
                    continue
                columns = ["type", "id", "op"] if self._turn == "deletes" else None
                for table in rows_of(source, rows[start:end], columns):
                    yield from self._opened(table, source, opener)

    def _opened(self, table: pa.Table, source: Source, opener: Opener) -> Iterator[Sorted]:
        if self._turn == "deletes":
            yield from self._deleted(table.filter(pc.equal(table["op"], DELETED)))
            return
        if source.window is not None:
            yield from self._opened_lines(table, source.window, opener)
            return
        yield from self._deleted(table.filter(pc.equal(table["op"], DELETED)))
        table = table.filter(pc.not_equal(table["op"], DELETED))
        for form, relation in set(zip(table["form"].to_pylist(), table["relation"].to_pylist(), strict=True)):
            mine = table.filter(pc.and_(pc.equal(table["form"], form), pc.equal(table["relation"], relation)))
            if form == PICKLE:
                yield from self._opened_pickles(mine, opener)
            else:
                yield from self._opened_frames(mine, relation, opener)

    def _deleted(self, table: pa.Table) -> Iterator[Sorted]:
        for doctype, mine in _types(table):
            ids = mine["id"].to_pylist()
            yield DELETES, doctype, dict.fromkeys(ids), sum(map(len, ids))

    def _opened_frames(self, table: pa.Table, relation: int, opener: Opener) -> Iterator[Sorted]:
        for block in _blocks(table):
            for doctype, mine in _types(block):
                ids, bodies = mine["id"].to_pylist(), mine["body"].combine_chunks()
                texts = self._frames[relation].texts(bodies)
                if texts is not None:
                    yield self._upserts(doctype, ids, (None, relation), texts, bodies.nbytes)
                    continue
                for id, body in zip(ids, bodies, strict=True):
                    frame = body.as_py()
                    yield self._sort(opener.open(Event(doctype, id, FULL, FRAME, relation, frame)), len(frame))

    def _opened_lines(self, table: pa.Table, window: int, opener: Opener) -> Iterator[Sorted]:
        layout = self._layouts[window]
        doctype = layout.relation.doctype
        for block in _blocks(table):
            ids, bodies = block["id"].to_pylist(), block["body"].combine_chunks()
            texts = self._lines[window].texts(bodies)
            if not layout.left_out:
                yield self._upserts(doctype, ids, (window, None), texts, bodies.nbytes)
                continue
            size = bodies.nbytes // len(ids)
            for id, doc in zip(ids, self._lines[window].documents(texts), strict=True):
                yield self._sort(opener.partial_line(id, doc, layout), size)

    def _upserts(
        self, doctype: str, ids: list[str], of: tuple[int | None, int | None], texts: Any, size: int
    ) -> Sorted:
        """Where the documents are wanted elsewhere they are made there: texts travel in half the time."""
        if self._batcher is None:
            return TEXTS, doctype, (of, ids, texts), size
        docs = columns_of(of, self._frames, self._lines).documents(texts)
        return UPSERTS, doctype, dict(zip(ids, docs, strict=True)), size

    def _opened_pickles(self, table: pa.Table, opener: Opener) -> Iterator[Sorted]:
        for block in _blocks(table):
            for doctype, mine in _types(block):
                ids, bodies = mine["id"].to_pylist(), mine["body"].to_pylist()
                size = sum(map(len, bodies))
                if self._batcher is None:
                    yield UNOPENED, doctype, dict(zip(ids, bodies, strict=True)), size
                else:
                    yield UPSERTS, doctype, dict(zip(ids, map(pickle.loads, bodies), strict=True)), size

    def _sort(self, final: Final, size: int | None = None) -> Sorted:
        if final.doc is None:
            return DELETES, final.type, {final.id: None}, len(final.id)
        weight = _weight(final.doc) if size is None else size
        # A record that got its key from another has nothing in the target yet to be merged into.
        if final.missing and (final.moved or not self._accepts_partial):
            return INCOMPLETE, final.type, {final.id: final}, weight
        return UPSERTS, final.type, {final.id: final.doc}, weight

    def _deliver(self, kind: int, doctype: str, content: Any, parked: _Parked) -> Chunk | None:
        if self._batcher is None:
            return parked.chunk(kind, doctype, content)
        if (kind == DELETES) != (self._turn == "deletes"):
            return None
        if kind == INCOMPLETE:
            return parked.chunk(kind, doctype, content)
        method = self._batcher.batch_delete if kind == DELETES else self._batcher.batch_upsert
        try:
            method(doctype, content)
        except Exception as error:
            return Chunk(FAILED, doctype, 0, pickle.dumps((batcher_error(method, error), traceback.format_exc())))
        return Chunk(kind, doctype, len(content), b"")


class _Parked:
    """The file in which a task leaves what is too large for its report; made when it is first needed.

    Spark may run a task twice. Each run has a file of its own, and only the reports of one of them count.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"final-{uuid.uuid4().hex}"
        self._file: BinaryIO | None = None

    def chunk(self, kind: int, doctype: str, content: Any) -> Chunk:
        # Lists of texts and nothing else: of that, marshal writes four times as many in the same time.
        payload = marshal.dumps(content) if kind == TEXTS else pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        if len(payload) <= INLINE_BYTES:
            return Chunk(kind, doctype, len(content), payload, size=len(payload))
        with disk_errors(self._path.parent):
            if self._file is None:
                self._file = self._path.open("xb")
            offset = self._file.tell()
            self._file.write(payload)
        return Chunk(kind, doctype, len(content), None, str(self._path), offset, len(payload))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with disk_errors(self._path.parent):
                self._file.close()


def _weight(doc: dict[str, Any]) -> int:
    return sum(len(value) for value in doc.values() if isinstance(value, str | bytes)) + 16 * len(doc)


def _chunks(finals: Iterator[Sorted]) -> Iterator[tuple[int, str, Any]]:
    """Gather final states by kind and type to chunks of bounded size."""
    open_chunks: dict[tuple[int, str], tuple[dict[str, Any], int]] = {}
    for kind, doctype, content, size in finals:
        if kind == TEXTS:
            yield kind, doctype, content
            continue
        chunk, weight = open_chunks.get((kind, doctype), ({}, 0))
        if chunk and (len(chunk) + len(content) > CHUNK_DOCS or weight + size > CHUNK_BYTES):
            yield kind, doctype, _content(kind, chunk)
            chunk, weight = {}, 0
        chunk.update(content)
        open_chunks[kind, doctype] = (chunk, weight + size)
    for (kind, doctype), (chunk, _) in sorted(open_chunks.items(), key=lambda found: found[0]):
        yield kind, doctype, _content(kind, chunk)


def _types(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each type by themselves."""
    found = pc.unique(table["type"]).to_pylist()
    for doctype in found:
        yield doctype, table if len(found) == 1 else table.filter(pc.equal(table["type"], doctype))


def _blocks(table: pa.Table) -> Iterator[pa.Table]:
    """The table cut to parts that are good for a chunk each."""
    sizes = np.cumsum(pc.binary_length(table["body"]).to_numpy(), dtype=np.int64)
    start = 0
    while start < table.num_rows:
        before = int(sizes[start - 1]) if start else 0
        end = int(np.searchsorted(sizes, before + CHUNK_BYTES, side="right"))
        end = min(max(end, start + 1), start + CHUNK_DOCS, table.num_rows)
        yield table.slice(start, end - start)
        start = end


def _content(kind: int, chunk: dict[str, Any]) -> Any:
    if kind == DELETES:
        return list(chunk)
    return list(chunk.values()) if kind == INCOMPLETE else chunk


def _record_batch(chunk: Chunk) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([chunk._asdict()], _REPORT)


_REPORT = pa.schema(
    [
        ("kind", pa.int8()),
        ("type", pa.string()),
        ("records", pa.int32()),
        ("payload", pa.binary()),
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
    ]
)
