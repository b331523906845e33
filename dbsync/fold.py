"""From the events of a record to its final state, on an executor.

An event that lacks values (an UPDATE does not carry a TOASTed value that did not change) takes each from the newest
event before it that has it: columns are folded, not rows. The values travel as they came and are opened here, and only
where somebody will look at them.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dbsync.mirror import NEW, TUPLE_AT
from dbsync.pgoutput import split_tuple
from dbsync.relation import LineDecoder, Relation, RowDecoder
from dbsync.spool import DELETED, FRAME, LINE, PARTIAL, Layout


class Event(NamedTuple):
    """A row of a segment, without its place in the order: events come in order."""

    type: str
    id: str
    op: int
    form: int
    relation: int
    body: bytes | None
    prior: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values that a document lacks can be read: a row of a table, by the texts of its key."""

    relation: Relation
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """The body of a mark whose document lacks values."""

    doc: dict[str, Any]
    missing: tuple[str, ...]
    source: Source


class Final(NamedTuple):
    """What becomes of a record: deleted (`doc` is None), or a document and what is still missing in it."""

    type: str
    id: str
    doc: dict[str, Any] | None
    missing: tuple[str, ...] = ()
    source: Source | None = None
    moved: bool = False  # it had another id before, so that nothing is known under this one


class Opener:
    """Opens the bodies of events."""

    def __init__(self, relations: tuple[Relation, ...], layouts: tuple[Layout, ...] = ()) -> None:
        self._relations = relations
        self._decoders = [RowDecoder(relation) for relation in relations]
        self._layouts = layouts
        self._lines = [LineDecoder(layout.relation, layout.columns) for layout in layouts]

    def open(self, event: Event) -> Final:
        if event.op == DELETED or event.body is None:
            return Final(event.type, event.id, None)
        if event.form == FRAME:
            return self._open_frame(event, event.body)
        if event.form == LINE:
            return self._open_line(event, event.body)
        body = pickle.loads(event.body)
        if isinstance(body, Partial):
            return Final(event.type, event.id, body.doc, body.missing, body.source)
        return Final(event.type, event.id, body)

    def _open_frame(self, event: Event, frame: bytes) -> Final:
        at = TUPLE_AT
        if frame[TUPLE_AT - 1] != NEW:
            _, end = split_tuple(frame, TUPLE_AT)
            at = end + 1
        raw, _ = split_tuple(frame, at)
        doc, missing = self._decoders[event.relation].document(raw)
        if not missing:
            return Final(event.type, event.id, doc)
        relation = self._relations[event.relation]
        return Final(event.type, event.id, doc, missing, Source(relation, key_texts(relation, event.id)))

    def _open_line(self, event: Event, line: bytes) -> Final:
        layout = self._layouts[event.relation]
        doc = self._lines[event.relation].document(line)
        return self.partial_line(event.id, doc, layout) if layout.left_out else Final(event.type, event.id, doc)

    def partial_line(self, id: str, doc: dict[str, Any], layout: Layout) -> Final:
        """A re-read row of a SELECT that left columns out."""
        source = Source(layout.relation, key_texts(layout.relation, id))
        return Final(layout.relation.doctype, id, doc, layout.left_out, source)


def key_texts(relation: Relation, id: str) -> tuple[str, ...]:
    """The texts of the key an id was made of."""
    return (id,) if len(relation.key) == 1 else tuple(json.loads(id))


@dataclass(slots=True)
class _State:
    """A record while its events are replayed. `event` is unopened as long as nothing needs its values."""

    event: Event
    final: Final | None = None
    before: _State | None = None  # what a deleted record was: a changed key takes its values along


def fold(groups: Iterable[Iterable[Event]], opener: Opener, superseded: Counter[int] | None = None) -> Iterator[Final]:
    """Final states of events that come in order, a group of related ids at a time.

    `superseded` counts, by window, the re-read rows that a newer event stands after.
    """
    for group in groups:
        states: dict[str, _State] = {}
        for event in group:
            known = states.get(event.id)
            if superseded is not None and known and known.event.form == LINE:
                superseded[known.event.relation] += 1
            states[event.id] = _next(states, event, opener)
        for state in states.values():
            yield state.final or opener.open(state.event)


def _next(states: dict[str, _State], event: Event, opener: Opener) -> _State:
    known = states.get(event.id)
    if event.op == DELETED:
        return _State(event, before=known)
    if event.op != PARTIAL:
        return _State(event)
    final = opener.open(event)._replace(moved=event.prior is not None)
    base = _base(states, event, known)
    if base is None:
        return _State(event, final)
    return _State(event, merge(base.final or opener.open(base.event), final))


def _base(states: dict[str, _State], event: Event, known: _State | None) -> _State | None:
    """The record that a partial event builds on: its own past, or that of the key it had before."""
    if event.prior is not None:
        moved = states.get(event.prior)
        return moved.before if moved else None
    return known if known and known.event.op != DELETED else None


def merge(older: Final, newer: Final) -> Final:
    """The newer state, its missing values taken from the older one where that has them."""
    if older.doc is None or newer.doc is None:
        return newer
    found = {name: older.doc[name] for name in newer.missing if name in older.doc}
    missing = tuple(name for name in newer.missing if name not in found)
    return newer._replace(doc=newer.doc | found, missing=missing, moved=newer.moved or older.moved)
