"""Re-reading: chunk by chunk, each in a window of its own, beside the stream.

A chunk is at most `chunk_rows` rows that follow one another by key, read in ranges side by side by Spark tasks, all
under one snapshot, straight into the spool. Its window opens before the snapshot is taken and closes when everything is
read; what the window then releases is decided where the log is read (`window`). A window that turned out void is read
again, with growing pauses. Progress is stored when rows are in the target, so that a crash resumes at the chunk.

One thread does all refreshes in turns, a window at a time. Several windows may be on their way through the log.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from dbsync import chunks, control, selection
from dbsync.board import WindowBoard
from dbsync.chunks import Range, Selection
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.connection import identifier as quoted
from dbsync.errors import DbsyncError, RefreshError, StreamError
from dbsync.pace import Pace
from dbsync.ranges import RangeTask, name_reader, one_snapshot, read_ranges, reader_name, sentence_of
from dbsync.requests import DONE, FAILED, INITIAL, Refresh, Requests
from dbsync.spool import Layout, Spool, WindowRows
from dbsync.statement import Statement
from dbsync.window import HIGH, LOW, Snapshot, State

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_WATCH_SECONDS = 0.5

_CANCEL_READERS = """
    SELECT pg_catalog.pg_cancel_backend(pid) FROM pg_catalog.pg_stat_activity
    WHERE application_name = %s AND usename = current_user"""
_LOOK_FOR_TABLES_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 5.0


@dataclass(slots=True)
class Chunk:
    """Ranges of one window, until their rows are in the target."""

    part: int
    ranges: list[Range]
    window: str = ""
    rows: int = 0
    voided: int = 0
    not_before: float = 0.0

    @property
    def last_key(self) -> tuple[str, ...] | None:
        return self.ranges[-1].upper if self.ranges else None

    def pause(self) -> float:
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.voided, 10))


@dataclass(slots=True)
class Job:
    """A refresh that is being done."""

    refresh: Refresh
    selections: list[Selection]
    fingerprints: list[str]
    part: int
    after: tuple[str, ...] | None
    on_the_way: deque[Chunk] = field(default_factory=deque)
    at_end: bool = False  # of the part: no chunk is left to be begun

    @property
    def id(self) -> int:
        return self.refresh.id

    @property
    def selection(self) -> Selection:
        return self.selections[self.part]


class _StartOver(Exception):  # noqa: N818  (not an error: a turn in the way)
    def __init__(self, selections: list[Selection]) -> None:
        super().__init__()
        self.selections = selections


class _Interrupted(Exception):  # noqa: N818  (not an error either)
    """The refresh was cancelled, or dbsync is stopping."""


class Refresher:
    """Does what the refresh table asks for. `run` is the body of a thread."""

    def __init__(
        self,
        settings: Settings,
        board: WindowBoard,
        spool: Spool,
        spark: Callable[[], SparkSession],
        streaming: threading.Event,
        stopping: threading.Event,
    ) -> None:
        self._settings = settings
        self._board = board
        self._spool = spool
        self._spark = spark
        self._streaming = streaming
        self._stopping = stopping
        self._pace = Pace(settings.chunk_rest)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="dbsync-chunk")
        self._reading: Connection | None = None  # the one that `_reader` uses
        self._jobs: dict[int, Job] = {}
        self._looked_for_tables = 0.0
        self._passed_over: set[int] = set()
        self.asked = threading.Event()  # set by whoever just asked for one

    def run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            # Who does not read the slot would never see its marks; another dbsync may be doing the work.
            if not self._streaming.wait(_POLL_SECONDS):
                continue
            try:
                with connect(self._settings) as conn:
                    self._serve(conn)
                self._abandon()
            except (psycopg.OperationalError, StreamError) as error:
                # The jobs are forgotten and taken up again from what the table says is applied.
                logger.warning("Refreshing is interrupted: %s Trying again in %.1f s.", sentence_of(error), pause)
                self._abandon()
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._abandon()
        self._reader.shutdown()
        self._close_reading()

    def _close_reading(self) -> None:
        if self._reading:
            self._reading.close()
            self._reading = None

    def _serve(self, conn: Connection) -> None:
        requests = Requests(conn, self._settings)
        self._sweep_marks(conn)
        while self._streaming.is_set() and not self._stopping.is_set():
            self._pace.look(self._board.commits)
            self._ask_for_first_copies(conn, requests)
            self._take_up(conn, requests)
            busy = [self._advance(conn, requests, job) for job in list(self._jobs.values())]
            if not any(busy):
                self._rest()

    def _rest(self) -> None:
        if self._jobs:
            waiting = [chunk.window for job in self._jobs.values() for chunk in job.on_the_way if chunk.window]
            self._board.wait(lambda: any(self._is_settled(window) for window in waiting), 0.05)
        else:
            self._close_reading()
            self.asked.wait(_POLL_SECONDS)
            self.asked.clear()

    def _is_settled(self, window: str) -> bool:
        return self._board.window(window).state in (State.APPLIED, State.VOID)

    def _take_up(self, conn: Connection, requests: Requests) -> None:
        waiting = {refresh.id: refresh for refresh in requests.waiting()}
        for id in self._jobs.keys() - waiting.keys():
            self._drop(self._jobs[id])
            logger.info("refresh %d was cancelled", id)
        for id in waiting.keys() - self._jobs.keys():
            self._begin(conn, requests, waiting[id])

    def _begin(self, conn: Connection, requests: Requests, refresh: Refresh) -> None:
        try:
            selections = selection.understand(conn, self._settings, _statement(refresh))
        except RefreshError as error:
            logger.error("refresh %d: %s", refresh.id, error)
            requests.finished(refresh.id, FAILED, str(error))
            return
        requests.started(refresh.id, sum(part.estimated_rows for part in selections))
        after = tuple(refresh.last_key) if refresh.last_key else None
        fingerprints = [selection.fingerprint(conn, part.relation.oid) for part in selections]
        self._jobs[refresh.id] = Job(refresh, selections, fingerprints, min(refresh.part, len(selections) - 1), after)
        logger.info("refresh %d: %s%s", refresh.id, refresh.query, f" after {after}" if after else "")

    def _advance(self, conn: Connection, requests: Requests, job: Job) -> bool:
        """Do one thing for a refresh; False when there was nothing to do but wait."""
        try:
            settled = self._settle(conn, requests, job)
            if job.id not in self._jobs:
                return True
            on_the_way = sum(len(other.on_the_way) for other in self._jobs.values())
            if not job.at_end and self._pace.may_open(on_the_way):
                self._open_window(conn, job, None)
                return True
            return settled
        except psycopg.OperationalError:
            raise
        except _StartOver as changed:
            self._start_over(conn, requests, job, changed.selections)
            return True
        except _Interrupted:
            self._drop(job)
            return True
        except (psycopg.Error, RefreshError) as error:
            logger.error("refresh %d: %s", job.id, sentence_of(error))
            self._drop(job)
            requests.finished(job.id, FAILED, sentence_of(error))
            return True

    def _start_over(self, conn: Connection, requests: Requests, job: Job, selections: list[Selection]) -> None:
        """The keys read so far mean nothing any more: the table got another key, or other partitions."""
        logger.warning("refresh %d starts over: %s got another key.", job.id, job.selection.relation.doctype)
        self._drop(job)
        fingerprints = [selection.fingerprint(conn, part.relation.oid) for part in selections]
        self._jobs[job.id] = Job(job.refresh, selections, fingerprints, 0, None)
        requests.next_part(job.id, 0)

    def _settle(self, conn: Connection, requests: Requests, job: Job) -> bool:
        """Store what is in the target, read again what is void, end what is done."""
        progressed = False
        while job.on_the_way and self._board.window(job.on_the_way[0].window).state is State.APPLIED:
            chunk = job.on_the_way.popleft()
            window = self._board.window(chunk.window)
            requests.advanced(
                job.id,
                part=chunk.part,
                last_key=chunk.last_key,
                rows=chunk.rows,
                superseded=window.superseded,
                voided=chunk.voided,
            )
            self._board.forget(chunk.window)
            progressed = True
        for chunk in job.on_the_way:
            if self._board.window(chunk.window).state is State.VOID:
                progressed |= self._read_again(conn, job, chunk)
        if job.at_end and not job.on_the_way:
            self._end_part(requests, job)
            progressed = True
        return progressed

    def _read_again(self, conn: Connection, job: Job, chunk: Chunk) -> bool:
        window = self._board.window(chunk.window)
        now = time.monotonic()
        if not chunk.not_before:
            chunk.not_before = now + chunk.pause()
            chunk.voided += 1
            logger.warning(
                "A window over %s is read again (%d): %s.",
                job.selections[chunk.part].relation.doctype,
                chunk.voided,
                window.reason,
            )
        if now < chunk.not_before:
            return False
        self._board.forget(chunk.window)
        chunk.not_before = 0.0
        self._open_window(conn, job, chunk)
        return True

    def _end_part(self, requests: Requests, job: Job) -> None:
        if job.part + 1 < len(job.selections):
            job.part, job.after, job.at_end = job.part + 1, None, False
            requests.next_part(job.id, job.part)
            return
        requests.finished(job.id, DONE)
        del self._jobs[job.id]
        logger.info("refresh %d is done", job.id)

    def _open_window(self, conn: Connection, job: Job, again: Chunk | None) -> None:
        """One window: low mark, snapshot, rows, high mark. Reads the next chunk, or one that turned out void."""
        part = again.part if again else job.part
        before = self._keep_understanding(conn, job, part)
        chosen = job.selections[part]
        window = str(uuid.uuid4())
        self._board.expect(window, chosen.relation.oid)
        chunk = again or Chunk(part, [])
        chunk.window = window
        try:
            self._mark(conn, window, LOW)
            rows = self._read_unless_altered(conn, job, chunk, before)
            if rows is None:
                self._board.void(window, f"{chosen.relation.doctype} was rewritten, truncated or altered meanwhile")
            else:
                self._board.read(window, rows)
        except BaseException:
            self._board.void(window, "reading it failed")
            if again is None:
                self._board.forget(window)
            raise
        finally:
            self._close_marks(conn, window)
        if again is None and rows is None and not chunk.ranges:
            # It looked empty, or could not even be divided: the next window begins where this one would have.
            self._board.forget(window)
        elif again is None:
            job.on_the_way.append(chunk)
            job.after = chunk.last_key
            job.at_end = job.after is None

    def _read_unless_altered(self, conn: Connection, job: Job, chunk: Chunk, before: str) -> WindowRows | None:
        """The chunk's rows; None where the table has changed since its fingerprint was taken.

        To a snapshot from before a rewrite or a TRUNCATE it looks empty, and a SELECT of columns that are gone fails.
        """
        chosen = job.selections[chunk.part]
        try:
            rows = self._read_watched(conn, job, chosen, chunk)
        except (psycopg.Error, RefreshError) as error:
            if selection.fingerprint(conn, chosen.relation.oid) == before:
                raise
            logger.debug("reading %s failed: %s", chosen.relation.doctype, error)
            return None
        if selection.fingerprint(conn, chosen.relation.oid) == before:
            return rows
        rows.discard()
        return None

    def _keep_understanding(self, conn: Connection, job: Job, part: int) -> str:
        """The table's fingerprint; when it changed since the SELECT was understood, it has to be understood anew."""
        found = selection.fingerprint(conn, job.selections[part].relation.oid)
        if found != job.fingerprints[part]:
            anew = selection.understand(conn, self._settings, _statement(job.refresh))
            if [_keys(one) for one in anew] != [_keys(one) for one in job.selections]:
                raise _StartOver(anew)
            job.selections = anew
            job.fingerprints[part] = found
        return found

    def _read_watched(self, conn: Connection, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        """Read in another thread, so that a refresh that was cancelled, or a stop, need not wait for a slow SELECT."""
        requests = Requests(conn, self._settings)
        reading = self._reader.submit(self._read, job, chosen, chunk)
        interrupted = False
        while not wait([reading], timeout=_WATCH_SECONDS).done:
            found = requests.get(job.id)
            if self._stopping.is_set() or found is None or found.is_over:
                interrupted = True
                conn.execute(_CANCEL_READERS, [reader_name(chunk.window)])
        if interrupted:
            raise _Interrupted
        return reading.result()

    def _read(self, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        """Read the chunk's ranges under one snapshot. A chunk without ranges gets the next ones."""
        started = time.monotonic()
        if self._reading is None or self._reading.broken or self._reading.closed:
            self._reading = connect(self._settings)
        try:
            name_reader(self._reading, chunk.window)
            rows = self._read_under_snapshot(self._reading, job, chosen, chunk)
        except BaseException:
            self._reading.close()
            raise
        self._pace.read(time.monotonic() - started, rows.rows, rows.size_bytes)
        return rows

    def _read_under_snapshot(self, conn: Connection, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        with one_snapshot(conn):
            # The first statement is what takes the snapshot, so it must be the board's.
            self._board.snapshot(chunk.window, lambda: current_snapshot(conn))
            exported = _value(conn, "SELECT pg_catalog.pg_export_snapshot()")
            if not chunk.ranges:
                rows = self._pace.rows(job.refresh.chunk_rows or self._settings.chunk_rows)
                readers = self._pace.readers(rows, self._settings.chunk_parallelism)
                chunk.ranges = chunks.next_ranges(conn, chosen, job.after, rows, readers)
            folder = self._spool.window_folder()
            tasks = [
                RangeTask(
                    self._settings,
                    chosen,
                    found,
                    exported,
                    chunk.window,
                    number,
                    str(folder / f"{chunk.window}-{number}.parquet"),
                )
                for number, found in enumerate(chunk.ranges)
            ]
            done = read_ranges(self._spark(), tasks)
        chunk.rows = sum(read.rows for read in done)
        return WindowRows(
            id=chunk.window,
            refresh=job.id,
            layout=Layout(chosen.relation, chosen.columns, chosen.left_out),
            segments=tuple(task.path for task, read in zip(tasks, done, strict=True) if read.rows),
            numbers=tuple(task.number for task, read in zip(tasks, done, strict=True) if read.rows),
            rows=chunk.rows,
            size_bytes=sum(read.size_bytes for read in done),
            widest_bytes=max((read.widest_bytes for read in done), default=0),
        )

    def _mark(self, conn: Connection, window: str, mark: str) -> None:
        table = quoted(self._settings.ctrl_namespace, self._settings.wm_table)
        conn.execute(sql.SQL("INSERT INTO {} (id, mark) VALUES (%s, %s)").format(table), [window, mark])

    def _close_marks(self, conn: Connection, window: str) -> None:
        """Write the high mark and clear both away. A low mark without its high would keep the batch open for ever."""
        try:
            try:
                self._write_high(conn, window)
            except psycopg.Error as error:
                logger.debug("high mark: %s", error)
                with connect(self._settings) as another:
                    self._write_high(another, window)
        except (DbsyncError, psycopg.Error) as error:
            self._board.void(window, "its high mark could not be written")
            logger.debug("high mark: %s", error)

    def _write_high(self, conn: Connection, window: str) -> None:
        table = quoted(self._settings.ctrl_namespace, self._settings.wm_table)
        self._mark(conn, window, HIGH)
        conn.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(table), [window])

    def _sweep_marks(self, conn: Connection) -> None:
        """Marks left by a crash are of no use: what they were to release died with the process.

        Another dbsync's marks may be among them; they do their work in the log, where they stay.
        """
        table = sql.Identifier(self._settings.ctrl_namespace, self._settings.wm_table)
        conn.execute(sql.SQL("DELETE FROM {}").format(table))

    def _ask_for_first_copies(self, conn: Connection, requests: Requests) -> None:
        """Every published table is copied once, when it is first seen."""
        now = time.monotonic()
        if self._settings.snapshot != INITIAL or now - self._looked_for_tables < _LOOK_FOR_TABLES_SECONDS:
            return
        self._looked_for_tables = now
        asked = requests.first_copies()
        for schema, table in control.published_tables(conn, self._settings):
            name = sql.Identifier(schema, table)
            oid = int(_value(conn, sql.SQL("SELECT {}::regclass::oid::int8").format(sql.Literal(name.as_string(conn)))))
            if oid in asked or oid in self._passed_over:
                continue
            query = sql.SQL("SELECT * FROM {}").format(name).as_string(conn)
            try:
                selection.understand(conn, self._settings, query)
            except RefreshError as error:
                logger.warning("The first copy of %s.%s is left out: %s", schema, table, error)
                self._passed_over.add(oid)
                continue
            requests.submit(query, kind=INITIAL, relation=oid)
            logger.info("%s.%s gets its first copy; --snapshot never leaves that out", schema, table)

    def _drop(self, job: Job) -> None:
        for chunk in job.on_the_way:
            self._board.void(chunk.window, "the refresh has ended")
            self._board.forget(chunk.window)
        self._jobs.pop(job.id, None)

    def _abandon(self) -> None:
        for job in list(self._jobs.values()):
            self._drop(job)


def current_snapshot(conn: Connection) -> Snapshot:
    return Snapshot.parse(str(_value(conn, "SELECT pg_catalog.pg_current_snapshot()")))


def _value(conn: Connection, query: Any) -> Any:
    row = conn.execute(query).fetchone()
    assert row is not None
    return row[0]


def _statement(refresh: Refresh) -> str | Statement:
    return Statement.from_json(json.dumps(refresh.params)) if refresh.params else refresh.query


def _keys(chosen: Selection) -> tuple[int, Any]:
    """What the bounds of ranges depend on: the table, and its key's columns with their types and operators."""
    return chosen.relation.oid, chosen.key
