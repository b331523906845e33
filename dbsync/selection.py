"""What a SELECT to be refreshed reads, found out by asking PostgreSQL.

`understand` returns only for one statement that reads one published table, once, unchanged and with its whole key;
anything else raises RefreshError before anything is written. The user's text is the only thing that is pasted, and only
after PostgreSQL took it for one complete statement.

A table whose changes the log carries under the names of its partitions or children gives one Selection for each of
them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import psycopg
from psycopg import errors, pq, sql

from dbsync import pgoutput
from dbsync.chunks import KeyColumn, Restriction, Selection, dry_run
from dbsync.config import Settings
from dbsync.connection import Connection
from dbsync.errors import RefreshError
from dbsync.relation import Catalog, Relation
from dbsync.statement import (
    Param,
    Params,
    Statement,
    bind,
    execute,
    explained,
    reading,
    unbroken,
    words_of,
    writes_error,
)

_KINDS = {"v": "view", "m": "materialized view", "f": "foreign table", "S": "sequence"}


def understand(
    conn: Connection, settings: Settings, query: str | Statement, params: Params = None, *, runs: bool = False
) -> list[Selection]:
    """What a SELECT reads, one Selection for each table of the log; `conn` is in autocommit and idle.

    RefreshError says which rule the SELECT breaks. There is always at least one Selection. Unless it is known that the
    SELECT `runs`, that is tried with a row, which may take its time.
    """
    statement = query if isinstance(query, Statement) else bind(query, params)
    with unbroken(conn), reading(conn):
        with explained(statement):
            result = _describe(conn, statement)
        statement = _trim(conn, statement)
        described = _Result.of(conn, result)
        table_oid = _origin(conn, described)
        family = _family(conn, settings, table_oid)
        _check_table(conn, settings, family[0])
        plan = _plan(conn, statement)
        _check_plan(plan, family)
        selections = [
            _select(conn, statement, described, plan, family, target)
            for target in _targets(conn, settings, family, plan)
        ]
        if not runs:
            for selection in selections:
                dry_run(conn, selection)
    return selections


def fingerprint(conn: Connection, relation_oid: int) -> str:
    """Changes when the table, or a partition or child of it, is truncated, rewritten or altered, or gets another key.

    `conn` must not be in a transaction with an older snapshot: that one would not show the change.
    """
    rows = conn.execute(_FINGERPRINT, [relation_oid]).fetchall()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Result:
    """The columns of the statement's result: their names, and the table and column each comes from."""

    names: tuple[str, ...]
    tables: tuple[int, ...]
    numbers: tuple[int, ...]
    param_types: tuple[str, ...]

    @classmethod
    def of(cls, conn: Connection, result: pq.abc.PGresult) -> _Result:
        fields = range(result.nfields)
        oids = [result.param_type(number) for number in range(result.nparams)]
        return cls(
            names=tuple((result.fname(field) or b"").decode() for field in fields),
            tables=tuple(result.ftable(field) for field in fields),
            numbers=tuple(result.ftablecol(field) for field in fields),
            param_types=tuple(_type_name(conn, oid) for oid in oids),
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """The selected table or one below it, and how the publication publishes it."""

    oid: int
    namespace: str
    name: str
    kind: str
    replica_identity: str
    is_partition: bool
    own: bool
    published: bool
    published_columns: list[str] | None
    row_filter: str | None

    @property
    def path(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def quoted(self) -> str:
        return sql.Identifier(*self.path).as_string()


@dataclass(frozen=True, slots=True)
class _Plan:
    estimated_rows: int
    nodes: tuple[dict[str, Any], ...]

    def scans(self) -> list[tuple[tuple[str, str], int]]:
        """(schema, name) and estimated rows of every scan of a table."""
        return [
            ((node.get("Schema", ""), node["Relation Name"]), int(node["Plan Rows"]))
            for node in self.nodes
            if "Relation Name" in node
        ]


def _prepare(conn: Connection, text: str, params: Sequence[Param] = ()) -> pq.abc.PGresult:
    """Have PostgreSQL analyse and describe a statement, and run nothing. A refusal leaves the transaction usable."""
    try:
        command = text.encode()
    except UnicodeEncodeError as error:
        raise RefreshError("The statement is not text that can be written in UTF-8.") from error
    with conn.transaction():
        result = conn.pgconn.prepare(b"", command, [param.type_oid for param in params])
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise errors.error_from_result(result, encoding="utf-8")
        return conn.pgconn.describe_prepared(b"")


def _describe(conn: Connection, statement: Statement) -> pq.abc.PGresult:
    try:
        result = _prepare(conn, statement.text, statement.params)
    except errors.SyntaxError as error:
        # A syntax error has a place; only the refusal of a second statement has none.
        if error.diag.statement_position is None:
            raise RefreshError(
                "There are several statements, and a refresh takes one SELECT.", "Run one each."
            ) from error
        raise
    if result.nfields == 0 and _is_blank(conn, statement.text):
        raise RefreshError("There is no statement to refresh.", "Pass a SELECT.")
    return result


def _is_blank(conn: Connection, text: str) -> bool:
    """Whether there is nothing but white space, comments and semicolons, in PostgreSQL's own opinion."""
    try:
        return _prepare(conn, f"{text}\nSELECT 1").nfields == 1
    except (psycopg.ProgrammingError, psycopg.NotSupportedError):
        return False


def _trim(conn: Connection, statement: Statement) -> Statement:
    """The statement without the semicolon that ends it and what follows; RefreshError when it is not a SELECT.

    Only a whole SELECT can stand in parentheses, and a semicolon cannot; so the place to cut is found by trying. What
    is cut off has to be blank, or the semicolon was part of a comment.
    """
    text = statement.text
    refusal: psycopg.Error | None = None
    for end in (len(text), *(match.start() for match in reversed(list(re.finditer(";", text))))):
        candidate = statement.cut(end)
        try:
            _prepare(conn, f"SELECT FROM ({candidate.text}\n) AS q", statement.params)
        except errors.FeatureNotSupported as error:
            raise writes_error(words_of(error)) from error
        except psycopg.ProgrammingError as error:
            refusal = refusal or error
        else:
            if _is_blank(conn, text[end:]):
                return candidate
    raise RefreshError("The statement is not a SELECT.", "Pass a SELECT of one published table.") from refusal


def _origin(conn: Connection, result: _Result) -> int:
    """The one table all columns come from."""
    if not result.names:
        raise RefreshError("The SELECT has no columns.", "Select the key and the columns to refresh.")
    tables = sorted(set(result.tables) - {0})
    if not tables:
        raise RefreshError(
            "The SELECT reads no column of a table as it is.", "Select the key and columns of one published table."
        )
    if len(tables) > 1:
        names = ", ".join(_table_name(conn, oid) for oid in tables)
        raise _joins(names)
    for number, (name, table, column) in enumerate(zip(result.names, result.tables, result.numbers, strict=True), 1):
        if not table or column < 1:
            raise RefreshError(
                f"Column {number} of the SELECT ({name}) is not a column of {_table_name(conn, tables[0])} as it is.",
                "Select columns as they are; a handler or the target can compute.",
            )
    return tables[0]


def _joins(names: str) -> RefreshError:
    return RefreshError(
        f"The SELECT reads more than one table once: {names}.", "Refresh one table at a time, without joins."
    )


def _table_name(conn: Connection, oid: int) -> str:
    row = conn.execute(_NAME, [oid]).fetchone()
    return sql.Identifier(*row).as_string() if row else str(oid)


def _type_name(conn: Connection, oid: int) -> str:
    row = conn.execute("SELECT pg_catalog.format_type(%s, -1)", [oid]).fetchone()
    assert row is not None
    return str(row[0])


def _family(conn: Connection, settings: Settings, oid: int) -> list[_Table]:
    """The table, and after it all partitions or children below it."""
    # Neither row filters nor column lists exist before PostgreSQL 15.
    has_lists = conn.info.server_version >= 150000
    query = _FAMILY.format(lists="entry.attnames::text[], entry.rowfilter" if has_lists else "NULL::text[], NULL::text")
    names = {
        "oid": oid,
        "publication": settings.publication,
        "schema": settings.ctrl_namespace,
        "wm_table": settings.wm_table,
    }
    return [_Table(*row) for row in conn.execute(query, names)]


def _check_table(conn: Connection, settings: Settings, table: _Table) -> None:
    if table.kind not in ("r", "p"):
        raise RefreshError(
            f"{table.quoted} is a {_KINDS.get(table.kind, 'relation')}, and a refresh reads a table.",
            "Select from the table itself.",
        )
    if table.own:
        raise RefreshError(f"{table.quoted} is dbsync's own table.", "Select from a table of yours.")
    if table.is_partition and not table.published:
        ancestor = conn.execute(_PUBLISHED_ANCESTOR, {"oid": table.oid, "publication": settings.publication}).fetchone()
        if ancestor is not None:
            root = sql.Identifier(*ancestor).as_string()
            raise RefreshError(
                f"The log carries the changes of {table.quoted} under the name of {root}.", f"Select from {root}."
            )


def _plan(conn: Connection, statement: Statement) -> _Plan:
    with explained():
        query = f"EXPLAIN (FORMAT JSON, VERBOSE) SELECT * FROM ({statement.text}\n) AS q"
        row = execute(conn, query, statement.params).fetchone()
    assert row is not None
    top = row[0][0]["Plan"]
    return _Plan(int(top["Plan Rows"]), tuple(_nodes(top)))


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _check_plan(plan: _Plan, family: list[_Table]) -> None:
    """Refuse what would give something else than rows of the table as they are."""
    for node in plan.nodes:
        if node["Node Type"] == "LockRows":
            raise writes_error("it locks rows")
        if node["Node Type"] == "ModifyTable":
            raise writes_error("it changes rows")
        if "Grouping Sets" in node:
            raise RefreshError("The SELECT has grouping sets, which make values up.", "Leave them out.")
        if node.get("Join Type") in ("Left", "Right", "Full"):
            raise _joins(f"it has an outer join with {family[0].quoted}")
    known = {table.path for table in family}
    scans = [path for path, _ in plan.scans()]
    others = sorted(set(scans) - known)
    if others:
        raise _joins(", ".join(sql.Identifier(*path).as_string() for path in (family[0].path, *others)))
    # Two readings of one table could give columns of two rows as one row.
    shared = [node["CTE Name"] for node in plan.nodes if node["Node Type"] == "CTE Scan"]
    if len(set(scans)) < len(scans) or len(set(shared)) < len(shared):
        raise _joins(f"it reads {family[0].quoted} twice")


def _targets(conn: Connection, settings: Settings, family: list[_Table], plan: _Plan) -> list[_Table]:
    """The tables under whose names the log carries changes of these rows."""
    published = [table for table in family if table.published]
    if not published:
        table = family[0].quoted
        publication = sql.Identifier(settings.publication).as_string()
        raise RefreshError(
            f"The table {table} is not in the publication {publication}.",
            f"Run ALTER PUBLICATION {publication} ADD TABLE {table};",
        )
    # What PostgreSQL leaves out only as the query starts depends on when that is, and may be needed by another chunk.
    if any(node.get("Subplans Removed") for node in plan.nodes):
        return published
    read = {path for path, _ in plan.scans()}
    return [table for table in published if table.kind == "p" or table.path in read] or published[:1]


def _select(
    conn: Connection, statement: Statement, result: _Result, plan: _Plan, family: list[_Table], target: _Table
) -> Selection:
    index = _key_index(conn, target)
    relation = _relation(conn, target, index)
    outputs = _outputs(conn, family[0].oid, result)
    if index is None or not relation.key:
        raise RefreshError(
            f"The table {target.quoted} has no key that is published.",
            "Give it a primary key (not a DEFERRABLE one), or a replica identity, and have the publication publish all"
            " of its columns.",
        )
    missing = [name for name in relation.key_names if name not in outputs]
    if missing:
        names = ", ".join(sql.Identifier(name).as_string() for name in missing)
        raise RefreshError(f"The SELECT leaves out {names} of the key of {target.quoted}.", "Select the whole key.")
    rest = tuple(name for name in relation.column_names if name in outputs and name not in relation.key_names)
    columns = relation.key_names + rest
    carried = {name: outputs[name] for name in columns}
    return Selection(
        statement=statement,
        relation=relation,
        columns=columns,
        left_out=tuple(name for name in relation.column_names if name not in outputs),
        estimated_rows=_estimate(plan, family, target),
        outputs=tuple(carried.values()),
        width=len(result.names),
        param_types=result.param_types,
        key=_key_columns(conn, index.oid, carried),
        restriction=_restriction(conn, family, target, index.oid, carried),
    )


@dataclass(frozen=True, slots=True)
class _Index:
    oid: int
    columns: list[str]  # without those it only includes


def _key_index(conn: Connection, table: _Table) -> _Index | None:
    row = conn.execute(_KEY_INDEX, {"oid": table.oid, "identity": table.replica_identity}).fetchone()
    return None if row is None else _Index(*row)


def _relation(conn: Connection, table: _Table, index: _Index | None) -> Relation:
    """The table as the log describes it, made by the same code."""
    key = set(index.columns) if index else set()
    is_full = table.replica_identity == "f"
    found = conn.execute(_COLUMNS, [table.oid]).fetchall()
    # An explicit column list may hold stored generated columns from 18 on; before that, the log never has them.
    listed = table.published_columns
    generated_too = conn.info.server_version >= 180000 and listed is not None
    columns = tuple(
        pgoutput.Column(name, type_oid, modifier, is_full or name in key)
        for name, type_oid, modifier, generated in found
        if (listed is None or name in listed) and (generated_too or not generated)
    )
    message = pgoutput.Relation(table.oid, table.namespace, table.name, table.replica_identity, columns)
    catalog = Catalog(lambda: cast(Connection, nullcontext(conn)))
    return catalog.relation(message)


def _outputs(conn: Connection, oid: int, result: _Result) -> dict[str, int]:
    """The number in the statement's result, from 1, of each column of the table it carries."""
    names: dict[int, str] = dict(conn.execute(_NUMBERS, [oid]).fetchall())
    numbered = [(names[column], number) for number, column in enumerate(result.numbers, 1)]
    return dict(reversed(numbered))


def _estimate(plan: _Plan, family: list[_Table], target: _Table) -> int:
    if target.kind == "p" or len(family) == 1:
        return plan.estimated_rows
    return min(plan.estimated_rows, sum(rows for path, rows in plan.scans() if path == target.path))


def _key_columns(conn: Connection, index_oid: int, outputs: Mapping[str, int]) -> tuple[KeyColumn, ...]:
    parts = []
    for name, type_name, schema, operators, collation in conn.execute(_KEY_COLUMNS, [index_oid]):
        if operators is None:
            raise RefreshError(
                f"The index of the key has no order by {sql.Identifier(name).as_string()}.",
                "Give the table a replica identity with an ordinary (btree) unique index.",
            )
        less, less_equal, equal, greater_equal, greater = operators
        parts.append(
            KeyColumn(
                name=name,
                output=outputs[name],
                type_name=type_name,
                schema=schema,
                less=less,
                less_equal=less_equal,
                equal=equal,
                greater_equal=greater_equal,
                greater=greater,
                collation=None if collation is None else (collation[0], collation[1]),
            )
        )
    return tuple(parts)


def _restriction(
    conn: Connection, family: list[_Table], target: _Table, index_oid: int, outputs: Mapping[str, int]
) -> Restriction | None:
    whole = target is family[0] and (target.kind == "p" or len(family) == 1)
    if whole and target.row_filter is None:
        return None
    unique = whole or conn.execute(_UNIQUE_ABOVE, {"index": index_oid, "oid": family[0].oid}).fetchone() is not None
    return Restriction(target.kind == "r", target.row_filter, () if unique else tuple(outputs.items()))


_NAME = """
SELECT nspname, relname
  FROM pg_catalog.pg_class AS rel JOIN pg_catalog.pg_namespace AS nsp ON nsp.oid = relnamespace
 WHERE rel.oid = %s
"""

_BELOW = """
WITH RECURSIVE family (oid) AS (
    SELECT %(oid)s::pg_catalog.oid
    UNION
    SELECT inhrelid FROM pg_catalog.pg_inherits JOIN family ON inhparent = family.oid
)"""

_FAMILY = (
    _BELOW
    + """
SELECT rel.oid::int8, nspname, relname, relkind::text, relreplident::text, relispartition,
       nspname = %(schema)s AND (relname = %(wm_table)s
           OR coalesce(pg_catalog.obj_description(rel.oid, 'pg_class') LIKE 'dbsync %%', false)),
       entry.tablename IS NOT NULL, {lists}
  FROM family
  JOIN pg_catalog.pg_class AS rel ON rel.oid = family.oid
  JOIN pg_catalog.pg_namespace AS nsp ON nsp.oid = relnamespace
  LEFT JOIN pg_catalog.pg_publication_tables AS entry
    ON pubname = %(publication)s AND schemaname = nspname AND tablename = relname
 ORDER BY rel.oid <> %(oid)s, nspname, relname
"""
)

_PUBLISHED_ANCESTOR = """
SELECT nspname, relname
  FROM pg_catalog.pg_partition_ancestors(%(oid)s::pg_catalog.oid) AS above
  JOIN pg_catalog.pg_class AS rel ON rel.oid = above.relid
  JOIN pg_catalog.pg_namespace AS nsp ON nsp.oid = relnamespace
  JOIN pg_catalog.pg_publication_tables ON schemaname = nspname AND tablename = relname
 WHERE pubname = %(publication)s AND rel.oid <> %(oid)s
"""

# The log flags the columns of the replica identity; of a table without, or with its whole rows, the primary key counts.
_KEY_INDEX = """
SELECT indexrelid::int8,
       ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
              WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1]))
  FROM pg_catalog.pg_index
 WHERE indrelid = %(oid)s
   AND CASE %(identity)s WHEN 'i' THEN indisreplident ELSE indisprimary AND indimmediate AND indisvalid END
"""

_COLUMNS = """
SELECT attname, atttypid::int8, atttypmod, attgenerated <> ''
  FROM pg_catalog.pg_attribute
 WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
 ORDER BY attnum
"""

_NUMBERS = "SELECT attnum, attname FROM pg_catalog.pg_attribute WHERE attrelid = %s AND attnum > 0"

# The five comparisons of the index's own operator class. An index that is no btree (a temporal primary key) has none.
_KEY_COLUMNS = """
SELECT attname, pg_catalog.format_type(atttypid, atttypmod),
       (SELECT nspname FROM pg_catalog.pg_namespace WHERE oid = operators.schema), operators.names,
       CASE WHEN part.coll NOT IN (0, attcollation)
            THEN (SELECT ARRAY[nspname, collname]::text[]
                    FROM pg_catalog.pg_collation AS coll JOIN pg_catalog.pg_namespace AS nsp ON nsp.oid = collnamespace
                   WHERE coll.oid = part.coll) END
  FROM pg_catalog.pg_index,
       ROWS FROM (pg_catalog.unnest(indkey::int2[]), pg_catalog.unnest(indclass::oid[]),
                  pg_catalog.unnest(indcollation::oid[])) WITH ORDINALITY
           AS part (attnum, opclass, coll, number)
  JOIN pg_catalog.pg_opclass AS class ON class.oid = part.opclass,
       pg_catalog.pg_attribute AS att,
       LATERAL (
           SELECT min(oprnamespace::int8)::oid AS schema,
                  array_agg(oprname::text ORDER BY amopstrategy) AS names
             FROM pg_catalog.pg_amop JOIN pg_catalog.pg_operator AS op ON op.oid = amopopr
            WHERE amopfamily = opcfamily AND amoplefttype = opcintype AND amoprighttype = opcintype
              AND amopmethod = (SELECT oid FROM pg_catalog.pg_am WHERE amname = 'btree')
       ) AS operators
 WHERE indexrelid = %s AND part.number <= indnkeyatts AND att.attrelid = indrelid AND att.attnum = part.attnum
 ORDER BY part.number
"""

# Whether the index is a part of a unique index of the whole table, so that no other partition has the same key.
_UNIQUE_ABOVE = """
SELECT 1
  FROM pg_catalog.pg_partition_ancestors(%(index)s::pg_catalog.oid) AS above
  JOIN pg_catalog.pg_index ON indexrelid = above.relid
 WHERE indrelid = %(oid)s
"""

_FINGERPRINT = (
    _BELOW.replace("%(oid)s", "%s")
    + """
SELECT rel.oid::int8, relnamespace::int8, relname, relfilenode::int8, relreplident::text,
       attnum, attname, atttypid::int8, atttypmod, attisdropped,
       (SELECT string_agg(indexrelid::text, ',' ORDER BY indexrelid) FROM pg_catalog.pg_index
         WHERE indrelid = rel.oid AND (indisprimary OR indisreplident))
  FROM family
  JOIN pg_catalog.pg_class AS rel ON rel.oid = family.oid
  JOIN pg_catalog.pg_attribute ON attrelid = rel.oid AND attnum > 0
 ORDER BY rel.oid, attnum
"""
)
