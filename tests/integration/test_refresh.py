"""refresh() on a real PostgreSQL: exact while writes go on, whatever happens in between."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from fix_postgres import Database, fresh_database, new_server
from pyspark.sql import SparkSession
from recording import RecordingBatcher, SqliteBatcher

import dbsync.refresh
from dbsync import DbsyncError, MessageHandler, RefreshResult, Syncer
from dbsync.board import WindowBoard
from dbsync.connection import connect
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import RefreshError
from dbsync.handler import Change
from dbsync.relation import Relation
from dbsync.requests import Requests

PATIENCE_SECONDS = 180


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work in a thread; what is returned waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_SECONDS)
        assert results, "it did not come to an end"
        return results[0]

    return result


def documents(database: Database, table: str, key: str = "id") -> dict[str, dict[str, Any]]:
    with database.connect() as conn:
        cursor = conn.execute(f"SELECT * FROM {table}")
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return {str(row[key]): row for row in rows}


@pytest.fixture
def items(database: Database) -> Database:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, note text)")
    database.execute("INSERT INTO items SELECT g, 'old', 'n' || g FROM generate_series(1, 100) AS g")
    database.execute("CREATE TABLE others (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO others SELECT g, 'old' FROM generate_series(1, 10) AS g")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items, others")
    return database


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


@contextmanager
def hanging_commit(server: EmbeddedPostgres, database: Database, statement: str) -> Iterator[None]:
    """A transaction that is in the log and not visible: it waits for a standby that does not exist."""
    waiting = psycopg.connect(database.dsn, autocommit=True)
    waiting.execute("SET synchronous_commit = on")
    pid = waiting.info.backend_pid
    thread = threading.Thread(target=lambda: waiting.execute(statement), daemon=True)
    thread.start()
    try:
        wait_for(
            lambda: database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'", [pid])
        )
        yield
    finally:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            admin.execute("SELECT pg_reload_conf()")
        thread.join(PATIENCE_SECONDS)
        waiting.close()


@pytest.fixture
def standbyless() -> Iterator[tuple[EmbeddedPostgres, Database]]:
    """A server of its own on which commits wait for a standby that does not exist, but for those that do not ask."""
    with new_server(synchronous_commit="local") as server, fresh_database(server) as database:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text)")
        database.execute("INSERT INTO items VALUES (1, 'old'), (2, 'old')")
        database.execute("CREATE TABLE others (id int PRIMARY KEY, name text)")
        database.execute("INSERT INTO others VALUES (1, 'old')")
        database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items, others")
        yield server, database


def require_standby(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        wait_for(lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))


@pytest.mark.parametrize("restarted", [False, True], ids=["in one run", "killed in between"])
def test_a_commit_that_is_in_the_log_and_not_yet_visible_is_not_lost(
    standbyless: tuple[EmbeddedPostgres, Database], spark: SparkSession, restarted: bool
) -> None:
    server, database = standbyless
    target = RecordingBatcher()
    syncer = Syncer(database.settings(), batcher=target, spark=spark)
    syncer.setup()
    require_standby(server)
    with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        syncer.start()
        wait_for(lambda: target.upserts("public.items"))  # the change is in the log, and applied
        if restarted:
            syncer.stop()
            syncer = Syncer(database.settings(), batcher=target, spark=spark)
            syncer.start()
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


def before_a_read(monkeypatch: pytest.MonkeyPatch, nth: int, work: Callable[[], None]) -> None:
    """Do something when that chunk's snapshot is taken and its rows are not read yet."""
    read_ranges, reads = dbsync.refresh.read_ranges, itertools.count(1)

    def work_first(*args: Any) -> Any:
        if next(reads) == nth:
            work()
        return read_ranges(*args)

    monkeypatch.setattr(dbsync.refresh, "read_ranges", work_first)


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


PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from recording import SqliteBatcher
from dbsync import Settings, Syncer
settings = Settings(**json.loads(sys.argv[2]))
with Syncer(settings, batcher=SqliteBatcher(Path(sys.argv[3]))) as syncer:
    if sys.argv[4] == "refresh":
        syncer.refresh("SELECT * FROM items")
    else:
        import time
        while True:
            time.sleep(1)
"""


def test_after_a_kill_the_refresh_goes_on_at_the_chunk_that_was_not_applied(
    items: Database, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    items.execute("INSERT INTO items SELECT g, 'old', 'n' || g FROM generate_series(101, 1500) AS g")
    target = SqliteBatcher(tmp_path / "target.db")
    settings = {"dsn": items.dsn, "slot": items.slot, "chunk_rows": 100, "spark_master": "local[1]"}
    tests = str(request.config.rootpath / "tests")

    def start(what: str) -> subprocess.Popen[bytes]:
        arguments = [tests, json.dumps(settings), str(target.path), what]
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])

    def progress() -> tuple[str, int, list[str] | None]:
        found = items.rows("SELECT state, chunks, last_key FROM dbsync_ctrl.dbsync_refreshes")
        return found[0] if found else ("", 0, None)

    first = start("refresh")
    try:
        there = "SELECT 1 WHERE to_regclass('dbsync_ctrl.dbsync_refreshes') IS NOT NULL"
        wait_for(lambda: items.rows(there) and progress()[1] >= 2)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    state, chunks, last_key = progress()
    assert state == "running"
    assert 2 <= chunks < 15
    with target.open() as db:
        db.execute("DELETE FROM calls")
    second = start("run")
    try:
        wait_for(lambda: progress()[0] == "done")
    finally:
        second.terminate()
        second.wait(PATIENCE_SECONDS)
    again = {int(id) for _, _, ids in target.calls() for id in ids}
    assert last_key is not None
    assert min(again) > int(last_key[0])  # nothing before it was read a second time
    assert set(target.documents()["public.items"]) == set(documents(items, "items"))


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
