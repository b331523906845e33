"""Spark's Java process ends under a running dbsync: that is said and stops the run, and the next one goes on."""

from __future__ import annotations

import json

import psutil
import pytest
from commands import WAIT_SECONDS, dbsync, next_line, publish, running
from fix_postgres import Database


@pytest.fixture
def source(database: Database) -> Database:
    publish(database)
    assert dbsync(database, "init").returncode == 0
    return database


def first_line(source: Database, **environment: str) -> str:
    """What the next run prints first. The suite's Spark stays out of this: it has other tests to serve."""
    with running(source, **environment) as process:
        line = next_line(process)
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)
    return line


def test_a_killed_jvm_ends_the_run_and_the_next_one_goes_on(source: Database) -> None:
    source.execute("INSERT INTO orders VALUES (1, 'a')")
    with running(source) as process:
        assert json.loads(next_line(process))["id"] == "1"
        (jvm,) = [child for child in psutil.Process(process.pid).children() if child.name() == "java"]
        jvm.kill()
        source.execute("INSERT INTO orders VALUES (2, 'b')")
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "dbsync: Spark's Java process has ended: exit code -9." in said
    assert "Traceback" not in said
    assert json.loads(first_line(source))["id"] in ("1", "2")


WIDE = "INSERT INTO orders VALUES (1, repeat('wide', 50 * 1024 * 1024))"


def test_a_row_need_not_fit_into_the_jvm(source: Database) -> None:
    source.execute(WIDE)
    assert len(first_line(source, SPARK_DRIVER_MEMORY="512m")) > 200 * 1024 * 1024


def test_a_jvm_out_of_memory_ends_the_run_and_does_not_hang(source: Database) -> None:
    # The update leaves the value out, so that it has to be folded with the row before it, in Spark.
    source.execute(f"BEGIN; {WIDE}; UPDATE orders SET id = id; COMMIT")
    with running(source, SPARK_DRIVER_MEMORY="512m") as process:
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "dbsync: Spark's Java process has ended: it ran out of memory." in said
    assert "SPARK_DRIVER_MEMORY" in said
    assert len(first_line(source, SPARK_DRIVER_MEMORY="4g")) > 200 * 1024 * 1024
