"""What every target has to stand: a first copy, a live workload with refreshes, a kill -9 in the middle, a restart.

A test of a target is a `Target` (its URL, and how to read back what it holds) given to `survives`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from commands import dbsync, running, until
from fix_postgres import Database

ROWS = 2_000
SETUP = [
    "CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL, email text UNIQUE, note text)",
    (
        "CREATE TABLE orders (customer int, number int, total numeric(12, 2), placed timestamptz, tags text[],"
        " PRIMARY KEY (customer, number))"
    ),
    (
        f"INSERT INTO customers SELECT i, 'customer ' || i, 'c' || i || '@example', repeat('n', i % 50)"
        f" FROM generate_series(1, {ROWS}) AS i"
    ),
    (
        "INSERT INTO orders SELECT i % 100, i, i * 1.25, '2026-01-01 00:00:00+00'::timestamptz + i * interval '1 hour',"
        f" ARRAY['a', NULL, 't' || i] FROM generate_series(1, {ROWS}) AS i"
    ),
    "CREATE PUBLICATION dbsync_mypub FOR TABLE customers, orders",
]

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    """`read` gives a table's rows, sorted: (id, name, email, note) or (customer, number, total as text)."""

    url: str
    read: Callable[[str], Rows]
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


CUSTOMERS = "SELECT id, name, email, note FROM customers ORDER BY id"
ORDERS = "SELECT customer, number, total::text FROM orders ORDER BY customer, number"


def survives(database: Database, target: Target) -> None:
    """The target equals the source at the end of it all."""
    for statement in SETUP:
        database.execute(statement)
    settings = {
        "DBSYNC_TO": target.url,
        "DBSYNC_SNAPSHOT": "initial",
        "DBSYNC_CHUNK_ROWS": "700",
        "DBSYNC_BATCH_SECONDS": "0.05",
        **target.environ,
    }
    with running(database, *target.arguments, **settings) as process, _writers(database):
        until(lambda: _has_begun(database, process))
        done = dbsync(database, "refresh", "SELECT * FROM customers WHERE id < 500", **settings)
        assert done.returncode == 0, done.stderr
        process.kill()
        process.wait()
    with running(database, *target.arguments, **settings) as process:
        with _writers(database):
            until(lambda: _is_streaming(database, process))
            done = dbsync(database, "refresh", "SELECT * FROM orders", **settings)
            assert done.returncode == 0, done.stderr
        database.execute("TRUNCATE orders")
        database.execute("INSERT INTO orders SELECT 7, i, 0.5, now(), '{}' FROM generate_series(1, 300) AS i")
        drained(database, process)
        process.terminate()
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert equal(database, target)


def drained(database: Database, process: Any = None) -> None:
    """All that is committed so far is applied and acknowledged."""
    (end,) = database.rows("SELECT pg_catalog.pg_current_wal_insert_lsn()")[0]
    query = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"

    def is_confirmed() -> bool:
        assert process is None or process.poll() is None, process.stderr.read()
        return database.rows(query, [end, database.slot]) == [(True,)]

    until(is_confirmed)


def equal(database: Database, target: Target) -> bool:
    for table, query in (("customers", CUSTOMERS), ("orders", ORDERS)):
        held, source = target.read(table), database.rows(query)
        missing, extra = set(source) - set(held), set(held) - set(source)
        assert held == source, (
            f"{table}: {len(missing)} missing {list(missing)[:3]}, {len(extra)} extra {list(extra)[:3]}"
        )
    return True


def _is_streaming(database: Database, process: Any) -> bool:
    assert process.poll() is None, process.stderr.read()
    query = "SELECT active FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    return database.rows(query, [database.slot]) == [(True,)]


def _has_begun(database: Database, process: Any) -> bool:
    """Whether rows of the first copy are in the target. (Not every target can be read while it is written.)"""
    assert process.poll() is None, process.stderr.read()
    try:
        return database.rows("SELECT sum(rows) > 0 FROM dbsync_ctrl.dbsync_refreshes") == [(True,)]
    except psycopg.errors.UndefinedTable:
        return False


class _writers:  # noqa: N801  (used as `with _writers(…)`)
    """Somebody who goes on changing the source."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure:
            raise self._failure

    def _write(self) -> None:
        chance = random.Random(4)
        try:
            with self._database.connect() as conn:
                while not self._over.wait(0.005):
                    _change(conn, chance)
        except BaseException as error:
            self._failure = error


def _change(conn: psycopg.Connection[Any], chance: random.Random) -> None:
    id, other = chance.randint(1, ROWS), chance.randint(ROWS + 1, 2 * ROWS)
    match chance.randrange(6):
        case 0 | 1:
            conn.execute("UPDATE customers SET name = name || '.', note = NULL WHERE id = %s", [id])
        case 2:
            conn.execute("DELETE FROM customers WHERE id = %s", [id])
        case 3:
            conn.execute("INSERT INTO customers VALUES (%s, 'new', %s) ON CONFLICT DO NOTHING", [id, f"n{id}@example"])
        case 4:
            conn.execute(
                "UPDATE orders SET number = %s WHERE number = %s AND NOT EXISTS (SELECT FROM orders WHERE number = %s)",
                [other, id, other],
            )
        case 5:
            with conn.transaction():
                conn.execute("UPDATE orders SET total = total + 1 WHERE number %% 50 = %s", [id % 50])
                conn.execute("DELETE FROM orders WHERE number = %s", [id])
