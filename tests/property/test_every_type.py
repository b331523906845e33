"""Whatever type a value has: what is streamed and what is re-read is the source's value, and both are the same.

Tables are drawn at random (their columns, keys, identities, values, changes) in a database whose own settings are odd.
PostgreSQL itself is the judge: each value of a document, written down by a formatter of the tests' own, has to be the
value of the source's row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fix_postgres import Database, Server, fresh_database
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import MirrorHandler, Syncer, ahead

Draw = Callable[[random.Random], str]

OWN_TYPES = """
    CREATE TYPE mood AS ENUM ('sad', 'ok', 'so "so"', 'größer, weiter');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN positives AS positive;
    CREATE DOMAIN words AS text[];
    CREATE DOMAIN day AS date;
    CREATE TYPE pair AS (a int, b text, c timestamptz);
    CREATE TYPE nested AS (p pair, m mood[]);
    CREATE TYPE textrange AS RANGE (subtype = text);
"""


def texts(rng: random.Random) -> str:
    letters = "abcXYZ01 \t\n\"'\\{}(),;ü日😀%"
    return "".join(rng.choice(letters) for _ in range(rng.choice([1, 3, 8, 30])))


def long_texts(rng: random.Random) -> str:
    return rng.randbytes(rng.choice([5, 2000, 6000])).hex()


def days(rng: random.Random) -> str:
    year = rng.choice([rng.randint(1, 9999), rng.randint(10000, 290000), rng.randint(1900, 2100)])
    return f"{year:04}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}" + rng.choice(
        ["", "", "", " BC"][: 4 if year < 4000 else 3]
    )


def clocks(rng: random.Random) -> str:
    fraction = rng.choice(["", ".5", ".000001", f".{rng.randint(0, 999999):06}"])
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}{fraction}"


def moments(rng: random.Random) -> str:
    day, _, era = days(rng).partition(" ")
    return f"{day} {clocks(rng)}{rng.choice(['', '+05:30', '-11'])} {era}".strip()


def numbers(rng: random.Random) -> str:
    whole, fraction = rng.randint(0, 10 ** rng.choice([1, 9, 40])), rng.randint(0, 10 ** rng.choice([1, 6, 25]))
    return rng.choice([f"{whole}", f"-{whole}.{fraction}", f"{whole}.{fraction}00"])


def floats(rng: random.Random) -> str:
    return repr(rng.choice([rng.uniform(-1e3, 1e3), rng.uniform(-1, 1) * 10.0 ** rng.randint(-37, 37)]))


def spans(rng: random.Random) -> str:
    parts = [f"{rng.randint(-99, 99)} {unit}" for unit in ("years", "months", "days") if rng.random() < 0.5]
    return " ".join([*parts, rng.choice(["", "-"]) + clocks(rng)])


def documents(rng: random.Random) -> str:
    def value(depth: int) -> Any:
        simple = [None, True, 12345678901234567890123, -1.5, texts(rng), "", 0.1]
        nested = [[value(depth - 1) for _ in range(3)], {texts(rng): value(depth - 1)}] if depth else []
        return rng.choice(simple + nested)

    return json.dumps(value(2))


def integers(bits: int) -> Draw:
    return lambda rng: str(rng.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))


def ranges(draw: Draw, order: Callable[[str], Any]) -> Draw:
    def drawn(rng: random.Random) -> str:
        low, high = sorted((draw(rng), draw(rng)), key=order)
        low, high = rng.choice([low, ""]), rng.choice([high, ""])
        return f"{rng.choice('[(')}{low},{high}{rng.choice('])')}"

    return drawn


def multiranges(draw: Draw) -> Draw:
    return lambda rng: "{" + ",".join(draw(rng) for _ in range(rng.randint(0, 3))) + "}"


small_integers: Draw = lambda rng: str(rng.randint(-999, 999))  # noqa: E731
int_ranges = ranges(small_integers, int)
plain_days: Draw = lambda rng: f"{rng.randint(1000, 9999)}-0{rng.randint(1, 9)}-{rng.randint(10, 28)}"  # noqa: E731
day_ranges = ranges(plain_days, str)
bits: Draw = lambda rng: f"{rng.getrandbits(8):08b}"  # noqa: E731
points: Draw = lambda rng: f"({floats(rng)},{floats(rng)})"  # noqa: E731
addresses: Draw = lambda rng: f"{rng.randint(1, 254)}.{rng.randint(0, 255)}.0.{rng.randint(0, 255)}"  # noqa: E731


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: values worth trying, how to draw others, and what it is in Python (text where that cannot hold it)."""

    edges: tuple[str, ...]
    draw: Draw | None = None
    python: type = str
    or_text: bool = False
    in_key: bool = True
    in_array: bool = True
    extension: str | None = None

    def value(self, rng: random.Random) -> str:
        return self.draw(rng) if self.draw and rng.random() < 0.6 else rng.choice(self.edges)


KINDS: dict[str, Kind] = {
    "bool": Kind(("t", "f"), python=bool),
    "int2": Kind(("0", "-32768", "32767"), integers(16), int),
    "int4": Kind(("0", "-2147483648", "2147483647"), integers(32), int),
    "int8": Kind(("0", "-9223372036854775808", "9223372036854775807"), integers(64), int),
    "oid": Kind(("0", "4294967295"), python=int),
    "float4": Kind(("0", "-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "0.1"), floats, float),
    "float8": Kind(
        ("0", "-0", "NaN", "Infinity", "-Infinity", "5e-324", "1.7976931348623157e308", "0.1"), floats, float
    ),
    "numeric": Kind(("0", "0.000", "NaN", "Infinity", "-Infinity", "1e-400", "9" * 300 + ".10"), numbers, Decimal),
    "numeric(12,3)": Kind(("0", "-1.5", "999999999.999", "NaN"), python=Decimal),
    "money": Kind(("0", "-1234567.89", "92233720368547758.07")),
    "text": Kind(
        ("", " ", "NULL", "null", "\\N", "\\", '"', "'", "a\tb\nc\rd", "{}", "日本語 😀 ü", "%s"),
        long_texts,
        in_key=False,
    ),
    "varchar(40)": Kind(("", "NULL", "x ", "ü" * 40), texts),
    "char(5)": Kind(("", "a", "abcde", "é")),
    "name": Kind(("", "x" * 63, 'Ein "Name"')),
    '"char"': Kind(("", "a", "\\")),
    "bytea": Kind(
        ("", "\\x00ff", "\\x5c", "\\x" + "ab" * 3000), lambda rng: "\\x" + rng.randbytes(9).hex(), bytes, in_key=False
    ),
    "date": Kind(
        (
            "2000-01-01",
            "0001-01-01",
            "9999-12-31",
            "10000-01-01",
            "5874897-12-31",
            "0001-12-31 BC",
            "4714-11-24 BC",
            "infinity",
            "-infinity",
        ),
        days,
        date,
        True,
    ),
    "time": Kind(("00:00", "23:59:59.999999", "24:00:00"), clocks, time, True),
    "timetz": Kind(
        ("00:00+00", "23:59:59.999999-15:59", "24:00:00+15:59:59", "12:34:56.7+05:30"), python=time, or_text=True
    ),
    "timestamp": Kind(
        (
            "2000-01-01",
            "0001-01-01",
            "9999-12-31 23:59:59.999999",
            "10000-01-01",
            "123456-07-08 09:10:11.5",
            "294276-12-31 23:59:59",
            "0044-03-15 12:00 BC",
            "infinity",
            "-infinity",
        ),
        moments,
        datetime,
        True,
    ),
    "timestamptz": Kind(
        (
            "2000-01-01",
            "0001-01-01 UTC",
            "0001-01-01 00:00+14",
            "9999-12-31 23:59:59.999999 UTC",
            "9999-12-31 23:59-12",
            "10000-01-01 UTC",
            "294276-12-31 UTC",
            "0044-03-15 12:00 BC UTC",
            "infinity",
            "-infinity",
            "1883-11-18 12:03:57.5+00",
        ),
        moments,
        datetime,
        True,
    ),
    "interval": Kind(
        (
            "0",
            "1 day",
            "-1 day +02:03:04.000005",
            "1 mon",
            "1 year 2 mons -3 days",
            "178000000 years",
            "-99999999 days",
            "1 day 25:00:00",
            "2562047788:00:54.775807",
        ),
        spans,
        timedelta,
        True,
    ),
    "uuid": Kind(
        ("00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        lambda rng: str(UUID(int=rng.getrandbits(128))),
        UUID,
    ),
    "json": Kind(
        ("null", "{}", "[]", '""', '"a"', "1", "123456789012345678901234567890", "1e400", '{"a": [1.10, null]}'),
        documents,
        object,
        in_key=False,
    ),
    "jsonb": Kind(
        ("null", "{}", "[]", '""', '"a"', "1", "123456789012345678901234567890", "1e400", '{"a": [1.10, null]}'),
        documents,
        object,
        in_key=False,
    ),
    "jsonpath": Kind(("$", '$.a[*] ? (@ > 1)."b c"'), in_key=False),
    "xml": Kind(("", "<a/>", '<a b="c">ü &lt; &amp;</a>', "text <b/> more"), in_key=False),
    "bit(8)": Kind(("00000000", "11111111"), bits),
    "varbit": Kind(("", "1", "10101010101"), bits),
    "inet": Kind(("0.0.0.0/0", "10.1.2.3/8", "::1", "2001:db8::1/64"), addresses),
    "cidr": Kind(("10.0.0.0/8", "::/0"), addresses),
    "macaddr": Kind(("08:00:2b:01:02:03",)),
    "macaddr8": Kind(("08:00:2b:01:02:03:04:05",)),
    "point": Kind(("(0,-0)", "(1e-300,Infinity)"), points, in_key=False),
    "line": Kind(("{1,2,3}",), in_key=False),
    "lseg": Kind(("[(0,0),(1,1)]",), in_key=False),
    "box": Kind(("(1,1),(0,0)", "(3,4),(1,2)"), in_key=False),
    "path": Kind(("((0,0),(1,1))", "[(0,0),(1,1)]"), in_key=False),
    "polygon": Kind(("((0,0),(1,1),(1,0))",), in_key=False),
    "circle": Kind(("<(1,2),3.5>",), in_key=False),
    "int4range": Kind(("empty", "(,)", "[1,10)"), int_ranges),
    "int8range": Kind(("empty", "[-9223372036854775808,9223372036854775807)"), int_ranges),
    "numrange": Kind(("empty", "[1.10,)", "(NaN,NaN]"), int_ranges),
    "daterange": Kind(("empty", "[infinity,infinity]", "[0044-03-15 BC,10000-01-01)"), day_ranges),
    "tsrange": Kind(("empty", '["0044-03-15 12:00 BC",infinity)'), day_ranges),
    "tstzrange": Kind(("empty", '(,"2000-01-01 12:34:56.5+05:30"]'), day_ranges),
    "int4multirange": Kind(("{}", "{[1,2],(5,)}"), multiranges(int_ranges)),
    "nummultirange": Kind(("{}", "{[1.5,2.50],(5,)}"), multiranges(int_ranges)),
    "datemultirange": Kind(("{}", "{[2000-01-01,infinity)}"), multiranges(day_ranges)),
    "tsmultirange": Kind(("{}", '{["2000-01-01 12:00",)}'), multiranges(day_ranges)),
    "int8multirange": Kind(("{}", "{[-9223372036854775808,9223372036854775807)}"), multiranges(int_ranges)),
    "tstzmultirange": Kind(("{}", '{("2000-01-01 12:00+05:30",]}'), multiranges(day_ranges)),
    "tsvector": Kind(("", "'a b':1A,2 'it''s':3"), in_key=False),
    "tsquery": Kind(("", "'fat' & ('rat' | 'it''s')"), in_key=False),
    "pg_lsn": Kind(("0/0", "FFFFFFFF/FFFFFFFF")),
    "pg_snapshot": Kind(("10:20:10,14,15",), in_key=False),
    "xid": Kind(("0", "4294967295"), in_key=False),
    "xid8": Kind(("0", "18446744073709551615")),
    "cid": Kind(("1",), in_key=False),
    "tid": Kind(("(0,1)",)),
    "int2vector": Kind(("", "1 2 3"), in_key=False),
    "oidvector": Kind(("", "1 2 3")),
    "regtype": Kind(("int4", "public.mood", "_text"), in_key=False),
    "regclass": Kind(("pg_class", "public.holder"), in_key=False),
    "regproc": Kind(("now",), in_key=False),
    "regprocedure": Kind(("now()", "substr(text,integer)"), in_key=False),
    "regoper": Kind(("||/",), in_key=False),
    "regoperator": Kind(("+(integer,integer)",), in_key=False),
    "regconfig": Kind(("english", "simple"), in_key=False),
    "regdictionary": Kind(("english_stem", "simple"), in_key=False),
    "regnamespace": Kind(("pg_catalog", "public"), in_key=False),
    "regrole": Kind(("pg_monitor",), in_key=False),
    "regcollation": Kind(('"C"',), in_key=False),
    "aclitem": Kind(("pg_monitor=r/pg_monitor", "=r*w/pg_monitor"), in_key=False),
    "txid_snapshot": Kind(("10:20:10,14,15",), in_key=False),
    "information_schema.cardinal_number": Kind(("0", "2147483647"), python=int),
    "information_schema.sql_identifier": Kind(("", "NULL", 'Ein "Name"')),
    "information_schema.character_data": Kind(("", "NULL", "ü,{}"), in_key=False),
    "information_schema.yes_or_no": Kind(("YES", "NO")),
    "information_schema.time_stamp": Kind(("2000-01-01 12:00:00.12+05:30", "infinity"), python=datetime, or_text=True),
    "refcursor": Kind(("", "c"), in_key=False),
    "public.mood": Kind(("sad", 'so "so"', "größer, weiter")),
    "public.positive": Kind(("1", "2147483647"), python=int),
    "public.positives": Kind(("1", "2147483647"), python=int),
    "public.words": Kind(("{}", '{a,NULL,"NULL",""}', '{{a,"b\\"c"},{"{",","}}'), python=list, in_array=False),
    "public.day": Kind(("2000-01-01", "infinity", "10000-01-01"), days, date, True),
    "public.pair": Kind(('(1,"a ""b""","2000-01-01 12:00:00+05:30")', "(,,)", '(,"",)')),
    "public.nested": Kind(('("(1,a,2000-01-01)","{sad,ok}")', "(,)"), in_key=False),
    "public.vector": Kind(("[1,2.5,-3]",), in_key=False, extension="vector"),
    "public.citext": Kind(("", "NULL", "GRÖSSE"), in_key=False, extension="citext"),
    "public.hstore": Kind(("", '"a"=>"b", "c d"=>NULL'), in_key=False, extension="hstore"),
    "public.ltree": Kind(("", "a.b.c"), in_key=False, extension="ltree"),
    "public.textrange": Kind(("empty", '["a, b",c)')),
}
ODD_SETTINGS = {
    "DateStyle": ["SQL, DMY", "German, DMY", "Postgres, MDY"],
    "IntervalStyle": ["iso_8601", "sql_standard", "postgres_verbose"],
    "TimeZone": ["Asia/Kathmandu", "America/St_Johns", "Africa/Monrovia"],
    "extra_float_digits": ["-15", "0", "3"],
    "bytea_output": ["escape"],
    "client_encoding": ["LATIN1", "SQL_ASCII", "EUC_JP"],
    "standard_conforming_strings": ["off"],
    "quote_all_identifiers": ["on"],
    "xmloption": ["document"],
    "xmlbinary": ["hex"],
    "array_nulls": ["off"],
    "search_path": ["public"],
    "default_transaction_isolation": ["serializable"],
}
PLAIN_SETTINGS = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "xmloption": "content",
    "array_nulls": "on",
    "search_path": "public",
    "default_transaction_isolation": r"read\ committed",
}


@dataclass(frozen=True, slots=True)
class Table:
    """The key's columns are named in the order of the table, which is what ids are made in."""

    name: str
    key: tuple[str, ...]
    types: dict[str, str]  # by column
    full: bool = False


@contextmanager
def plain(database: Database) -> Iterator[psycopg.Connection[Any]]:
    options = " ".join(f"-c {name}={value}" for name, value in PLAIN_SETTINGS.items())
    with database.connect(options=options, client_encoding="UTF8") as conn:
        yield conn


def odd_database(database: Database, rng: random.Random) -> None:
    """Its settings are the database's, or those of our role in it."""
    with plain(database) as conn:
        conn.execute(f"SET search_path = public; {OWN_TYPES}; CREATE TABLE holder (); CREATE PUBLICATION dbsync_mypub")
        for extension in {kind.extension for kind in kinds_of(database.server).values()} - {None}:
            conn.execute(f"CREATE EXTENSION {extension} SCHEMA public")
        here = sql.Identifier(database.name)
        for name, values in ODD_SETTINGS.items():
            owner = sql.SQL("ROLE CURRENT_USER IN DATABASE {}" if rng.random() < 0.5 else "DATABASE {}").format(here)
            value = sql.Literal(rng.choice(values))
            conn.execute(sql.SQL("ALTER {} SET {} = {}").format(owner, sql.Identifier(name), value))


def create(conn: psycopg.Connection[Any], table: Table) -> None:
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in table.types.items())
    conn.execute(
        f"CREATE TABLE public.{table.name} ({columns}, PRIMARY KEY ({', '.join(map(quoted, reversed(table.key)))}))"
    )
    conn.execute(f"ALTER TABLE public.{table.name} REPLICA IDENTITY {'FULL' if table.full else 'DEFAULT'}")
    conn.execute(f"ALTER PUBLICATION dbsync_mypub ADD TABLE public.{table.name}")


def quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def literal(text: str, kind: str) -> str:
    return f"{sql.Literal(text).as_string(None)}::{kind}"


def array(rng: random.Random, kind: str, values: list[str]) -> str:
    cells = [literal(value, kind) for value in values]
    cells += ["NULL"] * rng.randint(0, 1)
    two = [f"ARRAY[{', '.join(cells[:1] * 2)}]", f"ARRAY[{cells[-1]}, NULL]"]
    return rng.choice([f"ARRAY[{', '.join(cells)}]", f"ARRAY[{', '.join(two)}]", "'{}'"]) + f"::{kind}[]"


def drawn(rng: random.Random, kind: str, *, in_key: bool = False) -> str:
    """A value as an SQL expression."""
    if not in_key and rng.random() < 0.15:
        return "NULL"
    base = kind.removesuffix("[]")
    if base == kind:
        return literal(KINDS[base].value(rng), kind)
    return array(rng, base, [KINDS[base].value(rng) for _ in range(rng.randint(1, 4))])


def random_table(rng: random.Random, number: int, known: dict[str, Kind]) -> Table:
    keyable = [name for name, kind in known.items() if kind.in_key]
    key_kinds = rng.sample(keyable, rng.choice([1, 1, 2, 3]))
    key_kinds += ["int4[]"] if rng.random() < 0.1 else []
    kinds = rng.sample([*known, *(f"{name}[]" for name, kind in known.items() if kind.in_array)], 14)
    columns = [(f"k{n} {kind}", kind) for n, kind in enumerate(key_kinds)]
    columns += [(f"c{n} {kind}", kind) for n, kind in enumerate([*kinds, "text"])]
    rng.shuffle(columns)
    key = tuple(name for name, _ in columns if name[0] == "k")
    return Table(f"t{number}", key, dict(columns), full=rng.random() < 0.3)


def insert(conn: psycopg.Connection[Any], rng: random.Random, table: Table) -> None:
    values = ", ".join(drawn(rng, kind, in_key=name in table.key) for name, kind in table.types.items())
    conn.execute(f"INSERT INTO public.{table.name} VALUES ({values}) ON CONFLICT DO NOTHING".encode())


def change(conn: psycopg.Connection[Any], rng: random.Random, table: Table) -> None:
    names = rng.sample(list(table.types), rng.randint(1, 4))
    sets = ", ".join(f"{quoted(name)} = {drawn(rng, table.types[name], in_key=name in table.key)}" for name in names)
    row = f"(SELECT ctid FROM public.{table.name} ORDER BY ctid OFFSET {rng.randint(0, 4)} LIMIT 1)"
    what = f"DELETE FROM public.{table.name}" if rng.random() < 0.15 else f"UPDATE public.{table.name} SET {sets}"
    try:
        conn.execute(f"{what} WHERE ctid = {row}".encode())
    except psycopg.errors.UniqueViolation:
        conn.execute("ROLLBACK")


def written(value: Any, kind: str) -> str | None:
    """A document's value in PostgreSQL's words. What is text there is text here."""
    if value is None:
        return None
    if kind in ("json", "jsonb"):
        return as_json(value)
    match value:
        case bool():
            return "t" if value else "f"
        case bytes():
            return "\\x" + value.hex()
        case timedelta():
            return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
        case list():
            cells = (element(one, kind.removesuffix("[]")) for one in value)
            return "{" + (";" if kind.startswith("box") else ",").join(cells) + "}"
        case date() | time():
            return value.isoformat()
        case _:
            return str(value)


def element(value: Any, kind: str) -> str:
    if isinstance(value, list) and kind not in ("json", "jsonb"):
        return str(written(value, kind))
    text = written(value, kind)
    return "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def as_json(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)}: {as_json(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(as_json, value)) + "]"
        case Decimal():
            return str(value)
        case _:
            return json.dumps(value)


def is_of(value: Any, kind: str) -> bool:
    """Whether the document's value is what the README says this type is in Python."""
    if kind.endswith("[]") and kind not in ("json[]", "jsonb[]"):
        return isinstance(value, list) and all(
            is_of(one, kind if isinstance(one, list) else kind[:-2]) for one in value
        )
    known = KINDS[kind.removesuffix("[]")]
    return value is None or isinstance(value, known.python) or (known.or_text and isinstance(value, str))


def assert_equal(conn: psycopg.Connection[Any], table: Table, documents: dict[str, dict[str, Any]]) -> None:
    names = list(table.types)
    key = ", ".join(f"pg_catalog.format('%s', {quoted(name)})" for name in table.key)
    ids = {
        place: texts[0] if len(texts) == 1 else json.dumps(list(texts))
        for place, *texts in conn.execute(f"SELECT ctid::text, {key} FROM public.{table.name}").fetchall()
    }
    assert sorted(documents) == sorted(ids.values())
    told = ", ".join(compared(name, table.types[name]) for name in names)
    for place, id in ids.items():
        document = documents[id]
        assert set(document) == set(names)
        texts = [written(document[name], table.types[name]) for name in names]
        query = f"SELECT {told} FROM public.{table.name} WHERE ctid = '{place}'"
        row = conn.execute(query.encode(), [text for text in texts for _ in range(2)]).fetchone()
        assert row
        for name, text, (same, shown) in zip(names, texts, zip(row[::2], row[1::2], strict=True), strict=True):
            assert same, f"{name} of {id!r} is {shown!r} in the source, and {text!r} in the target"
            assert document[name] is None or is_of(document[name], table.types[name]), (name, document[name])


def compared(name: str, kind: str) -> str:
    """Whether the source's value is the parameter, and what it is; ROW tells NULL from what is empty."""
    base = kind.removesuffix("[]")
    column = quoted(name).replace("%", "%%")
    if base in ("json", "jsonb"):  # whose own null is None too
        same = f"coalesce(to_jsonb({column}), 'null') = coalesce(to_jsonb(%s::{kind}), 'null')"
    elif base == "interval":
        same = f"{column} IS NOT DISTINCT FROM %s::{kind}"
    else:
        same = f"ROW({column})::text = ROW(%s::{kind})::text"
    return f"{same}, coalesce(%s, '') || ' <> ' || ROW({column})::text"


class Decoding(MirrorHandler):
    """A mirror that sees every row: it overrides a method."""

    def handle_begin(self, msg: Any) -> None: ...


def decoded_ahead(database: Database, spark: SparkSession) -> dict[str, dict[str, Any]]:
    """What a handler's target holds of the whole log, its rows decoded a column at a time."""
    target = RecordingBatcher()
    settings = database.settings(slot=f"{database.slot}_ahead")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "_MANY", 1)
        Syncer(settings, handler=Decoding(), batcher=target, spark=spark).drain()
    return target.documents


def follow(database: Database, spark: SparkSession, tables: list[Table], *steps: Callable[[Any], None]) -> None:
    """Take the steps, a batch each; then the stream's target and a target of refreshes must be the source."""
    streamed, reread = RecordingBatcher(), RecordingBatcher()
    syncer = Syncer(database.settings(chunk_rows=3), batcher=streamed, spark=spark)
    syncer.setup()
    for step in steps:
        with plain(database) as conn:
            step(conn)
        syncer.drain()
    syncer.batcher = reread
    with syncer:
        for table in tables:
            syncer.refresh(f"SELECT * FROM public.{table.name}")
    with plain(database) as conn:
        for table in tables:
            doctype = f"public.{table.name}"
            assert_equal(conn, table, streamed.documents.get(doctype, {}))
            # Not ==, to which NaN is not NaN.
            assert repr(in_order(reread.documents.get(doctype, {}))) == repr(
                in_order(streamed.documents.get(doctype, {}))
            )


def in_order(documents: dict[str, Any]) -> dict[str, Any]:
    return {id: dict(sorted(document.items())) for id, document in sorted(documents.items())}


def kinds_of(server: Server) -> dict[str, Kind]:
    """The types this server has: it may be built without XML, and come with few extensions."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        extensions = {name for (name,) in conn.execute("SELECT name FROM pg_available_extensions")}
        known = {name: kind for name, kind in KINDS.items() if kind.extension is None or kind.extension in extensions}
        try:
            conn.execute("SELECT '<a/>'::xml")
        except psycopg.errors.FeatureNotSupported:
            del known["xml"]
    return known


def test_every_type_and_its_array(each_database: Database, spark: SparkSession) -> None:
    database = each_database
    kinds = kinds_of(database.server)
    odd_database(database, random.Random(1))
    in_arrays = {name: kind for name, kind in kinds.items() if kind.in_array}
    scalars = Table("scalars", ("id",), {"id": "int4", **{name: name for name in kinds}})
    arrays = Table("arrays", ("id",), {"id": "int4", **{f"{name}[]": f"{name}[]" for name in in_arrays}}, full=True)

    def fill(conn: psycopg.Connection[Any]) -> None:
        for n in range(max(len(kind.edges) for kind in kinds.values())):
            cells = [literal(kind.edges[n % len(kind.edges)], name) for name, kind in kinds.items()]
            conn.execute(f"INSERT INTO public.scalars VALUES ({n}, {', '.join(cells)})".encode())
        conn.execute("INSERT INTO public.scalars (id) VALUES (-1)")
        for n, cells in enumerate(zip(*(some_arrays(name, kind) for name, kind in in_arrays.items()), strict=True)):
            conn.execute(f"INSERT INTO public.arrays VALUES ({n}, {', '.join(cells)})".encode())

    with plain(database) as conn:
        create(conn, scalars)
        create(conn, arrays)
    Syncer(database.settings(slot=f"{database.slot}_ahead")).setup()
    follow(database, spark, [scalars, arrays], fill)
    documents = decoded_ahead(database, spark)
    with plain(database) as conn:
        for table in (scalars, arrays):
            assert_equal(conn, table, documents[f"public.{table.name}"])


def some_arrays(name: str, kind: Kind) -> list[str]:
    """All values and NULL, two dimensions, nothing in it, and none at all."""
    cells = [literal(edge, name) for edge in kind.edges]
    found = [
        f"ARRAY[{', '.join(cells)}, NULL]",
        f"ARRAY[ARRAY[{cells[-1]}, NULL], ARRAY[NULL, {cells[0]}]]",
        "'{}'",
        "NULL",
    ]
    return [f"{one}::{name}[]" for one in found]


@settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to make an example smaller would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**32))
def test_tables_of_any_kind(each_postgres: Server, spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)
    tables = [random_table(rng, number, kinds_of(each_postgres)) for number in range(4)]

    def fill(conn: psycopg.Connection[Any]) -> None:
        for table in tables:
            for _ in range(7):
                insert(conn, rng, table)
            for _ in range(4):
                change(conn, rng, table)

    def alter(conn: psycopg.Connection[Any]) -> None:
        for table in tables:
            for _ in range(6):
                change(conn, rng, table)

    with fresh_database(each_postgres) as database:
        odd_database(database, rng)
        with plain(database) as conn:
            for table in tables:
                create(conn, table)
        follow(database, spark, tables, fill, alter)
