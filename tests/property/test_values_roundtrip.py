"""Values written the way PostgreSQL writes them, by a formatter of the tests' own, come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsync.values import compile, decoder

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
offsets = st.integers(-(15 * 3600 + 3599), 15 * 3600 + 3599).map(lambda s: timezone(timedelta(seconds=s)))


def fraction(microsecond: int) -> str:
    return f".{microsecond:06}".rstrip("0") if microsecond else ""


def clock(at: time | datetime) -> str:
    return f"{at.hour:02}:{at.minute:02}:{at.second:02}{fraction(at.microsecond)}"


def zone(at: time | datetime) -> str:
    offset = at.utcoffset()
    assert offset is not None
    sign, seconds = ("-", -offset) if offset < timedelta() else ("+", offset)
    hours, rest = divmod(int(seconds.total_seconds()), 3600)
    minutes, seconds_left = divmod(rest, 60)
    parts = [f"{hours:02}"]
    if minutes or seconds_left:
        parts.append(f"{minutes:02}")
    if seconds_left:
        parts.append(f"{seconds_left:02}")
    return sign + ":".join(parts)


def day(at: Any) -> str:
    return f"{at.year:04}-{at.month:02}-{at.day:02}"


def interval(days: int, us: int) -> str:
    """IntervalStyle postgres: a positive clock after negative days has a plus."""
    parts = [f"{days} day{'' if days == 1 else 's'}"] if days else []
    if us or not days:
        sign = "-" if us < 0 else "+" if days < 0 else ""
        seconds, micro = divmod(abs(us), 1_000_000)
        parts.append(f"{sign}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction(micro)}")
    return " ".join(parts)


def bytea_escape(data: bytes) -> str:
    return "".join("\\\\" if b == 92 else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in data)


def element(text: str | None) -> str:
    """array_out: quotes where the text could be taken for something else."""
    if text is None:
        return "NULL"
    special = text == "" or text.upper() == "NULL" or any(c in '{}",\\ \t\n\r\v\f' for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if special else text


def array(values: list[Any], write: Callable[[Any], str]) -> str:
    parts = (array(v, write) if isinstance(v, list) else element(None if v is None else write(v)) for v in values)
    return "{" + ",".join(parts) + "}"


def rectangle(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Arrays of one or two dimensions; PostgreSQL has no others of uneven lengths."""
    maybe = st.none() | elements
    two = st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(maybe, min_size=n, max_size=n), min_size=1, max_size=3))
    return st.lists(maybe, max_size=5) | two


# Far enough from the ends of Python's calendar for every zone.
FIRST = datetime(1, 1, 3)  # noqa: DTZ001
LAST = datetime(9999, 12, 29)  # noqa: DTZ001

SCALARS: dict[str, tuple[int, int, st.SearchStrategy[Any], Callable[[Any], str]]] = {
    "bool": (16, 1000, st.booleans(), lambda v: "t" if v else "f"),
    "int8": (20, 1016, st.integers(-(2**63), 2**63 - 1), str),
    "float8": (701, 1022, st.floats(allow_nan=False), lambda v: repr(v).replace("inf", "Infinity")),
    "numeric": (1700, 1231, st.decimals(allow_nan=False, allow_infinity=False), lambda v: format(v, "f")),
    "text": (25, 1009, texts, str),
    "bytea": (17, 1001, st.binary(max_size=20), lambda v: "\\x" + v.hex()),
    "bytea escape": (17, 1001, st.binary(max_size=20), bytea_escape),
    "date": (1082, 1182, st.dates(), day),
    "time": (1083, 1183, st.times(), clock),
    "timetz": (1266, 1270, st.times(timezones=offsets), lambda v: clock(v) + zone(v)),
    "timestamp": (1114, 1115, st.datetimes(), lambda v: f"{day(v)} {clock(v)}"),
    "timestamptz": (1184, 1185, st.datetimes(timezones=st.just(UTC)), lambda v: f"{day(v)} {clock(v)}+00"),
    "uuid": (2950, 2951, st.uuids(), str),
}


@pytest.mark.parametrize("name", SCALARS)
@given(st.data())
def test_a_value_comes_back(name: str, data: st.DataObject) -> None:
    oid, _, values, write = SCALARS[name]
    value = data.draw(values)
    result = compile(decoder(oid))(write(value))
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("name", SCALARS)
@given(st.data())
def test_an_array_comes_back(name: str, data: st.DataObject) -> None:
    _, oid, elements, write = SCALARS[name]
    values = data.draw(rectangle(elements))
    assert compile(decoder(oid))(array(values, write)) == values


@given(st.datetimes(min_value=FIRST, max_value=LAST), offsets)
def test_a_time_in_any_zone_is_the_same_moment_in_utc(at: datetime, offset: timezone) -> None:
    local = at.replace(tzinfo=offset)
    result = compile(decoder(1184))(f"{day(local)} {clock(local)}{zone(local)}")
    assert result == local
    assert result.tzinfo is UTC


@given(st.integers(-999_999, 999_999), st.integers(-(10**15), 10**15))
def test_an_interval_comes_back(days: int, us: int) -> None:
    assert compile(decoder(1186))(interval(days, us)) == timedelta(days=days, microseconds=us)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )
)
def test_json_comes_back(value: Any) -> None:
    assert compile(decoder(3802))(json.dumps(value, ensure_ascii=False)) == value


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,30})\.[0-9]{1,30}([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_a_json_number_loses_no_digit(text: str) -> None:
    number = compile(decoder(114))(text)
    assert Decimal(repr(number) if isinstance(number, float) else number) == Decimal(text)


@pytest.mark.parametrize(
    "oid", sorted({oid for s in SCALARS.values() for oid in s[:2]} | {114, 1020, 1186, 1187, 3807})
)
@given(st.text(max_size=30) | st.text('{}[]",;\\x:=-+ 0123456789NULTF.eE', max_size=30))
def test_no_text_makes_a_decoder_raise(oid: int, text: str) -> None:
    compile(decoder(oid))(text)
