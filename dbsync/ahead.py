"""Rows for a handler, decoded before their turn comes: of all that one read of the socket brought, a column at a time.

What is decoded ahead is what nothing in between can change the meaning of: rows up to the next message that is not
itself a row, a Begin or a Commit. A row that carries something of what it was, or leaves a value out, or is among few
of its kind, waits for its turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dbsync.columns import Content, FrameColumns, Texts
from dbsync.lsn import LSN
from dbsync.mirror import INSERT, NEW, UPDATE, Ints
from dbsync.relation import Relation, Row, identifier
from dbsync.stream import HEADER_BYTES, XLOG_DATA

_MANY = 16  # rows from which on it pays to decode them together
_LOOK_BYTES = 4 * 1024 * 1024
_TAG, _OID, _MARKER = HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 5  # where in a frame
_SHORTEST = HEADER_BYTES + 6  # no row, Begin or Commit is as short
_PASSED = np.frombuffer(b"IUDBC", dtype=np.uint8)
_WITH_NEW = np.array([INSERT, UPDATE], dtype=np.uint8)

_int = int.__new__  # a place in the log is one; no need to look at each again

Tables: TypeAlias = Mapping[int, tuple[Relation, FrameColumns]]


class Block:
    """Rows of one table, decoded together and taken one after the other.

    Kept as columns of plain values until then: objects by the thousand would have Python's collector look through them
    again and again.
    """

    def __init__(self, relation: Relation, texts: Sequence[Texts], typed: Sequence[Sequence[Any]], lsns: Ints) -> None:
        self.relation = relation
        self.next = zip(lsns.tolist(), zip(*typed, strict=True), _ids(relation, texts), strict=False).__next__
        self._names = relation.column_names
        self._key = tuple(zip(relation.key_names, relation.key, strict=True))
        self._carries = relation.is_immutable

    def take(self, frame: memoryview) -> tuple[LSN, Row, dict[str, Any], str | None]:
        """Place, new row, key and id of the next row, which came in this frame."""
        lsn, values, id = self.next()
        new = Row.whole(zip(self._names, values, strict=True), frame[HEADER_BYTES:] if self._carries else None)
        key = self._key
        if len(key) == 1:
            return _int(LSN, lsn), new, {key[0][0]: values[key[0][1]]}, id
        return _int(LSN, lsn), new, {name: values[position] for name, position in key}, id


class Ahead:
    """What is decoded of the frames of one read."""

    def __init__(self) -> None:
        self._frames: Sequence[memoryview] = ()
        self._end = 0
        self._blocks: list[Block | None] = []

    def blocks(self, frames: Sequence[memoryview], begin: int, tables: Tables) -> list[Block | None]:
        """For each frame the block that has its row, if any; looked at from `begin` on as far as can be seen."""
        if frames is not self._frames:
            self._frames, self._end, self._blocks = frames, 0, [None] * len(frames)
        if begin >= self._end:
            self._look(frames, begin, tables)
        return self._blocks

    def forget(self) -> None:
        """A table may look different from here on."""
        self._frames = ()

    def _look(self, frames: Sequence[memoryview], begin: int, tables: Tables) -> None:
        lengths = np.fromiter(map(len, frames[begin:]), dtype=np.int64, count=len(frames) - begin)
        lengths = lengths[: _first((lengths < _SHORTEST) | (np.cumsum(lengths) > _LOOK_BYTES))]
        starts = np.cumsum(lengths) - lengths
        content = Content(b"".join(frames[begin : begin + len(lengths)]))
        tags = content.bytes[starts + _TAG]
        seen = _first((content.bytes[starts] != XLOG_DATA) | ~np.isin(tags, _PASSED))
        self._end = begin + max(seen, 1)
        starts, tags = starts[:seen], tags[:seen]
        plain = np.isin(tags, _WITH_NEW) & (content.bytes[starts + _MARKER] == NEW)
        oids = content.number(starts + _OID, 4)
        for oid in np.unique(oids[plain]).tolist():
            mine = np.flatnonzero(plain & (oids == oid))
            if oid in tables and len(mine) >= _MANY and (block := _decoded(content, starts[mine], *tables[oid])):
                for place in (begin + mine).tolist():
                    self._blocks[place] = block


def _decoded(content: Content, starts: Ints, relation: Relation, columns: FrameColumns) -> Block | None:
    texts = columns.texts_at(content, starts + HEADER_BYTES)
    return None if texts is None else Block(relation, texts, columns.typed(texts), content.number(starts + 1, 8))


def _first(condition: npt.NDArray[np.bool_]) -> int:
    """Where it holds first; the end where it never does."""
    found = np.flatnonzero(condition)
    return int(found[0]) if len(found) else len(condition)


def _ids(relation: Relation, texts: Sequence[Texts]) -> Iterable[str | None]:
    if not relation.key:
        return itertools.repeat(None)
    key = [texts[position] for position in relation.key]
    if len(key) == 1:
        return key[0]
    if relation.may_lack_key and any(None in part for part in key):
        return (None if None in parts else identifier(parts) for parts in zip(*key, strict=True))
    return map(identifier, zip(*key, strict=True))
