"""PostgreSQL's types as a target has them: what a column of the source becomes, and which type has room for which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dbsync import values
from dbsync.relation import FIRST_GENBKI_OID, Column


@dataclass(frozen=True, slots=True)
class PgType:
    """A type as the catalog has it; `name` is what the server calls it."""

    oid: int
    modifier: int
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


TEXT = PgType(25, -1, "text")
TIMESTAMPTZ = PgType(1184, -1, "timestamp with time zone")


def type_here(column: Column) -> tuple[int, int]:
    """The type for a column of the source: its oid and modifier."""
    if column.type_oid < FIRST_GENBKI_OID and column.type_oid not in _OF_ONE_DATABASE:
        return column.type_oid, column.type_modifier
    return _by_spec(column.spec), -1


def _by_spec(spec: values.Spec) -> int:
    if isinstance(spec, tuple):
        return _ARRAYS.get(_by_spec(spec[2]), 1009)
    return _BY_SPEC.get(spec, TEXT.oid)


def _type_of_value(value: Any) -> PgType:
    match value:
        case bool():
            return PgType(16, -1, "boolean")
        case int():
            return _BIGINT if -(2**63) <= value < 2**63 else _NUMERIC
        case float():
            return PgType(701, -1, "double precision")
        case Decimal():
            return _NUMERIC
        case str():
            return TEXT
        case bytes():
            return PgType(17, -1, "bytea")
        case datetime():
            return TIMESTAMPTZ if value.tzinfo else PgType(1114, -1, "timestamp without time zone")
        case date():
            return PgType(1082, -1, "date")
        case time():
            return (
                PgType(1266, -1, "time with time zone") if value.tzinfo else PgType(1083, -1, "time without time zone")
            )
        case timedelta():
            return PgType(1186, -1, "interval")
        case UUID():
            return PgType(2950, -1, "uuid")
    return PgType(3802, -1, "jsonb")


def type_of(items: Iterable[Any]) -> PgType | None:
    """The type for values nobody declared; None where all of them are None."""
    found = {_type_of_value(item) for item in items if item is not None}
    if len(found) > 1:
        return _NUMERIC if found == {_BIGINT, _NUMERIC} else TEXT
    return found.pop() if found else None


def holds(wider: PgType, type: PgType) -> bool:
    """Whether every value of the one type is, unchanged, one of the other."""
    if wider in (type, TEXT):
        return True
    if wider.oid == type.oid:
        return _holds_modifier(wider, type)
    if wider.oid == 1700 and type.oid in _DIGITS:
        return wider.modifier < 4 or _whole_digits(wider) >= _DIGITS[type.oid]
    if wider.oid in _ELEMENTS and type.oid in _ELEMENTS:
        return holds(PgType(_ELEMENTS[wider.oid], wider.modifier, ""), PgType(_ELEMENTS[type.oid], type.modifier, ""))
    return wider.modifier < 0 and wider.oid in _WIDER.get(type.oid, ())


def _holds_modifier(wider: PgType, type: PgType) -> bool:
    if wider.modifier < 0:
        return True
    if type.modifier < 0:
        return False
    if wider.oid == 1700:
        return _whole_digits(wider) >= _whole_digits(type) and _scale(wider) >= _scale(type)
    return wider.oid in _LENGTHS and wider.modifier >= type.modifier


def _scale(type: PgType) -> int:
    """numeric's modifier is its precision in the upper and its scale, which has a sign, in the lower bits."""
    return ((type.modifier - 4) & 0x7FF ^ 0x400) - 0x400


def _whole_digits(type: PgType) -> int:
    return ((type.modifier - 4) >> 16) - _scale(type)


_BIGINT = PgType(20, -1, "bigint")
_NUMERIC = PgType(1700, -1, "numeric")
BOX_ARRAY = 1020
TEXTS = frozenset({25, 1042, 1043})
_DIGITS = {21: 5, 23: 10, 20: 19, 26: 10}
_LENGTHS = frozenset({1042, 1043, 1562, 1083, 1114, 1184, 1266})  # a larger modifier takes more: length, fraction
_WIDER = {21: (23, 20), 23: (20,), 26: (20,), 700: (701,), 1042: (1043,), 1082: (1114,), 3802: (114,), 25: (1043,)}

_BY_SPEC = {
    "bool": 16, "int": 20, "float": 701, "numeric": 1700, "bytea": 17, "date": 1082, "timestamp": 1114,
    "timestamptz": 1184, "interval": 1186, "uuid": 2950, "json": 114,
}  # fmt: skip

_ELEMENTS = {
    1000: 16, 1005: 21, 1007: 23, 1016: 20, 1021: 700, 1022: 701, 1231: 1700, 1001: 17, 1182: 1082, 1115: 1114,
    1185: 1184, 1187: 1186, 2951: 2950, 199: 114, 1009: 25, 1015: 1043, 1014: 1042,
}  # fmt: skip

_ARRAYS = {element: array for array, element in _ELEMENTS.items()}

# money; reg* and arrays of them; aclitem; what nobody can write: pg_node_tree, pg_ndistinct, pg_dependencies,
# pg_mcv_list, pg_brin_bloom_summary, pg_brin_minmax_multi_summary.
_OF_ONE_DATABASE = frozenset(
    {
        790, 791, 24, 1008, 2202, 2207, 2203, 2208, 2204, 2209, 2205, 2210, 2206, 2211, 3734, 3735, 3769, 3770, 4089,
        4090, 4096, 4097, 4191, 4192, 1033, 1034, 194, 3361, 3402, 5017, 4600, 4601,
    }
)  # fmt: skip
