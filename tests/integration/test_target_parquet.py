"""A change log in Parquet as `--to`: whole files, every batch once, types that fit together."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from filetargets import (
    ITEMS,
    KINDS,
    NUMERIC_12_2,
    ODD,
    OTHERS,
    VALUES,
    apply,
    column,
    goes_away_and_comes_back,
    killed_everywhere,
    no_room_beyond,
    odd,
    opened,
    ordinary,
    relation,
    waits_for_permission,
)
from fix_postgres import Database
from fix_target import COLUMNS, Rows, Target, survives, waits_for_what_is_away
from pyspark.sql import SparkSession

from dbsync import Syncer
from dbsync.batcher.folder import file_name
from dbsync.batcher.parquet import ParquetBatcher
from dbsync.batcher.urls import TargetOptions
from dbsync.errors import BatcherError, ConfigError


def log(folder: Path, doctype: str = "public.thing") -> list[dict[str, Any]]:
    """All that happened to a type, in its order, as one dataset."""
    files = sorted((folder / file_name(doctype)).glob("*.parquet"))
    schema = pa.unify_schemas([ds.dataset(file).schema for file in files], promote_options="permissive")
    rows: list[dict[str, Any]] = ds.dataset(folder / file_name(doctype), schema).to_table().sort_by("_seq").to_pylist()
    return rows


def final(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    docs: dict[str, dict[str, Any]] = {}
    for row in rows:
        match row["_op"]:
            case "upsert":
                docs[row["_id"]] = row
            case "delete":
                docs.pop(row["_id"], None)
            case "truncate":
                docs.clear()
    return docs


def test_parquet_survives(database: Database, tmp_path: Path) -> None:
    def read(table: str) -> Rows:
        told = log(tmp_path / "log", f"public.{table}")
        docs = told if table == "events" else final(told).values()
        return sorted(
            tuple(str(doc[name]) if name == "total" else doc[name] for name in COLUMNS[table]) for doc in docs
        )

    survives(database, Target(f"parquet:{tmp_path / 'log'}?rotate_bytes=200kB&rotate_seconds=1", read))
    counted = [row["_seq"] for table in COLUMNS for row in log(tmp_path / "log", f"public.{table}")]
    assert sorted(counted) == list(range(1, len(counted) + 1))


@pytest.mark.parametrize("step", [149, pytest.param(7, marks=pytest.mark.long)])
def test_a_kill_at_any_line_repeats_nothing_and_loses_nothing(tmp_path: Path, step: int) -> None:
    whole, *others = killed_everywhere("dbsync.batcher.parquet:ParquetBatcher", tmp_path, step)
    wanted = [log(whole, table.doctype) for table in (ITEMS, OTHERS)]
    assert sorted(row["_seq"] for rows in wanted for row in rows) == list(range(1, sum(map(len, wanted)) + 1))
    assert len(others) > 15
    for folder in others:
        assert [log(folder, table.doctype) for table in (ITEMS, OTHERS)] == wanted
        assert list((folder / "_dbsync").glob("*.part")) == []


def test_values_keep_their_types(tmp_path: Path) -> None:
    with opened(batcher := ParquetBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": ordinary(), "2": odd()}, of=[KINDS])
    one, two = log(tmp_path)
    assert {name: one[name] for name in one if name[0] != "_"} == {name: value for name, *_, value, _ in VALUES}
    assert one["_text"] is None
    assert {name: value for name, value in two.items() if name[0] != "_" and value is not None} == {}
    assert json.loads(two["_text"]) == ODD
    types = {field.name: str(field.type) for field in ds.dataset(tmp_path / "public.thing").schema}
    assert {name: types[name] for name in ("small", "single", "exact", "free", "moment", "at_zone", "clock")} == {
        "small": "int16",
        "single": "float",
        "exact": "decimal128(12, 2)",
        "free": "string",
        "moment": "timestamp[us]",
        "at_zone": "timestamp[us, tz=UTC]",
        "clock": "time64[us]",
    }


def test_columns_that_come_go_and_change(tmp_path: Path) -> None:
    old = relation(column("n", 23), column("gone", 25))
    new = relation(column("n", 20), column("come", 1700, NUMERIC_12_2))
    with opened(batcher := ParquetBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1, "gone": "x"}}, of=[old])
        apply(batcher, 20, docs={"1": {"n": 2**40, "come": Decimal("1.50")}}, of=[new])
        apply(batcher, 30, deletes=["1"], of=[new])
    assert len(list((tmp_path / "public.thing").iterdir())) == 2
    told = [(row["_op"], row["_lsn"], row["n"], row["gone"], row["come"]) for row in log(tmp_path)]
    assert told == [
        ("upsert", 10, 1, "x", None),
        ("upsert", 20, 2**40, None, Decimal("1.50")),
        ("delete", 30, None, None, None),
    ]


def test_documents_nobody_declared_keep_the_types_they_had_first(tmp_path: Path) -> None:
    for last, value in ((10, 1), (20, "text"), (30, True), (40, 2**70)):
        with opened(batcher := ParquetBatcher(tmp_path)):
            apply(batcher, last, "thing", {"1": {"n": value, "void": None}})
    assert [(row["n"], row["_text"]) for row in log(tmp_path, "thing")] == [
        (1, None),
        (None, '{"n": "text"}'),
        (None, '{"n": "true"}'),
        (None, f'{{"n": "{2**70}"}}'),
    ]
    assert all("void" not in row for row in log(tmp_path, "thing"))


NAMES = [
    "shop.thing",
    "my table",
    "a/b",
    "../up",
    ".hidden",
    "_dbsync",
    'a "quoted" one',
    "Ünï",
    "",
    "x" * 300,
    "~",
    "a.b.c",
]


def test_every_type_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with opened(batcher := ParquetBatcher(folder)):
        for last, name in enumerate([*NAMES, "x" * 301], 1):
            apply(batcher, last, name, {"1": {"n": last}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
    assert len(list(folder.iterdir())) == len(NAMES) + 2
    assert all(
        len(path.name) < 256 and (path.name == "_dbsync" or path.name[0] not in "._") for path in folder.iterdir()
    )
    for last, name in enumerate([*NAMES, "x" * 301], 1):
        assert [row["n"] for row in log(folder, name)] == [last]


@pytest.mark.parametrize("name", ["_id", "_op", "_lsn", "_seq", "_text", "_ID"])
def test_a_column_that_is_named_like_ours(tmp_path: Path, name: str) -> None:
    with opened(batcher := ParquetBatcher(tmp_path)):
        with pytest.raises(
            BatcherError, match=f"public.thing has a column {name}, which is a name of dbsync's"
        ) as raised:
            apply(batcher, 10, docs={"1": {name: 1}})
        assert not raised.value.retryable
        assert f"--exclude-columns public.thing.{name}" in (raised.value.hint or "")


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    docs = {str(n): {"n": n} for n in range(500)}
    with opened(batcher := ParquetBatcher(tmp_path)):
        apply(batcher, 10, docs={str(n): {"n": n} for n in range(50)}, of=[ITEMS])
        with no_room_beyond(2_000), pytest.raises(BatcherError, match="cannot be used: File too large") as raised:
            apply(batcher, 20, docs=docs, of=[ITEMS])
        assert raised.value.retryable
        apply(batcher, 20, docs=docs, of=[ITEMS])
    assert [row["_seq"] for row in log(tmp_path)] == list(range(1, 551))


def test_what_a_full_disk_cut_in_two_is_never_published(tmp_path: Path) -> None:
    """By then the journal is large enough for readers, but what makes it so does not count."""
    docs = {str(n): {"n": n} for n in range(500)}
    with opened(batcher := ParquetBatcher(tmp_path, rotate_bytes=3_000)):
        apply(batcher, 10, docs={"0": {"n": 0}}, of=[ITEMS])
        with no_room_beyond(6_000):
            for _ in range(2):
                with pytest.raises(BatcherError, match="cannot be used: File too large"):
                    apply(batcher, 20, docs=docs, of=[ITEMS])
        assert not (tmp_path / "public.thing").exists()
        apply(batcher, 20, docs=docs, of=[ITEMS])
        assert len(log(tmp_path)) == 501  # in the same process, as soon as there is room
    assert [(row["_seq"], row["_lsn"]) for row in log(tmp_path)] == [(1, 10), *((seq, 20) for seq in range(2, 502))]


def test_a_folder_that_may_not_be_written() -> None:
    refused = waits_for_permission("parquet:{}")
    assert re.fullmatch(r"The target folder [^\n]+ cannot be used: Permission denied\.", refused["message"])
    assert "that dbsync may write to it" in refused["hint"]
    assert refused["retryable"]


def test_while_it_is_away_nothing_is_missed(
    database: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits_for_what_is_away(database, ParquetBatcher(tmp_path / "target"), tmp_path / "target", spark, caplog)
    held = final(log(tmp_path / "target", "public.t"))
    assert {id: row["a"] for id, row in held.items()} == {"1": 3, "4": 4}


def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    goes_away_and_comes_back(ParquetBatcher, tmp_path / "target")
    assert [row["_op"] for row in log(tmp_path / "target")] == ["upsert", "delete", "upsert"]


def test_a_file_that_cannot_be_written_yet_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "public.thing").write_text("in the way")
    with opened(batcher := ParquetBatcher(tmp_path, rotate_bytes=1)):
        apply(batcher, 10, docs={"1": {"n": 1}})  # it counts: the journal has it
        with pytest.raises(BatcherError, match="cannot be used: File exists"):
            apply(batcher, 20, docs={"2": {"n": 2}})
        (tmp_path / "public.thing").unlink()
        apply(batcher, 20, docs={"2": {"n": 2}})
    assert [(row["_id"], row["_seq"]) for row in log(tmp_path)] == [("1", 1), ("2", 2)]


def test_an_address_that_cannot_be_meant(tmp_path: Path) -> None:
    for url in ("parquet:", "parquet://host/x", "parquet:log?compression=zstd"):
        with pytest.raises(ConfigError, match=r"names no folder|does not know the option"):
            ParquetBatcher.from_url(url, TargetOptions())


def test_changes_of_a_table_without_a_key_say_what_happened(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE log (a int, b text); ALTER TABLE log REPLICA IDENTITY FULL;"
        "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION dbsync_mypub FOR TABLE log, t"
    )
    with Syncer(database.settings(to=f"parquet:{tmp_path}/out"), spark=spark) as syncer:
        database.execute("INSERT INTO log VALUES (1, 'x')")
        database.execute("UPDATE log SET b = 'y'")
        database.execute("DELETE FROM log")
        database.execute("INSERT INTO t VALUES (1)")
        syncer.drain()
    found = pq.read_table(tmp_path / "out" / "public.log").sort_by("_seq").to_pylist()
    told = [(row["_op"], row["a"], row["b"]) for row in found]
    assert told == [("insert", 1, "x"), ("update", 1, "y"), ("delete", 1, "y")]
    assert pq.read_table(tmp_path / "out" / "public.t").column("_op").to_pylist() == ["upsert"]
