"""Memory is bounded by configuration, not by the size of a transaction, which arrives while it is in progress.

Counted are the process that reads, and with it the Python workers that Spark starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from fix_postgres import Database

from dbsync import Syncer

MOST_BYTES = 600 * 1000 * 1000  # of the process that reads
MOST_BYTES_OF_ALL = 800 * 1000 * 1000  # with the workers; it is no more for a larger transaction

# Runs in a process of its own, whose Python is measured, until its input ends; Spark is another process.
RUN = """
    import json, sys
    from pathlib import Path
    from dbsync import Batcher, MirrorHandler, Syncer

    class Counting(Batcher):
        upserts = 0

        def batch_upsert(self, doctype, docs):
            self.upserts += len(docs)

    class Own(MirrorHandler):
        def handle_begin(self, msg):
            pass  # what overrides a method sees every row

    batcher = Counting()
    with Syncer(handler=Own() if sys.argv[1] == "handler" else MirrorHandler(), batcher=batcher) as syncer:
        print("started", flush=True)
        before = batcher.upserts if sys.stdin.readline() else None
        print(before, flush=True)
        sys.stdin.readline()
        syncer.drain()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"upserts": batcher.upserts, "bytes": int(peak.split()[1]) * 1024}))
"""


@dataclass(frozen=True, slots=True)
class Passed:
    """The most memory that was taken while a transaction passed."""

    reader_bytes: int
    all_bytes: int


@dataclass(slots=True)
class Peaks:
    """The most bytes that were in each folder, and in the memory of all Python."""

    folders: dict[str, Path]
    process: psutil.Process
    most: dict[str, int] = field(default_factory=dict)
    python_bytes: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            for name, folder in self.folders.items():
                self.most[name] = max(self.most.get(name, 0), size(folder))
            self.python_bytes = max(self.python_bytes, python_bytes(self.process))


def size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def python_bytes(process: psutil.Process) -> int:
    """What the process and the Python workers of its Spark take up; what they share is counted once."""
    total = 0
    with suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += one.memory_full_info().pss if one.name().startswith("python") else 0
    return total


def passed(
    database: Database, folder: Path, rows: int, way: str, capsys: pytest.CaptureFixture[str], **environ: str
) -> Passed:
    """Have a transaction of so many rows pass, and say what it took."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, name text, note text, amount numeric, at timestamptz)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    Syncer(database.settings()).setup()
    folders = {"DBSYNC_SPOOL_DIR": str(folder / "spool"), "SPARK_LOCAL_DIRS": str(folder / "spark")}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), way],
        env=database.environ(**folders, **environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    peaks = Peaks({"spool": folder / "spool", "Spark": folder / "spark"}, psutil.Process(process.pid))
    with process, peaks.watched():
        assert process.stdout.readline() == "started\n"
        started = time.monotonic()
        with database.connect(autocommit=False) as transaction:
            insert_in_parts(transaction, rows)
            waiting = wait_for_some(folder / "spool")
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n"  # what is not committed is not handed over
        told = json.loads(process.communicate("\n")[0])
        seconds = time.monotonic() - started
    assert process.returncode == 0
    assert told["upserts"] == rows
    counts = "SELECT stream_txns, spill_bytes FROM pg_catalog.pg_stat_replication_slots WHERE slot_name = %s"
    ((streamed, spilled),) = database.rows(counts, [database.slot])
    assert streamed > 0
    with capsys.disabled():
        print(
            f"\n{rows} rows by {way} in {seconds:.0f} s: the reader {told['bytes'] / 1e6:.0f} MB, all Python"
            f" {peaks.python_bytes / 1e6:.0f} MB at the most;"
            f" on disk {', '.join(f'{name} {most / 1e6:.0f} MB' for name, most in peaks.most.items())} at the most,"
            f" {waiting / 1e6:.0f} MB of it before the commit; {spilled / 1e6:.0f} MB spilled by PostgreSQL"
        )
    return Passed(int(told["bytes"]), peaks.python_bytes)


def insert_in_parts(transaction: Any, rows: int) -> None:
    insert = (
        "INSERT INTO t SELECT g, 'name ' || g, repeat('x', 60), g / 7.0, now() FROM generate_series(%s::int, %s::int) g"
    )
    for part in range(10):
        transaction.execute(insert, [part * rows // 10 + 1, (part + 1) * rows // 10])


def wait_for_some(spool: Path) -> int:
    """Until a part of the transaction has arrived, and no more comes for a moment: how much that is."""
    deadline, before = time.monotonic() + 60, 0
    while (now := size(spool)) == 0 or now != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(1)
    return now


@pytest.mark.parametrize("way", ["mirror", "handler"])
def test_a_large_transaction_passes_in_little_memory(
    database: Database, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # So that even a short one is sent while it is in progress.
    dsn = f"{database.dsn} options='-c logical_decoding_work_mem=1MB'"
    rows = 300_000 if way == "mirror" else 100_000
    taken = passed(database, tmp_path, rows, way, capsys, POSTGRES_CONNSTR=dsn)
    assert taken.reader_bytes < MOST_BYTES
    assert taken.all_bytes < MOST_BYTES_OF_ALL


@pytest.mark.long
@pytest.mark.parametrize(("way", "rows"), [("mirror", 5_000_000), ("handler", 2_000_000)])
def test_a_transaction_of_millions_of_rows_passes_in_little_memory(
    database: Database, way: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = passed(database, tmp_path, rows, way, capsys)
    assert taken.reader_bytes < MOST_BYTES
    assert taken.all_bytes < MOST_BYTES_OF_ALL
