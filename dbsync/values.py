"""From PostgreSQL's text output to typed Python values.

`decoder` says how a type is decoded, as plain data that can be pickled and shipped to an executor; `compile` turns that
into a function from `str` to the value. The function never raises and loses nothing: text that has no place in the
Python type (infinity, a year BC or past 9999, 24:00:00, an interval with months, and all of a type that Python does
not know) comes back as the text itself.

It reads what PostgreSQL writes under `DateStyle` ISO and `IntervalStyle` postgres; `bytea_output` may be either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, InvalidOperation
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias
from uuid import UUID

Spec: TypeAlias = "str | tuple[str, str, Spec]"
"""The name of a scalar decoder, or ('array', delimiter, the element's Spec)."""

Decode: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """A row of pg_catalog.pg_type: typtype, typbasetype, typelem and typdelim."""

    oid: int
    name: str
    kind: str
    base: int = 0
    element: int = 0
    delimiter: str = ","


def decoder(type_oid: int, catalog: Mapping[int, TypeInfo] = MappingProxyType({})) -> Spec:
    """How to decode a type. `catalog` holds the types that are not built in; an unknown type is text."""
    builtin = _BUILTIN.get(type_oid)
    if builtin is not None:
        return builtin
    info = catalog.get(type_oid)
    if info is None:
        return "text"
    if info.kind == "d":
        return decoder(info.base, catalog)
    if info.kind == "b" and info.element:
        return ("array", info.delimiter, decoder(info.element, catalog))
    return "text"


@cache
def compile(spec: Spec) -> Decode:
    """The function for a Spec."""
    if isinstance(spec, str):
        return _SCALARS[spec]
    _, delimiter, element = spec
    return _array(delimiter, compile(element))


def _text(text: str) -> str:
    return text


def _bool(text: str) -> bool | str:
    return BOOLS.get(text, text)


def _int(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _numeric(text: str) -> Decimal | str:
    try:
        # The constructor is exact; a context of our own keeps the caller's traps from turning an error into NaN.
        return Decimal(text, EXACT)
    except InvalidOperation:
        return text


def _bytea(text: str) -> bytes | str:
    try:
        if text.startswith("\\x"):
            return bytes.fromhex(text[2:])
    except ValueError:
        return text
    if not _BYTEA_ESCAPED.fullmatch(text):
        return text
    return _BYTEA_ESCAPE.sub(_unescape_byte, text).encode("latin-1")


def _unescape_byte(match: re.Match[str]) -> str:
    octal: str = match[1]
    return "\\" if octal == "\\" else chr(int(octal, 8))


def _date(text: str) -> date | str:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return text


def _time(text: str) -> time | str:
    # Newer Pythons read 24:00:00 as midnight, which is another time of the day.
    if text.startswith("24"):
        return text
    try:
        return time.fromisoformat(text)
    except ValueError:
        return text


def _timestamp(text: str) -> datetime | str:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


def _timestamptz(text: str) -> datetime | str:
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is UTC:
            return at
        return text if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        return text


def _interval(text: str) -> timedelta | str:
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return text
    days, sign, hours, minutes, seconds, fraction = match.groups()
    try:
        clock = timedelta(
            hours=int(hours or 0),
            minutes=int(minutes or 0),
            seconds=int(seconds or 0),
            microseconds=int((fraction or "").ljust(6, "0")),
        )
        return timedelta(days=int(days or 0)) + (-clock if sign == "-" else clock)
    except OverflowError:
        return text


def _uuid(text: str) -> UUID | str:
    try:
        return UUID(text)
    except ValueError:
        return text


def _json(text: str) -> Any:
    try:
        return _parse_json(text)
    except (ValueError, InvalidOperation, RecursionError):
        return text


def _json_int(text: str) -> int | Decimal:
    # Python refuses to turn longer integers into text again; a Decimal holds the same number and can be printed.
    return int(text) if len(text) <= _LONGEST_INT else Decimal(text, EXACT)


def _json_fraction(text: str) -> float | Decimal:
    number = float(text)
    # A float keeps every number of up to 15 digits; comparing is only needed for the others.
    if len(text) <= 15 and "e" not in text and "E" not in text:
        return number
    exact = Decimal(text, EXACT)
    return number if Decimal(repr(number)) == exact else exact


def _array(delimiter: str, decode: Decode) -> Decode:
    """A decoder for arrays of what `decode` reads."""
    token = re.compile(
        rf'(?P<open>\{{)|(?P<close>\}})|(?P<next>{re.escape(delimiter)})|"(?P<quoted>(?:[^"\\]|\\.)*)"'
        rf'|(?P<plain>[^{{}}"\\{re.escape(delimiter)}]+)',
        re.DOTALL,
    )

    def element(text: str) -> Any:
        return None if text == "NULL" else decode(text)

    def decode_array(text: str) -> Any:
        if text == "{}":
            return []
        if text[:1] == "{" and text[-1:] == "}" and not _NEEDS_TOKENS.search(text, 1, len(text) - 1):
            parts = text[1:-1].split(delimiter)
            # An empty string is written with quotes, so an empty part is not PostgreSQL's.
            return text if "" in parts else [element(part) for part in parts]
        try:
            return _nested(text, token, element, decode)
        except ValueError:
            return text

    return decode_array


def _nested(text: str, token: re.Pattern[str], element: Decode, decode: Decode) -> list[Any]:
    """Parse an array with quotes, dimensions or bounds; ValueError when it is not one."""
    bounds = _BOUNDS.match(text)
    offset = bounds.end() if bounds else 0
    outer: list[list[Any]] = []
    current: list[Any] | None = None
    # After '{' a value or '}' may come, after a delimiter only a value, after a value only a delimiter or '}'.
    previous = "next"
    while offset < len(text):
        match = token.match(text, offset)
        if match is None:
            raise ValueError(text)
        offset = match.end()
        kind = match.lastgroup
        if kind == "open" and previous in ("open", "next"):
            inner: list[Any] = []
            if current is not None:
                current.append(inner)
                outer.append(current)
            current = inner
        elif current is None:
            raise ValueError(text)
        elif kind == "close" and previous != "next":
            if not outer:
                break
            current = outer.pop()
        elif kind == "next" and previous in ("close", "quoted", "plain"):
            pass
        elif kind == "quoted" and previous in ("open", "next"):
            current.append(decode(_BACKSLASH.sub(r"\1", match["quoted"])))
        elif kind == "plain" and previous in ("open", "next"):
            current.append(element(match["plain"]))
        else:
            raise ValueError(text)
        previous = kind or ""
    else:
        raise ValueError(text)
    if offset != len(text):
        raise ValueError(text)
    return current


EXACT = Context(traps=[InvalidOperation])
_LONGEST_INT = 4000
BOOLS = {"t": True, "f": False, "true": True, "false": False}
_BYTEA_ESCAPED = re.compile(r"(?:[ -\[\]-~]|\\\\|\\[0-3][0-7]{2})*")
_BYTEA_ESCAPE = re.compile(r"\\(\\|[0-7]{3})")
_INTERVAL = re.compile(
    r"(?=.)(?:([+-]?[0-9]+) days?)?(?:(?:^| )([+-]?)([0-9]+):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?)?"
)
_NEEDS_TOKENS = re.compile(r'["{}\\]')
_BOUNDS = re.compile(r"(?:\[[+-]?[0-9]+:[+-]?[0-9]+\])+=")
_BACKSLASH = re.compile(r"\\(.)", re.DOTALL)

_parse_json = json.JSONDecoder(parse_int=_json_int, parse_float=_json_fraction).decode

_SCALARS: dict[str, Decode] = {
    "text": _text,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "numeric": _numeric,
    "bytea": _bytea,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "interval": _interval,
    "uuid": _uuid,
    "json": _json,
}

# Scalar, its array, how the scalar is decoded. These numbers are fixed in PostgreSQL's catalog for good.
_BUILTIN_TYPES: tuple[tuple[int, int, str], ...] = (
    (16, 1000, "bool"),
    (17, 1001, "bytea"),
    (18, 1002, "text"),  # "char"
    (19, 1003, "text"),  # name
    (20, 1016, "int"),  # int8
    (21, 1005, "int"),  # int2
    (23, 1007, "int"),  # int4
    (25, 1009, "text"),
    (26, 1028, "int"),  # oid
    (114, 199, "json"),
    (700, 1021, "float"),  # float4
    (701, 1022, "float"),  # float8
    (1042, 1014, "text"),  # bpchar
    (1043, 1015, "text"),  # varchar
    (1082, 1182, "date"),
    (1083, 1183, "time"),
    (1114, 1115, "timestamp"),
    (1184, 1185, "timestamptz"),
    (1186, 1187, "interval"),
    (1266, 1270, "time"),  # timetz
    (1700, 1231, "numeric"),
    (2950, 2951, "uuid"),
    (3802, 3807, "json"),  # jsonb
)

# The arrays of the other built-in types (network, geometric, range, text search, reg* and so on): lists of text.
_TEXT_ARRAYS = (
    *(210, 270, 272, 273),  # rows of pg_type, pg_attribute, pg_proc and pg_class
    *(143, 271, 629, 651, 719, 775, 791, 1006, 1008, 1010, 1011, 1012, 1013, 1017, 1018, 1019, 1027, 1034, 1040, 1041),
    *(1561, 1563, 2201, 2207, 2208, 2209, 2210, 2211, 2949, 3221, 3643, 3644, 3645, 3735, 3770, 3905, 3907, 3909),
    *(3911, 3913, 3927, 4073, 4090, 4097, 4192, 5039, 6150, 6151, 6152, 6153, 6155, 6157),
)

_BOX_ARRAY = 1020

_BUILTIN: dict[int, Spec] = {
    **{scalar: name for scalar, _, name in _BUILTIN_TYPES},
    **{array: ("array", ",", name) for _, array, name in _BUILTIN_TYPES},
    **dict.fromkeys(_TEXT_ARRAYS, ("array", ",", "text")),
    _BOX_ARRAY: ("array", ";", "text"),
}
