"""Refreshes of what is unusual: names that need quoting, rows of any width, keys of any kind, partitions, filters."""

from __future__ import annotations

from typing import Any

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher

from dbsync import Syncer

SCENARIOS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "names that need quoting": (
        ['CREATE TABLE "My ""odd"" 100% table" ("The Key%" text COLLATE "C", "v v" int, PRIMARY KEY ("The Key%"))'],
        ["""INSERT INTO "My ""odd"" 100% table" SELECT chr(64 + g) || '%', g FROM generate_series(1, 50) AS g"""],
        {"table": '"My ""odd"" 100% table"', "type": 'public.My "odd" 100% table', "key": ["The Key%"]},
    ),
    "a composite key with negative numbers and times": (
        ["CREATE TABLE t (n numeric, at timestamptz, u uuid, v text, PRIMARY KEY (at, n))"],
        [
            r"""INSERT INTO t SELECT -g / 7.0, date '2020-01-01' + g % 5, gen_random_uuid(),
                E'tab\t newline\n backslash\\ ' || g FROM generate_series(1, 60) AS g""",
        ],
        {"table": "t", "type": "public.t", "key": ["n", "at"]},
    ),
    "arrays with NULL as keys, where text is not read so": (
        [
            "CREATE TABLE t (id int[] PRIMARY KEY, v text)",
            "ALTER ROLE CURRENT_USER IN DATABASE {} SET array_nulls = off",
        ],
        ["INSERT INTO t SELECT ARRAY[g, NULL], 'v' FROM generate_series(1, 30) AS g"],
        {"table": "t", "type": "public.t", "key": ["id"]},
    ),
    "partitions published through their root": (
        [
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (20)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (20) TO (1000)",
        ],
        ["INSERT INTO t SELECT g, 'v' FROM generate_series(1, 50) AS g"],
        {"table": "t", "type": "public.t", "key": ["id"], "with": "WITH (publish_via_partition_root)"},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_row_arrives_by_refresh_as_it_does_by_the_log(name: str, database: Database, spark: SparkSession) -> None:
    make, fill, facts = SCENARIOS[name]
    for statement in make:
        database.execute(statement.format(database.name))
    database.execute(f"CREATE PUBLICATION dbsync_mypub FOR TABLE {facts['table']} {facts.get('with', '')}")
    streamed, reread = RecordingBatcher(), RecordingBatcher()
    settings = database.settings(chunk_rows=13, ctrl_namespace="ctrl 100%", wm_table="marks 100%")
    syncer = Syncer(settings, batcher=streamed, spark=spark)
    syncer.setup()
    for statement in fill:
        database.execute(statement)
    syncer.drain()
    syncer.batcher = reread
    result = syncer.refresh(f"SELECT * FROM {facts['table']}")
    with database.connect() as conn:
        cursor = conn.execute(f"SELECT * FROM {facts['table']}")
        names = [column.name for column in cursor.description or ()]
        source = [dict(zip(names, row, strict=True)) for row in cursor]
    assert result.rows == len(source)
    assert streamed.documents == reread.documents
    by_key = lambda row: tuple(map(str, (row[key] for key in facts["key"])))  # noqa: E731
    assert sorted(reread.documents[facts["type"]].values(), key=by_key) == sorted(source, key=by_key)


def test_rows_of_any_width_pass(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE wide (id int PRIMARY KEY, small text, large text)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE wide")
    target = RecordingBatcher()
    syncer = Syncer(database.settings(), batcher=target, spark=spark)
    syncer.setup()
    database.execute("INSERT INTO wide SELECT g, 's', repeat('0123456789', 1500000) FROM generate_series(1, 20) AS g")
    database.execute("INSERT INTO wide SELECT g, 's', 'l' FROM generate_series(21, 3000) AS g")
    syncer.drain()
    assert {len(doc["large"]) for doc in target.documents["public.wide"].values()} == {1, 15_000_000}
    target.documents.clear()
    assert syncer.refresh("SELECT * FROM wide").rows == 3000
    assert {len(doc["large"]) for doc in target.documents["public.wide"].values()} == {1, 15_000_000}
    assert len(target.documents["public.wide"]) == 3000


def test_the_publications_row_filter_and_column_list_apply(database: Database, spark: SparkSession) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, region text, secret text)")
    database.execute("INSERT INTO t VALUES (1, 'north', 'x'), (2, 'south', 'y'), (3, 'north', 'z')")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE t (id, region) WHERE (id < 3)")
    target = RecordingBatcher()
    assert Syncer(database.settings(), batcher=target, spark=spark).refresh("SELECT * FROM t").rows == 2
    assert target.documents["public.t"] == {"1": {"id": 1, "region": "north"}, "2": {"id": 2, "region": "south"}}
