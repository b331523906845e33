"""PostgreSQL's text to Python values: a table of cases, and what psycopg itself reads from real servers."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import pickle
import uuid
import zoneinfo
from datetime import UTC, date, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dbsync.values import Spec, TypeInfo, compile, decoder

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = (16, 18)

BOOL, BYTEA, INT8, INT2, INT4, TEXT, OID, JSON, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 25, 26, 114, 700, 701
DATE, TIME, TIMESTAMP, TIMESTAMPTZ, INTERVAL, TIMETZ = 1082, 1083, 1114, 1184, 1186, 1266
NUMERIC, UUID_, JSONB, INT4_ARRAY, TEXT_ARRAY, BOX_ARRAY = 1700, 2950, 3802, 1007, 1009, 1020


def read(oid: int, text: str, *types: TypeInfo) -> Any:
    return compile(decoder(oid, {info.oid: info for info in types}))(text)


def recorded(name: str, version: int) -> list[dict[str, Any]]:
    text = (RECORDED / f"{name}_{version}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def zone(hours: int, minutes: int = 0, seconds: int = 0) -> timezone:
    return timezone(timedelta(hours=hours, minutes=minutes, seconds=seconds))


def same(left: object, right: object) -> bool:
    """Equal in type too, and a NaN equals a NaN."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float | Decimal) and left != left:
        return type(left) is type(right) and right != right
    return type(left) is type(right) and left == right


CASES = [
    (BOOL, "t", True),
    (BOOL, "f", False),
    (INT4, "-7", -7),
    (INT8, "9223372036854775807", 2**63 - 1),
    (OID, "4294967295", 2**32 - 1),
    (FLOAT8, "NaN", math.nan),
    (FLOAT8, "-Infinity", -math.inf),
    (FLOAT4, "1e-30", 1e-30),
    (NUMERIC, "1.50", Decimal("1.50")),
    (NUMERIC, "NaN", Decimal("NaN")),
    (NUMERIC, "-Infinity", Decimal("-Infinity")),
    (TEXT, "", ""),
    (BYTEA, "\\x00FFff", b"\x00\xff\xff"),
    (BYTEA, "\\x", b""),
    (BYTEA, "", b""),
    (BYTEA, "a\\\\b\\000\\377 '", b"a\\b\x00\xff '"),
    (DATE, "2024-02-29", date(2024, 2, 29)),
    (TIME, "03:04:05.1", time(3, 4, 5, 100000)),
    (TIMETZ, "03:04:05+00", time(3, 4, 5, tzinfo=UTC)),
    (TIMETZ, "03:04:05.5-05:30:15", time(3, 4, 5, 500000, tzinfo=zone(-5, -30, -15))),
    (TIMESTAMP, "2024-01-02 03:04:05.12", datetime.datetime(2024, 1, 2, 3, 4, 5, 120000)),  # noqa: DTZ001
    (TIMESTAMPTZ, "2024-01-02 03:04:05.123456+00", datetime.datetime(2024, 1, 2, 3, 4, 5, 123456, UTC)),
    (TIMESTAMPTZ, "2024-01-02 03:04:05+05:30", datetime.datetime(2024, 1, 1, 21, 34, 5, tzinfo=UTC)),
    (TIMESTAMPTZ, "1900-01-01 00:00:00+05:30:15", datetime.datetime(1899, 12, 31, 18, 29, 45, tzinfo=UTC)),
    (INTERVAL, "00:00:00", timedelta()),
    (INTERVAL, "1 day", timedelta(1)),
    (INTERVAL, "3 days -04:05:06.789", timedelta(3) - timedelta(hours=4, minutes=5, seconds=6, milliseconds=789)),
    (INTERVAL, "-1 days +02:03:00", timedelta(-1, 7380)),
    (INTERVAL, "-00:00:00.000001", timedelta(microseconds=-1)),
    (INTERVAL, "1000:00:00", timedelta(hours=1000)),
    (UUID_, "00000000-0000-0000-0000-00000000000a", uuid.UUID(int=10)),
    (JSON, '{"a": [1, null, true, "ü"], "a": 2}', {"a": 2}),
    (JSONB, "123456789012345678901234567890", 123456789012345678901234567890),
    (JSONB, "0.1", 0.1),
    (JSONB, "1.10", 1.1),
    (JSONB, "1e5", 1e5),
    (JSONB, "0.12345678901234567890", Decimal("0.12345678901234567890")),
    (JSONB, "1e400", Decimal("1e400")),
    (JSONB, "1e-400", Decimal("1e-400")),
    (JSONB, "9" * 5000, Decimal("9" * 5000)),
    (INT4_ARRAY, "{}", []),
    (INT4_ARRAY, "{1,NULL,-3}", [1, None, -3]),
    (INT4_ARRAY, "{{1,2},{3,NULL}}", [[1, 2], [3, None]]),
    (INT4_ARRAY, "{{{1},{2}},{{3},{4}}}", [[[1], [2]], [[3], [4]]]),
    (INT4_ARRAY, "[0:2]={1,2,3}", [1, 2, 3]),
    (INT4_ARRAY, "[-1:0][2:3]={{1,2},{3,4}}", [[1, 2], [3, 4]]),
    (TEXT_ARRAY, '{"NULL",null,"",a}', ["NULL", "null", "", "a"]),
    (TEXT_ARRAY, '{"a,b","{}","\\"","\\\\","x\ny"}', ["a,b", "{}", '"', "\\", "x\ny"]),
    (BOX_ARRAY, "{(3,4),(1,2);(1,1),(0,0)}", ["(3,4),(1,2)", "(1,1),(0,0)"]),
]


@pytest.mark.parametrize(("oid", "text", "value"), CASES)
def test_value(oid: int, text: str, value: object) -> None:
    assert same(read(oid, text), value)


KEPT_AS_TEXT = [
    (DATE, "infinity"),
    (DATE, "0044-03-15 BC"),
    (DATE, "12024-01-02"),
    (TIME, "24:00:00"),
    (TIMETZ, "24:00:00+02"),
    (TIMESTAMP, "-infinity"),
    (TIMESTAMP, "0044-03-15 00:00:00 BC"),
    (TIMESTAMP, "294276-12-31 23:59:59.999999"),
    (TIMESTAMPTZ, "infinity"),
    (TIMESTAMPTZ, "0044-03-15 00:00:00+00 BC"),
    (TIMESTAMPTZ, "10000-01-01 00:00:00+00"),
    (TIMESTAMPTZ, "0001-01-01 00:00:00+05"),
    (INTERVAL, "1 mon"),
    (INTERVAL, "1 year 2 mons 3 days -04:05:06.789"),
    (INTERVAL, "infinity"),
    (INTERVAL, "2147483647 days"),
    (JSON, "1e99999999999999999999"),
    (JSON, "[" * 100_000 + "]" * 100_000),
    (869, "192.168.0.1/24"),
    (790, "$1,000.00"),
    (1560, "0101"),
    (3904, "[1,5)"),
    (600, "(1,2)"),
    (3614, "'a':1 'b':2"),
    (142, "<a/>"),
    (30, "1 2 3"),
    (999_999, "whatever"),
]


@pytest.mark.parametrize(("oid", "text"), KEPT_AS_TEXT, ids=lambda value: str(value)[:30])
def test_what_python_cannot_hold_stays_text(oid: int, text: str) -> None:
    assert read(oid, text) == text


@pytest.mark.parametrize("oid", [BOOL, INT2, INT4, FLOAT4, NUMERIC, DATE, TIME, TIMETZ, TIMESTAMP, TIMESTAMPTZ])
@pytest.mark.parametrize("text", ["", "☃", "1:2", "1 2", "2024-13-01", "--1"])
def test_garbage_is_its_own_value(oid: int, text: str) -> None:
    assert read(oid, text) == text


@pytest.mark.parametrize(
    "text", ["", "{", "}", "{1", '{"', '{"a}', "{1}2", "{1}}", "{,}", '{"a"b}', "{{1}{2}}", "[1:2]=", "1"]
)
@pytest.mark.parametrize("oid", [INT4_ARRAY, TEXT_ARRAY, BOX_ARRAY])
def test_a_broken_array_is_its_own_value(oid: int, text: str) -> None:
    assert read(oid, text) == text or (oid == BOX_ARRAY and text == "{,}")


@pytest.mark.parametrize("text", ["\\x0", "\\xzz", "\\9", "\\477", "ü"])
def test_a_broken_bytea_is_its_own_value(text: str) -> None:
    assert read(BYTEA, text) == text


@pytest.mark.parametrize("oid", [INTERVAL, UUID_, JSON, JSONB])
@pytest.mark.parametrize("text", ["", "☃", "{", "1 dayz", "00:00"])
def test_a_broken_interval_uuid_or_json_is_its_own_value(oid: int, text: str) -> None:
    assert read(oid, text) == text


def test_numeric_does_not_depend_on_the_context() -> None:
    text = "9" * 131072 + "." + "9" * 16383
    with decimal.localcontext() as context:
        context.prec = 3
        context.traps[decimal.InvalidOperation] = False
        value = read(NUMERIC, text)
        assert format(value, "f") == text
        assert read(NUMERIC, "x") == "x"


def test_a_domain_is_decoded_as_its_base() -> None:
    small = TypeInfo(90001, "small", "d", base=INT4)
    smaller = TypeInfo(90002, "smaller", "d", base=90001)
    assert read(90002, "5", small, smaller) == 5


def test_an_array_of_a_users_type() -> None:
    mood = TypeInfo(90003, "mood", "e")
    moods = TypeInfo(90004, "_mood", "b", element=90003)
    assert read(90003, "sad", mood) == "sad"
    assert read(90004, "{sad,NULL}", mood, moods) == ["sad", None]
    small = TypeInfo(90001, "small", "d", base=INT4)
    smalls = TypeInfo(90005, "_small", "b", element=90001)
    assert read(90005, "{1,2}", small, smalls) == [1, 2]


def test_a_domain_over_an_array() -> None:
    assert read(90006, "{1}", TypeInfo(90006, "ints", "d", base=INT4_ARRAY)) == [1]


@pytest.mark.parametrize("oid", [210, 270, 272, 273])
def test_an_array_of_rows_of_the_catalog(oid: int) -> None:
    assert read(oid, '{"(1,a)",NULL}') == ["(1,a)", None]


def test_a_type_with_elements_that_is_no_array_stays_text() -> None:
    assert read(90007, "(1,2)", TypeInfo(90007, "pointlike", "b", element=FLOAT8)) == "(1,2)"


@pytest.mark.parametrize("kind", ["c", "e", "r", "m", "p"])
def test_other_kinds_of_types_are_text(kind: str) -> None:
    assert read(90008, "(1,a)", TypeInfo(90008, "other", kind)) == "(1,a)"


def test_a_spec_is_data() -> None:
    spec: Spec = decoder(INT4_ARRAY)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert compile(spec) is compile(pickle.loads(pickle.dumps(spec)))


@pytest.mark.parametrize("version", VERSIONS)
def test_reads_what_psycopg_reads(version: int) -> None:
    names = {"datetime": datetime, "zoneinfo": zoneinfo, "Decimal": Decimal, "UUID": uuid.UUID, "nan": math.nan}
    for line in recorded("values", version):
        expected = eval(line["repr"], names | {"inf": math.inf})
        assert same(read(line["oid"], line["text"]), expected), line


@pytest.mark.parametrize("version", VERSIONS)
def test_knows_every_builtin_array(version: int) -> None:
    for line in recorded("arrays", version):
        assert decoder(line["array"]) == ("array", line["delimiter"], decoder(line["element"])), line
