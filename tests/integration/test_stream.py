"""The connection may break, the server may restart, the slot may be taken: it goes on, and nothing is lost."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from fix_postgres import Database, Server, fresh_database, new_server
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import LSN, MessageHandler, Syncer
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import DbsyncError, DecodeError, SlotError
from dbsync.stream import ReplicationStream

TABLE = "CREATE TABLE t (id int PRIMARY KEY, name text); CREATE PUBLICATION dbsync_mypub FOR TABLE t"


@pytest.fixture
def source(database: Database) -> Database:
    database.execute(TABLE)
    return database


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server that may be restarted and configured."""
    with new_server(wal_sender_timeout="2s") as server:
        yield server


@pytest.fixture
def own(own_server: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(own_server) as database:
        database.execute(TABLE)
        yield database


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def walsender(database: Database) -> int | None:
    rows = database.rows(
        "SELECT active_pid FROM pg_catalog.pg_replication_slots WHERE slot_name = %s AND active", [database.slot]
    )
    return rows[0][0] if rows else None


def terminate_walsender(database: Database) -> None:
    pid = until(lambda: walsender(database))
    database.rows("SELECT pg_catalog.pg_terminate_backend(%s, 5000)", [pid])


def current_lsn(database: Database) -> LSN:
    return LSN(database.rows("SELECT pg_catalog.pg_current_wal_lsn()::text")[0][0])


@contextmanager
def running(database: Database, spark: SparkSession, batcher: RecordingBatcher, **changes: Any) -> Iterator[Syncer]:
    with Syncer(database.settings(**changes), batcher=batcher, spark=spark) as syncer:
        yield syncer


def test_what_was_read_and_not_applied_comes_again_after_a_broken_connection(
    source: Database, spark: SparkSession
) -> None:
    target = RecordingBatcher()
    with running(source, spark, target, batch_seconds=3.0) as syncer:
        until(lambda: walsender(source))
        source.execute("INSERT INTO t VALUES (1, 'read, and waiting for its batch to end')")
        written = current_lsn(source)
        until(lambda: (syncer.status().received_lsn or 0) >= written)
        terminate_walsender(source)
        syncer.drain()
        assert list(target.upserts("public.t")) == ["1"]


def test_what_was_read_comes_again_though_postgresql_takes_its_time_to_send_it(
    source: Database, spark: SparkSession
) -> None:
    """After a reconnect there is first nothing to read; that must not pass for having read it all."""
    source.execute("CREATE TABLE unpublished (id int)")
    target = RecordingBatcher()
    with source.connect(autocommit=False) as holding, running(source, spark, target, batch_seconds=60.0) as syncer:
        until(lambda: walsender(source))
        # A transaction that stays open: whoever connects has to be sent the log from here.
        holding.execute("INSERT INTO unpublished VALUES (0)")
        source.execute("INSERT INTO unpublished SELECT * FROM generate_series(1, 1500000)")
        source.execute("INSERT INTO t VALUES (1, 'read, and waiting for its batch to end')")
        written = current_lsn(source)
        until(lambda: (syncer.status().received_lsn or 0) >= written)
        assert syncer.status().totals.batches == 0
        terminate_walsender(source)
        until(lambda: walsender(source))
        time.sleep(1)
        syncer.stop()
        assert list(target.upserts("public.t")) == ["1"] or (syncer.status().confirmed_lsn or 0) < written


def test_a_connection_broken_in_the_middle_of_the_work_loses_nothing(source: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with running(source, spark, target) as syncer:
        for n in range(8):
            source.execute(
                "INSERT INTO t SELECT g, 'x' FROM generate_series(%s::int, %s::int) g", [n * 3000, n * 3000 + 2999]
            )
            source.execute("UPDATE t SET name = 'y' WHERE id %% 7 = %s", [n])
            if n % 3 == 1:
                terminate_walsender(source)
        syncer.drain()
        expected = dict(source.rows("SELECT id::text, name FROM t"))
        assert {id: doc["name"] for id, doc in target.documents["public.t"].items()} == expected
        assert syncer.status().failure is None


def test_a_restart_of_postgresql_loses_nothing(
    own: Database, own_server: EmbeddedPostgres, spark: SparkSession
) -> None:
    target = RecordingBatcher()
    with running(own, spark, target, batch_seconds=1.0) as syncer:
        own.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20000) g")
        until(lambda: walsender(own))
        own_server.restart()
        own.execute("UPDATE t SET name = 'after' WHERE id = 1")
        syncer.drain()
        assert len(target.documents["public.t"]) == 20000
        assert target.documents["public.t"]["1"]["name"] == "after"
        own_server.restart("immediate")
        own.execute("DELETE FROM t WHERE id = 2")
        syncer.drain()
        assert len(target.documents["public.t"]) == 19999


def test_a_server_that_is_away_for_seconds_is_waited_for(
    own: Database, own_server: EmbeddedPostgres, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    target = RecordingBatcher()
    with running(own, spark, target) as syncer:
        until(lambda: walsender(own))
        own_server.stop()
        until(lambda: [r for r in caplog.records if "Trying again" in r.getMessage()])
        time.sleep(1)
        own_server.start()
        own.execute("INSERT INTO t VALUES (1, 'back')")
        syncer.drain()
        assert list(target.documents["public.t"]) == ["1"]


def test_drain_outlives_a_broken_connection(source: Database, spark: SparkSession) -> None:
    """Its own connection too: all of dbsync's are broken while it waits."""
    target = RecordingBatcher()
    with running(source, spark, target) as syncer:
        until(lambda: walsender(source))
        syncer.pause()
        source.execute("INSERT INTO t VALUES (1, 'x')")
        drained: list[Any] = []

        def drain() -> None:
            try:
                drained.append(syncer.drain())
            except Exception as error:
                drained.append(error)

        waiting = threading.Thread(target=drain)
        waiting.start()
        time.sleep(0.5)
        source.rows(
            "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
            " WHERE datname = %s AND application_name = 'dbsync'",
            [source.name],
        )
        syncer.resume()
        waiting.join(30)
        assert drained
        assert isinstance(drained[0], LSN | DbsyncError), drained
        syncer.drain()
        assert list(target.documents["public.t"]) == ["1"]


def test_a_slot_in_use_is_waited_for_and_said_so(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    target = RecordingBatcher()
    syncer = Syncer(source.settings(), batcher=target, spark=spark)
    syncer.setup()
    other = ReplicationStream(source.settings())
    with syncer:
        source.execute("INSERT INTO t VALUES (1, 'x')")
        until(lambda: [r for r in caplog.records if "is in use" in r.getMessage() and r.levelno == logging.WARNING])
        assert target.calls == []
        other.close()
        syncer.drain()
        assert list(target.documents["public.t"]) == ["1"]


def test_another_program_on_the_slot_is_waited_for(source: Database, spark: SparkSession) -> None:
    programs = source.server.bin
    if programs is None:
        pytest.skip("needs pg_recvlogical of the server")
    target = RecordingBatcher()
    syncer = Syncer(source.settings(), batcher=target, spark=spark)
    syncer.setup()
    command = [
        *(str(programs / "pg_recvlogical"), "-d", source.dsn, "-S", source.slot, "--start", "-f", "-"),
        *("-o", "proto_version=1", "-o", "publication_names=dbsync_mypub", "-F", "0"),
    ]
    other = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: walsender(source))
        with syncer:
            time.sleep(1)
            assert syncer.running
            other.kill()
            other.wait()
            source.execute("INSERT INTO t VALUES (1, 'x')")
            syncer.drain()
            assert list(target.documents["public.t"]) == ["1"]
    finally:
        other.kill()
        other.wait()


class SlowBatcher(RecordingBatcher):
    def commit(self, batch: Any) -> None:
        time.sleep(5)
        super().commit(batch)


class SlowHandler(MessageHandler):
    def handle_insert(self, msg: Any, relation: Any) -> None:
        time.sleep(5)
        self.syncer.mark_updated("t", msg.id, msg.new)


@pytest.mark.parametrize("slow", ["batcher", "handler"])
def test_the_connection_is_kept_while_others_are_busy(own: Database, spark: SparkSession, slow: str) -> None:
    """The server gives a silent receiver up after two seconds."""
    target = SlowBatcher() if slow == "batcher" else RecordingBatcher()
    handler = SlowHandler() if slow == "handler" else None
    with Syncer(own.settings(), handler=handler, batcher=target, spark=spark) as syncer:
        before = until(lambda: walsender(own))
        own.execute("INSERT INTO t VALUES (1, 'x')")
        syncer.drain()
        assert walsender(own) == before
    assert len(target.calls) == 1


def test_the_connection_is_kept_while_paused_under_a_full_pipe(own: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with running(own, spark, target) as syncer:
        before = until(lambda: walsender(own))
        syncer.pause()
        own.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 40000) g")
        time.sleep(4)
        assert walsender(own) == before
        assert target.calls == []
        syncer.resume()
        syncer.drain()
        assert walsender(own) == before
    assert len(target.documents["public.t"]) == 40000


def test_a_slot_dropped_meanwhile_ends_the_run(source: Database, spark: SparkSession) -> None:
    syncer = Syncer(source.settings(), batcher=RecordingBatcher(), spark=spark)
    syncer.start()
    try:
        pid = until(lambda: walsender(source))
        with source.connect() as connection:
            connection.execute("SELECT pg_catalog.pg_terminate_backend(%s, 5000)", [pid])
            until(lambda: _drop_slot(connection, source.slot))
        with pytest.raises(SlotError) as told:
            syncer.drain()
        assert told.value.exit_code == 4
        assert "is gone" in str(told.value)
    finally:
        syncer.stop()


def test_why_postgresql_ended_the_stream_is_told(postgres: Server, spark: SparkSession) -> None:
    """A database of encoding SQL_ASCII takes any byte, and PostgreSQL ends the stream at what is no UTF-8."""
    with fresh_database(postgres, encoding="SQL_ASCII") as source:
        with source.connect(client_encoding="SQL_ASCII") as conn:
            conn.execute(TABLE.encode())
            syncer = Syncer(source.settings(), batcher=RecordingBatcher(), spark=spark)
            syncer.setup()
            conn.execute(b"INSERT INTO t SELECT g, 'x' FROM generate_series(1, 50) g")
            conn.execute(b"INSERT INTO t VALUES (100, E'gr\\xf6\\xdfer')")
        with pytest.raises(DecodeError, match=r"cannot give a value of the log in UTF-8: .* 0xf6") as told:
            syncer.drain()
        assert "SQL_ASCII" in str(told.value.hint)


def _drop_slot(connection: psycopg.Connection[Any], slot: str) -> bool:
    try:
        connection.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", [slot])
    except psycopg.errors.ObjectInUse:
        return False
    return True
