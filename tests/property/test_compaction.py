"""From what happened to what is: each rule of compaction, and random histories against a dict and a loop."""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from oracle import Expected, Source, Turmoil
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from recording import Documents, RecordingBatcher, SqliteBatcher

from dbsync import Batcher, compact, fewevents
from dbsync.compact import Applied
from dbsync.errors import BatcherError
from dbsync.fold import Final
from dbsync.spool import Batch, BatchWriter

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Batchers of this file run on executors

seeds = st.integers(0, 2**32)
# An example is a history of thousands of changes: a few are many, and a smaller seed is no smaller history.
few = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

BOTH_WAYS = pytest.mark.parametrize("by_handler", [False, True], ids=["mirror", "handler"])


@pytest.fixture(params=[True, False], ids=["few", "many"], autouse=True)
def few_or_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of few events are reduced in one stage and those of many by SQL; whatever a test has goes either way."""
    for limit in ("FEW_EVENTS", "FEW_BYTES"):
        monkeypatch.setattr(fewevents, limit, 1 << 60 if request.param else -1)


@pytest.fixture
def source() -> Source:
    return Source(oracle.table(11, "t"), oracle.table(12, "other"), oracle.table(13, "pair", key=2))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def batch_of(
    source: Source,
    folder: Path,
    *,
    first: int = 0,
    by_handler: bool = False,
    flush: Callable[[], bool] = lambda: False,
    unfinished: bool = False,
) -> Batch:
    """The log from transaction `first` on, in one batch; `flush` says where a segment ends."""
    writer = BatchWriter(1, Path(tempfile.mkdtemp(dir=folder)))
    taken = oracle.dispatch(source, writer, by_handler=by_handler)
    for transaction in source.log[first:]:
        last = transaction is source.log[-1]
        oracle.send(taken, transaction, whole=not (unfinished and last))
        if flush():
            writer.flush()
    return writer.close(taken.end_lsn)


def apply(
    spark: SparkSession, batch: Batch, source: Source, batcher: Batcher | None = None, at: int = -1
) -> RecordingBatcher:
    batcher = batcher or RecordingBatcher()
    compact.apply(spark, batch, batcher, source.complete(at))
    return batcher  # type: ignore[return-value]


def nothing_to_complete(finals: list[Final]) -> Iterator[Final]:
    raise AssertionError(f"every value was in the log, but these were asked for: {finals}")
    yield


@BOTH_WAYS
def test_what_everybody_knows_comes_to_two_upserts_and_a_delete(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="K1", plain="a")
    source.insert("public.t", k0="K2", plain="a")
    source.commit()
    source.update("public.t", "K1", plain="b")
    source.delete("public.t", "K1")
    source.insert("public.t", k0="K1", plain="c")
    for n in range(3):
        source.update("public.t", "K2", plain=str(n))
    source.insert("public.t", k0="K3", plain="d")
    source.delete("public.t", "K2")
    source.insert("public.t", k0="K2", plain="e")
    source.delete("public.t", "K1")
    source.commit()
    got = apply(spark, batch_of(source, folder, first=1, by_handler=by_handler), source)
    assert got.calls == [
        ("delete", "public.t", ["K1"]),
        ("upsert", "public.t", {"K2": got.upserts("public.t")["K2"], "K3": got.upserts("public.t")["K3"]}),
    ]
    assert {id: doc["plain"] for id, doc in got.upserts("public.t").items()} == {"K2": "e", "K3": "d"}


@BOTH_WAYS
def test_insert_then_delete_is_still_a_delete(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="1", plain="a")
    source.delete("public.t", "1")
    source.commit()
    got = apply(spark, batch_of(source, folder, by_handler=by_handler), source)
    assert got.calls == [("delete", "public.t", ["1"])]


@BOTH_WAYS
def test_the_order_is_that_of_commits_and_within_them_of_changes(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    for n in range(5):
        source.insert("public.t", k0=str(n), plain="first")
        for turn in range(20):
            source.update("public.t", str(n), plain=str(turn))
        source.commit()
    always = batch_of(source, folder, by_handler=by_handler, flush=lambda: True)
    assert len(always.segments) == 5
    got = apply(spark, always, source)
    assert {doc["plain"] for doc in got.upserts("public.t").values()} == {"19"}


@BOTH_WAYS
def test_columns_are_folded_not_rows(spark: SparkSession, source: Source, folder: Path, by_handler: bool) -> None:
    source.insert("public.t", k0="1", plain="a", big="B", huge="H")
    source.commit()
    source.update("public.t", "1", plain="b", big="B2")
    source.commit()
    source.update("public.t", "1", plain="c")
    source.commit()
    batch = batch_of(source, folder, by_handler=by_handler, flush=lambda: True)
    got = RecordingBatcher()
    compact.apply(spark, batch, got, nothing_to_complete)
    assert got.upserts("public.t") == {"1": {"k0": "1", "plain": "c", "big": "B2", "huge": "H"}}


@BOTH_WAYS
def test_a_value_nobody_sent_is_read_from_the_source(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.pair", k0="ü", k1='"', plain="a", big="B", huge="H")
    source.commit()
    source.update("public.pair", oracle.row_id(source.relations["public.pair"], {"k0": "ü", "k1": '"'}), plain="b")
    source.commit()
    got = apply(spark, batch_of(source, folder, first=1, by_handler=by_handler), source)
    assert list(got.upserts("public.pair").values()) == [{"k0": "ü", "k1": '"', "plain": "b", "big": "B", "huge": "H"}]


@BOTH_WAYS
def test_a_partial_document_lacks_exactly_what_did_not_change(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="1", plain="a", big="B", huge="H")
    source.commit()
    source.update("public.t", "1", big="B2")
    source.commit()
    source.update("public.t", "1", plain="c")
    source.commit()
    got = RecordingBatcher(accepts_partial=True)
    compact.apply(spark, batch_of(source, folder, first=1, by_handler=by_handler), got, nothing_to_complete)
    assert got.upserts("public.t") == {"1": {"k0": "1", "plain": "c", "big": "B2"}}


@BOTH_WAYS
def test_a_changed_key_takes_its_values_along(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="K1", plain="a", big="B", huge="H")
    source.commit()
    source.update("public.t", "K1", k0="K2")
    source.commit()
    source.update("public.t", "K2", plain="b")
    source.update("public.t", "K2", k0="K3", huge="H2")
    source.commit()
    source.update("public.t", "K3", plain="c")
    source.commit()
    got = RecordingBatcher()
    batch = batch_of(source, folder, by_handler=by_handler, flush=lambda: True)
    compact.apply(spark, batch, got, nothing_to_complete)
    assert sorted(got.deletes("public.t")) == ["K1", "K2"]
    assert got.upserts("public.t") == {"K3": {"k0": "K3", "plain": "c", "big": "B", "huge": "H2"}}


@BOTH_WAYS
def test_keys_that_change_places_keep_their_own_values(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="1", plain="one", big="B1", huge="H1")
    source.insert("public.t", k0="2", plain="two", big="B2", huge="H2")
    source.commit()
    source.update("public.t", "1", k0="tmp")
    source.update("public.t", "2", k0="1")
    source.update("public.t", "tmp", k0="2")
    source.commit()
    for first in (0, 1):
        got = apply(spark, batch_of(source, folder, first=first, by_handler=by_handler), source)
        assert {id: (d["plain"], d["big"]) for id, d in got.upserts("public.t").items()} == {
            "1": ("two", "B2"),
            "2": ("one", "B1"),
        }
        assert got.deletes("public.t") == ["tmp"]


@BOTH_WAYS
@pytest.mark.parametrize("occupied", [False, True], ids=["new key", "key of a deleted row"])
def test_a_changed_key_is_whole_even_where_partial_documents_are_accepted(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool, occupied: bool
) -> None:
    """The target has nothing under the new key to merge into, or what another row left there."""
    source.insert("public.t", k0="K1", plain="a", big="B", huge="H")
    if occupied:
        source.insert("public.t", k0="K2", plain="x", big="X", huge="X")
    source.commit()
    target: Documents = {"public.t": {id: dict(row) for id, row in source.state["public.t"].items()}}
    if occupied:
        source.delete("public.t", "K2")
    source.update("public.t", "K1", k0="K2", plain="b")
    source.commit()
    got = RecordingBatcher(target, accepts_partial=True)
    apply(spark, batch_of(source, folder, first=1, by_handler=by_handler), source, got)
    assert got.documents["public.t"] == {"K2": {"k0": "K2", "plain": "b", "big": "B", "huge": "H"}}


@BOTH_WAYS
def test_truncate_discards_what_stands_before_it_and_is_handed_over_first(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="before", plain="a")
    source.insert("public.other", k0="stays", plain="a")
    source.commit()
    source.insert("public.t", k0="gone", plain="a")
    source.truncate("public.t")
    source.insert("public.t", k0="after", plain="b")
    source.insert("public.t", k0="deleted", plain="b")
    source.delete("public.t", "deleted")
    source.commit()
    got = apply(spark, batch_of(source, folder, by_handler=by_handler), source)
    assert [(kind, doctype) for kind, doctype, _ in got.calls if doctype == "public.t"] == [
        ("truncate", "public.t"),
        ("delete", "public.t"),
        ("upsert", "public.t"),
    ]
    assert got.deletes("public.t") == ["deleted"]
    assert list(got.upserts("public.t")) == ["after"]
    assert list(got.upserts("public.other")) == ["stays"]


def test_a_truncate_alone_is_a_batch(spark: SparkSession, source: Source, folder: Path) -> None:
    source.truncate("public.t")
    source.commit()
    got = RecordingBatcher()
    assert compact.apply(spark, batch_of(source, folder), got, nothing_to_complete) == Applied(truncates=1)
    assert got.calls == [("truncate", "public.t", None)]


@BOTH_WAYS
def test_a_transaction_not_read_to_its_end_is_left_out(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="1", plain="a", big="B")
    source.commit()
    source.update("public.t", "1", k0="2")
    source.delete("public.t", "2")
    source.truncate("public.other")
    source.commit()
    batch = batch_of(source, folder, by_handler=by_handler, unfinished=True)
    assert batch.cut_lsn == source.log[0].lsn
    got = apply(spark, batch, source, at=0)
    assert got.calls == [("upsert", "public.t", {"1": source.log[0].after["public.t"]["1"]})]


def test_a_truncate_counts_though_an_unfinished_transaction_truncates_again(
    spark: SparkSession, source: Source, folder: Path
) -> None:
    source.insert("public.t", k0="gone", plain="a")
    source.truncate("public.t")
    source.insert("public.t", k0="1", plain="a")
    source.commit()
    source.truncate("public.t")
    source.commit()
    got = RecordingBatcher({"public.t": {"old": {}}})
    apply(spark, batch_of(source, folder, unfinished=True), source, got)
    assert list(got.documents["public.t"]) == ["1"]


@BOTH_WAYS
def test_one_record_changed_thousands_of_times_comes_once(
    spark: SparkSession, source: Source, folder: Path, by_handler: bool
) -> None:
    source.insert("public.t", k0="hot", plain="a", big="B", huge="H")
    for n in range(8000):
        source.update("public.t", "hot", plain=str(n))
    source.commit()
    got = RecordingBatcher()
    compact.apply(spark, batch_of(source, folder, by_handler=by_handler), got, nothing_to_complete)
    assert got.calls == [("upsert", "public.t", {"hot": {"k0": "hot", "plain": "7999", "big": "B", "huge": "H"}})]


def held_by(source: Source, first: int, rng: random.Random) -> Documents:
    """A target in any state a crash can leave it in: behind by any number of the batch's changes, or not."""
    target: Documents = {}
    for doctype, rows in source.log[first].after.items():
        seen = dict(rows)
        for transaction in source.log[first + 1 :]:
            if rng.random() < 0.2:
                seen |= transaction.after[doctype]
        target[doctype] = {id: dict(row) for id, row in seen.items()}
    return target


def check_contract(calls: list[tuple[str, str, Any]]) -> None:
    """Truncates, then deletes, then upserts; no id in both; no id twice."""
    rank = {"truncate": 0, "delete": 1, "upsert": 2}
    kinds = [rank[kind] for kind, _, _ in calls]
    assert kinds == sorted(kinds)
    ids = [(doctype, id) for _, doctype, content in calls for id in content or ()]
    assert len(ids) == len(set(ids))


@BOTH_WAYS
@few
@given(seed=seeds)
@example(seed=1)
def test_any_history_leaves_the_target_as_the_source_is(spark: SparkSession, by_handler: bool, seed: int) -> None:
    rng = random.Random(seed)
    turmoil = Turmoil(rng)
    turmoil.transactions(300)
    source, first = turmoil.source, rng.randrange(1, 150)
    expected = Expected.of(source.log[first:])
    with tempfile.TemporaryDirectory() as name:
        batch = batch_of(source, Path(name), first=first, by_handler=by_handler, flush=lambda: rng.random() < 0.05)
        before = held_by(source, first - 1, rng)
        target = RecordingBatcher({doctype: dict(rows) for doctype, rows in before.items()})
        for _ in range(2):
            target.clear()
            applied = compact.apply(spark, batch, target, source.complete())
            check_contract(target.calls)
            assert target.documents == expected.applied_to(before)  # type: ignore[arg-type]
    assert applied == Applied(
        upserts=sum(row is not None for row in expected.final.values()),
        deletes=sum(row is None for row in expected.final.values()),
        truncates=len(expected.truncated),
    )


@BOTH_WAYS
@few
@given(seed=seeds)
@example(seed=1)
def test_any_history_is_told_in_partial_documents_too(spark: SparkSession, by_handler: bool, seed: int) -> None:
    rng = random.Random(seed)
    turmoil = Turmoil(rng)
    turmoil.transactions(150)
    source, first = turmoil.source, rng.randrange(100, 140)
    expected = Expected.of(source.log[first:])
    before: Documents = {t: {id: dict(r) for id, r in rows.items()} for t, rows in source.log[first - 1].after.items()}
    target = RecordingBatcher({t: dict(rows) for t, rows in before.items()}, accepts_partial=True)
    with tempfile.TemporaryDirectory() as name:
        batch = batch_of(source, Path(name), first=first, by_handler=by_handler, flush=lambda: rng.random() < 0.05)
        compact.apply(spark, batch, target, source.complete())
    for doctype in source.relations:
        for id, doc in target.upserts(doctype).items():
            at = (doctype, id)
            whole = frozenset(source.relations[doctype].column_names)
            assert frozenset(doc) == (whole if at in expected.moved else expected.told[at]), at
    assert target.documents == expected.applied_to(before)  # type: ignore[arg-type]


@BOTH_WAYS
@few
@given(seed=seeds)
def test_a_batcher_on_the_executors_gets_the_same(spark: SparkSession, by_handler: bool, seed: int) -> None:
    rng = random.Random(seed)
    turmoil = Turmoil(rng)
    turmoil.transactions(120)
    source = turmoil.source
    expected = Expected.of(source.log[20:])
    with tempfile.TemporaryDirectory() as name:
        target = SqliteBatcher(Path(name, "target.db"), distributed=True)
        batch = batch_of(source, Path(name), first=20, by_handler=by_handler, flush=lambda: rng.random() < 0.05)
        applied = compact.apply(spark, batch, target, source.complete())
        check_contract([(kind, doctype, ids) for kind, doctype, ids in target.calls()])
        kept = {doctype: rows for doctype, rows in expected.applied_to({}).items() if rows}
        assert target.documents() == kept
    assert (applied.upserts, applied.deletes) == (
        sum(map(len, kept.values())),
        sum(row is None for row in expected.final.values()),
    )


def test_large_batches_come_in_several_partitions_and_in_the_same_order(
    spark: SparkSession, source: Source, folder: Path
) -> None:
    for n in range(9000):
        source.insert("public.t" if n % 2 else "public.other", k0=str(n), plain="x" * 50)
        if n % 3 == 0:
            source.delete("public.t" if n % 2 else "public.other", str(n))
    source.commit()
    got = apply(spark, batch_of(source, folder), source)
    check_contract(got.calls)
    assert got.documents == {t: source.state[t] for t in ("public.t", "public.other")}
    on_executors = SqliteBatcher(folder / "target.db", distributed=True)
    apply(spark, batch_of(source, folder), source, on_executors)
    check_contract(on_executors.calls())
    assert on_executors.documents() == got.documents


class Refusing(Batcher):
    def __init__(self, *, distributed: bool) -> None:
        self.distributed = distributed

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        raise RuntimeError("no room left")


@pytest.mark.parametrize("distributed", [False, True])
def test_what_a_batcher_raises_is_told_with_its_reason(
    spark: SparkSession, source: Source, folder: Path, distributed: bool
) -> None:
    source.insert("public.t", k0="1")
    source.commit()
    with pytest.raises(BatcherError, match=r"Refusing.batch_upsert raised RuntimeError: no room left"):
        apply(spark, batch_of(source, folder), source, Refusing(distributed=distributed))


def test_a_batcher_that_cannot_be_sent_to_an_executor_is_told_so(
    spark: SparkSession, source: Source, folder: Path
) -> None:
    class Holding(Batcher):
        distributed = True

        def __init__(self) -> None:
            self.lock = threading.Lock()

    source.insert("public.t", k0="1")
    source.commit()
    with pytest.raises(BatcherError):
        apply(spark, batch_of(source, folder), source, Holding())
