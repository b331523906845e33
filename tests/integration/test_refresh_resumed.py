"""A refresh that was broken off is gone on with where it was, as long as that place still means the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher, SqliteBatcher
from refreshing import PATIENCE_SECONDS, GatedBatcher, ask, documents, in_background, is_over, state, wait_for

import dbsync.refresh
import dbsync.syncer
from dbsync import Syncer
from dbsync.refresh import Refresher
from dbsync.spool import Batch, read_rows
from dbsync.window import State


def broken_off(database: Database, spark: SparkSession, query: str) -> tuple[int, int]:
    """A refresh whose dbsync ends while it is at it: its id, and the last key it has stored."""
    target = GatedBatcher()
    syncer = Syncer(database.settings(chunk_rows=10), batcher=target, spark=spark)
    syncer.setup()
    id = ask(database, query)
    syncer.start()
    stored = "SELECT last_key ->> 0 FROM dbsync_ctrl.dbsync_refreshes WHERE id = %s AND last_key IS NOT NULL"
    wait_for(lambda: database.rows(stored, [id]))
    ending = in_background(lambda: syncer.stop() or True)
    wait_for(syncer._stopping.is_set)
    target.gate.set()
    ending()
    assert state(database, id) == "running"
    return id, int(database.rows(stored, [id])[0][0])


def gone_on(database: Database, spark: SparkSession, id: int) -> RecordingBatcher:
    target = RecordingBatcher()
    with Syncer(database.settings(chunk_rows=10), batcher=target, spark=spark) as syncer:
        wait_for(lambda: is_over(database, id) or not syncer.running)
    assert state(database, id) == "done"
    return target


def test_with_the_same_key_it_goes_on_behind_the_last_one(items: Database, spark: SparkSession) -> None:
    id, last = broken_off(items, spark, "SELECT * FROM items")
    items.execute("ALTER TABLE items ADD extra int DEFAULT 7")
    assert set(gone_on(items, spark, id).upserts("public.items")) == {str(key) for key in range(last + 1, 101)}


@pytest.mark.parametrize("key", ["(b)", "(b, id)"], ids=["another column", "one more column"])
def test_under_another_key_it_starts_over(items: Database, spark: SparkSession, key: str) -> None:
    items.execute("ALTER TABLE items ADD b int; UPDATE items SET b = -id; ALTER TABLE items ALTER b SET NOT NULL")
    id, _ = broken_off(items, spark, "SELECT * FROM items")
    items.execute(f"ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY {key}")
    assert len(gone_on(items, spark, id).upserts("public.items")) == 100
    assert items.rows("SELECT rows FROM dbsync_ctrl.dbsync_refreshes")[0][0] > 100, "what was read twice counts twice"


def test_without_one_of_its_partitions_it_starts_over(database: Database, spark: SparkSession) -> None:
    database.execute(
        """CREATE TABLE p (id int PRIMARY KEY) PARTITION BY HASH (id);
        CREATE TABLE p1 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE p2 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 1);
        INSERT INTO p SELECT generate_series(1, 200);
        CREATE PUBLICATION dbsync_mypub FOR TABLE p"""
    )
    id, _ = broken_off(database, spark, "SELECT * FROM p")
    database.execute("ALTER TABLE p DETACH PARTITION p1")
    assert set(gone_on(database, spark, id).upserts("public.p2")) == set(documents(database, "p2"))


def test_what_a_broken_connection_lets_be_read_again_is_not_handed_over_twice(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The refresher loses its connection when rows are in a batch: the same rows come into that batch once more."""
    items.execute("CREATE TABLE first (id int PRIMARY KEY)")
    items.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE first")
    gate, working, pids, reads, told = threading.Event(), threading.Event(), [], [], []
    serve, read_ranges, apply = Refresher._serve, dbsync.refresh.read_ranges, dbsync.syncer.compact.apply

    def noting_pid(refresher: Refresher, conn: psycopg.Connection[Any]) -> None:
        pids.append(conn.info.backend_pid)
        serve(refresher, conn)

    def counting(*args: Any) -> Any:
        reads.append(args)
        return read_ranges(*args)

    def held(spark: SparkSession, batch: Batch, *args: Any) -> Any:
        working.set()
        gate.wait(PATIENCE_SECONDS)
        ids = [id for rows, _ in batch.windows for id, _ in read_rows(rows)]
        told.append((batch.keys_are_distinct, len(ids) == len(set(ids))))
        return apply(spark, batch, *args)

    monkeypatch.setattr(Refresher, "_serve", noting_pid)
    monkeypatch.setattr(dbsync.refresh, "read_ranges", counting)
    monkeypatch.setattr(dbsync.syncer.compact, "apply", held)
    target = SqliteBatcher(tmp_path / "target.db", distributed=True)
    with Syncer(items.settings(chunk_rows=10), batcher=target, spark=spark) as syncer:

        def released() -> int:
            return sum(window.state is State.RELEASED for window in list(syncer._board._windows.all.values()))

        items.execute("INSERT INTO first VALUES (1)")
        wait_for(working.is_set)  # what follows comes into one batch, which grows as long as this one is in work
        id = ask(items, "SELECT * FROM items")
        wait_for(lambda: released() == 4)
        items.rows("SELECT pg_terminate_backend(%s)", [pids[-1]])
        wait_for(lambda: len(reads) == 8 and released() == 4)
        gate.set()
        wait_for(lambda: is_over(items, id))
    assert (True, False) not in told
    assert (False, False) in told
    handed = [id for kind, doctype, ids in target.calls() if doctype == "public.items" for id in ids]
    assert sorted(map(int, handed)) == list(range(1, 101))


def test_marks_that_cannot_be_deleted_void_nothing(items: Database, spark: SparkSession) -> None:
    with Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark) as syncer:
        items.execute(
            """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
            CREATE TRIGGER refuse BEFORE DELETE ON dbsync_ctrl.dbsync_wmtable
            FOR EACH ROW EXECUTE FUNCTION refuse()"""
        )
        result = in_background(lambda: syncer.refresh("SELECT * FROM items"))()
    assert (result.rows, result.voided) == (100, 0)
