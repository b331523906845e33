"""Where a batch waits: bounded in memory, gone when it is over, and said clearly where it cannot be."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import oracle
import pyarrow.parquet as pq
import pytest

from dbsync import spool
from dbsync.errors import DbsyncError
from dbsync.lsn import LSN
from dbsync.spool import DELETED, FULL, PARTIAL, BatchWriter, Spool

TABLE = oracle.table(1, "t")

Opened = Callable[[Path | None], Spool]


@pytest.fixture
def writer(tmp_path: Path) -> BatchWriter:
    return BatchWriter(1, tmp_path)


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as stack:

        def open_spool(parent: Path | None) -> Spool:
            made = Spool(parent)
            stack.callback(made.close)
            return made

        yield open_spool


def rows(segments: tuple[str, ...]) -> list[dict[str, object]]:
    found = [row for path in segments for row in pq.read_table(path).to_pylist()]
    return sorted(found, key=lambda row: (row["lsn"], row["ordinal"]))


def written(writer: BatchWriter, source: oracle.Source, *, by_handler: bool = False) -> spool.Batch:
    taken = oracle.dispatch(source, writer, by_handler=by_handler)
    for transaction in source.log:
        oracle.send(taken, transaction)
    return writer.close(taken.end_lsn)


def test_what_a_crash_left_is_removed(tmp_path: Path, opened: Opened) -> None:
    stale = tmp_path / "run-1-dead"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "segment").touch()
    folder = opened(tmp_path).folder
    assert not stale.exists()
    assert folder.exists()


def test_what_another_process_uses_is_kept(tmp_path: Path, opened: Opened) -> None:
    used = tmp_path / "run-1-alive"
    used.mkdir()
    with (used / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = opened(tmp_path)
        assert other.folder != used
        assert used.exists()


def test_two_spools_share_a_folder(tmp_path: Path, opened: Opened) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert one.folder != two.folder
    assert one.folder.exists()


def test_nobody_else_can_look_into_it(tmp_path: Path, opened: Opened) -> None:
    assert opened(tmp_path / "new").folder.stat().st_mode & 0o077 == 0


def test_a_closed_spool_leaves_nothing_and_opens_again(tmp_path: Path, opened: Opened) -> None:
    one = opened(tmp_path)
    one.writer(1)
    one.close()
    assert list(tmp_path.iterdir()) == []
    one.close()
    assert one.writer(2).folder.exists()


def test_a_spool_that_cannot_be_made_is_said_so(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DbsyncError, match="cannot be used") as told:
        opened(tmp_path / "file").writer(1)
    assert "DBSYNC_SPOOL_DIR" in (told.value.hint or "")


def test_a_spool_that_vanished_is_said_so(tmp_path: Path, opened: Opened) -> None:
    one = opened(tmp_path)
    writer = one.writer(1)
    shutil.rmtree(one.folder)
    writer.begin(LSN(1), oracle.NOW)
    writer.add_mark("t", "1", FULL, b"x")
    with pytest.raises(DbsyncError, match="cannot be used"):
        writer.flush()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_belongs_to_somebody_else_is_not_trusted(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name below the temporary folder can be guessed, and what lies in a spool is unpickled."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    foreign = tmp_path / f"dbsync-{os.getuid()}"
    foreign.mkdir(mode=0o777)
    os.chown(foreign, 12345, 12345)
    with pytest.raises(DbsyncError):
        _ = opened(None).folder


@pytest.mark.parametrize("by_handler", [False, True])
def test_events_stand_in_the_order_of_the_log_whatever_the_segments(
    writer: BatchWriter, monkeypatch: pytest.MonkeyPatch, by_handler: bool
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_EVENTS", 3)
    source = oracle.Source(TABLE)
    for n in range(10):
        source.insert("public.t", k0=str(n), big="B")
        source.update("public.t", str(n), k0=f"{n}+")
        source.delete("public.t", f"{n}+")
        if n % 2:
            source.commit()
    batch = written(writer, source, by_handler=by_handler)
    assert len(batch.segments) > 5
    found = rows(batch.segments)
    assert [(row["id"], row["op"]) for row in found] == [
        event
        for n in range(10)
        for event in ((f"{n}", FULL), (f"{n}", DELETED), (f"{n}+", PARTIAL), (f"{n}+", DELETED))
    ]
    assert len({(row["lsn"], row["ordinal"]) for row in found}) == len(found)
    assert (batch.partials, batch.deletes, batch.changes) == (10, 20, 30)
    assert (batch.first_lsn, batch.last_lsn) == (source.log[0].lsn, source.log[-1].lsn + 8)


@pytest.mark.parametrize("seed", range(20))
def test_frames_and_marks_of_a_transaction_stand_in_the_order_they_came(
    writer: BatchWriter, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_EVENTS", 7)
    source, rng, came = oracle.Source(TABLE), random.Random(seed), []
    for n in range(60):
        source.insert("public.t", k0=str(n))
    source.commit()
    writer.describe(TABLE)
    for n, frame in enumerate(source.log[0].messages):
        if n % 20 == 0:
            writer.begin(LSN(n + 1), oracle.NOW)
        kind = rng.choice(["frame", "frame", "mark", "mark", "truncate"])
        if kind == "frame":
            writer.add_frame(frame)
        elif kind == "mark":
            writer.add_mark("made", str(n), FULL, b"x")
        else:
            writer.truncate(f"{n}")
        came.append(str(n))
    batch = writer.close(LSN(100), whole=False)
    places = {row["id"]: (row["lsn"], row["ordinal"]) for row in rows(batch.segments)} | batch.truncates
    assert sorted(places, key=places.__getitem__) == came


def test_an_unfinished_transaction_is_cut_off(writer: BatchWriter) -> None:
    source = oracle.Source(TABLE)
    for n in range(2):
        source.insert("public.t", k0=str(n))
        source.truncate("public.t")
        source.commit()
    taken = oracle.dispatch(source, writer, by_handler=False)
    oracle.send(taken, source.log[0])
    oracle.send(taken, source.log[1], whole=False)
    batch = writer.close(taken.end_lsn)
    assert batch.cut_lsn == source.log[0].lsn
    assert set(batch.truncates) == {"public.t"}
    assert batch.truncates["public.t"][0] == source.log[0].lsn


def test_ids_that_give_values_to_one_another_have_one_root(writer: BatchWriter) -> None:
    for old, new in (("a", "b"), ("c", "d"), ("b", "c"), ("x", "y")):
        writer.chain("t", old, new)
    writer.chain("other", "a", "z")
    writer.begin(LSN(1), oracle.NOW)
    roots = writer.close(LSN(1)).lineage
    assert len({roots["t", id] for id in "abcd"}) == 1
    assert roots["t", "x"] == roots["t", "y"] != roots["t", "a"]
    assert roots["other", "z"] == roots["other", "a"]


class CountingDict(dict[Any, Any]):
    """Counts how often it is asked."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def test_a_changed_key_costs_the_same_however_many_there_are(writer: BatchWriter) -> None:
    writer._lineage = lineage = CountingDict()
    for n in range(20_000):
        writer.chain("t", str(n), str(n + 1))
    assert lineage.asked < 5 * 20_000


def test_the_chains_of_a_bulk_change_are_bounded(writer: BatchWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_LINEAGE", 10)
    for n in range(100):
        writer.chain("t", str(n), f"{n}+")
    assert len(writer.close(LSN(1)).lineage) <= 11


def test_a_table_that_looks_different_conflicts_with_what_is_there(writer: BatchWriter) -> None:
    changed = oracle.table(1, "t", key=2)
    writer.describe(TABLE)
    assert not writer.conflicts(changed), "nothing is there"
    writer.begin(LSN(1), oracle.NOW)
    writer.add_mark("t", "1", FULL, b"x")
    assert writer.conflicts(changed)
    assert not writer.conflicts(TABLE)
    assert not writer.conflicts(oracle.table(2, "other"))


def test_another_table_of_the_same_name_conflicts_too(writer: BatchWriter) -> None:
    writer.describe(TABLE)
    writer.begin(LSN(1), oracle.NOW)
    writer.add_mark("t", "1", FULL, b"x")
    assert writer.conflicts(oracle.table(2, "t", key=2))


def test_a_discarded_batch_is_gone(writer: BatchWriter) -> None:
    writer.begin(LSN(1), oracle.NOW)
    writer.add_mark("t", "1", FULL, b"x")
    batch = writer.close(LSN(2))
    assert batch.folder.exists()
    batch.discard()
    assert not batch.folder.exists()
    batch.discard()
