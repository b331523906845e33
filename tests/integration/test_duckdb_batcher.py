"""The DuckDB Batcher, fed by the real engine and by hand: types, replay, truncate, position."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pytest
from filetargets import NUMERIC_12_2, column, no_room_beyond, opened, relation, waits_for_permission
from filetargets import apply as changed
from fix_postgres import Database
from pyspark.sql import SparkSession

from dbsync.batcher import BatchInfo
from dbsync.batcher.duckdb import DuckDBBatcher
from dbsync.batcher.urls import TargetOptions
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.syncer import Syncer
from dbsync.values import compile


@pytest.fixture
def batcher(tmp_path: Path) -> Iterator[DuckDBBatcher]:
    target = DuckDBBatcher(tmp_path / "target.duckdb")
    yield target
    target.close()


def rows(batcher: DuckDBBatcher, query: str) -> list[tuple[Any, ...]]:
    with batcher.cursor() as cursor:
        return cursor.execute(query).fetchall()


def types(batcher: DuckDBBatcher, table: str) -> dict[str, str]:
    return dict(rows(batcher, f"SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = '{table}'"))


def batch(last: int) -> BatchInfo:
    return BatchInfo(last, LSN(last), LSN(last))


def apply(batcher: DuckDBBatcher, last: int, doctype: str, docs: dict[str, dict[str, Any]]) -> None:
    batcher.begin(batch(last))
    batcher.batch_upsert(doctype, docs)
    batcher.commit(batch(last))


TABLE = """
CREATE TABLE kinds (
    id int PRIMARY KEY, small int2, big int8, real4 float4, real8 float8, exact numeric(12, 2), free numeric, flag bool,
    words text, raw bytea, day date, clock time, moment timestamp, at_zone timestamptz, uid uuid, span interval,
    doc jsonb, list int[], address inet
)
"""

ONE = """
INSERT INTO kinds VALUES (
    1, 2, 9007199254740993, 0.5, 'NaN', 1234567890.12, 1e30, true, 'ünïcode', '\\x00ff', '2024-02-29', '10:11:12.5',
    '2024-02-29 10:11:12.123456', '2024-02-29 10:11:12+02', '00000000-0000-0000-0000-000000000001', '1 day 02:03:04',
    '{"a": [1, null]}', '{1,2}', '10.0.0.1'
)
"""


def test_types_round_trip(database: Database, spark: SparkSession, batcher: DuckDBBatcher) -> None:
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION dbsync_mypub FOR ALL TABLES")
    with Syncer(database.settings(), batcher=batcher, spark=spark) as syncer:
        database.execute(ONE)
        syncer.drain()
        assert types(batcher, "kinds") == {
            "_id": "VARCHAR", "id": "INTEGER", "small": "SMALLINT", "big": "BIGINT", "real4": "FLOAT",
            "real8": "DOUBLE", "exact": "DECIMAL(12,2)", "free": "VARCHAR", "flag": "BOOLEAN", "words": "VARCHAR",
            "raw": "BLOB", "day": "DATE", "clock": "TIME", "moment": "TIMESTAMP", "at_zone": "TIMESTAMP WITH TIME ZONE",
            "uid": "UUID", "span": "INTERVAL", "doc": "VARCHAR", "list": "VARCHAR", "address": "VARCHAR",
        }  # fmt: skip
        (found,) = rows(
            batcher,
            "SELECT * REPLACE (moment::text AS moment, at_zone::text AS at_zone, real8::text AS real8)"
            " FROM public.kinds",
        )
        assert found == (
            "1", 1, 2, 9007199254740993, 0.5, "nan", Decimal("1234567890.12"), "1" + "0" * 30, True, "ünïcode",
            b"\x00\xff", date(2024, 2, 29), time(10, 11, 12, 500000), "2024-02-29 10:11:12.123456",
            "2024-02-29 08:11:12+00", UUID(int=1), timedelta(days=1, hours=2, minutes=3, seconds=4),
            '{"a": [1, null]}', "[1, 2]", "10.0.0.1",
        )  # fmt: skip
        _values_python_has_no_place_for(database, syncer, batcher)
        _columns_that_change(database, syncer, batcher)
        _truncate_and_delete(database, syncer, batcher)


def _values_python_has_no_place_for(database: Database, syncer: Syncer, batcher: DuckDBBatcher) -> None:
    database.execute(
        "INSERT INTO kinds (id, exact, day, clock, moment, at_zone, span) VALUES"
        " (2, 'NaN', '0044-03-15 BC', '24:00', 'infinity', '294276-01-01 00:00:00+00', '-1 mon +2 days')"
    )
    syncer.drain()
    # What DuckDB has too keeps its type; the numeric and the far timestamp make their columns text.
    found = rows(
        batcher, "SELECT exact, day::text, clock::text, moment::text, at_zone, span::text FROM public.kinds ORDER BY id"
    )
    assert found == [
        ("1234567890.12", "2024-02-29", "10:11:12.5", "2024-02-29 10:11:12.123456", "2024-02-29 08:11:12+00",
         "1 day 02:03:04"),
        ("NaN", "0044-03-15 (BC)", "24:00:00", "infinity", "294276-01-01 00:00:00+00", "-1 month 2 days"),
    ]  # fmt: skip


def _columns_that_change(database: Database, syncer: Syncer, batcher: DuckDBBatcher) -> None:
    database.execute(
        "ALTER TABLE kinds ADD COLUMN note text, ALTER COLUMN small TYPE int8, ALTER COLUMN words TYPE varchar(99)"
    )
    database.execute("UPDATE kinds SET note = 'new', small = 5000000000 WHERE id = 2")
    syncer.drain()
    assert rows(batcher, "SELECT id, small, words, note FROM public.kinds ORDER BY id") == [
        (1, 2, "ünïcode", None),
        (2, 5000000000, None, "new"),
    ]


def _truncate_and_delete(database: Database, syncer: Syncer, batcher: DuckDBBatcher) -> None:
    with database.connect() as connection, connection.transaction():
        connection.execute("TRUNCATE kinds")
        connection.execute("INSERT INTO kinds (id) VALUES (2), (3), (4)")
        connection.execute("DELETE FROM kinds WHERE id = 3")
    syncer.drain()
    before = batcher.position()
    database.execute("DELETE FROM kinds WHERE id = 4")
    syncer.drain()
    assert rows(batcher, "SELECT _id, exact FROM public.kinds") == [("2", None)]
    assert before is not None
    assert (batcher.position() or LSN(0)) > before


def test_a_replay_changes_nothing(batcher: DuckDBBatcher) -> None:
    for _ in range(2):
        batcher.begin(batch(20))
        batcher.batch_delete("shop.thing", ["gone"])
        batcher.batch_upsert("shop.thing", {"a": {"n": 1}, "b": {"n": 2}})
        batcher.commit(batch(20))
        assert rows(batcher, "SELECT * FROM shop.thing ORDER BY _id") == [("a", 1), ("b", 2)]
    apply(batcher, 10, "shop.thing", {"a": {"n": 1}})
    assert batcher.position() == LSN(20)


def test_a_batch_is_whole_or_not_there(batcher: DuckDBBatcher, tmp_path: Path) -> None:
    assert batcher.position() is None
    apply(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.begin(batch(20))
    batcher.batch_truncate("thing")
    batcher.batch_upsert("thing", {"b": {"n": "text", "more": 1.5}})
    assert rows(batcher, "SELECT * FROM thing") == [("a", 1)]
    batcher.begin(batch(20))
    batcher.batch_upsert("thing", {"c": {"n": 3}})
    batcher.commit(batch(20))
    batcher.begin(batch(30))
    batcher.batch_delete("thing", ["a", "c"])
    batcher.close()
    assert rows(batcher, "SELECT * FROM thing ORDER BY _id") == [("a", 1), ("c", 3)]
    assert batcher.position() == LSN(20)


def test_documents_of_a_handler(batcher: DuckDBBatcher) -> None:
    at = datetime(2024, 1, 2, tzinfo=UTC)
    apply(batcher, 1, "thing", {"a": {"n": 1, "moment": at, "tags": ["x"], "void": None}, "b": {"n": 2}})
    apply(batcher, 2, "thing", {"a": {"n": 2**70, "moment": "infinity"}, "c": {"n": 0.5, "void": True}})
    assert types(batcher, "thing") == {
        "_id": "VARCHAR", "n": "VARCHAR", "moment": "TIMESTAMP WITH TIME ZONE", "tags": "VARCHAR", "void": "BOOLEAN",
    }  # fmt: skip
    assert rows(batcher, "SELECT * REPLACE (moment::text AS moment) FROM thing ORDER BY _id") == [
        ("a", str(2**70), "infinity", None, None),
        ("b", "2", None, None, None),
        ("c", "0.5", None, None, True),
    ]


def test_a_name_duckdb_cannot_tell_from_another(batcher: DuckDBBatcher) -> None:
    apply(batcher, 1, "shop.thing", {"a": {"n": 1}})
    for doctype, doc in (("shop.Thing", {"n": 1}), ("shop.thing", {"N": 1})):
        batcher.begin(batch(2))
        with pytest.raises(BatcherError, match="upper from lower case") as raised:
            batcher.batch_upsert(doctype, {"a": doc})
        assert not raised.value.retryable


@pytest.mark.parametrize("name", ["_id", "_ID", "_deleted_at"])
def test_a_column_that_is_named_like_ours(tmp_path: Path, name: str) -> None:
    with opened(batcher := DuckDBBatcher(tmp_path / "target.duckdb", soft_delete=True)):
        with pytest.raises(
            BatcherError, match=f"shop.thing has a column {name}, which is a name of dbsync's"
        ) as raised:
            apply(batcher, 1, "shop.thing", {"a": {name: 1}})
        assert not raised.value.retryable


def test_soft_deletes(batcher: DuckDBBatcher, tmp_path: Path) -> None:
    apply(batcher, 10, "thing", {"old": {"n": 0}})
    batcher.close()
    with opened(batcher := DuckDBBatcher(tmp_path / "target.duckdb", soft_delete=True)):
        apply(batcher, 20, "thing", {"a": {"n": 1}, "b": {"n": 2}})
        changed(batcher, 30, "thing", deletes=["a", "old", "nobody"])
        first = dict(rows(batcher, "SELECT _id, _deleted_at::text FROM thing"))
        assert {id for id, at in first.items() if at} == {"a", "old"}
        changed(batcher, 40, "thing", {"a": {"n": 11}}, deletes=["old"])  # one comes back, one is deleted again
        assert rows(batcher, "SELECT _id, n, _deleted_at::text FROM thing ORDER BY _id") == [
            ("a", 11, None),
            ("b", 2, None),
            ("old", 0, first["old"]),
        ]
        changed(batcher, 50, "thing", {"b": {"n": 22}}, truncates=True)
        assert rows(batcher, "SELECT _id FROM thing WHERE _deleted_at IS NULL") == [("b",)]
        assert rows(batcher, "SELECT n, _deleted_at::text FROM thing WHERE _id = 'old'") == [(0, first["old"])]
        changed(batcher, 60, "never seen", deletes=["a"], truncates=True)


@pytest.mark.parametrize("drop_columns", [False, True])
def test_a_column_the_source_dropped(tmp_path: Path, *, drop_columns: bool) -> None:
    before = relation(column("n", 20), column("gone", 25), column("stays", 25))
    after = relation(column("n", 20), column("stays", 25))
    with opened(batcher := DuckDBBatcher(tmp_path / "target.duckdb", drop_columns=drop_columns)):
        changed(batcher, 10, docs={"1": {"n": 1, "gone": "x", "stays": "y"}, "2": {"n": 2}}, of=[before])
        changed(batcher, 20, docs={"1": {"n": 1, "stays": "z"}}, of=[after])
        gone = {} if drop_columns else {"gone": "VARCHAR"}
        assert types(batcher, "thing") == {"_id": "VARCHAR", "n": "BIGINT", **gone, "stays": "VARCHAR"}
        assert rows(batcher, "SELECT _id, n, stays FROM public.thing ORDER BY _id") == [("1", 1, "z"), ("2", 2, None)]


def test_a_type_that_grows_and_one_that_shrinks(batcher: DuckDBBatcher) -> None:
    small = relation(*(column(name, oid, modifier) for name, oid, modifier in (
        ("n", 21, -1), ("whole", 23, -1), ("price", 1700, NUMERIC_12_2), ("real", 700, -1), ("day", 1082, -1),
        ("empty", 16, -1), ("id", 26, -1),
    )))  # fmt: skip
    large = relation(*(column(name, oid, modifier) for name, oid, modifier in (
        ("n", 20, -1), ("whole", 1700, NUMERIC_12_2), ("price", 1700, ((20 << 16) | 4) + 4), ("real", 701, -1),
        ("day", 1114, -1), ("empty", 2950, -1), ("id", 20, -1),
    )))  # fmt: skip
    first = {"n": 1, "whole": 2, "price": Decimal("1.50"), "real": 0.5, "day": date(2024, 2, 29), "id": 2**32 - 1}
    first["empty"] = None
    changed(batcher, 10, docs={"1": first}, of=[small])
    changed(batcher, 20, docs={"2": first | {"n": 2**40}}, of=[large])
    grown = {
        "_id": "VARCHAR", "n": "BIGINT", "whole": "DECIMAL(12,2)", "price": "DECIMAL(20,4)", "real": "DOUBLE",
        "day": "TIMESTAMP", "empty": "UUID", "id": "BIGINT",
    }  # fmt: skip
    assert types(batcher, "thing") == grown
    changed(batcher, 30, docs={"3": first}, of=[relation(*(it for it in small.columns if it.name in ("n", "price")))])
    assert types(batcher, "thing") == grown  # what is here has room for less
    assert rows(batcher, "SELECT n, price FROM public.thing ORDER BY n") == [
        (1, Decimal("1.5000")),
        (1, Decimal("1.5000")),
        (2**40, Decimal("1.5000")),
    ]


def test_a_type_that_cannot_follow_names_the_column(batcher: DuckDBBatcher) -> None:
    changed(batcher, 10, docs={"1": {"n": 1}}, of=[relation(column("n", 23))])
    with pytest.raises(
        BatcherError, match=r"column n of public\.thing is INTEGER in the target, and .* DATE, cannot"
    ) as no:
        changed(batcher, 20, docs={"2": {"n": date(2024, 2, 29)}}, of=[relation(column("n", 1082))])
    assert not no.value.retryable
    assert types(batcher, "thing") == {"_id": "VARCHAR", "n": "INTEGER"}
    with batcher.cursor() as cursor:
        cursor.execute("ALTER TABLE public.thing DROP n")
    changed(batcher, 20, docs={"2": {"n": date(2024, 2, 29)}}, of=[relation(column("n", 1082))])
    assert rows(batcher, "SELECT * FROM public.thing ORDER BY _id") == [("1", None), ("2", date(2024, 2, 29))]


def test_what_stands_in_the_way_of_a_change_is_said(batcher: DuckDBBatcher) -> None:
    changed(batcher, 10, docs={"1": {"n": 1}}, of=[relation(column("n", 21))])
    with batcher.cursor() as cursor:
        cursor.execute("CREATE INDEX mine ON public.thing (n)")
    with pytest.raises(BatcherError, match=r"cannot be written: .*depends on it\. Drop what depends on") as no:
        changed(batcher, 20, docs={"1": {"n": 2**40}}, of=[relation(column("n", 20))])
    assert not no.value.retryable


def test_what_becomes_text_becomes_what_postgres_writes(batcher: DuckDBBatcher) -> None:
    texts = {
        "flag": (16, "true"), "raw": (17, "\\x00ff5c"), "single": (700, "0.5"), "double": (701, "-Infinity"),
        "none": (701, "NaN"), "day": (1082, "0044-03-15 BC"), "moment": (1114, "0044-03-15 10:00:00 BC"),
        "at_zone": (1184, "2024-02-29 08:11:12.5+00"), "clock": (1083, "10:11:12.5"), "span": (1186, "1 mon 2 days"),
        "number": (1700, "NaN"),
    }  # fmt: skip
    declared = [column(name, oid, NUMERIC_12_2 if oid == 1700 else -1) for name, (oid, _) in texts.items()]
    doc = {it.name: compile(it.spec)(texts[it.name][1]) for it in declared}
    changed(batcher, 10, docs={"1": doc}, of=[relation(*declared)])
    was = types(batcher, "thing")
    assert {name for name, type in was.items() if type == "VARCHAR"} == {"_id", "number"}
    changed(batcher, 20, docs={"2": dict.fromkeys(texts)}, of=[relation(*(column(name, 25) for name in texts))])
    assert set(types(batcher, "thing").values()) == {"VARCHAR"}
    (held,) = rows(batcher, f"SELECT {', '.join(texts)} FROM public.thing WHERE _id = '1'")
    assert dict(zip(texts, held, strict=True)) == {name: text for name, (_, text) in texts.items()}


def test_each_log_has_a_position_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "target.duckdb"
    with opened(batcher := DuckDBBatcher(file), "one"):
        apply(batcher, 100, "thing", {"a": {"n": 1}})
    with opened(batcher := DuckDBBatcher(file), "two") as position:
        assert position is None
        apply(batcher, 10, "thing", {"b": {"n": 2}})
    with opened(DuckDBBatcher(file), "one") as position:
        assert position == LSN(100)


def test_a_file_from_before_positions_had_names_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "target.duckdb"
    with duckdb.connect(str(file)) as old:
        old.execute("CREATE SCHEMA _dbsync")
        old.execute("CREATE TABLE _dbsync.position (lsn VARCHAR NOT NULL)")
        old.execute("INSERT INTO _dbsync.position VALUES ('0/64')")
    with opened(batcher := DuckDBBatcher(file), "one") as position:
        assert position == LSN(100)
        apply(batcher, 110, "thing", {"a": {"n": 1}})
    with opened(DuckDBBatcher(file), "one") as position:
        assert position == LSN(110)
    with opened(DuckDBBatcher(file), "two") as position:
        assert position is None


def test_its_address(tmp_path: Path) -> None:
    batcher = DuckDBBatcher.from_url(f"duckdb:///{tmp_path / 'x.duckdb'}", TargetOptions(soft_delete=True))
    with opened(batcher):
        apply(batcher, 10, "thing", {"a": {"n": 1}})
        changed(batcher, 20, "thing", deletes=["a"])
        assert rows(batcher, "SELECT _id, _deleted_at IS NULL FROM thing") == [("a", False)]
    for url in ("duckdb:", "duckdb:file", "duckdb:///", "duckdb://file"):
        with pytest.raises(ConfigError, match="is written duckdb:///FILE"):
            DuckDBBatcher.from_url(url, TargetOptions())


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    docs = {str(n): {"n": n, "words": str(n) * 200} for n in range(3_000)}
    with opened(batcher := DuckDBBatcher(tmp_path / "target.duckdb")):
        apply(batcher, 10, "thing", {"0": {"n": 0}})
        with (
            no_room_beyond(500_000),
            pytest.raises(BatcherError, match=r"The DuckDB file .* cannot be written") as raised,
        ):
            apply(batcher, 20, "thing", docs)
        assert raised.value.retryable
        apply(batcher, 20, "thing", docs)
        assert rows(batcher, "SELECT count(*) FROM thing") == [(len(docs),)]


def test_a_schema_that_is_named_like_the_file(batcher: DuckDBBatcher) -> None:
    apply(batcher, 1, 'target.my "table"', {"a": {'a "column"': 1}})
    assert rows(batcher, 'SELECT * FROM target.target."my ""table"""') == [("a", 1)]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("hello " * 5_000)
    with opened(DuckDBBatcher(tmp_path / "damaged")):
        pass
    damaged = bytearray((tmp_path / "damaged").read_bytes())
    damaged[100:2_000] = bytes(1_900)
    (tmp_path / "damaged").write_bytes(damaged)
    for path, words, hint, retryable in (
        ("missing/target", "No such file or directory", "Check that its folder is there.", True),
        (
            "words",
            "exists, but it is not a valid DuckDB database file",
            "Name another file, or put this one away.",
            False,
        ),
        ("", "Is a directory", "Name a file.", False),
        ("damaged", "Corrupt database file", "Put it away, and copy into a new one.", False),
    ):
        with pytest.raises(BatcherError, match=r"^The DuckDB file [^\n]* cannot be opened: [^\n]*[^.!]\. ") as raised:
            DuckDBBatcher(tmp_path / path).position()
        assert words in raised.value.message
        assert (raised.value.hint, raised.value.retryable) == (hint, retryable)


def test_a_file_that_another_process_has_is_waited_for(tmp_path: Path, batcher: DuckDBBatcher) -> None:
    holds = (
        f"import duckdb; kept = duckdb.connect({str(tmp_path / 'target.duckdb')!r}); print('here', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(
            BatcherError, match=r"cannot be opened: Could not set lock on file [^\n]*\)\. One"
        ) as raised:
            batcher.position()
        assert raised.value.hint == "One process at a time can write to it: close it elsewhere."
        assert raised.value.retryable
        other.communicate(b"\n")
    apply(batcher, 10, "thing", {"a": {"n": 1}})


def test_a_file_in_a_folder_that_may_not_be_written() -> None:
    refused = waits_for_permission("duckdb:///{}/target.duckdb")
    assert re.fullmatch(r"The DuckDB file [^\n]+ cannot be opened: [^\n]+: Permission denied\.", refused["message"])
    assert refused["hint"] == "Check that it and its folder may be written, by the user dbsync runs as."
    assert not refused["retryable"]


def test_what_would_be_gone_with_the_process_is_refused() -> None:
    for path in (":memory:", ":memory:named"):
        with pytest.raises(ConfigError, match=r"DuckDB's :memory: is gone when dbsync ends"):
            DuckDBBatcher.from_url(f"duckdb:///{path}", TargetOptions())


@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_a_file_that_is_moved_away_and_comes_back(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "target.duckdb"
    moved = file if what == "the file" else folder
    with opened(batcher := DuckDBBatcher(file)):
        apply(batcher, 10, "thing", {"a": {"n": 1}})
        away = moved.rename(tmp_path / "away")
        for last in (20, 30):
            with pytest.raises(BatcherError, match=r"The file .* was moved or deleted while dbsync kept it") as raised:
                apply(batcher, last, "thing", {"b": {"n": last}})
            assert raised.value.retryable
        assert not file.exists()  # an empty one in its place would take the batch
        away.rename(moved)
        apply(batcher, 20, "thing", {"b": {"n": 20}})
        assert rows(batcher, "SELECT * FROM thing ORDER BY _id") == [("a", 1), ("b", 20)]


def test_a_file_that_is_moved_away_in_the_middle_of_a_batch(tmp_path: Path, batcher: DuckDBBatcher) -> None:
    apply(batcher, 10, "thing", {"a": {"n": 1}})
    batcher.begin(batch(20))
    batcher.batch_upsert("thing", {"b": {"n": 2}})
    away = (tmp_path / "target.duckdb").rename(tmp_path / "away")
    with pytest.raises(BatcherError, match=r"The file .* was moved or deleted while dbsync kept it"):
        batcher.commit(batch(20))
    with duckdb.connect(str(away)) as db:
        assert db.execute("SELECT * FROM thing").fetchall() == [("a", 1)]


def test_another_file_in_its_place_is_not_written(tmp_path: Path, batcher: DuckDBBatcher) -> None:
    file = tmp_path / "target.duckdb"
    apply(batcher, 10, "thing", {"a": {"n": 1}})
    file.rename(tmp_path / "away")
    with duckdb.connect(str(tmp_path / "theirs")) as theirs:
        theirs.execute("CREATE TABLE theirs (n INTEGER)")
    (tmp_path / "theirs").rename(file)
    with pytest.raises(BatcherError, match=r"The file .* is another one than dbsync has kept in step") as raised:
        apply(batcher, 20, "thing", {"b": {"n": 2}})
    assert not raised.value.retryable
    batcher.close()
    assert batcher.position() is None  # a start takes what is there
    assert rows(batcher, "SELECT table_name FROM duckdb_tables()") == [("theirs",)]


def test_duckdb_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"A DuckDB file needs the package duckdb") as raised:
        DuckDBBatcher(tmp_path / "target.duckdb")
    assert raised.value.hint == "pip install 'dbsync[duckdb]'"
