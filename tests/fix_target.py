"""What every target has to stand: a first copy, a live workload with refreshes, a kill -9 in the middle, a restart.

A test of a target is a `Target` (its URL, and how to read back what it holds) given to `survives`.

Nothing may be written twice where that is promised. The table `events` tells: its rows are inserted one by one when its
first copy is over, and never touched again, so each of them is to be written once. After the kill, the slot is put back
to where it was before the first of them, as if nothing had ever been acknowledged, and all of them come again. A target
that holds rows has a `stamp` put on those it holds by then, and none of the stamps may go; one that tells what happened
may tell of each event once.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from commands import dbsync, running, until
from filetargets import KINDS_IN_JSON
from fix_postgres import Database
from kinds import KINDS
from mirrored import Docs, documents, relation
from pyspark.sql import SparkSession

from dbsync.batcher import Batcher
from dbsync.batcher.jsontext import dumps
from dbsync.syncer import Syncer

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
    "CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL)",
    "CREATE PUBLICATION dbsync_mypub FOR TABLE customers, orders, events",
]

STAMP = "held"

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    """`read` gives a table's rows, sorted: (id, name, email, note), (customer, number, total as text) or (id, note).

    Of `events`, a target that tells what happened gives all that it told. `stamp` makes the note of each event the
    target holds a STAMP.
    """

    url: str
    read: Callable[[str], Rows]
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    stamp: Callable[[], object] | None = None
    exactly_once: bool = True
    heard: Callable[[Any], None] = lambda process: None  # who listens to the process's output


CUSTOMERS = "SELECT id, name, email, note FROM customers ORDER BY id"
ORDERS = "SELECT customer, number, total::text FROM orders ORDER BY customer, number"
EVENTS = "SELECT id, note FROM events ORDER BY id"
STAMPED = f"UPDATE events SET note = '{STAMP}'"
SOURCE = {"customers": CUSTOMERS, "orders": ORDERS, "events": EVENTS}
COLUMNS = {
    "customers": ("id", "name", "email", "note"),
    "orders": ("customer", "number", "total"),
    "events": ("id", "note"),
}


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
    with running(database, *target.arguments, **settings) as process, _writers(database) as writers:
        target.heard(process)
        until(lambda: _has_begun(database, process))
        done = dbsync(database, "refresh", "SELECT * FROM customers WHERE id < 500", **settings)
        assert done.returncode == 0, done.stderr
        until(lambda: _is_copied(database, "events"))
        before = noted(database)
        writers.tell_events()
        until(lambda: len(database.rows(EVENTS)) > 50)
        drained(database, process)
        process.kill()
        process.wait()
    if target.exactly_once:
        take_back(database, before)
    held = _stamped(target)
    with running(database, *target.arguments, **settings) as process:
        target.heard(process)
        with _writers(database) as writers:
            writers.tell_events()
            until(lambda: _is_streaming(database, process))
            done = dbsync(database, "refresh", "SELECT * FROM orders", **settings)
            assert done.returncode == 0, done.stderr
        database.execute("TRUNCATE orders")
        database.execute("INSERT INTO orders SELECT 7, i, 0.5, now(), '{}' FROM generate_series(1, 300) AS i")
        drained(database, process)
        process.terminate()
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert equal(database, target, held)


def noted(database: Database) -> str:
    """A slot that stays where the real one is now."""
    name = f"{database.slot}_before"
    database.rows("SELECT pg_copy_logical_replication_slot(%s, %s)", [database.slot, name])
    return name


def take_back(database: Database, before: str) -> None:
    """The slot is where it was then, as after a crash before the first acknowledgement: all of that comes again."""
    query = "SELECT active FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    until(lambda: database.rows(query, [database.slot]) == [(False,)])
    database.rows("SELECT pg_drop_replication_slot(%s)", [database.slot])
    database.rows("SELECT pg_copy_logical_replication_slot(%s, %s)", [before, database.slot])
    database.rows("SELECT pg_drop_replication_slot(%s)", [before])


def _stamped(target: Target) -> set[int]:
    """The events the target holds, which bear a stamp from now on."""
    if target.stamp is None:
        return set()
    target.stamp()
    held = {id for id, note in target.read("events") if note == STAMP}
    assert len(held) > 50
    return held


def kinds_told(database: Database, batcher: Batcher, spark: SparkSession, told: Callable[[], Docs]) -> None:
    """Rows of every kind go through the engine; `told` gives what came out of it, by id."""
    database.execute("CREATE PUBLICATION dbsync_mypub FOR ALL TABLES")
    with Syncer(database.settings(), batcher=batcher, spark=spark) as syncer:
        database.execute(KINDS)
        syncer.drain()
    found = told()
    expected = {id: json.loads(dumps(doc)) for id, doc in documents(database, relation(database, "kinds")).items()}
    assert found.keys() == expected.keys()
    for id in expected:
        wanted = {**expected[id], **KINDS_IN_JSON.get(id, {})}
        differ = {name: (value, wanted.get(name)) for name, value in found[id].items() if value != wanted.get(name)}
        assert (differ, wanted.keys() - found[id].keys()) == ({}, set()), (id, differ)


def waits_for_what_is_away(
    database: Database, batcher: Batcher, path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A file or folder is moved away and comes back while the source goes on; the rows are (1, 3) and (4, 4) then."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    with Syncer(database.settings(retries=50, retry_seconds=0.1), batcher=batcher, spark=spark) as syncer:
        database.execute("INSERT INTO t VALUES (1, 1), (2, 2)")
        syncer.drain()
        away = path.rename(path.with_name("away"))
        database.execute("UPDATE t SET a = 3 WHERE id = 1; INSERT INTO t VALUES (4, 4); DELETE FROM t WHERE id = 2")
        until(lambda: caplog.text.count("Trying batch") > 2)
        assert not path.exists()
        away.rename(path)
        syncer.drain()


def drained(database: Database, process: Any = None) -> None:
    """All that is committed so far is applied and acknowledged."""
    (end,) = database.rows("SELECT pg_catalog.pg_current_wal_insert_lsn()")[0]
    query = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"

    def is_confirmed() -> bool:
        assert process is None or process.poll() is None, process.stderr.read()
        return database.rows(query, [end, database.slot]) == [(True,)]

    until(is_confirmed)


def equal(database: Database, target: Target, stamped: Collection[int] = ()) -> bool:
    for table, query in SOURCE.items():
        held, source = target.read(table), database.rows(query)
        if table == "events":
            source = [(id, STAMP if id in stamped else note) for id, note in source]
        missing, extra = set(source) - set(held), set(held) - set(source)
        assert held == source, (
            f"{table}: {len(held)} for {len(source)}, {len(missing)} missing {list(missing)[:3]},"
            f" {len(extra)} extra {list(extra)[:3]}"
        )
    return True


def _is_copied(database: Database, table: str) -> bool:
    """Whether the first copy of the table is over."""
    query = "SELECT state FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial' AND query LIKE %s"
    return database.rows(query, [f"%{table}%"]) == [("done",)]


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
        self._events = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def tell_events(self) -> None:
        self._events.set()

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
                    if self._events.is_set():
                        conn.execute("INSERT INTO events (note) VALUES ('told')")
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
