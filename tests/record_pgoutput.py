"""Record what a real PostgreSQL sends, for the tests that need no server.

    python tests/record_pgoutput.py "host=… port=… user=… dbname=…"

The server must be empty of the names below and run with wal_level=logical, logical_decoding_work_mem=64kB and
max_prepared_transactions above 0. Writes, for the server's major version, into tests/unit/recorded/:

- pgoutput_<version>.jsonl: one message a line, as hex, with what it decoded to (read it before you commit it);
- values_<version>.jsonl: one value a line, PostgreSQL's text and psycopg's own reading of it;
- arrays_<version>.jsonl: the array types the server has built in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psycopg
from psycopg import sql

from dbsync import pgoutput

RECORDED = Path(__file__).parent / "unit" / "recorded"

SCHEMA = """
    CREATE TYPE mood AS ENUM ('sad', 'ok');
    CREATE TABLE plain (id int PRIMARY KEY, name text, feeling mood, amount numeric(10, 2), body text STORAGE EXTERNAL);
    CREATE TABLE whole (id int, name text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE indexed (a int NOT NULL, b text NOT NULL, c text);
    CREATE UNIQUE INDEX indexed_key ON indexed (a, b);
    ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_key;
    CREATE TABLE "Größe x" ("spalte ü" int PRIMARY KEY, "NULL" text);
    CREATE PUBLICATION rec FOR TABLE plain, whole, indexed, "Größe x";
    SELECT pg_catalog.pg_replication_origin_create('elsewhere');
"""

CHANGES = (
    """INSERT INTO plain VALUES (1, 'ä', 'sad', 1.50, repeat('x', 2100)), (2, NULL, NULL, 'NaN', '');
       UPDATE plain SET name = 'b' WHERE id = 1;
       UPDATE plain SET id = 3 WHERE id = 2;
       DELETE FROM plain WHERE id = 3""",
    """INSERT INTO whole VALUES (1, 'a'), (2, NULL); UPDATE whole SET name = 'c' WHERE id = 1;
       DELETE FROM whole WHERE id = 2""",
    """INSERT INTO indexed VALUES (1, 'a', 'x'); UPDATE indexed SET c = 'y'; UPDATE indexed SET b = 'b';
       DELETE FROM indexed""",
    """INSERT INTO "Größe x" VALUES (1, E'tab\\tnew\\nline')""",
    "TRUNCATE whole",
    "TRUNCATE whole, indexed RESTART IDENTITY CASCADE",
    "SELECT pg_catalog.pg_logical_emit_message(true, 'prefix', 'content')",
    "SELECT pg_catalog.pg_logical_emit_message(false, 'ß', '\\x00ff'::bytea)",
)

# Large enough to be streamed with 64 kB of decoding memory.
FILL = "INSERT INTO whole SELECT n, repeat('s', 40) FROM generate_series(1, 900) AS n"
STREAMED = (
    (
        f"{FILL}; TRUNCATE whole; SELECT pg_catalog.pg_logical_emit_message(true, 'in stream', 'x');"
        " INSERT INTO plain VALUES (10, 'streamed', 'ok', 1, NULL); UPDATE plain SET name = 's' WHERE id = 10;"
        " DELETE FROM plain WHERE id = 10"
    ),
    f"BEGIN; {FILL}; SAVEPOINT s; {FILL}; ROLLBACK TO s; {FILL}; COMMIT",
    f"BEGIN; {FILL}; {FILL}; ROLLBACK",
    f"BEGIN; {FILL}; PREPARE TRANSACTION 'large'",
    "COMMIT PREPARED 'large'",
)

VALUES = (
    ("bool", ("true", "false")),
    ("int2", ("-32768", "32767")),
    ("int4", ("0", "-2147483648")),
    ("int8", ("9223372036854775807", "-9223372036854775808")),
    ("oid", ("4294967295",)),
    ("float4", ("1.1", "NaN", "-Infinity", "1e-30")),
    ("float8", ("0.1", "NaN", "Infinity", "-0", "1e300", "5e-324", "123456789012345680")),
    ("numeric", ("0", "1.500", "NaN", "Infinity", "-Infinity", "1e-100", "9" * 60 + ".123456789", "-0.00")),
    ("text", ("", "a", "ü\n\t\\'\"")),
    ("varchar", ("NULL",)),
    ("bpchar", ("a ",)),
    ("name", ("n",)),
    ('"char"', ("c",)),
    ("bytea", ("", "\\x00ff5c27", "abc")),
    ("date", ("2024-02-29", "0001-01-01", "9999-12-31")),
    ("time", ("00:00", "23:59:59.999999", "03:04:05.1")),
    ("timetz", ("03:04:05+00", "03:04:05.5+05:30", "03:04:05-05:30:15")),
    ("timestamp", ("2024-01-02 03:04:05", "2024-01-02 03:04:05.12", "0001-01-01", "9999-12-31 23:59:59.999999")),
    ("timestamptz", ("2024-01-02 03:04:05+05:30", "2024-01-02 03:04:05.000001+00", "1883-01-01 00:00+00")),
    ("interval", ("0", "1 day", "-1 day 02:03:04.5", "3 days -04:05:06.789", "1000 hours", "-0.000001 seconds")),
    ("uuid", ("00000000-0000-0000-0000-000000000001",)),
    ("json", ('{"a": [1, 2.5, null, true], "b": "ü\\u00e4"}', "12345678901234567890", '"x"', "null")),
    ("jsonb", ('{"b": 1, "a": {"c": []}}', "[]", "false")),
    ("int4[]", ("{}", "{1,2,NULL}", "{{1,2},{3,4}}", "[0:2]={1,2,3}", "[-1:0][2:3]={{1,2},{3,4}}")),
    ("text[]", ('{"",NULL,"NULL","null","a,b","{","}","\\"","\\\\"," x "}', '{{"a b",c},{d,"e,f"}}', "{ü}")),
    ("bool[]", ("{t,f,NULL}",)),
    ("numeric[]", ("{1.50,NaN}",)),
    ("bytea[]", ('{"\\\\x00ff","\\\\x"}',)),
    ("timestamptz[]", ('{"2024-01-02 03:04:05+00",NULL}',)),
    ("jsonb[]", ('{"{\\"a\\": [1, \\"x\\"]}",NULL,null}',)),
    ("date[]", ("{2024-01-02}",)),
    ("uuid[]", ("{00000000-0000-0000-0000-000000000001}",)),
    ("interval[]", ('{"1 day 02:00:00","3 days"}',)),
)


def main(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        version = connection.info.server_version // 10000
        # What dbsync's own connections are set to.
        connection.execute("SET client_encoding = 'UTF8'")
        connection.execute("SET datestyle = 'ISO, YMD'")
        connection.execute("SET intervalstyle = 'postgres'")
        connection.execute("SET timezone = 'UTC'")
        write(f"values_{version}.jsonl", record_values(connection))
        write(f"arrays_{version}.jsonl", record_arrays(connection))
        connection.execute(SCHEMA)
        write(f"pgoutput_{version}.jsonl", record_messages(connection))


def write(name: str, lines: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (RECORDED / name).write_text(text, encoding="utf-8")


def record_values(connection: psycopg.Connection[tuple[object, ...]]) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for name, literals in VALUES:
        for literal in literals:
            cursor = connection.execute(sql.SQL("SELECT %s::{}").format(sql.SQL(name)), [literal])
            assert cursor.description is not None
            assert cursor.pgresult is not None
            text = cursor.pgresult.get_value(0, 0)
            assert text is not None
            (value,) = cursor.fetchone() or ()
            oid = cursor.description[0].type_code
            lines.append({"type": name, "oid": oid, "text": text.decode(), "repr": repr(value)})
    return lines


def record_arrays(connection: psycopg.Connection[tuple[object, ...]]) -> list[dict[str, object]]:
    rows = connection.execute(
        """SELECT a.oid::int8, e.oid::int8, e.typname::text, a.typdelim::text
             FROM pg_catalog.pg_type AS a JOIN pg_catalog.pg_type AS e ON e.oid = a.typelem
            WHERE e.typarray = a.oid AND a.oid < 10000 AND e.typtype NOT IN ('c', 'p')
            ORDER BY a.oid"""
    )
    return [{"array": a, "element": e, "name": name, "delimiter": delimiter} for a, e, name, delimiter in rows]


def record_messages(connection: psycopg.Connection[tuple[object, ...]]) -> list[dict[str, object]]:
    connection.execute("SELECT pg_catalog.pg_create_logical_replication_slot('rec', 'pgoutput', false, true)")
    try:
        make_changes(connection)
        lines = peek(connection, "plain", proto_version="1")
        lines += peek(connection, "binary", proto_version="1", binary="true")[:12]
        connection.execute("SELECT pg_catalog.pg_replication_slot_advance('rec', pg_catalog.pg_current_wal_lsn())")
        make_prepared(connection)
        lines += peek(connection, "two_phase", proto_version="3", two_phase="on")
        connection.execute("SELECT pg_catalog.pg_replication_slot_advance('rec', pg_catalog.pg_current_wal_lsn())")
        for change in STREAMED:
            connection.execute(change)
        lines += thin(peek(connection, "streaming", proto_version="3", streaming="on", two_phase="on"))
        aborts = peek(connection, "parallel", proto_version="4", streaming="parallel", two_phase="on")
        lines += [line for line in aborts if str(line["hex"]).startswith(b"A".hex())]
    finally:
        connection.execute("SELECT pg_catalog.pg_drop_replication_slot('rec')")
    return lines


def make_changes(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    for change in CHANGES:
        connection.execute(change)
    connection.execute("SELECT pg_catalog.pg_replication_origin_session_setup('elsewhere')")
    connection.execute("INSERT INTO whole VALUES (7, 'from elsewhere')")
    connection.execute("SELECT pg_catalog.pg_replication_origin_session_reset()")


def make_prepared(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    for gid, end in (("kept", "COMMIT"), ("dropped", "ROLLBACK")):
        connection.execute("BEGIN")
        connection.execute("INSERT INTO whole VALUES (8, %s)", [gid])
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
        connection.execute(sql.SQL("{} PREPARED {}").format(sql.SQL(end), gid))


def peek(connection: psycopg.Connection[tuple[object, ...]], part: str, **options: str) -> list[dict[str, object]]:
    """What the slot holds, decoded as one would decode it from the stream."""
    flat = [text for option in ({"publication_names": "rec", "messages": "true"} | options).items() for text in option]
    rows = connection.execute(
        "SELECT data FROM pg_catalog.pg_logical_slot_peek_binary_changes('rec', NULL, NULL, VARIADIC %s::text[])",
        [flat],
    )
    lines: list[dict[str, object]] = []
    streaming = False
    for (data,) in rows:
        assert isinstance(data, bytes)
        message = pgoutput.decode(data, streaming=streaming)
        lines.append({"part": part, "streaming": streaming, "hex": data.hex(), "repr": repr(message)})
        if isinstance(message, pgoutput.StreamStart | pgoutput.StreamStop):
            streaming = isinstance(message, pgoutput.StreamStart)
    return lines


def thin(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """Keep the first of each run of inserts."""
    kept: list[dict[str, object]] = []
    previous = ""
    for line in lines:
        tag = str(line["hex"])[:2]
        if not tag == previous == b"I".hex():
            kept.append(line)
        previous = tag
    return kept


if __name__ == "__main__":
    main(sys.argv[1])
