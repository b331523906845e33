"""Re-reading: chunk by chunk, each in a window of its own, beside the stream.

A chunk is at most `chunk_rows` rows that follow one another by key, read in ranges side by side by Spark tasks, all
under one snapshot, straight into the spool. Its window opens before the snapshot is taken and closes when everything is
read; what the window then releases is decided where the log is read (`window`). A window that turned out void is read
again, with growing pauses. Progress is stored when rows are in the target, so that a crash resumes at the chunk.

One thread does all refreshes in turns, a window at a time. Several windows may be on their way through the log. What is
wrong with one refresh is that one's own affair: it waits, or fails, and the others go on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from dbsync import chunks, control, selection
from dbsync.board import WindowBoard
from dbsync.chunks import Range, Selection, TableLockedError
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.connection import identifier as quoted
from dbsync.control import PublishedTable
from dbsync.errors import DbsyncError, RefreshError, StreamError
from dbsync.pace import Pace
from dbsync.ranges import (
    RangeTask,
    impatient,
    is_lost,
    one_snapshot,
    prepare_reader,
    read_ranges,
    reader_name,
    sentence_of,
)
from dbsync.requests import DONE, FAILED, INITIAL, Refresh, Requests
from dbsync.spool import Layout, Spool, WindowRows
from dbsync.statement import Statement
from dbsync.window import HIGH, LOW, Snapshot, State, widen

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
_LOCKED_PAUSE_SECONDS = 1.0

_OTHER_KEY = "what it has read was of another key, or of other partitions."


@dataclass(slots=True)
class Chunk:
    """Ranges of one window, until their rows are in the target."""

    part: int
    after: tuple[str, ...] | None  # the last key before it
    ranges: list[Range] = field(default_factory=list)
    window: str = ""
    rows: int = 0
    voided: int = 0
    not_before: float = 0.0  # of a void one: when it is read again

    @property
    def last_key(self) -> tuple[str, ...] | None:
        return self.ranges[-1].upper if self.ranges else None

    def pause(self) -> float:
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.voided, 10))


@dataclass(slots=True)
class Job:
    """A refresh that is being done. Its selections are empty until the SELECT is understood."""

    refresh: Refresh
    selections: list[Selection] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    part: int = 0
    after: tuple[str, ...] | None = None
    on_the_way: deque[Chunk] = field(default_factory=deque)
    at_end: bool = False  # of the part: no chunk is left to be begun
    failures: int = 0  # of PostgreSQL, since a chunk was read
    not_before: float = 0.0

    @property
    def id(self) -> int:
        return self.refresh.id

    def put_off(self, seconds: float) -> None:
        self.not_before = time.monotonic() + seconds


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
        self._told_to_wait: set[int] = set()
        self._not_before: dict[int, int] | None = None  # by table: the transaction before which all have to be over
        self._failed_copies: set[int] | None = None  # in an earlier run, and not asked for again yet
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
            except (psycopg.Error, StreamError) as error:
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
            self._take_up(requests)
            busy = [self._advance(conn, requests, job) for job in list(self._jobs.values())]
            if not any(busy):
                self._rest()

    def _rest(self) -> None:
        if self._jobs:
            self._board.wait(lambda: any(self._can_go_on(job) for job in self._jobs.values()), 0.05)
        else:
            self._close_reading()
            self.asked.wait(_POLL_SECONDS)
            self.asked.clear()

    def _can_go_on(self, job: Job) -> bool:
        """Whether there is something to do for it now, and not only to wait for."""
        settled = any(self._is_news(job, chunk) for chunk in job.on_the_way)
        return settled or self._may_open(job)

    def _is_news(self, job: Job, chunk: Chunk) -> bool:
        state = self._state(chunk)
        # Chunks are stored in their order: one that is applied before the first of them has to wait.
        return (state is State.APPLIED and chunk is job.on_the_way[0]) or (state is State.VOID and not chunk.not_before)

    def _may_open(self, job: Job) -> bool:
        """Whether a window may be opened for it: for the first chunk that is void, or else for the next one.

        As long as a chunk is void none is begun behind it, or all of them would be read in vain.
        """
        void = self._first_void(job)
        not_before = max(job.not_before, void.not_before) if void else job.not_before
        if (job.at_end and not void) or time.monotonic() < not_before:
            return False
        # Those that are void only wait, for something that may last: nobody else has to wait with them.
        chunks = [chunk for other in self._jobs.values() for chunk in other.on_the_way]
        return self._pace.may_open(sum(self._state(chunk) not in (State.VOID, State.APPLIED) for chunk in chunks))

    def _first_void(self, job: Job) -> Chunk | None:
        return next((chunk for chunk in job.on_the_way if self._state(chunk) is State.VOID), None)

    def _state(self, chunk: Chunk) -> State:
        return self._board.window(chunk.window).state

    def _take_up(self, requests: Requests) -> None:
        waiting = {refresh.id: refresh for refresh in requests.waiting()}
        for id in self._jobs.keys() - waiting.keys():
            self._drop(self._jobs[id])
            logger.info("refresh %d was cancelled", id)
        for id, refresh in waiting.items():
            self._jobs.setdefault(id, Job(refresh))

    def _advance(self, conn: Connection, requests: Requests, job: Job) -> bool:
        """Do one thing for a refresh; False when there was nothing to do but wait."""
        try:
            if not job.selections:
                return self._begin(conn, requests, job)
            settled = self._settle(requests, job)
            if job.id in self._jobs and self._may_open(job):
                self._pass_on(job)
                self._open_window(conn, job, self._first_void(job))
                return True
            return settled
        except _StartOver as changed:
            self._start_over(conn, requests, job, changed.selections)
        except _Interrupted:
            self._drop(job)
        except TableLockedError as error:
            logger.debug("refresh %d waits: %s", job.id, error)
            job.put_off(_LOCKED_PAUSE_SECONDS)
        except RefreshError as error:
            self._fail(requests, job, str(error))
        except (psycopg.Error, StreamError) as error:
            if is_lost(conn):
                raise
            if isinstance(error, psycopg.OperationalError | StreamError):
                self._try_again_or_fail(requests, job, error)
            else:
                self._fail(requests, job, sentence_of(error))
        except DbsyncError:
            raise  # not of this refresh alone: Spark has ended, the disk is full
        except Exception as error:
            logger.debug("refresh %d", job.id, exc_info=error)
            self._fail(requests, job, f"An unexpected {type(error).__name__} ended it: {sentence_of(error)}")
        return True

    def _pass_on(self, job: Job) -> None:
        """Whoever opens a window is asked last when the next one may be opened."""
        self._jobs[job.id] = self._jobs.pop(job.id)

    def _try_again_or_fail(self, requests: Requests, job: Job, error: Exception) -> None:
        """PostgreSQL could not do it, and the connection is there: it may be able to in a while."""
        if job.failures >= self._settings.retries:
            self._fail(requests, job, sentence_of(error))
            return
        pause = min(_LONGEST_PAUSE_SECONDS, self._settings.retry_seconds * 2.0**job.failures)
        logger.warning("refresh %d: %s Trying again in %.1f s.", job.id, sentence_of(error), pause)
        job.failures += 1
        job.put_off(pause)

    def _fail(self, requests: Requests, job: Job, words: str) -> None:
        logger.error("refresh %d: %s", job.id, words)
        self._drop(job)
        requests.finished(job.id, FAILED, words)

    def _begin(self, conn: Connection, requests: Requests, job: Job) -> bool:
        """Understand the SELECT, and find out where to begin."""
        if time.monotonic() < job.not_before:
            return False
        self._go_on(conn, requests, job.refresh, self._understood(conn, job.refresh))
        logger.info("refresh %d: %s", job.id, job.refresh.query)
        return True

    def _understood(self, conn: Connection, refresh: Refresh, *, runs: bool = False) -> list[Selection]:
        try:
            with impatient(conn):
                return selection.understand(conn, self._settings, _statement(refresh), runs=runs)
        except StreamError as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise TableLockedError("Somebody holds a lock on what the SELECT reads.", "Wait.") from error
            raise

    def _go_on(self, conn: Connection, requests: Requests, refresh: Refresh, selections: list[Selection]) -> None:
        """Do a refresh from where it is stored to be; from its beginning, where that place means nothing any more."""
        digest = _digest(selections)
        part, after = _place(refresh, selections, digest)
        if refresh.part or refresh.last_key is not None:
            logger.info("refresh %d goes on in part %d after %s", refresh.id, part, after)
        # Unknown as yet: the tables may have been altered since they were looked at. The first window looks once more.
        fingerprints = [""] * len(selections)
        estimated = sum(one.estimated_rows for one in selections)
        requests.started(refresh.id, estimated, key_digest=digest, part=part, last_key=after)
        self._jobs[refresh.id] = Job(refresh, selections, fingerprints, part, after)

    def _start_over(self, conn: Connection, requests: Requests, job: Job, selections: list[Selection]) -> None:
        """The keys read so far mean nothing any more: the table got another key, or other partitions."""
        logger.warning("refresh %d starts over: %s", job.id, _OTHER_KEY)
        self._drop(job)
        self._go_on(conn, requests, replace(job.refresh, part=0, last_key=None), selections)

    def _settle(self, requests: Requests, job: Job) -> bool:
        """Store what is in the target, put off what is void, end what is done."""
        progressed = False
        while job.on_the_way and self._state(chunk := job.on_the_way[0]) is State.APPLIED:
            requests.advanced(
                job.id,
                part=chunk.part,
                last_key=chunk.last_key,
                rows=chunk.rows,
                superseded=self._board.window(chunk.window).superseded,
                voided=chunk.voided,
            )
            job.on_the_way.popleft()
            self._board.forget(chunk.window)
            progressed = True
        for chunk in job.on_the_way:
            if self._state(chunk) is State.VOID and not chunk.not_before:
                self._put_off(job, chunk)
        if job.at_end and not job.on_the_way:
            self._end_part(requests, job)
            progressed = True
        return progressed

    def _put_off(self, job: Job, chunk: Chunk) -> None:
        chunk.not_before = time.monotonic() + chunk.pause()
        chunk.voided += 1
        logger.warning(
            "A window over %s is read again (%d): %s.",
            job.selections[chunk.part].relation.doctype,
            chunk.voided,
            self._board.window(chunk.window).reason,
        )

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
        before = self._keep_understanding(conn, job)
        self._spark()  # it takes seconds to start, and nothing is handed over while a window is open
        chunk = self._expected(job, again)
        try:
            self._mark(conn, chunk.window, LOW)
            rows = self._read_unless_void(conn, job, chunk, before)
            if isinstance(rows, WindowRows):
                self._board.read(chunk.window, rows)
            else:
                self._board.void(chunk.window, rows)
        except BaseException:
            self._board.void(chunk.window, "reading it failed")
            raise
        finally:
            self._close_marks(conn, chunk.window)
        if isinstance(rows, WindowRows):
            job.failures = 0
            if chunk is job.on_the_way[-1]:
                job.after = chunk.last_key
                job.at_end = job.after is None

    def _expected(self, job: Job, again: Chunk | None) -> Chunk:
        """A chunk with a window of its own, which the log may show from now on."""
        if again:
            self._board.forget(again.window)
        chunk = again or Chunk(job.part, job.after)
        chunk.window, chunk.not_before = str(uuid.uuid4()), 0.0
        self._board.expect(chunk.window, job.selections[job.part].relation.oid)
        if again is None:
            job.on_the_way.append(chunk)
        elif chunk is job.on_the_way[-1]:
            # Nothing is begun behind it, so it is cut anew: an open range may hold any number of rows by now.
            chunk.ranges = []
        return chunk

    def _read_unless_void(self, conn: Connection, job: Job, chunk: Chunk, before: str) -> WindowRows | str:
        """The chunk's rows, or why they do not count: the table is locked, or not the one of that fingerprint any more.

        To a snapshot from before a rewrite or a TRUNCATE it looks empty, and a SELECT of columns that are gone fails.
        """
        chosen = job.selections[chunk.part]
        altered = f"{chosen.relation.doctype} was rewritten, truncated or altered meanwhile"
        try:
            rows = self._read_watched(conn, job, chosen, chunk)
        except TableLockedError:
            return f"somebody holds a lock on {chosen.relation.doctype}"
        except (psycopg.Error, RefreshError) as error:
            if selection.fingerprint(conn, chosen.relation.oid) == before:
                raise
            logger.debug("reading %s failed: %s", chosen.relation.doctype, error)
            return altered
        if selection.fingerprint(conn, chosen.relation.oid) == before:
            return rows
        rows.discard()
        return altered

    def _keep_understanding(self, conn: Connection, job: Job) -> str:
        """The table's fingerprint; when it changed since the SELECT was understood, it has to be understood anew."""
        found = selection.fingerprint(conn, job.selections[job.part].relation.oid)
        if found != job.fingerprints[job.part]:
            anew = self._understood(conn, job.refresh, runs=True)
            if _digest(anew) != _digest(job.selections):
                raise _StartOver(anew)
            job.selections = anew
            job.fingerprints[job.part] = found
        return found

    def _read_watched(self, conn: Connection, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        """Read in another thread, so that a refresh that was cancelled, or a stop, need not wait for a slow SELECT."""
        requests = Requests(conn, self._settings)
        reading = self._reader.submit(self._read, job, chosen, chunk)
        interrupted = False
        try:
            while not wait([reading], timeout=_WATCH_SECONDS).done:
                found = requests.get(job.id)
                if self._stopping.is_set() or found is None or found.is_over:
                    interrupted = True
                    conn.execute(_CANCEL_READERS, [reader_name(chunk.window)])
        except BaseException:
            self._board.void(chunk.window, "reading it failed")
            self._call_off(reading, chunk.window)
            raise
        if interrupted:
            if reading.exception() is None:
                reading.result().discard()
            raise _Interrupted
        return reading.result()

    def _call_off(self, reading: Future[WindowRows], window: str) -> None:
        """Nobody can watch it any more, and the next one must not wait for it."""
        while not wait([reading], timeout=_WATCH_SECONDS).done:
            with suppress(psycopg.Error, StreamError), connect(self._settings) as conn:
                conn.execute(_CANCEL_READERS, [reader_name(window)])
        if reading.exception() is None:
            reading.result().discard()

    def _read(self, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        """Read the chunk's ranges under one snapshot. A chunk without ranges gets the next ones."""
        if self._reading is None or self._reading.broken or self._reading.closed:
            self._reading = connect(self._settings)
        try:
            prepare_reader(self._reading, chunk.window)
            rows = self._read_under_snapshot(self._reading, job, chosen, chunk)
        except BaseException:
            self._reading.close()
            raise
        return rows

    def _read_under_snapshot(self, conn: Connection, job: Job, chosen: Selection, chunk: Chunk) -> WindowRows:
        tasks: list[RangeTask] = []
        try:
            with one_snapshot(conn):
                # The first statement is what takes the snapshot, so it must be the board's.
                self._board.snapshot(chunk.window, lambda: current_snapshot(conn))
                exported = _value(conn, "SELECT pg_catalog.pg_export_snapshot()")
                started = time.monotonic()
                if not chunk.ranges:
                    rows = self._pace.rows(job.refresh.chunk_rows or self._settings.chunk_rows)
                    readers = self._pace.readers(rows, self._settings.chunk_parallelism)
                    chunk.ranges = chunks.next_ranges(conn, chosen, chunk.after, rows, readers)
                cutting = time.monotonic() - started
                tasks += self._tasks(chosen, chunk, exported)
                done = read_ranges(self._spark(), tasks)
        except BaseException:
            for task in tasks:
                Path(task.path).unlink(missing_ok=True)
            raise
        chunk.rows = sum(read.rows for read in done)
        size = sum(read.size_bytes for read in done)
        # What Spark takes to start its tasks is nothing that the source has to rest from.
        self._pace.read(cutting + max((read.seconds for read in done), default=0.0), chunk.rows, size)
        segments = tuple(task.path for task, read in zip(tasks, done, strict=True) if read.rows)
        return WindowRows(
            id=chunk.window,
            refresh=job.id,
            reading=self._board.window(chunk.window).reading,
            layout=Layout(chosen.relation, chosen.columns, chosen.left_out),
            files=segments,
            segments=segments,
            numbers=tuple(task.number for task, read in zip(tasks, done, strict=True) if read.rows),
            rows=chunk.rows,
            size_bytes=size,
            widest_bytes=max((read.widest_bytes for read in done), default=0),
        )

    def _tasks(self, chosen: Selection, chunk: Chunk, snapshot: str) -> list[RangeTask]:
        folder = self._spool.window_folder()
        paths = [str(folder / f"{chunk.window}-{number}.parquet") for number in range(len(chunk.ranges))]
        return [
            RangeTask(self._settings, chosen, found, snapshot, chunk.window, number, path)
            for number, (found, path) in enumerate(zip(chunk.ranges, paths, strict=True))
        ]

    def _mark(self, conn: Connection, window: str, mark: str) -> None:
        """Write a mark; only once, also where nobody knows whether the try before was committed."""
        table = quoted(self._settings.ctrl_namespace, self._settings.wm_table)
        query = sql.SQL("INSERT INTO {} (id, mark) VALUES (%s, %s) ON CONFLICT DO NOTHING").format(table)
        conn.execute(query, [window, mark])

    def _close_marks(self, conn: Connection, window: str) -> None:
        """Write the high mark and clear both away. A low mark without its high would keep the batch open for ever."""
        try:
            try:
                self._mark(conn, window, HIGH)
            except psycopg.Error as error:
                logger.debug("high mark: %s", error)
                with connect(self._settings) as another:
                    self._mark(another, window, HIGH)
        except (DbsyncError, psycopg.Error) as error:
            self._board.void(window, "its high mark could not be written")
            logger.debug("high mark: %s", error)
        # They have done their work in the log; what is left here is swept away one day.
        with suppress(psycopg.Error):
            table = quoted(self._settings.ctrl_namespace, self._settings.wm_table)
            conn.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(table), [window])

    def _sweep_marks(self, conn: Connection) -> None:
        """Marks left by a crash are of no use: what they were to release died with the process.

        Another dbsync's marks may be among them; they do their work in the log, where they stay.
        """
        table = sql.Identifier(self._settings.ctrl_namespace, self._settings.wm_table)
        conn.execute(sql.SQL("DELETE FROM {}").format(table))

    def _ask_for_first_copies(self, conn: Connection, requests: Requests) -> None:
        """Every published table is copied once, when it is first seen; one that failed, once more in each run."""
        now = time.monotonic()
        if self._settings.snapshot != INITIAL or now - self._looked_for_tables < _LOOK_FOR_TABLES_SECONDS:
            return
        self._looked_for_tables = now
        try:
            with impatient(conn):  # to list what is published, PostgreSQL looks into every table
                tables = control.published_oids(conn, self._settings)
        except psycopg.errors.LockNotAvailable:
            return
        copies = requests.first_copies()
        if self._failed_copies is None:
            self._failed_copies = {oid for oid, state in copies.items() if state == FAILED}
        asked = (copies.keys() - self._failed_copies) | self._passed_over
        self._look_who_is_new(conn, tables)
        for oid in tables.keys() - asked:
            table = tables[oid]
            try:
                if self._may_be_copied(conn, oid, table):
                    self._ask_for_first_copy(conn, requests, oid, table.schema, table.name)
            except (psycopg.Error, StreamError) as error:
                if is_lost(conn):
                    raise
                # It is looked at again with the next look.
                logger.debug("%s.%s cannot be looked at now: %s", table.schema, table.name, sentence_of(error))

    def _look_who_is_new(self, conn: Connection, tables: dict[int, PublishedTable]) -> None:
        """Note for each table which transactions may have written to it before it was published.

        The log will never have what they wrote, so they have to be visible when the table is copied. With a table that
        was published before this run, those are older than the one that published it.
        """
        if self._not_before is not None and tables.keys() <= self._not_before.keys():
            return
        now = control.next_xid(conn)
        if self._not_before is None:
            added = {oid: widen(table.added_by, now) for oid, table in tables.items() if table.added_by}
            self._not_before = {oid: added[oid] + 1 if added.get(oid, now) < now else 0 for oid in tables}
        self._not_before |= dict.fromkeys(tables.keys() - self._not_before.keys(), now)

    def _may_be_copied(self, conn: Connection, oid: int, table: PublishedTable) -> bool:
        assert self._not_before is not None
        if control.are_over(conn, self._not_before[oid]):
            return True
        self._looked_for_tables = 0.0  # look again soon
        if oid not in self._told_to_wait:
            self._told_to_wait.add(oid)
            logger.info(
                "the first copy of %s.%s waits for transactions that are older than its publication",
                table.schema,
                table.name,
            )
        return False

    def _ask_for_first_copy(self, conn: Connection, requests: Requests, oid: int, schema: str, table: str) -> None:
        query = sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, table)).as_string(conn)
        try:
            with impatient(conn):
                selection.understand(conn, self._settings, query)
        except RefreshError as error:
            logger.warning("The first copy of %s.%s is left out: %s", schema, table, error)
            self._passed_over.add(oid)
            return
        requests.submit(query, kind=INITIAL, relation=oid)
        if self._failed_copies:
            self._failed_copies.discard(oid)
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
    if not refresh.params:
        return refresh.query
    try:
        return Statement.from_json(json.dumps(refresh.params))
    except (KeyError, TypeError, ValueError) as error:
        raise RefreshError(
            "The params of the refresh are not as dbsync writes them.", "Ask with syncer.refresh(…, params=…)."
        ) from error


def _place(refresh: Refresh, selections: list[Selection], digest: str) -> tuple[int, tuple[str, ...] | None]:
    """The part and the last key that are stored, if they are of these tables and keys."""
    key = refresh.last_key
    if refresh.key_digest == digest and refresh.part in range(len(selections)):
        if key is None:
            return refresh.part, None
        if isinstance(key, list) and len(key) == len(selections[refresh.part].key):
            return refresh.part, tuple(map(str, key))
    if key is not None or refresh.part:
        logger.warning("refresh %d starts over: %s", refresh.id, _OTHER_KEY)
    return 0, None


def _digest(selections: list[Selection]) -> str:
    """Tells apart what the bounds of ranges depend on: the tables, and their keys' columns, types and operators."""
    keys = [(one.relation.oid, [astuple(replace(part, output=0)) for part in one.key]) for one in selections]
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()
