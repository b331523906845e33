"""What needs the source while it is away waits until it is back; what is asked for wrongly is said at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fix_postgres import Database, fresh_database, new_server
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import (
    GatedBatcher,
    documents,
    hanging_commit,
    in_background,
    require_standby,
    wait_for,
)

import dbsync.completion
import dbsync.syncer
from dbsync import Syncer
from dbsync.board import WindowBoard
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import DbsyncError, RefreshError, SetupError, StreamError


@pytest.fixture
def restartable() -> Iterator[tuple[EmbeddedPostgres, Database]]:
    with new_server() as server, fresh_database(server) as database:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text)")
        database.execute("INSERT INTO items SELECT g, 'old' FROM generate_series(1, 100) AS g")
        database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items")
        yield server, database


def test_a_refresh_returns_when_it_is_done_though_postgresql_restarts_meanwhile(
    restartable: tuple[EmbeddedPostgres, Database], spark: SparkSession
) -> None:
    server, database = restartable
    target = GatedBatcher()
    with Syncer(database.settings(chunk_rows=10), batcher=target, spark=spark) as syncer:
        refreshing = in_background(lambda: syncer.refresh("SELECT * FROM items"))
        wait_for(lambda: database.rows("SELECT 1 FROM dbsync_ctrl.dbsync_refreshes WHERE chunks > 0"))
        server.restart()
        target.gate.set()
        assert refreshing().rows >= 100
    assert target.documents["public.items"] == documents(database, "items")


def test_what_psycopg_says_of_a_broken_connection_stays_off_the_screen() -> None:
    program = "import dbsync, logging; logging.getLogger('psycopg').warning('error ignored in rollback')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_values_that_are_completed_wait_for_the_source_however_long_it_is_away(
    database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, n int, t text)")
    database.execute("ALTER TABLE big ALTER t SET STORAGE EXTERNAL")
    database.execute("INSERT INTO big VALUES (1, 1, repeat('x', 100000))")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE big")
    tries = 0

    def away_at_first(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 6:
            raise StreamError("PostgreSQL cannot be reached.")
        return connect(*args)

    connect = dbsync.completion.connect
    monkeypatch.setattr(dbsync.completion, "connect", away_at_first)
    target = RecordingBatcher()
    with Syncer(database.settings(retries=1, retry_seconds=0.01), batcher=target, spark=spark) as syncer:
        database.execute("UPDATE big SET n = 2")
        syncer.drain()
    assert tries > 6
    assert target.documents["public.big"] == documents(database, "big")


@pytest.mark.parametrize("chunk_rows", [0, -1, 2**31, "x", 1.5, True])
def test_a_chunk_size_that_cannot_be_used_is_refused(items: Database, spark: SparkSession, chunk_rows: Any) -> None:
    syncer = Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark)
    with pytest.raises(RefreshError, match=rf"^chunk_rows={chunk_rows!r} cannot be used\. Pass a whole number"):
        syncer.refresh("SELECT * FROM items", chunk_rows=chunk_rows)


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("SELECT 1 / 0", DbsyncError, "PostgreSQL refused a statement of dbsync's: division by zero"),
        ("DO $$ BEGIN RAISE 'permission denied' USING ERRCODE = '42501'; END $$", SetupError, "The role may not"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", StreamError, "The connection to PostgreSQL broke"),
    ],
)
def test_only_a_connection_that_broke_is_said_to_have_broken(
    items: Database, spark: SparkSession, statement: str, kind: type[DbsyncError], words: str
) -> None:
    syncer = Syncer(items.settings(), batcher=RecordingBatcher(), spark=spark)
    with pytest.raises(kind, match=words) as refused, syncer._sql() as conn:
        conn.execute(statement)
    assert type(refused.value) is kind


def test_many_commits_that_have_to_be_remembered_are_not_looked_through_all_the_while(
    standbyless: tuple[EmbeddedPostgres, Database], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, database = standbyless
    looks: list[float] = []
    prune = WindowBoard.prune
    monkeypatch.setattr(dbsync.syncer, "_MOST_UNSEEN", 1)
    monkeypatch.setattr(WindowBoard, "prune", lambda board, take: looks.append(time.monotonic()) or prune(board, take))
    target = RecordingBatcher()
    syncer = Syncer(database.settings(), batcher=target, spark=spark)
    syncer._many_unseen = 1
    syncer.setup()
    require_standby(server)
    with syncer, hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        wait_for(lambda: target.upserts("public.items"))
        time.sleep(0.5)
        before = len(looks)
        time.sleep(2)
        assert len(looks) - before <= 6
