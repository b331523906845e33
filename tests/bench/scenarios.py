"""What is measured: ours and the yardstick, in turns, in one run and on one server."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
from pyspark.sql import SparkSession

from dbsync import LSN, Batcher, MessageHandler, Settings, Syncer, compact
from dbsync.embedded import EmbeddedPostgres
from dbsync.mirror import join_tuple
from dbsync.pgoutput import Column, Relation
from dbsync.relation import Catalog
from dbsync.spool import Batch, Spool

TABLE = """
    CREATE TABLE items (
        id bigint PRIMARY KEY, name text NOT NULL, price numeric(10, 2), stock int, weight float8,
        active boolean, changed timestamptz DEFAULT now(), note text
    )"""
FILL = """
    INSERT INTO items
    SELECT g, 'item ' || g, mod(g, 1000) + 0.99, mod(g, 50), g / 7.0, mod(g, 2) = 0, now(), repeat('n', 40)
    FROM generate_series(%s::bigint, %s::bigint) g"""
UPDATE = "UPDATE items SET stock = stock + 1, price = price + 1 WHERE id BETWEEN %s AND %s"
HUNDRED = 100
WARM = "import dbsync.cli; from dbsync.spark import session; session('local[*]').newSession().range(1).count()"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. None: the scenario's own."""

    runs: int = 3
    size: int | None = None


@dataclass(slots=True)
class Comparison:
    """Seconds (or another unit) of ours and of the yardstick, run in turns."""

    name: str
    yardstick: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    limit: float | None = None
    unit: str = "s"

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "yardstick": self.yardstick,
            "unit": self.unit,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "limit": self.limit,
        }


@dataclass(slots=True)
class Figures:
    """Values by name, with the limit where there is one; `series` is what a plot shows."""

    name: str
    values: dict[str, tuple[float, float | None]]
    unit: str
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        values = {name: {"value": value, "limit": limit} for name, (value, limit) in self.values.items()}
        return {"name": self.name, "unit": self.unit, "values": values, "series": self.series}


Result = Comparison | Figures


class Counting(Batcher):
    """A target that only counts."""

    def __init__(self) -> None:
        self.upserts = self.deletes = 0

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self.upserts += len(docs)

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self.deletes += len(ids)


class DistributedCounting(Counting):
    distributed = True


class MarksAll(MessageHandler):
    """A handler of the user's own that marks every change."""

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.syncer.mark_updated("item", msg.new["id"], msg.new)

    handle_update = handle_insert

    def handle_delete(self, msg: Any, relation: Any) -> None:
        self.syncer.mark_deleted("item", msg.key["id"])


class Arriving(Batcher):
    """Notes when each id arrives."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        if doctype == "public.ticks":
            now = time.monotonic()
            self.at.update(dict.fromkeys(docs, now))

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A server with a database of its own, and dbsync set up in it."""

    server: EmbeddedPostgres

    @property
    def dsn(self) -> str:
        return self.server.dsn("bench")

    def settings(self, slot: str = "base", **changes: Any) -> Settings:
        return Settings(dsn=self.dsn, slot=slot, **changes)

    def execute(self, statement: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            cursor = conn.execute(statement, params)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def copy_of_slot(self, slot: str) -> Iterator[str]:
        """Another slot at the same place of the log."""
        self.execute("SELECT pg_catalog.pg_copy_logical_replication_slot('base', %s)", [slot])
        try:
            yield slot
        finally:
            self.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", [slot])


@contextmanager
def source(*statements: str) -> Iterator[Source]:
    with EmbeddedPostgres(options={"max_wal_size": "8GB", "shared_buffers": "256MB"}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute("CREATE DATABASE bench")
        made = Source(server)
        for statement in (*statements, "CREATE PUBLICATION dbsync_mypub FOR ALL TABLES"):
            made.execute(statement)
        Syncer(made.settings()).setup()
        yield made


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(comparison: Comparison, runs: int, ours: Callable[[int], float], theirs: Callable[[int], float]) -> None:
    """The first round of each warms up and does not count."""
    for run in range(runs + 1):
        figures = ours(run), theirs(run)
        if run:
            comparison.ours.append(figures[0])
            comparison.theirs.append(figures[1])


def drain(spark: SparkSession, options: Options) -> Iterator[Result]:
    """A million changes through dbsync, against pg_recvlogical to nowhere."""
    changes = options.size or 1_000_000
    with source(TABLE) as made:
        inserts = max(HUNDRED, changes // 5)
        with psycopg.connect(made.dsn) as conn:
            for first in range(1, inserts + 1, 10_000):
                conn.execute(FILL, [first, min(first + 9_999, inserts)])
                conn.commit()
            conn.execute("SELECT pg_catalog.setseed(0.5)")
            for _ in range((changes - inserts) // HUNDRED):
                found = conn.execute("SELECT 1 + (random() * %s)::bigint", [inserts - HUNDRED]).fetchone()
                assert found
                conn.execute(UPDATE, [found[0], found[0] + HUNDRED - 1])
                conn.commit()
        end = made.execute("SELECT pg_catalog.pg_current_wal_lsn()")[0][0]

        def received(run: int) -> float:
            with made.copy_of_slot(f"theirs_{run}") as slot:
                return timed(lambda: _receive(made, slot, end))

        def drained(run: int, handler: Callable[[], MessageHandler | None], name: str) -> float:
            with made.copy_of_slot(f"{name}_{run}") as slot:
                target = Counting()
                syncer = Syncer(made.settings(slot), handler=handler(), batcher=target, spark=spark)
                seconds = timed(syncer.drain)
            assert target.upserts >= inserts, target.upserts
            return seconds

        mirror = Comparison(f"drain {changes:,} changes, MirrorHandler", "pg_recvlogical", limit=1.5)
        in_turns(mirror, options.runs, lambda run: drained(run, lambda: None, "mirror"), received)
        yield mirror
        marks = Comparison(f"drain {changes:,} changes, a handler that marks each", "pg_recvlogical", limit=2.5)
        in_turns(marks, options.runs, lambda run: drained(run, MarksAll, "marks"), received)
        yield marks


def _receive(made: Source, slot: str, end: str) -> None:
    command = [made.server.bin / "pg_recvlogical", "--slot", slot, "--start", "--no-loop", "--endpos", end]
    options = ["-f", "/dev/null", "-o", "proto_version=1", "-o", "publication_names=dbsync_mypub"]
    subprocess.run([*command, *options, "--dbname", made.dsn], check=True, stderr=subprocess.DEVNULL)


def refresh(spark: SparkSession, options: Options) -> Iterator[Result]:
    """A whole table with the stream running, against COPY; and what it takes from the source meanwhile."""
    for rows in [options.size] if options.size else [1_000_000, 10_000_000]:
        with source(TABLE) as made:
            made.execute(FILL, [1, rows])
            made.execute("VACUUM ANALYZE items")
            with Syncer(made.settings(), batcher=DistributedCounting(), spark=spark) as syncer:
                syncer.drain()
                found = Comparison(f"refresh {rows:,} rows", "COPY items TO STDOUT", limit=6.0)
                in_turns(
                    found,
                    options.runs,
                    lambda _: timed(lambda: syncer.refresh("SELECT * FROM items")),
                    lambda _: timed(lambda: _copy(made)),
                )
                yield found
    with source(TABLE) as made:
        made.execute(FILL, [1, options.size or 1_000_000])
        _pgbench(made, "-i", "-q", "-s", "10")
        with Syncer(made.settings(keyless="skip"), batcher=DistributedCounting(), spark=spark) as syncer:
            found = Comparison("pgbench while a refresh runs", "pgbench alone", limit=1.0 / 0.85, unit="ms/transaction")
            in_turns(
                found, options.runs, lambda _: _busy(syncer, lambda: _pgbench_ms(made)), lambda _: _pgbench_ms(made)
            )
            yield found


def _copy(made: Source) -> None:
    with psycopg.connect(made.dsn) as conn, conn.cursor().copy("COPY items TO STDOUT") as copy:
        for _ in copy:
            pass


def _busy(syncer: Syncer, work: Callable[[], float]) -> float:
    """The work, while one refresh follows another."""
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            syncer.refresh("SELECT * FROM items")

    thread = threading.Thread(target=again)
    thread.start()
    try:
        return work()
    finally:
        over.set()
        thread.join()


def _pgbench(made: Source, *arguments: str) -> str:
    command = [str(made.server.bin / "pgbench"), *arguments, made.dsn]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _pgbench_ms(made: Source) -> float:
    said = _pgbench(made, "-n", "-c", "2", "-T", "10")
    (line,) = [line for line in said.splitlines() if line.startswith("latency average")]
    return float(line.split()[3])


def latency(spark: SparkSession, options: Options) -> Iterator[Result]:
    """From commit to Batcher at 200 transactions a second, alone and during a refresh."""
    ticks = options.size or 4_000
    with source(TABLE, "CREATE TABLE ticks (id bigint PRIMARY KEY, note text)") as made:
        made.execute(FILL, [1, 250 * ticks])
        target = Arriving()
        with Syncer(made.settings(), batcher=target, spark=spark) as syncer:
            syncer.drain()
            _tick(made, target, 0, 200)
            alone = _tick(made, target, 1_000_000, ticks)
            yield _percentiles("latency at 200 transactions a second", alone)
            busy: list[float] = []
            _busy(syncer, lambda: busy.extend(_tick(made, target, 2_000_000, ticks)) or 0.0)
            yield _percentiles("latency at 200 transactions a second during a refresh", busy)


def _tick(made: Source, target: Arriving, first: int, count: int) -> list[float]:
    committed: dict[str, float] = {}
    with psycopg.connect(made.dsn, autocommit=True) as conn:
        started = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, started + number / 200 - time.monotonic()))
            conn.execute("INSERT INTO ticks VALUES (%s, 'tick')", [first + number])
            committed[str(first + number)] = time.monotonic()
    while not committed.keys() <= target.at.keys():
        time.sleep(0.01)
    return [1000 * (target.at[id] - at) for id, at in committed.items()]


def _percentiles(name: str, found: list[float]) -> Figures:
    cuts = statistics.quantiles(found, n=100)
    values: dict[str, tuple[float, float | None]] = {
        "median": (cuts[49], 250.0),
        "99th percentile": (cuts[98], 1000.0),
        "longest": (max(found), None),
    }
    return Figures(name, values, "ms")


def compaction(spark: SparkSession, options: Options) -> Iterator[Result]:
    """One batch of more and more changes, over few and many keys: seconds, and the most memory in use meanwhile."""
    most = options.size or 10_000_000
    sizes = [size for size in (10_000, 100_000, 1_000_000, 10_000_000) if size <= most]
    with source(TABLE) as made:
        for words, keys in (("few keys", 1_000), ("many keys", None)):
            took: list[tuple[float, float]] = []
            memory: list[tuple[float, float]] = []
            for size in sizes:
                rounds = [_compacted(spark, made, size, keys or size // 2) for _ in range(options.runs)]
                took.append((float(size), statistics.median(seconds for seconds, _ in rounds)))
                memory.append((float(size), max(megabytes for _, megabytes in rounds)))
            values: dict[str, tuple[float, float | None]] = {f"{size:,.0f}": (seconds, None) for size, seconds in took}
            # A batch below a hundred thousand is mostly Spark's own start of a job.
            for (small, before), (large, after) in itertools.pairwise(took[1:]):
                values[f"{large:,.0f} against {small:,.0f}, times"] = (after / before, 11.0)
            yield Figures(f"compaction over {words}", values, "s", {words: took})
            used: dict[str, tuple[float, float | None]] = {f"{size:,.0f}": (peak, None) for size, peak in memory}
            yield Figures(f"memory while compacting over {words}", used, "MB of Python's processes")


def _compacted(spark: SparkSession, made: Source, changes: int, keys: int) -> tuple[float, float]:
    spool = Spool(None)
    try:
        batch = _batch(spool, made, changes, keys)
        with _peak_memory() as peak:
            seconds = timed(lambda: compact.apply(spark, batch, DistributedCounting(), list))
        return seconds, peak[0]
    finally:
        spool.close()


def _batch(spool: Spool, made: Source, changes: int, keys: int) -> Batch:
    """Updates as they come off the wire."""
    with psycopg.connect(made.dsn) as conn:
        row = conn.execute("SELECT 'items'::regclass::oid::int8").fetchone()
    assert row
    oid = int(row[0])
    relation = Catalog(lambda: psycopg.connect(made.dsn, autocommit=True)).relation(_described(made, oid))
    writer = spool.writer(1)
    writer.describe(relation)
    writer.begin(LSN(1), datetime.now(UTC))
    head = b"U" + oid.to_bytes(4, "big") + b"N"
    rest = [b"item", b"9.99", b"7", b"1.5", b"t", b"2026-01-01 00:00:00+00", b"n" * 40]
    for number in range(changes):
        writer.add_frame(head + join_tuple([str(number * 7919 % keys).encode(), *rest]))
    writer.commit(LSN(1), LSN(2))
    return writer.close(LSN(2))


def _described(made: Source, oid: int) -> Any:
    """How the log describes the table."""
    columns = made.execute(
        "SELECT attname, atttypid::int8, atttypmod, attname = 'id' FROM pg_catalog.pg_attribute"
        " WHERE attrelid = %s AND attnum > 0 ORDER BY attnum",
        [oid],
    )
    described = tuple(Column(name, type_oid, modifier, key) for name, type_oid, modifier, key in columns)
    return Relation(oid, "public", "items", "d", described)


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """The most that this process and Spark's Python workers hold at once, looked at ten times a second."""
    peak, over = [0.0], threading.Event()

    def held() -> float:
        total = 0
        for process in (me, *me.children(recursive=True)):
            try:
                if "python" in process.name():
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 1e6

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], held())

    me = psutil.Process()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak[0] = max(peak[0], held())


def start(_: SparkSession, options: Options) -> Iterator[Result]:
    """From `dbsync run` to the first change handed over, and what it is made of."""
    parts: dict[str, list[float]] = {"dbsync run to the first change": [], "imports": [], "imports and Spark": []}
    with source(TABLE) as made:
        environ = {**os.environ, "POSTGRES_CONNSTR": made.dsn, "DBSYNC_REPLSLOT": "base"}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        for run in range(options.runs):
            made.execute(FILL, [run + 1, run + 1])
            parts["dbsync run to the first change"].append(timed(lambda: _first_change(environ)))
            parts["imports"].append(timed(lambda: _python("import dbsync.syncer, dbsync.cli", environ)))
            parts["imports and Spark"].append(timed(lambda: _python(WARM, environ)))
    yield Figures("start", {name: (statistics.median(found), None) for name, found in parts.items()}, "s")


def _first_change(environ: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dbsync", "run"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        process.terminate()
        process.communicate()
    assert b"items" in line, line


def _python(code: str, environ: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, stderr=subprocess.DEVNULL)


SCENARIOS: dict[str, Callable[[SparkSession, Options], Iterator[Result]]] = {
    "drain": drain,
    "refresh": refresh,
    "latency": latency,
    "compaction": compaction,
    "start": start,
}
