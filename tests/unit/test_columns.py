"""Rows decoded a column at a time are what they are decoded one by one, whatever their values, old rows and gaps."""

from __future__ import annotations

import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from dbsync import ahead, values
from dbsync.ahead import Ahead
from dbsync.columns import FrameColumns, LineColumns
from dbsync.pgoutput import UNCHANGED, filled
from dbsync.relation import Column, LineDecoder, Relation, RowDecoder, row_id

Cell = Any  # a text, None or UNCHANGED

ODD: dict[values.Spec, tuple[str, ...]] = {
    "text": ("", "NULL", "ü\t\n\\", "a\\N", "日本😀", "\x85 \u2028"),
    "bool": ("t", "f"),
    "int": ("0", "-1", "9223372036854775807"),
    "float": ("0.1", "NaN", "Infinity", "-Infinity", "-0", "1e-45"),
    "numeric": ("0.000", "NaN", "Infinity", "9" * 300, "1e-400"),
    "bytea": ("\\x", "\\x00ff"),
    "date": ("2000-01-01", "infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31"),
    "time": ("12:00:00.5", "24:00:00", "12:00:00+05:30", "24:00:00+15:59:59", "12:34:56-15:59:59"),
    "timestamp": ("1999-01-01 00:00:00.1", "infinity", "0044-03-15 12:00:00 BC", "123456-07-08 09:10:11.5"),
    "timestamptz": ("2000-01-01 00:00:00+00", "2000-01-01 00:00:00.123+05:30", "infinity", "0044-03-15 12:00:00+00 BC"),
    "interval": ("1 day", "1 mon", "-1 days +02:03:04.000005", "00:00:00"),
    "uuid": ("00000000-0000-0000-0000-000000000000",),
    "json": ("null", "[]", "1e400", "123456789012345678901234567890", '{"a":1.10}', '"x"'),
    ("array", ",", "text"): ("{}", "{1,NULL}", "{{1},{2}}", "[0:1]={1,2}"),
}
SEEDS = range(60)


def table(rng: random.Random) -> Relation:
    """Of one or more columns; half of the time the usual value is all there is, so that the quick ways are taken."""
    specs = rng.choices(list(ODD), k=rng.randint(1, 6))
    columns = tuple(Column(f"c{n}", 25, -1, spec) for n, spec in enumerate(specs))
    key = tuple(sorted(rng.sample(range(len(columns)), rng.randint(1, min(2, len(columns))))))
    return Relation(7, "public", "t", "d", columns, key, may_lack_key=True)


def rows(rng: random.Random, relation: Relation) -> list[tuple[Cell, ...]]:
    is_usual = rng.random() < 0.5

    def cell(column: Column) -> Cell:
        if not is_usual and rng.random() < 0.2:
            return None
        return ODD[column.spec][0] if is_usual else rng.choice(ODD[column.spec])

    return [tuple(map(cell, relation.columns)) for _ in range(rng.randint(1, 30))]


def raw(row: tuple[Cell, ...]) -> tuple[Cell, ...]:
    return tuple(cell.encode() if isinstance(cell, str) else cell for cell in row)


def wire(row: tuple[Cell, ...]) -> bytes:
    told = (b"n" if c is None else b"u" if c is UNCHANGED else b"t" + struct.pack(">I", len(c)) + c for c in raw(row))
    return struct.pack(">H", len(row)) + b"".join(told)


def frame(rng: random.Random, relation: Relation, row: tuple[Cell, ...], kinds: str = "IUKO") -> bytes:
    """An Insert, or an Update with nothing, a key or a row of some kind before it."""
    kind = rng.choice(kinds)
    old = wire(tuple(rng.choice([None, "zzü", UNCHANGED]) for _ in row))
    before = kind.encode() + old if kind in "KO" else b""
    return (b"I" if kind == "I" else b"U") + struct.pack(">I", relation.oid) + before + b"N" + wire(row)


def line(row: tuple[Cell, ...]) -> bytes:
    """A line of COPY's text format."""
    escapes = str.maketrans(
        {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"}
    )
    return "\t".join("\\N" if cell is None else cell.translate(escapes) for cell in row).encode()


def one_by_one(relation: Relation, found: list[tuple[Cell, ...]]) -> list[dict[str, Any]]:
    decoder = RowDecoder(relation)
    return [decoder.document(raw(row))[0] for row in found]


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_and_lines(seed: int) -> None:
    rng = random.Random(seed)
    relation = table(rng)
    found = rows(rng, relation)
    frames, lines = FrameColumns(relation), LineColumns(relation, relation.column_names)
    texts = frames.texts(pa.array([frame(rng, relation, row) for row in found], pa.binary()))
    assert texts is not None
    expected = repr(one_by_one(relation, found))  # not ==, to which NaN is not NaN
    assert repr(frames.documents(texts)) == expected
    assert repr(lines.documents(lines.texts(pa.array(map(line, found), pa.binary())))) == expected
    one = LineDecoder(relation, relation.column_names)
    assert repr([one.document(line(row)) for row in found]) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_decoded_ahead(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with an old row, and tables with a value left out, wait for their turn."""
    monkeypatch.setattr(ahead, "_MANY", 1)
    rng = random.Random(seed)
    relation = table(rng)
    found = rows(rng, relation)
    if is_cut := rng.random() < 0.2:
        found[-1] = (*found[-1][:-1], UNCHANGED)
    bodies = [frame(rng, relation, row, "IU" if is_cut else "IUKO") for row in found]
    frames = [memoryview(b"w" + struct.pack(">QQq", n, n, 0) + body) for n, body in enumerate(bodies)]
    blocks = Ahead().blocks(frames, 0, {relation.oid: (relation, FrameColumns(relation))})
    assert [block is None for block in blocks] == [is_cut or body[5:6] != b"N" for body in bodies]
    documents = one_by_one(relation, found) if not is_cut else []
    for n, block in enumerate(blocks):
        if block is not None:
            lsn, new, key, id = block.take(frames[n])
            assert (lsn, repr(dict(new)), id) == (n, repr(documents[n]), row_id(relation, raw(found[n])))
            assert repr(key) == repr({name: documents[n][name] for name in relation.key_names})


def test_what_was_left_out_comes_from_the_old_row_unless_that_has_a_null() -> None:
    assert filled((b"1", b"a", None, None), (UNCHANGED, b"b", UNCHANGED, None)) == (b"1", b"b", UNCHANGED, None)
