"""Reading the ranges of a chunk side by side, on the executors: from COPY into segments of the spool.

Every reader sees the one snapshot of the window. Lines are carried on as they come; all that is looked at is the key,
which stands first in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from dbsync import chunks
from dbsync.chunks import Range, Selection
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.errors import DbsyncError, RefreshError, StreamError
from dbsync.mirror import Ints, Slices, gather
from dbsync.private import disk_errors
from dbsync.relation import identifier, unescape
from dbsync.spark import reason, why_spark_ended
from dbsync.spool import ROW_BITS, WINDOW_SCHEMA

# Whoever waits for a lock inside a window keeps everything that comes after its low mark from being handed over.
_LOCK_TIMEOUT = "500ms"
_PREPARE = (
    "SELECT pg_catalog.set_config('application_name', %s, false), pg_catalog.set_config('lock_timeout', %s, false)"
)


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What an executor needs to read a range."""

    settings: Settings
    selection: Selection
    range: Range
    snapshot: str
    window: str
    number: int
    path: str


class Read(NamedTuple):
    """What was read of a range."""

    rows: int
    size_bytes: int
    widest_bytes: int
    seconds: float


def read_ranges(spark: SparkSession, tasks: list[RangeTask]) -> list[Read]:
    """Read ranges side by side on the executors."""
    if not tasks:
        return []
    try:
        results: list[Any] = spark.sparkContext.parallelize(tasks, len(tasks)).map(try_range).collect()
    except (PySparkException, Py4JError, OSError, EOFError) as error:
        if ended := why_spark_ended(spark):
            raise ended from error
        raise StreamError(f"Spark could not read a chunk: {reason(error)}.") from error
    for result in results:
        if isinstance(result, DbsyncError):
            raise result
    return results


def try_range(task: RangeTask) -> Read | DbsyncError:
    """Read a range. What goes wrong is a result like any other, so that its words reach the one who asked."""
    try:
        with disk_errors(Path(task.path).parent):
            return read_range(task)
    except DbsyncError as error:
        return error
    except psycopg.OperationalError as error:
        return StreamError(sentence_of(error))
    except psycopg.Error as error:
        return RefreshError(sentence_of(error))


def read_range(task: RangeTask) -> Read:
    """Read one range into a segment, in groups of bounded size. Writes no file where there is no row."""
    rows = size = widest = 0
    started = time.monotonic()
    with ExitStack() as open_things:
        conn = open_things.enter_context(connect(task.settings))
        prepare_reader(conn, task.window)
        open_things.enter_context(one_snapshot(conn))
        conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(task.snapshot)))
        writer: pq.ParquetWriter | None = None
        for lines in filter(None, chunks.copy_out(conn, task.selection, task.range)):
            if writer is None:
                writer = open_things.enter_context(_writer(task.path))
            ids, bodies = split_lines(lines, len(task.selection.relation.key))
            places = (task.number << ROW_BITS) + np.arange(rows, rows + len(lines), dtype=np.int64)
            writer.write_table(pa.table([ids, pa.array(places), bodies], schema=WINDOW_SCHEMA))
            rows += len(lines)
            size += bodies.nbytes
            widest = max(widest, *map(len, lines))
    return Read(rows, size, widest, time.monotonic() - started)


def _writer(path: str) -> pq.ParquetWriter:
    """LZ4 costs about what it saves in writing, and is read in half the time that snappy takes."""
    return pq.ParquetWriter(path, WINDOW_SCHEMA, use_dictionary=False, compression="lz4", write_statistics=False)


def split_lines(lines: Sequence[bytes], width: int) -> tuple[pa.Array, pa.Array]:
    """The ids of rows, whose key is the first columns of their line, and the lines without what ends them."""
    lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines)) - 1
    # COPY escapes a line break that is part of a value.
    data = b"".join(lines).replace(b"\n", b"")
    ends = np.cumsum(lengths)
    offsets = np.append(0, ends).astype(np.int32)
    bodies = pa.Array.from_buffers(pa.binary(), len(lines), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return _ids(data, ends - lengths, ends, width), bodies


def _ids(data: bytes, starts: Ints, ends: Ints, width: int) -> pa.Array:
    if width == 1:
        offsets, found = gather(data, Slices(starts, _until_tab(data, starts, ends)))
        if b"\\" not in (content := found.tobytes()):
            return pa.StringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(content))
    places = zip(starts.tolist(), ends.tolist(), strict=True)
    return pa.array([_id(data[start:end], width) for start, end in places], pa.string())


def _until_tab(data: bytes, starts: Ints, ends: Ints) -> Ints:
    """How long the first column of each line is."""
    tabs = np.append(np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _TAB), len(data))
    lengths: Ints = np.minimum(tabs[np.searchsorted(tabs, starts)], ends) - starts
    return lengths


_TAB = ord("\t")


def _id(line: bytes, width: int) -> str:
    parts = [str(part, "utf-8") for part in line.split(b"\t", width)[:width]]
    return identifier([unescape(part) if "\\" in part else part for part in parts])


def prepare_reader(conn: Connection, window: str) -> None:
    """Let others see, and cancel, what this session reads; it waits for no lock that is held for long."""
    conn.execute(_PREPARE, [reader_name(window), _LOCK_TIMEOUT])


@contextmanager
def impatient(conn: Connection) -> Iterator[None]:
    """The same for a while in a session that does other things too: a lock on one table concerns no other refresh."""
    conn.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", [_LOCK_TIMEOUT])
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("SET lock_timeout = 0")


def is_lost(conn: Connection) -> bool:
    """Whether the connection is gone: one that nobody uses does not know by itself."""
    try:
        conn.execute("SELECT 1")
    except psycopg.Error:
        return conn.closed
    return False


@contextmanager
def one_snapshot(conn: Connection) -> Iterator[None]:
    """A REPEATABLE READ, READ ONLY transaction that is always rolled back."""
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        if not conn.closed:
            conn.rollback()


def reader_name(window: str) -> str:
    """What a session that reads for a window calls itself."""
    return f"dbsync window {window}"


def sentence_of(error: Exception) -> str:
    if isinstance(error, DbsyncError):
        return str(error)
    words = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return f"{(words or str(error)).rstrip('.')}."
