"""A column of the source in a target: its Arrow type, text for what has no place there, and the names that are ours.

A column keeps its type whatever comes: a value that the type cannot hold (infinity in a date, NaN in a numeric) is NULL
there and stands, as PostgreSQL writes it, in the JSON object of the row's `_text`. So nothing is rounded, nothing is
dropped, and whoever reads many files or versions at once finds one type in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dbsync.batcher.jsontext import dumps
from dbsync.batcher.pgtext import text
from dbsync.errors import BatcherError
from dbsync.relation import Column

TEXTS = "_text"
WIDEST_DECIMAL = 38

NAIVE, ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")

_BY_OID: dict[int, pa.DataType] = {21: pa.int16(), 23: pa.int32(), 700: pa.float32(), 1266: pa.string()}  # 1266: timetz

_BY_SPEC: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": NAIVE,
    "timestamptz": ZONED,
}

_BY_CLASS: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    bytes: pa.binary(),
    date: pa.date32(),
}

GUESSES = (*_BY_CLASS.values(), NAIVE, ZONED, pa.string())
"""The types that `guessed` may give."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a target's column holds, and how a value becomes text where it has to."""

    type: pa.DataType
    text: Callable[[Any], str]


def declared(column: Column, *, without: Collection[pa.DataType] = ()) -> Kind:
    """For a column of the source. What the target is `without`, and all that Arrow has no type for, is text."""
    if column.spec == "json":
        return Kind(pa.string(), dumps)
    type = _declared_type(column)
    return Kind(pa.string() if type in without else type, text)


def _declared_type(column: Column) -> pa.DataType:
    if column.spec == "numeric":
        precision_scale = decimal_of(column)
        return pa.decimal128(*precision_scale) if precision_scale else pa.string()
    by_spec = _BY_SPEC.get(column.spec, pa.string()) if isinstance(column.spec, str) else pa.string()
    return _BY_OID.get(column.type_oid, by_spec)


def decimal_of(column: Column) -> tuple[int, int] | None:
    """A numeric's precision and scale, where it declares some that a decimal of 38 digits can have.

    The modifier is the precision in the upper and the scale, which has a sign, in the lower bits.
    """
    if column.type_oid != 1700 or column.type_modifier < 4:
        return None
    precision, scale = (column.type_modifier - 4) >> 16, ((column.type_modifier - 4) & 0x7FF ^ 0x400) - 0x400
    return (precision, scale) if 0 <= scale <= precision <= WIDEST_DECIMAL else None


def guessed(values: Iterable[Any]) -> Kind | None:
    """For values nobody declared; None when all of them are None."""
    classes = {value.__class__ for value in values if value is not None}
    if classes == {datetime}:
        zones = {value.tzinfo is None for value in values if value is not None}
        return Kind((NAIVE if zones.pop() else ZONED) if len(zones) == 1 else pa.string(), text)
    type = _BY_CLASS.get(next(iter(classes)), pa.string()) if len(classes) == 1 else pa.string()
    return Kind(type, text) if classes else None


class Rows:
    """The columns of some documents as Arrow, and what did not fit in them."""

    def __init__(self, docs: Mapping[str, Mapping[str, Any]]) -> None:
        self._docs = docs
        self._odd: defaultdict[int, dict[str, str]] = defaultdict(dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for doc in self._docs.values() for name in doc))

    def values(self, name: str) -> list[Any]:
        return [doc.get(name) for doc in self._docs.values()]

    def column(self, name: str, kind: Kind) -> pa.Array:
        values = self.values(name)
        if pa.types.is_string(kind.type):
            return pa.array([None if value is None else kind.text(value) for value in values], kind.type)
        if (array := _as_arrow(values, kind.type)) is not None:
            return array
        for row, value in enumerate(values):
            if _as_arrow([value], kind.type) is None:
                self._odd[row][name] = kind.text(value)
                values[row] = None
        return pa.array(values, kind.type)

    def texts(self) -> pa.Array:
        """The column `_text`, once all others were asked for."""
        odd = self._odd
        return pa.array([dumps(odd[row]) if row in odd else None for row in range(len(self._docs))], pa.string())


def _as_arrow(values: Sequence[Any], type: pa.DataType) -> pa.Array | None:
    """None when a value does not fit."""
    # Arrow would take True for 1, and a time without a zone for one in UTC.
    for value in values:
        if value is not None and not _belongs(value, type):
            return None
    try:
        return pa.array(values, type)
    except (pa.ArrowException, OverflowError):
        return None


def _belongs(value: Any, type: pa.DataType) -> bool:
    kind = value.__class__
    if kind is datetime:
        return bool(type == (NAIVE if value.tzinfo is None else ZONED))
    if kind is time:
        return value.tzinfo is None and bool(pa.types.is_time(type))
    if kind is Decimal:
        return bool(pa.types.is_decimal(type))
    if kind is int:
        return bool(pa.types.is_integer(type) or pa.types.is_decimal(type))
    if kind is float:
        return bool(pa.types.is_floating(type))
    return bool(_BY_CLASS.get(kind) == type)


def holds(has: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of the one type takes all values of the other as they are."""
    return bool(has == wanted or pa.types.is_string(has) or (not pa.types.is_string(wanted) and widens(wanted, has)))


def widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether all values of the one type can become the same values of the other, or PostgreSQL's text for them."""
    kinds = pa.types
    if kinds.is_string(wide):
        return bool(kinds.is_integer(narrow) or kinds.is_decimal(narrow) or kinds.is_date(narrow))
    if kinds.is_integer(narrow) and kinds.is_decimal(wide):
        return bool(_DIGITS[narrow.bit_width] <= wide.precision - wide.scale)
    if kinds.is_decimal(narrow) and kinds.is_decimal(wide):
        whole = narrow.precision - narrow.scale
        return bool(narrow.scale <= wide.scale and whole <= wide.precision - wide.scale)
    for same in (kinds.is_integer, kinds.is_floating):
        if same(narrow) and same(wide):
            return bool(narrow.bit_width <= wide.bit_width)
    return False


_DIGITS = {16: 5, 32: 10, 64: 19}  # of the longest integer of so many bits


def refuse_ours(doctype: str, names: Iterable[str], ours: Collection[str]) -> None:
    """A source's column that is called like one of dbsync's own in the target would be lost in it."""
    for name in names:
        if name.lower() in ours:
            raise BatcherError(
                f"{doctype} has a column {name}, which is a name of dbsync's own in the target.",
                f"Rename it, or leave it out with --exclude-columns {doctype}.{name}.",
                retryable=False,
            )


def only_case_differs(target: str, what: str, taken: str, name: str) -> BatcherError:
    return BatcherError(
        f"Two {what} are one to {target}, which does not tell upper from lower case: {taken} and {name}.",
        "Rename one of them, or leave it out of what dbsync follows.",
        retryable=False,
    )
