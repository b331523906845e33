"""refresh() on a real PostgreSQL: exact while writes go on, whatever happens in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import (
    before_a_read,
    documents,
    hanging_commit,
    in_background,
    require_standby,
    wait_for,
)

import dbsync.refresh
from dbsync import DbsyncError, MessageHandler, RefreshResult, Syncer
from dbsync.board import WindowBoard
from dbsync.connection import connect
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import RefreshError
from dbsync.handler import Change
from dbsync.relation import Relation
from dbsync.requests import Requests


def test_rows_that_nobody_changed_arrive_and_the_marks_are_gone(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(items.settings(chunk_rows=30), batcher=target, spark=spark) as syncer:
        result = syncer.refresh("SELECT * FROM items")
        part = syncer.refresh("SELECT * FROM items WHERE id <= 10 AND name LIKE 'o%'; -- a % is only a %")
        bound = syncer.refresh("SELECT * FROM items WHERE id = ANY(%s)", params=[[3, 5, 700]])
    assert (result.rows, result.superseded, result.chunks, result.voided) == (100, 0, 4, 0)
    assert result.seconds > 0
    assert part.rows == 10
    assert bound.rows == 2
    assert target.documents["public.items"] == documents(items, "items")
    assert items.rows("SELECT * FROM dbsync_ctrl.dbsync_wmtable") == []


def test_refresh_works_without_start_and_stops_again(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    syncer = Syncer(items.settings(), batcher=target, spark=spark)
    assert syncer.refresh("SELECT * FROM items WHERE id <= 7").rows == 7
    assert not syncer.running
    assert set(target.documents["public.items"]) == set(map(str, range(1, 8)))


def test_columns_left_out_count_as_unchanged(items: Database, spark: SparkSession) -> None:
    partial, whole = RecordingBatcher(accepts_partial=True), RecordingBatcher()
    Syncer(items.settings(), batcher=partial, spark=spark).refresh("SELECT id, name FROM items WHERE id = 1")
    assert partial.upserts("public.items") == {"1": {"id": 1, "name": "old"}}
    Syncer(items.settings(), batcher=whole, spark=spark).refresh("SELECT id, name FROM items WHERE id = 1")
    assert whole.upserts("public.items") == {"1": {"id": 1, "name": "old", "note": "n1"}}


def test_a_change_inside_the_window_wins_and_is_counted(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the chunk collide: one is updated, one deleted, one gets another key, before the high mark."""

    def change_after_reading(*args: Any) -> Any:
        read = read_ranges(*args)
        items.execute("UPDATE items SET name = 'new' WHERE id = 1")
        items.execute("DELETE FROM items WHERE id = 2")
        items.execute("UPDATE items SET id = 300 WHERE id = 3")
        return read

    read_ranges = dbsync.refresh.read_ranges
    monkeypatch.setattr(dbsync.refresh, "read_ranges", change_after_reading)
    target = RecordingBatcher()
    with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
        result = syncer.refresh("SELECT * FROM items WHERE id <= 3")
        syncer.drain()
    assert (result.rows, result.superseded) == (3, 3)
    assert target.documents["public.items"] == {
        "1": {"id": 1, "name": "new", "note": "n1"},
        "300": {"id": 300, "name": "old", "note": "n3"},
    }


def test_a_commit_that_is_in_the_log_and_not_yet_visible_is_not_lost(
    standbyless: tuple[EmbeddedPostgres, Database], spark: SparkSession
) -> None:
    server, database = standbyless
    target = RecordingBatcher()
    syncer = Syncer(database.settings(), batcher=target, spark=spark)
    syncer.setup()
    require_standby(server)
    with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        syncer.start()
        wait_for(lambda: target.upserts("public.items"))  # the change is in the log, and applied
        refreshing = in_background(lambda: syncer.refresh("SELECT * FROM items"))
        # A refresh of another table does not have to wait for it.
        assert syncer.refresh("SELECT * FROM others").rows == 1
        wait_for(lambda: database.rows("SELECT 1 FROM dbsync_ctrl.dbsync_refreshes WHERE query LIKE '%items' "))
    result: RefreshResult = refreshing()
    syncer.drain()
    syncer.stop()
    assert result.voided >= 1
    assert target.documents["public.items"] == {"1": {"id": 1, "name": "new"}, "2": {"id": 2, "name": "old"}}


@pytest.mark.parametrize(
    "rewrite",
    [
        "ALTER TABLE items ALTER id TYPE bigint",
        "TRUNCATE items; INSERT INTO items SELECT g, 'again', 'x' FROM generate_series(1, 50) AS g",
    ],
    ids=["rewritten", "truncated"],
)
def test_a_table_that_looks_empty_to_the_snapshot_is_read_again(
    items: Database,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rewrite: str,
) -> None:
    """The readers are held between the snapshot and their COPY while the table is rewritten."""

    def rewrite_first(*args: Any) -> Any:
        monkeypatch.setattr(dbsync.refresh, "read_ranges", read_ranges)
        with items.connect() as conn:
            conn.execute(rewrite)
        return read_ranges(*args)

    read_ranges = dbsync.refresh.read_ranges
    monkeypatch.setattr(dbsync.refresh, "read_ranges", rewrite_first)
    target = RecordingBatcher()
    with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
        result = syncer.refresh("SELECT * FROM items")
        syncer.drain()
    assert result.rows == len(documents(items, "items"))
    assert target.documents["public.items"] == documents(items, "items")
    assert "was rewritten, truncated or altered meanwhile" in caplog.text


# What is altered, before which chunk is read, and by which column the documents are told apart then. Rows read before
# a column changes stay as they were, for the log says nothing of them; another key or table is read from its beginning.
ALTERED = {
    "a column added": (1, "ALTER TABLE items ADD extra int DEFAULT 7", "id"),
    "a column dropped": (1, "ALTER TABLE items DROP note", "id"),
    "a column renamed": (1, "ALTER TABLE items RENAME note TO remark", "id"),
    "a column retyped": (1, "ALTER TABLE items ALTER note TYPE int USING 5", "id"),
    "the key renamed": (1, "ALTER TABLE items RENAME id TO key", "key"),
    "the key retyped": (2, "ALTER TABLE items ALTER id TYPE text", "id"),
    "the key redefined": (2, "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (note)", "note"),
    "the table made anew": (
        2,
        """DROP TABLE items; CREATE TABLE items (name text PRIMARY KEY, n int);
           ALTER PUBLICATION dbsync_mypub ADD TABLE items;
           INSERT INTO items SELECT g, g FROM generate_series(1, 90) AS g""",
        "name",
    ),
    "its name taken by another table": (
        2,
        """CREATE TABLE other_items (id int PRIMARY KEY, name text);
           INSERT INTO other_items SELECT g, 'other' FROM generate_series(1, 90, 2) AS g;
           ALTER PUBLICATION dbsync_mypub ADD TABLE other_items;
           ALTER TABLE items RENAME TO old_items; ALTER TABLE other_items RENAME TO items""",
        "id",
    ),
}


@pytest.mark.parametrize("what", ALTERED)
def test_a_table_altered_during_a_refresh_is_read_as_it_is_then(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    nth, statements, key = ALTERED[what]

    def alter() -> None:
        items.execute(statements)
        items.execute(f"UPDATE items SET name = name || '!' WHERE {key} = (SELECT max({key}) FROM items)")

    before_a_read(monkeypatch, nth, alter)
    target = RecordingBatcher()
    with Syncer(items.settings(chunk_rows=40), batcher=target, spark=spark) as syncer:
        syncer.refresh("SELECT * FROM items")
        syncer.drain()
    found = documents(items, "items", key)
    # What was applied under another key's or table's ids before stays: nothing in the log takes it away.
    assert {id: doc for id, doc in target.documents["public.items"].items() if id in found} == found


@pytest.mark.parametrize("statement", ["DROP TABLE items", "ALTER TABLE items RENAME TO things"])
def test_a_table_that_goes_away_during_its_refresh_stops_nothing_else(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    before_a_read(monkeypatch, 2, lambda: items.execute(statement))
    target = RecordingBatcher()
    with Syncer(items.settings(chunk_rows=40), batcher=target, spark=spark) as syncer:
        with pytest.raises(RefreshError, match="items"):
            syncer.refresh("SELECT * FROM items")
        syncer.refresh("SELECT * FROM others")
    assert target.documents["public.others"] == documents(items, "others")


def test_partitions_come_and_go_during_a_refresh(
    database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        """CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (50);
        CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (50) TO (100);
        CREATE TABLE p3 (v text, id int NOT NULL PRIMARY KEY);
        INSERT INTO p SELECT g, 'v' FROM generate_series(1, 99) AS g;
        INSERT INTO p3 SELECT 'new', g FROM generate_series(100, 149) AS g;
        CREATE PUBLICATION dbsync_mypub FOR TABLE p WITH (publish_via_partition_root)"""
    )
    before_a_read(
        monkeypatch,
        2,
        lambda: database.execute(
            """ALTER TABLE p ATTACH PARTITION p3 FOR VALUES FROM (100) TO (150);
               ALTER TABLE p DETACH PARTITION p2; UPDATE p SET v = 'changed' WHERE id IN (1, 149)"""
        ),
    )
    target = RecordingBatcher()
    with Syncer(database.settings(chunk_rows=20), batcher=target, spark=spark) as syncer:
        syncer.refresh("SELECT * FROM p")
        syncer.drain()
    found = documents(database, "p")
    assert {id: doc for id, doc in target.documents["public.p"].items() if id in found} == found


class ShapingHandler(MessageHandler):
    """Marks documents of its own shape, and remembers in which order it was called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []

    def handle_insert(self, msg: Change, relation: Relation) -> None:
        self.seen.append(("insert", msg.id))
        self.syncer.mark_updated("shaped", msg.id, {"name": msg.new["name"]})

    def handle_update(self, msg: Change, relation: Relation) -> None:
        self.seen.append(("update", msg.id))
        self.syncer.mark_updated("shaped", msg.id, {"name": msg.new["name"]})

    def handle_refresh(self, row: Change, relation: Relation) -> None:
        self.seen.append(("refresh", row.id))
        super().handle_refresh(row, relation)


def test_reread_rows_pass_through_a_handler_in_their_place(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_after_reading(*args: Any) -> Any:
        read = read_ranges(*args)
        items.execute("UPDATE items SET name = 'after' WHERE id = 1")
        return read

    read_ranges = dbsync.refresh.read_ranges
    monkeypatch.setattr(dbsync.refresh, "read_ranges", change_after_reading)
    target, handler = RecordingBatcher(), ShapingHandler()
    with Syncer(items.settings(), handler=handler, batcher=target, spark=spark) as syncer:
        syncer.pause()
        items.execute("UPDATE items SET name = 'before' WHERE id = 1")
        refreshing = in_background(lambda: syncer.refresh("SELECT * FROM items WHERE id <= 2"))
        wait_for(lambda: items.rows("SELECT 1 FROM items WHERE name = 'after'"))
        syncer.resume()
        assert refreshing().rows == 2
        syncer.drain()
    ones = [what for what, id in handler.seen if id == "1"]
    assert ones == ["update", "refresh", "insert", "update"]
    assert target.documents["shaped"] == {"1": {"name": "after"}, "2": {"name": "old"}}


def test_several_threads_may_refresh_overlapping_parts_at_once(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(items.settings(chunk_rows=17), batcher=target, spark=spark) as syncer:
        stop = threading.Event()

        def write() -> None:
            with items.connect() as conn:
                number = 0
                while not stop.is_set():
                    number += 1
                    conn.execute("UPDATE items SET name = %s WHERE id = %s", [f"w{number}", number * 7 % 100 + 1])
                    time.sleep(0.002)

        writing = threading.Thread(target=write)
        writing.start()
        selects = [
            "SELECT * FROM items",
            "SELECT * FROM items WHERE id > 40",
            "SELECT id, name FROM items WHERE id < 60",
        ]
        results = [in_background(lambda query=query: syncer.refresh(query)) for query in selects]
        assert [result().rows for result in results] == [100, 60, 59]
        stop.set()
        writing.join()
        syncer.drain()
    assert target.documents["public.items"] == documents(items, "items")


def test_a_refused_select_writes_no_mark(items: Database, spark: SparkSession) -> None:
    syncer = Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    with pytest.raises(DbsyncError) as refused:
        syncer.refresh("SELECT name FROM items")
    assert refused.value.exit_code == 2
    assert items.rows("SELECT count(*) FROM dbsync_ctrl.dbsync_refreshes") == [(0,)]
    assert items.rows("SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'dbsync_wmtable'") == [(0,)]


def test_the_first_copy_is_made_once_and_tables_added_later_get_theirs(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    settings = items.settings(snapshot="initial")

    def copied(*tables: str) -> bool:
        return all(target.documents.get(f"public.{table}") == documents(items, table) for table in tables)

    with Syncer(settings, batcher=target, spark=spark):
        wait_for(lambda: copied("items", "others"))
        items.execute("CREATE TABLE later (id int PRIMARY KEY)")
        items.execute("INSERT INTO later VALUES (1), (2)")
        items.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE later")
        wait_for(lambda: copied("later"))
    target.clear()
    with Syncer(settings, batcher=target, spark=spark) as syncer:
        syncer.drain()
        wait_for(lambda: not items.rows("SELECT 1 FROM dbsync_ctrl.dbsync_refreshes WHERE finished_at IS NULL"))
    assert items.rows("SELECT count(*) FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial'") == [(3,)]
    assert not target.upserts("public.items")


def test_a_refresh_that_is_cancelled_lets_go_of_a_slow_select_at_once(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()

    def slow_readers() -> list[tuple[Any, ...]]:
        reading = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dbsync window %' AND state = 'active'"
        return items.rows(reading + " AND query LIKE '%pg_sleep%'")

    settings = items.settings()
    with Syncer(settings, batcher=target, spark=spark) as syncer:
        # The statement is tried out with one row before anything is written, and that row must not be slow.
        query = "SELECT * FROM items WHERE CASE WHEN id = 1 THEN true ELSE pg_sleep(3600) IS NOT NULL END"
        refreshing = in_background(lambda: _told(lambda: syncer.refresh(query)))
        wait_for(slow_readers)
        with connect(settings) as conn:
            requests = Requests(conn, settings)
            assert requests.cancel(requests.waiting()[0].id)
        assert "was cancelled" in refreshing()
        wait_for(lambda: not slow_readers())
        assert syncer.refresh("SELECT * FROM items WHERE id = 1").rows == 1


def _told(work: Callable[[], Any]) -> str:
    try:
        work()
    except DbsyncError as error:
        return str(error)
    return ""


def test_who_waits_for_the_slot_leaves_refreshes_to_who_has_it(items: Database, spark: SparkSession) -> None:
    holder, waiter = RecordingBatcher(), RecordingBatcher()
    settings = items.settings()
    with Syncer(settings, batcher=holder, spark=spark) as first, Syncer(settings, batcher=waiter, spark=spark):
        assert first.refresh("SELECT * FROM items").voided == 0
    assert len(holder.documents["public.items"]) == 100
    assert waiter.calls == []


def test_the_snapshot_is_taken_under_the_lock_and_not_before(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit just before the snapshot is visible to it: else a commit could be forgotten that it does not see."""

    def commit_first(board: WindowBoard, id: str, take: Callable[[], Any]) -> None:
        items.execute("INSERT INTO items VALUES (777, 'just now', 'n') ON CONFLICT DO NOTHING")
        snapshot(board, id, take)

    snapshot = WindowBoard.snapshot
    monkeypatch.setattr(WindowBoard, "snapshot", commit_first)
    with Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark) as syncer:
        assert syncer.refresh("SELECT * FROM items WHERE id > 90").rows == 11
