"""Transactions that PostgreSQL sends while in progress arrive whole, at their commit and in its order, or never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import VERSION, Database, fresh_database, new_server
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import LSN, MessageHandler, Syncer
from dbsync.embedded import EmbeddedPostgres

TABLES = """
    CREATE TABLE t (id int PRIMARY KEY, name text);
    CREATE TABLE u (id int PRIMARY KEY, name text);
    CREATE PUBLICATION dbsync_mypub FOR TABLE t, u
"""

# Before 16 a transaction is streamed when it outgrows its memory. Rows of a table that nobody publishes count too.
AT_ONCE = {"debug_logical_replication_streaming": "immediate"}
WHEN_LARGE = {"logical_decoding_work_mem": "64kB"}
FLOOD = """
    CREATE TABLE flood (n int, filler text);
    CREATE FUNCTION flood() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO flood SELECT g, pg_catalog.repeat('x', 400) FROM pg_catalog.generate_series(1, 400) AS g;
        RETURN NULL;
    END $$;
    CREATE TRIGGER flood AFTER INSERT ON t EXECUTE FUNCTION flood();
    CREATE TRIGGER flood AFTER INSERT ON u EXECUTE FUNCTION flood();
"""


@pytest.fixture(scope="module")
def streaming_server() -> Iterator[EmbeddedPostgres]:
    """A server that streams every transaction, from its first change on where PostgreSQL can be told to."""
    with new_server(**(AT_ONCE if VERSION >= 16 else WHEN_LARGE)) as server:
        yield server


@pytest.fixture
def source(streaming_server: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(streaming_server) as database:
        database.execute(TABLES)
        if VERSION < 16:
            database.execute(FLOOD)
        yield database


class Listening(MessageHandler):
    """Writes down what it hears, and mirrors it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def handle_begin(self, msg: Any) -> None:
        self.heard.append("begin")

    def handle_commit(self, msg: Any) -> None:
        self.heard.append("commit")

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.heard.append((relation.name, *msg.new.values()))

    def handle_truncate(self, msg: Any, relations: Any) -> None:
        self.heard.append(("truncate", *(relation.name for relation in relations)))


class ListeningToOrigins(Listening):
    def handle_begin(self, msg: Any) -> None:
        self.heard.append(("begin", msg.origin))

    def handle_commit(self, msg: Any) -> None:
        self.heard.append(("commit", msg.origin))


class ListeningToMessages(Listening):
    def handle_message(self, msg: Any) -> None:
        self.heard.append((msg.content.decode(), msg.transactional))


def open_transaction(source: Database) -> psycopg.Connection[Any]:
    return source.connect(autocommit=False)


def streamed(source: Database) -> int:
    found = "SELECT stream_txns FROM pg_catalog.pg_stat_replication_slots WHERE slot_name = %s"
    return int(source.rows(found, [source.slot])[0][0])


def heard(
    source: Database, spark: SparkSession, work: Any, *, messages: bool = False, handler: Listening | None = None
) -> list[Any]:
    """What a handler hears of the work. Only without messages does PostgreSQL send it while it is in progress."""
    handler = handler or (ListeningToMessages() if messages else Listening())
    syncer = Syncer(source.settings(), handler=handler, batcher=RecordingBatcher(), spark=spark)
    with syncer:
        work()
        syncer.drain()
    assert (streamed(source) > 0) is not messages
    return handler.heard


def test_transactions_come_in_the_order_of_their_commits(source: Database, spark: SparkSession) -> None:
    def work() -> None:
        with open_transaction(source) as one, open_transaction(source) as two:
            one.execute("INSERT INTO t VALUES (1, 'one')")
            two.execute("INSERT INTO t VALUES (2, 'two')")
            one.execute("INSERT INTO u VALUES (1, 'one')")
            two.commit()
            one.commit()

    assert heard(source, spark, work) == [
        *("begin", ("t", 2, "two"), "commit"),
        *("begin", ("t", 1, "one"), ("u", 1, "one"), "commit"),
    ]


def test_what_is_rolled_back_is_never_heard_of(source: Database, spark: SparkSession) -> None:
    def work() -> None:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'gone')")
            one.rollback()
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'kept')")
            one.execute("SAVEPOINT a")
            one.execute("INSERT INTO u VALUES (1, 'gone')")
            one.execute("SAVEPOINT b")
            one.execute("INSERT INTO u VALUES (2, 'gone')")
            one.execute("RELEASE b")
            one.execute("ROLLBACK TO a")
            one.execute("INSERT INTO u VALUES (3, 'kept')")

    assert heard(source, spark, work) == ["begin", ("t", 1, "kept"), ("u", 3, "kept"), "commit"]


@pytest.mark.parametrize("messages", [True, False])
def test_messages_truncates_and_prepared_transactions(source: Database, spark: SparkSession, messages: bool) -> None:
    def work() -> None:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'a')")
            one.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'mine', 'inside')")
            one.execute("SELECT pg_catalog.pg_logical_emit_message(false, 'mine', 'outside')")
            one.execute("TRUNCATE t, u")
        with source.connect() as two:
            for end in ("ROLLBACK PREPARED 'p'", "COMMIT PREPARED 'p'"):
                two.execute(f"BEGIN; INSERT INTO u VALUES (1, '{end[:6]}'); SAVEPOINT s")
                two.execute("INSERT INTO u SELECT g, 'gone' FROM generate_series(2, 9) AS g; ROLLBACK TO s")
                two.execute("PREPARE TRANSACTION 'p'")
                two.execute(end)

    outside, inside = ([("outside", False)], [("inside", True)]) if messages else ([], [])
    assert heard(source, spark, work, messages=messages) == [
        *outside,
        *("begin", ("t", 1, "a"), *inside, ("truncate", "t", "u"), "commit"),
        *("begin", ("u", 1, "COMMIT"), "commit"),
    ]


def test_a_message_outside_a_transaction_is_heard_though_that_is_rolled_back(
    source: Database, spark: SparkSession
) -> None:
    """And with whatever prefix: dbsync's own messages have one that nobody else uses."""

    def work() -> None:
        with open_transaction(source) as one:
            one.execute("SELECT pg_catalog.pg_logical_emit_message(false, 'mine', 'outside')")
            one.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'mine', 'gone')")
            one.rollback()
        source.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'dbsync', 'inside')")

    assert heard(source, spark, work, messages=True) == [("outside", False), "begin", ("inside", True), "commit"]


def test_a_message_rolled_back_with_its_savepoint_is_never_heard(source: Database, spark: SparkSession) -> None:
    def work() -> None:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'kept')")
            one.execute("SAVEPOINT a")
            one.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'mine', 'gone')")
            one.execute("ROLLBACK TO a")
            one.execute("INSERT INTO t VALUES (2, 'kept')")

    assert heard(source, spark, work, messages=True) == ["begin", ("t", 1, "kept"), ("t", 2, "kept"), "commit"]


def test_a_message_the_target_already_knows_of_is_passed_over(source: Database, spark: SparkSession) -> None:
    class Ahead(RecordingBatcher):
        def position(self) -> LSN | None:
            return held

    handler, target = ListeningToMessages(), Ahead()
    syncer = Syncer(source.settings(), handler=handler, batcher=target, spark=spark)
    syncer.setup()
    emit = "SELECT pg_catalog.pg_logical_emit_message(false, 'mine', %s)"
    source.execute(emit, ["known"])
    source.execute("INSERT INTO t VALUES (1, 'known')")
    held = LSN(str(source.rows("SELECT pg_catalog.pg_current_wal_insert_lsn()")[0][0]))
    source.execute(emit, ["new"])
    syncer.drain()
    assert handler.heard == [("new", False)]


@pytest.mark.parametrize("in_progress", [True, False])
def test_an_origin_is_told(source: Database, spark: SparkSession, in_progress: bool) -> None:
    class Whole(ListeningToOrigins, ListeningToMessages):
        """Which asks for messages, so that transactions come whole."""

    name = source.name

    def work() -> None:
        with source.connect() as one:
            one.execute("SELECT pg_catalog.pg_replication_origin_create(%s)", [name])
            one.execute("SELECT pg_catalog.pg_replication_origin_session_setup(%s)", [name])
            one.execute("INSERT INTO t VALUES (1, 'from elsewhere')")
            one.execute("SELECT pg_catalog.pg_replication_origin_session_reset()")
            one.execute("SELECT pg_catalog.pg_replication_origin_drop(%s)", [name])
            one.execute("INSERT INTO t VALUES (2, 'from here')")

    handler = ListeningToOrigins() if in_progress else Whole()
    assert heard(source, spark, work, messages=not in_progress, handler=handler) == [
        *(("begin", name), ("t", 1, "from elsewhere"), ("commit", name)),
        *(("begin", None), ("t", 2, "from here"), ("commit", None)),
    ]


def test_a_mirror_follows_a_table_that_changes_inside_a_transaction(source: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(source.settings(), batcher=target, spark=spark) as syncer:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'a')")
            source.execute("INSERT INTO u VALUES (1, 'between')")
            one.execute("ALTER TABLE t ADD COLUMN more int")
            one.execute("INSERT INTO t VALUES (2, 'b', 3)")
        source.execute("INSERT INTO t VALUES (4, 'd', 5)")
        syncer.drain()
    assert streamed(source) > 0
    assert target.documents["public.t"] == {
        "1": {"id": 1, "name": "a"},
        "2": {"id": 2, "name": "b", "more": 3},
        "4": {"id": 4, "name": "d", "more": 5},
    }
    assert target.documents["public.u"] == {"1": {"id": 1, "name": "between"}}


def test_a_refresh_works_where_its_marks_are_streamed(source: Database, spark: SparkSession) -> None:
    source.execute("INSERT INTO t SELECT g, 'old' FROM generate_series(1, 50) g")
    target = RecordingBatcher()
    with Syncer(source.settings(), batcher=target, spark=spark) as syncer:
        source.execute("UPDATE t SET name = 'new' WHERE id = 7")
        syncer.refresh("SELECT * FROM t", chunk_rows=20)
        syncer.drain()
    rows = dict(source.rows("SELECT id::text, name FROM t"))
    assert {id: doc["name"] for id, doc in target.documents["public.t"].items()} == rows


def test_columns_published_anew_count_for_what_follows(source: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(source.settings(), batcher=target, spark=spark) as syncer:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'a')")
            source.execute("ALTER PUBLICATION dbsync_mypub SET TABLE t (id), u")
            source.execute("INSERT INTO t VALUES (2, 'b')")
        source.execute("INSERT INTO t VALUES (3, 'c')")
        syncer.drain()
    assert target.documents["public.t"]["2"] == target.documents["public.t"]["3"] | {"id": 2} == {"id": 2}
    assert target.documents["public.t"]["1"]["id"] == 1


def test_a_table_altered_in_a_savepoint_that_is_rolled_back(source: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(source.settings(), batcher=target, spark=spark) as syncer:
        with open_transaction(source) as one:
            one.execute("INSERT INTO t VALUES (1, 'a')")
            one.execute("SAVEPOINT s")
            one.execute("ALTER TABLE t ADD COLUMN more int, DROP COLUMN name")
            one.execute("INSERT INTO t VALUES (2, 3)")
            one.execute("ROLLBACK TO s")
            one.execute("INSERT INTO t VALUES (2, 'b')")
            one.execute("SAVEPOINT s2")
            one.execute("ALTER TABLE t ADD COLUMN extra int")
            one.execute("INSERT INTO t VALUES (3, 'c', 5)")
            one.execute("RELEASE s2")
        source.execute("UPDATE t SET extra = 7 WHERE id = 1")
        syncer.drain()
    assert streamed(source) > 0
    assert target.documents["public.t"] == {
        "1": {"id": 1, "name": "a", "extra": 7},
        "2": {"id": 2, "name": "b"},
        "3": {"id": 3, "name": "c", "extra": 5},
    }


def test_what_was_prepared_before_a_stop_comes_with_its_commit(
    source: Database, streaming_server: EmbeddedPostgres, spark: SparkSession
) -> None:
    """A stop of dbsync, and a restart of PostgreSQL."""
    target = RecordingBatcher()
    syncer = Syncer(source.settings(), batcher=target, spark=spark)
    syncer.setup()
    source.execute("BEGIN; INSERT INTO t VALUES (1, 'prepared'); PREPARE TRANSACTION 'stays'")
    source.execute("INSERT INTO t VALUES (2, 'at once')")
    syncer.drain()
    assert set(target.documents["public.t"]) == {"2"}
    streaming_server.restart("immediate")
    source.execute("COMMIT PREPARED 'stays'")
    syncer.drain()
    assert set(target.documents["public.t"]) == {"1", "2"}


def test_changes_of_a_table_without_a_key_are_counted_without_what_was_rolled_back(
    source: Database, spark: SparkSession
) -> None:
    class Appending(RecordingBatcher):
        appends = True

    source.execute("CREATE TABLE log (v text); ALTER PUBLICATION dbsync_mypub ADD TABLE log")
    target = Appending()
    with Syncer(source.settings(), batcher=target, spark=spark) as syncer:
        with open_transaction(source) as one:
            one.execute("INSERT INTO log VALUES ('a'); INSERT INTO t VALUES (1, 'a'); SAVEPOINT s")
            one.execute("INSERT INTO log VALUES ('gone'); INSERT INTO t VALUES (2, 'gone'); ROLLBACK TO s")
            one.execute("INSERT INTO log VALUES ('b')")
        syncer.drain()
    assert streamed(source) > 0
    found = {id.rsplit("/", 1)[1]: doc["v"] for id, doc in target.documents["public.log"].items()}
    assert found == {"1": "a", "2": "b"}


def test_a_database_in_another_encoding(streaming_server: EmbeddedPostgres, spark: SparkSession) -> None:
    with fresh_database(streaming_server, encoding="LATIN1") as source:
        source.execute(TABLES)
        target, reread = RecordingBatcher(), RecordingBatcher()
        syncer = Syncer(source.settings(), batcher=target, spark=spark)
        syncer.setup()
        source.execute("INSERT INTO t VALUES (1, 'größer')")
        syncer.drain()
        syncer.batcher = reread
        syncer.refresh("SELECT * FROM t WHERE name = 'größer'")
    assert target.documents == reread.documents == {"public.t": {"1": {"id": 1, "name": "größer"}}}
