"""SQLite as `--to`: see `fix_target` for what it has to stand; types, evolution and what can go wrong beside it."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from filetargets import no_room_beyond, waits_for_permission
from fix_postgres import Database
from fix_target import SOURCE, STAMPED, Rows, Target, survives
from kinds import KINDS
from mirrored import delete, documents, info, mirror, not_applied_twice, output, relation, upsert
from pyspark.sql import SparkSession
from sqlalchemy import event

from dbsync.batcher import sql
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
        return rows(file, SOURCE[table].replace("::text", ""))

    survives(database, Target(f"sqlite:///{file}", read, stamp=lambda: rows(file, STAMPED)))


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


def test_a_full_disk_is_waited_for(file: Path, batcher: SqlBatcher) -> None:
    docs = {str(n): {"n": "y" * 500} for n in range(2_000)}
    upsert(batcher, 10, "thing", {"a": {"n": "x"}})
    with no_room_beyond(60_000):
        for _ in range(2):
            with pytest.raises(BatcherError, match=r"could not .*: disk I/O error") as raised:
                upsert(batcher, 20, "thing", docs)
            assert raised.value.retryable
            assert raised.value.hint == "See that its disk has room, and is well."
        assert rows(file, "SELECT * FROM thing") == [("a", "x")]
    upsert(batcher, 20, "thing", docs)
    assert rows(file, "SELECT count(*) FROM thing") == [(2_001,)]
    assert batcher.position() == LSN(20)


def test_a_file_that_has_grown_as_far_as_it_may_is_waited_for(file: Path) -> None:
    def grow(pages: int) -> None:
        # The limit is the connection's own, so every new one is told of it.
        event.listen(batcher._store._engine, "connect", lambda it, _: it.execute(f"PRAGMA max_page_count = {pages}"))

    batcher: Any = SqlBatcher(f"sqlite:///{file}")
    upsert(batcher, 10, "thing", {"a": {"n": "x"}})
    batcher.close()
    grow(20)
    for _ in range(2):
        with pytest.raises(BatcherError, match=r"database or disk is full\. Make room on the disk\.") as raised:
            upsert(batcher, 20, "thing", {str(n): {"n": "y" * 500} for n in range(2_000)})
        assert raised.value.retryable
    batcher.close()
    grow(10_000)
    upsert(batcher, 20, "thing", {"b": {"n": "y"}})
    batcher.close()
    assert rows(file, "SELECT _id FROM thing ORDER BY _id") == [("a",), ("b",)]


def test_a_commit_that_fails_is_tried_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody reads the file: SQLite lets dbsync write, and refuses the COMMIT."""
    monkeypatch.setattr(sql, "_LOCK_SECONDS", 0.05)
    batcher = SqlBatcher(f"sqlite:///{file}")
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM thing").fetchall()
        for _ in range(3):
            with pytest.raises(BatcherError, match="could not commit: database is locked") as raised:
                upsert(batcher, 20, "thing", {"b": {"n": 2}})
            assert raised.value.retryable
        assert rows(file, "SELECT * FROM thing") == [("a", 1)]
    upsert(batcher, 20, "thing", {"b": {"n": 2}})
    batcher.close()
    assert rows(file, "SELECT * FROM thing ORDER BY _id") == [("a", 1), ("b", 2)]


def test_a_connection_that_breaks_at_the_commit_is_opened_anew(file: Path, batcher: SqlBatcher) -> None:
    """As a server's does; the batch did not get through."""
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    dialect: Any = batcher._store._engine.dialect  # type: ignore[attr-defined]
    commit = dialect.do_commit

    def broken(connection: Any) -> None:
        dialect.do_commit = commit
        connection.close()
        raise sqlite3.OperationalError("the connection broke")

    dialect.do_commit, dialect.is_disconnect = broken, lambda *_: True
    with pytest.raises(BatcherError, match="could not commit: the connection broke"):
        upsert(batcher, 20, "thing", {"b": {"n": 2}})
    upsert(batcher, 20, "thing", {"b": {"n": 2}})
    assert rows(file, "SELECT * FROM thing ORDER BY _id") == [("a", 1), ("b", 2)]


def test_a_file_in_a_folder_that_may_not_be_written() -> None:
    refused = waits_for_permission("sqlite:///{}/target.sqlite")
    assert re.fullmatch(r"The target at [^\n]+ could not [^\n]+: unable to open database file\.", refused["message"])
    assert refused["hint"] == "Check that its folder is there and may be written, by the user dbsync runs as."
    assert refused["retryable"]


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


def test_a_file_that_is_moved_away_and_comes_back(file: Path, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    away = file.rename(file.with_name("away"))
    for _ in range(3):
        with pytest.raises(BatcherError, match=r"The file .* was moved or deleted while dbsync kept it") as raised:
            upsert(batcher, 20, "thing", {"b": {"n": 2}})
        assert raised.value.retryable
        assert not file.exists()  # an empty one in its place would take the batch
    away.rename(file)
    upsert(batcher, 20, "thing", {"b": {"n": 2}})
    assert rows(file, "SELECT * FROM thing ORDER BY _id") == [("a", 1), ("b", 2)]


def test_a_file_that_is_moved_away_in_the_middle_of_a_batch(file: Path, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    away = file.rename(file.with_name("away"))
    with pytest.raises(BatcherError, match=r"The file .* was moved or deleted while dbsync kept it") as raised:
        batcher.batch_upsert("thing", {"b": {"n": 2}})
    assert raised.value.retryable
    assert rows(away, "SELECT * FROM thing") == [("a", 1)]


def test_another_file_in_its_place_is_not_written(file: Path, batcher: SqlBatcher) -> None:
    upsert(batcher, 10, "thing", {"a": {"n": 1}})
    file.rename(file.with_name("away"))
    rows(file, "CREATE TABLE theirs (n int)")
    with pytest.raises(BatcherError, match=r"The file .* is another one than dbsync has kept in step") as raised:
        upsert(batcher, 20, "thing", {"b": {"n": 2}})
    assert not raised.value.retryable
    assert rows(file, "SELECT name FROM sqlite_master") == [("theirs",)]
    batcher.close()
    assert batcher.position() is None  # a start takes what is there


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(ConfigError, match=r"mysql://… needs the package pymysql") as raised:
        SqlBatcher("mysql://user:geheim@HOST/db")
    assert raised.value.hint == "pip install 'dbsync[mysql]'"
    for scheme in ("mysql+nobodys", "mariadb+mysqldb"):
        with pytest.raises(ConfigError, match=f"The driver that the target's URL names, {re.escape(scheme)}, is not"):
            SqlBatcher(f"{scheme}://user:geheim@HOST/db")


@pytest.mark.parametrize("url", ["mysql://user:geheim@HOST:port/db", "mysql:db", "sqlite:db"])
def test_a_url_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ConfigError, match="The target's URL cannot be read") as raised:
        SqlBatcher(url)
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("url", ["mysql://user:geheim@HOST/db?nonsense=1", "sqlite:///db?timeout=long"])
def test_an_option_the_driver_does_not_take(url: str) -> None:
    with pytest.raises(ConfigError, match=r"does not take the options behind the \? in its URL") as raised:
        SqlBatcher(url).position()
    assert "geheim" not in str(raised.value)


MEMORY = ["sqlite:///:memory:", "sqlite:///file::memory:?uri=true", "sqlite:///file:x?mode=memory&uri=true"]


@pytest.mark.parametrize("url", ["sqlite://", *MEMORY, "mysql://user:geheim@HOST"])
def test_a_url_that_names_no_database(url: str) -> None:
    with pytest.raises(ConfigError, match="names no database") as raised:
        SqlBatcher(url)
    assert "geheim" not in str(raised.value)
