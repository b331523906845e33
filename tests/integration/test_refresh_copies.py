"""The first copy of every published table: what stands in its way for one of them leaves the others alone."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from fix_postgres import Database
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import documents, wait_for

from dbsync import Syncer, control

OTHERS = "SELECT 1 FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial' AND finished_at IS NULL"


def copied(database: Database, syncer: Syncer, target: RecordingBatcher, table: str) -> bool:
    assert syncer.running
    return target.documents.get(f"public.{table}") == documents(database, table)


def test_a_table_that_may_not_be_read_is_passed_over(database: Database, spark: SparkSession) -> None:
    role = f"{database.name}_role"
    with database.connect() as conn:
        conn.execute(
            f"""CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'pw';
            CREATE SCHEMA secret; CREATE TABLE secret.hidden (id int PRIMARY KEY);
            CREATE TABLE items (id int PRIMARY KEY, name text); INSERT INTO items VALUES (1, 'a');
            CREATE PUBLICATION dbsync_mypub FOR ALL TABLES;
            GRANT CREATE ON DATABASE {database.name} TO {role}; GRANT SELECT ON items TO {role}"""
        )
        try:
            target = RecordingBatcher()
            settings = database.settings(dsn=make_conninfo(database.dsn, user=role, password="pw"), snapshot="initial")
            with Syncer(settings, batcher=target, spark=spark) as syncer:
                wait_for(lambda: copied(database, syncer, target, "items"))
        finally:
            conn.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
            conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_table_that_goes_away_as_it_is_looked_at_is_passed_over(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    items.execute("CREATE TABLE brief (id int PRIMARY KEY)")
    items.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE brief")
    published_oids = control.published_oids

    def drop_then(conn: psycopg.Connection[Any], settings: Any) -> dict[int, tuple[str, str]]:
        found = published_oids(conn, settings)
        items.execute("DROP TABLE IF EXISTS brief")
        return found

    monkeypatch.setattr(control, "published_oids", drop_then)
    target = RecordingBatcher()
    with Syncer(items.settings(snapshot="initial"), batcher=target, spark=spark) as syncer:
        wait_for(lambda: copied(items, syncer, target, "items") and copied(items, syncer, target, "others"))


def test_a_copy_that_failed_is_tried_again_by_the_next_run_and_one_that_was_cancelled_is_not(
    items: Database, spark: SparkSession
) -> None:
    settings = items.settings(snapshot="initial")
    first = RecordingBatcher()
    with Syncer(settings, batcher=first, spark=spark) as syncer:
        wait_for(lambda: copied(items, syncer, first, "items") and copied(items, syncer, first, "others"))
        wait_for(lambda: not items.rows(OTHERS))
    items.execute(
        """UPDATE dbsync_ctrl.dbsync_refreshes SET state = 'failed' WHERE relation = 'items'::regclass;
        UPDATE dbsync_ctrl.dbsync_refreshes SET state = 'cancelled' WHERE relation = 'others'::regclass"""
    )
    second = RecordingBatcher()
    with Syncer(settings, batcher=second, spark=spark) as syncer:
        wait_for(lambda: copied(items, syncer, second, "items"))
        wait_for(lambda: not items.rows(OTHERS))
    assert "public.others" not in second.documents
