"""MySQL as `--to`: see `fix_target` for what it has to stand; types, evolution and what can go wrong beside it.

The server is MariaDB's or MySQL's, whichever is installed; without one these tests are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from fix_mysql import PASSWORD, MysqlDatabase
from fix_postgres import Database
from fix_target import SOURCE, STAMPED, Rows, Target, survives
from kinds import KINDS
from mirrored import delete, documents, info, mirror, not_applied_twice, output, relation, upsert
from pyspark.sql import SparkSession
from sqlalchemy import event

from dbsync.batcher.sql import SqlBatcher
from dbsync.errors import BatcherError
from dbsync.lsn import LSN


@pytest.fixture
def batcher(mysql: MysqlDatabase) -> Iterator[SqlBatcher]:
    made = SqlBatcher(mysql.url)
    made.log_name = "test"
    yield made
    made.close()


def types(mysql: MysqlDatabase, table: str) -> dict[str, str]:
    return dict(
        mysql.rows(
            "SELECT column_name, concat(column_type, if(column_comment = '', '', ' '), column_comment)"
            f" FROM information_schema.columns WHERE table_schema = database() AND table_name = '{table}'"
        )
    )


def end_sessions(mysql: MysqlDatabase) -> None:
    for (id,) in mysql.rows(
        "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
    ):
        mysql.rows(f"KILL {id}")


@pytest.mark.long  # like its sibling's, which the plain run has
def test_mysql_survives(database: Database, mysql: MysqlDatabase) -> None:
    def read(table: str) -> Rows:
        return mysql.rows(SOURCE[table].replace("total::text", "cast(total AS char)"))

    survives(database, Target(mysql.at("mariadb"), read, stamp=lambda: mysql.rows(STAMPED)))


def test_no_batch_is_applied_twice(database: Database, mysql: MysqlDatabase, spark: SparkSession) -> None:
    mysql.rows("CREATE TABLE t (id int PRIMARY KEY, name longtext)")
    mysql.rows("CREATE TABLE audit (number int AUTO_INCREMENT PRIMARY KEY, what text, id int)")
    for what, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
        mysql.rows(
            f"CREATE TRIGGER audit_{what} AFTER {what} ON t FOR EACH ROW"
            f" INSERT INTO audit (what, id) VALUES ('{what}', {row}.id)"
        )
    made = lambda: SqlBatcher(mysql.url)  # noqa: E731
    not_applied_twice(database, spark, made, lambda: mysql.rows("SELECT what, id FROM audit ORDER BY number"))
    query = "SELECT id, name FROM t ORDER BY id"
    assert mysql.rows(query) == database.rows(query)


def test_types_survive(database: Database, mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    database.execute(KINDS.replace("'24:00'", "'23:00'"))
    database.execute("CREATE TABLE plain AS SELECT * FROM kinds WHERE id = 1; ALTER TABLE plain ADD PRIMARY KEY (id)")
    described = mirror(batcher, 10, database, "plain")
    own = {
        "id": "int", "small": "smallint", "big": "bigint", "real4": "double", "real8": "double",
        "exact": "decimal(12,2)", "flag": "tinyint(1)", "raw": "longblob", "day": "date", "clock": "time(6)",
        "clock3": "time(6)", "moment": "datetime(6)", "at_zone": "datetime(6) UTC", "oids": "bigint",
        "little": "bigint",
    }  # fmt: skip
    found = {name: type.replace("int(11)", "int") for name, type in types(mysql, "plain").items()}
    found = {name: "int" if type == "int" else type.partition("int(")[0] + "int" if "int(" in type and name != "flag"
             else type for name, type in found.items()}  # fmt: skip
    assert {name: type for name, type in found.items() if type != "longtext"} == own
    (doc,) = documents(database, described).values()
    (row,) = mysql.rows("SELECT " + ", ".join(own) + " FROM plain")
    for name, value in zip(own, row, strict=True):
        expected = doc[name]
        if name == "at_zone":
            expected = expected.astimezone(UTC).replace(tzinfo=None)
        elif name.startswith("clock"):
            expected = timedelta(hours=10, minutes=11, seconds=12, microseconds=expected.microsecond)
        assert value == expected, name
    # Values that MySQL has no place for make their columns text, and what these held stays what it was.
    mirror(batcher, 20, database, "kinds")
    texts = [name for name in described.column_names if types(mysql, "kinds")[name] == "longtext"]
    assert not {"real4", "real8", "exact", "day", "moment", "at_zone"} - set(texts)
    lists = {name for name in texts if isinstance(doc[name], list)} | {"doc", "docb", "real4", "real8"}
    texts = [name for name in texts if name not in lists]
    held = mysql.rows("SELECT " + ", ".join(f"`{name}`" for name in texts) + " FROM kinds ORDER BY id")
    for one, other in zip(held, output(database, "kinds", texts), strict=True):
        assert dict(zip(texts, one, strict=True)) == dict(zip(texts, other, strict=True))
    assert mysql.rows("SELECT real4, real8 FROM kinds ORDER BY id LIMIT 2") == [
        ("0.1", "0.30000000000000004"), ("NaN", "-Infinity"),
    ]  # fmt: skip


def test_a_value_that_has_no_place_makes_its_column_text(
    database: Database, mysql: MysqlDatabase, batcher: SqlBatcher
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, f float8, n numeric(9, 3), d date, c time, m timestamp, z timestamptz);"
        "INSERT INTO t VALUES (1, 0.1, 1.5, '2024-01-02', '10:00:00.5', '2024-01-02 03:04:05',"
        " '2024-01-02 03:04:05.678+00'), (2, NULL, NULL, NULL, NULL, NULL, NULL)"
    )
    described = mirror(batcher, 10, database, "t")
    expected = ("0.1", "1.500", "2024-01-02", "10:00:00.5", "2024-01-02 03:04:05", "2024-01-02 03:04:05.678+00")
    database.execute(
        "UPDATE t SET f = 'Infinity', n = 'NaN', d = '0044-03-15 BC', c = '24:00', m = 'infinity', z = '-infinity'"
        " WHERE id = 2"
    )
    docs = documents(database, described)
    for _ in range(2):
        upsert(batcher, 20, "public.t", {"2": docs["2"]}, described)
    assert mysql.rows("SELECT f, n, d, c, m, z FROM t ORDER BY id") == [
        expected, ("Infinity", "NaN", "0044-03-15 BC", "24:00:00", "infinity", "-infinity"),
    ]  # fmt: skip


def test_altering_in_the_middle_of_a_batch_begins_it_again(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})

    def hand_over() -> None:
        batcher.begin(info(20))
        batcher.batch_upsert("other", {"x": {"n": 1}})
        batcher.batch_delete("thing", ["a"])
        batcher.batch_upsert("thing", {"b": {"n": "text", "more": 1.5}})
        batcher.commit(info(20))

    for words in ("make the column n text", "add the column more"):
        with pytest.raises(BatcherError, match=f"in the middle of the batch, to {words}") as raised:
            hand_over()
        assert raised.value.retryable
        assert [id for id, *_ in mysql.rows("SELECT * FROM thing")] == ["a"]
        assert mysql.rows("SELECT * FROM other") == []
    hand_over()
    assert mysql.rows("SELECT * FROM thing") == [("b", "text", 1.5)]
    assert mysql.rows("SELECT * FROM other") == [("x", 1)]


def test_a_batch_is_whole_or_not_there(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    assert batcher.position() is None
    upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    batcher.batch_truncate("shop.thing")
    batcher.batch_upsert("shop.thing", {"b": {"n": 2}})
    assert mysql.rows("SELECT * FROM shop_thing") == [("a", 1)]
    batcher.close()
    assert batcher.position() == LSN(10)
    upsert(batcher, 20, "shop.thing", {"c": {"n": 3}})
    assert mysql.rows("SELECT * FROM shop_thing ORDER BY _id") == [("a", 1), ("c", 3)]
    assert batcher.position() == LSN(20)


def test_keys_that_are_text(database: Database, mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    database.execute(
        "CREATE TABLE t (a text, b varchar(9), n int, raw bytea, PRIMARY KEY (a, b, n, raw));"
        "INSERT INTO t VALUES ('a', 'x', 1, '\\x00'), ('A', 'x', 1, '\\x00'), ('a ', 'x', 1, '\\x00'),"
        " ('ä', 'x', 1, '\\x00'), ('a', 'x', 1, ''), ('😀', '', 1, '\\xff')"
    )
    described = mirror(batcher, 10, database, "t")
    assert sorted(mysql.rows("SELECT * FROM t")) == sorted(database.rows("SELECT * FROM t"))
    delete(batcher, 20, "public.t", ['["a", "x", "1", "\\\\x00"]', '["b", "x", "1", "\\\\x"]'], described)
    assert len(mysql.rows("SELECT * FROM t")) == 5
    with pytest.raises(BatcherError, match="Data too long") as raised:
        upsert(batcher, 30, "thing", {"x" * 769: {"n": 1}})
    assert "768 characters" in (raised.value.hint or "")
    assert not raised.value.retryable
    upsert(batcher, 40, "thing", {"ä" * 768: {"n": 1}})


def test_tables_follow_the_source(database: Database, mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    database.execute(
        "CREATE TABLE t (id int2 PRIMARY KEY, a int, b bool, c numeric(5, 2), d timestamptz, old text,"
        " place int NOT NULL DEFAULT 0);"
        "INSERT INTO t VALUES (1, 7, true, 1.25, '2024-01-02 00:00+00', 'x'), (2, 8, false, 2, NULL, 'y')"
    )
    mirror(batcher, 10, database, "t")
    database.execute(
        "ALTER TABLE t ALTER id TYPE int8, ALTER a TYPE numeric(20, 2), ALTER b TYPE text, ALTER c TYPE numeric(9, 4),"
        " ALTER d TYPE text, DROP old, ADD added timestamp, DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, place);"
        "UPDATE t SET id = 5000000000 WHERE id = 2"
    )
    described = relation(database, "t")
    docs = documents(database, described)
    upsert(batcher, 20, "public.t", {id: doc for id, doc in docs.items() if doc["id"] != 1}, described)
    delete(batcher, 30, "public.t", ['["2", "0"]'], described)
    assert mysql.rows("SELECT id, a, b, c, d, old, place, added FROM t ORDER BY id") == [
        (1, Decimal("7.00"), "true", Decimal("1.2500"), "2024-01-02 00:00:00+00", "x", 0, None),
        (5000000000, Decimal("8.00"), "false", Decimal("2.0000"), None, None, 0, None),
    ]  # fmt: skip
    database.execute("ALTER TABLE t ALTER added TYPE timestamptz")
    with pytest.raises(BatcherError, match=r"column added of t is datetime in the target.*datetime in UTC, cannot"):
        mirror(batcher, 40, database, "t")
    database.execute("ALTER TABLE t DROP added")
    dropping = SqlBatcher(mysql.url, drop_columns=True)
    mirror(dropping, 50, database, "t")
    dropping.close()
    assert set(types(mysql, "t")) == {"id", "a", "b", "c", "d", "place"}


def test_soft_deletes(database: Database, mysql: MysqlDatabase) -> None:
    batcher = SqlBatcher(mysql.url, soft_delete=True)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 2), (2, 3)")
    described = mirror(batcher, 10, database, "t")
    gone = "SELECT id, _deleted_at FROM t WHERE _deleted_at IS NOT NULL ORDER BY id"
    delete(batcher, 20, "public.t", ["1", "9"], described)
    first = mysql.rows(gone)
    assert [(id, at.date()) for id, at in first] == [(1, datetime.now(UTC).date())]
    batcher.begin(info(30, described))
    batcher.batch_truncate("public.t")
    batcher.batch_upsert("public.t", {"2": {"id": 2, "a": 9}})
    batcher.commit(info(30, described))
    batcher.close()
    assert mysql.rows(gone) == first


def test_odd_names(database: Database, mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    database.execute(
        'CREATE TABLE "select ""`x` %(a)s:b" ("Id %" int, "id `:x" text, "order" int, "dbsync_0" int, "(%s)" int,'
        """ "ünï.""q'" text, PRIMARY KEY ("Id %", "id `:x"));"""
        """INSERT INTO "select ""`x` %(a)s:b" VALUES (1, '["', 2, 3, 4, '%s'), (2, '\\', 3, 4, 5, NULL)"""
    )
    described = mirror(batcher, 10, database, 'select "`x` %(a)s:b')
    source = database.rows('SELECT * FROM "select ""`x` %(a)s:b" ORDER BY 1')
    query = 'SELECT * FROM `select "``x`` %(a)s:b` ORDER BY 1'
    assert mysql.rows(query) == source
    delete(batcher, 20, described.doctype, list(documents(database, described))[:1], described)
    assert mysql.rows(query) == source[1:]
    database.execute('ALTER TABLE "select ""`x` %(a)s:b" ADD "new %" timestamptz, ALTER "(%s)" TYPE text')
    mirror(batcher, 30, database, 'select "`x` %(a)s:b')
    assert {"new %": "datetime(6) UTC", "(%s)": "longtext"}.items() <= types(mysql, 'select "`x` %(a)s:b').items()
    with pytest.raises(BatcherError, match="64 characters"):
        upsert(batcher, 40, "x" * 65, {"a": {"n": 1}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"user": "nobody"}, "Access denied"),
        ({"password": "wrong-4713"}, "Access denied"),
        ({"name": "nil"}, "Unknown"),
    ],
)
def test_a_connection_that_is_refused(mysql: MysqlDatabase, changes: dict[str, str], words: str) -> None:
    batcher = SqlBatcher(mysql.at(**changes))
    with pytest.raises(BatcherError, match=words) as raised:
        batcher.position()
    assert not raised.value.retryable
    assert raised.value.hint
    assert not any(secret in str(raised.value) for secret in (PASSWORD, "wrong-4713"))


def test_a_user_that_may_not(mysql: MysqlDatabase) -> None:
    mysql.rows(f"CREATE OR REPLACE USER guest@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'")
    mysql.rows(f"GRANT SELECT ON {mysql.name}.* TO guest@'127.0.0.1'")
    batcher = SqlBatcher(mysql.at(user="guest"))
    with pytest.raises(BatcherError, match="could not make dbsync's own tables: CREATE command denied") as raised:
        upsert(batcher, 10, "thing", {"a": {"n": 1}})
    assert not raised.value.retryable
    assert "GRANT" in (raised.value.hint or "")
    batcher.close()


def test_a_session_that_is_ended_in_the_middle(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    batcher.batch_upsert("thing", {"a": {"n": 2}})
    end_sessions(mysql)
    with pytest.raises(BatcherError) as raised:
        batcher.batch_upsert("thing", {"b": {"n": 2}})
    assert raised.value.retryable
    assert mysql.rows("SELECT * FROM thing") == [("a", 1)]
    upsert(batcher, 20, "thing", {"a": {"n": 2}, "b": {"n": 2}})
    assert mysql.rows("SELECT * FROM thing ORDER BY _id") == [("a", 2), ("b", 2)]
    assert batcher.position() == LSN(20)


def test_a_session_that_is_ended_before_it_is_asked_for_the_position(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    assert batcher.position() == LSN(10)
    end_sessions(mysql)
    with pytest.raises(BatcherError, match="could not read the position") as raised:
        batcher.position()
    assert raised.value.retryable
    assert batcher.position() == LSN(10)


def test_a_session_that_is_ended_at_the_commit(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    engine = batcher._store._engine  # type: ignore[attr-defined]
    event.listen(engine, "commit", lambda _: end_sessions(mysql), once=True)
    with pytest.raises(BatcherError, match="could not commit") as raised:
        upsert(batcher, 20, "thing", {"b": {"n": 2}})
    assert raised.value.retryable
    assert mysql.rows("SELECT * FROM thing") == [("a", 1)]
    upsert(batcher, 20, "thing", {"b": {"n": 2}})
    assert mysql.rows("SELECT * FROM thing ORDER BY _id") == [("a", 1), ("b", 2)]


def test_a_date_before_the_year_1000(mysql: MysqlDatabase, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"day": date(2024, 1, 2)}})
    upsert(batcher, 20, "thing", {"b": {"day": date(999, 1, 2)}})
    assert mysql.rows("SELECT * FROM thing ORDER BY _id") == [("a", "2024-01-02"), ("b", "0999-01-02")]
