"""Tables without a key: appended, or left out and said so, as DBSYNC_KEYLESS says; they never stop the others."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import LSN, EchoBatcher, MessageHandler, Syncer
from dbsync.errors import ConfigError

TABLES = """
    CREATE TABLE t (id int PRIMARY KEY, v text);
    CREATE TABLE log (n int, v text, big text);
    ALTER TABLE log ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
    CREATE TABLE notes (v text);
    CREATE PUBLICATION dbsync_mypub FOR TABLE t, log, notes
"""
BIG = "repeat('0123456789', 300)"


class Appending(RecordingBatcher):
    appends = True


@pytest.fixture
def source(database: Database) -> Database:
    database.execute(TABLES)
    return database


def target_of(source: Database, spark: SparkSession, *work: str, **changes: Any) -> Appending:
    """What a Batcher that appends holds when the work has come in one batch."""
    target = Appending()
    syncer = Syncer(source.settings(**changes), batcher=target, spark=spark)
    syncer.setup()
    for statement in work:
        source.execute(statement)
    syncer.drain()
    return target


def in_order(target: RecordingBatcher, doctype: str) -> list[tuple[int, dict[str, Any]]]:
    """The documents in the order of the log, each with its number in its transaction."""
    found = [(*id.rsplit("/", 1), doc) for id, doc in target.documents[doctype].items()]
    return [(int(n), doc) for lsn, n, doc in sorted(found, key=lambda one: (LSN(one[0]), int(one[1])))]


def test_each_change_becomes_a_document(source: Database, spark: SparkSession) -> None:
    target = target_of(
        source,
        spark,
        f"INSERT INTO log VALUES (1, 'a', {BIG}), (1, 'a', {BIG}), (2, NULL, '')",
        """BEGIN; INSERT INTO t VALUES (1, 'a'); UPDATE log SET v = 'b' WHERE n = 1; INSERT INTO notes VALUES ('x');
           UPDATE t SET v = 'b'; DELETE FROM log WHERE n = 2; UPDATE t SET id = 2; COMMIT""",
    )
    one, two, big = {"n": 1, "v": "a"}, {"n": 2, "v": None, "big": ""}, {"big": "0123456789" * 300}
    assert in_order(target, "public.log") == [
        (1, {**one, **big, "_op": "insert"}),
        (2, {**one, **big, "_op": "insert"}),
        (3, {**two, "_op": "insert"}),
        (1, {**one, **big, "v": "b", "_op": "update"}),
        (2, {**one, **big, "v": "b", "_op": "update"}),
        (4, {**two, "_op": "delete"}),
    ]
    assert in_order(target, "public.notes") == [(3, {"v": "x", "_op": "insert"})]
    assert target.documents["public.t"] == {"2": {"id": 2, "v": "b"}}
    assert len(target.batches) == 1
    assert target.batches[0].relations["public.log"].column_names == ("n", "v", "big")


def test_an_id_does_not_depend_on_the_batch(source: Database, spark: SparkSession) -> None:
    def settings(name: str, **changes: Any) -> Any:
        return source.settings(slot=f"{source.slot}_{name}", **changes)

    targets = {"large": Appending(), "small": Appending()}
    large = Syncer(settings("large"), batcher=targets["large"], spark=spark)
    small = Syncer(settings("small", batch_events=1), batcher=targets["small"], spark=spark)
    large.setup()
    small.setup()
    source.execute("INSERT INTO log VALUES (1, 'a', ''), (2, 'b', '')")
    source.execute(
        "BEGIN; INSERT INTO notes VALUES ('x'); INSERT INTO t VALUES (1, 'a'); ALTER TABLE t ADD w int;"
        "INSERT INTO log VALUES (3, 'c', ''); UPDATE t SET w = 1; INSERT INTO notes VALUES ('y'); COMMIT"
    )
    source.execute("UPDATE log SET v = 'z'")
    large.drain()
    small.drain()
    assert len(targets["small"].batches) > len(targets["large"].batches) > 1
    assert targets["small"].documents == targets["large"].documents
    assert len(targets["small"].documents["public.log"]) == 6


def test_a_table_without_any_column_has_changes_too(source: Database, spark: SparkSession) -> None:
    source.execute("CREATE TABLE nothing (); ALTER PUBLICATION dbsync_mypub ADD TABLE nothing")
    target = target_of(source, spark, "INSERT INTO nothing DEFAULT VALUES", "INSERT INTO nothing DEFAULT VALUES")
    assert list(target.documents["public.nothing"].values()) == [{"_op": "insert"}] * 2


def test_truncate_is_handed_over(source: Database, spark: SparkSession) -> None:
    target = target_of(
        source,
        spark,
        "INSERT INTO log VALUES (1, 'a', '')",
        """BEGIN; INSERT INTO t VALUES (1, 'a'), (2, 'a'); INSERT INTO log VALUES (2, 'b', ''); TRUNCATE log, t;
           INSERT INTO log VALUES (3, 'c', ''); INSERT INTO t VALUES (3, 'c'); COMMIT""",
    )
    assert ("truncate", "public.log", None) in target.calls
    assert in_order(target, "public.log") == [(2, {"n": 3, "v": "c", "big": "", "_op": "insert"})]
    assert target.documents["public.t"] == {"3": {"id": 3, "v": "c"}}


def test_a_table_that_gets_a_key_is_mirrored_from_there_on(source: Database, spark: SparkSession) -> None:
    target = target_of(
        source,
        spark,
        "INSERT INTO notes VALUES ('a')",
        "ALTER TABLE notes ADD PRIMARY KEY (v)",
        "INSERT INTO notes VALUES ('b')",
    )
    documents = target.documents["public.notes"]
    assert documents.pop("b") == {"v": "b"}
    assert list(documents.values()) == [{"v": "a", "_op": "insert"}]


@pytest.mark.parametrize(
    ("keyless", "level"), [(None, logging.ERROR), ("error", logging.ERROR), ("skip", logging.WARNING)]
)
def test_left_out_it_is_said_once_and_stops_nothing(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture, keyless: str | None, level: int
) -> None:
    target = Appending()
    target.appends = keyless is not None
    with Syncer(source.settings(keyless=keyless), batcher=target, spark=spark) as syncer:
        for n in range(2):
            source.execute(f"INSERT INTO log VALUES ({n}, 'a', ''); TRUNCATE log; INSERT INTO t VALUES ({n}, 'a')")
            syncer.drain()
            source.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [source.slot]
            )
    assert target.documents == {"public.t": {"0": {"id": 0, "v": "a"}, "1": {"id": 1, "v": "a"}}}
    (said,) = (record for record in caplog.records if "public.log" in record.getMessage())
    assert said.levelno == level
    assert "public.notes" not in caplog.text
    if level == logging.ERROR:
        assert all(way in said.getMessage() for way in ("primary key", "USING INDEX", "DBSYNC_KEYLESS=append", "skip"))


def test_appending_is_refused_at_the_start_where_the_batcher_cannot(source: Database) -> None:
    with pytest.raises(ConfigError, match="DBSYNC_KEYLESS=append cannot be used with RecordingBatcher") as refused:
        Syncer(source.settings(keyless="append"), batcher=RecordingBatcher()).start()
    assert "appends" in str(refused.value.hint)
    assert source.rows("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [source.slot]) == []


def test_a_handler_of_the_users_own_sees_them_whatever_the_setting(source: Database, spark: SparkSession) -> None:
    class Heard(MessageHandler):
        def handle_insert(self, msg: Any, relation: Any) -> None:
            self.syncer.mark_updated("heard", msg.new["v"], {"id": msg.id})

    target = RecordingBatcher()
    settings = source.settings(keyless="append")
    with Syncer(settings, handler=Heard(), batcher=target, spark=spark) as syncer:
        source.execute("INSERT INTO notes VALUES ('x')")
        syncer.drain()
    assert target.documents == {"heard": {"x": {"id": None}}}


def test_they_are_echoed_without_being_asked_for(source: Database, spark: SparkSession) -> None:
    out = io.StringIO()
    syncer = Syncer(source.settings(), batcher=EchoBatcher(out), spark=spark)
    syncer.setup()
    source.execute("INSERT INTO notes VALUES ('x')")
    syncer.drain()
    line = json.loads(out.getvalue())
    assert (line["type"], line["doc"]) == ("public.notes", {"v": "x", "_op": "insert"})
