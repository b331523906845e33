"""`dbsync` as a process of its own, for the tests that see it as a script does."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fix_postgres import Database

SECRET = "geheim-4711"
COMMAND = [sys.executable, "-m", "dbsync"]
WAIT_SECONDS = 180.0


def publish(database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE orders")


def environ(database: Database, **changes: str) -> dict[str, str]:
    ours = {
        "DBSYNC_SPARK_MASTER": "local[1]",
        "DBSYNC_RETRIES": "2",
        "DBSYNC_RETRY_SECONDS": "0.1",
        "DBSYNC_SNAPSHOT": "never",
    }
    # The tests may run from a checkout that is not installed.
    return database.environ(**{**ours, "PYTHONPATH": str(Path(__file__).parents[1]), **changes})


def dbsync(
    database: Database, *arguments: str, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environ(database, **changes),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, sentence: str, hint: str) -> None:
    """The command ended with that code, one sentence and a hint, and nothing else."""
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("dbsync: ")
    assert lines[0].endswith(".")
    assert sentence in lines[0]
    assert hint in lines[1]
    assert done.stdout == ""
    assert SECRET not in done.stderr


@contextmanager
def running(
    database: Database, *arguments: str, cwd: Path | None = None, **changes: str
) -> Iterator[subprocess.Popen[str]]:
    """A `dbsync run` beside the test."""
    with subprocess.Popen(
        [*COMMAND, "run", *arguments],
        env=environ(database, **changes),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], WAIT_SECONDS)
    assert ready, "dbsync wrote nothing"
    return process.stdout.readline()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
