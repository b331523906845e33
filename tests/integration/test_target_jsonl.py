"""Files of JSON lines as `--to`: each batch in them once, whatever is killed when."""

from __future__ import annotations

import json
import resource
import time
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
    killed_everywhere,
    odd,
    opened,
    ordinary,
)
from fix_postgres import Database
from fix_target import Rows, Target, survives

from dbsync.batcher.jsonl import JsonlBatcher
from dbsync.batcher.urls import TargetOptions
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN

COLUMNS = {"customers": ("id", "name", "email", "note"), "orders": ("customer", "number", "total")}


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
        docs = final(tmp_path / "log", f"public.{table}").values()
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


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    batcher = JsonlBatcher(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(batcher):
        apply(batcher, 10, docs={"1": {"n": 1}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
        try:
            with pytest.raises(BatcherError, match="cannot be used: File too large") as raised:
                apply(batcher, 20, docs={str(n): {"n": n} for n in range(100)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert raised.value.retryable
        apply(batcher, 20, docs={str(n): {"n": n} for n in range(100)})
    assert [line["seq"] for line in lines(tmp_path)] == list(range(1, 102))


def test_a_folder_takes_one_dbsync_at_a_time(tmp_path: Path) -> None:
    with opened(JsonlBatcher(tmp_path)), pytest.raises(BatcherError, match="Another dbsync is writing to the target"):
        JsonlBatcher(tmp_path).position()
    with opened(JsonlBatcher(tmp_path)):
        pass


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
