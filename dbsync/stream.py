"""The replication connection: frames in, feedback out.

Frames come in the order of the log, those of a large transaction before it commits. A thread of its own sends feedback
every few seconds, so that PostgreSQL keeps the connection whatever the rest of dbsync is busy with. Only what was given
to `acknowledge` is ever confirmed; after a reconnect PostgreSQL sends everything later than that again.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
from psycopg import pq, sql

from dbsync.config import Settings
from dbsync.connection import connection_error, session_options
from dbsync.errors import DbsyncError, DecodeError, SlotError, StreamError
from dbsync.lsn import LSN
from dbsync.pgoutput import microseconds, standby_status

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2  # streams transactions in progress; PostgreSQL 14 has it
XLOG_DATA, KEEPALIVE = b"wk"
HEADER_BYTES = 25  # of XLogData, before the pgoutput message

_FRAMES_A_READ = 2_000
_HEARTBEAT_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
_OBJECT_IN_USE, _UNDEFINED_OBJECT, _NOT_IN_STATE = "55006", "42704", "55000"
_NOT_IN_ENCODING, _UNTRANSLATABLE = "22021", "22P05"


class SlotInUseError(StreamError):
    """Another process holds the slot; it may let go."""


class ReplicationStream:
    """An open connection on which PostgreSQL sends the slot's changes. `read` is for one thread only.

    `in_progress`: large transactions are sent before they commit, and PostgreSQL need not keep them on its disk.
    """

    def __init__(self, settings: Settings, *, in_progress: bool = True) -> None:
        self._settings = settings
        self._in_progress = in_progress
        self._conn = _connect(settings)
        self._pgconn = self._conn.pgconn
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acknowledged = LSN(0)
        self._received = LSN(0)
        self._is_over = False
        self._heard = self._asked = time.monotonic()
        try:
            self._heartbeat_seconds = self._choose_heartbeat()
            self._start_replication()
        except BaseException:
            self._conn.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self._heart = threading.Thread(target=self._beat, name="dbsync-heartbeat", daemon=True)
        self._heart.start()

    def read(self, timeout_seconds: float) -> list[memoryview]:
        """Frames that have arrived; waits for the first at most that long. Raises StreamError when the stream ended."""
        now = time.monotonic()
        if now - self._asked > self._heartbeat_seconds:
            self._heard = now  # nobody listened: the silence was ours
        frames = self._take()
        if not frames and self._poll.poll(timeout_seconds * 1000):
            with self._lock, _broken_connection():
                self._pgconn.consume_input()
            frames = self._take()
        self._asked = time.monotonic()
        if frames:
            self._heard = self._asked
        elif self._asked - self._heard > _SILENCE_SECONDS + 3 * self._heartbeat_seconds:
            raise StreamError(f"PostgreSQL has not answered for {self._asked - self._heard:.0f} seconds.")
        return frames

    def received(self, lsn: LSN) -> None:
        """How far the log has been read, for pg_stat_replication; confirms nothing."""
        self._received = lsn

    @property
    def walsender(self) -> int:
        """The server's process that sends."""
        return self._conn.info.backend_pid

    @property
    def acknowledged(self) -> LSN:
        return self._acknowledged

    def acknowledge(self, lsn: LSN) -> None:
        """Confirm everything before `lsn`: PostgreSQL need not keep it. Never goes back. Any thread may call it."""
        if lsn > self._acknowledged:
            self._acknowledged = lsn
            self.reply()

    def reply(self) -> None:
        """Send feedback now. A connection that is gone is noticed by `read`."""
        with self._lock:
            if self._closed.is_set():
                return
            try:
                self._send()
            except psycopg.Error as error:
                logger.debug("feedback could not be sent: %s", error)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self.reply()
        with self._lock:
            self._closed.set()
            self._conn.close()
        self._heart.join()

    def _take(self) -> list[memoryview]:
        frames: list[memoryview] = []
        get, take, before = self._pgconn.get_copy_data, frames.append, 0
        with self._lock, _broken_connection():
            while len(frames) < _FRAMES_A_READ and not self._is_over:
                size, data = get(1)
                if size > 0:
                    take(data)
                elif size == 0:
                    # One filling of libpq's buffer is few frames; what more has arrived goes with them.
                    if len(frames) == before:
                        break
                    before = len(frames)
                    self._pgconn.consume_input()
                else:
                    self._is_over = True  # libpq says so once; what came before goes first
            if self._is_over and not frames:
                raise self._ended()
        return frames

    def _send(self) -> None:
        applied = self._acknowledged
        now = microseconds(datetime.now(UTC))
        # Asking for an answer makes a connection that died silently show.
        message = standby_status(max(self._received, applied), applied, applied, now, reply=True)
        self._pgconn.put_copy_data(message)
        while self._pgconn.flush() == 1:
            select.select([self._pgconn.socket], [self._pgconn.socket], [], 1.0)
            self._pgconn.consume_input()

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_seconds):
            self.reply()

    def _choose_heartbeat(self) -> float:
        """Well within the time after which PostgreSQL gives a silent receiver up."""
        result = self._pgconn.exec_(b"SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'")
        timeout = int(result.get_value(0, 0) or 0) / 1000 if result.status == pq.ExecStatus.TUPLES_OK else 0
        return min(_HEARTBEAT_SECONDS, timeout / 4) if timeout else _HEARTBEAT_SECONDS

    def _start_replication(self) -> None:
        # 0/0 means: from what was last confirmed.
        command = sql.SQL(
            "START_REPLICATION SLOT {slot} LOGICAL 0/0"
            " (proto_version {version}, streaming {streaming}, publication_names {names}, messages 'true')"
        ).format(
            slot=sql.Identifier(self._settings.slot),
            version=sql.Literal(str(PROTOCOL_VERSION)),
            streaming=sql.Literal("on" if self._in_progress else "off"),
            names=sql.Literal(sql.Identifier(self._settings.publication).as_string(None)),
        )
        result = self._pgconn.exec_(command.as_bytes(None))
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._refused(result)
        self._pgconn.nonblocking = 1

    def _refused(self, result: pq.abc.PGresult) -> DbsyncError:
        slot, state = self._settings.slot, _sqlstate(result)
        words = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"no reason given").decode(
            "utf-8", "replace"
        )
        if state == _OBJECT_IN_USE:
            return SlotInUseError(f"The slot {slot} is in use: {words}.", "Stop the other dbsync, or wait for it.")
        if state == _UNDEFINED_OBJECT:
            return SlotError(
                f"The slot {slot} is gone: changes made since may be missing in the target.",
                "Run dbsync init to create it anew, and copy the tables again.",
            )
        if state == _NOT_IN_STATE:
            return SlotError(
                f"The slot {slot} can no longer be read: {words}.",
                "Run dbsync teardown and dbsync init, then copy the tables anew.",
            )
        return StreamError(f"PostgreSQL would not stream the slot {slot}: {words}.")

    def _ended(self) -> DbsyncError:
        result = self._pgconn.get_result()
        words = _one_line(result.get_error_message()) if result is not None else ""
        if result is not None and _sqlstate(result) in (_NOT_IN_ENCODING, _UNTRANSLATABLE):
            return DecodeError(
                f"PostgreSQL cannot give a value of the log in UTF-8: {words}.",
                "Correct the value, then run dbsync teardown and dbsync init and copy the tables anew. A database of"
                " encoding SQL_ASCII takes such values: make it one of UTF8.",
            )
        return StreamError(f"PostgreSQL ended the stream{': ' + words if words else ''}.")


def sent_seconds_after(frame: memoryview, at: datetime) -> float:
    """How long after `at` PostgreSQL sent this XLogData, by PostgreSQL's own clock."""
    return (int.from_bytes(frame[17:HEADER_BYTES], "big") - microseconds(at)) / 1e6


def _sqlstate(result: pq.abc.PGresult) -> str:
    return (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()


@contextmanager
def _broken_connection() -> Iterator[None]:
    """Turn an error of the driver into one that may be tried again."""
    try:
        yield
    except psycopg.Error as error:
        raise StreamError(f"The replication connection broke: {_one_line(str(error))}.") from error


def _connect(settings: Settings) -> psycopg.Connection[tuple[object, ...]]:
    conninfo = settings.conninfo(options=session_options(settings), client_encoding="UTF8", replication="database")
    try:
        return psycopg.connect(conninfo, autocommit=True)
    except psycopg.OperationalError as error:
        raise connection_error(settings, conninfo, error) from error


def _one_line(words: str) -> str:
    return " ".join(words.split()).rstrip(".")
