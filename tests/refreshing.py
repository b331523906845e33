"""What the tests of refreshes have in common: waiting, holding a commit or a batch back, doing something in between."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from fix_postgres import Database
from recording import RecordingBatcher

import dbsync.refresh
from dbsync.embedded import EmbeddedPostgres

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


def require_standby(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        wait_for(lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))


def before_a_read(monkeypatch: pytest.MonkeyPatch, nth: int, work: Callable[[], None]) -> None:
    """Do something when that chunk's snapshot is taken and its rows are not read yet."""
    read_ranges, reads = dbsync.refresh.read_ranges, itertools.count(1)

    def work_first(*args: Any) -> Any:
        if next(reads) == nth:
            work()
        return read_ranges(*args)

    monkeypatch.setattr(dbsync.refresh, "read_ranges", work_first)


class GatedBatcher(RecordingBatcher):
    """Takes one batch and keeps the next ones waiting until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        if self.batches:
            self.gate.wait(PATIENCE_SECONDS)
        super().batch_upsert(doctype, docs)


def ask(database: Database, query: str, **columns: Any) -> int:
    """Ask for a refresh as anybody can who may write the table."""
    given = {"slot": database.slot, "query": query, **columns}
    names, places = ", ".join(given), ", ".join(["%s"] * len(given))
    ((id,),) = database.rows(
        f"INSERT INTO dbsync_ctrl.dbsync_refreshes ({names}) VALUES ({places}) RETURNING id", list(given.values())
    )
    return int(id)


def state(database: Database, id: int) -> str:
    ((found,),) = database.rows("SELECT state FROM dbsync_ctrl.dbsync_refreshes WHERE id = %s", [id])
    return str(found)


def is_over(database: Database, id: int) -> bool:
    return state(database, id) in ("done", "failed", "cancelled")
