"""Where a batch waits: columnar segments on disk.

A segment is a Parquet file of events. What is in memory is at most one segment, whatever the size of a transaction;
executors read the files themselves. A batch's folder lives until the batch is acknowledged. What a crash leaves behind
is removed by the next start; nothing of it is ever needed again, since PostgreSQL sends all that was not acknowledged
once more.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dbsync import mirror
from dbsync.lsn import LSN
from dbsync.pending import Pending
from dbsync.private import PrivateFolder, disk_errors
from dbsync.relation import Relation

# What happened to a record.
DELETED, FULL, PARTIAL = 0, 1, 2

# How a body is to be read.
FRAME, PICKLE, LINE = 0, 1, 2

SCHEMA = pa.schema(
    [
        ("type", pa.dictionary(pa.int32(), pa.string())),
        ("id", pa.string()),
        ("lsn", pa.int64()),  # of the commit; with `ordinal`, the order of everything
        ("ordinal", pa.int64()),
        ("rank", pa.int64()),  # the same order within the batch, as one number
        ("at", pa.int64()),  # where this very row lies: the number of its segment, and its row there
        ("op", pa.int8()),
        ("form", pa.int8()),
        ("relation", pa.int32()),
        ("body", pa.binary()),
        ("prior", pa.string()),  # the id this record had before, where its key changed and values were left out
    ]
)

SEGMENT_EVENTS = 100_000
SEGMENT_BYTES = 32 * 1024 * 1024

# Key changes that leave values out are chained to the old key only up to this many in a batch; the rest are completed
# by re-reading them. It bounds the memory of a bulk change of keys.
MAX_LINEAGE = 100_000

Position = tuple[int, int]

# The segments of a window: all else about their rows is the same for each of them.
WINDOW_SCHEMA = pa.schema([("id", pa.string()), ("row", pa.int64()), ("body", pa.binary())])

RANK_BITS = 40  # for the ordinal; the rest counts transactions
ROW_BITS = 32  # for the row; the rest counts segments
BLOCK_BITS = 14  # as many rows as a power of two make a row group, and go to one task


@dataclass(frozen=True, slots=True)
class Layout:
    """How a re-read row lies in its line: the columns it has, in their order, and those the SELECT left out."""

    relation: Relation
    columns: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """What a window has read."""

    id: str
    refresh: int
    reading: int  # windows of one reading of a refresh never hold the same key
    layout: Layout
    files: tuple[str, ...]
    segments: tuple[str, ...]  # of these, those that are part of the batch: none where a handler has got the rows
    numbers: tuple[int, ...]  # of the segments; a range without rows has none
    rows: int
    size_bytes: int
    widest_bytes: int

    def discard(self) -> None:
        for file in self.files:
            Path(file).unlink(missing_ok=True)

    def given_to_handler(self) -> WindowRows:
        """The same for a batch that holds what a handler made of the rows."""
        return replace(self, segments=(), numbers=())


class Source(NamedTuple):
    """A segment, and the window it belongs to, if any."""

    path: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A closed batch: final, on disk, and all that compaction needs to know of it."""

    number: int
    folder: Path
    segments: tuple[str, ...]
    events: int
    size_bytes: int
    changes: int
    first_lsn: LSN
    last_lsn: LSN
    cut_lsn: LSN | None  # events of later commits belong to a transaction that was not read to its end
    relations: tuple[Relation, ...]
    truncates: Mapping[str, Position]
    partials: int
    deletes: int
    lineage: Mapping[tuple[str, str], str]
    first_commit_time: datetime | None
    windows: tuple[tuple[WindowRows, Position], ...] = ()
    ranks: tuple[int, ...] = ()  # of the windows
    widest_bytes: int = 0  # of its rows

    @property
    def first_sources(self) -> tuple[int, ...]:
        """By which number the segments of each window begin; those of the batch itself begin by 0."""
        counts = (max(rows.numbers, default=-1) + 1 for rows, _ in self.windows)
        return tuple(itertools.accumulate(counts, initial=len(self.segments)))[: len(self.windows)]

    @property
    def sources(self) -> dict[int, Source]:
        """All segments, by the number that `at` has for them."""
        found = {number: Source(path, None) for number, path in enumerate(self.segments)}
        for window, (first, (rows, _)) in enumerate(zip(self.first_sources, self.windows, strict=True)):
            for number, path in zip(rows.numbers, rows.segments, strict=True):
                found[first + number] = Source(path, window)
        return found

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(rows.layout for rows, _ in self.windows)

    @property
    def folds(self) -> bool:
        """Whether some event lacks values, so that it has to be seen together with those before it."""
        return self.partials > 0 or any(rows.layout.left_out for rows, _ in self.windows)

    @property
    def keys_are_distinct(self) -> bool:
        """Whether no key can have been re-read twice."""
        return are_disjoint(rows for rows, _ in self.windows)

    def discard(self) -> None:
        for rows, _ in self.windows:
            rows.discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def are_disjoint(windows: Iterable[WindowRows]) -> bool:
    """Whether the windows cannot have a key in common: those of one reading of a refresh read disjoint ranges."""
    readings: dict[str, set[tuple[int, int]]] = {}
    for rows in windows:
        if rows.segments:
            readings.setdefault(rows.layout.relation.doctype, set()).add((rows.refresh, rows.reading))
    return all(len(found) == 1 for found in readings.values())


class SegmentReader:
    """Reads single rows of segments, a row group in memory at a time; rows are asked for in their order."""

    def __init__(self) -> None:
        self._path = ""
        self._file: pq.ParquetFile
        self._ends: list[int] = []

    def __call__(
        self, source: Source, rows: npt.NDArray[np.int64], columns: list[str] | None = None
    ) -> Iterator[pa.Table]:
        self._open(source.path)
        begin = 0
        for group, end in enumerate(self._ends):
            mine = rows[(rows >= begin) & (rows < end)]
            if len(mine):
                found = self._file.read_row_group(group, columns)
                yield found if len(mine) == end - begin else found.take(pa.array(mine - begin))
            begin = end

    def _open(self, path: str) -> None:
        if self._path != path:
            self._file, self._path = pq.ParquetFile(path), path
            groups = range(self._file.num_row_groups)
            counts = (self._file.metadata.row_group(group).num_rows for group in groups)
            self._ends = list(itertools.accumulate(counts))


def read_rows(rows: WindowRows) -> Iterator[tuple[str, bytes]]:
    """The ids and lines of a window, a few thousand in memory at a time."""
    for segment in rows.segments:
        for batch in pq.ParquetFile(segment).iter_batches(batch_size=5_000):
            yield from zip(batch.column("id").to_pylist(), batch.column("body").to_pylist(), strict=True)


class Spool:
    """The folder in which batches and windows wait."""

    def __init__(self, parent: Path | None) -> None:
        self._private = PrivateFolder(parent)

    @property
    def folder(self) -> Path:
        return self._private.path

    def writer(self, number: int) -> BatchWriter:
        folder = self.folder / f"batch-{number:08}"
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return BatchWriter(number, folder)

    def window_folder(self) -> Path:
        folder = self.folder / "windows"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def pending(self) -> Pending:
        """For the transactions in progress of one connection."""
        folder = self.folder / "pending"
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return Pending(folder)

    def close(self) -> None:
        self._private.close()


class _Run(NamedTuple):
    """Where a transaction's frames begin."""

    start: int
    lsn: int
    ordinal: int
    transaction: int


@dataclass(slots=True)
class _Marks:
    """Events made by a handler, one list a column."""

    types: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)
    bodies: list[bytes | None] = field(default_factory=list)
    priors: list[str | None] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    next_ordinal: int = -1  # where the last run goes on


class BatchWriter:
    """An open batch. `frames` and `marks` are what is still in memory of it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        self.changes = 0
        self.first_lsn: LSN | None = None
        self.last_lsn: LSN | None = None
        self.first_commit_time: datetime | None = None
        self.opened_at: datetime | None = None  # when its first transaction was read
        self._last_commit_lsn = LSN(0)
        self._open_lsn = 0
        self._segments: list[str] = []
        self._relations: dict[int, Relation] = {}
        self._truncates: dict[str, list[Position]] = {}
        self._frames: list[bytes | memoryview] = []
        self._runs: list[_Run] = []
        self._run_start = 0
        self._run_ordinal = 0
        self._passed_over = False
        self._marks = _Marks()
        self._pending_bytes = 0
        self._events = 0
        self._size_bytes = 0
        self._partials = 0
        self._deletes = 0
        self._lineage: dict[tuple[str, str], str] = {}
        self._windows: list[tuple[WindowRows, Position]] = []
        self._transactions = 0
        self._ranks: dict[Position, int] = {}  # of the positions that are held
        self._widest_bytes = 0

    def begin(self, commit_lsn: LSN, commit_time: datetime) -> None:
        if self.events == 0:
            self.first_commit_time = commit_time
            self.opened_at = datetime.now(UTC)
        self._open_lsn = commit_lsn
        self._transactions += 1
        self._marks.next_ordinal = -1
        self._start_run(0)

    def commit(self, commit_lsn: LSN, end_lsn: LSN) -> None:
        """The open transaction is complete; the batch may end here."""
        if self.first_lsn is None:
            self.first_lsn = commit_lsn
        self._last_commit_lsn = commit_lsn
        self.last_lsn = end_lsn

    def describe(self, relation: Relation) -> None:
        gone = [known.oid for known in self._relations.values() if known.doctype == relation.doctype]
        for oid in gone:
            del self._relations[oid]
        self._relations[relation.oid] = relation

    def conflicts(self, relation: Relation) -> bool:
        """Whether the batch holds changes of this table from when it looked different."""
        if self.events == 0:
            return False
        # A table that was dropped and made anew has the name of the old one and another oid.
        reread = [rows.layout.relation for rows, _ in self._windows]
        return any(
            known != relation
            for known in (*self._relations.values(), *reread)
            if known.oid == relation.oid or known.doctype == relation.doctype
        )

    def add_frame(self, frame: bytes | memoryview) -> None:
        self.add_frames([frame])

    def add_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        if self._passed_over:
            self._start_run(self._run_ordinal)
        self._frames.extend(frames)
        self._pending_bytes += sum(map(len, frames))
        if len(self._frames) >= SEGMENT_EVENTS or self._pending_bytes >= SEGMENT_BYTES:
            self.flush()

    def add_mark(
        self, doctype: str, id: str, op: int, body: bytes | None, prior: str | None = None, *, form: int = PICKLE
    ) -> None:
        """What a handler says; the body is a pickle, or the frame that the document came in."""
        if self.opened_at is None:
            self.opened_at = datetime.now(UTC)
        marks, frames = self._marks, len(self._frames)
        ordinal = self._run_ordinal + frames - self._run_start
        if ordinal != marks.next_ordinal:
            marks.runs.append(_Run(len(marks.ids), self._open_lsn, ordinal, self._transactions))
        marks.next_ordinal = ordinal + 1
        marks.types.append(doctype)
        marks.ids.append(id)
        marks.ops.append(op)
        marks.forms.append(form)
        marks.bodies.append(body)
        marks.priors.append(prior)
        # The place is taken by what is not a frame; the next frame, if one comes, begins a run.
        self._run_start, self._run_ordinal, self._passed_over = frames, ordinal + 1, True
        if body is not None:
            self._pending_bytes += len(body)
        if len(marks.ids) >= SEGMENT_EVENTS or self._pending_bytes >= SEGMENT_BYTES:
            self.flush()

    def chain(self, doctype: str, old_id: str, new_id: str) -> None:
        """Keep the events of both ids together, since one takes its missing values from the other."""
        if len(self._lineage) < MAX_LINEAGE:
            root, other = self._root(doctype, old_id), self._root(doctype, new_id)
            self._lineage[doctype, root] = root
            self._lineage[doctype, other] = root

    def _root(self, doctype: str, id: str) -> str:
        """The id that stands for all that are chained to this one; what lies on the way is made shorter."""
        way = []
        while (up := self._lineage.get((doctype, id), id)) != id:
            way.append(id)
            id = up
        for passed in way:
            self._lineage[doctype, passed] = id
        return id

    def truncate(self, doctype: str) -> None:
        """Nothing of this type before this point counts any more."""
        self._truncates.setdefault(doctype, []).append((self._open_lsn, 2 * self._next_ordinal()))
        self._start_run(self._next_ordinal() + 1)

    def add_window(self, rows: WindowRows, low: Position) -> None:
        """Rows that were re-read; they stand at their low mark."""
        self._windows.append((rows, low))
        self._widest_bytes = max(self._widest_bytes, rows.widest_bytes)
        self._size_bytes += rows.size_bytes

    @property
    def next_position(self) -> Position:
        """Where in the order the next event of the open transaction stands."""
        return self._open_lsn, 2 * self._next_ordinal() + 1

    def hold_position(self) -> Position:
        """The same, and rows may be put there later."""
        position = self.next_position
        self._ranks[position] = (self._transactions << RANK_BITS) + position[1]
        return position

    @property
    def events(self) -> int:
        """How many events wait; a window counts as one, though it may hold no row."""
        waiting = len(self._frames) + len(self._marks.ids) + len(self._truncates)
        return self._events + waiting + len(self._windows)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes + self._pending_bytes

    def flush(self) -> None:
        if self._frames:
            self._flush_frames()
        if self._marks.ids:
            self._flush_marks()
        self._size_bytes += self._pending_bytes
        self._pending_bytes = 0

    def close(self, last_lsn: LSN, *, whole: bool = True) -> Batch:
        """Write what is left and freeze the batch: at the last complete transaction, or (not `whole`) where it is."""
        self.flush()
        open_tail = self._open_lsn > self._last_commit_lsn
        cut_lsn = self._last_commit_lsn if whole and open_tail else None
        return Batch(
            number=self.number,
            folder=self.folder,
            segments=tuple(self._segments),
            events=self.events,
            size_bytes=self._size_bytes,
            changes=self.changes,
            first_lsn=self.first_lsn or LSN(self._open_lsn),
            last_lsn=last_lsn,
            cut_lsn=cut_lsn,
            relations=tuple(self._relations.values()),
            truncates=_last_before(self._truncates, cut_lsn),
            partials=self._partials,
            deletes=self._deletes,
            lineage={(doctype, id): self._root(doctype, id) for doctype, id in list(self._lineage)},
            first_commit_time=self.first_commit_time,
            windows=tuple(self._windows),
            ranks=tuple(self._ranks[low] for _, low in self._windows),
            widest_bytes=self._widest_bytes,
        )

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _next_ordinal(self) -> int:
        return self._run_ordinal + len(self._frames) - self._run_start

    def _start_run(self, ordinal: int) -> None:
        self._run_start, self._run_ordinal, self._passed_over = len(self._frames), ordinal, False
        self._runs.append(_Run(self._run_start, self._open_lsn, ordinal, self._transactions))

    def _flush_frames(self) -> None:
        found = mirror.extract(self._frames, self._relations)
        lsns, ordinals, ranks = _order(self._runs, len(self._frames))
        relations = _indexes(list(self._relations), found.oids)
        doctypes = [relation.doctype for relation in self._relations.values()]
        moved = np.flatnonzero(found.key_changed)
        self._chain_all(found, doctypes, relations)
        self._deletes += int(found.is_delete.sum()) + len(moved)
        self._partials += int(found.is_partial.sum())
        columns = {
            "type": _types(doctypes, relations),
            "id": _strings(found.data, found.ids),
            "lsn": pa.array(lsns),
            "ordinal": pa.array(ordinals),
            "rank": pa.array(ranks),
            "at": pa.nulls(len(lsns), pa.int64()),
            "op": pa.array(
                np.where(found.is_delete, DELETED, np.where(found.is_partial, PARTIAL, FULL)).astype(np.int8)
            ),
            "form": pa.array(np.full(len(lsns), FRAME, dtype=np.int8)),
            "relation": pa.array(relations),
            "body": _frame_column(found),
            "prior": _prior_column(found),
        }
        changed = pa.table(columns, SCHEMA)
        self._write(pa.concat_tables([changed, _moved_away(changed, found, moved)]) if len(moved) else changed)
        ordinal = self._next_ordinal()
        self._frames, self._runs = [], []
        self._start_run(ordinal)

    def _chain_all(self, found: mirror.Extract, doctypes: list[str], relations: npt.NDArray[np.int32]) -> None:
        rows = np.flatnonzero(found.key_changed & found.is_partial)
        old, new = found.texts(found.old_ids, rows), found.texts(found.ids, rows)
        for relation, old_id, new_id in zip(relations[rows].tolist(), old, new, strict=True):
            self.chain(doctypes[relation], old_id, new_id)

    def _flush_marks(self) -> None:
        marks, self._marks = self._marks, _Marks()
        self._deletes += marks.ops.count(DELETED)
        self._partials += marks.ops.count(PARTIAL)
        lsns, ordinals, ranks = _order(marks.runs, len(marks.ids))
        forms = np.array(marks.forms, dtype=np.int8)
        bodies = _binary(marks.bodies)
        columns = {
            "type": pa.array(marks.types, pa.string()).dictionary_encode(),
            "id": pa.array(marks.ids, pa.string()),
            "lsn": pa.array(lsns),
            "ordinal": pa.array(ordinals),
            "rank": pa.array(ranks),
            "at": pa.nulls(len(lsns), pa.int64()),
            "op": pa.array(marks.ops, pa.int8()),
            "form": pa.array(forms),
            "relation": pa.array(self._relations_of(bodies, forms == FRAME)),
            "body": bodies,
            "prior": pa.array(marks.priors, pa.string()),
        }
        self._write(pa.table(columns, SCHEMA))

    def _relations_of(self, bodies: pa.Array, is_frame: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """By which number the relation of each frame goes in this batch."""
        numbers = np.full(len(bodies), -1, dtype=np.int32)
        if is_frame.any():
            _, offsets, data = bodies.buffers()
            content = np.frombuffer(data, dtype=np.uint8)
            at = np.frombuffer(offsets, dtype=np.int32)[:-1][is_frame]
            oids = np.zeros(len(at), dtype=np.int64)
            for place in range(1, 5):
                oids = (oids << 8) | content[at + place]
            numbers[is_frame] = _indexes(list(self._relations), oids)
        return numbers

    def _write(self, table: pa.Table) -> None:
        number = len(self._segments)
        path = self.folder / f"segment-{number:06}.parquet"
        at = pa.array((number << ROW_BITS) + np.arange(table.num_rows, dtype=np.int64))
        table = table.set_column(SCHEMA.get_field_index("at"), "at", at)
        widest = pc.max(pc.binary_length(table["body"])).as_py() or 0
        self._widest_bytes = max(self._widest_bytes, widest)
        with disk_errors(path.parent):
            pq.write_table(
                table,
                path,
                row_group_size=1 << BLOCK_BITS,
                compression="snappy",
                use_dictionary=["type"],
                write_statistics=False,
            )
        self._segments.append(str(path))
        self._events += table.num_rows


def _last_before(truncates: Mapping[str, list[Position]], cut_lsn: LSN | None) -> dict[str, Position]:
    """The last TRUNCATE of each type that belongs to a complete transaction."""
    counted = {
        doctype: [position for position in found if cut_lsn is None or position[0] <= cut_lsn]
        for doctype, found in truncates.items()
    }
    return {doctype: found[-1] for doctype, found in counted.items() if found}


def _order(runs: list[_Run], count: int) -> tuple[mirror.Ints, mirror.Ints, mirror.Ints]:
    """Commit LSN, ordinal and rank of every frame. Two places a change: a changed key is a delete, then an upsert."""
    begins, lsns, ordinals, transactions = np.array(runs, dtype=np.int64).T
    lengths = np.diff(begins, append=count)
    places = 2 * (np.repeat(ordinals - begins, lengths) + np.arange(count, dtype=np.int64)) + 1
    return np.repeat(lsns, lengths), places, np.repeat(transactions << RANK_BITS, lengths) + places


def _indexes(known: list[int], oids: mirror.Ints) -> npt.NDArray[np.int32]:
    ascending = np.argsort(known)
    return ascending[np.searchsorted(np.array(known)[ascending], oids)].astype(np.int32)


def _types(doctypes: list[str], indexes: npt.NDArray[np.int32]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indexes), pa.array(doctypes, pa.string()))


def _strings(data: bytes, slices: mirror.Slices) -> pa.Array:
    offsets, content = mirror.gather(data, slices)
    return pa.StringArray.from_buffers(len(slices.start), pa.py_buffer(offsets), pa.py_buffer(content))


def _frame_column(found: mirror.Extract) -> pa.Array:
    offsets = pa.py_buffer(found.offsets.astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(found.oids), [None, offsets, pa.py_buffer(found.data)])


def _binary(values: Sequence[bytes | None]) -> pa.Array:
    lengths = np.fromiter((0 if value is None else len(value) for value in values), dtype=np.int64, count=len(values))
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    content = pa.py_buffer(b"".join(value for value in values if value is not None))
    whole = pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), content])
    missing = np.fromiter((value is None for value in values), dtype=np.bool_, count=len(values))
    return pc.if_else(pa.array(missing), pa.scalar(None, pa.binary()), whole) if missing.any() else whole


def _prior_column(found: mirror.Extract) -> pa.Array:
    prior = _strings(found.data, found.old_ids)
    return pc.if_else(pa.array(found.key_changed & found.is_partial), prior, pa.scalar(None, pa.string()))


def _moved_away(changed: pa.Table, found: mirror.Extract, moved: mirror.Ints) -> pa.Table:
    """The old ids of rows whose key changed: deleted, just before the row stands under its new id."""
    old_ids = _strings(found.data, mirror.Slices(found.old_ids.start[moved], found.old_ids.length[moved]))
    rows = changed.take(pa.array(moved))
    replaced = {
        "id": old_ids,
        "ordinal": pc.subtract(rows["ordinal"], 1),
        "rank": pc.subtract(rows["rank"], 1),
        "op": pa.array(np.full(len(moved), DELETED, dtype=np.int8)),
        "body": pa.nulls(len(moved), pa.binary()),
        "prior": pa.nulls(len(moved), pa.string()),
    }
    return pa.table({name: replaced.get(name, rows[name]) for name in SCHEMA.names}, SCHEMA)
