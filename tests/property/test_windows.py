"""Random interleavings of writes, commits, windows, batches and crashes: the target always ends as the source.

The model below is PostgreSQL reduced to what matters here: a commit stands in the log before others see it, a row is
locked until its writer's commit is visible, a snapshot sees what is visible when it is taken. The windows, the memory
of commits and the folding are dbsync's own. What the log and the windows give is compared with the source itself, in
which the same transactions were done one after the other. Rows that no change touched go to the target as they were
re-read, without being reduced; so where dbsync says that the windows of a batch are disjoint, they have to be.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from itertools import groupby
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbsync import fold as folding
from dbsync.fold import Event, Final, Opener, Partial, Source
from dbsync.lsn import LSN
from dbsync.relation import Relation
from dbsync.spool import DELETED, FULL, PARTIAL, PICKLE, Layout, WindowRows, are_disjoint
from dbsync.window import HIGH, LOW, Commit, Snapshot, State, Unseen, Window, Windows

TABLES = (1, 2)
KEYS = ("a", "b", "c")
FIRST_XID = (1 << 32) - 5  # so that the 32-bit ids of the log wrap in most runs

Row = dict[str, int]


@dataclass
class Transaction:
    xid: int
    changes: list[tuple[int, str, int, Row | None]] = field(default_factory=list)  # table, key, op, values


@dataclass
class Model:
    """A source, a log, and a dbsync that reads it. A method is a step; one that cannot happen now does nothing."""

    next_xid: int = FIRST_XID
    clock: int = 0
    log: list[tuple[int, object]] = field(default_factory=list)  # position, transaction or (window, mark)
    visible: dict[int, dict[str, Row]] = field(
        default_factory=lambda: {table: {key: {"x": 0, "big": 0} for key in KEYS[:2]} for table in TABLES}
    )
    writing: list[Transaction] = field(default_factory=list)
    hidden: list[Transaction] = field(default_factory=list)  # committed, in the log, not yet visible
    # dbsync
    windows: Windows = field(default_factory=Windows)
    read_to: int = 0
    acknowledged: int = 0
    batch: list[tuple[tuple[int, int], int, Event]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    batched: list[tuple[WindowRows, str]] = field(default_factory=list)  # re-read rows of the batch, and their keys
    target: dict[tuple[int, str], Row] = field(default_factory=dict)
    wanted: set[tuple[int, str]] = field(default_factory=lambda: {(table, key) for table in TABLES for key in KEYS})
    reading: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # window: table, key, phase
    voided: int = 0

    # The source.

    def begin(self, _: int) -> None:
        if len(self.writing) < 3:
            self.writing.append(Transaction(self.next_xid))
            self.next_xid += 1

    def write(self, choice: int) -> None:
        if not self.writing:
            return
        transaction = self.writing[choice % len(self.writing)]
        table, key = TABLES[choice // 3 % 2], KEYS[choice // 6 % 3]
        others = [t for t in (*self.writing, *self.hidden) if t is not transaction]
        if any((table, key) == change[:2] for other in others for change in other.changes):
            return  # the row is locked
        there = self._row(transaction, table, key) is not None
        self.clock += 1
        match choice // 18 % 3, there:
            case 0, True:
                transaction.changes.append((table, key, PARTIAL, {"x": self.clock}))  # `big` is TOASTed, unchanged
            case 1, True:
                transaction.changes.append((table, key, DELETED, None))
            case _, True:
                transaction.changes.append((table, key, FULL, {"x": self.clock, "big": self.clock}))
            case _, False:
                transaction.changes.append((table, key, FULL, {"x": self.clock, "big": self.clock}))

    def commit(self, choice: int) -> None:
        if self.writing:
            transaction = self.writing.pop(choice % len(self.writing))
            self._append(transaction)
            self.hidden.append(transaction)

    def show(self, choice: int) -> None:
        if self.hidden:
            transaction = self.hidden.pop(choice % len(self.hidden))
            for table, key, op, values in transaction.changes:
                _apply(self.visible[table], key, op, values)

    def snapshot(self) -> Snapshot:
        running = [t.xid for t in (*self.writing, *self.hidden)]
        return Snapshot(min(running, default=self.next_xid), self.next_xid, frozenset(running))

    # Re-reading.

    def low(self, choice: int) -> None:
        todo = sorted(self.wanted - {(table, key) for table, key, _ in self.reading.values()})
        if todo and len(self.reading) < 2:
            table, key = todo[choice % len(todo)]
            self.clock += 1
            window = f"w{self.clock}"
            self.windows.expect(window, table)
            self._append((window, LOW))
            self.reading[window] = (table, key, "low")

    def look(self, choice: int) -> None:
        if (window := self._one("low", choice)) is not None:
            table, key, _ = self.reading[window]
            self.windows.see(window, self.snapshot())
            self.windows.read(window, dict(self.visible[table][key]) if key in self.visible[table] else None)
            self.reading[window] = (table, key, "looked")

    def high(self, choice: int) -> None:
        if (window := self._one("looked", choice)) is not None:
            self._append((window, HIGH))
            self.reading[window] = (*self.reading[window][:2], "high")

    # Reading the log.

    def read(self, _: int) -> None:
        if self.read_to == len(self.log):
            return
        position, entry = self.log[self.read_to]
        self.read_to += 1
        if isinstance(entry, Transaction):
            for ordinal, (table, key, op, values) in enumerate(entry.changes):
                self.batch.append(((position, ordinal), table, _event(key, op, values)))
            relations = frozenset(table for table, *_ in entry.changes)
            self.windows.commit(Commit(entry.xid % (1 << 32), LSN(position), relations))
        else:
            self._mark(position, *entry)

    def high_again(self, _: int) -> None:
        """A mark that stands twice in the log."""
        found = [entry for _, entry in self.log if isinstance(entry, tuple) and entry[1] == HIGH]
        if found and found[-1][0] in self.reading:
            self._append(found[-1])

    def end_batch(self, _: int) -> None:
        if self.windows.open:
            return
        self._check_disjoint()
        for table in TABLES:
            events = sorted((p, e) for p, t, e in self.batch if t == table)
            groups = groupby(sorted((e for _, e in events), key=lambda e: e.id), key=lambda e: e.id)
            for final in folding.fold((group for _, group in groups), Opener(())):
                self._deliver(table, final)
        self.batch, self.batched = [], []
        self.windows.applied(dict.fromkeys(self.released, 0))
        for window in self.released:
            if (found := self.windows.all.get(window)) and found.state is State.APPLIED:
                self.wanted.discard(self.reading.pop(window)[:2])
                self.windows.forget(window)
        self.released = []
        self.windows.prune(self.snapshot())
        hold = self.windows.unseen.hold_lsn
        end = self.log[self.read_to - 1][0] + 1 if self.read_to else 0
        self.acknowledged = max(self.acknowledged, min(end, end if hold is None else hold))

    def prune(self, _: int) -> None:
        self.windows.prune(self.snapshot())

    def retry(self, _: int) -> None:
        for window in [w for w, found in self.windows.all.items() if found.state is State.VOID]:
            self.windows.forget(window)
            self.reading.pop(window, None)
            self.voided += 1

    def abandon(self, _: int) -> None:
        """Who re-reads loses its connection, and begins anew with what is not known to be applied."""
        for window in list(self.reading):
            self.windows.forget(window)
        self.reading = {}

    def crash(self, _: int) -> None:
        """All that dbsync has in memory is gone; the log comes again from what was acknowledged."""
        self.windows = Windows()
        self.reading, self.released, self.batch, self.batched = {}, [], [], []
        self._rewind()

    def reconnect(self, _: int) -> None:
        self.batch, self.released, self.batched = [], [], []
        self.windows.replay()
        self._rewind()

    def finish(self) -> None:
        """Let everything come to its end."""
        while self.writing:
            self.commit(0)
        for _ in range(100):
            self.show(0)
            self.retry(0)
            self.low(0)
            self.look(0)
            self.high(0)
            self.read(0)
            if self.read_to == len(self.log):
                self.end_batch(0)
            if not (self.wanted or self.hidden or self.batch or self.read_to < len(self.log)):
                return
        raise AssertionError(f"it does not come to an end: {self}")

    # What the above is made of.

    def _row(self, transaction: Transaction, table: int, key: str) -> Row | None:
        rows = {k: dict(v) for k, v in self.visible[table].items()}
        for t, k, op, values in transaction.changes:
            if t == table:
                _apply(rows, k, op, values)
        return rows.get(key)

    def _append(self, entry: object) -> None:
        self.clock += 1
        self.log.append((self.clock, entry))

    def _one(self, phase: str, choice: int) -> str | None:
        found = [window for window, (_, _, at) in self.reading.items() if at == phase]
        return found[choice % len(found)] if found else None

    def _mark(self, position: int, id: str, mark: str) -> None:
        window = self.windows.mark(id, mark, (position, 0))
        if window is not None and mark == HIGH and window.state is State.RELEASED:
            table, key, _ = self.reading[id]
            if window.content is not None:
                self.batch.append((self._place(window.low, (position, 0)), table, _event(key, FULL, window.content)))
                self.batched.append((_rows(id, window.reading, table), key))
            self.released.append(id)

    def _check_disjoint(self) -> None:
        keys = [(rows.layout.relation.doctype, key) for rows, key in self.batched]
        if are_disjoint(rows for rows, _ in self.batched):
            assert len(keys) == len(set(keys)), f"rows would be handed over twice: {keys}"

    def _place(self, low: tuple[int, int], high: tuple[int, int]) -> tuple[int, int]:
        return low

    def _deliver(self, table: int, final: Final) -> None:
        if final.doc is None:
            self.target.pop((table, final.id), None)
        elif final.missing:  # the target merges what it gets into what it has
            self.target.setdefault((table, final.id), {}).update(final.doc)
        else:
            self.target[table, final.id] = final.doc

    def _rewind(self) -> None:
        self.read_to = next((i for i, (at, _) in enumerate(self.log) if at >= self.acknowledged), len(self.log))

    @property
    def source(self) -> dict[tuple[int, str], Row]:
        return {(table, key): row for table in TABLES for key, row in self.visible[table].items()}


RELATION = Relation(1, "public", "t", "d", (), ())


def _rows(id: str, reading: int, table: int) -> WindowRows:
    relation = Relation(table, "public", f"t{table}", "d", (), ())
    return WindowRows(id, 1, reading, Layout(relation, (), ()), ("file",), ("file",), (0,), 1, 1, 1)


def _event(key: str, op: int, values: Row | None) -> Event:
    if op == PARTIAL:
        return Event("t", key, op, PICKLE, -1, pickle.dumps(Partial(values or {}, ("big",), Source(RELATION, (key,)))))
    return Event("t", key, op, PICKLE, -1, pickle.dumps(values) if values else None)


def _apply(rows: dict[str, Row], key: str, op: int, values: Row | None) -> None:
    if op == DELETED:
        rows.pop(key, None)
    elif op == PARTIAL:
        rows[key] = rows[key] | (values or {})
    else:
        rows[key] = dict(values or {})


STEPS = (
    *("begin", "write", "write", "write", "commit", "commit", "show"),
    *("low", "look", "high", "low", "look", "high", "read", "read", "read"),
    *("end_batch", "prune", "retry", "crash", "reconnect", "abandon", "high_again"),
)
histories = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 107)), max_size=80)
searching = settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def run(history: list[tuple[str, int]], kind: type[Model] = Model) -> Model:
    model = kind()
    for step, choice in history:
        getattr(model, step)(choice)
    model.finish()
    return model


@searching
@given(histories)
def test_the_target_ends_as_the_source(history: list[tuple[str, int]]) -> None:
    model = run(history)
    assert model.target == model.source


UPDATE, PARTIAL_UPDATE = [("begin", 0), ("write", 36), ("commit", 0)], [("begin", 0), ("write", 0), ("commit", 0)]
WINDOW = [("low", 0), ("look", 0), ("high", 0)]
READ_ALL = [("read", 0)] * 3 + [("end_batch", 0)]

# A commit that is in the log and that nobody sees yet; then the row is re-read.
HIDDEN = [*UPDATE, ("read", 0), *WINDOW, ("show", 0), *READ_ALL]
# The same with a restart in between.
HIDDEN_THEN_CRASH = [*UPDATE, ("read", 0), ("end_batch", 0), ("crash", 0), *WINDOW, ("show", 0), *READ_ALL]
# It becomes visible after the row was read and before the log is.
HIDDEN_THEN_SEEN = [*UPDATE, *WINDOW, ("show", 0), ("read", 0), ("prune", 0), *READ_ALL]
# The same, but the low mark is read before the rows are.
HIDDEN_THEN_SEEN_LATE = [
    *(*UPDATE, ("read", 0), ("low", 0), ("read", 0), ("look", 0), ("show", 0), ("prune", 0), ("high", 0)),
    *READ_ALL,
]
# Rows are in a batch when who re-reads them begins anew, or when a mark comes twice: they are read once more.
ABANDONED = [*WINDOW, ("read", 0), ("read", 0), ("abandon", 0), *WINDOW, *READ_ALL]
DOUBLED = [*WINDOW, ("high_again", 0), *READ_ALL[:3], ("retry", 0), *WINDOW, *READ_ALL]
# A change between the marks.
IN_WINDOW = [*WINDOW[:2], *UPDATE, ("show", 0), WINDOW[2], *READ_ALL]
PARTIAL_IN_WINDOW = [*WINDOW[:2], *PARTIAL_UPDATE, ("show", 0), WINDOW[2], *READ_ALL]


@pytest.mark.parametrize("history", [HIDDEN, HIDDEN_THEN_CRASH, HIDDEN_THEN_SEEN, HIDDEN_THEN_SEEN_LATE])
def test_a_commit_that_is_hidden_from_the_snapshot_voids_the_window(history: list[tuple[str, int]]) -> None:
    model = run(history)
    assert model.voided == 1
    assert model.target == model.source


@pytest.mark.parametrize("history", [ABANDONED, DOUBLED], ids=["abandoned", "doubled"])
def test_rows_that_are_in_a_batch_twice_are_told_apart(history: list[tuple[str, int]]) -> None:
    assert run(history).target == run(history).source
    with patch.object(Windows, "_let_go", lambda *_: None), pytest.raises(AssertionError, match="handed over twice"):
        run(history)


class AtHigh(Model):
    """What would happen if re-read rows stood at their high mark."""

    def _place(self, low: tuple[int, int], high: tuple[int, int]) -> tuple[int, int]:
        return high


@pytest.mark.parametrize(
    ("history", "where", "rule", "instead"),
    [
        (HIDDEN, Unseen, "hidden_from", lambda *_: None),
        (HIDDEN_THEN_CRASH, Unseen, "hold_lsn", None),
        (HIDDEN_THEN_SEEN, Windows, "_unsettled", lambda _: []),
        (HIDDEN_THEN_SEEN, Window, "lacks", lambda window, _: window.low is not None),
        (HIDDEN_THEN_SEEN_LATE, Window, "lacks", lambda window, _: window.low is None),
        (PARTIAL_IN_WINDOW, folding, "merge", lambda older, newer: newer),
        (IN_WINDOW, Model, "_place", AtHigh._place),
    ],
    ids=["guard", "hold", "pins", "pins before the low mark is read", "pins after it", "folding", "low mark"],
)
def test_each_rule_is_needed(history: list[tuple[str, int]], where: object, rule: str, instead: object) -> None:
    assert run(history).target == run(history).source
    with patch.object(where, rule, instead):
        model = run(history)
    assert model.target != model.source


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "rule", "instead"),
    [
        (Unseen, "hidden_from", lambda *_: None),
        (folding, "merge", lambda older, newer: newer),
        (Model, "_place", AtHigh._place),
    ],
    ids=["guard", "folding", "low mark"],
)
def test_the_search_finds_a_missing_rule(where: object, rule: str, instead: object) -> None:
    @searching
    @given(histories)
    def search(history: list[tuple[str, int]]) -> None:
        model = run(history)
        assert model.target == model.source

    with patch.object(where, rule, instead), pytest.raises(AssertionError):
        search()
