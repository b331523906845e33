"""From where final states lie to chunks of them; runs on the executors.

Bodies are read from the spool and opened here. The documents are left in the spool as pickled chunks, and a report says
where; or, for a Batcher that is `distributed`, they are handed to it right here. So Spark's driver holds reports, not
documents, however large a batch or a row is.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import marshal
import pickle
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dbsync.batcher import Batcher
from dbsync.columns import FrameColumns, LineColumns
from dbsync.errors import BatcherError, DbsyncError
from dbsync.fold import Event, Final, Opener, fold
from dbsync.private import disk_errors
from dbsync.relation import Relation
from dbsync.spool import DELETED, FRAME, FULL, PICKLE, ROW_BITS, Batch, Layout, SegmentReader, Source

# Kinds of chunk.
DELETES, UPSERTS, UNOPENED, TEXTS, INCOMPLETE, FAILED, SUPERSEDED = range(7)

# A Batcher that runs on the executors is given all deletes before the first upsert.
DELETES_TURN, UPSERTS_TURN = "deletes", "upserts"

CHUNK_DOCS = 5_000
CHUNK_BYTES = 4 * 1024 * 1024
INLINE_BYTES = 64 * 1024  # a chunk up to this size comes with its report and not by way of a file

Of: TypeAlias = "tuple[int | None, int | None]"  # the number of a window, or of a relation


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


Sorted = tuple[int, str, Any, int]  # kind of chunk, type, content (by id, or the columns' texts), size


class Finish:
    """Where final states lie in, chunks out. One that has a Batcher hands them to it, deletes and upserts in turns."""

    def __init__(self, batch: Batch, accepts_partial: bool, batcher: Batcher | None = None) -> None:
        self._relations = batch.relations
        self._layouts = batch.layouts
        self._folds = batch.folds
        self._accepts_partial = accepts_partial
        self._batcher = batcher
        self._turn: str | None = None
        self._folder = batch.folder
        self._sources = batch.sources
        self._first_window = len(batch.segments)

    def in_turn(self, turn: str | None) -> Finish:
        copied = copy.copy(self)
        copied._turn = turn
        return copied

    def unfolded(self) -> Finish:
        """For what is final as it lies there, whatever the rest of the batch needs."""
        copied = copy.copy(self)
        copied._folds = False
        return copied

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same with the reports as Spark SQL wants them."""
        for chunk in self.chunks(batches):
            yield pa.RecordBatch.from_pylist([chunk._asdict()], _REPORT)

    def chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
        gc.disable()  # rows hold no cycles, and looking for some among so many takes its time
        try:
            yield from self._reports(batches)
        finally:
            gc.enable()

    def _reports(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
        opener = Opener(self._relations, self._layouts)
        superseded: Counter[int] = Counter()
        finals = self._folded(batches, opener, superseded) if self._folds else self._found(batches, opener, superseded)
        with _Parked(self._folder) as parked:
            for kind, doctype, content in _chunks(finals):
                if report := self._deliver(kind, doctype, content, parked):
                    yield report
        if superseded and self._turn != DELETES_TURN:
            yield Chunk(SUPERSEDED, "", 0, pickle.dumps(superseded))

    def _folded(self, batches: Iterable[pa.RecordBatch], opener: Opener, superseded: Counter[int]) -> Iterator[Sorted]:
        def events() -> Iterator[tuple[str, Event]]:
            for batch in batches:
                columns = [batch.column(name).to_pylist() for name in Event._fields]
                yield from zip(batch.column("root").to_pylist(), map(Event, *columns), strict=True)

        groups = itertools.groupby(events(), key=lambda found: (found[1].type, found[0]))
        for final in fold(((event for _, event in group) for _, group in groups), opener, superseded):
            yield self._sort(final)

    def _found(self, batches: Iterable[pa.RecordBatch], opener: Opener, superseded: Counter[int]) -> Iterator[Sorted]:
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
                if self._turn == DELETES_TURN and source.window is not None:
                    continue
                columns = ["type", "id", "op"] if self._turn == DELETES_TURN else None
                for table in rows_of(source, rows[start:end], columns):
                    yield from self._opened(table, source, opener)

    def _opened(self, table: pa.Table, source: Source, opener: Opener) -> Iterator[Sorted]:
        if self._turn == DELETES_TURN:
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
                texts = frame_columns(self._relations[relation]).texts(bodies)
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
            texts = line_columns(layout).texts(bodies)
            if not layout.left_out:
                yield self._upserts(doctype, ids, (window, None), texts, bodies.nbytes)
                continue
            size = bodies.nbytes // len(ids)
            for id, doc in zip(ids, line_columns(layout).documents(texts), strict=True):
                yield self._sort(opener.partial_line(id, doc, layout), size)

    def _upserts(
        self, doctype: str, ids: list[str], of: tuple[int | None, int | None], texts: Any, size: int
    ) -> Sorted:
        """Where the documents are wanted elsewhere they are made there: texts travel in half the time."""
        if self._batcher is None:
            return TEXTS, doctype, (of, ids, texts), size
        docs = columns_of(of, self._relations, self._layouts).documents(texts)
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
        if (kind == DELETES) != (self._turn == DELETES_TURN):
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


@functools.lru_cache(maxsize=256)
def frame_columns(relation: Relation) -> FrameColumns:
    return FrameColumns(relation)


@functools.lru_cache(maxsize=256)
def line_columns(layout: Layout) -> LineColumns:
    return LineColumns(layout.relation, layout.columns)


def columns_of(of: Of, relations: Sequence[Relation], layouts: Sequence[Layout]) -> FrameColumns | LineColumns:
    """Whose columns they are: a window's, or a relation's."""
    window, relation = of
    if window is not None:
        return line_columns(layouts[window])
    assert relation is not None
    return frame_columns(relations[relation])


def batcher_error(method: Callable[..., Any], error: Exception) -> DbsyncError:
    """What a Batcher raised, with the method's name; what it raised as ours stays as it is."""
    if isinstance(error, DbsyncError):
        return error
    words = str(error).partition("\n")[0].rstrip(". ")
    return BatcherError(f"{method.__qualname__} raised {type(error).__name__}{f': {words}' if words else ''}.")
