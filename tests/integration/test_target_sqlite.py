"""SQLite as `--to`: see `fix_target` for what it has to stand; types, evolution and what can go wrong beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fix_postgres import Database
from fix_target import Rows, Target, survives
from kinds import KINDS
from mirrored import delete, documents, info, mirror, not_applied_twice, output, relation, upsert
from pyspark.sql import SparkSession

from dbsync.batcher.sql import SqlBatcher
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "target.sqlite"


@pytest.fixture
def batcher(file: Path) -> Iterator[SqlBatcher]:
    made = SqlBatcher(f"sqlite:///{file}")
    made.log_name = "test"
    yield made
    made.close()


def rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file, isolation_level=None, timeout=30)) as db:
        return db.execute(statement).fetchall()


def types(file: Path, table: str) -> dict[str, str]:
    return {name: type for _, name, type, *_ in rows(file, f"PRAGMA table_info('{table}')")}


def test_sqlite_survives(database: Database, file: Path) -> None:
    def read(table: str) -> Rows:
        return rows(file, {
            "customers": "SELECT id, name, email, note FROM customers ORDER BY id",
            "orders": "SELECT customer, number, total FROM orders ORDER BY customer, number",
        }[table])  # fmt: skip

    survives(database, Target(f"sqlite:///{file}", read))


AUDIT = """
CREATE TABLE audit (what text, id text);
CREATE TRIGGER audit_insert AFTER INSERT ON t BEGIN INSERT INTO audit VALUES ('insert', NEW.id); END;
CREATE TRIGGER audit_update AFTER UPDATE ON t BEGIN INSERT INTO audit VALUES ('update', NEW.id); END;
CREATE TRIGGER audit_delete AFTER DELETE ON t BEGIN INSERT INTO audit VALUES ('delete', OLD.id); END;
"""


def test_no_batch_is_applied_twice(database: Database, file: Path, spark: SparkSession) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.executescript("CREATE TABLE t (id int PRIMARY KEY, name text);" + AUDIT)
    made = lambda: SqlBatcher(f"sqlite:///{file}")  # noqa: E731
    not_applied_twice(database, spark, made, lambda: rows(file, "SELECT * FROM audit"))
    query = "SELECT * FROM t ORDER BY id"
    assert rows(file, query) == database.rows(query)


def test_types_survive(database: Database, file: Path, batcher: SqlBatcher) -> None:
    database.execute(KINDS)
    described = mirror(batcher, 10, database, "kinds")
    became = types(file, "kinds")
    assert {name: type for name, type in became.items() if type != "TEXT"} == {
        "id": "BIGINT", "small": "BIGINT", "big": "BIGINT", "real4": "REAL", "real8": "REAL", "flag": "BOOLEAN",
        "raw": "BLOB", "oids": "BIGINT", "little": "BIGINT",
    }  # fmt: skip
    with closing(sqlite3.connect(file)) as db:
        db.row_factory = sqlite3.Row
        found = {str(row["id"]): row for row in db.execute("SELECT * FROM kinds")}
    plain = [name for name in described.column_names if became[name] != "TEXT"]
    for id, doc in documents(database, described).items():
        for name in plain:
            is_nan = doc[name] != doc[name]
            assert found[id][name] == ("NaN" if is_nan else doc[name]), name
    texts = [name for name in described.column_names if became[name] == "TEXT" and name not in ("doc", "docb")]
    first = documents(database, described)["1"]
    texts = [name for name in texts if not isinstance(first[name], list)]
    assert [tuple(row[name] for name in texts) for _, row in sorted(found.items())] == output(database, "kinds", texts)
    row = found["1"]
    assert row["fixed"] == "ab   "
    assert row["doc"] == '{"a": [1, null, "ü\\"x", 1.5E+400, true], "b": {"c": "\\u0000"}}'
    assert row["docb"] == '{"a": [1, 12345678901234567890123, 0.1], "b": "s"}'
    assert (row["ints"], row["nums"], row["matrix"]) == ("[1, null, 3]", '["1.500", "NaN"]', "[[1, 2], [3, 4]]")


def test_a_batch_is_whole_or_not_there(file: Path, batcher: SqlBatcher) -> None:
    assert batcher.position() is None
    upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    batcher.batch_truncate("shop.thing")
    batcher.batch_upsert("shop.thing", {"b": {"n": "text", "more": 1.5}})
    assert rows(file, "SELECT * FROM shop_thing") == [("a", 1)]
    batcher.begin(info(20))
    batcher.batch_upsert("shop.thing", {"c": {"n": 3}})
    batcher.commit(info(20))
    batcher.begin(info(30))
    batcher.batch_delete("shop.thing", ["a", "c"])
    batcher.close()
    assert rows(file, "SELECT * FROM shop_thing ORDER BY _id") == [("a", 1), ("c", 3)]
    assert batcher.position() == LSN(20)
    other = SqlBatcher(f"sqlite:///{file}")
    other.log_name = "another"
    assert other.position() is None
    other.close()


def test_tables_follow_the_source(database: Database, file: Path, batcher: SqlBatcher) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b bool, c float8, old text, place text NOT NULL DEFAULT 'x');"
        "INSERT INTO t VALUES (1, 7, true, 0.30000000000000004, 'x'), (2, 8, false, 'NaN', 'y')"
    )
    mirror(batcher, 10, database, "t")
    rows(file, "CREATE INDEX mine ON t (a)")
    rows(file, "CREATE VIEW seen AS SELECT id, a FROM t")
    database.execute(
        "ALTER TABLE t ALTER a TYPE text USING '00' || a, ALTER b TYPE text, ALTER c TYPE text, DROP old,"
        " ADD added int, DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, place); UPDATE t SET added = 1 WHERE id = 2"
    )
    described = relation(database, "t")
    docs = documents(database, described)
    upsert(batcher, 20, "public.t", {id: docs[id] for id in docs if '"2"' in id}, described)
    # Row 1 was not written again: it holds, as text, what it held.
    assert rows(file, "SELECT id, a, b, c, old, place, added FROM t ORDER BY id") == [
        (1, "7", "true", "0.30000000000000004", "x", "x", None), (2, "008", "false", "NaN", None, "x", 1),
    ]  # fmt: skip
    assert rows(file, "SELECT name FROM sqlite_master WHERE tbl_name = 't' AND type = 'index' AND sql IS NOT NULL")
    assert rows(file, "SELECT count(*) FROM seen") == [(2,)]
    database.execute("INSERT INTO t VALUES (1, 'a', 'b', 'c', 'y', 2)")
    mirror(batcher, 30, database, "t")
    delete(batcher, 40, "public.t", ['["1", "x"]', '["5", "x"]'], described)
    assert rows(file, "SELECT id, place FROM t ORDER BY id") == [(1, "y"), (2, "x")]
    database.execute("ALTER TABLE t ALTER added TYPE date USING '2024-01-01'::date")
    mirror(batcher, 50, database, "t")
    assert types(file, "t")["added"] == "TEXT"
    database.execute("ALTER TABLE t ALTER a TYPE int USING 1, ALTER b TYPE bytea USING NULL")
    mirror(batcher, 60, database, "t")
    assert set(rows(file, "SELECT a, b, added FROM t")) == {("1", None, "2024-01-01")}
    dropping = SqlBatcher(f"sqlite:///{file}", drop_columns=True)
    mirror(dropping, 70, database, "t")
    dropping.close()
    assert set(types(file, "t")) == set(described.column_names)


def test_a_type_that_cannot_follow_names_the_column(database: Database, batcher: SqlBatcher) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a bool); INSERT INTO t VALUES (1, true)")
    mirror(batcher, 10, database, "t")
    database.execute("ALTER TABLE t ALTER a TYPE int USING 5")
    with pytest.raises(BatcherError, match=r"column a of t is boolean in the target, and .* bigint, cannot") as raised:
        mirror(batcher, 20, database, "t")
    assert not raised.value.retryable


def test_soft_deletes(database: Database, file: Path) -> None:
    batcher = SqlBatcher(f"sqlite:///{file}", soft_delete=True)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 2), (2, 3)")
    described = mirror(batcher, 10, database, "t")
    gone = "SELECT id, _deleted_at FROM t WHERE _deleted_at IS NOT NULL ORDER BY id"
    delete(batcher, 20, "public.t", ["1", "9"], described)
    first = rows(file, gone)
    assert [id for id, _ in first] == [1]
    batcher.begin(info(30, described))
    batcher.batch_truncate("public.t")
    batcher.batch_upsert("public.t", {"2": {"id": 2, "a": 9}})
    batcher.commit(info(30, described))
    batcher.close()
    assert rows(file, gone) == first


def test_odd_names_and_keys(database: Database, file: Path, batcher: SqlBatcher) -> None:
    database.execute(
        'CREATE TABLE "select ""x"" %(a)s:b" ("Id %" int, "id :x" text, "order" int, "dbsync_0" int, "(%s)" int,'
        """ "ünï.""q'" numeric, PRIMARY KEY ("Id %", "id :x", "ünï.""q'"));"""
        """INSERT INTO "select ""x"" %(a)s:b" VALUES (1, '["', 2, 3, 4, 1.50), (2, '\\', 3, 4, 5, 'NaN')"""
    )
    described = mirror(batcher, 10, database, 'select "x" %(a)s:b')
    query = 'SELECT * FROM "select ""x"" %(a)s:b" ORDER BY 1'
    plain = [tuple(map(str, row)) for row in database.rows(query)]
    assert [tuple(map(str, row)) for row in rows(file, query)] == plain
    delete(batcher, 20, described.doctype, list(documents(database, described))[:1], described)
    assert [tuple(map(str, row)) for row in rows(file, query)] == plain[1:]


def test_documents_of_a_handler(file: Path, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1, "tags": ["x"], "void": None}, "b": {"n": 2, "only": b"x"}})
    upsert(batcher, 20, "thing", {"a": {"n": 2**70}, "c": {"void": True}})
    upsert(batcher, 30, "thing", {"e": {}})
    assert types(file, "thing") == {"_id": "TEXT", "n": "TEXT", "tags": "TEXT", "only": "BLOB", "void": "BOOLEAN"}
    assert rows(file, "SELECT _id, n, tags, only, void FROM thing ORDER BY _id") == [
        ("a", str(2**70), None, None, None), ("b", "2", None, b"x", None), ("c", None, None, None, 1),
        ("e", None, None, None, None),
    ]  # fmt: skip


def test_tables_that_would_be_one(batcher: SqlBatcher, file: Path) -> None:
    upsert(batcher, 10, "a.b_c", {"a": {"n": 1}})
    with pytest.raises(BatcherError, match=r"Both a\.b_c and a_b\.c would be the table a_b_c") as raised:
        upsert(batcher, 20, "a_b.c", {"a": {"n": 1}})
    assert not raised.value.retryable
    batcher.close()
    other = SqlBatcher(f"sqlite:///{file}")
    with pytest.raises(BatcherError, match=r"Both a\.b_c and a_b\.c would be the table a_b_c"):
        upsert(other, 20, "a_b.c", {"a": {"n": 1}})
    with pytest.raises(BatcherError, match="does not tell upper from lower case: n and N"):
        upsert(other, 20, "a.other", {"a": {"n": 1, "N": 2}})
    other.close()


def test_a_folder_that_is_not_there_comes_back(tmp_path: Path) -> None:
    batcher = SqlBatcher(f"sqlite:///{tmp_path}/later/target.sqlite")
    with pytest.raises(BatcherError, match="unable to open database file") as raised:
        batcher.position()
    assert raised.value.retryable
    assert "folder" in (raised.value.hint or "")
    (tmp_path / "later").mkdir()
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.close()
    assert rows(tmp_path / "later" / "target.sqlite", "SELECT * FROM thing") == [("a", 1)]


def test_a_file_that_may_not_be_written(file: Path, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.close()
    readonly = SqlBatcher(f"sqlite:///file:{file}?mode=ro&uri=true")
    with pytest.raises(BatcherError, match="readonly database") as raised:
        upsert(readonly, 20, "thing", {"a": {"n": 2}})
    assert not raised.value.retryable
    readonly.close()
    file.write_bytes(b"something else" * 100)
    with pytest.raises(BatcherError, match="file is not a database"):
        batcher.position()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://user:geheim@HOST"])
def test_a_url_that_names_no_database(url: str) -> None:
    with pytest.raises(ConfigError, match="names no database") as raised:
        SqlBatcher(url)
    assert "geheim" not in str(raised.value)
