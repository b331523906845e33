"""The whole way, from a statement in PostgreSQL to a call of the Batcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import LSN, EchoBatcher, MessageHandler, MirrorHandler, Syncer
from dbsync.errors import DbsyncError

QUOTED = '"My Schema"."per%cent ""Größe"""'
QUOTED_TYPE = 'My Schema.per%cent "Größe"'
BIG = "repeat('0123456789', 300)"  # far more than a page keeps in place


@contextmanager
def running(
    database: Database,
    spark: SparkSession,
    *,
    handler: MessageHandler | None = None,
    partial: bool = False,
    **changes: Any,
) -> Iterator[tuple[Syncer, RecordingBatcher]]:
    target = RecordingBatcher(accepts_partial=partial)
    with Syncer(database.settings(**changes), handler=handler, batcher=target, spark=spark) as syncer:
        yield syncer, target


@contextmanager
def one_batch(syncer: Syncer, target: RecordingBatcher) -> Iterator[None]:
    """What is written inside comes in one batch."""
    syncer.drain()
    target.clear()
    before = len(target.batches)
    syncer.pause()
    time.sleep(0.2)  # what is being read now is still read
    yield
    syncer.resume()
    syncer.drain()
    assert len(target.batches) == before + 1, target.calls


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def confirmed(database: Database) -> LSN:
    slots = "SELECT confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    return LSN(database.rows(slots, [database.slot])[0][0])


class Products(MessageHandler):
    """The handler of the example everybody knows."""

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.syncer.mark_updated("product", msg.key["sku"], dict(msg.new))

    def handle_update(self, msg: Any, relation: Any) -> None:
        self.handle_insert(msg, relation)

    def handle_delete(self, msg: Any, relation: Any) -> None:
        self.syncer.mark_deleted("product", msg.key["sku"])


def test_the_example_everybody_knows(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE products (sku text PRIMARY KEY, price numeric)")
    database.execute("INSERT INTO products VALUES ('K1', 1), ('K2', 2)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE products")
    with running(database, spark, handler=Products()) as (syncer, target):
        with one_batch(syncer, target):
            for statement in (
                "UPDATE products SET price = 10 WHERE sku = 'K1'",
                "DELETE FROM products WHERE sku = 'K1'",
                "INSERT INTO products VALUES ('K1', 11)",
                "UPDATE products SET price = 20 WHERE sku = 'K2'",
                "UPDATE products SET price = 21 WHERE sku = 'K2'",
                "UPDATE products SET price = 22 WHERE sku = 'K2'",
                "INSERT INTO products VALUES ('K3', 3)",
                "DELETE FROM products WHERE sku = 'K2'",
                "INSERT INTO products VALUES ('K2', 23)",
                "DELETE FROM products WHERE sku = 'K1'",
            ):
                database.execute(statement)
        k2, k3 = {"sku": "K2", "price": Decimal(23)}, {"sku": "K3", "price": Decimal(3)}
        assert target.calls == [("delete", "product", ["K1"]), ("upsert", "product", {"K2": k2, "K3": k3})]


class Listening(MessageHandler):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def handle_begin(self, msg: Any) -> None:
        self.heard.append(("begin", msg))

    def handle_commit(self, msg: Any) -> None:
        self.heard.append(("commit", msg))

    def handle_relation(self, relation: Any) -> None:
        self.heard.append(("relation", relation))

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.heard.append(("insert", msg, relation))

    def handle_update(self, msg: Any, relation: Any) -> None:
        self.heard.append(("update", msg, relation))

    def handle_delete(self, msg: Any, relation: Any) -> None:
        self.heard.append(("delete", msg, relation))

    def handle_truncate(self, msg: Any, relations: Any) -> None:
        self.heard.append(("truncate", msg, relations))

    def handle_message(self, msg: Any) -> None:
        self.heard.append(("message", msg))

    def of(self, kind: str) -> list[Any]:
        return [heard[1] for heard in self.heard if heard[0] == kind]


def test_a_handler_sees_everything_in_order_and_typed(database: Database, spark: SparkSession) -> None:
    database.execute(
        """CREATE TYPE mood AS ENUM ('sad', 'ok');
        CREATE TABLE t (id bigint PRIMARY KEY, f float8, n numeric, b bool, x bytea, d date, at timestamptz,
                        took interval, u uuid, j jsonb, tags text[], feeling mood, big text STORAGE EXTERNAL);
        CREATE TABLE whole (id int PRIMARY KEY, name text);
        ALTER TABLE whole REPLICA IDENTITY FULL;
        CREATE PUBLICATION dbsync_mypub FOR TABLE t, whole"""
    )
    handler = Listening()
    with running(database, spark, handler=handler) as (syncer, target):
        with database.connect() as connection, connection.transaction():
            connection.execute(
                f"""INSERT INTO t VALUES (1, 'NaN', 1.50, true, '\\x00ff', '2024-02-29', '2024-01-02 03:04:05.6+02',
                    '1 day 00:00:01', '00000000-0000-0000-0000-000000000001', '{{"a": [1, null]}}', '{{a,NULL,"b c"}}',
                    'ok', {BIG})"""
            )
            connection.execute("UPDATE t SET id = 2, n = NULL WHERE id = 1")
            connection.execute("DELETE FROM t WHERE id = 2")
            connection.execute("INSERT INTO whole VALUES (1, 'a')")
            connection.execute("UPDATE whole SET name = 'b'")
            connection.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'mine', 'inside')")
            connection.execute("TRUNCATE whole")
            (xid,) = connection.execute("SELECT pg_catalog.pg_current_xact_id()::text::bigint").fetchone() or (0,)
        database.execute("SELECT pg_catalog.pg_logical_emit_message(false, 'mine', '\\x00'::bytea)")
        syncer.drain()
    kinds = [heard[0] for heard in handler.heard if heard[0] != "relation"]
    assert kinds[: kinds.index("commit") + 1] == [
        *("begin", "insert", "update", "delete", "insert", "update", "message", "truncate", "commit")
    ]
    insert, _ = handler.of("insert")
    doc = dict(insert.new)
    assert doc.pop("f") != doc.get("f")
    assert len(doc.pop("big")) == 3000
    assert doc == {
        "id": 1,
        "n": Decimal("1.50"),
        "b": True,
        "x": b"\0\xff",
        "d": date(2024, 2, 29),
        "feeling": "ok",
        "at": datetime(2024, 1, 2, 1, 4, 5, 600000, UTC),
        "took": timedelta(days=1, seconds=1),
        "u": UUID(int=1),
        "j": {"a": [1, None]},
        "tags": ["a", None, "b c"],
    }
    assert (insert.old, insert.key, insert.missing) == ({}, {"id": 1}, frozenset())
    moved, whole = handler.of("update")
    assert (moved.key, moved.old, moved.missing) == ({"id": 2}, {"id": 1}, {"big"})
    assert "big" not in moved.new
    assert moved.new["n"] is None
    assert (whole.old, dict(whole.new)) == ({"id": 1, "name": "a"}, {"id": 1, "name": "b"})
    (delete,) = handler.of("delete")
    assert (delete.key, delete.old, delete.new) == ({"id": 2}, {"id": 2}, {})
    begin, commit = handler.of("begin")[0], handler.of("commit")[0]
    for msg in (insert, moved, delete, begin, commit, handler.of("truncate")[0]):
        assert (msg.commit_lsn, msg.xid, msg.commit_time) == (begin.commit_lsn, xid & 0xFFFFFFFF, begin.commit_time)
        assert isinstance(msg.lsn, LSN)
    assert insert.lsn < moved.lsn < delete.lsn < commit.commit_lsn
    assert abs(datetime.now(UTC) - commit.commit_time) < timedelta(minutes=5)
    inside, outside = handler.of("message")
    assert (inside.prefix, inside.content, inside.transactional, inside.xid) == ("mine", b"inside", True, begin.xid)
    assert (outside.content, outside.transactional, outside.xid, outside.commit_time) == (b"\0", False, None, None)
    assert target.calls == []


def test_a_mark_made_for_a_message_outside_any_transaction_is_handed_over(
    database: Database, spark: SparkSession
) -> None:
    class Noting(MessageHandler):
        def handle_message(self, msg: Any) -> None:
            self.syncer.mark_updated("note", msg.prefix, {"text": msg.content.decode()})

        def handle_insert(self, msg: Any, relation: Any) -> None:
            self.syncer.mark_updated("t", msg.id, msg.new)

    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    with running(database, spark, handler=Noting()) as (syncer, target):
        database.execute("SELECT pg_catalog.pg_logical_emit_message(false, 'a', 'hello')")
        database.execute("INSERT INTO t VALUES (1)")
        until(lambda: "t" in target.documents, 30)
        syncer.drain()
        assert target.documents == {"note": {"a": {"text": "hello"}}, "t": {"1": {"id": 1}}}


MIRRORED = f"""
    CREATE TABLE t (id int PRIMARY KEY, name text, big text STORAGE EXTERNAL);
    CREATE TABLE pair (a int, b text, v numeric, big text STORAGE EXTERNAL, PRIMARY KEY (a, b));
    CREATE TABLE whole (id int PRIMARY KEY, name text, big text STORAGE EXTERNAL);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE keyless (id int, name text);
    CREATE SCHEMA "My Schema";
    CREATE TABLE {QUOTED} ("Schlüssel %s" text PRIMARY KEY, n int, "big %b" text STORAGE EXTERNAL);
    CREATE TABLE flags (flag bool, code char(5), net inet, n int, big text STORAGE EXTERNAL,
                        PRIMARY KEY (flag, code, net));
    CREATE TABLE unpublished (id int);
    CREATE PUBLICATION dbsync_mypub
        FOR TABLE t, pair, whole, keyless, {QUOTED}, flags WITH (publish_via_partition_root);
    INSERT INTO t VALUES (100, 'old', {BIG}), (101, 'old', {BIG});
    INSERT INTO pair VALUES (100, 'ü"', 1.5, {BIG});
    INSERT INTO flags VALUES (true, 'ab', '10.0.0.1', 1, {BIG});
    INSERT INTO {QUOTED} VALUES ('key', 1, {BIG});
"""


@pytest.fixture
def mirrored(database: Database) -> Database:
    database.execute(MIRRORED)
    return database


def test_a_mirror_follows_its_tables(mirrored: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with running(mirrored, spark) as (syncer, target):
        with one_batch(syncer, target):
            mirrored.execute(f"INSERT INTO t VALUES (1, 'a', {BIG}), (2, NULL, ''), (3, 'gone', 'x')")
            mirrored.execute("UPDATE t SET name = 'b' WHERE id = 1")
            mirrored.execute("UPDATE t SET id = 4 WHERE id = 1")
            mirrored.execute("DELETE FROM t WHERE id = 3")
            mirrored.execute("INSERT INTO pair VALUES (1, 'x', 1.5), (1, '\"ü\"', 'NaN')")
            mirrored.execute(f"INSERT INTO whole VALUES (1, 'a', {BIG})")
            mirrored.execute("UPDATE whole SET name = 'b'")
            mirrored.execute("INSERT INTO keyless VALUES (1, 'a')")
            mirrored.execute(f"INSERT INTO {QUOTED} VALUES ('schön', 1)")
        assert {id: doc["name"] for id, doc in target.documents["public.t"].items()} == {"2": None, "4": "b"}
        assert len(target.documents["public.t"]["4"]["big"]) == 3000
        assert sorted(target.deletes("public.t")) == ["1", "3"]
        assert set(target.documents["public.pair"]) == {'[1, "x"]'.replace("1", '"1"'), '["1", "\\"\\u00fc\\""]'}
        assert {doc["name"] for doc in target.documents["public.whole"].values()} == {"b"}
        assert len(target.documents["public.whole"]["1"]["big"]) == 3000
        assert target.documents[QUOTED_TYPE] == {"schön": {"Schlüssel %s": "schön", "n": 1, "big %b": None}}
        assert "public.keyless" not in target.documents
        assert [r for r in caplog.records if "public.keyless has no key" in r.getMessage()]

        with one_batch(syncer, target):
            mirrored.execute("TRUNCATE t")
            mirrored.execute("INSERT INTO t VALUES (9, 'after', 'b')")
        assert [call[0] for call in target.calls] == ["truncate", "upsert"]
        assert list(target.documents["public.t"]) == ["9"]


def test_values_the_log_left_out_are_read_from_the_source(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, target):
        with one_batch(syncer, target):
            mirrored.execute("UPDATE t SET name = 'new' WHERE id = 100")
            mirrored.execute("UPDATE t SET id = 102 WHERE id = 101")
            mirrored.execute("UPDATE pair SET v = 2 WHERE a = 100")
        docs = target.documents["public.t"]
        assert {id: (doc["name"], len(doc["big"])) for id, doc in docs.items()} == {
            "100": ("new", 3000),
            "102": ("old", 3000),
        }
        assert [len(doc["big"]) for doc in target.documents["public.pair"].values()] == [3000]


@pytest.mark.parametrize("column", ["flag", "code", "net"])
def test_values_left_out_are_found_by_keys_of_any_type(database: Database, spark: SparkSession, column: str) -> None:
    database.execute(
        f"""CREATE TABLE flags (flag bool, code char(5), net inet, n int, big text STORAGE EXTERNAL,
                                PRIMARY KEY ({column}));
        CREATE PUBLICATION dbsync_mypub FOR TABLE flags;
        INSERT INTO flags VALUES (true, 'ab', '10.0.0.1', 1, {BIG})"""
    )
    with running(database, spark) as (syncer, target):
        database.execute("UPDATE flags SET n = 2")
        syncer.drain()
        assert [(doc["n"], len(doc["big"])) for doc in target.documents.get("public.flags", {}).values()] == [(2, 3000)]


def test_values_left_out_are_found_in_tables_with_any_name(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, target):
        mirrored.execute(f"UPDATE {QUOTED} SET n = 2")
        syncer.drain()
        assert [(doc["n"], len(doc["big %b"])) for doc in target.documents[QUOTED_TYPE].values()] == [(2, 3000)]


@pytest.mark.parametrize(
    "ddl",
    [
        "ALTER TABLE t DROP COLUMN name",
        "ALTER TABLE t DROP COLUMN big",
        "ALTER TABLE t RENAME TO renamed",
        "DROP TABLE t",
    ],
)
def test_a_table_that_changed_since_does_not_stop_the_others(mirrored: Database, spark: SparkSession, ddl: str) -> None:
    """The value left out can no longer be read the way the log describes the table."""
    with running(mirrored, spark) as (syncer, target):
        syncer.drain()
        syncer.pause()
        time.sleep(0.2)
        mirrored.execute("UPDATE t SET name = 'new' WHERE id = 100")
        mirrored.execute(ddl)
        mirrored.execute("INSERT INTO pair VALUES (1, 'x', 1)")
        syncer.resume()
        syncer.drain()
        assert len(target.documents["public.pair"]) == 1


def test_a_partial_document_for_who_accepts_it(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark, partial=True) as (syncer, target):
        mirrored.execute("UPDATE t SET name = 'new' WHERE id = 100")
        syncer.drain()
        assert target.upserts("public.t") == {"100": {"id": 100, "name": "new"}}


def test_a_table_changes_its_columns_within_a_transaction_and_between(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, target):
        with mirrored.connect() as connection, connection.transaction():
            connection.execute("INSERT INTO t VALUES (1, 'before', 'x'), (2, 'before', 'x')")
            connection.execute("ALTER TABLE t ADD extra int DEFAULT 5")
            connection.execute("INSERT INTO t VALUES (3, 'after', 'x', 6)")
            connection.execute("UPDATE t SET name = 'changed' WHERE id = 2")
        syncer.drain()
        docs = target.documents["public.t"]
        assert docs["1"] == {"id": 1, "name": "before", "big": "x"}
        assert docs["2"] == {"id": 2, "name": "changed", "big": "x", "extra": 5}
        assert docs["3"] == {"id": 3, "name": "after", "big": "x", "extra": 6}
        mirrored.execute("ALTER TABLE t DROP COLUMN name, ALTER extra TYPE text")
        mirrored.execute("UPDATE t SET extra = 'seven' WHERE id = 3")
        syncer.drain()
        assert target.documents["public.t"]["3"] == {"id": 3, "big": "x", "extra": "seven"}


def test_within_a_batch_a_table_has_one_shape_though_it_was_made_anew(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); CREATE PUBLICATION dbsync_mypub FOR ALL TABLES")
    shapes: list[tuple[set[str], set[str]]] = []

    class Watching(RecordingBatcher):
        def begin(self, batch: Any) -> None:
            self.now = batch

        def batch_upsert(self, doctype: str, docs: Any) -> None:
            shapes.extend((set(self.now.relations[doctype].column_names), set(doc)) for doc in docs.values())

    with Syncer(database.settings(), batcher=Watching(), spark=spark) as syncer:
        syncer.drain()
        syncer.pause()
        time.sleep(0.2)
        database.execute("INSERT INTO t VALUES (1, 1)")
        database.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, b text)")
        database.execute("INSERT INTO t VALUES (2, 'x')")
        syncer.resume()
        syncer.drain()
    assert shapes == [({"id", "a"}, {"id", "a"}), ({"id", "b"}, {"id", "b"})]


def test_a_mirror_that_changes_its_rows(mirrored: Database, spark: SparkSession) -> None:
    class Louder(MirrorHandler):
        def handle_insert(self, msg: Any, relation: Any) -> None:
            self.syncer.mark_updated(relation.doctype, msg.id, msg.new | {"name": (msg.new["name"] or "").upper()})

    with running(mirrored, spark, handler=Louder()) as (syncer, target):
        mirrored.execute(f"INSERT INTO t VALUES (1, 'a', {BIG})")
        mirrored.execute("UPDATE t SET id = 2, name = 'b' WHERE id = 1")
        mirrored.execute("UPDATE t SET name = 'c' WHERE id = 100")
        syncer.drain()
        docs = target.documents["public.t"]
        assert {id: (doc["name"], len(doc["big"])) for id, doc in docs.items()} == {
            "2": ("B", 3000),
            "100": ("C", 3000),
        }


def test_drain_does_not_need_a_start_and_a_second_start_goes_on(mirrored: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    syncer = Syncer(mirrored.settings(), batcher=target, spark=spark)
    syncer.setup()
    syncer.setup()
    mirrored.execute("INSERT INTO t VALUES (1, 'a', 'x')")
    reached = syncer.drain()
    assert not syncer.running
    assert confirmed(mirrored) >= reached
    assert list(target.upserts("public.t")) == ["1"]
    target.clear()
    mirrored.execute("INSERT INTO t VALUES (2, 'while nobody read', 'x')")
    syncer.start()
    with pytest.raises(DbsyncError, match="already running"):
        syncer.start()
    assert syncer.drain() > reached
    syncer.stop()
    syncer.stop()
    assert list(target.upserts("public.t")) == ["2"]
    numbers = [batch.number for batch in target.batches]
    assert numbers == sorted(set(numbers))
    assert all(batch.first_lsn <= batch.last_lsn for batch in target.batches)


def test_stop_applies_what_was_read(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark, batch_seconds=600.0) as (syncer, target):
        mirrored.execute("INSERT INTO t VALUES (1, 'a', 'x')")
        written = LSN(mirrored.rows("SELECT pg_catalog.pg_current_wal_lsn()::text")[0][0])
        until(lambda: (syncer.status().received_lsn or 0) >= written)
        assert target.calls == []
    assert list(target.upserts("public.t")) == ["1"]
    assert confirmed(mirrored) >= written


def test_pause_reads_nothing_and_resume_goes_on(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, target):
        syncer.drain()
        syncer.pause()
        time.sleep(0.3)
        mirrored.execute("INSERT INTO t VALUES (1, 'a', 'x')")
        time.sleep(0.7)
        assert syncer.status().paused
        assert target.calls == []
        syncer.resume()
        syncer.drain()
        assert not syncer.status().paused
        assert list(target.upserts("public.t")) == ["1"]


def test_status_tells_where_it_stands(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, _):
        mirrored.execute("INSERT INTO t VALUES (1, 'a', 'x')")
        mirrored.execute("UPDATE t SET name = 'b' WHERE id = 1")
        reached = syncer.drain()
        status = syncer.status()
        assert status.running
        assert status.applied_lsn is not None
        assert status.confirmed_lsn is not None
        assert status.received_lsn is not None
        assert reached <= status.applied_lsn <= status.received_lsn <= status.server_lsn
        assert status.confirmed_lsn <= status.applied_lsn
        assert status.lag_seconds == 0
        assert status.totals.changes == 2
        assert status.totals.upserts >= 1
        assert status.last_batch is not None
        assert status.last_batch.last_lsn <= status.applied_lsn
        assert status.failure is None
        plain = status.as_dict()
        assert plain["applied_lsn"] == str(status.applied_lsn)
        assert plain["last_batch"]["number"] == status.last_batch.number
    after = syncer.status()
    assert not after.running
    assert after.applied_lsn is None


def test_an_idle_slot_holds_no_wal(mirrored: Database, spark: SparkSession) -> None:
    with running(mirrored, spark) as (syncer, target):
        syncer.drain()
        before = confirmed(mirrored)
        mirrored.execute("INSERT INTO unpublished SELECT * FROM generate_series(1, 50000)")
        written = LSN(mirrored.rows("SELECT pg_catalog.pg_current_wal_lsn()::text")[0][0])
        assert written > before
        until(lambda: confirmed(mirrored) >= written, 30)
        assert target.calls == []


def test_teardown_leaves_nothing(mirrored: Database, spark: SparkSession) -> None:
    what_is_there = """
        SELECT nspname::text FROM pg_catalog.pg_namespace
        UNION ALL SELECT relname::text FROM pg_catalog.pg_class WHERE relnamespace NOT IN
            (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname LIKE 'pg\\_%')
        UNION ALL SELECT prrelid::regclass::text FROM pg_catalog.pg_publication_rel
        UNION ALL SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE database = current_database()
        ORDER BY 1"""
    before = mirrored.rows(what_is_there)
    syncer = Syncer(mirrored.settings(), batcher=RecordingBatcher(), spark=spark)
    syncer.start()
    mirrored.execute("INSERT INTO t VALUES (1, 'a', 'x')")
    syncer.drain()
    assert mirrored.rows(what_is_there) != before
    assert syncer.teardown()
    assert mirrored.rows(what_is_there) == before
    assert syncer.teardown() == []


def test_without_a_target_it_echoes(
    mirrored: Database, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = Syncer(mirrored.settings(), spark=spark)
    assert isinstance(syncer.batcher, EchoBatcher)
    syncer.setup()
    mirrored.execute("INSERT INTO pair VALUES (1, 'x', 1.5)")
    syncer.drain()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert '"public.pair"' in out


class Changing(MessageHandler):
    """Marks rows as they came, changed in every way a dict can be, and under other types and ids."""

    def handle_insert(self, msg: Any, relation: Any) -> None:
        self.syncer.mark_updated(f"{relation.name} as it came", msg.id, msg.new)
        changes: list[Callable[[dict[str, Any]], Any]] = [
            lambda row: row.__setitem__("note", "changed"),
            lambda row: row.update(note="changed"),
            lambda row: row.__ior__({"note": "changed"}),
            lambda row: (row.pop("note"), row.setdefault("note", "changed")),
            lambda row: (row.__delitem__("note"), row.update({"note": "changed"})),
            lambda row: (row.popitem(), row.setdefault("note", "changed")),
        ]
        if "tags" in msg.new:
            if msg.new["tags"] is not None:
                msg.new["tags"].append("changed")
            self.syncer.mark_updated("in place", msg.id, msg.new)
        else:
            changes[int(msg.id) % len(changes)](msg.new)
            self.syncer.mark_updated("changed", msg.id, msg.new)


def test_what_a_handler_changes_in_a_row_is_what_is_marked(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE plain (id int PRIMARY KEY, note text)")
    database.execute("CREATE TABLE lists (id int PRIMARY KEY, tags text[])")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE plain, lists")
    with running(database, spark, handler=Changing()) as (syncer, target):
        some = "FROM generate_series(1, 60) AS i"
        database.execute(f"INSERT INTO plain SELECT i, CASE WHEN i > 3 THEN 'ä ' || i END {some}")
        database.execute(f"INSERT INTO lists SELECT i, CASE WHEN i > 3 THEN ARRAY['t'] END {some}")
        syncer.drain()
    numbers = range(1, 61)
    came = {str(i): {"id": i, "note": f"ä {i}" if i > 3 else None} for i in numbers}
    assert target.documents["plain as it came"] == came
    assert target.documents["lists as it came"] == {
        str(i): {"id": i, "tags": ["t"] if i > 3 else None} for i in numbers
    }
    assert target.documents["changed"] == {id: {**doc, "note": "changed"} for id, doc in came.items()}
    assert target.documents["in place"] == {
        str(i): {"id": i, "tags": ["t", "changed"] if i > 3 else None} for i in numbers
    }
