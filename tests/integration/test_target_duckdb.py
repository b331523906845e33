"""DuckDB as `--to`: see `fix_target` for what it has to stand."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from fix_postgres import Database
from fix_target import SOURCE, STAMP, STAMPED, Rows, Target, noted, survives, take_back, waits_for_what_is_away
from pyspark.sql import SparkSession

from dbsync.batcher.duckdb import DuckDBBatcher
from dbsync.syncer import Syncer


def test_duckdb_survives(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "target.duckdb"

    def ask(statement: str) -> Rows:
        with duckdb.connect(str(file)) as db:
            db.execute("USE public")
            return db.execute(statement).fetchall()

    target = Target(f"duckdb:///{file}", lambda table: ask(SOURCE[table]), stamp=lambda: ask(STAMPED))
    survives(database, target)


def test_while_it_is_away_nothing_is_missed(
    database: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits_for_what_is_away(database, DuckDBBatcher(tmp_path / "target"), tmp_path / "target", spark, caplog)
    with duckdb.connect(str(tmp_path / "target")) as db:
        assert db.execute("SELECT id, a FROM public.t ORDER BY id").fetchall() == [(1, 3), (4, 4)]


def test_no_batch_is_applied_twice(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    """Who holds the file has changed what is in it: a row that is written again loses that."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, name text); CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    file = tmp_path / "target.duckdb"
    syncer = Syncer(database.settings(), batcher=DuckDBBatcher(file), spark=spark)
    syncer.setup()
    before = noted(database)
    with syncer:
        database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 20) AS i")
        syncer.drain()
        database.execute("UPDATE t SET name = 'y' WHERE id < 5; DELETE FROM t WHERE id > 15")
        syncer.drain()
    with duckdb.connect(str(file)) as db:
        db.execute(f"UPDATE public.t SET name = '{STAMP}'; DELETE FROM public.t WHERE id = 7")
    take_back(database, before)
    with Syncer(database.settings(), batcher=DuckDBBatcher(file), spark=spark) as again:
        again.drain()
        database.execute("UPDATE t SET name = 'z' WHERE id = 1")
        again.drain()
    with duckdb.connect(str(file)) as db:
        held = db.execute("SELECT id, name FROM public.t ORDER BY id").fetchall()
    assert held == [(1, "z"), *((id, STAMP) for id in range(2, 16) if id != 7)]
