"""A batch of few events reduced in one stage: planning SQL and shuffling would take longer than the batch itself.

One task reduces the events, and with them the re-read rows whose keys they touched. All other re-read rows are final as
they lie there; each segment of them is a task of its own. Every task finds out by itself which keys were touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from dbsync.finish import DELETES_TURN, Chunk, Finish
from dbsync.fold import Event
from dbsync.spool import FULL, LINE, PARTIAL, ROW_BITS, Batch, SegmentReader, Source

FEW_EVENTS = 20_000
FEW_BYTES = 32 * 1024 * 1024

_KEYS = ["type", "id", "lsn", "ordinal"]
_PLACES = ["rank", "at", "form", "relation"]
_BODIES = ["op", "form", "relation", "body", "prior"]

_EVENTS = -1  # the part that is no segment of a window


def is_handful(batch: Batch) -> bool:
    """Whether one task can take all events, and the re-read rows they may touch."""
    events_bytes = batch.size_bytes - sum(rows.size_bytes for rows, _ in batch.windows)
    most_bytes = events_bytes + (batch.events * batch.widest_bytes if batch.windows else 0)
    return batch.events <= FEW_EVENTS and most_bytes <= FEW_BYTES and batch.keys_are_distinct


def chunks(spark: SparkSession, batch: Batch, finish: Finish, turns: Sequence[str | None]) -> Iterator[Chunk]:
    """Chunks of all final states, a turn after the other."""
    reread = [number for number, source in batch.sources.items() if source.window is not None]
    for turn in turns:
        parts = [*([_EVENTS] if batch.segments else []), *([] if turn == DELETES_TURN else reread)]
        if parts:
            tasks = spark.sparkContext.parallelize(parts, len(parts))
            yield from (Chunk(*found) for found in tasks.mapPartitions(_Part(batch, finish.in_turn(turn))).collect())


class _Part:
    """Runs on the executors: the number of a window's segment in, or of all events; chunks out."""

    def __init__(self, batch: Batch, finish: Finish) -> None:
        self._batch = batch
        self._finish = finish

    def __call__(self, parts: Iterable[int]) -> Iterator[tuple[Any, ...]]:
        for number in parts:
            if number == _EVENTS:
                chunks = self._finish.chunks(self._reduced().to_batches())
            else:
                chunks = self._finish.unfolded().chunks(self._untouched(number).to_batches())
            yield from map(tuple, chunks)

    def _reduced(self) -> pa.Table:
        folds = self._batch.folds
        events = self._events([*_KEYS, *_BODIES] if folds else [*_KEYS, *_PLACES])
        touched = [
            self._touched(number, source, events)
            for number, source in self._batch.sources.items()
            if source.window is not None and self._counts(source.window)
        ]
        events = pa.concat_tables([events, *touched]).combine_chunks()
        return self._in_order(events) if folds else _newest(events)

    def _events(self, columns: list[str]) -> pa.Table:
        """All events of the batch that count, without the re-read rows."""
        tables = [pq.ParquetFile(segment).read(columns) for segment in self._batch.segments]
        if not tables:
            return pa.table({name: pa.array([], _TYPES[name]) for name in columns})
        return self._counted(pa.concat_tables(table.cast(_schema(columns)) for table in tables))

    def _counted(self, events: pa.Table) -> pa.Table:
        """Without what a TRUNCATE made void, and without a transaction that was not read to its end."""
        lsn, ordinal = pc.field("lsn"), pc.field("ordinal")
        if self._batch.cut_lsn is not None:
            events = events.filter(lsn <= int(self._batch.cut_lsn))
        for doctype, (at, place) in self._batch.truncates.items():
            before = (lsn < int(at)) | ((lsn == int(at)) & (ordinal < place))
            events = events.filter((pc.field("type") != doctype) | ~before)
        return events

    def _counts(self, window: int) -> bool:
        """The same for a window: its rows all stand at its low mark."""
        rows, low = self._batch.windows[window]
        cut, truncated = self._batch.cut_lsn, self._batch.truncates.get(rows.layout.relation.doctype)
        return (cut is None or low[0] <= cut) and (truncated is None or low >= truncated)

    def _untouched(self, number: int) -> pa.Table:
        """Where the rows of a segment lie whose keys no event speaks of."""
        source = self._batch.sources[number]
        window = self._window(source)
        if not self._counts(window):
            return _places([], [])
        segment = pq.ParquetFile(source.path)
        events = self._events(_KEYS)
        if len(events):
            ids = segment.read(["id"])["id"]
            rows = np.flatnonzero(~self._is_touched(window, ids, events).to_numpy(zero_copy_only=False))
        else:
            rows = np.arange(segment.metadata.num_rows)
        return _places((number << ROW_BITS) + rows, pa.nulls(len(rows), pa.int32()))

    def _touched(self, number: int, source: Source, events: pa.Table) -> pa.Table:
        """The other rows of the segment, as events at their low mark."""
        window = self._window(source)
        ids = pq.ParquetFile(source.path).read(["id"])["id"].combine_chunks()
        rows = np.flatnonzero(self._is_touched(window, ids, events).to_numpy(zero_copy_only=False))
        batch, count = self._batch, len(rows)
        read, (lsn, ordinal) = batch.windows[window]
        same = {
            "type": read.layout.relation.doctype,
            "lsn": int(lsn),
            "ordinal": int(ordinal),
            "rank": batch.ranks[window],
            "op": PARTIAL if read.layout.left_out else FULL,
            "form": LINE,
            "relation": window,
            "prior": None,
        }
        columns = {name: pa.repeat(pa.scalar(value, _TYPES[name]), count) for name, value in same.items()}
        columns |= {"id": ids.take(pa.array(rows)), "at": pa.array((number << ROW_BITS) + rows)}
        if "body" in events.column_names:
            found = [table["body"] for table in SegmentReader()(source, rows, ["body"])]
            columns["body"] = pa.concat_arrays(
                [chunk for body in found for chunk in body.chunks] or [pa.array([], pa.binary())]
            )
        return pa.table({name: columns[name] for name in events.column_names})

    def _is_touched(self, window: int, ids: pa.ChunkedArray, events: pa.Table) -> pa.ChunkedArray:
        doctype = self._batch.windows[window][0].layout.relation.doctype
        return pc.is_in(ids, value_set=events.filter(pc.field("type") == doctype)["id"].combine_chunks())

    def _in_order(self, events: pa.Table) -> pa.Table:
        """Events of a record, and of the records it took values from, together and in order."""
        lineage = self._batch.lineage
        keys = zip(events["type"].to_pylist(), events["id"].to_pylist(), strict=True)
        roots = [lineage.get((doctype, id), id) for doctype, id in keys]
        ordered = events.append_column("root", pa.array(roots, pa.string())).sort_by(
            [(name, "ascending") for name in ("type", "root", "lsn", "ordinal")]
        )
        return ordered.select([*Event._fields, "root"])

    @staticmethod
    def _window(source: Source) -> int:
        assert source.window is not None
        return source.window


def _newest(events: pa.Table) -> pa.Table:
    """Where the newest event of each record lies, in the order of the spool, and the window with a row of it."""
    newest: dict[tuple[str, str], int] = {}
    windows: dict[tuple[str, str], int] = {}
    columns = [events[name].to_pylist() for name in ("type", "id", "at", "form", "relation")]
    rows = list(zip(*columns, strict=True))
    for row in np.argsort(events["rank"].to_numpy(), kind="stable").tolist():
        doctype, id, at, form, relation = rows[row]
        newest[doctype, id] = at
        if form == LINE:
            windows[doctype, id] = relation
    found = sorted((at, windows.get(key)) for key, at in newest.items())
    return _places([at for at, _ in found], [window for _, window in found])


def _places(places: Sequence[int] | np.ndarray, windows: Sequence[int | None] | pa.Array) -> pa.Table:
    return pa.table({"at": pa.array(places, pa.int64()), "window": pa.array(windows, pa.int32())})


_TYPES = {
    "type": pa.string(),
    "id": pa.string(),
    "lsn": pa.int64(),
    "ordinal": pa.int64(),
    "rank": pa.int64(),
    "at": pa.int64(),
    "op": pa.int8(),
    "form": pa.int8(),
    "relation": pa.int32(),
    "body": pa.binary(),
    "prior": pa.string(),
}


def _schema(columns: Iterable[str]) -> pa.Schema:
    return pa.schema([(name, _TYPES[name]) for name in columns])
