"""What a value is written as is what PostgreSQL's own text of it is decoded from; and which type has room for which."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from dbsync import values
from dbsync.batcher import jsontext, pgtext
from dbsync.batcher.pgtypes import PgType, holds, type_here
from dbsync.relation import Column

TEXTS = [
    ("bool", "true"), ("int", "-5"), ("float", "0.30000000000000004"), ("float", "-Infinity"), ("float", "NaN"),
    ("numeric", "1.500"), ("numeric", "NaN"), ("numeric", "-Infinity"), ("bytea", r"\x00ff"), ("date", "0001-01-01"),
    ("date", "infinity"), ("time", "10:11:12.5"), ("time", "00:00:00"), ("time", "24:00:00"),
    ("time", "10:00:00+05:30"),
    ("time", "10:00:00.25-15"), ("timestamp", "2024-01-02 03:04:05"), ("timestamp", "0044-03-15 00:00:00 BC"),
    ("timestamptz", "2024-01-02 03:04:05.678+00"), ("interval", "1 day"), ("interval", "-1 days"),
    ("interval", "00:00:00"), ("interval", "-23:59:55.5"), ("interval", "2 days 03:04:05"),
    ("interval", "1 year -2 mons"), ("uuid", "00000000-0000-0000-0000-000000000001"), ("text", "{a"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "text"), TEXTS)
def test_text_comes_back_as_it_was(spec: str, text: str) -> None:
    assert pgtext.text(values.compile(spec)(text)) == text


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("array", ",", "text"), '{"a,b","NULL",NULL,"q\\"uo\\\\te",""}'),
        (("array", ",", "int"), '{{"1","2"},{"3",NULL}}'),
        (("array", ";", "text"), '{"(1,1),(0,0)";"(2,2),(0,0)"}'),
        (("array", ",", "int"), "{}"),
    ],
)
def test_arrays_come_back(spec: Any, text: str) -> None:
    assert pgtext.array(values.compile(spec)(text), delimiter=spec[1]) == text


@pytest.mark.parametrize(
    "text", ['{"a": [1, null, "ü\\"x", true], "b": {}}', "[1.5E+400, 12345678901234567890123]", '"\\ud800"', "[]"]
)
def test_json_comes_back(text: str) -> None:
    exact = jsontext.exact(values.compile("json")(text))
    assert exact == text
    assert json.loads(exact, parse_float=Decimal) == json.loads(text, parse_float=Decimal)


def test_a_type_whose_number_another_server_gives_to_another_one_goes_by_what_its_values_are() -> None:
    in_every_database, of_this_one, own = 2950, 13_376, 16_400
    assert type_here(Column("c", in_every_database, -1, "uuid")) == (2950, -1)
    assert type_here(Column("c", of_this_one, -1, "text")) == (25, -1)
    assert type_here(Column("c", own, -1, "numeric")) == (1700, -1)


def numeric(precision: int, scale: int) -> tuple[int, int]:
    return 1700, (precision << 16 | scale) + 4


@pytest.mark.parametrize(
    ("wider", "type"),
    [
        ((23, -1), (21, -1)), ((20, -1), (23, -1)), ((1700, -1), (20, -1)), (numeric(10, 0), (23, -1)),
        (numeric(9, 4), numeric(5, 2)), ((1700, -1), numeric(5, 2)), ((701, -1), (700, -1)), ((1043, 9), (1043, 7)),
        ((1043, -1), (1043, 7)), ((25, -1), (1043, 7)), ((25, -1), (1082, -1)), ((1114, -1), (1082, -1)),
        ((1114, -1), (1114, 3)), ((1016, -1), (1007, -1)), ((1009, -1), (1015, 7)), ((114, -1), (3802, -1)),
    ],
)  # fmt: skip
def test_a_type_with_room(wider: tuple[int, int], type: tuple[int, int]) -> None:
    assert holds(PgType(*wider, ""), PgType(*type, ""))
    assert not holds(PgType(*type, ""), PgType(*wider, ""))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (numeric(9, 4), numeric(9, 2)), (numeric(9, 0), (23, -1)), ((701, -1), (20, -1)), ((1114, -1), (1184, -1)),
        ((16, -1), (23, -1)), ((1186, 5), (1186, 6)), ((1560, 5), (1560, 9)),
    ],
)  # fmt: skip
def test_types_without_room_for_each_other(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert not holds(PgType(*one, ""), PgType(*other, ""))
    assert not holds(PgType(*other, ""), PgType(*one, ""))
