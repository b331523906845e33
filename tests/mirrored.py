"""Rows of a table as a Batcher gets them, without the engine; and with it, a log that comes a second time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psycopg
from fix_postgres import Database
from psycopg import sql
from pyspark.sql import SparkSession

from dbsync.batcher import Batcher, BatchInfo
from dbsync.connection import connect
from dbsync.lsn import LSN
from dbsync.pgoutput import Column as ColumnMessage
from dbsync.pgoutput import Relation as RelationMessage
from dbsync.relation import Catalog, Relation, RowDecoder, row_id
from dbsync.syncer import Syncer

Docs = dict[str, dict[str, Any]]

COLUMNS = """
SELECT a.attname, a.atttypid::int8, a.atttypmod, coalesce(a.attnum = ANY (i.indkey::int2[]), false)
  FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
 WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def relation(database: Database, table: str, schema: str = "public") -> Relation:
    name = sql.Identifier(schema, table).as_string(None)
    ((oid,),) = database.rows("SELECT to_regclass(%s)::oid::int8", [name])
    columns = [
        ColumnMessage(column, type_oid, modifier, is_key)
        for column, type_oid, modifier, is_key in database.rows(COLUMNS, [oid])
    ]
    catalog = Catalog(lambda: connect(database.settings()))
    return catalog.relation(RelationMessage(oid, schema, table, "d", tuple(columns)))


def documents(database: Database, described: Relation) -> Docs:
    decoder = RowDecoder(described)
    table = sql.Identifier(described.namespace, described.name)
    docs: Docs = {}
    with connect(database.settings()) as conn, psycopg.RawCursor(conn) as cursor:
        names = sql.SQL(", ").join(map(sql.Identifier, described.column_names))
        cursor.execute(sql.SQL("SELECT {} FROM {}").format(names, table).as_bytes(conn))
        result = cursor.pgresult
        assert result is not None
        for row in range(result.ntuples):
            raw = [result.get_value(row, column) for column in range(result.nfields)]
            docs[row_id(described, raw)] = decoder.document(raw)[0]
    return docs


def output(database: Database, table: str, columns: Sequence[str]) -> list[tuple[str | None, ...]]:
    """What PostgreSQL's own output of these columns is, row by row of the key `id`. (A cast to text may be another.)"""
    texts = ", ".join(f'CASE WHEN num_nulls("{name}") = 0 THEN format(\'%s\', "{name}") END' for name in columns)
    with database.connect(options="-c timezone=UTC -c search_path=pg_catalog") as conn:
        return conn.execute(f"SELECT {texts} FROM public.{table} ORDER BY id").fetchall()


def info(last: int, *relations: Relation) -> BatchInfo:
    return BatchInfo(last, LSN(last), LSN(last), {relation.doctype: relation for relation in relations})


def upsert(batcher: Batcher, last: int, doctype: str, docs: Mapping[str, dict[str, Any]], *relations: Relation) -> None:
    """A batch of its own."""
    batcher.begin(info(last, *relations))
    batcher.batch_upsert(doctype, docs)
    batcher.commit(info(last, *relations))


def delete(batcher: Batcher, last: int, doctype: str, ids: list[str], *relations: Relation) -> None:
    batcher.begin(info(last, *relations))
    batcher.batch_delete(doctype, ids)
    batcher.commit(info(last, *relations))


def mirror(batcher: Batcher, last: int, database: Database, table: str, schema: str = "public") -> Relation:
    """All rows of the table, in a batch."""
    described = relation(database, table, schema)
    upsert(batcher, last, described.doctype, documents(database, described), described)
    return described


def not_applied_twice(
    database: Database, spark: SparkSession, made: Callable[[], Batcher], written: Callable[[], list[Any]]
) -> None:
    """What the target holds already is passed over, though the slot, as after a crash, brings all of it again."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, name text); CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    copy = "SELECT pg_copy_logical_replication_slot(%s, %s)"
    before = f"{database.slot}_before"
    syncer = Syncer(database.settings(), batcher=made(), spark=spark)
    syncer.setup()
    database.rows(copy, [database.slot, before])
    with syncer:
        database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 20) AS i")
        syncer.drain()
        database.execute("UPDATE t SET name = 'y' WHERE id < 5; DELETE FROM t WHERE id > 15")
        syncer.drain()
    database.rows("SELECT pg_drop_replication_slot(%s)", [database.slot])
    database.rows(copy, [before, database.slot])
    first = written()
    assert first
    with Syncer(database.settings(), batcher=made(), spark=spark) as again:
        again.drain()
        assert written() == first
        database.execute("UPDATE t SET name = 'z' WHERE id = 1")
        again.drain()
    assert len(written()) > len(first)
