"""Row changes in, event columns out, a segment at a time and without a Python loop over the rows.

A frame is one pgoutput Insert, Update or Delete as it came off the wire. All that a mirror of a table needs to know of
it before compaction is its key, and whether the log left a value out; both are found here by walking all frames of a
segment side by side, column by column, with numpy. The frame itself is carried on unopened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dbsync.errors import DecodeError
from dbsync.pgoutput import UNCHANGED, filled, split_tuple
from dbsync.relation import Relation

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

INSERT, UPDATE, DELETE = b"IUD"
KEY, OLD, NEW = b"KON"
TEXT, BINARY, NULL, LEFT_OUT = b"tbnu"

TUPLE_AT = 6  # a frame is: tag, relation oid (4), marker, tuple
IS_NULL, IS_LEFT_OUT = -1, -2  # in place of the length of a key's column
PADDING = bytes(8)  # lets the walk look at a length where the last column has none


@dataclass(frozen=True, slots=True)
class Slices:
    """Where each row's id lies in the segment's bytes."""

    start: Ints
    length: Ints


@dataclass(frozen=True, slots=True)
class Extract:
    """What the walk found, a place per frame. `old_id` is -1 long where the key did not change."""

    data: bytes
    offsets: Ints  # of the frames, and of the end of the last one
    oids: Ints
    is_delete: Bools
    is_partial: Bools
    ids: Slices
    old_ids: Slices

    @property
    def key_changed(self) -> Bools:
        return self.old_ids.length >= 0

    def texts(self, slices: Slices, which: Ints) -> list[str]:
        return [
            str(self.data[start : start + length], "utf-8")
            for start, length in zip(slices.start[which].tolist(), slices.length[which].tolist(), strict=True)
        ]


def extract(frames: Sequence[bytes | memoryview], relations: Mapping[int, Relation]) -> Extract:
    """Find key and completeness of every frame. Those that `keyless` finds must not be among them."""
    with _damage():
        return _Walk(frames, relations).run()


def keyless(frames: Sequence[bytes | memoryview], relations: Mapping[int, Relation]) -> list[int]:
    """The places of the frames of these tables, and of no others, that do not tell which row they are about.

    A table may have no key at all. With FULL identity its key may have been added after the change, which then may have
    a NULL in it. And what comes under the name of a partitioned table has the old values of the partition's identity.
    """
    with _damage():
        return _Walk(frames, relations).keyless()


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (IndexError, UnicodeDecodeError) as error:
        raise DecodeError("A row change in the log is damaged.") from error


class _Walk:
    def __init__(self, frames: Sequence[bytes | memoryview], relations: Mapping[int, Relation]) -> None:
        self.frames = frames
        self.relations = relations
        self.lengths: Ints = np.fromiter(map(len, frames), dtype=np.int64, count=len(frames))
        self.starts: Ints = np.zeros(len(frames), dtype=np.int64)
        np.cumsum(self.lengths[:-1], out=self.starts[1:])
        self.data = b"".join([*frames, PADDING])
        self.bytes: Bytes = np.frombuffer(self.data, dtype=np.uint8)
        self.extra: list[bytes] = []  # ids of several columns: made, not found, so they lie behind the frames
        self.extra_at = len(self.data)

    def run(self) -> Extract:
        count = len(self.frames)
        tags = self.bytes[self.starts]
        markers = self.bytes[self.starts + 5]
        oids = self._int32(self.starts + 1)
        is_partial = np.zeros(count, dtype=np.bool_)
        ids = Slices(np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64))
        old_ids = Slices(np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64))
        for oid in np.unique(oids).tolist():
            relation = self.relations.get(oid)
            if relation is None:
                raise DecodeError(f"The log has a row of a table (oid {oid}) that it did not describe.")
            mine = oids == oid
            plain = mine & (markers == NEW)
            with_old = mine & (tags == UPDATE) & (markers != NEW)
            deleted = mine & (tags == DELETE)
            for inserted, rows in ((True, plain & (tags == INSERT)), (False, plain & (tags == UPDATE))):
                found = self._new_rows(relation, np.flatnonzero(rows), needs_all=not inserted)
                _put(ids, is_partial, found)
            _put(ids, None, self._new_rows(relation, np.flatnonzero(deleted), needs_all=False))
            self._changed_keys(relation, np.flatnonzero(with_old), ids, old_ids, is_partial)
        if bool((ids.length < 0).any()):
            raise DecodeError("A row change in the log has no key.")
        merged = self._merge_full_rows(np.flatnonzero(is_partial & (tags == UPDATE) & (markers == OLD)))
        if merged is not None:
            return _Walk(merged, self.relations).run()
        data = b"".join([self.data, *self.extra])
        offsets = np.append(self.starts, self.starts[-1] + self.lengths[-1])
        return Extract(data, offsets, oids, tags == DELETE, is_partial, ids, old_ids)

    def keyless(self) -> list[int]:
        oids = self._int32(self.starts + 1)
        lacks = np.zeros(len(self.frames), dtype=np.bool_)
        for oid, relation in self.relations.items():
            rows = np.flatnonzero(oids == oid)
            lacks[rows] = self._lack_key(relation, rows) if relation.key else True
        return np.flatnonzero(lacks).tolist()

    def _lack_key(self, relation: Relation, rows: Ints) -> Bools:
        """Whether the row's key, or that of the row after the change, has a part that is not known."""
        with_old = (self.bytes[self.starts[rows]] == UPDATE) & (self.bytes[self.starts[rows] + 5] != NEW)
        lacks = np.zeros(len(rows), dtype=np.bool_)
        key, _, _ = self._tuples(relation, self.starts[rows[~with_old]] + TUPLE_AT, needs_all=False)
        lacks[~with_old] = _any_negative(key)
        if bool(with_old.any()):
            old_key, _, after = self._tuples(relation, self.starts[rows[with_old]] + TUPLE_AT, needs_all=True)
            new_key, _, _ = self._tuples(relation, after + 1, needs_all=False)
            lacks[with_old] = _any_negative(_completed(old_key, new_key))
        return lacks

    def _new_rows(self, relation: Relation, rows: Ints, *, needs_all: bool) -> tuple[Ints, Slices, Bools]:
        key, partial, after = self._tuples(relation, self.starts[rows] + TUPLE_AT, needs_all=needs_all)
        self._check_end(rows, after)
        return rows, self._ids(key), partial

    def _changed_keys(self, relation: Relation, rows: Ints, ids: Slices, old_ids: Slices, is_partial: Bools) -> None:
        """Updates with an old tuple: the key changed, or the table sends whole old rows, or the key is TOASTed."""
        if not len(rows):
            return
        old_key, _, after = self._tuples(relation, self.starts[rows] + TUPLE_AT, needs_all=True)
        if not bool((self.bytes[after] == NEW).all()):
            raise DecodeError("An update in the log has an old row and no new one.")
        new_key, partial, after = self._tuples(relation, after + 1, needs_all=True)
        self._check_end(rows, after)
        old_id, new_id = self._ids(old_key), self._ids(_completed(old_key, new_key))
        _put(ids, is_partial, (rows, new_id, partial))
        # Where the old row does not tell its key, the row is taken to be the one with the new key.
        differs = self._differ(old_id, new_id) & (old_id.length >= 0)
        old_ids.start[rows[differs]], old_ids.length[rows[differs]] = old_id.start[differs], old_id.length[differs]

    def _check_end(self, rows: Ints, at: Ints) -> None:
        if bool((at > self.starts[rows] + self.lengths[rows]).any()):
            raise DecodeError("A row change in the log ends before its last column.")

    def _tuples(self, relation: Relation, at: Ints, *, needs_all: bool) -> tuple[list[Slices], Bools, Ints]:
        """Walk a tuple in every row at once: its key columns, whether a value is left out, and where it ends."""
        width = len(relation.columns)
        partial = np.zeros(len(at), dtype=np.bool_)
        if len(at) and not bool((self._int16(at) == width).all()):
            raise DecodeError(f"A row of {relation.doctype} in the log does not have the {width} columns announced.")
        at = at + 2
        key: dict[int, Slices] = {}
        for position in range(width if needs_all else max(relation.key, default=-1) + 1):
            kind = self.bytes[at]
            valued = (kind == TEXT) | (kind == BINARY)
            length = np.where(valued, self._int32(at + 1), IS_NULL)
            left_out = kind == LEFT_OUT
            if position in relation.key:
                key[position] = Slices(at + 5, length - left_out)
            partial |= left_out
            at = at + np.where(valued, 5 + length, 1)
        return [key[position] for position in relation.key], partial, at

    def _ids(self, key: list[Slices]) -> Slices:
        if len(key) == 1:
            return key[0]
        made = Slices(np.empty(len(key[0].start), dtype=np.int64), np.empty(len(key[0].start), dtype=np.int64))
        columns = [zip(part.start.tolist(), part.length.tolist(), strict=True) for part in key]
        for row, parts in enumerate(zip(*columns, strict=True)):
            text = json.dumps([str(self.data[start : start + length], "utf-8") for start, length in parts]).encode()
            made.start[row], made.length[row] = self.extra_at, len(text)
            self.extra.append(text)
            self.extra_at += len(text)
        made.length[_any_negative(key)] = IS_NULL
        return made

    def _differ(self, one: Slices, other: Slices) -> Bools:
        data = b"".join([self.data, *self.extra]) if self.extra else self.data
        return np.fromiter(
            (
                data[a : a + an] != data[b : b + bn]
                for a, an, b, bn in zip(
                    one.start.tolist(), one.length.tolist(), other.start.tolist(), other.length.tolist(), strict=True
                )
            ),
            dtype=np.bool_,
            count=len(one.start),
        )

    def _merge_full_rows(self, rows: Ints) -> list[bytes | memoryview] | None:
        """Where the whole old row is in the log, an unchanged TOASTed value is taken from it. None: there was none."""
        frames = list(self.frames)
        for row in rows.tolist():
            frames[row] = fill_from_old(bytes(frames[row]))
        return None if all(len(frames[row]) == self.lengths[row] for row in rows.tolist()) else frames

    def _int16(self, at: Ints) -> Ints:
        return (self.bytes[at].astype(np.int64) << 8) | self.bytes[at + 1]

    def _int32(self, at: Ints) -> Ints:
        read = self.bytes
        return (
            (read[at].astype(np.int64) << 24)
            | (read[at + 1].astype(np.int64) << 16)
            | (read[at + 2].astype(np.int64) << 8)
            | read[at + 3]
        )


def _put(ids: Slices, is_partial: Bools | None, found: tuple[Ints, Slices, Bools]) -> None:
    rows, slices, partial = found
    ids.start[rows], ids.length[rows] = slices.start, slices.length
    if is_partial is not None:
        is_partial[rows] = partial


def _completed(old_key: list[Slices], new_key: list[Slices]) -> list[Slices]:
    """The new key; a TOASTed part of it that did not change stands in the old row only."""
    for old, new in zip(old_key, new_key, strict=True):
        unchanged = new.length == IS_LEFT_OUT
        new.start[unchanged], new.length[unchanged] = old.start[unchanged], old.length[unchanged]
    return new_key


def _any_negative(key: list[Slices]) -> Bools:
    """Where a part of the key is not known."""
    lacks: Bools = np.logical_or.reduce([part.length < 0 for part in key])
    return lacks


def fill_from_old(frame: bytes) -> bytes:
    """An update with a whole old row, its left-out values put in from there as far as they are known."""
    old, after = split_tuple(frame, TUPLE_AT)
    new, _ = split_tuple(frame, after + 1)
    return frame[: after + 1] + join_tuple(filled(old, new))


def join_tuple(values: Sequence[Any]) -> bytes:
    """The wire form of a tuple of texts, NULLs and values that are left out."""
    columns = (
        b"n" if value is None else b"u" if value is UNCHANGED else b"t" + len(value).to_bytes(4, "big") + value
        for value in values
    )
    return b"".join([len(values).to_bytes(2, "big"), *columns])


def gather(data: bytes, slices: Slices) -> tuple[npt.NDArray[np.int32], Bytes]:
    """The bytes of the slices behind one another, and the offsets between them: Arrow's layout of a string column."""
    lengths = np.maximum(slices.length, 0)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    source = np.repeat(slices.start - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)
    return offsets.astype(np.int32), np.frombuffer(data, dtype=np.uint8)[source]
