"""What was committed and not visible, or visible and never in the log: no old row may win, and none be lost."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher, SqliteBatcher
from refreshing import GatedBatcher, ask, documents, hanging_commit, in_background, require_standby, state, wait_for

import dbsync.control
import dbsync.refresh
import dbsync.relation
from dbsync import LSN, Syncer
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import SlotError
from dbsync.stream import ReplicationStream
from dbsync.window import State

Standbyless = tuple[EmbeddedPostgres, Database]


def big(database: Database) -> None:
    """A table of which an update leaves a value out."""
    database.execute("CREATE TABLE big (id int PRIMARY KEY, n int, t text)")
    database.execute("ALTER TABLE big ALTER t SET STORAGE EXTERNAL")
    database.execute("INSERT INTO big VALUES (5, 50, repeat('five', 1000)), (7, 70, repeat('seven', 1000))")
    database.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE big")


def confirmed(database: Database) -> LSN:
    ((lsn,),) = database.rows(
        "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", [database.slot]
    )
    return LSN(lsn)


def test_nothing_is_acknowledged_that_this_connection_has_not_read(
    standbyless: Standbyless, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that stores its position says it has the commit; a later refresh still has to hear of it."""
    server, database = standbyless
    target = SqliteBatcher(tmp_path / "target", positioned=True)

    def syncer() -> Syncer:
        return Syncer(database.settings(), batcher=SqliteBatcher(target.path, positioned=True), spark=spark)

    with syncer() as first:
        first.refresh("SELECT * FROM items")
    require_standby(server)
    with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        with syncer():
            wait_for(lambda: target.documents()["public.items"]["1"]["name"] == "new")
        held = confirmed(database)
        with monkeypatch.context() as patch:
            patch.setattr(ReplicationStream, "read", lambda *_: time.sleep(0.01) or [])
            with syncer() as second:
                turns = itertools.count()
                patch.setattr(second, "_move_on_when_idle", lambda _: next(turns))
                wait_for(lambda: next(turns) > 50)
        assert confirmed(database) == held
    with syncer() as last:
        last.drain()
        assert target.documents()["public.items"]["1"]["name"] == "new"


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "after a restart"])
def test_a_first_copy_waits_for_what_was_written_before_the_table_was_published(
    items: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture, is_restarted: bool
) -> None:
    caplog.set_level("INFO")
    items.execute("CREATE TABLE late (id int PRIMARY KEY, n int); INSERT INTO late VALUES (1, 0), (2, 0)")
    target = RecordingBatcher()
    copies = "SELECT count(*) FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial' AND state = 'done'"
    syncer = Syncer(items.settings(snapshot="initial"), batcher=target, spark=spark)
    with items.connect(autocommit=False) as writer:
        with syncer:
            wait_for(lambda: items.rows(copies) == [(2,)])
            writer.execute("INSERT INTO late VALUES (3, 3)")
            writer.execute("UPDATE late SET n = 1 WHERE id = 1")
            items.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE late")
            if not is_restarted:
                wait_for(lambda: "the first copy of public.late waits" in caplog.text)
                writer.commit()
                wait_for(lambda: items.rows(copies) == [(3,)])
        if is_restarted:
            with syncer:
                wait_for(lambda: "the first copy of public.late waits" in caplog.text)
                writer.commit()
                wait_for(lambda: items.rows(copies) == [(3,)])
    assert target.documents["public.late"] == documents(items, "late")
    assert "3" in target.documents["public.late"]


def test_a_slot_is_ready_when_what_was_open_as_it_was_made_is_visible(
    standbyless: Standbyless, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a commit may stand before the slot's start, where nothing can be held back for it."""
    server, database = standbyless
    syncer = Syncer(database.settings(), batcher=RecordingBatcher(), spark=spark)
    run = dbsync.control._run

    def then_hang(conn: Any, settings: Any, name: str) -> None:
        run(conn, settings, name)
        if name == "create_slot.sql":
            entered.set()
            hanging.wait(60)

    entered, hanging = threading.Event(), threading.Event()
    monkeypatch.setattr(dbsync.control, "_run", then_hang)
    setup = in_background(lambda: (syncer.setup(), "done"))
    assert entered.wait(60)
    require_standby(server)
    asleep = threading.Event()
    monkeypatch.setattr(dbsync.control.time, "sleep", lambda _: asleep.set() or threading.Event().wait(0.01))
    with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        hanging.set()
        assert asleep.wait(60)
    assert setup() == (None, "done")


def test_a_row_that_moved_to_the_key_of_another_is_completed_from_itself(
    standbyless: Standbyless, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    server, database = standbyless
    big(database)
    target = RecordingBatcher()
    with Syncer(database.settings(), batcher=target, spark=spark) as syncer:
        syncer.refresh("SELECT * FROM big")
        require_standby(server)
        moving = "BEGIN; DELETE FROM big WHERE id = 5; UPDATE big SET id = 5 WHERE id = 7; COMMIT"
        with hanging_commit(server, database, moving):
            wait_for(lambda: "Missing values of public.big are read again: transaction" in caplog.text)
        syncer.drain()
    assert target.documents["public.big"] == documents(database, "big")


@pytest.mark.parametrize("column", ["id", "t"])
def test_values_are_completed_though_a_column_was_renamed_meanwhile(
    items: Database, spark: SparkSession, column: str
) -> None:
    """A rename logs no row."""
    big(items)
    target = GatedBatcher()
    with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
        items.execute("INSERT INTO others VALUES (11, 'first')")
        wait_for(lambda: target.batches)
        items.execute("UPDATE big SET n = 51 WHERE id = 5")
        items.execute(f"ALTER TABLE big RENAME COLUMN {column} TO renamed")
        target.gate.set()
        syncer.drain()
    assert target.documents["public.big"]["5"] == {"id": 5, "n": 51, "t": "five" * 1000}


def test_a_lock_on_a_table_whose_values_are_missing_lets_dbsync_stop(items: Database, spark: SparkSession) -> None:
    big(items)
    target = GatedBatcher()
    with items.connect(autocommit=False) as locker:
        syncer = Syncer(items.settings(), batcher=target, spark=spark)
        syncer.start()
        items.execute("INSERT INTO others VALUES (11, 'first')")
        wait_for(lambda: target.batches)
        items.execute("UPDATE big SET n = 51 WHERE id = 5")
        locker.execute("LOCK TABLE big IN ACCESS EXCLUSIVE MODE")
        target.gate.set()
        wait_for(lambda: syncer._handoff.in_work and "11" in target.documents["public.others"])
        syncer.stop()
    with syncer:
        syncer.drain()
    assert target.documents["public.big"]["5"]["t"] == "five" * 1000


def test_a_table_altered_behind_its_window_in_the_same_batch_splits_it(items: Database, spark: SparkSession) -> None:
    """Each batch is announced with the columns that its rows have."""
    target = GatedBatcher()
    announced: list[int] = []
    begin = target.begin

    def noting(batch: Any) -> None:
        announced.extend(relation.columns[1].type_oid for name, relation in batch.relations.items() if "items" in name)
        begin(batch)

    target.begin = noting  # type: ignore[method-assign]
    with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
        items.execute("INSERT INTO others VALUES (11, 'first')")
        wait_for(lambda: target.batches)
        result = in_background(lambda: syncer.refresh("SELECT * FROM items"))
        wait_for(lambda: State.RELEASED in [window.state for window in list(syncer._board._windows.all.values())])
        items.execute("ALTER TABLE items ALTER name TYPE varchar; UPDATE items SET name = 'new' WHERE id = 1")
        target.gate.set()
        syncer.drain()
        assert result().rows == 100
    assert list(dict.fromkeys(announced)) == [25, 1043]
    assert target.documents["public.items"] == documents(items, "items")


def test_a_connection_that_ends_while_the_catalog_is_asked_is_made_again(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = dbsync.relation.Catalog._now, itertools.count()

    def ended(self: Any, message: Any) -> Any:
        if message.name == "items" and next(asked) == 0:
            raise psycopg.errors.AdminShutdown("terminating connection due to administrator command")
        return now(self, message)

    def asking_ended(self: Any, message: Any) -> Any:
        with self._asking():
            return ended(self, message)

    monkeypatch.setattr(dbsync.relation.Catalog, "_now", asking_ended)
    target = RecordingBatcher()
    with Syncer(items.settings(), batcher=target, spark=spark) as syncer:
        items.execute("UPDATE items SET name = 'new' WHERE id = 1")
        syncer.drain()
    assert next(asked) > 1
    assert target.documents["public.items"]["1"]["name"] == "new"


def test_files_go_where_the_snapshot_ends_behind_the_reading(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read_ranges, reads = dbsync.refresh.read_ranges, itertools.count()

    def then_end(*args: Any) -> Any:
        done = read_ranges(*args)
        if next(reads) == 0:
            items.rows(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE application_name LIKE 'dbsync window%'"
            )
        return done

    monkeypatch.setattr(dbsync.refresh, "read_ranges", then_end)
    with Syncer(items.settings(spool_dir=tmp_path), batcher=RecordingBatcher(), spark=spark) as syncer:
        assert syncer.refresh("SELECT * FROM items").rows == 100
        syncer.drain()
        wait_for(lambda: not list(tmp_path.glob("run-*/windows/*")))


def test_a_read_that_nobody_watches_any_more_is_called_off(
    items: Database, spark: SparkSession, tmp_path: Path
) -> None:
    items.execute(
        """CREATE FUNCTION public.waits(int) RETURNS bool LANGUAGE sql AS $$
            SELECT current_setting('application_name') NOT LIKE 'dbsync window%' OR pg_sleep(60) IS NOT NULL $$"""
    )
    reading = "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'dbsync window%' AND state = 'active'"
    with Syncer(items.settings(spool_dir=tmp_path), batcher=RecordingBatcher(), spark=spark) as syncer:
        syncer.drain()
        id = ask(items, "SELECT * FROM items WHERE public.waits(id)")
        wait_for(lambda: items.rows(reading))
        items.execute("CREATE OR REPLACE FUNCTION public.waits(int) RETURNS bool LANGUAGE sql AS 'SELECT true'")
        items.rows(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND (query LIKE '%%dbsync_refreshes%%' OR query LIKE '%%dbsync_wmtable%%') AND datname = %s",
            [items.name],
        )
        wait_for(lambda: state(items, id) == "done")
        syncer.drain()
        wait_for(lambda: not list(tmp_path.glob("run-*/windows/*")))


def test_a_batch_that_is_tried_again_does_not_land_behind_those_of_another_dbsync(
    items: Database, spark: SparkSession, tmp_path: Path
) -> None:
    def syncer() -> Syncer:
        settings = items.settings(to=f"sqlite:///{tmp_path}/target.db", retry_seconds=2.0)
        return Syncer(settings, spark=spark)

    one, other = syncer(), syncer()
    one.start()
    one.drain()
    begin, tried = one.batcher.begin, threading.Event()

    def away_at_first(batch: Any) -> None:
        if not tried.is_set():
            tried.set()
            raise OSError("away")
        begin(batch)

    one.batcher.begin = away_at_first  # type: ignore[method-assign]
    other.start()  # and waits for the slot
    items.execute("UPDATE items SET name = 'one' WHERE id = 1")
    assert tried.wait(60)
    items.rows("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [items.slot])
    items.execute("UPDATE items SET name = 'two' WHERE id = 1")
    other.drain()
    wait_for(lambda: not one.running or one._progress.failure)
    assert isinstance(one._progress.failure, SlotError)
    one.stop()
    other.stop()
    assert other._progress.failure is None
