"""Many rows of a table at once: a column at a time, and so in a fraction of the time that a row at a time takes.

What comes out is what `relation` gives for each row: where a value is none of the usual, it is decoded by itself. Rows
that left a value out, and rows so wide that a second copy of them counts, are not for here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dbsync import values
from dbsync.errors import DecodeError
from dbsync.mirror import BINARY, LEFT_OUT, NEW, PADDING, TEXT, TUPLE_AT, Bytes, Ints
from dbsync.relation import Relation, unescape

Texts: TypeAlias = "Sequence[str | None]"
Convert: TypeAlias = Callable[[Texts], Sequence[Any]]

WIDE_BYTES = 64 * 1024  # from here on a row is opened by itself


class Content:
    """The bytes of many frames behind one another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.bytes: Bytes = np.frombuffer(data + PADDING, dtype=np.uint8)

    @cached_property
    def text(self) -> str:
        """As Latin-1, so that places in it are places in the bytes."""
        return self._data.decode("latin-1")

    def number(self, at: Ints, size: int) -> Ints:
        """The numbers that stand at these places, `size` bytes each."""
        found: Ints = self.bytes[at].astype(np.int64)
        for place in range(1, size):
            found = (found << 8) | self.bytes[at + place]
        return found


class _Columns:
    """Documents with these columns, from the columns' texts."""

    def __init__(self, names: Sequence[str], specs: Sequence[values.Spec]) -> None:
        self._names = tuple(names)
        self._convert = [converter(spec) for spec in specs]

    def documents(self, columns: Sequence[Texts]) -> list[dict[str, Any]]:
        # In C from end to end: what a step of Python's own costs here is paid for each row.
        return list(map(dict, map(zip, itertools.repeat(self._names), self.rows(columns))))

    def rows(self, columns: Sequence[Texts]) -> Iterator[tuple[Any, ...]]:
        """The typed values of each row."""
        return zip(*self.typed(columns), strict=True)

    def typed(self, columns: Sequence[Texts]) -> list[Sequence[Any]]:
        """The typed values of each column."""
        return [convert(texts) for convert, texts in zip(self._convert, columns, strict=True)]


class FrameColumns(_Columns):
    """Opens frames of one table: Inserts and Updates as they came off the wire."""

    def __init__(self, relation: Relation) -> None:
        super().__init__(relation.column_names, [column.spec for column in relation.columns])
        self._relation = relation

    def texts(self, frames: pa.BinaryArray) -> list[Texts] | None:
        """The texts of each column, or None where the frames have to be opened one by one."""
        data, starts = _content(frames)
        return self.texts_at(Content(data), starts) if len(data) <= WIDE_BYTES * len(frames) else None

    def texts_at(self, content: Content, starts: Ints) -> list[Texts] | None:
        """The same of frames that begin at these places."""
        walk = _Walk(content, len(self._names), self._relation.doctype)
        at = walk.new_tuples(starts)
        columns = []
        for _ in self._names:
            start, length, at = walk.column(at)
            if walk.is_special:
                return None
            columns.append(_texts(content.text, start, length))
        return columns


class LineColumns(_Columns):
    """Opens lines of COPY's text format; `columns` names what is in them, in its order."""

    def __init__(self, relation: Relation, columns: Sequence[str]) -> None:
        specs = {column.name: column.spec for column in relation.columns}
        super().__init__(columns, [specs[name] for name in columns])

    def texts(self, lines: pa.BinaryArray) -> list[Texts]:
        whole = str(b"\t".join(lines.to_pylist()), "utf-8")
        texts, width = whole.split("\t"), len(self._names)
        if len(texts) != width * len(lines):
            raise DecodeError(f"A line of COPY does not have the {width} columns asked for.")
        columns = (texts[column::width] for column in range(width))
        return [_plain(column) for column in columns] if "\\" in whole else list(columns)


class _Walk:
    """Goes through the tuples of all frames side by side."""

    def __init__(self, content: Content, width: int, doctype: str) -> None:
        self._content = content
        self._bytes = content.bytes
        self._width = width
        self._doctype = doctype
        self.is_special = False  # a value was left out, or is not text

    def new_tuples(self, starts: Ints) -> Ints:
        """Where the first column of each new row stands; an Update may have (parts of) the old row before it."""
        at = starts + TUPLE_AT
        with_old = np.flatnonzero(self._bytes[at - 1] != NEW)
        if len(with_old):
            old = self._columns_begin(at[with_old])
            for _ in range(self._width):
                _, _, old = self.column(old)
            self.is_special = False  # whatever the old row left out
            if not bool((self._bytes[old] == NEW).all()):
                raise DecodeError("An update in the log has an old row and no new one.")
            at[with_old] = old + 1
        return self._columns_begin(at)

    def column(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """Where the column's text starts in each row, how long it is (-1: NULL), and where the next column stands."""
        kind = self._bytes[at]
        if bool(((kind == LEFT_OUT) | (kind == BINARY)).any()):
            self.is_special = True
        valued = (kind == TEXT) | (kind == BINARY)
        length = np.where(valued, self._content.number(at + 1, 4), -1)
        return at + 5, length, at + np.where(valued, 5 + length, 1)

    def _columns_begin(self, at: Ints) -> Ints:
        if not bool((self._content.number(at, 2) == self._width).all()):
            raise DecodeError(f"A row of {self._doctype} does not have the {self._width} columns announced.")
        return at + 2


def _content(frames: pa.BinaryArray) -> tuple[bytes, Ints]:
    """The bytes of all frames behind one another, and where each begins."""
    _, offsets, data = frames.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[frames.offset : frames.offset + len(frames) + 1]
    content = bytes(memoryview(data)[int(ends[0]) : int(ends[-1])]) if data is not None else b""
    return content, (ends[:-1] - ends[0]).astype(np.int64)


def _texts(content: str, start: Ints, length: Ints) -> Texts:
    """A column's values."""
    ends = (start + np.maximum(length, 0)).tolist()
    found: list[str | None]
    if bool((length < 0).any()):
        starts = np.where(length < 0, -1, start).tolist()
        found = [content[a:b] if a >= 0 else None for a, b in zip(starts, ends, strict=True)]
        is_ascii = "".join(filter(None, found)).isascii()
    else:
        whole = [content[a:b] for a, b in zip(start.tolist(), ends, strict=True)]
        is_ascii = "".join(whole).isascii()
        found = [*whole]
    if is_ascii:
        return found
    return [text if text is None or text.isascii() else str(text.encode("latin-1"), "utf-8") for text in found]


def _plain(texts: list[str]) -> Texts:
    """A column of COPY's text format as PostgreSQL's plain text."""
    if "\\" not in "".join(texts):
        return texts
    return [None if text == "\\N" else unescape(text) if "\\" in text else text for text in texts]


def converter(spec: values.Spec) -> Convert:
    """What `values.compile` gives, for a column."""
    one = values.compile(spec)

    def each(texts: Texts) -> Sequence[Any]:
        return [None if text is None else one(text) for text in texts]

    quick = _QUICK.get(spec) if isinstance(spec, str) else None
    if quick is None:
        return each

    def convert(texts: Texts) -> Sequence[Any]:
        try:
            return quick(texts)
        except (ValueError, TypeError, InvalidOperation):
            return each(texts)

    return convert


def _numerics(texts: Texts) -> Sequence[Any]:
    exact = values.EXACT
    return [None if text is None else Decimal(text, exact) for text in texts]


def _timestamps(texts: Texts) -> Sequence[Any]:
    read = datetime.fromisoformat
    return [None if text is None else read(text) for text in texts]


def _timestamptzs(texts: Texts) -> Sequence[Any]:
    found = _timestamps(texts)
    if all(at is None or at.tzinfo is UTC for at in found):
        return found
    raise ValueError


def _dates(texts: Texts) -> Sequence[Any]:
    read = date.fromisoformat
    return [None if text is None else read(text) for text in texts]


_QUICK: dict[str, Convert] = {
    "text": lambda texts: texts,
    "bool": lambda texts: [values.BOOLS.get(text, text) if text is not None else None for text in texts],
    "int": lambda texts: list(map(int, texts)),  # type: ignore[arg-type]
    "float": lambda texts: list(map(float, texts)),  # type: ignore[arg-type]
    "numeric": _numerics,
    "date": _dates,
    "timestamp": _timestamps,
    "timestamptz": _timestamptzs,
}
