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
from dbsync.errors import ConfigError, RefreshError

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


class Hearing(MessageHandler):
    """Writes down the ids, and what is new and old."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.heard.append((relation.name, "insert", msg.id, dict(msg.new)))

    def handle_update(self, msg: Any, relation: Any) -> None:
        self.heard.append((relation.name, "update", msg.id, msg.old_id, dict(msg.new), msg.old, msg.missing))

    def handle_delete(self, msg: Any, relation: Any) -> None:
        self.heard.append((relation.name, "delete", msg.id, msg.old))

    def handle_truncate(self, msg: Any, relations: Any) -> None:
        self.heard.append(("truncate", *(relation.name for relation in relations)))


def heard(source: Database, spark: SparkSession, *work: str) -> list[Any]:
    handler = Hearing()
    syncer = Syncer(source.settings(keyless="append"), handler=handler, batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    for statement in work:
        source.execute(statement)
    syncer.drain()
    return handler.heard


def test_a_handler_of_the_users_own_sees_them_whatever_the_setting(source: Database, spark: SparkSession) -> None:
    row = {"n": 1, "v": "a", "big": "0123456789" * 300}
    assert heard(
        source,
        spark,
        f"INSERT INTO notes VALUES ('x'); INSERT INTO log VALUES (1, 'a', {BIG})",
        "UPDATE log SET v = 'b'; DELETE FROM log; TRUNCATE log, notes",
    ) == [
        ("notes", "insert", None, {"v": "x"}),
        ("log", "insert", None, row),
        ("log", "update", None, None, {**row, "v": "b"}, row, frozenset()),
        ("log", "delete", None, {**row, "v": "b"}),
        ("truncate", "log", "notes"),
    ]


LATE_KEY = (
    "INSERT INTO late VALUES (NULL, 1, 'a'), (2, 1, 'b'), (3, 1, 'c'); INSERT INTO t VALUES (1, 'a')",
    "UPDATE late SET id = 1 WHERE id IS NULL; UPDATE late SET id = NULL WHERE id = 3",
    "DELETE FROM late WHERE id IS NULL",
    "ALTER TABLE late ADD PRIMARY KEY (id, part)",
    "INSERT INTO late VALUES (4, 1, 'd'); INSERT INTO t VALUES (2, 'b')",
)


@pytest.fixture
def late(source: Database) -> Database:
    """A table with whole old rows, which gets its key after changes that have a NULL in it."""
    source.execute("CREATE TABLE late (id int, part int, v text); ALTER TABLE late REPLICA IDENTITY FULL")
    source.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE late")
    return source


def test_changes_from_before_a_table_had_its_key_stop_nothing(
    late: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    target = RecordingBatcher()
    syncer = Syncer(late.settings(), batcher=target, spark=spark)
    syncer.setup()
    for statement in LATE_KEY:
        late.execute(statement)
    syncer.drain()
    assert {id: doc["v"] for id, doc in target.documents["public.late"].items()} == {
        '["1", "1"]': "a",
        '["2", "1"]': "b",
        '["4", "1"]': "d",
    }
    assert set(target.documents["public.t"]) == {"1", "2"}
    (said,) = (record for record in caplog.records if "public.late" in record.getMessage())
    assert "do not tell their key" in said.getMessage()


def test_changes_from_before_a_table_had_its_key_are_appended_where_others_are(
    late: Database, spark: SparkSession
) -> None:
    target = target_of(late, spark, *LATE_KEY)
    appended = [doc for doc in target.documents["public.late"].values() if "_op" in doc]
    assert [(doc["_op"], doc["id"], doc["v"]) for doc in appended] == [
        ("insert", None, "a"),
        ("update", None, "c"),
        ("delete", None, "c"),
    ]


def test_a_handler_hears_of_changes_from_before_a_table_had_its_key(late: Database, spark: SparkSession) -> None:
    ids = [found[:3] for found in heard(late, spark, *LATE_KEY) if found[0] == "late"]
    assert ids == [
        ("late", "insert", None),
        ("late", "insert", '["2", "1"]'),
        ("late", "insert", '["3", "1"]'),
        ("late", "update", '["1", "1"]'),
        ("late", "update", None),
        ("late", "delete", None),
        ("late", "insert", '["4", "1"]'),
    ]


def test_a_key_that_rows_may_share_or_that_is_not_published_whole_is_none(
    source: Database, spark: SparkSession
) -> None:
    """Otherwise rows would become one document, and a change of keys in one statement would lose some of them."""
    source.execute(
        """CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, v text);
        ALTER TABLE deferred REPLICA IDENTITY FULL;
        CREATE TABLE made (a int, b int, g int GENERATED ALWAYS AS (b + 1) STORED, PRIMARY KEY (a, g));
        ALTER PUBLICATION dbsync_mypub ADD TABLE deferred, made"""
    )
    tables = ["deferred", "made"]
    if source.server.version >= 15:
        tables.append("cut")
        source.execute("CREATE TABLE cut (a int, b int, v text, PRIMARY KEY (a, b))")
        source.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE cut (a, v)")
    target = target_of(
        source,
        spark,
        "INSERT INTO deferred VALUES (1, 'a'), (2, 'b'), (3, 'c'); INSERT INTO t VALUES (1, 'a')",
        "UPDATE deferred SET id = id + 1",
        "INSERT INTO made VALUES (1, 1), (1, 2)",
        *(["INSERT INTO cut VALUES (1, 1, 'a'), (1, 2, 'b')"] if "cut" in tables else []),
    )
    assert [doc["id"] for _, doc in in_order(target, "public.deferred")] == [1, 2, 3, 2, 3, 4]
    assert target.documents["public.t"] == {"1": {"id": 1, "v": "a"}}
    for table in tables:
        assert len(target.documents[f"public.{table}"]) == (6 if table == "deferred" else 2)
        with pytest.raises(RefreshError, match=f'"public"."{table}" has no key that is published'):
            Syncer(source.settings(), spark=spark).refresh(f"SELECT * FROM {table}")


def test_a_table_that_is_gone_keeps_its_key(source: Database, spark: SparkSession) -> None:
    """Whole old rows do not say what the key is; the table that has the name by now does."""
    source.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    target = target_of(source, spark, "INSERT INTO t VALUES (1, 'a'), (2, 'a')")
    assert set(target.documents["public.t"]) == {"1", "2"}
    source.execute("DELETE FROM t; DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, w int)")
    source.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE t; INSERT INTO t VALUES (3, 3)")
    syncer = Syncer(source.settings(), batcher=target, spark=spark)
    syncer.drain()
    assert target.documents["public.t"] == {"3": {"id": 3, "w": 3}}


def test_another_key_is_said_in_the_log(
    source: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "another key" in record.getMessage()]

    source.execute("CREATE TABLE other (id int PRIMARY KEY, code text NOT NULL)")
    source.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE other")
    syncer = Syncer(source.settings(), batcher=RecordingBatcher(), spark=spark)
    syncer.setup()
    source.execute("INSERT INTO other VALUES (1, 'a'); ALTER TABLE other RENAME id TO nr; UPDATE other SET code = 'b'")
    source.execute("ALTER TABLE other ADD more int; UPDATE other SET more = 1")
    syncer.drain()
    assert said() == []
    source.execute("UPDATE other SET more = 2; ALTER TABLE other DROP CONSTRAINT other_pkey, ADD PRIMARY KEY (code)")
    source.execute("UPDATE other SET more = 3")
    syncer.drain()
    (words,) = said()
    assert words.startswith("public.other has another key now, (code) and not (nr)")
    assert "refresh the table" in words


def test_they_are_echoed_without_being_asked_for(source: Database, spark: SparkSession) -> None:
    out = io.StringIO()
    syncer = Syncer(source.settings(), batcher=EchoBatcher(out), spark=spark)
    syncer.setup()
    source.execute("INSERT INTO notes VALUES ('x')")
    syncer.drain()
    line = json.loads(out.getvalue())
    assert (line["type"], line["doc"]) == ("public.notes", {"v": "x", "_op": "insert"})
