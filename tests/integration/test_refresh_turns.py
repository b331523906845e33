"""Several refreshes at once: whatever is wrong with one of them, the others go on, and so does the stream."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import (
    ask,
    before_a_read,
    documents,
    hanging_commit,
    in_background,
    is_over,
    require_standby,
    state,
    wait_for,
)

import dbsync.chunks
import dbsync.refresh
from dbsync import Syncer
from dbsync.connection import connect
from dbsync.embedded import EmbeddedPostgres
from dbsync.pace import Pace
from dbsync.refresh import Refresher
from dbsync.requests import Requests


def test_a_refresh_waits_for_no_commit_that_hangs_on_another_table(
    standbyless: tuple[EmbeddedPostgres, Database],
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The table with the hanging commit has more chunks than windows may be on their way."""
    server, database = standbyless
    database.execute("INSERT INTO items SELECT g, 'old' FROM generate_series(3, 100) AS g")
    asked: list[float] = []
    waiting = Requests.waiting
    monkeypatch.setattr(Requests, "waiting", lambda self: asked.append(time.monotonic()) or waiting(self))
    target = RecordingBatcher()
    syncer = Syncer(database.settings(chunk_rows=10), batcher=target, spark=spark)
    syncer.setup()
    require_standby(server)
    with syncer:
        with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
            wait_for(lambda: target.upserts("public.items"))
            items = in_background(lambda: syncer.refresh("SELECT * FROM items"))
            wait_for(lambda: caplog.text.count("is read again") >= 4)
            assert in_background(lambda: syncer.refresh("SELECT * FROM others"))().rows == 1
            # What is void is waited for, and not looked after all the while.
            begun, before = time.monotonic(), len(asked)
            time.sleep(1)
            assert (len(asked) - before) / (time.monotonic() - begun) < 60
            assert len(files(syncer)) <= 4 * syncer.settings.chunk_parallelism, "rows of void windows are still on disk"
        assert items().rows == 100
    assert target.documents["public.items"] == documents(database, "items")


def files(syncer: Syncer) -> list[str]:
    return [path.name for path in (syncer._spool.folder / "windows").glob("*")]


def test_beside_others_refreshes_take_turns(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one window at a time, a short refresh need not wait for the end of a long one that was asked for first."""
    turns: list[str] = []
    read_ranges = dbsync.refresh.read_ranges

    def noting(spark: SparkSession, tasks: list[Any]) -> Any:
        turns.append(tasks[0].selection.relation.name)
        return read_ranges(spark, tasks)

    monkeypatch.setattr(dbsync.refresh, "read_ranges", noting)
    monkeypatch.setattr(Pace, "look", lambda pace, commits: setattr(pace, "is_busy", True))
    syncer = Syncer(items.settings(chunk_rows=10, chunk_rest=0.0), batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    long, short = ask(items, "SELECT * FROM items"), ask(items, "SELECT * FROM others")
    with syncer:
        wait_for(lambda: is_over(items, long) and is_over(items, short))
    assert turns.count("items") == 10
    assert turns.index("others") <= 2


def test_what_spark_takes_to_start_holds_up_no_window_and_is_nothing_to_rest_from(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    read_ranges, mark = dbsync.refresh.read_ranges, Refresher._mark
    told: list[float] = []

    def session() -> SparkSession:
        order.append("Spark")
        return spark

    def slow_to_start(spark: SparkSession, tasks: list[Any]) -> Any:
        time.sleep(2.0)
        return read_ranges(spark, tasks)

    def marking(refresher: Refresher, conn: Any, window: str, which: str) -> None:
        order.append(which)
        mark(refresher, conn, window, which)

    with Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark) as syncer:
        syncer.drain()
        order.clear()
        monkeypatch.setattr(dbsync.refresh, "read_ranges", slow_to_start)
        monkeypatch.setattr(syncer._refresher, "_spark", session)
        monkeypatch.setattr(Refresher, "_mark", marking)
        monkeypatch.setattr(Pace, "read", lambda pace, seconds, rows, size_bytes: told.append(seconds))
        syncer.refresh("SELECT * FROM items")
    assert order.index("Spark") < order.index("low")
    assert 0 < told[0] < 2.0


BROKEN = {
    "params that are no placeholders' values": ("SELECT * FROM items WHERE id = $1", {"params": "[1]"}, "failed"),
    "params with pieces that are none": ("SELECT 1", {"params": '{"pieces": [[0, 7]], "params": []}'}, "failed"),
    "a last key that is none": ("SELECT * FROM items", {"last_key": "5", "part": 7}, "done"),
    "a SELECT that PostgreSQL cannot run now, and never can": ("SELECT * FROM items WHERE full(id)", {}, "failed"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_refresh_that_is_broken_fails_alone(items: Database, spark: SparkSession, what: str) -> None:
    """Anyone who may write the table can write such rows."""
    query, columns, end = BROKEN[what]
    items.execute(
        """CREATE FUNCTION "full"(id int) RETURNS bool LANGUAGE plpgsql AS
        $$ BEGIN
            IF id > 50 THEN RAISE 'temporary file size exceeds temp_file_limit' USING ERRCODE = '53400'; END IF;
            RETURN true;
        END $$"""
    )
    target = RecordingBatcher()
    settings = items.settings(chunk_rows=10, retries=2, retry_seconds=0.01)
    syncer = Syncer(settings, batcher=target, spark=spark)
    syncer.setup()
    broken = ask(items, query.replace("full(", 'public."full"('), **columns)
    with syncer:
        wait_for(lambda: not syncer.running or is_over(items, broken))
        assert syncer.refresh("SELECT * FROM others").rows == 10
    assert state(items, broken) == end
    if end == "failed":
        ((message,),) = items.rows("SELECT message FROM dbsync_ctrl.dbsync_refreshes WHERE id = %s", [broken])
        assert message.endswith(".")
        assert len(message.splitlines()) == 1


def test_a_lock_on_a_table_holds_up_its_refresh_and_not_the_stream(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken when the window is open: all that comes after the low mark would wait for it."""
    target, locked = RecordingBatcher(), threading.Event()
    with items.connect(autocommit=False) as locker:

        def lock() -> None:
            locker.execute("LOCK TABLE items IN ACCESS EXCLUSIVE MODE")
            locked.set()

        before_a_read(monkeypatch, 1, lock)
        with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
            refreshing = in_background(lambda: syncer.refresh("SELECT * FROM items"))
            wait_for(locked.is_set)
            items.execute("INSERT INTO others VALUES (77, 'meanwhile')")
            wait_for(lambda: "77" in target.upserts("public.others"))
            locker.rollback()
            result = refreshing()
    assert result.rows == 100
    assert result.voided >= 1


def test_a_table_that_is_locked_when_its_refresh_begins_is_waited_for_and_the_refresh_can_be_cancelled(
    items: Database, spark: SparkSession
) -> None:
    settings = items.settings(retries=1, retry_seconds=0.01)
    syncer = Syncer(settings, batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    waiting, cancelled = ask(items, "SELECT * FROM items"), ask(items, "SELECT * FROM items WHERE id < 5")
    with items.connect(autocommit=False) as locker, syncer:
        locker.execute("LOCK TABLE items IN ACCESS EXCLUSIVE MODE")
        wait_for(lambda: syncer._refresher and len(syncer._refresher._jobs) == 2)
        time.sleep(2)
        with connect(settings) as conn:
            assert Requests(conn, settings).cancel(cancelled)
        wait_for(lambda: syncer._refresher and len(syncer._refresher._jobs) == 1)
        locker.rollback()
        wait_for(lambda: is_over(items, waiting))
    assert state(items, waiting) == "done"


def test_a_chunk_has_no_more_rows_than_it_may_whatever_the_table_was_when_it_was_cut(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is of before a TRUNCATE: the table looks empty, and its one chunk has no end."""
    counts: list[int] = []
    next_ranges, read_ranges = dbsync.chunks.next_ranges, dbsync.refresh.read_ranges

    def truncate_first(*args: Any) -> Any:
        monkeypatch.setattr(dbsync.chunks, "next_ranges", next_ranges)
        items.execute("TRUNCATE items; INSERT INTO items SELECT g, 'again' FROM generate_series(1, 300) AS g")
        return next_ranges(*args)

    def counting(*args: Any) -> Any:
        read = read_ranges(*args)
        counts.append(sum(found.rows for found in read))
        return read

    monkeypatch.setattr(dbsync.chunks, "next_ranges", truncate_first)
    monkeypatch.setattr(dbsync.refresh, "read_ranges", counting)
    target = RecordingBatcher()
    with Syncer(items.settings(chunk_rows=50), batcher=target, spark=spark) as syncer:
        result = syncer.refresh("SELECT * FROM items")
        syncer.drain()
    assert max(counts) <= 50
    assert (result.rows, result.chunks, result.voided) == (300, 6, 1)
    assert target.documents["public.items"] == documents(items, "items")
