"""dbsync from top to bottom: what is read from the slot, how it becomes a batch, when it is acknowledged.

Three threads carry a run. One reads: socket, messages, handler, spool, acknowledge. One applies: Spark, Batcher. One
re-reads tables where that was asked for (`refresh`). The next batch is read while the last one is applied; batches are
applied in order, one at a time, and only what is applied is acknowledged. Whatever breaks before that costs time and
nothing else: PostgreSQL sends it again.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import psycopg

from dbsync import compact, control, selection
from dbsync.batcher import Batcher, BatchInfo
from dbsync.batcher.shaped import shaped, unmatched
from dbsync.batcher.urls import open_target
from dbsync.board import WindowBoard
from dbsync.completion import Completion, SourceLostError
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.dispatch import MESSAGE_PREFIX, Dispatch, HandlerDispatch, dispatch_for, hears_messages, mirrors
from dbsync.errors import DbsyncError, HandlerError, RefreshError, SetupError, SlotError, StreamError
from dbsync.handler import MessageHandler, MirrorHandler
from dbsync.keyless import Keyless
from dbsync.lsn import LSN
from dbsync.pgoutput import decode_frame
from dbsync.progress import Backoff, BatchReport, Handoff, Progress, Totals, as_plain
from dbsync.refresh import Refresher, current_snapshot
from dbsync.relation import Catalog
from dbsync.requests import CANCELLED, FAILED, RefreshResult, Requests
from dbsync.spark import find_java, session, why_spark_ended
from dbsync.spool import Batch, BatchWriter, Spool
from dbsync.statement import bind, words_of
from dbsync.stream import KEEPALIVE, ReplicationStream, sent_seconds_after
from dbsync.targeturl import is_same, recalled
from dbsync.window import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.1  # how long to wait for the log when nothing waits for us
_BUSY_SECONDS = 0.01  # and when there are changes to hand over
_LONGEST_PAUSE_SECONDS = 5.0  # between tries to connect: a dbsync that waits for the slot takes over soon
_QUIET_SECONDS = 1.0  # without changes for this long, PostgreSQL's own word on where the log is counts
_HELD_SECONDS = 0.5  # how often to look whether what holds the slot back has become visible
_BEHIND_SECONDS = 1.0  # between a commit and its being sent, from which on throughput counts and not latency
_COMING_SECONDS = 0.05  # since something was read, as long as more is expected at once
_CATCH_UP_SECONDS = 3.0  # a batch takes at the most meanwhile
_MOST_UNSEEN = 10_000  # commits to remember before looking which of them everybody sees
_MOST_CHUNK_ROWS = 2**31 - 1  # the refresh table's column holds no more


@dataclass(frozen=True, slots=True)
class Status:
    """Where a Syncer stands. Positions are None where they are not known."""

    running: bool
    paused: bool
    slot: str
    received_lsn: LSN | None
    applied_lsn: LSN | None
    confirmed_lsn: LSN | None
    server_lsn: LSN
    lag_bytes: int | None
    lag_seconds: float | None
    held_bytes: int | None
    open_windows: int
    totals: Totals
    last_batch: BatchReport | None
    failure: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {name: as_plain(value) for name, value in asdict(self).items()}
        if self.last_batch:
            plain["last_batch"] = {name: as_plain(value) for name, value in asdict(self.last_batch).items()}
        return plain


class Syncer:
    """Keeps a Batcher's target in step with the tables of a publication."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        handler: MessageHandler | None = None,
        batcher: Batcher | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self.settings = settings or Settings.from_env()
        self.handler = handler or MirrorHandler()
        self.batcher = batcher or open_target(self.settings)
        self._target = self.batcher  # with other names and fewer columns, where the settings ask for that
        self.feeds: str | None = None  # what the batcher's target is called, where that is to be remembered
        self._spark = spark
        self._resumed = threading.Event()
        self._resumed.set()
        self._stopping = threading.Event()
        self._aborting = threading.Event()
        self._streaming = threading.Event()  # set while this process reads the slot
        self._threads: list[threading.Thread] = []
        self._progress = Progress()
        self._handoff = Handoff()
        self._board = WindowBoard()
        self._spool = Spool(self.settings.spool_dir)
        self._session_lock = threading.Lock()
        self._own_session: SparkSession | None = None
        self._refresher: Refresher | None = None
        self._keyless = Keyless(self.settings, self.batcher)
        self._dispatch: Dispatch | None = None
        self._watcher: Connection | None = None
        self._held_since = 0.0
        self._many_unseen = _MOST_UNSEEN
        self._wal_end = LSN(0)
        self._reached = LSN(0)  # how far this connection has read
        self._has_told_target = False
        self._walsender = 0  # the process of the server that sent us the log at last
        self._quiet_since = 0.0
        self._behind_seconds = 0.0
        self._batches = 0

    def setup(self) -> None:
        """Create what dbsync needs in the source, where it is missing. May be called again and again."""
        with self._sql() as conn:
            control.setup(conn, self.settings)

    def teardown(self) -> list[str]:
        """Remove all of dbsync's from the source; what was removed, in words."""
        self.stop()
        with self._sql() as conn:
            return control.teardown(conn, self.settings)

    def start(self) -> None:
        """Set up, then read and apply in the background until `stop`."""
        if self.running:
            raise DbsyncError("This Syncer is already running.", "Stop it first, or use another one.")
        self._stopping.clear()
        self._aborting.clear()
        self._keyless = Keyless(self.settings, self.batcher)
        if mirrors(self.handler):
            self._keyless.check()
        find_java()
        try:
            self._prepare()
        except BaseException:
            self._spool.close()
            raise
        if self._stopping.is_set():  # while the target was waited for
            self._progress.finish()
            return
        assert self._refresher
        loops = {"read": self._read_log, "apply": self._apply_batches, "refresh": self._refresher.run}
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=f"dbsync-{name}", daemon=True)
            for name, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    def _prepare(self) -> None:
        """Everything that a run needs but its threads."""
        logger.debug("what waits for the target lies in %s", self._spool.folder)  # made now, or refused
        self.setup()
        self.handler.syncer = self
        self._handoff = Handoff()
        self._board = WindowBoard()
        self._target = shaped(self.batcher, self.settings)
        self._progress = Progress(applied=self._target_position())
        self._look_at_column_lists()
        self._has_told_target = False
        self._refresher = Refresher(
            self.settings, self._board, self._spool, self._session, self._streaming, self._stopping
        )

    def stop(self) -> None:
        """Finish the batch, acknowledge it, end. Does nothing when not running."""
        self._ask_to_stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._resumed.set()
        self._spool.close()
        compact.call(self._target.close)

    def run(self) -> None:
        """Work until SIGINT or SIGTERM: the first finishes the batch and acknowledges, the second ends at once."""
        with self._signals():
            self.start()
            try:
                while not self._progress.wait_until_over(0.5):
                    pass
            except KeyboardInterrupt:
                self._abort()
                raise
            self.stop()
        self._raise_failure()

    def drain(self) -> LSN:
        """Wait until all that was committed before the call is applied and acknowledged; up to where that is."""
        if not self.running:
            with self:
                return self.drain()
        with self._sql() as conn:
            target = _write_message(conn)
        self._progress.wait_for(target)
        self._wait_until_confirmed(target)
        return target

    def refresh(
        self, query: str, *, params: Sequence[Any] | Mapping[str, Any] | None = None, chunk_rows: int | None = None
    ) -> RefreshResult:
        """Re-read what the SELECT gives while writes go on; returns when it is in the target."""
        _check_chunk_rows(chunk_rows)
        statement = bind(query, params)
        with self._sql() as conn:
            selection.understand(conn, self.settings, statement)
        if not self.running:
            with self:
                return self.refresh(query, params=params, chunk_rows=chunk_rows)
        with self._sql() as conn:
            requests = Requests(conn, self.settings)
            id = requests.submit(query, None if params is None else json.loads(statement.to_json()), chunk_rows)
        return self._wait_for_refresh(id)

    def pause(self) -> None:
        """Stop reading the log. What was read is still applied and acknowledged, and the connection is kept.

        A transaction of which only a part was read, or a chunk that is being re-read, waits with what was read since.
        `drain` and `refresh` need the log, and so return after `resume` at the earliest.
        """
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def mark_updated(self, doctype: str, id: Any, doc: Mapping[str, Any]) -> None:
        """Say, in a handler's method, that this document is now so."""
        self._marking("mark_updated").mark_updated(doctype, id, doc)

    def mark_deleted(self, doctype: str, id: Any) -> None:
        """Say, in a handler's method, that this document is gone."""
        self._marking("mark_deleted").mark_deleted(doctype, id)

    def mark_truncated(self, doctype: str) -> None:
        """Say, in a handler's method, that all documents of the type are gone."""
        self._marking("mark_truncated").mark_truncated(doctype)

    def status(self) -> Status:
        with self._sql() as conn:
            slot = control.slot_state(conn, self.settings)
            server_lsn = control.current_lsn(conn)
        progress, running = self._progress, self.running
        return Status(
            running=running,
            paused=not self._resumed.is_set(),
            slot=self.settings.slot,
            received_lsn=progress.received if running else None,
            applied_lsn=progress.applied if running else None,
            confirmed_lsn=slot.confirmed_flush_lsn if slot else None,
            server_lsn=server_lsn,
            lag_bytes=slot.lag_bytes if slot else None,
            lag_seconds=progress.lag_seconds() if running else None,
            held_bytes=slot.held_bytes if slot else None,
            open_windows=self._board.open,
            totals=progress.totals,
            last_batch=progress.last_batch,
            failure=str(progress.failure) if progress.failure else None,
        )

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._abort()
            return
        self.stop()
        if kind is None:
            self._raise_failure()

    # Reading: from the socket to a closed batch.

    def _read_log(self) -> None:
        """Follow the slot; come back after what can pass, give up on what cannot."""
        lost = Backoff(self._stopping, 0.5, _LONGEST_PAUSE_SECONDS)
        failed = Backoff(self._stopping, self.settings.retry_seconds)
        reached = LSN(0)
        try:
            while not self._stopping.is_set():
                try:
                    self._follow()
                except HandlerError as error:
                    if self._progress.read > reached:  # it got further than the last time
                        reached = self._progress.read
                        failed.reset()
                    if not error.retryable or failed.tries >= self.settings.retries:
                        raise
                    logger.warning("%s Trying again in %.1f s.", error, failed.next_seconds)
                    failed.pause()
                except StreamError as error:
                    if self._progress.read > reached:
                        reached = self._progress.read
                        lost.reset()
                    logger.warning("%s Trying again in %.1f s.", error, lost.next_seconds)
                    lost.pause()
        finally:
            self._handoff.settle()
            self._handoff.close()
            self._board.close()
            if self._watcher:
                self._watcher.close()
                self._watcher = None

    def _follow(self) -> None:
        """Read one connection's stream until the run is stopped or the connection breaks."""
        # What is being applied must be acknowledged first, or it would be read a second time.
        self._handoff.settle()
        if self._stopping.is_set():
            return
        stream = ReplicationStream(self.settings, in_progress=not hears_messages(self.handler))
        self._reached, self._walsender = LSN(0), stream.walsender
        self._note_target()  # now that the slot is ours, and not while another dbsync has it
        self._board.replay()
        self._progress.received = self._wal_end = self._progress.applied  # what was read after that is read again
        self._quiet_since = time.monotonic()
        pending = self._spool.pending()
        dispatch = self._dispatch = dispatch_for(
            self.handler,
            self._keyless,
            self.settings,
            Catalog(self._connect),
            self._board,
            self._split,
            self._progress.applied,
            pending,
            self._stopping,
        )
        dispatch.continue_in(self._new_writer())
        self._streaming.set()
        frames: list[memoryview] = []
        try:
            while not self._stopping.is_set():
                if self._resumed.wait(_IDLE_SECONDS):
                    frames = frames or stream.read(self._patience(dispatch))
                # What arrives after `pause` waits, though somebody was just waiting for it.
                if self._resumed.is_set():
                    self._take(stream, dispatch, frames)
                    frames = []
                self._hand_over_if_due(dispatch)
                self._move_on_when_idle(dispatch)
                self._acknowledge(stream)
            self._hand_over_complete_transactions(dispatch)
            self._handoff.settle()
            self._acknowledge(stream)
        finally:
            self._streaming.clear()
            dispatch.writer.discard()
            pending.discard()
            self._dispatch = None
            stream.close()

    def _patience(self, dispatch: Dispatch) -> float:
        return _BUSY_SECONDS if dispatch.writer.events and not dispatch.open else _IDLE_SECONDS

    def _take(self, stream: ReplicationStream, dispatch: Dispatch, frames: list[memoryview]) -> None:
        at = 0
        while at < len(frames):
            begin, at = at, dispatch.take_rows(frames, at)
            if at > begin:
                self._quiet_since = time.monotonic()
                continue
            frame = frames[at]
            at += 1
            if frame[0] == KEEPALIVE:
                self._keepalive(stream, frame)
                continue
            self._quiet_since = time.monotonic()
            if dispatch.take(frame):
                self._behind_seconds = sent_seconds_after(frame, dispatch.committed_at)
                self._progress.received = dispatch.end_lsn
                self._reached = max(self._reached, dispatch.end_lsn)
                self._progress.read = max(self._progress.read, dispatch.end_lsn)
                if self._full(dispatch.writer) and not self._board.open:
                    self._hand_over(dispatch)
            elif dispatch.is_cut:
                return

    def _keepalive(self, stream: ReplicationStream, frame: memoryview) -> None:
        keepalive: Any = decode_frame(frame)
        self._wal_end = keepalive.wal_end
        self._reached = max(self._reached, self._wal_end)
        stream.received(self._progress.received)
        if keepalive.reply_requested:
            stream.reply()

    def _full(self, writer: BatchWriter) -> bool:
        return writer.events >= self.settings.batch_events or writer.size_bytes >= self.settings.batch_bytes

    def _hand_over_if_due(self, dispatch: Dispatch) -> None:
        """A batch that is not full waits its time, and while the one before it is applied it goes on growing."""
        writer = dispatch.writer
        if writer.events and not dispatch.open and self._handoff.idle and not self._board.open:
            waited = (datetime.now(UTC) - writer.opened_at).total_seconds() if writer.opened_at else 0.0
            if waited >= self.settings.batch_seconds and (waited >= _CATCH_UP_SECONDS or not self._is_catching_up()):
                self._hand_over(dispatch)

    def _is_catching_up(self) -> bool:
        """Old transactions come one after the other: larger batches are sooner through than many small ones."""
        is_coming = time.monotonic() - self._quiet_since < _COMING_SECONDS
        return self._behind_seconds > _BEHIND_SECONDS and is_coming

    def _hand_over(self, dispatch: Dispatch) -> None:
        batch = dispatch.writer.close(dispatch.end_lsn)
        dispatch.continue_in(self._new_writer())
        self._offer(batch)

    def _split(self) -> BatchWriter:
        """End the batch where it is, in the middle of a transaction perhaps: a table changes its shape."""
        dispatch = self._dispatch
        assert dispatch
        # Of what is passed over, the last may end before the position the target has.
        self._offer(dispatch.writer.close(max(dispatch.end_lsn, self._progress.applied), whole=False))
        return self._new_writer()

    def _hand_over_complete_transactions(self, dispatch: Dispatch) -> None:
        if dispatch.writer.last_lsn is not None and dispatch.writer.events and not self._aborting.is_set():
            self._offer(dispatch.writer.close(dispatch.end_lsn))

    def _offer(self, batch: Batch) -> None:
        if not self._handoff.offer(batch):
            batch.discard()
            raise self._progress.failure or DbsyncError("dbsync was stopped.")

    def _move_on_when_idle(self, dispatch: Dispatch) -> None:
        """With nothing read that is not applied, the slot may move to where the log is: it holds no WAL for nothing."""
        idle = not dispatch.open and not dispatch.writer.events and self._handoff.idle and not self._board.open
        if idle and time.monotonic() - self._quiet_since > _QUIET_SECONDS:
            self._progress.received = max(self._progress.received, self._wal_end)
        if idle and self._progress.received > self._progress.applied:
            self._progress.advance(self._progress.received)
        self._progress.pending_since = self._oldest_pending(dispatch)

    def _acknowledge(self, stream: ReplicationStream) -> None:
        """Confirm what is applied, but never past a commit that is in the log and not yet visible to everybody.

        After a restart such a commit has to come again: a refresh must know of it, or an older row would win. And so
        nothing is confirmed that was not read on this connection, though a target may say that it has it.
        """
        applied, now = min(self._progress.applied, self._reached), time.monotonic()
        due = applied > stream.acknowledged and (
            applied > self._progress.held or now > self._held_since + _HELD_SECONDS
        )
        if not due and self._board.unseen < self._many_unseen:
            return
        hold = self._board.prune(self._snapshot)
        # Where many have to stay, looking at all of them again pays only when there are a good many more.
        self._many_unseen = max(_MOST_UNSEEN, 2 * self._board.unseen)
        if hold is not None and hold < applied:
            self._held_since, self._progress.held = now, applied
        stream.acknowledge(min(applied, applied if hold is None else hold))

    def _snapshot(self) -> Snapshot:
        """What everybody can see now."""
        try:
            if self._watcher is None or self._watcher.closed:
                self._watcher = self._connect()
            return current_snapshot(self._watcher)
        except psycopg.OperationalError as error:
            raise StreamError("The connection to PostgreSQL broke.") from error

    def _oldest_pending(self, dispatch: Dispatch) -> datetime | None:
        batch = self._handoff.in_work
        if batch:
            return batch.first_commit_time
        return dispatch.writer.first_commit_time if dispatch.writer.events else None

    def _new_writer(self) -> BatchWriter:
        self._batches += 1
        return self._spool.writer(self._batches)

    # Applying: from a closed batch to the acknowledged position.

    def _apply_batches(self) -> None:
        spark = self._session()
        while (batch := self._handoff.take()) is not None:
            self._apply_with_retries(spark, batch)
            batch.discard()
            self._handoff.done()

    def _apply_with_retries(self, spark: SparkSession, batch: Batch) -> None:
        backoff = Backoff(self._stopping, self.settings.retry_seconds)
        lost = Backoff(self._stopping, self.settings.retry_seconds, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return self._apply(spark, batch)
            except SourceLostError as error:
                # It is waited for as long as it takes, here as by the thread that reads.
                if self._stopping.is_set():
                    raise
                logger.warning("%s Trying batch %d again in %.1f s.", error, batch.number, lost.next_seconds)
                lost.pause()
                self._check_slot_is_ours(batch)
            except DbsyncError as error:
                if not error.retryable or backoff.tries >= self.settings.retries or self._stopping.is_set():
                    raise
                logger.warning("%s Trying batch %d again in %.1f s.", error, batch.number, backoff.next_seconds)
                backoff.pause()
                self._check_slot_is_ours(batch)

    def _check_slot_is_ours(self, batch: Batch) -> None:
        """While a batch is tried again the slot may be lost to another dbsync, whose batches are newer by then."""
        if self._streaming.is_set():
            return
        try:
            with self._sql() as conn:
                slot = control.slot_state(conn, self.settings)
        except StreamError:
            return
        if slot and slot.active_pid not in (None, self._walsender):
            raise SlotError(
                f"Another dbsync has taken over the slot {slot.name} while batch {batch.number} was tried again.",
                "It goes on with that batch; this one ends.",
            )

    def _apply(self, spark: SparkSession, batch: Batch) -> None:
        started = time.monotonic()
        relations = {relation.doctype: relation for relation in batch.relations}
        relations |= {layout.relation.doctype: layout.relation for layout in batch.layouts}
        info = BatchInfo(batch.number, batch.first_lsn, batch.last_lsn, relations)
        complete = Completion(self.settings, self._board, batch.last_lsn, self._stopping)
        compact.call(self._target.begin, info)
        applied = compact.apply(spark, batch, self._target, complete)
        compact.call(self._target.commit, info)
        report = BatchReport(
            number=batch.number,
            first_lsn=batch.first_lsn,
            last_lsn=batch.last_lsn,
            changes=batch.changes,
            events=batch.events,
            upserts=applied.upserts,
            deletes=applied.deletes,
            truncates=applied.truncates,
            seconds=time.monotonic() - started,
            at=datetime.now(UTC),
        )
        self._progress.advance(batch.last_lsn, report)
        self._board.applied({rows.id: applied.superseded.get(i, 0) for i, (rows, _) in enumerate(batch.windows)})
        logger.debug(
            "batch %d up to %s: %d changes, %d upserts, %d deletes in %.2f s",
            batch.number,
            batch.last_lsn,
            batch.changes,
            applied.upserts,
            applied.deletes,
            report.seconds,
        )

    def _session(self) -> SparkSession:
        """A session of dbsync's own in the user's Spark, so that what is set here changes nothing there."""
        with self._session_lock:
            if self._own_session is None:
                self._own_session = (self._spark or session(self.settings.spark_master)).newSession()
                self._own_session.conf.set("spark.sql.adaptive.enabled", "false")
            return self._own_session

    # What both need.

    def _guarded(self, loop: Any) -> None:
        """Run a thread's loop; what it raises ends the run and is told to whoever waits."""
        try:
            loop()
        except DbsyncError as error:
            self._fail(error)
        except Exception as error:
            logger.debug("unexpected", exc_info=error)
            words = str(error).partition("\n")[0]
            spark = self._own_session or self._spark
            failure = spark and why_spark_ended(spark)
            failure = failure or DbsyncError(f"dbsync stopped on an unexpected {type(error).__name__}: {words}")
            failure.__cause__ = error
            self._fail(failure)
        else:
            if self._stopping.is_set():
                self._progress.finish()

    def _fail(self, error: DbsyncError) -> None:
        if self._progress.failure is None:
            logger.error("%s", error)
        self._progress.fail(error)
        self._ask_to_stop()
        self._handoff.close()

    def _abort(self) -> None:
        """End now: nothing more is handed over or acknowledged, and nobody is waited for."""
        self._aborting.set()
        self._ask_to_stop()
        self._handoff.close()

    def _ask_to_stop(self) -> None:
        self._stopping.set()
        self._resumed.set()
        self._board.close()
        if self._refresher:
            self._refresher.asked.set()

    def _raise_failure(self) -> None:
        if self._progress.failure:
            raise self._progress.failure

    def _connect(self) -> Connection:
        return connect(self.settings)

    @contextmanager
    def _sql(self) -> Iterator[Connection]:
        """A connection for a few statements; what PostgreSQL says against them is an error of ours."""
        try:
            with self._connect() as conn:
                yield conn
        except psycopg.OperationalError as error:
            raise StreamError(f"The connection to PostgreSQL broke: {words_of(error)}.", "Try again.") from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"The role may not do what dbsync needs: {words_of(error)}.",
                "dbsync check says what is missing.",
            ) from error
        except psycopg.Error as error:
            raise DbsyncError(f"PostgreSQL refused a statement of dbsync's: {words_of(error)}.") from error

    def _target_position(self) -> LSN:
        with self._sql() as conn:
            self._target.log_name = control.log_name(conn, self.settings)
        position = self._position_with_retries()
        if position is None:
            return LSN(0)
        with self._sql() as conn:
            server_lsn = control.current_lsn(conn)
        if position > server_lsn:
            raise SlotError(
                f"The target holds the log up to {LSN(position)}, but the source's log ends at {server_lsn}.",
                "The target was fed from another server, or the source was restored: copy into an empty target.",
            )
        return LSN(position)

    def _look_at_column_lists(self) -> None:
        """A column that was to stay here, and is misspelt, would go out. What a handler marks has names of its own."""
        if not mirrors(self.handler) or not (self.settings.include_columns or self.settings.exclude_columns):
            return
        with self._sql() as conn:
            columns = control.published_columns(conn, self.settings)
        for pattern in unmatched(self.settings, columns):
            logger.warning("%s is in the column lists, and no published table has a column like that.", pattern)

    def _position_with_retries(self) -> LSN | None:
        """A target that is away at the start is waited for like one that goes away later; None too when stopped."""
        backoff = Backoff(self._stopping, self.settings.retry_seconds)
        while not self._stopping.is_set():
            try:
                position: LSN | None = compact.call(self._target.position)
                return position
            except DbsyncError as error:
                if self._stopping.is_set():
                    break
                if not error.retryable or backoff.tries >= self.settings.retries:
                    raise
                logger.warning("%s Trying again in %.1f s.", error, backoff.next_seconds)
                backoff.pause()
        return None

    def _note_target(self) -> None:
        """Keep what the slot feeds, for whoever would feed something else from it; once a run."""
        target = self.feeds
        if target is None or self._has_told_target:
            return
        with self._sql() as conn:
            requests = Requests(conn, self.settings)
            before = requests.target()
            self._has_told_target = True
            if before == target:
                return
            if before is not None and not is_same(before, target):
                logger.warning(
                    "the slot %s has fed %s; from here on its changes go to %s, which has nothing of what came before:"
                    " refresh each table to copy it",
                    self.settings.slot,
                    recalled(before),
                    target,
                )
            requests.feeds(target)

    def _wait_until_confirmed(self, target: LSN) -> None:
        """Until PostgreSQL itself shows the position; it may take a moment, or a reconnect, to hear of it.

        A commit that nobody can see yet holds the slot back; what stands after it is applied and not acknowledged.
        """
        with self._sql() as conn:
            while self.running and self._progress.held < target:
                slot = control.slot_state(conn, self.settings)
                if slot is None or (slot.confirmed_flush_lsn or 0) >= target:
                    return
                time.sleep(0.01)
        self._raise_failure()

    def _wait_for_refresh(self, id: int) -> RefreshResult:
        """Until it is over, however often the connection breaks meanwhile: the refresh goes on after that as well."""
        assert self._refresher
        self._refresher.asked.set()
        pause = 0.1
        while True:
            try:
                with closing(self._connect()) as conn:
                    return self._result(Requests(conn, self.settings), id)
            except (psycopg.OperationalError, StreamError) as error:
                self._check_running(id)
                logger.debug("refresh %d is not seen for now: %s", id, error)
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _result(self, requests: Requests, id: int) -> RefreshResult:
        while (found := requests.get(id)) is not None and not found.is_over:
            self._check_running(id)
            time.sleep(0.02)
        if found is None or found.state == CANCELLED:
            raise RefreshError(f"Refresh {id} was cancelled.")
        if found.state == FAILED:
            raise RefreshError(found.message or f"Refresh {id} failed.")
        return found.result

    def _check_running(self, id: int) -> None:
        self._raise_failure()
        if not self.running:
            raise RefreshError(f"dbsync was stopped before refresh {id} was done.", "The next start goes on with it.")

    def _marking(self, name: str) -> HandlerDispatch:
        if isinstance(self._dispatch, HandlerDispatch):
            return self._dispatch
        raise HandlerError(f"{name} was called outside a handler's method.", retryable=False)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal asks to stop, the second interrupts. Only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _: object) -> None:
            if self._stopping.is_set():
                raise KeyboardInterrupt
            logger.info("%s: finishing the batch; once more to stop at once", signal.Signals(number).name)
            self._ask_to_stop()

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _check_chunk_rows(chunk_rows: object) -> None:
    if chunk_rows is None or (type(chunk_rows) is int and 0 < chunk_rows <= _MOST_CHUNK_ROWS):
        return
    raise RefreshError(
        f"chunk_rows={chunk_rows!r} cannot be used.", f"Pass a whole number from 1 to {_MOST_CHUNK_ROWS:,}, or None."
    )


def _write_message(conn: Connection) -> LSN:
    """Write a mark of ours into the log; all that was committed before stands before it.

    A position alone would not do: PostgreSQL sends only what is flushed, and a commit of ours is what flushes.
    """
    with conn.transaction():
        row = conn.execute("SELECT pg_catalog.pg_logical_emit_message(true, %s, 'drain')", [MESSAGE_PREFIX]).fetchone()
    assert row
    return LSN(str(row[0]))
