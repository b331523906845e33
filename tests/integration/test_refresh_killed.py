"""kill -9 at any moment of a refresh: the next dbsync goes on with it, and nothing is missing or stale at the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import SqliteBatcher
from refreshing import (
    PATIENCE_SECONDS,
    ask,
    documents,
    hanging_commit,
    is_over,
    require_standby,
    state,
    wait_for,
)

from dbsync import Syncer
from dbsync.embedded import EmbeddedPostgres

# Runs until it is killed; by itself, where that is said: before or after the nth call of a method.
PROGRAM = """
import importlib, json, os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from recording import SqliteBatcher
from dbsync import Settings, Syncer

def deadly(module, owner, method, when, nth):
    owner = getattr(importlib.import_module(module), owner)
    original, calls = getattr(owner, method), []
    def call(*args, **named):
        calls.append(0)
        if when == "before" and len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **named)
        if when == "after" and len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, method, call)

if len(sys.argv) > 4:
    deadly(*json.loads(sys.argv[4]))
with Syncer(Settings(**json.loads(sys.argv[2])), batcher=SqliteBatcher(Path(sys.argv[3]))):
    threading.Event().wait()
"""


@contextmanager
def another_dbsync(database: Database, target: SqliteBatcher, *dying: Any) -> Iterator[subprocess.Popen[bytes]]:
    settings = {"dsn": database.dsn, "slot": database.slot, "chunk_rows": 10, "spark_master": "local[1]"}
    arguments = [str(Path(__file__).parents[1]), json.dumps(settings), str(target.path), *map(json.dumps, dying)]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], cwd=Path(__file__).parents[2])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def gone_on(database: Database, target: SqliteBatcher, spark: SparkSession, id: int) -> None:
    with Syncer(database.settings(chunk_rows=10), batcher=target, spark=spark) as syncer:
        wait_for(lambda: not syncer.running or is_over(database, id))
        syncer.drain()
    assert state(database, id) == "done"
    assert target.documents()["public.items"] == documents(database, "items")
    assert database.rows("SELECT * FROM dbsync_ctrl.dbsync_wmtable") == []


PHASES = {
    "taken up, and nothing is read": ("dbsync.refresh", "Refresher", "_mark", "before", 1),
    "the low mark is written": ("dbsync.refresh", "Refresher", "_mark", "after", 3),
    "the rows are read": ("dbsync.refresh", "Refresher", "_mark", "before", 4),
    "the high mark is written, and both are there": ("dbsync.refresh", "Refresher", "_mark", "after", 4),
    "in a batch": ("recording", "SqliteBatcher", "batch_upsert", "before", 2),
    "in the target": ("dbsync.requests", "Requests", "advanced", "before", 2),
    "stored": ("dbsync.requests", "Requests", "advanced", "after", 2),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_refresh_goes_on_after_a_kill_in_any_phase(
    items: Database, spark: SparkSession, tmp_path: Path, phase: str
) -> None:
    target = SqliteBatcher(tmp_path / "target.db")
    Syncer(items.settings(), batcher=target, spark=spark).setup()
    id = ask(items, "SELECT * FROM items")
    with another_dbsync(items, target, PHASES[phase]) as process:
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    ((stored,),) = items.rows("SELECT (last_key ->> 0)::int FROM dbsync_ctrl.dbsync_refreshes WHERE id = %s", [id])
    with target.open() as db:
        db.execute("DELETE FROM calls")
    items.execute("UPDATE items SET name = 'meanwhile' WHERE id IN (1, 99)")
    gone_on(items, target, spark, id)
    again = {int(id) for _, _, ids in target.calls() for id in ids} - {1, 99}
    assert min(again) > (stored or 0), "what was stored as done was read once more"


def test_a_kill_between_a_commit_that_hangs_and_the_refresh_loses_nothing(
    standbyless: tuple[EmbeddedPostgres, Database],
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The commit is in the log, applied, and forgotten with the process; to the next one it must come again."""
    server, database = standbyless
    target = SqliteBatcher(tmp_path / "target.db")
    Syncer(database.settings(), batcher=target, spark=spark).setup()
    require_standby(server)
    with hanging_commit(server, database, "UPDATE items SET name = 'new' WHERE id = 1"):
        with another_dbsync(database, target):
            wait_for(lambda: target.documents().get("public.items"))
        id = ask(database, "SELECT * FROM items")
        with Syncer(database.settings(), batcher=target, spark=spark) as syncer:
            wait_for(lambda: not syncer.running or "is read again" in caplog.text or is_over(database, id))
    gone_on(database, target, spark, id)
    assert target.documents()["public.items"]["1"]["name"] == "new"
