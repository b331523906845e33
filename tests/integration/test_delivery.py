"""At least once, and nothing acknowledged that is not applied: what a failure costs is time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import until
from fix_postgres import Database, new_server
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from recording import FailingBatcher, RecordingBatcher, SqliteBatcher

from dbsync import LSN, Batcher, MessageHandler, Syncer
from dbsync.batcher import BatchInfo
from dbsync.connection import connect
from dbsync.errors import BatcherError, ConfigError, DbsyncError, HandlerError, SlotError
from dbsync.requests import Requests

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Batchers of this file run on executors

TABLE = "CREATE TABLE t (id int PRIMARY KEY, name text); CREATE PUBLICATION dbsync_mypub FOR TABLE t"


@pytest.fixture
def source(database: Database) -> Database:
    database.execute(TABLE)
    return database


def confirmed(database: Database) -> LSN:
    slots = "SELECT confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    return LSN(database.rows(slots, [database.slot])[0][0])


def settings(database: Database, **changes: Any) -> Any:
    return database.settings(**{"retry_seconds": 0.2, **changes})


@pytest.mark.parametrize("where", ["begin", "batch_upsert", "commit"])
def test_a_batcher_that_fails_twice_gets_the_batch_again(source: Database, spark: SparkSession, where: str) -> None:
    acknowledged_at_failure: list[LSN] = []

    class Watching(FailingBatcher):
        def begin(self, batch: BatchInfo) -> None:
            acknowledged_at_failure.append(confirmed(source))

    target = Watching(2, where)
    syncer = Syncer(settings(source), batcher=target, spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (1, 'a')")
    before = confirmed(source)
    with syncer:
        reached = syncer.drain()
    assert target.raised == 2
    assert set(acknowledged_at_failure) <= {before}
    assert target.documents == {"public.t": {"1": {"id": 1, "name": "a"}}}
    assert confirmed(source) >= reached > before


def test_a_batcher_that_fails_for_good_ends_the_run_and_a_restart_delivers(
    source: Database, spark: SparkSession
) -> None:
    failing = FailingBatcher(float("inf"))
    syncer = Syncer(settings(source, retries=3), batcher=failing, spark=spark)
    syncer.setup()
    before = confirmed(source)
    source.execute("INSERT INTO t VALUES (1, 'a')")
    syncer.start()
    with pytest.raises(BatcherError, match="the target is on fire") as told:
        syncer.drain()
    assert told.value.exit_code == 5
    assert "on fire" in (syncer.status().failure or "")
    with pytest.raises(BatcherError):
        syncer.__exit__(None)
    assert failing.raised == 4  # once, and three times more
    assert confirmed(source) == before
    syncer.batcher = good = RecordingBatcher()
    syncer.drain()
    assert good.documents == {"public.t": {"1": {"id": 1, "name": "a"}}}


class FailingHandler(MessageHandler):
    def __init__(self, failures: float) -> None:
        self.failures = failures
        self.raised = 0
        self.seen: list[str | None] = []

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.seen.append(msg.id)
        self.syncer.mark_updated("doc", msg.id, msg.new)
        if msg.id == "2" and self.raised < self.failures:
            self.raised += 1
            raise KeyError("who")


def test_a_handler_that_fails_twice_sees_the_changes_again(source: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    handler = FailingHandler(2)
    syncer = Syncer(settings(source), handler=handler, batcher=target, spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (1, 'a')")
    source.execute("INSERT INTO t VALUES (2, 'b')")
    source.execute("INSERT INTO t VALUES (3, 'c')")
    with syncer:
        syncer.drain()
    assert handler.raised == 2
    assert sorted(target.documents["doc"]) == ["1", "2", "3"]


def test_what_was_marked_before_a_handler_failed_is_not_lost(source: Database, spark: SparkSession) -> None:
    """The first transaction waits in an open batch when the second one's handler raises."""
    source.execute("CREATE TABLE unpublished (id int)")
    target = RecordingBatcher()
    handler = FailingHandler(1)
    syncer = Syncer(settings(source, batch_seconds=2.0), handler=handler, batcher=target, spark=spark)
    syncer.setup()
    with source.connect(autocommit=False) as holding, syncer:
        holding.execute("INSERT INTO unpublished VALUES (0)")
        source.execute("INSERT INTO unpublished SELECT * FROM generate_series(1, 1000000)")
        source.execute("INSERT INTO t VALUES (1, 'a')")
        source.execute("INSERT INTO t VALUES (2, 'b')")
        syncer.drain()
    assert handler.raised == 1
    assert sorted(target.documents["doc"]) == ["1", "2"]


def test_a_handler_that_fails_for_good_ends_the_run_and_a_restart_delivers(
    source: Database, spark: SparkSession
) -> None:
    target = RecordingBatcher()
    syncer = Syncer(settings(source, retries=3), handler=FailingHandler(99), batcher=target, spark=spark)
    syncer.setup()
    before = confirmed(source)
    source.execute("INSERT INTO t VALUES (2, 'b')")
    with pytest.raises(HandlerError, match=r"FailingHandler\.handle_insert raised KeyError: 'who'") as told:
        syncer.drain()
    assert told.value.exit_code == 5
    assert "public.t" in str(told.value)
    assert confirmed(source) == before
    assert target.calls == []
    syncer.handler = FailingHandler(0)
    syncer.drain()
    assert list(target.documents["doc"]) == ["2"]


def test_a_mark_that_cannot_be_is_not_tried_again(source: Database, spark: SparkSession) -> None:
    class Wrong(MessageHandler):
        def handle_insert(self, msg: Any, relation: Any) -> None:
            self.syncer.mark_updated("doc", msg.id, {"value": lambda: None})

    syncer = Syncer(settings(source, retries=50), handler=Wrong(), batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (2, 'b')")
    with pytest.raises(HandlerError, match="cannot be stored"):
        syncer.drain()


def test_marks_are_for_handlers_only(source: Database, spark: SparkSession) -> None:
    with (
        Syncer(settings(source), batcher=RecordingBatcher(), spark=spark) as syncer,
        pytest.raises(HandlerError, match="outside"),
    ):
        syncer.mark_updated("doc", "1", {})


class StopsBeforeAcknowledging(SqliteBatcher):
    """Stores the position with the data, and the process is as good as dead before the slot hears of it."""

    def commit(self, batch: BatchInfo) -> None:
        super().commit(batch)
        raise DbsyncError("killed between commit and acknowledge")


def test_a_batcher_that_stores_the_position_never_gets_a_batch_twice(
    source: Database, spark: SparkSession, tmp_path: Path
) -> None:
    dies = StopsBeforeAcknowledging(tmp_path / "target.db", positioned=True)
    syncer = Syncer(settings(source), batcher=dies, spark=spark)
    syncer.setup()
    before = confirmed(source)
    source.execute("INSERT INTO t VALUES (1, 'a')")
    with pytest.raises(DbsyncError, match="killed between"):
        syncer.drain()
    assert confirmed(source) == before
    source.execute("INSERT INTO t VALUES (2, 'b')")
    again = SqliteBatcher(tmp_path / "target.db", positioned=True)
    resumed = Syncer(settings(source), batcher=again, spark=spark)
    resumed.drain()
    assert again.calls() == [("upsert", "public.t", ["1"]), ("upsert", "public.t", ["2"])]
    assert confirmed(source) > before


def test_a_position_the_source_has_never_reached_is_refused(source: Database, spark: SparkSession) -> None:
    class Elsewhere(RecordingBatcher):
        def position(self) -> LSN:
            return LSN("FFFF/0")

    syncer = Syncer(settings(source), batcher=Elsewhere(), spark=spark)
    with pytest.raises(SlotError, match="FFFF/0"):
        syncer.start()
    assert not syncer.running


def test_a_position_that_cannot_be_read_is_the_batchers_error(source: Database, spark: SparkSession) -> None:
    broken = Away(failures=99)
    with pytest.raises(BatcherError, match="no such disk"):
        Syncer(settings(source, retries=2), batcher=broken, spark=spark).start()
    assert broken.asked == 3  # once, and two times more


class Away(RecordingBatcher):
    """A target that is not there when dbsync starts."""

    def __init__(self, failures: float, *, retryable: bool = True) -> None:
        super().__init__()
        self.failures = failures
        self.retryable = retryable
        self.asked = 0

    def position(self) -> LSN | None:
        self.asked += 1
        if self.asked <= self.failures:
            raise OSError("no such disk") if self.retryable else BatcherError("No such disk.", retryable=False)
        return None


def test_a_target_that_is_away_at_the_start_is_waited_for(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    target = Away(failures=2)
    syncer = Syncer(settings(source), batcher=target, spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (1, 'a')")
    syncer.drain()
    assert target.asked == 3
    assert target.documents == {"public.t": {"1": {"id": 1, "name": "a"}}}
    told = [record.getMessage() for record in caplog.records if "no such disk" in record.getMessage()]
    assert [words.partition("disk. ")[2] for words in told] == ["Trying again in 0.2 s.", "Trying again in 0.4 s."]


def test_a_target_server_that_is_started_later_gets_everything(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    with new_server() as late:
        late.stop()
        url = f"postgresql://{late.user}:{late.password}@{late.host}:{late.port}/postgres"
        syncer = Syncer(settings(source, to=url, retries=20), spark=spark)
        syncer.setup()
        source.execute("INSERT INTO t VALUES (1, 'a')")
        draining = threading.Thread(target=syncer.drain)
        draining.start()
        until(lambda: caplog.text.count("cannot be reached") >= 2)
        late.start()
        draining.join(60)
        with psycopg.connect(late.dsn()) as target:
            assert target.execute("SELECT id, name FROM public.t").fetchall() == [(1, "a")]
    assert late.password not in caplog.text


def test_what_waiting_cannot_help_is_said_at_once(source: Database, spark: SparkSession) -> None:
    target = Away(failures=1, retryable=False)
    with pytest.raises(BatcherError, match="No such disk"):
        Syncer(settings(source), batcher=target, spark=spark).start()
    assert target.asked == 1


def test_a_stop_ends_the_wait_for_a_target(source: Database, spark: SparkSession) -> None:
    target = Away(failures=99)
    syncer = Syncer(settings(source, retry_seconds=60), batcher=target, spark=spark)
    starting = threading.Thread(target=syncer.start)
    starting.start()
    until(lambda: target.asked == 1)
    began = time.monotonic()
    syncer.stop()
    starting.join(30)
    assert not starting.is_alive()
    assert time.monotonic() - began < 10
    assert not syncer.running
    assert target.asked == 1


def test_a_distributed_batcher_that_fails_is_tried_again(source: Database, spark: SparkSession, tmp_path: Path) -> None:
    target = FailsOnce(tmp_path)
    syncer = Syncer(settings(source), batcher=target, spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (1, 'a')")
    syncer.drain()
    assert (tmp_path / "failed").exists()
    assert target.documents() == {"public.t": {"1": {"id": 1, "name": "a"}}}


class FailsOnce(SqliteBatcher):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "target.db", distributed=True)
        self.failed = folder / "failed"

    def batch_upsert(self, doctype: str, docs: Any) -> None:
        if not self.failed.exists():
            self.failed.touch()
            raise OSError("once")
        super().batch_upsert(doctype, docs)


WORKER = """
    import os, sys
    from pathlib import Path
    sys.path.insert(0, os.environ["TESTS"])
    from recording import SqliteBatcher
    from dbsync import Syncer
    print("ready", flush=True)
    Syncer(batcher=SqliteBatcher(Path(os.environ["TARGET"]))).run()
"""


def test_a_killed_process_goes_on_where_it_was(source: Database, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "target.db"
    Syncer(source.settings(), spark=spark).setup()
    target = SqliteBatcher(path)
    environ = source.environ(
        TESTS=str(Path(__file__).parents[1]),
        TARGET=str(path),
        DBSYNC_BATCH_EVENTS="2000",
        DBSYNC_SPOOL_DIR=str(tmp_path),
    )
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORKER)], env=environ, stdout=subprocess.PIPE)
    try:
        for turn in range(400):
            with source.connect() as connection, connection.transaction():
                connection.execute(
                    "INSERT INTO t SELECT g, 'new' FROM generate_series(%s::int, %s::int) g",
                    [turn * 100, turn * 100 + 99],
                )
                connection.execute("UPDATE t SET name = %s WHERE id %% 37 = %s", [f"turn {turn}", turn % 37])
                connection.execute("DELETE FROM t WHERE id %% 41 = %s AND id < %s", [turn % 41, turn * 50])
            if worker.poll() is None and len(target.calls()) > 3:
                worker.kill()
                worker.wait()
        deadline = time.monotonic() + 90
        while worker.poll() is None and time.monotonic() < deadline:
            if len(target.calls()) > 3:
                worker.kill()
                worker.wait()
            time.sleep(0.02)
    finally:
        worker.kill()
        worker.communicate()
    killed_at = confirmed(source)
    syncer = Syncer(source.settings(spool_dir=tmp_path), batcher=target, spark=spark)
    syncer.drain()
    assert confirmed(source) > killed_at
    held = {id: doc["name"] for id, doc in target.documents()["public.t"].items()}
    assert held == dict(source.rows("SELECT id::text, name FROM t"))
    assert list(tmp_path.glob("run-*")) == []


def test_a_batcher_without_its_methods_is_told_so(source: Database, spark: SparkSession) -> None:
    syncer = Syncer(settings(source, retries=1), batcher=Batcher(), spark=spark)
    syncer.setup()
    source.execute("INSERT INTO t VALUES (1, 'a')")
    with pytest.raises(BatcherError, match="must define batch_upsert"):
        syncer.drain()


def test_what_the_slot_feeds_is_noted_by_who_has_it(source: Database, spark: SparkSession) -> None:
    one, other = (Syncer(source.settings(), batcher=RecordingBatcher(), spark=spark) for _ in range(2))
    one.feeds, other.feeds = "the one", "the other"

    def fed() -> str | None:
        with connect(source.settings()) as conn:
            return Requests(conn, source.settings()).target()

    with one:
        one.drain()
        assert fed() == "the one"
        with other:
            time.sleep(0.5)  # it waits for the slot
            assert fed() == "the one"
            one.stop()
            other.drain()
            assert fed() == "the other"


def test_a_column_list_that_names_no_column_is_told(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    settings = source.settings(exclude_columns=("public.t.no_such", "*.name"))
    with Syncer(settings, batcher=RecordingBatcher(), spark=spark) as syncer:
        syncer.drain()
    told = [record.getMessage() for record in caplog.records if "column lists" in record.getMessage()]
    assert told == ["public.t.no_such is in the column lists, and no published table has a column like that."]


def test_a_spool_that_cannot_be_used_is_said_before_anything_is_made(
    source: Database, spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    syncer = Syncer(source.settings(spool_dir=tmp_path / "file" / "spool"), batcher=RecordingBatcher(), spark=spark)
    with pytest.raises(ConfigError, match=r"cannot be used: .* See that dbsync may write there, or name another"):
        syncer.start()
    assert source.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [source.slot]) == []
