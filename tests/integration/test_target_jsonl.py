"""Files of JSON lines as `--to`: each batch in them once, whatever is killed when."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from filetargets import (
    ITEMS,
    KINDS,
    LOG,
    ODD,
    VALUES,
    apply,
    batch,
    goes_away_and_comes_back,
    killed_everywhere,
    no_room_beyond,
    odd,
    opened,
    ordinary,
    waits_for_permission,
)
from fix_postgres import Database
from fix_target import COLUMNS, Rows, Target, kinds_told, survives, waits_for_what_is_away
from pyspark.sql import SparkSession

from dbsync.batcher.jsonl import JsonlBatcher
from dbsync.batcher.urls import TargetOptions
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.syncer import Syncer


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def final(folder: Path, doctype: str) -> dict[str, dict[str, Any]]:
    """What a reader makes of the lines: how each document is now."""
    docs: dict[str, dict[str, Any]] = {}
    for line in lines(folder):
        if line["type"] != doctype:
            continue
        match line["op"]:
            case "upsert":
                docs[line["id"]] = line["doc"]
            case "delete":
                docs.pop(line["id"], None)
            case "truncate":
                docs.clear()
    return docs


def test_jsonl_survives(database: Database, tmp_path: Path) -> None:
    def read(table: str) -> Rows:
        docs: Iterable[dict[str, Any]] = final(tmp_path / "log", f"public.{table}").values()
        if table == "events":  # all that was told of them
            docs = [line["doc"] for line in lines(tmp_path / "log") if line["type"] == "public.events"]
        return sorted(tuple(doc[name] for name in COLUMNS[table]) for doc in docs)

    survives(database, Target(f"jsonl:{tmp_path / 'log'}?rotate_bytes=200kB&rotate_seconds=1", read))
    told = lines(tmp_path / "log")
    assert [line["seq"] for line in told] == list(range(1, len(told) + 1))
    positions = [LSN(line["lsn"]) for line in told]
    assert positions == sorted(positions)


@pytest.mark.parametrize("step", [31, pytest.param(5, marks=pytest.mark.long)])
def test_a_kill_at_any_line_repeats_nothing_and_loses_nothing(tmp_path: Path, step: int) -> None:
    whole, *others = killed_everywhere("dbsync.batcher.jsonl:JsonlBatcher", tmp_path, step)
    wanted = lines(whole)
    assert len({line["lsn"] for line in wanted}) == 4
    assert [line["seq"] for line in wanted] == list(range(1, len(wanted) + 1))
    assert len(others) > 15
    for folder in others:
        assert lines(folder) == wanted
        assert list((folder / "_dbsync").glob("*.part")) == []


@pytest.mark.parametrize(
    "lists",
    [{"include_columns": ("public.log.words", "public.keyed.words")}, {"exclude_columns": ("*._op", "*.n")}],
    ids=lambda lists: next(iter(lists)),
)
def test_of_a_table_without_a_key_it_is_told_what_happened_whatever_columns_stay(
    database: Database, spark: SparkSession, tmp_path: Path, lists: dict[str, Any]
) -> None:
    database.execute("CREATE TABLE log (words text, n int); ALTER TABLE log REPLICA IDENTITY FULL")
    database.execute("CREATE TABLE keyed (words text PRIMARY KEY, _op text)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE log, keyed")
    with Syncer(database.settings(**lists), batcher=JsonlBatcher(tmp_path), spark=spark) as syncer:
        database.execute("INSERT INTO keyed VALUES ('a', 'theirs')")
        database.execute("INSERT INTO log VALUES ('a', 1)")
        database.execute("UPDATE log SET words = 'b'")
        database.execute("DELETE FROM log")
        syncer.drain()
    assert [line["doc"] for line in lines(tmp_path) if line["type"] == "public.log"] == [
        {"words": "a", "_op": "insert"},
        {"words": "b", "_op": "update"},
        {"words": "b", "_op": "delete"},
    ]
    assert final(tmp_path, "public.keyed") == {"a": {"words": "a"}}


def test_readers_see_whole_batches_and_whole_files_only(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path, rotate_bytes=150)
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
        assert lines(tmp_path) == []
        batcher.begin(batch(20))
        batcher.batch_upsert("public.thing", {"2": {"n": "long" * 50}})
        assert lines(tmp_path) == []
        batcher.commit(batch(20))
        assert [line["id"] for line in lines(tmp_path)] == ["1", "2"]
        apply(batcher, 30, docs={"3": {"n": 3}})
        batcher.begin(batch(40))
        batcher.batch_upsert("public.thing", {"4": {"n": 4}})
    assert [line["id"] for line in lines(tmp_path)] == ["1", "2", "3"]
    assert batcher.position() == LSN(30)
    batcher.close()


def test_a_file_is_finished_when_nothing_comes_any_more(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path, rotate_seconds=0.05)
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
        while not lines(tmp_path):
            time.sleep(0.01)
        apply(batcher, 20, docs={"2": {"n": 2}})
    assert [(line["id"], line["seq"]) for line in lines(tmp_path)] == [("1", 1), ("2", 2)]


def test_a_batch_that_failed_comes_again(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher):
        for _ in range(2):
            batcher.begin(batch(10))
            batcher.batch_upsert("public.thing", {"1": {"n": 1}})
        batcher.commit(batch(10))
        for _ in range(2):
            batcher.begin(batch(20))
            batcher.batch_delete("public.thing", ["1"])
        batcher.commit(batch(20))
    assert [(line["op"], line["lsn"], line["seq"]) for line in lines(tmp_path)] == [
        ("upsert", "0/A", 1),
        ("delete", "0/14", 2),
    ]


def test_each_log_has_a_position_of_its_own(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher):
        apply(batcher, 100, docs={"1": {"n": 1}})
    with opened(batcher, "another") as position:
        assert position is None
        apply(batcher, 10, docs={"2": {"n": 1}})
    with opened(batcher, "another") as position:
        assert position == LSN(10)
    with opened(batcher) as position:
        assert position == LSN(100)


def test_files_that_were_taken_away_are_not_missed(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
    (tmp_path / "000000000001.jsonl").unlink()
    with opened(batcher) as position:
        assert position == LSN(10)
        apply(batcher, 20, docs={"2": {"n": 2}})
    assert [(line["id"], line["seq"]) for line in lines(tmp_path)] == [("2", 2)]
    assert (tmp_path / "000000000002.jsonl").exists()


def test_values_keep_what_they_are(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher):
        apply(batcher, 10, docs={"1": ordinary(), "2": odd()}, of=[KINDS])
    one, two = lines(tmp_path)
    assert one["doc"] == {name: value for name, *_, value in VALUES}
    assert {name: value for name, value in two["doc"].items() if value is not None} == ODD


def test_every_kind_of_value_is_told_by_the_engine(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    kinds_told(database, JsonlBatcher(tmp_path), spark, lambda: final(tmp_path, "public.kinds"))


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    docs = {str(n): {"n": n} for n in range(100)}
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
        with no_room_beyond(2_000), pytest.raises(BatcherError, match="cannot be used: File too large") as raised:
            apply(batcher, 20, docs=docs)
        assert raised.value.retryable
        apply(batcher, 20, docs=docs)
    assert [line["seq"] for line in lines(tmp_path)] == list(range(1, 102))


def test_what_a_full_disk_cut_in_two_is_never_published(tmp_path: Path) -> None:
    """By then the journal is large enough for readers, but what makes it so does not count."""
    docs = {str(n): {"n": n} for n in range(100)}
    with opened(batcher := JsonlBatcher(tmp_path, rotate_bytes=1_000)):
        apply(batcher, 10, docs={"0": {"n": 0}})
        with no_room_beyond(2_000):
            for _ in range(2):
                with pytest.raises(BatcherError, match="cannot be used: File too large"):
                    apply(batcher, 20, docs=docs)
        assert lines(tmp_path) == []
        apply(batcher, 20, docs=docs)
    told = [(line["seq"], line["lsn"]) for line in lines(tmp_path)]
    assert told == [(1, "0/A"), *((seq, "0/14") for seq in range(2, 102))]


@pytest.mark.parametrize("before", [[], [10]], ids=["a new journal", "one that holds a batch"])
def test_what_a_batch_wrote_before_it_failed_is_never_published(tmp_path: Path, before: list[int]) -> None:
    docs = {str(n): {"n": n} for n in range(20)}
    with opened(batcher := JsonlBatcher(tmp_path, rotate_bytes=500)):
        for last in before:
            apply(batcher, last, docs={"before": {"n": 0}})
        for _ in range(3):
            batcher.begin(batch(20))
            batcher.batch_upsert("public.thing", docs)
        assert lines(tmp_path) == []
        batcher.commit(batch(20))
    assert [line["id"] for line in lines(tmp_path)] == [*("before" for _ in before), *docs]


def test_a_folder_takes_one_dbsync_at_a_time(tmp_path: Path) -> None:
    with opened(JsonlBatcher(tmp_path)), pytest.raises(BatcherError, match="Another dbsync is writing to the target"):
        JsonlBatcher(tmp_path).position()
    with opened(JsonlBatcher(tmp_path)):
        pass


def test_a_folder_that_may_not_be_written() -> None:
    refused = waits_for_permission("jsonl:{}")
    assert re.fullmatch(r"The target folder [^\n]+ cannot be used: Permission denied\.", refused["message"])
    assert "that dbsync may write to it" in refused["hint"]
    assert refused["retryable"]


def test_while_it_is_away_nothing_is_missed(
    database: Database, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits_for_what_is_away(database, JsonlBatcher(tmp_path / "target"), tmp_path / "target", spark, caplog)
    assert final(tmp_path / "target", "public.t") == {"1": {"id": 1, "a": 3}, "4": {"id": 4, "a": 4}}


def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    goes_away_and_comes_back(JsonlBatcher, tmp_path / "target")
    assert [line["op"] for line in lines(tmp_path / "target")] == ["upsert", "delete", "upsert"]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    batcher = JsonlBatcher(Path("/proc/no/such"))
    with pytest.raises(BatcherError, match="The target folder /proc/no/such cannot be used: No such file") as raised:
        batcher.position()
    assert "may write to it" in (raised.value.hint or "")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        JsonlBatcher.from_url(f"jsonl:{tmp_path / 'file'}", TargetOptions())
    with pytest.raises(BatcherError, match="cannot be used: Not a directory"):
        JsonlBatcher(tmp_path / "file" / "below").position()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("jsonl:", "names no folder"),
        ("jsonl://host/folder", "names no folder"),
        ("jsonl:log?rotate=1", "does not know the option 'rotate'"),
        ("jsonl:log?rotate_bytes=lots", "rotate_bytes cannot be 'lots'"),
        ("jsonl:log?rotate_bytes=0", "rotate_bytes cannot be '0'"),
        ("jsonl:log?rotate_seconds=-1", "rotate_seconds cannot be '-1'"),
        ("jsonl:log?rotate_seconds=nan", "rotate_seconds cannot be 'nan'"),
        ("jsonl:log?rotate_seconds=", "rotate_seconds cannot be ''"),
    ],
)
def test_an_address_that_cannot_be_meant(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        JsonlBatcher.from_url(url, TargetOptions())
    assert "jsonl:DIR" in (raised.value.hint or "")


def test_a_call_outside_a_batch(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher), pytest.raises(BatcherError, match="outside a batch"):
        batcher.batch_delete(ITEMS.doctype, ["1"])


def test_a_damaged_state_is_said(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
    (tmp_path / "_dbsync" / "state.json").write_text("{")
    batcher.log_name = LOG
    with pytest.raises(BatcherError, match=r"state\.json is damaged"):
        batcher.position()
    batcher.close()
