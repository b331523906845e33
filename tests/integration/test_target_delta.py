"""Delta tables as `--to`: one commit a table and batch, and what comes again changes nothing."""

from __future__ import annotations

import importlib
import json
import re
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from filetargets import (
    ITEMS,
    KINDS,
    LOG,
    NUMERIC_12_2,
    ODD,
    OTHERS,
    VALUES,
    apply,
    batch,
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
from fix_target import COLUMNS, STAMP, Rows, Target, survives, waits_for_what_is_away
from pyspark.sql import SparkSession

from dbsync.batcher.delta import DeltaBatcher
from dbsync.batcher.folder import file_name
from dbsync.batcher.urls import TargetOptions
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN


def table(folder: Path, doctype: str = "public.thing") -> DeltaTable:
    return DeltaTable(str(folder / file_name(doctype)))


def rows(folder: Path, doctype: str = "public.thing") -> dict[str, dict[str, Any]]:
    return {row.pop("_id"): row for row in table(folder, doctype).to_pyarrow_table().to_pylist()}


def test_delta_survives(database: Database, tmp_path: Path) -> None:
    def read(name: str) -> Rows:
        found = rows(tmp_path / "lake", f"public.{name}").values()
        return sorted(tuple(str(row[c]) if c == "total" else row[c] for c in COLUMNS[name]) for row in found)

    def stamp() -> None:
        table(tmp_path / "lake", "public.events").update(updates={"note": f"'{STAMP}'"})

    survives(database, Target(f"delta:{tmp_path / 'lake'}", read, stamp=stamp))


@pytest.mark.parametrize("step", [149, pytest.param(11, marks=pytest.mark.long)])
def test_a_kill_at_any_line_ends_in_the_same_tables(tmp_path: Path, step: int) -> None:
    whole, *others = killed_everywhere("dbsync.batcher.delta:DeltaBatcher", tmp_path, step)
    wanted = [rows(whole, types.doctype) for types in (ITEMS, OTHERS)]
    assert [len(found) for found in wanted] == [10, 1]
    assert len(others) > 12
    for folder in others:
        assert [rows(folder, types.doctype) for types in (ITEMS, OTHERS)] == wanted
        assert table(folder).transaction_version(LOG) == 40


def test_a_batch_is_one_commit_of_each_table_it_touches(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1}, "2": {"n": 2}})
        before = table(tmp_path).version()
        batcher.begin(batch(20))
        batcher.batch_delete("public.thing", ["1"])
        for n in range(3, 6):
            batcher.batch_upsert("public.thing", {str(n): {"n": n}})
        assert set(rows(tmp_path)) == {"1", "2"}
        batcher.commit(batch(20))
        assert table(tmp_path).version() == before + 1
        assert set(rows(tmp_path)) == {"2", "3", "4", "5"}
        assert table(tmp_path).transaction_version(LOG) == 20
        apply(batcher, 30, "another", {"1": {"n": 1}})
        assert table(tmp_path).version() == before + 1
        assert batcher.position() == LSN(30)


def test_a_table_that_is_ahead_is_never_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between two tables, and then batches with other borders."""
    with opened(batcher := DeltaBatcher(tmp_path)):
        for name in ("a", "b"):
            apply(batcher, 10 if name == "a" else 11, name, {"1": {"n": 10}})
    with opened(batcher := DeltaBatcher(tmp_path)):
        batcher.begin(batch(20))
        for name in ("a", "b"):
            batcher.batch_delete(name, ["1"])
            batcher.batch_upsert(name, {"2": {"n": 20}})
        whole = DeltaBatcher._apply

        def broken(self: DeltaBatcher, doctype: str, *args: Any) -> None:
            if doctype == "b":
                raise KeyboardInterrupt
            whole(self, doctype, *args)

        monkeypatch.setattr(DeltaBatcher, "_apply", broken)
        with pytest.raises(KeyboardInterrupt):
            batcher.commit(batch(20))
        monkeypatch.undo()
    assert [list(rows(tmp_path, name)) for name in ("a", "b")] == [["2"], ["1"]]
    with opened(batcher := DeltaBatcher(tmp_path)) as position:
        assert position == LSN(11)
        for name in ("a", "b"):
            version = table(tmp_path, name).version()
            apply(batcher, 15, name, {"1": {"n": 15}})  # as it was before the delete at 20
            assert table(tmp_path, name).version() == version + (name == "b")
        assert [rows(tmp_path, name) for name in ("a", "b")] == [
            {"2": {"n": 20, "_text": None}},
            {"1": {"n": 15, "_text": None}},
        ]
        batcher.begin(batch(30))
        for name in ("a", "b"):
            batcher.batch_delete(name, ["1"])
            batcher.batch_upsert(name, {"2": {"n": 30}})
        batcher.commit(batch(30))
        assert [rows(tmp_path, name) for name in ("a", "b")] == [{"2": {"n": 30, "_text": None}}] * 2


def test_a_batch_that_was_cut_off_at_the_position_of_the_last_one_counts(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1}})
        apply(batcher, 10, docs={"2": {"n": 2}})
        for _ in range(2):
            apply(batcher, 20, docs={"3": {"n": 3}}, deletes=["1"])
    assert set(rows(tmp_path)) == {"2", "3"}


def test_each_log_has_a_position_of_its_own(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 100, docs={"1": {"n": 1}})
    with opened(batcher := DeltaBatcher(tmp_path), "another") as position:
        assert position is None
        apply(batcher, 10, docs={"2": {"n": 2}})
    with opened(DeltaBatcher(tmp_path)) as position:
        assert position == LSN(100)
    assert set(rows(tmp_path)) == {"1", "2"}


def test_values_keep_their_types(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": ordinary(), "2": odd()}, of=[KINDS])
    found = rows(tmp_path)
    wanted = {name: value for name, *_, value, _ in VALUES} | {"clock": "10:11:12.5"}  # Delta has no time of day
    assert found["1"] == {**wanted, "_text": None}
    assert {name: value for name, value in found["2"].items() if name != "_text" and value is not None} == {
        "clock": ODD["clock"]
    }
    assert json.loads(found["2"]["_text"]) == {name: value for name, value in ODD.items() if name != "clock"}


def types(folder: Path) -> dict[str, str]:
    return {field.name: str(field.type) for field in table(folder).to_pyarrow_dataset().schema if field.name[0] != "_"}


OLD = relation(column("n", 23), column("gone", 25), column("price", 1700, NUMERIC_12_2), column("day", 1082))
NEW = relation(
    column("n", 20), column("come", 16), column("price", 1700, ((20 << 16) | 4) + 4), column("day", 25),
)  # fmt: skip


@pytest.mark.parametrize("drop_columns", [False, True])
def test_columns_that_come_go_and_widen(tmp_path: Path, *, drop_columns: bool) -> None:
    old = {"n": 1, "gone": "x", "price": Decimal("1.50"), "day": date(2024, 2, 29)}
    new = {"n": 2**40, "come": True, "price": Decimal("1.2345"), "day": "any"}
    with opened(batcher := DeltaBatcher(tmp_path, drop_columns=drop_columns)):
        apply(batcher, 10, docs={"1": old, "2": old}, of=[OLD])
        apply(batcher, 20, docs={"2": new}, of=[NEW])
        version = table(tmp_path).version()
        apply(batcher, 30, docs={"3": new | {"n": 3}}, of=[NEW])
        assert table(tmp_path).version() == version + 1
        apply(batcher, 40, docs={"4": {"n": 4}}, of=[relation(column("n", 21))])  # narrower fits
    gone = {} if drop_columns else {"gone": "string"}
    kept = {} if drop_columns else {"price": "decimal128(20, 4)", "day": "string", "come": "bool"}
    assert types(tmp_path) == {"n": "int64", **gone, **kept}
    if not drop_columns:
        found = rows(tmp_path)
        assert found["1"] == {**old, "price": Decimal("1.5000"), "day": "2024-02-29", "come": None, "_text": None}
        assert found["2"] == {**new, "gone": None, "_text": None}
        assert found["4"]["price"] is None


def test_a_type_that_is_not_wider_is_refused(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1, "at": 1.5}}, of=[relation(column("n", 23), column("at", 701))])
        with pytest.raises(
            BatcherError, match=r"The column at of public.thing is timestamp.* now, and its double"
        ) as no:
            apply(batcher, 20, docs={"1": {"n": 1}}, of=[relation(column("n", 23), column("at", 1114))])
        assert not no.value.retryable
        assert rows(tmp_path) == {"1": {"n": 1, "at": 1.5, "_text": None}}
        assert batcher.position() == LSN(10)


def test_documents_nobody_declared(tmp_path: Path) -> None:
    at = datetime(2024, 1, 2, tzinfo=UTC)
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1, "at": at, "tags": ["x"], "void": None}})
        apply(batcher, 20, docs={"2": {"n": "text", "at": "infinity", "void": 0.5}})
    assert rows(tmp_path) == {
        "1": {"n": 1, "at": at, "tags": '["x"]', "void": None, "_text": None},
        "2": {"n": None, "at": None, "tags": None, "void": 0.5, "_text": '{"n": "text", "at": "infinity"}'},
    }


def test_soft_deletes(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 5, docs={"0": {"n": 0}}, of=[ITEMS])  # a table from before
    with opened(batcher := DeltaBatcher(tmp_path, soft_delete=True)):
        apply(batcher, 10, docs={str(n): {"n": n, "note": "x"} for n in range(1, 5)}, of=[ITEMS])
        apply(batcher, 20, deletes=["1", "2", "nobody"], of=[ITEMS])
        first = {id: row["_deleted_at"] for id, row in rows(tmp_path).items()}
        assert {id for id, at in first.items() if at} == {"1", "2"}
        apply(batcher, 30, docs={"2": {"n": 22, "note": "y"}}, deletes=["1"], of=[ITEMS])
        back = rows(tmp_path)
        assert back["1"]["_deleted_at"] == first["1"]
        assert back["2"] == {"n": 22, "note": "y", "_text": None, "_deleted_at": None}
        apply(batcher, 40, docs={"3": {"n": 33, "note": "z"}}, truncates=True, of=[ITEMS])
        apply(batcher, 50, OTHERS.doctype, truncates=True, of=[OTHERS])
        last = rows(tmp_path)
        assert {id for id, row in last.items() if row["_deleted_at"] is None} == {"3"}
        assert last["1"]["_deleted_at"] == first["1"]
        apply(batcher, 60, truncates=True, of=[ITEMS])
        assert all(row["_deleted_at"] for row in rows(tmp_path).values())


def test_a_truncate(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1}, "2": {"n": 2}}, of=[ITEMS])
        apply(batcher, 20, docs={"2": {"n": 22}}, deletes=["1"], truncates=True, of=[ITEMS])
        assert {id: row["n"] for id, row in rows(tmp_path).items()} == {"2": 22}
        apply(batcher, 30, truncates=True, of=[ITEMS])
        assert rows(tmp_path) == {}
        assert table(tmp_path).transaction_version(LOG) == 30
        apply(batcher, 40, deletes=["1"], of=[ITEMS])
        apply(batcher, 50, "never.seen", deletes=["1"], truncates=True)


def test_odd_names(tmp_path: Path) -> None:
    names = ["n", "with space", 'quo"ted', "dot.ted", "semi;colon,(x)", "Upper", "ünï", "select", "a'b", "x" * 63]
    doctypes = ['we/ird."tä ble".x', "y" * 300]
    with opened(batcher := DeltaBatcher(tmp_path)):
        for last in (10, 20):
            for doctype in doctypes:
                apply(batcher, last, doctype, {str(last): dict.fromkeys(names, last)}, deletes=["x"])
    for doctype in doctypes:
        assert rows(tmp_path, doctype) == {
            str(last): {**dict.fromkeys(names, last), "_text": None} for last in (10, 20)
        }


@pytest.mark.parametrize("name", ["_id", "_text", "_deleted_at", "_Deleted_At", "_ID", "back`tick"])
def test_a_column_delta_cannot_take(tmp_path: Path, name: str) -> None:
    with opened(batcher := DeltaBatcher(tmp_path, soft_delete=True)):
        with pytest.raises(BatcherError, match=f"column {name}") as raised:
            apply(batcher, 10, docs={"1": {name: 1}})
        assert not raised.value.retryable
        assert "--exclude-columns" in (raised.value.hint or "")


def test_a_column_that_would_be_ours_if_rows_stayed(tmp_path: Path) -> None:
    theirs = relation(column("n", 20), column("_deleted_at", 1114))
    at = datetime(2024, 1, 2)  # noqa: DTZ001
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1, "_deleted_at": at}, "2": {"n": 2, "_deleted_at": None}}, of=[theirs])
        apply(batcher, 20, docs={"2": {"n": 2, "_deleted_at": at}, "3": {"n": 3}}, deletes=["1"], of=[theirs])
        assert {id: row["_deleted_at"] for id, row in rows(tmp_path).items()} == {"2": at, "3": None}
        apply(batcher, 30, docs={"4": {"n": 4, "_deleted_at": at}}, truncates=True, of=[theirs])
        assert {id: row["_deleted_at"] for id, row in rows(tmp_path).items()} == {"4": at}


def test_rows_that_come_back_when_nothing_is_kept_any_more(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path, soft_delete=True)):
        apply(batcher, 10, docs={"1": {"n": 1}, "2": {"n": 2}}, of=[ITEMS])
        apply(batcher, 20, deletes=["1", "2"], of=[ITEMS])
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 30, docs={"1": {"n": 1}}, deletes=["2"], of=[ITEMS])
    assert {id: row["_deleted_at"] for id, row in rows(tmp_path).items()} == {"1": None}


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.delitem(sys.modules, "dbsync.batcher.delta")
    with pytest.raises(ConfigError, match="A Delta table needs the package deltalake") as raised:
        importlib.import_module("dbsync.batcher.delta")
    assert raised.value.hint == "pip install 'dbsync[delta]'"


def test_columns_that_differ_in_case_only(tmp_path: Path) -> None:
    with opened(batcher := DeltaBatcher(tmp_path)):
        with pytest.raises(BatcherError, match=r"Two columns of public.thing are one to Delta, .*: n and N") as raised:
            apply(batcher, 10, docs={"1": {"n": 1, "N": 1}})
        assert not raised.value.retryable


def test_a_time_without_a_zone_may_come_later(tmp_path: Path) -> None:
    at = datetime(2024, 1, 2)  # noqa: DTZ001
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1}}, of=[relation(column("n", 20))])
        apply(batcher, 20, docs={"2": {"n": 2, "at": at}}, of=[relation(column("n", 20), column("at", 1114))])
    assert {id: row["at"] for id, row in rows(tmp_path).items()} == {"1": None, "2": at}


def test_a_table_that_is_not_ours(tmp_path: Path) -> None:
    theirs = pa.table({"n": [1]})
    write_deltalake(str(tmp_path / "public.thing"), theirs)
    not_ours = "has no column _id, so it is not one of dbsync's"
    with opened(batcher := DeltaBatcher(tmp_path)), pytest.raises(BatcherError, match=not_ours):
        apply(batcher, 10, docs={"1": {"n": 1}})
    assert table(tmp_path).to_pyarrow_table().to_pylist() == theirs.to_pylist()


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    docs = {str(n): {"n": n, "note": str(n**9)} for n in range(2_000)}
    with opened(batcher := DeltaBatcher(tmp_path)):
        apply(batcher, 10, docs={"1": {"n": 1}}, of=[ITEMS])
        for room in (5_000, 20_000):  # for the rows that wait; for Delta's own file
            with no_room_beyond(room), pytest.raises(BatcherError, match=r"cannot be (used|written)") as raised:
                apply(batcher, 20, docs=docs, of=[ITEMS])
            assert raised.value.retryable
            assert len(rows(tmp_path)) == 1
        apply(batcher, 20, docs=docs, of=[ITEMS])
    assert {id: row["n"] for id, row in rows(tmp_path).items()} == {id: doc["n"] for id, doc in docs.items()}


def test_a_folder_that_may_not_be_written() -> None:
    refused = waits_for_permission("delta:{}")
    assert re.fullmatch(r"The target folder [^\n]+ cannot be used: Permission denied\.", refused["message"])
    assert "that dbsync may write to it" in refused["hint"]
    assert refused["retryable"]


def test_while_it_is_away_nothing_is_missed(
    database: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits_for_what_is_away(database, DeltaBatcher(tmp_path / "target"), tmp_path / "target", spark, caplog)
    assert {id: row["a"] for id, row in rows(tmp_path / "target", "public.t").items()} == {"1": 3, "4": 4}


def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    goes_away_and_comes_back(DeltaBatcher, tmp_path / "target")
    assert set(rows(tmp_path / "target")) == {"2"}


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BatcherError, match="The target folder /proc/no/such cannot be used"):
        DeltaBatcher("/proc/no/such").position()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        DeltaBatcher.from_url(f"delta:{tmp_path / 'file'}", TargetOptions())
    with pytest.raises(ConfigError, match="takes a % and two digits for a character"):
        DeltaBatcher(tmp_path / "a%20lake")
    with opened(batcher := DeltaBatcher(tmp_path / "100% #1 lake?")):
        apply(batcher, 10, docs={"1": {"n": 1}})
    for url in ("delta:", "delta://host/x", "delta:lake?rotate_bytes=1"):
        with pytest.raises(ConfigError, match=r"names no folder|does not know the option"):
            DeltaBatcher.from_url(url, TargetOptions())
    (tmp_path / "public.thing").write_text("in the way")
    with opened(batcher := DeltaBatcher(tmp_path)), pytest.raises(BatcherError, match=r"cannot be (used|written)"):
        apply(batcher, 10, docs={"1": {"n": 1}})
