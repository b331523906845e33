"""What must come out, found the slow way: a database made of dicts that writes the log PostgreSQL would write.

`Source` changes its rows and writes each change down twice: as pgoutput (what dbsync gets) and as the plain fact (what
is true). `Expected` walks the facts with a loop and says what a target must hold.
"""

from __future__ import annotations

import json
import random
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dbsync import Batcher, values
from dbsync.board import WindowBoard
from dbsync.config import Settings
from dbsync.dispatch import Dispatch, HandlerDispatch, MirrorDispatch
from dbsync.fold import Final
from dbsync.handler import MirrorHandler
from dbsync.keyless import Keyless
from dbsync.lsn import LSN
from dbsync.pending import Pending
from dbsync.pgoutput import UNCHANGED, microseconds
from dbsync.pgoutput import Relation as RelationMessage
from dbsync.relation import Column, Relation
from dbsync.spool import BatchWriter

TEXT = 25
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

Row = dict[str, str | None]
State = dict[str, dict[str, Row]]


def table(oid: int, name: str, key: int = 1, identity: str = "d") -> Relation:
    """A table of texts: `key` key columns, one ordinary column, two that may be TOASTed."""
    names = [*(f"k{n}" for n in range(key)), "plain", "big", "huge"]
    columns = tuple(Column(n, TEXT, -1, values.decoder(TEXT)) for n in names)
    return Relation(oid, "public", name, identity, columns, tuple(range(key)))


TOASTED = ("big", "huge")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that happened. `carried` are the columns of the new row that the log tells."""

    kind: str  # insert, update, delete, truncate
    relation: Relation
    id: str = ""
    old_id: str | None = None
    new: Row = field(default_factory=dict)
    carried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Told:
    """A transaction: its messages as they come off the wire, and what they mean."""

    lsn: LSN
    messages: tuple[bytes, ...]
    facts: tuple[Fact, ...]
    after: State


class Source:
    def __init__(self, *relations: Relation) -> None:
        self.relations = {relation.doctype: relation for relation in relations}
        self.state: State = {doctype: {} for doctype in self.relations}
        self.log: list[Told] = []
        self._messages: list[bytes] = []
        self._facts: list[Fact] = []
        self._lsn = 0x1000

    def insert(self, doctype: str, **row: str | None) -> None:
        relation = self.relations[doctype]
        new = {name: row.get(name) for name in relation.column_names}
        self.state[doctype][row_id(relation, new)] = new
        self._tell(b"I" + _oid(relation) + b"N" + _tuple(_texts(new)))
        self._facts.append(Fact("insert", relation, row_id(relation, new), None, new, frozenset(new)))

    def update(self, doctype: str, id: str, **changes: str | None) -> None:
        """A TOASTed value that is not among the changes is not told, unless the table tells its whole old rows."""
        relation = self.relations[doctype]
        old = self.state[doctype].pop(id)
        new = old | changes
        new_id = row_id(relation, new)
        self.state[doctype][new_id] = new
        left_out = {name for name in TOASTED if name not in changes and old[name] is not None}
        values_told = [UNCHANGED if name in left_out else text for name, text in zip(new, _texts(new), strict=True)]
        self._tell(b"U" + _oid(relation) + self._old(relation, old, new_id != id) + b"N" + _tuple(values_told))
        carried = frozenset(new) if relation.has_full_identity else frozenset(new) - left_out
        self._facts.append(Fact("update", relation, new_id, id if new_id != id else None, new, carried))

    def delete(self, doctype: str, id: str) -> None:
        relation = self.relations[doctype]
        old = self.state[doctype].pop(id)
        self._tell(b"D" + _oid(relation) + self._old(relation, old, True))
        self._facts.append(Fact("delete", relation, id))

    def truncate(self, doctype: str) -> None:
        relation = self.relations[doctype]
        self.state[doctype] = {}
        self._tell(b"T" + struct.pack(">IB", 1, 0) + _oid(relation))
        self._facts.append(Fact("truncate", relation))

    def commit(self) -> None:
        self._lsn += 0x100
        after = {doctype: dict(rows) for doctype, rows in self.state.items()}
        self.log.append(Told(LSN(self._lsn), tuple(self._messages), tuple(self._facts), after))
        self._messages, self._facts = [], []

    def complete(self, at: int = -1) -> Callable[[list[Final]], Iterator[Final]]:
        """Reads missing values from the source as it is after that transaction."""

        def look_up(finals: list[Final]) -> Iterator[Final]:
            for final in finals:
                assert final.source
                assert final.doc is not None
                assert final.missing
                rows = self.log[at].after[final.source.relation.doctype]
                row = rows.get(_id(final.source.key))
                if row is not None:
                    yield final._replace(doc=final.doc | {name: row[name] for name in final.missing}, missing=())

        return look_up

    def _tell(self, message: bytes) -> None:
        self._messages.append(message)

    def _old(self, relation: Relation, old: Row, wanted: bool) -> bytes:
        if relation.has_full_identity:
            return b"O" + _tuple(_texts(old))
        if not wanted:
            return b""
        key = set(relation.key_names)
        return b"K" + _tuple([text if name in key else None for name, text in zip(old, _texts(old), strict=True)])


@dataclass(slots=True)
class Expected:
    """What a batch of these transactions must come to."""

    truncated: set[str] = field(default_factory=set)
    final: dict[tuple[str, str], Row | None] = field(default_factory=dict)
    told: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)  # columns the batch's log has values of
    moved: set[tuple[str, str]] = field(default_factory=set)  # ids the target cannot have the missing columns of

    @classmethod
    def of(cls, transactions: Iterable[Told]) -> Expected:
        expected = cls()
        for transaction in transactions:
            for fact in transaction.facts:
                expected._take(fact)
        return expected

    def _take(self, fact: Fact) -> None:
        doctype = fact.relation.doctype
        at = (doctype, fact.id)
        if fact.kind == "truncate":
            self.truncated.add(doctype)
            for known in [known for known in self.final if known[0] == doctype]:
                del self.final[known]
                self.told.pop(known, None)
                self.moved.discard(known)
            return
        if fact.kind == "delete":
            self.final[at] = None
            self.told.pop(at, None)
            self.moved.discard(at)
            return
        before = at
        if fact.kind == "insert":
            self.moved.discard(at)
        if fact.old_id is not None:
            before = (doctype, fact.old_id)
            self.final[before] = None
            self.moved.discard(before)
            self.moved.add(at)
        known_columns = self.told.pop(before, frozenset()) if fact.kind == "update" else frozenset()
        self.told[at] = fact.carried | known_columns
        self.final[at] = fact.new

    def applied_to(self, target: State) -> State:
        after = {doctype: dict(rows) for doctype, rows in target.items()}
        for doctype in self.truncated:
            after[doctype] = {}
        for (doctype, id), row in self.final.items():
            rows = after.setdefault(doctype, {})
            if row is None:
                rows.pop(id, None)
            else:
                rows[id] = row
        return after


def row_id(relation: Relation, row: Row) -> str:
    return _id([row[name] or "" for name in relation.key_names])


def _id(texts: Any) -> str:
    return texts[0] if len(texts) == 1 else json.dumps(list(texts))


def _texts(row: Row) -> list[bytes | None]:
    return [None if text is None else text.encode() for text in row.values()]


def _oid(relation: Relation) -> bytes:
    return relation.oid.to_bytes(4, "big")


def _tuple(cells: Iterable[Any]) -> bytes:
    told = [b"n" if c is None else b"u" if c is UNCHANGED else b"t" + struct.pack(">I", len(c)) + c for c in cells]
    return struct.pack(">H", len(told)) + b"".join(told)


class _Known:
    """Stands for the system catalog."""

    def __init__(self, relations: Iterable[Relation]) -> None:
        self._relations = {relation.oid: relation for relation in relations}

    def relation(self, message: RelationMessage) -> Relation:
        return self._relations[message.oid]


class _Marks:
    """Stands for the Syncer a handler talks to."""

    def __init__(self) -> None:
        self.dispatch: HandlerDispatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatch, name)


def dispatch(source: Source, writer: BatchWriter, *, by_handler: bool) -> Dispatch:
    """The way into a batch: frames as they are, or marks of a handler that mirrors."""
    known, pending = _Known(source.relations.values()), Pending(writer.folder / "pending")
    args: Any = (Settings(dsn="host=nowhere"), known, WindowBoard(), _no_split, LSN(0), pending, threading.Event())
    if not by_handler:
        taken: Dispatch = MirrorDispatch(Keyless(args[0], Batcher()), *args)
    else:
        handler, marks = MirrorHandler(), _Marks()
        handler.syncer = marks  # type: ignore[assignment]
        taken = marks.dispatch = HandlerDispatch(handler, *args)
    taken.continue_in(writer)
    for relation in source.relations.values():
        taken.take(_frame(_describe(relation)))
    return taken


def _no_split() -> BatchWriter:
    raise AssertionError("no table changed its shape")


def send(taken: Dispatch, transaction: Told, *, whole: bool = True) -> None:
    """The frames of a transaction, its commit too unless it is not `whole`."""
    at, time = int(transaction.lsn), microseconds(NOW)
    taken.take(_frame(b"B" + struct.pack(">QqI", at, time, 1)))
    for message in transaction.messages:
        taken.take(_frame(message))
    if whole:
        taken.take(_frame(b"C" + struct.pack(">BQQq", 0, at, at + 8, time)))


def _describe(relation: Relation) -> bytes:
    columns = b"".join(
        struct.pack(">B", n in relation.key) + c.name.encode() + b"\0" + struct.pack(">Ii", c.type_oid, c.type_modifier)
        for n, c in enumerate(relation.columns)
    )
    names = relation.namespace.encode() + b"\0" + relation.name.encode() + b"\0" + relation.replica_identity.encode()
    return b"R" + _oid(relation) + names + struct.pack(">H", len(relation.columns)) + columns


def _frame(message: bytes) -> memoryview:
    return memoryview(b"w" + struct.pack(">QQq", 0, 0, 0) + message)


TEXTS = ("", "a", "ü", "日本語", '"quoted"', "a,b", "{x}", "back\\slash", "new\nline", "NULL", "😀")


class Turmoil:
    """A source to which anything happens, over few keys, so that much happens to each."""

    def __init__(self, rng: random.Random, keys: int = 12) -> None:
        self.rng = rng
        self.keys = keys
        self.source = Source(
            table(101, "one"), table(102, "two", key=2), table(103, "whole", identity="f"), table(104, "größe x")
        )
        self._n = 0

    def transactions(self, count: int) -> None:
        for _ in range(count):
            for _ in range(self.rng.randint(1, 12)):
                self._happen()
            self.source.commit()

    def _happen(self) -> None:
        rng, source = self.rng, self.source
        doctype = rng.choice(list(source.relations))
        rows = source.state[doctype]
        what = rng.random()
        if what < 0.005:
            source.truncate(doctype)
        elif what < 0.3 or not rows:
            key = self._free_key(doctype)
            if key is not None:
                source.insert(doctype, **key, plain=self._text(), big=self._text(), huge=self._text())
        elif what < 0.45:
            source.delete(doctype, rng.choice(list(rows)))
        else:
            self._update(doctype, rng.choice(list(rows)), moves=what > 0.8)

    def _update(self, doctype: str, id: str, *, moves: bool) -> None:
        changes: dict[str, str | None] = {"plain": self._text()}
        for name in TOASTED:
            if self.rng.random() < 0.3:
                changes[name] = self._text()
        changes |= (self._free_key(doctype) or {}) if moves else {}
        self.source.update(doctype, id, **changes)

    def _free_key(self, doctype: str) -> dict[str, str] | None:
        relation = self.source.relations[doctype]
        key = {name: self.rng.choice(TEXTS[: self.keys]) for name in relation.key_names}
        taken = row_id(relation, {**key}) in self.source.state[doctype]
        return None if taken else key

    def _text(self) -> str | None:
        self._n += 1
        return None if self.rng.random() < 0.1 else f"{self.rng.choice(TEXTS)}{self._n}"
