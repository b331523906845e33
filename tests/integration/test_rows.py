"""Everything a row and a table can do: what is streamed, and what is re-read, equals the source row by row.

Every scenario has a schema of its own, and all of them share a few batches. Each of its steps is drained before the
next one, so that what is in one step comes in one batch and what is in two comes in two. When all is done, the same log
is followed from its start in two other ways: through a handler, decoded ahead; and by SQL and on the executors. (On the
older versions that are here, in the first way only.)

The topics of PostgreSQL's own tests of logical replication that are here, by the scenario in quotes:

| PostgreSQL's topic | here |
| --- | --- |
| 001_rep_changes | "a key changes", "an index as identity", "no replica identity …", "TOAST …"; test_keyless |
| 002_types | property/test_every_type |
| 004_sync | test_refresh |
| 005_encoding | test_transactions |
| 006_rewrite | "a rewrite between changes" |
| 007_ddl, 024_add_drop_pub | "a table joins the publication later", "a table leaves the publication for a while" |
| 009_matviews | "a materialized view beside its table" |
| 010_truncate | "TRUNCATE …" |
| 011_generated | "generated …", "a column list with a generated column", "virtual …"; test_keyless: in the key |
| 013_partition | "partitions …", "TRUNCATE of partitions", "one partition published by itself", "a level between …" |
| 013_partition: other identities | "whole old rows …", "a partition does not log …"; test_keyless |
| 015 to 023: streaming, its aborts and DDL, messages, two phases | test_transactions |
| 025_rep_changes_for_schema | "all tables of a schema, …" |
| 027_nosuperuser | test_check, test_control |
| 028_row_filter | "a row filter", "partitions through their root and a row filter", "… overrides a row filter" |
| 031_column_list | "a column list", "other column lists …"; test_keyless: without the key |
| 029_on_error | test_delivery |
| 030_origin | test_transactions |
| 034_temporal | test_a_key_without_overlaps_is_streamed |
| 100_bugs: TOAST of a row that enters the filter | "a row filter" |
| 100_bugs: the identity's column is gone | "the identity's index is dropped", "another index becomes the identity" |
| 100_bugs: an index over a function | "an index over a function that reads a table" |
| 100_bugs: unlogged tables | "a table becomes unlogged and logged again", "temporary and unlogged tables" |
| 100_bugs: FULL | "dropped columns …", "generated columns that are published", "columns added later …" |
| 100_bugs: schema renamed | "its schema is renamed", "… within a transaction" |

What is left out is about the subscriber's side: constraints and triggers (003), other schemas (008), collations of
the target (012), binary transfer (014), statistics (026), its indexes (032), owners (033), conflicts (035).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fix_postgres import Database, Server, fresh_database, told_to
from psycopg import sql
from pyspark.sql import SparkSession
from recording import RecordingBatcher, SqliteBatcher

from dbsync import MirrorHandler, Syncer, ahead, fewevents
from dbsync.errors import RefreshError

Docs = dict[str, dict[str, Any]]

BIG = "repeat('0123456789', 300)"  # far more than a page keeps in place
BIGGER = "repeat('9876543210', 400)"
PUBLISH = "ALTER PUBLICATION dbsync_mypub ADD TABLE"


@dataclass(frozen=True, slots=True)
class Table:
    """A type in the target, and the rows of the source it has to equal."""

    name: str = "t"
    rows: str = "SELECT * FROM t"
    key: tuple[str, ...] = ("id",)
    refresh: str | None = None  # where it is another SELECT
    stale: Docs = field(default_factory=dict)  # documents the log has no way to take away
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    make: list[str]
    steps: list[list[str]]
    tables: list[Table] = field(default_factory=lambda: [Table()])
    since: str = ">= 14"


PLAIN: dict[str, Scenario] = {
    "TOAST folded in a batch": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL, other text STORAGE EXTERNAL)",
            f"{PUBLISH} t",
        ],
        [
            [
                f"INSERT INTO t VALUES (1, 'a', {BIG}, {BIG}), (2, 'a', {BIG}, NULL), (3, 'a', '', {BIG})",
                "UPDATE t SET v = 'b'",
                f"UPDATE t SET other = {BIGGER} WHERE id = 1",
                "UPDATE t SET v = 'c' WHERE id = 1",
                f"DELETE FROM t WHERE id = 2; INSERT INTO t VALUES (2, 'again', {BIGGER}, '')",
                "UPDATE t SET v = 'd', other = NULL WHERE id = 2",
            ]
        ],
    ),
    "TOAST across changes of the key": Scenario(
        [
            "CREATE TABLE t (id int, part text, v text, big text STORAGE EXTERNAL, PRIMARY KEY (id, part))",
            f"{PUBLISH} t",
        ],
        [
            [
                f"INSERT INTO t SELECT g, 'p', 'a', {BIG} || g FROM generate_series(1, 6) AS g",
                "UPDATE t SET id = 11 WHERE id = 1",
                "UPDATE t SET id = 12, v = 'b' WHERE id = 2; UPDATE t SET part = 'q' WHERE id = 12",
                "UPDATE t SET id = 0 WHERE id = 3; UPDATE t SET id = 3 WHERE id = 4; UPDATE t SET id = 4 WHERE id = 0",
            ],
            [
                "UPDATE t SET id = 15 WHERE id = 5",
                "UPDATE t SET id = 0 WHERE id = 3; UPDATE t SET id = 3 WHERE id = 4; UPDATE t SET id = 4 WHERE id = 0",
                "UPDATE t SET id = 16 WHERE id = 6; UPDATE t SET id = 6 WHERE id = 16",
            ],
        ],
        [Table(key=("id", "part"))],
    ),
    "TOAST completed across batches": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL, doc jsonb STORAGE EXTERNAL)",
            f"{PUBLISH} t",
        ],
        [
            [
                f"""INSERT INTO t SELECT g, 'a', {BIG} || g, jsonb_build_object('n', {BIG}, 'big', 12345678901234567890)
                    FROM generate_series(1, 5) AS g"""
            ],
            ["UPDATE t SET v = 'b' WHERE id < 4"],
            [
                "UPDATE t SET v = 'c' WHERE id = 1",
                f"UPDATE t SET big = {BIGGER} WHERE id = 2",
                "DELETE FROM t WHERE id = 3",
            ],
            ["UPDATE t SET v = NULL WHERE id = 5", "UPDATE t SET big = NULL WHERE id = 5"],
        ],
    ),
    "TOAST in the key": Scenario(
        ["CREATE TABLE t (id text STORAGE EXTERNAL PRIMARY KEY, v int, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [f"INSERT INTO t VALUES (repeat('k', 2200), 1, {BIG}), (repeat('l', 2200), 1, {BIG})"],
            ["UPDATE t SET v = 2 WHERE id LIKE 'k%'", "UPDATE t SET v = 2, id = repeat('m', 2300) WHERE id LIKE 'l%'"],
        ],
    ),
    "whole old rows": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, 'a', {BIG} || g FROM generate_series(1, 4) AS g"],
            ["UPDATE t SET v = 'b' WHERE id = 1", "UPDATE t SET id = 12 WHERE id = 2", "DELETE FROM t WHERE id = 3"],
            ["UPDATE t SET id = id + 100, v = NULL"],
        ],
    ),
    "columns added later and whole old rows": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "INSERT INTO t VALUES (1), (2)",
            "ALTER TABLE t ADD b bool DEFAULT false",
            "INSERT INTO t VALUES (3)",
            f"{PUBLISH} t",
        ],
        [
            [
                "UPDATE t SET id = id + 10 WHERE id = 1",
                "UPDATE t SET b = NULL WHERE id = 2",
                "DELETE FROM t WHERE id = 3",
            ]
        ],
    ),
    "whole old rows without a change": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [["INSERT INTO t VALUES (1, NULL), (2, '')"], ["UPDATE t SET v = v", "DELETE FROM t WHERE id = 2"]],
    ),
    "whole old rows, and a primary key over later columns": Scenario(
        [
            "CREATE TABLE t (v text, b int, big text STORAGE EXTERNAL, a int, PRIMARY KEY (a, b))",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t VALUES ('a', 1, {BIG}, 2), ('a', 2, {BIG}, 1)"],
            ["UPDATE t SET a = 7 WHERE b = 1", "UPDATE t SET v = 'b' WHERE b = 2"],
        ],
        [Table(key=("b", "a"))],
    ),
    "a key changes": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)", f"{PUBLISH} t"],
        [
            ["INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) AS g"],
            [
                "UPDATE t SET id = -id",
                "UPDATE t SET id = 1 - id WHERE id > -5",
                "DELETE FROM t WHERE id = 2; INSERT INTO t VALUES (2, 'new'); UPDATE t SET id = 20 WHERE id = 2",
            ],
        ],
    ),
    "keys of several columns and types": Scenario(
        [
            """CREATE TABLE t (flag bool, code char(5), at timestamptz, n numeric, name text, v int, big text STORAGE
               EXTERNAL, PRIMARY KEY (name, at, n, code, flag))""",
            f"{PUBLISH} t",
        ],
        [
            [
                f"""INSERT INTO t SELECT g % 2 = 0, 'c' || g, timestamptz '2020-01-01 00:00+05:30' + g * interval '1 h',
                    g / 4.0, E'"\\\\ü\\t,' || g, g, {BIG} FROM generate_series(1, 9) AS g"""
            ],
            ["UPDATE t SET v = 0 WHERE v < 4", "UPDATE t SET n = 1.10 WHERE v = 5", "UPDATE t SET n = 1.1 WHERE v = 5"],
        ],
        [Table(key=("flag", "code", "at", "n", "name"))],
    ),
    "an index as identity": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b text NOT NULL, v text, big text STORAGE EXTERNAL)",
            "CREATE UNIQUE INDEX t_ab ON t (b, a) INCLUDE (v)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_ab",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, g * 10, 'b', 'v', {BIG} FROM generate_series(1, 4) AS g"],
            [
                "UPDATE t SET v = 'w' WHERE id = 1",
                "UPDATE t SET a = 0 WHERE id = 2",
                "UPDATE t SET id = 33 WHERE id = 3",
            ],
            ["DELETE FROM t WHERE id = 4"],
        ],
        [Table(key=("a", "b"))],
    ),
    "another index becomes the identity": Scenario(
        [
            "CREATE TABLE t (a int NOT NULL, b int NOT NULL)",
            "CREATE UNIQUE INDEX ta ON t (a)",
            "CREATE UNIQUE INDEX tb ON t (b)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX ta",
            f"{PUBLISH} t",
        ],
        [
            ["INSERT INTO t VALUES (1, 10), (2, 20)"],
            [
                "ALTER TABLE t REPLICA IDENTITY USING INDEX tb",
                "UPDATE t SET a = -a WHERE a = 1",
                "DELETE FROM t WHERE a = 2",
            ],
        ],
        [Table(key=("b",), stale={"1": {"a": 1, "b": 10}, "2": {"a": 2, "b": 20}})],
    ),
    "the identity's index is dropped": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, v text)",
            "CREATE UNIQUE INDEX t_a ON t (a)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_a",
            f"{PUBLISH} t",
        ],
        [
            ["INSERT INTO t VALUES (1, 10, 'before')"],
            [
                "ALTER TABLE t DROP COLUMN a",
                "INSERT INTO t VALUES (2, 'between')",
                "ALTER TABLE t REPLICA IDENTITY DEFAULT",
                "UPDATE t SET v = 'after'",
            ],
        ],
        [Table(stale={"10": {"id": 1, "a": 10, "v": "before"}})],
    ),
    "TRUNCATE of several tables": Scenario(
        [
            "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)",
            "CREATE TABLE child (id int PRIMARY KEY, t int REFERENCES t)",
            "CREATE TABLE other (id serial PRIMARY KEY, v text)",
            "CREATE TABLE unpublished (id int)",
            f"{PUBLISH} t, child, other",
        ],
        [
            [
                "INSERT INTO t (v) VALUES ('a'), ('b')",
                "INSERT INTO child VALUES (1, 1)",
                "INSERT INTO other (v) VALUES ('a')",
            ],
            [
                "INSERT INTO t (v) VALUES ('c')",
                "TRUNCATE t, other, unpublished RESTART IDENTITY CASCADE",
                "INSERT INTO t (v) VALUES ('d')",
                "UPDATE t SET v = 'e'",
                "BEGIN; INSERT INTO other (v) VALUES ('x'); TRUNCATE other; INSERT INTO other (v) VALUES ('y'); COMMIT",
                "BEGIN; TRUNCATE t CASCADE; ROLLBACK",
                "INSERT INTO child VALUES (2, 1)",
            ],
        ],
        [Table(), Table("child", "SELECT * FROM child"), Table("other", "SELECT * FROM other")],
    ),
    "TRUNCATE and nothing after": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY)", f"{PUBLISH} t"],
        [["INSERT INTO t VALUES (1)"], ["INSERT INTO t VALUES (2)", "TRUNCATE t"]],
    ),
    "partitions under their own names": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 (v text, gone int, id int NOT NULL, big text STORAGE EXTERNAL, PRIMARY KEY (id))",
            "ALTER TABLE t2 DROP COLUMN gone",
            "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
            "CREATE TABLE t3 (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, 'v', {BIG} || g FROM generate_series(1, 19, 3) AS g"],
            [
                "UPDATE t SET id = id + 10 WHERE id = 1",
                "UPDATE t SET id = id - 10 WHERE id = 16",
                "UPDATE t SET v = 'w'",
            ],
            [
                "INSERT INTO t3 VALUES (25, 'not seen', 'x')",
                "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)",
                "INSERT INTO t VALUES (21, 'seen', 'x')",
                "UPDATE t SET v = 'seen too' WHERE id = 25",
                "ALTER TABLE t DETACH PARTITION t1",
                "UPDATE t1 SET v = 'by itself' WHERE id = 6",
            ],
        ],
        [
            Table("t2", "SELECT v, id, big FROM t2", refresh="SELECT * FROM t"),
            Table("t3", "SELECT * FROM t3", refresh="SELECT * FROM t"),
        ],
    ),
    "TRUNCATE of partitions": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
            "CREATE TABLE u (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (0) TO (10)",
            f"{PUBLISH} t, u",
        ],
        [
            ["INSERT INTO t VALUES (1, 'a'), (11, 'a')", "INSERT INTO u VALUES (1, 'a')"],
            ["TRUNCATE t1", "INSERT INTO t VALUES (2, 'b')", "TRUNCATE u"],
        ],
        [Table("t1", "SELECT * FROM t1"), Table("t2", "SELECT * FROM t2"), Table("u1", "SELECT * FROM u1")],
    ),
    "row filters of partitions and of parents": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            f"{PUBLISH} t1 WHERE (id > 5)",
            "CREATE TABLE p (id int PRIMARY KEY, v text)",
            "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (p)",
            f"{PUBLISH} p WHERE (id > 5)",
        ],
        [
            [
                "INSERT INTO t SELECT g, 'a' FROM generate_series(4, 7) AS g",
                "INSERT INTO p SELECT g, 'a' FROM generate_series(4, 7) AS g",
                "INSERT INTO child SELECT g, 'c' FROM generate_series(4, 7) AS g",
            ],
            ["UPDATE t SET id = 9 WHERE id = 4", "UPDATE t SET id = 1 WHERE id = 7", "UPDATE p SET v = 'b'"],
        ],
        [
            Table("t1", "SELECT * FROM t1 WHERE id > 5", refresh="SELECT * FROM t1"),
            Table("p", "SELECT * FROM ONLY p WHERE id > 5", refresh="SELECT * FROM p"),
            Table("child", "SELECT * FROM child WHERE id > 5", refresh="SELECT * FROM p"),
        ],
        since=">= 15",
    ),
    "inheritance": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)",
            "CREATE TABLE child (extra int, PRIMARY KEY (id)) INHERITS (t)",
            "ALTER TABLE child ALTER big SET STORAGE EXTERNAL",
            f"{PUBLISH} t",
        ],
        [
            [
                f"INSERT INTO t VALUES (1, 'a', {BIG}), (2, 'a', {BIG})",
                f"INSERT INTO child VALUES (1, 'c', {BIGGER}, 5)",
            ],
            ["UPDATE t SET v = 'b'"],
            ["TRUNCATE ONLY t", "INSERT INTO t VALUES (3, 'c', 'x')", "UPDATE child SET id = 3"],
            ["UPDATE t SET v = 'd' WHERE id = 3"],
        ],
        [Table(rows="SELECT * FROM ONLY t"), Table("child", "SELECT * FROM child")],
    ),
    "generated and identity columns": Scenario(
        [
            """CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int, double int GENERATED ALWAYS AS
               (a * 2) STORED, n int GENERATED BY DEFAULT AS IDENTITY, big text STORAGE EXTERNAL, made text GENERATED
               ALWAYS AS (big || 'x') STORED)""",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t (a, big) VALUES (1, {BIG}), (2, NULL)", "INSERT INTO t (a, n) VALUES (3, 300)"],
            ["UPDATE t SET a = 10 WHERE a = 1", "UPDATE t SET id = DEFAULT WHERE a = 2"],
        ],
        [Table(rows="SELECT id, a, n, big FROM t", refresh="SELECT * FROM t")],
    ),
    "virtual generated columns": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int, double int GENERATED ALWAYS AS (a * 2) VIRTUAL, v text)",
            f"{PUBLISH} t",
        ],
        [["INSERT INTO t VALUES (1, 1, DEFAULT, 'v')"], ["UPDATE t SET a = 2"]],
        [Table(rows="SELECT id, a, v FROM t", refresh="SELECT * FROM t")],
        since=">= 18",
    ),
    "a row filter": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            f"{PUBLISH} t WHERE (id > 10)",
            "CREATE TABLE f (id int PRIMARY KEY, kind text, v text, big text STORAGE EXTERNAL)",
            "ALTER TABLE f REPLICA IDENTITY FULL",
            f"{PUBLISH} f WHERE (kind = 'in' AND v IS NOT NULL)",
            "CREATE TABLE k (id int, kind text, v text, big text STORAGE EXTERNAL, PRIMARY KEY (id, kind))",
            f"{PUBLISH} k WHERE (kind = 'in')",
        ],
        [
            [
                "INSERT INTO t SELECT g, 'v' FROM generate_series(5, 15) AS g",
                f"""INSERT INTO f SELECT g, CASE WHEN g < 3 THEN 'in' ELSE 'out' END, 'v', {BIG}
                    FROM generate_series(1, 5) AS g""",
                f"""INSERT INTO k SELECT g, CASE WHEN g < 3 THEN 'in' ELSE 'out' END, 'v', {BIG}
                    FROM generate_series(1, 5) AS g""",
            ],
            [
                "UPDATE t SET id = 20 WHERE id = 5",
                "UPDATE t SET id = 1 WHERE id = 15",
                "UPDATE t SET id = 21 WHERE id = 14",
                "UPDATE t SET v = 'w'",
                "UPDATE f SET kind = 'in' WHERE id = 3",
                "UPDATE f SET kind = 'out' WHERE id = 1",
                "UPDATE f SET v = 'w' WHERE id IN (2, 4)",
                "UPDATE k SET kind = 'in' WHERE id = 3",
                "UPDATE k SET kind = 'out' WHERE id = 1",
                "UPDATE k SET v = 'w' WHERE id IN (2, 4)",
            ],
            ["DELETE FROM t WHERE id < 13", "UPDATE f SET v = NULL WHERE id = 2", "UPDATE k SET kind = 'in', v = 'x'"],
        ],
        [
            Table(rows="SELECT * FROM t WHERE id > 10", refresh="SELECT * FROM t"),
            Table("f", "SELECT * FROM f WHERE kind = 'in' AND v IS NOT NULL", refresh="SELECT * FROM f"),
            Table("k", "SELECT * FROM k WHERE kind = 'in'", ("id", "kind"), refresh="SELECT * FROM k"),
        ],
        since=">= 15",
    ),
    "a column list": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, secret text, v text, big text STORAGE EXTERNAL, hidden text)",
            f"{PUBLISH} t (big, id, v)",
        ],
        [
            [f"INSERT INTO t VALUES (1, 's', 'v', {BIG}, {BIG}), (2, 's', 'v', {BIG}, NULL)"],
            ["UPDATE t SET secret = 'x'", "UPDATE t SET v = 'w' WHERE id = 1"],
            ["ALTER TABLE t DROP COLUMN hidden, ADD more int DEFAULT 5", "UPDATE t SET more = 6"],
        ],
        [Table(rows="SELECT id, v, big FROM t", refresh="SELECT * FROM t")],
        since=">= 15",
    ),
    "a column list with a generated column": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a + 1) STORED)",
            f"{PUBLISH} t (id, g)",
        ],
        [
            ["INSERT INTO t VALUES (1, 1), (2, 2)"],
            ["UPDATE t SET a = 5 WHERE id = 1", "UPDATE t SET id = 3 WHERE id = 2"],
        ],
        [Table(rows="SELECT id, g FROM t", refresh="SELECT * FROM t")],
        since=">= 18",
    ),
    "columns change between transactions": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, a int, b text, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [f"INSERT INTO t SELECT g, g, 'b' || g, {BIG} || g FROM generate_series(1, 3) AS g"],
            [
                "UPDATE t SET b = 'one' WHERE id = 1",
                "ALTER TABLE t ADD c int DEFAULT 7",
                "UPDATE t SET b = 'two' WHERE id = 2",
                "ALTER TABLE t DROP COLUMN a",
                "INSERT INTO t VALUES (4, 'four', 'x', 8)",
                "ALTER TABLE t RENAME b TO b2",
                "UPDATE t SET b2 = 'three' WHERE id = 3",
                "ALTER TABLE t ALTER c TYPE text USING 'c' || c",
                "ALTER TABLE t ADD a text",
                "UPDATE t SET a = 'new'",
            ],
        ],
    ),
    "columns change within a transaction": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, a int, b text)", f"{PUBLISH} t"],
        [
            [
                """INSERT INTO t VALUES (1, 1, 'b'); ALTER TABLE t ADD c int; INSERT INTO t VALUES (2, 1, 'b', 5);
                   ALTER TABLE t DROP COLUMN a; UPDATE t SET c = 6; ALTER TABLE t RENAME b TO d;
                   INSERT INTO t VALUES (3, 'd', 1); ALTER TABLE t ALTER d TYPE int USING 5; UPDATE t SET d = 9""",
            ],
        ],
    ),
    "the key is redefined": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, v text)", f"{PUBLISH} t"],
        [
            ["INSERT INTO t VALUES (1, 'a', 'x'), (2, 'b', 'x')"],
            [
                "UPDATE t SET v = 'y' WHERE id = 1",
                "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (code)",
                "UPDATE t SET v = 'z'",
                "UPDATE t SET code = 'c' WHERE id = 2",
            ],
        ],
        [
            Table(
                key=("code",),
                stale={"1": {"id": 1, "code": "a", "v": "y"}, "2": {"id": 2, "code": "b", "v": "x"}},
            )
        ],
    ),
    "the key gets another type": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [f"INSERT INTO t VALUES (1, 'a', {BIG}), (2, 'a', {BIG})"],
            [
                "UPDATE t SET v = 'b'",
                "ALTER TABLE t ALTER id TYPE text",
                "UPDATE t SET v = 'c'",
                "UPDATE t SET id = 'x' WHERE id = '2'",
            ],
        ],
    ),
    "the key is renamed": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [f"INSERT INTO t VALUES (1, 'a', {BIG}), (2, 'a', {BIG})"],
            [
                "UPDATE t SET v = 'b' WHERE id = 1",
                "ALTER TABLE t RENAME id TO key",
                "UPDATE t SET v = 'c' WHERE key = 2",
            ],
            ["UPDATE t SET v = 'd' WHERE key = 1"],
        ],
        [Table(key=("key",))],
    ),
    "the key of a table with whole old rows is renamed": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)", "ALTER TABLE t REPLICA IDENTITY FULL", f"{PUBLISH} t"],
        [
            ["INSERT INTO t VALUES (1, 'a'), (2, 'a'), (3, 'a')"],
            ["DELETE FROM t WHERE id = 2", "ALTER TABLE t RENAME id TO key", "UPDATE t SET v = 'c'"],
        ],
        [Table(key=("key",))],
    ),
    "dropped columns and whole old rows": Scenario(
        [
            "CREATE TABLE t (gone text, id int PRIMARY KEY, a int, big text STORAGE EXTERNAL, gone2 text)",
            "ALTER TABLE t DROP gone, DROP gone2",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t VALUES (1, 1, {BIG}), (2, 2, {BIG}), (3, 3, {BIG})"],
            ["UPDATE t SET a = 5 WHERE id = 1", "UPDATE t SET id = 4 WHERE id = 2", "DELETE FROM t WHERE id = 3"],
        ],
    ),
    "no replica identity, inserts only": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)", "ALTER TABLE t REPLICA IDENTITY NOTHING", f"{PUBLISH} t"],
        [["INSERT INTO t VALUES (1, 'a')"], ["INSERT INTO t VALUES (2, 'b')"]],
    ),
    "a materialized view beside its table": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            f"{PUBLISH} t",
            "CREATE MATERIALIZED VIEW m AS SELECT * FROM t",
        ],
        [
            [
                """BEGIN; INSERT INTO t VALUES (1, 'a'); REFRESH MATERIALIZED VIEW m; UPDATE t SET v = 'b';
                   CREATE MATERIALIZED VIEW m2 AS SELECT * FROM m; COMMIT"""
            ],
            ["REFRESH MATERIALIZED VIEW m", "INSERT INTO t VALUES (2, 'c')"],
        ],
    ),
    "an index over a function that reads a table": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            """CREATE FUNCTION known(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
               $$ BEGIN PERFORM 1 FROM pg_catalog.pg_class; RETURN $1; END $$""",
            "CREATE INDEX ON t (known(v))",
            "CREATE INDEX ON t (v) WHERE known(v) = 'a'",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [["INSERT INTO t VALUES (1, 'a')"], ["UPDATE t SET v = 'b'", "INSERT INTO t VALUES (2, 'a')"]],
    ),
    "a table becomes unlogged and logged again": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)"],
        [
            ["INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t SET UNLOGGED", "UPDATE t SET v = 'not seen'"],
            ["ALTER TABLE t SET LOGGED", f"{PUBLISH} t", "UPDATE t SET v = 'b'"],
        ],
    ),
    "a rewrite between changes": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v int, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [
                f"INSERT INTO t VALUES (1, 1, {BIG}), (2, 2, {BIG})",
                "VACUUM FULL t",
                "UPDATE t SET v = 3 WHERE id = 1",
                "CLUSTER t USING t_pkey",
                "ALTER TABLE t ADD random float DEFAULT random()",
                "UPDATE t SET v = v + 1",
            ]
        ],
    ),
    "a table is renamed": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)", f"{PUBLISH} t"],
        [
            ["INSERT INTO t VALUES (1, 'a')"],
            [
                "INSERT INTO t VALUES (2, 'a')",
                "ALTER TABLE t RENAME TO u",
                "UPDATE u SET v = 'b'",
                "INSERT INTO u VALUES (3, 'c')",
            ],
        ],
        [Table("u", "SELECT * FROM u")],
    ),
    "two tables swap their names": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            "CREATE TABLE u (id int PRIMARY KEY, w int)",
            f"{PUBLISH} t, u",
        ],
        [
            [
                "INSERT INTO t VALUES (1, 'a')",
                "ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u",
                "INSERT INTO t VALUES (1, 5)",
                "UPDATE u SET v = 'b'",
            ]
        ],
        [Table(), Table("u", "SELECT * FROM u")],
    ),
    "its schema is renamed": Scenario(
        [
            "CREATE SCHEMA old_schema",
            "CREATE TABLE old_schema.t (id int PRIMARY KEY, v text)",
            f"{PUBLISH} old_schema.t",
        ],
        [
            [
                "INSERT INTO old_schema.t VALUES (1, 'a')",
                "ALTER SCHEMA old_schema RENAME TO new_schema",
                "UPDATE new_schema.t SET v = 'b'",
            ],
            ["INSERT INTO new_schema.t VALUES (2, 'c')"],
        ],
        [Table(rows="SELECT * FROM new_schema.t", schema="new_schema")],
        since=">= 16",  # before, the walsender went on with the old name until it was started anew
    ),
    "a table is dropped and made anew": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)", f"{PUBLISH} t"],
        [
            [f"INSERT INTO t VALUES (1, 'a', {BIG})"],
            [
                "UPDATE t SET v = 'b'",
                "DELETE FROM t",
                "DROP TABLE t",
                "CREATE TABLE t (id text PRIMARY KEY, w int)",
                f"{PUBLISH} t",
                "INSERT INTO t VALUES ('one', 1)",
                "UPDATE t SET w = 2",
            ],
        ],
    ),
    "a table joins the publication later": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL)"],
        [
            [f"INSERT INTO t VALUES (1, 'a', {BIG})", f"{PUBLISH} t", "INSERT INTO t VALUES (2, 'b', 'x')"],
            ["UPDATE t SET v = 'c'"],
        ],
    ),
    "a table leaves the publication for a while": Scenario(
        ["CREATE TABLE t (id int PRIMARY KEY, v text)", f"{PUBLISH} t"],
        [
            [
                "INSERT INTO t VALUES (1, 'a')",
                "ALTER PUBLICATION dbsync_mypub DROP TABLE t",
                "ALTER TABLE t ADD w int",
                f"{PUBLISH} t",
                "UPDATE t SET w = 5",
            ]
        ],
    ),
}

ROOTED: dict[str, Scenario] = {
    "generated columns that are published": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int, double int GENERATED ALWAYS AS (a * 2) STORED, v text)",
            "CREATE TABLE f (gone text, id int PRIMARY KEY, a int, double int GENERATED ALWAYS AS (a * 2) STORED)",
            "ALTER TABLE f DROP gone, REPLICA IDENTITY FULL",
            f"{PUBLISH} t, f",
        ],
        [
            ["INSERT INTO t VALUES (1, 1, DEFAULT, 'v')", "INSERT INTO f VALUES (1, 1), (2, 2), (3, 3)"],
            ["UPDATE t SET a = 2", "UPDATE f SET a = a + 1, id = id + 1 WHERE id > 2", "DELETE FROM f WHERE id = 1"],
        ],
        [Table(), Table("f", "SELECT * FROM f")],
        since=">= 18",
    ),
    "partitions through their root": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 (v text, gone int, id int NOT NULL, big text STORAGE EXTERNAL, PRIMARY KEY (id))",
            "ALTER TABLE t2 DROP COLUMN gone",
            "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, 'v', {BIG} || g FROM generate_series(1, 19, 3) AS g"],
            [
                "UPDATE t SET id = id + 10 WHERE id = 1",
                "UPDATE t SET id = id - 10 WHERE id = 16",
                "UPDATE t SET v = 'w'",
            ],
            [
                "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (20) TO (30)",
                "INSERT INTO t VALUES (21, 'seen', 'x')",
                "ALTER TABLE t ADD more int",
                "UPDATE t SET more = id WHERE id < 20",
                "DELETE FROM t WHERE id > 5 AND id < 10",
                "ALTER TABLE t DETACH PARTITION t3",
                "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (40)",
                "UPDATE t SET id = 35, more = 1 WHERE id = 21",
            ],
        ],
    ),
    "partitions of partitions, truncated at their root": Scenario(
        [
            "CREATE TABLE t (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind)",
            "CREATE TABLE ta PARTITION OF t FOR VALUES IN ('a') PARTITION BY RANGE (id)",
            "CREATE TABLE ta1 PARTITION OF ta FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE ta2 PARTITION OF ta DEFAULT",
            "CREATE TABLE tb PARTITION OF t DEFAULT",
            f"{PUBLISH} t",
        ],
        [
            ["INSERT INTO t SELECT g, chr(96 + g % 3), 'v' FROM generate_series(1, 20) AS g"],
            [
                "TRUNCATE t",
                "INSERT INTO t VALUES (1, 'a', 'x'), (11, 'a', 'x'), (1, 'b', 'x')",
                "UPDATE t SET kind = 'c' WHERE id = 11",
            ],
        ],
        [Table(key=("id", "kind"))],
    ),
    "partitions through their root and a row filter": Scenario(
        [
            "CREATE TABLE t (id int, v int, w text, PRIMARY KEY (id, v)) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
            f"{PUBLISH} t WHERE (v > 5)",
        ],
        [
            ["INSERT INTO t SELECT g, g, 'w' FROM generate_series(1, 19) AS g"],
            [
                "UPDATE t SET v = 100 WHERE id = 1",
                "UPDATE t SET v = 0 WHERE id = 12",
                "UPDATE t SET id = 3 WHERE id = 13",
            ],
        ],
        [Table(rows="SELECT * FROM t WHERE v > 5", key=("id", "v"), refresh="SELECT * FROM t")],
        since=">= 15",
    ),
    "whole old rows of a root whose partition logs keys": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "ALTER TABLE t1 ALTER big SET STORAGE EXTERNAL",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, 'a', {BIG} || g FROM generate_series(1, 5) AS g"],
            [
                "UPDATE t SET id = 11 WHERE id = 1",
                "UPDATE t SET v = NULL WHERE id = 2",
                "DELETE FROM t WHERE id = 3",
                f"INSERT INTO t VALUES (6, 'a', {BIGGER})",
                "UPDATE t SET id = 16 WHERE id = 6",
                "UPDATE t SET id = 14, big = NULL WHERE id = 4",
            ],
        ],
    ),
    "whole old rows of a partition whose root has keys": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text STORAGE EXTERNAL) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "ALTER TABLE t1 ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
            f"{PUBLISH} t",
        ],
        [
            [f"INSERT INTO t SELECT g, 'a', {BIG} || g FROM generate_series(1, 4) AS g"],
            ["UPDATE t SET id = 11 WHERE id = 1", "UPDATE t SET v = 'b' WHERE id = 2", "DELETE FROM t WHERE id = 3"],
        ],
    ),
    "a partition does not log its root's key": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "CREATE UNIQUE INDEX ta ON t1 (a)",
            "ALTER TABLE t1 REPLICA IDENTITY USING INDEX ta",
            "CREATE TABLE u (a int NOT NULL, id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (0) TO (100)",
            "CREATE UNIQUE INDEX u_a_id ON u (a, id)",
            "ALTER TABLE u REPLICA IDENTITY USING INDEX u_a_id",
            f"{PUBLISH} t, u",
        ],
        [
            [
                "INSERT INTO t SELECT g, 10 * g, 'a' FROM generate_series(1, 4) AS g",
                "INSERT INTO u SELECT a, id FROM t",
            ],
            [
                "UPDATE t SET a = 11, v = 'b' WHERE id = 1",
                "UPDATE t SET id = 5 WHERE id = 2",
                "DELETE FROM t WHERE id = 3",
                "UPDATE t SET v = 'c' WHERE id = 4",
                "UPDATE u SET a = 11 WHERE id = 1",
                "DELETE FROM u WHERE id = 2",
                "UPDATE u SET v = 'c' WHERE id = 3",
            ],
        ],
        [
            Table(stale={"2": {"id": 2, "a": 20, "v": "a"}, "3": {"id": 3, "a": 30, "v": "a"}}),
            Table(
                "u",
                "SELECT * FROM u",
                key=("a", "id"),
                stale={
                    '["10", "1"]': {"a": 10, "id": 1, "v": None},
                    '["20", "2"]': {"a": 20, "id": 2, "v": None},
                },
            ),
        ],
    ),
    "a partition under its root is truncated, detached and attached": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
            "CREATE TABLE t3 (id int PRIMARY KEY, v text)",
            f"{PUBLISH} t",
        ],
        [
            ["INSERT INTO t VALUES (1, 'a'), (11, 'a')"],
            [
                "TRUNCATE t1",
                "INSERT INTO t VALUES (2, 'b')",
                "ALTER TABLE t DETACH PARTITION t2",
                "UPDATE t2 SET v = 'by itself'",
                "INSERT INTO t3 VALUES (21, 'before')",
                "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)",
                "UPDATE t SET v = 'after' WHERE id = 21",
            ],
        ],
        [Table(stale={"1": {"id": 1, "v": "a"}, "11": {"id": 11, "v": "a"}})],
    ),
    "a level between published by itself": Scenario(
        [
            "CREATE TABLE t (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind)",
            "CREATE TABLE ta PARTITION OF t FOR VALUES IN ('a') PARTITION BY RANGE (id)",
            "CREATE TABLE ta1 PARTITION OF ta FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE ta2 PARTITION OF ta DEFAULT",
            "CREATE TABLE tb PARTITION OF t DEFAULT",
            f"{PUBLISH} ta",
        ],
        [
            ["INSERT INTO t SELECT g, chr(96 + g % 3), 'v' FROM generate_series(1, 20) AS g"],
            [
                "UPDATE t SET kind = 'b' WHERE id = 4",
                "UPDATE t SET kind = 'a' WHERE id = 5",
                "UPDATE t SET id = id + 30",
            ],
        ],
        [Table("ta", "SELECT * FROM ta", key=("id", "kind"))],
    ),
    "other column lists of a root and its partitions": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text, w text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 (w text, v text, id int PRIMARY KEY)",
            f"{PUBLISH} t (id, v), t1 (id, w)",
        ],
        [
            ["INSERT INTO t VALUES (1, 'v', 'w'), (2, 'v', 'w')"],
            [
                "UPDATE t SET w = 'x', v = 'y' WHERE id = 1",
                "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
                "UPDATE t SET id = 12 WHERE id = 2",
            ],
        ],
        [Table(rows="SELECT id, v FROM t", refresh="SELECT * FROM t")],
        since=">= 15",
    ),
    "one partition published by itself": Scenario(
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
            f"{PUBLISH} t1",
        ],
        [
            ["INSERT INTO t VALUES (1, 'a'), (2, 'a'), (11, 'a')"],
            ["UPDATE t SET id = id + 10 WHERE id = 2", "UPDATE t SET id = 5 WHERE id = 11"],
        ],
        [Table("t1", "SELECT * FROM t1")],
    ),
}


SCHEMAS: dict[str, Scenario] = {
    "all tables of a schema, which overrides a row filter": Scenario(
        [
            "CREATE SCHEMA whole_schema",
            "CREATE TABLE whole_schema.t (id int PRIMARY KEY, v text)",
            "CREATE TABLE whole_schema.filtered (id int PRIMARY KEY, v text)",
            f"{PUBLISH} whole_schema.filtered WHERE (id > 5)",
            "ALTER PUBLICATION dbsync_mypub ADD TABLES IN SCHEMA whole_schema",
        ],
        [
            [
                "INSERT INTO whole_schema.t VALUES (1, 'a')",
                "INSERT INTO whole_schema.filtered VALUES (1, 'a'), (7, 'a')",
            ],
            [
                "CREATE TABLE whole_schema.later (id int PRIMARY KEY)",
                "INSERT INTO whole_schema.later VALUES (1)",
                "CREATE TABLE moves (id int PRIMARY KEY, v text)",
                "INSERT INTO moves VALUES (1, 'not seen')",
                "ALTER TABLE moves SET SCHEMA whole_schema",
                "UPDATE whole_schema.moves SET v = 'seen'",
            ],
            ["UPDATE whole_schema.t SET v = 'b'"],
        ],
        [
            Table(rows="SELECT * FROM whole_schema.t", schema="whole_schema"),
            Table("filtered", "SELECT * FROM whole_schema.filtered", schema="whole_schema"),
            Table("later", "SELECT * FROM whole_schema.later", schema="whole_schema"),
            Table("moves", "SELECT * FROM whole_schema.moves", schema="whole_schema"),
        ],
    ),
    "temporary and unlogged tables": Scenario(
        [
            "CREATE SCHEMA mixed_schema",
            "CREATE TABLE mixed_schema.t (id int PRIMARY KEY, v text)",
            "ALTER PUBLICATION dbsync_mypub ADD TABLES IN SCHEMA mixed_schema",
        ],
        [
            [
                """BEGIN; CREATE UNLOGGED TABLE mixed_schema.u AS SELECT 1 AS a; UPDATE mixed_schema.u SET a = 2;
                   CREATE TEMP TABLE own AS SELECT 1 AS a; UPDATE own SET a = 2;
                   INSERT INTO mixed_schema.t VALUES (1, 'a'); COMMIT"""
            ]
        ],
        [Table(rows="SELECT * FROM mixed_schema.t", schema="mixed_schema")],
    ),
    "its schema is renamed and made anew within a transaction": Scenario(
        [
            "CREATE SCHEMA first_schema",
            "CREATE TABLE first_schema.t (id int PRIMARY KEY)",
            "ALTER PUBLICATION dbsync_mypub ADD TABLES IN SCHEMA first_schema",
        ],
        [
            [
                """BEGIN; INSERT INTO first_schema.t VALUES (1); ALTER SCHEMA first_schema RENAME TO second_schema;
                   CREATE SCHEMA first_schema; CREATE TABLE first_schema.t (id int PRIMARY KEY);
                   ALTER PUBLICATION dbsync_mypub ADD TABLES IN SCHEMA first_schema;
                   INSERT INTO first_schema.t VALUES (2); INSERT INTO second_schema.t VALUES (3);
                   UPDATE first_schema.t SET id = 1; UPDATE second_schema.t SET id = 4 WHERE id = 1; COMMIT"""
            ]
        ],
        [
            Table(rows="SELECT * FROM first_schema.t", schema="first_schema"),
            Table(
                rows="SELECT * FROM second_schema.t",
                schema="second_schema",
            ),
        ],
        since=">= 16",
    ),
}


class Decoding(MirrorHandler):
    """A mirror that sees every row: it overrides a method."""

    def handle_begin(self, msg: Any) -> None: ...


class Way:
    """One way for changes to pass, with a slot and a target of its own."""

    def __init__(self, database: Database, spark: SparkSession, name: str, handler: MirrorHandler, target: Any) -> None:
        settings = database.settings(slot=f"{database.slot}_{name}", chunk_rows=3, batch_seconds=0.01)
        self.name = name
        self.target = target
        self.syncer = Syncer(settings, handler=handler, batcher=target, spark=spark)
        self.syncer.setup()

    def drain(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self.name == "decoded_ahead":
                patch.setattr(ahead, "_MANY", 1)
            if self.name == "by_sql":
                # Not all: a table that changes ends a batch, so that there are many small ones, and SQL takes its time.
                patch.setattr(fewevents, "is_handful", lambda batch: batch.number % 5 != 1)
            self.syncer.drain()

    def documents(self, doctype: str) -> Docs:
        held: dict[str, Docs] = self.target.documents() if self.name == "by_sql" else self.target.documents
        return held.get(doctype, {})


def ways(database: Database, spark: SparkSession, folder: Path, is_main: bool) -> list[Way]:
    unopened = Way(database, spark, "unopened", MirrorHandler(), RecordingBatcher())
    if not is_main:
        return [unopened]
    on_executors = SqliteBatcher(folder / f"{database.name}.sqlite", distributed=True)
    return [
        unopened,
        Way(database, spark, "decoded_ahead", Decoding(), RecordingBatcher()),
        Way(database, spark, "by_sql", MirrorHandler(), on_executors),
    ]


def as_json(docs: Docs) -> Docs:
    """As the target of the executors has them."""
    found: Docs = json.loads(json.dumps(docs, default=str))
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    source: Docs
    streamed: dict[str, Docs]  # by the way
    reread: Docs


def schema_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)[:50]


def applies(scenario: Scenario, version: int) -> bool:
    return version >= int(scenario.since.removeprefix(">= "))


@contextmanager
def inside(database: Database, schema: str) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as conn:
        conn.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))
        yield conn


def make(database: Database, schema: str, scenario: Scenario) -> None:
    database.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)).as_string())
    with inside(database, schema) as conn:
        for statement in scenario.make:
            conn.execute(told_to(database.server, statement))


def source_rows(database: Database, schema: str, table: Table) -> Docs:
    """The rows as psycopg sees them, by the id they have to have."""
    with inside(database, schema) as conn:
        conn.execute("SET TimeZone = 'UTC'")
        cursor = conn.execute(table.rows)
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        keys = ", ".join(f"pg_catalog.format('%s', \"{name}\")" for name in table.key)
        texts = conn.execute(f"SELECT {keys} FROM ({table.rows}) AS q").fetchall()
    ids = [key[0] if len(key) == 1 else json.dumps(key) for key in texts]
    return dict(zip(ids, rows, strict=True))


def qualified(schema: str, query: str) -> str:
    """The SELECT with its table's schema: a refresh knows nothing of the test's search_path."""
    head, table = query.rsplit("FROM ", 1)
    return query if "." in table else f'{head}FROM "{schema}".{table}'


def play(
    database: Database,
    spark: SparkSession,
    scenarios: dict[str, Scenario],
    options: str,
    folder: Path,
    is_main: bool,
) -> dict[str, Outcome]:
    """Play all scenarios side by side: step by step through the log, and then by refreshes into another target."""
    database.execute(f"CREATE PUBLICATION dbsync_mypub {options}")
    for name, scenario in scenarios.items():
        make(database, schema_of(name), scenario)
    followed = ways(database, spark, folder, is_main)
    for step in range(max(len(scenario.steps) for scenario in scenarios.values())):
        for name, scenario in scenarios.items():
            with inside(database, schema_of(name)) as conn:
                for statement in scenario.steps[step] if step < len(scenario.steps) else ():
                    conn.execute(statement)
        followed[0].drain()
    for way in followed[1:]:
        way.drain()
    syncer, reread = followed[0].syncer, RecordingBatcher()
    syncer.batcher = reread
    with syncer:
        for query in dict.fromkeys(
            qualified(schema_of(name), table.refresh or table.rows.replace("ONLY ", ""))
            for name, scenario in scenarios.items()
            for table in scenario.tables
        ):
            syncer.refresh(query, chunk_rows=1000)
    outcomes = {}
    for name, scenario in scenarios.items():
        for table in scenario.tables:
            schema = schema_of(name)
            doctype = f"{table.schema or schema}.{table.name}"
            outcomes[f"{name}: {table.name} {table.schema}"] = Outcome(
                source_rows(database, schema, table),
                {way.name: way.documents(doctype) for way in followed},
                reread.documents.get(doctype, {}),
            )
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    postgres: Server, each_postgres: Server, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("rows")
    found: dict[str, Outcome] = {}
    generated = ", publish_generated_columns = stored" if each_postgres.version >= 18 else ""
    groups = [(PLAIN, ""), (ROOTED, f"WITH (publish_via_partition_root{generated})")]
    if each_postgres.version >= 15:
        groups.append((SCHEMAS, ""))
    for scenarios, options in groups:
        fitting = {name: one for name, one in scenarios.items() if applies(one, each_postgres.version)}
        with fresh_database(each_postgres) as database:
            found |= play(database, spark, fitting, options, folder, each_postgres is postgres)
    return found


SCENARIOS = PLAIN | ROOTED | SCHEMAS
CASES = [(name, table) for name, scenario in SCENARIOS.items() for table in scenario.tables]


@pytest.mark.parametrize(("name", "table"), CASES, ids=[f"{name}: {table.name}" for name, table in CASES])
def test_target_equals_source(name: str, table: Table, each_postgres: Server, outcomes: dict[str, Outcome]) -> None:
    if not applies(SCENARIOS[name], each_postgres.version):
        pytest.skip(f"this is PostgreSQL {each_postgres.version}")
    outcome = outcomes[f"{name}: {table.name} {table.schema}"]
    expected = {**table.stale, **outcome.source}
    assert outcome.reread == outcome.source
    for way, documents in outcome.streamed.items():
        assert documents == (as_json(expected) if way == "by_sql" else expected), way


@pytest.mark.pg(">= 18")
def test_a_key_without_overlaps_is_streamed(database: Database, spark: SparkSession) -> None:
    """Its index has no order, so that a refresh refuses it."""
    database.execute(
        """CREATE TABLE t (id int4range, during daterange, v text, PRIMARY KEY (id, during WITHOUT OVERLAPS));
        CREATE PUBLICATION dbsync_mypub FOR TABLE t"""
    )
    target = RecordingBatcher()
    syncer = Syncer(database.settings(), batcher=target, spark=spark)
    syncer.setup()
    database.execute("INSERT INTO t VALUES ('[1,2)', '[2026-01-01,)', 'a'), ('[2,3)', '[2026-01-01,)', 'b')")
    database.execute("UPDATE t SET during = '[2026-02-01,)' WHERE v = 'b'")
    syncer.drain()
    assert {id: doc["v"] for id, doc in target.documents["public.t"].items()} == {
        '["[1,2)", "[2026-01-01,)"]': "a",
        '["[2,3)", "[2026-02-01,)"]': "b",
    }
    with pytest.raises(RefreshError, match="has no order"):
        syncer.refresh("SELECT * FROM t")
