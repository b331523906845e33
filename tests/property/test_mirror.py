"""The walk over a segment finds in every row what a plain decode of it finds."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbsync import mirror, pgoutput, values
from dbsync.errors import DecodeError
from dbsync.pgoutput import UNCHANGED
from dbsync.relation import Column, Relation, row_id

texts = st.one_of(st.sampled_from(["", "a", "ü", '"', "\\", "[1]", "日本", "😀", "NULL"]), st.text(max_size=8))
cells = texts.map(lambda text: text.encode("utf-8", "replace"))
anything = st.none() | st.just(UNCHANGED) | cells
Cells = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A row change as it comes off the wire."""

    relation: Relation
    frame: bytes

    @property
    def is_keyless(self) -> bool:
        return plain(self)[0] is None


@st.composite
def relations(draw: st.DrawFn, oid: int, *, may_lack_key: bool = False) -> Relation:
    width = draw(st.integers(1, 5))
    key = draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=3))
    columns = tuple(Column(f"c{n}", 25, -1, values.decoder(25)) for n in range(width))
    identity = draw(st.sampled_from("df"))
    return Relation(oid, "public", f"t{oid}", identity, columns, tuple(sorted(key)), may_lack_key)


@st.composite
def changes(draw: st.DrawFn, relation: Relation) -> Written:
    if relation.may_lack_key:
        return draw(odd_changes(relation))
    kind = draw(st.sampled_from("IUD"))
    whole = relation.replica_identity == "f"
    old = _row(draw, relation, whole)
    head = kind.encode() + struct.pack(">I", relation.oid)
    if kind == "D":
        return Written(relation, head + (b"O" if whole else b"K") + _wire(old))
    if kind == "I":
        return Written(relation, head + b"N" + _wire(_row(draw, relation, True)))
    moves = draw(st.booleans())
    keeps_toasted_key = not moves and draw(st.booleans())
    tells_old = whole or moves or keeps_toasted_key
    new = list(_row(draw, relation, True))
    for position in range(len(new)):
        is_key = position in relation.key
        if is_key and tells_old and not moves:
            new[position] = UNCHANGED if keeps_toasted_key and draw(st.booleans()) else old[position]
        elif not is_key and draw(st.booleans()):
            new[position] = UNCHANGED
    before = (b"O" if whole else b"K") + _wire(old) if tells_old else b""
    return Written(relation, head + before + b"N" + _wire(tuple(new)))


@st.composite
def odd_changes(draw: st.DrawFn, relation: Relation) -> Written:
    """Whatever may be NULL is, now and then, and whatever may be left out."""
    kind = draw(st.sampled_from("IUD"))
    old, new = (_wire(tuple(draw(some) for _ in relation.columns)) for some in (st.none() | cells, anything))
    parts = {"I": b"N" + old, "D": b"O" + old, "U": draw(st.sampled_from([b"K" + old, b"O" + old, b""])) + b"N" + new}
    return Written(relation, kind.encode() + struct.pack(">I", relation.oid) + parts[kind])


def _row(draw: st.DrawFn, relation: Relation, whole: bool) -> Cells:
    def cell(position: int) -> object:
        if position in relation.key:
            return draw(cells)
        return draw(st.none() | cells) if whole else None

    return tuple(cell(position) for position in range(len(relation.columns)))


def _wire(row: Cells) -> bytes:
    told = [b"n" if c is None else b"u" if c is UNCHANGED else b"t" + struct.pack(">I", len(c)) + c for c in row]  # type: ignore[arg-type,operator]
    return struct.pack(">H", len(row)) + b"".join(told)


@st.composite
def segments(draw: st.DrawFn, *, may_lack_key: bool = False) -> tuple[dict[int, Relation], list[Written]]:
    oids = draw(st.sets(st.integers(1, 2**32 - 1), min_size=1, max_size=3))
    known = {oid: draw(relations(oid, may_lack_key=may_lack_key)) for oid in oids}
    which = st.sampled_from(sorted(known))
    count = draw(st.integers(1, 12))
    return known, [draw(changes(known[draw(which)])) for _ in range(count)]


def plain(written: Written) -> tuple[str | None, str | None, bool, bool]:
    """Id, old id, whether it is a delete, whether a value is left out: by the decoder, a row at a time."""
    relation, message = written.relation, pgoutput.decode(written.frame)
    match message:
        case pgoutput.Delete():
            return row_id(relation, message.old), None, True, False
        case pgoutput.Insert():
            return row_id(relation, message.new), None, False, False
        case pgoutput.Update():
            new, old = message.new, message.old
            if old is not None:
                new = filled(message, relation)
            id = row_id(relation, new)
            old_id = row_id(relation, old) if old is not None else None
            # A key that stands in the old tuple only makes the frame incomplete, though nothing is missing.
            partial = any(cell is UNCHANGED for cell in (new if message.old_kind == "O" else message.new))
            return id, None if old_id == id else old_id, False, partial
    raise AssertionError(message)


def filled(message: pgoutput.Update, relation: Relation) -> Cells:
    """The new row with what the old one tells of what it left out: its key, or all of it, but never that it is NULL."""
    assert message.old is not None
    kept = range(len(message.new)) if message.old_kind == "O" else relation.key
    return tuple(
        old if new is UNCHANGED and n in kept and old is not None else new
        for n, (old, new) in enumerate(zip(message.old, message.new, strict=True))
    )


@settings(max_examples=300, deadline=None)
@given(segment=segments(may_lack_key=True))
def test_changes_that_do_not_tell_their_key_are_found(segment: tuple[dict[int, Relation], list[Written]]) -> None:
    known, rows = segment
    doubtful = {oid: relation for n, (oid, relation) in enumerate(known.items()) if n > 0}
    found = mirror.keyless([row.frame for row in rows], doubtful)
    assert found == [n for n, row in enumerate(rows) if row.is_keyless and row.relation.oid in doubtful]


@settings(max_examples=300, deadline=None)
@given(segment=st.one_of(segments(), segments(may_lack_key=True)))
def test_the_walk_agrees_with_a_plain_decode(segment: tuple[dict[int, Relation], list[Written]]) -> None:
    known, rows = segment
    rows = [row for row in rows if not row.is_keyless]
    assume(rows)
    found = mirror.extract([memoryview(row.frame) for row in rows], known)
    everywhere = np.arange(len(rows))
    ids = found.texts(found.ids, everywhere)
    moved = np.flatnonzero(found.key_changed)
    old_ids = dict(zip(moved.tolist(), found.texts(found.old_ids, moved), strict=True))
    flags = zip(found.is_delete.tolist(), found.is_partial.tolist(), strict=True)
    got = [(id, old_ids.get(n), *flag) for n, (id, flag) in enumerate(zip(ids, flags, strict=True))]
    assert got == [plain(row) for row in rows]
    assert found.oids.tolist() == [row.relation.oid for row in rows]


@settings(max_examples=300, deadline=None)
@given(segment=st.one_of(segments(), segments(may_lack_key=True)))
def test_frames_are_carried_on_as_they_came(segment: tuple[dict[int, Relation], list[Written]]) -> None:
    """But for whole old rows, whose values fill what was left out."""
    known, rows = segment
    rows = [row for row in rows if not row.is_keyless]
    assume(rows)
    found = mirror.extract([row.frame for row in rows], known)
    bounds = found.offsets.tolist()
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        frame = found.data[start:end]
        message, was = pgoutput.decode(frame), pgoutput.decode(row.frame)
        if isinstance(was, pgoutput.Update) and was.old_kind == "O" and was.old is not None:
            assert isinstance(message, pgoutput.Update)
            assert message.new == filled(was, row.relation)
        else:
            assert frame == row.frame


@settings(max_examples=500, deadline=None)
@given(segment=segments(), data=st.data())
def test_a_damaged_segment_is_read_or_refused(
    segment: tuple[dict[int, Relation], list[Written]], data: st.DataObject
) -> None:
    known, rows = segment
    frames = [row.frame for row in rows]
    victim = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[victim])
    if data.draw(st.booleans()):
        del frame[data.draw(st.integers(1, len(frame) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[victim] = bytes(frame)
    with contextlib.suppress(DecodeError):
        mirror.extract(frames, known)


@given(segment=segments(), cut=st.integers(1, 200))
def test_a_row_that_ends_too_early_is_refused(segment: tuple[dict[int, Relation], list[Written]], cut: int) -> None:
    """Alone, so that there is no next row whose bytes could be taken for it."""
    known, rows = segment
    frame = rows[0].frame
    frame = frame[: max(1, len(frame) - cut)]
    key_end = max(rows[0].relation.key) == len(rows[0].relation.columns) - 1
    try:
        mirror.extract([frame], known)
    except DecodeError:
        return
    assert not key_end, "its key was cut off, and nobody noticed"
