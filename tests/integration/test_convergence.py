"""pgbench's own workload, full and partial refreshes all the while: at the end the target equals the source."""

from __future__ import annotations

import random
import subprocess
from typing import Any

import pytest
from fix_postgres import Database, Server
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import RefreshResult, Syncer

TABLES = {"pgbench_accounts": "aid", "pgbench_tellers": "tid", "pgbench_branches": "bid"}
ACCOUNTS = 100_000


@pytest.mark.parametrize("seconds", [5, pytest.param(120, marks=pytest.mark.long)])
def test_target_and_source_are_equal_after_refreshes_under_load(
    postgres: Server, database: Database, spark: SparkSession, seconds: int
) -> None:
    if postgres.bin is None:
        pytest.skip("this server comes without pgbench")
    pgbench = [str(postgres.bin / "pgbench"), database.dsn]
    subprocess.run([*pgbench[:1], "-i", "-q", database.dsn], check=True, capture_output=True)
    database.execute(f"CREATE PUBLICATION dbsync_mypub FOR TABLE {', '.join(TABLES)}")
    target = RecordingBatcher()
    with Syncer(database.settings(chunk_rows=20_000), batcher=target, spark=spark) as syncer:
        load = subprocess.Popen(
            [pgbench[0], "-n", "-c", "2", "-T", str(seconds), database.dsn],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        results = _refresh_until_over(syncer, load)
        assert load.returncode == 0
        syncer.drain()
    assert results[0].rows == ACCOUNTS
    for table, key in TABLES.items():
        assert target.documents[f"public.{table}"] == _documents(database, table, key)


def _refresh_until_over(syncer: Syncer, load: subprocess.Popen[bytes]) -> list[RefreshResult]:
    """The whole of every table first, then parts of the accounts for as long as the load goes on."""
    results = [syncer.refresh(f"SELECT * FROM {table}") for table in TABLES]
    chance = random.Random(1)
    while load.poll() is None:
        first = chance.randrange(ACCOUNTS)
        results.append(
            syncer.refresh("SELECT * FROM pgbench_accounts WHERE aid BETWEEN %s AND %s", params=[first, first + 5_000])
        )
    return results


def _documents(database: Database, table: str, key: str) -> dict[str, dict[str, Any]]:
    with database.connect() as conn:
        cursor = conn.execute(f"SELECT * FROM {table}")
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return {str(row[key]): row for row in rows}
