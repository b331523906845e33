"""Is the source ready? Read-only, one line per thing looked at, each with the statement that puts it right.

What `dbsync init` would create by itself is no failure when it is missing. Nothing is written: all questions are asked
in one READ ONLY transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psycopg
from psycopg import sql

from dbsync import control
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.control import statement
from dbsync.errors import DbsyncError, SlotError

Level = Literal["ok", "warn", "fail"]

HELD_WAL_BYTES = 1024**3

_OPERATIONS = frozenset({"insert", "update", "delete", "truncate"})

_ROLE = """
    SELECT rolsuper OR rolreplication OR EXISTS (
               SELECT FROM pg_catalog.pg_roles AS managed
               WHERE managed.rolname = 'rds_replication' AND pg_catalog.pg_has_role(managed.oid, 'MEMBER')),
           pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
    FROM pg_catalog.pg_roles
    WHERE rolname = current_user"""

_LIMITS = """
    SELECT pg_catalog.current_setting('max_replication_slots')::int,
           (SELECT count(*) FROM pg_catalog.pg_replication_slots),
           pg_catalog.current_setting('max_wal_senders')::int,
           (SELECT count(*) FROM pg_catalog.pg_stat_replication)"""

# A primary key that is DEFERRABLE lets two rows have the same key for a while: to PostgreSQL it is no replica identity.
# An index can stand for the key when PostgreSQL would take it as a replica identity: unique, at once, on all rows, on
# plain columns that are never NULL.
# What comes under the name of a partitioned table has the old values of the partition's identity.
_TABLES = """
    SELECT pub.schemaname, pub.tablename, rel.relreplident,
           EXISTS (SELECT FROM pg_catalog.pg_index
                   WHERE indrelid = rel.oid AND indisprimary AND indimmediate AND indisvalid),
           (SELECT conname FROM pg_catalog.pg_constraint
            WHERE conrelid = rel.oid AND contype = 'p' AND condeferrable),
           EXISTS (SELECT FROM pg_catalog.pg_index AS key
                   JOIN pg_catalog.pg_attribute AS att
                     ON att.attrelid = key.indrelid AND att.attnum = ANY ((key.indkey::int2[])[0:key.indnkeyatts - 1])
                   WHERE key.indrelid = rel.oid
                     AND CASE rel.relreplident WHEN 'i' THEN indisreplident ELSE indisprimary END
                     AND ({unpublished})),
           (SELECT leaf.oid::regclass::text
            FROM pg_catalog.pg_partition_tree(rel.oid) AS tree
            JOIN pg_catalog.pg_class AS leaf ON leaf.oid = tree.relid
            WHERE tree.isleaf AND leaf.relreplident <> 'f' AND EXISTS (
                SELECT FROM pg_catalog.pg_index AS key
                JOIN pg_catalog.pg_attribute AS att
                  ON att.attrelid = key.indrelid AND att.attnum = ANY ((key.indkey::int2[])[0:key.indnkeyatts - 1])
                WHERE key.indrelid = rel.oid
                  AND CASE rel.relreplident WHEN 'i' THEN key.indisreplident ELSE key.indisprimary END
                  AND NOT EXISTS (
                      SELECT FROM pg_catalog.pg_index AS own
                      JOIN pg_catalog.pg_attribute AS part
                        ON part.attrelid = own.indrelid
                       AND part.attnum = ANY ((own.indkey::int2[])[0:own.indnkeyatts - 1])
                      WHERE own.indrelid = leaf.oid AND part.attname = att.attname
                        AND CASE leaf.relreplident WHEN 'i' THEN own.indisreplident ELSE own.indisprimary END))
            ORDER BY 1 LIMIT 1),
           EXISTS (SELECT FROM pg_catalog.pg_index WHERE indrelid = rel.oid AND indisreplident),
           (SELECT index.relname
            FROM pg_catalog.pg_index AS key
            JOIN pg_catalog.pg_class AS index ON index.oid = key.indexrelid
            WHERE key.indrelid = rel.oid AND key.indisunique AND key.indimmediate AND key.indisvalid
              AND key.indpred IS NULL AND key.indexprs IS NULL
              AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute AS att
                              WHERE att.attrelid = rel.oid AND att.attnum = ANY (key.indkey) AND NOT att.attnotnull)
            ORDER BY key.indnkeyatts, index.relname LIMIT 1),
           pg_catalog.has_schema_privilege(nsp.oid, 'USAGE') AND pg_catalog.has_table_privilege(rel.oid, 'SELECT')
    FROM pg_catalog.pg_publication_tables AS pub
    JOIN pg_catalog.pg_namespace AS nsp ON nsp.nspname = pub.schemaname
    JOIN pg_catalog.pg_class AS rel ON rel.relnamespace = nsp.oid AND rel.relname = pub.tablename
    WHERE pub.pubname = %(publication)s
      AND (pub.schemaname, pub.tablename) NOT IN ((%(schema)s, %(wm_table)s), (%(schema)s, %(refresh_table)s))
    ORDER BY 1, 2"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer. `fix` is the statement or command that puts it right."""

    name: str
    ok: bool
    level: Level
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    schema: str
    name: str
    identity: str
    has_primary_key: bool
    deferrable_key: str | None
    key_is_cut: bool
    odd_partition: str | None
    has_identity_index: bool
    key_index: str | None
    readable: bool

    @property
    def identified(self) -> bool:
        match self.identity:
            case "d":
                return self.has_primary_key
            case "i":
                return self.has_identity_index
            case _:
                return self.identity == "f"

    @property
    def keyed(self) -> bool:
        has_index = self.has_identity_index if self.identity == "i" else self.has_primary_key
        return has_index and not self.key_is_cut


def run_checks(settings: Settings) -> list[Check]:
    """Look at everything dbsync needs in the source. Never raises for what it finds, and changes nothing."""
    try:
        conn = connect(settings)
    except DbsyncError as error:
        return [_fail("connection", error.message, error.hint)]
    results = [_ok("connection", settings.describe())]
    with conn:
        conn.read_only = True
        try:
            with conn.transaction():
                for look in _LOOKS:
                    results.extend(look(conn, settings))
        except psycopg.Error as error:
            words = error.diag.message_primary or str(error).partition("\n")[0]
            results.append(_fail("connection", f"PostgreSQL did not answer: {words}", "Try again."))
    return results


def _server(conn: Connection, settings: Settings) -> Iterator[Check]:
    version = conn.info.server_version // 10000
    if version >= control.MINIMUM_VERSION:
        yield _ok("server version", f"PostgreSQL {version}")
    else:
        yield _fail("server version", f"PostgreSQL {version}", f"Upgrade to {control.MINIMUM_VERSION} or newer.")
    if _one(conn, "SELECT pg_catalog.pg_is_in_recovery()"):
        yield _fail("primary", "this server is a standby", "Connect dbsync to the primary.")
    wal_level = _one(conn, "SELECT pg_catalog.current_setting('wal_level')")
    if wal_level == "logical":
        yield _ok("wal_level", "logical")
    else:
        yield _fail("wal_level", f"{wal_level}, and dbsync needs logical", control.WAL_LEVEL_FIX)


def _encoding(conn: Connection, settings: Settings) -> Iterator[Check]:
    """Text of this one encoding may be anything, and PostgreSQL ends the stream at what it cannot give in UTF-8."""
    if _one(conn, "SELECT pg_catalog.current_setting('server_encoding')") == "SQL_ASCII":
        detail = "SQL_ASCII: the first change that is not UTF-8 stops dbsync"
        yield _warn("encoding", detail, "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0;")


def _standbys(conn: Connection, settings: Settings) -> Iterator[Check]:
    """A commit that waits for dbsync's word is one that dbsync does not confirm before it is visible."""
    names = _one(conn, "SELECT pg_catalog.current_setting('synchronous_standby_names')")
    if "*" in str(names):
        detail = f"{names}: dbsync may count as one, and commits would wait for it, and it for them"
        yield _warn("synchronous standbys", detail, "ALTER SYSTEM SET synchronous_standby_names = …, with their names;")


def _limits(conn: Connection, settings: Settings) -> Iterator[Check]:
    row = conn.execute(_LIMITS).fetchone()
    assert row is not None
    slots, slots_used, senders, senders_used = row
    state = control.slot_state(conn, settings)
    detail = f"{slots_used} of {slots} in use"
    if slots_used < slots or state is not None:
        yield _ok("replication slots", detail)
    else:
        idle = control.inactive_slots(conn)
        drop = f"SELECT pg_drop_replication_slot({sql.Literal(idle[0]).as_string(conn)}); or " if idle else ""
        yield _fail(
            "replication slots",
            f"{detail}, not being read: {', '.join(idle) or 'none'}",
            f"{drop}ALTER SYSTEM SET max_replication_slots = {slots + 1}; and restart PostgreSQL.",
        )
    detail = f"{senders_used} of {senders} in use"
    if senders_used < senders or (state is not None and state.active):
        yield _ok("wal senders", detail)
    else:
        yield _fail("wal senders", detail, f"ALTER SYSTEM SET max_wal_senders = {senders + 1}; and restart PostgreSQL.")


def _privileges(conn: Connection, settings: Settings) -> Iterator[Check]:
    row = conn.execute(_ROLE).fetchone()
    assert row is not None
    may_replicate, may_create = row
    role = statement(conn, settings, "{role}")
    if may_replicate:
        yield _ok("replication privilege", f"{role} may replicate")
    else:
        fix = statement(conn, settings, control.ALTER_ROLE)
        yield _fail("replication privilege", f"{role} may not replicate", fix)
    yield _control_schema(conn, settings, may_create)


def _control_schema(conn: Connection, settings: Settings, may_create: bool) -> Check:
    name = "control schema"
    schema, table = control.control_schema(conn, settings), control.own_table(conn, settings, control.MARKS)
    shown = statement(conn, settings, "{schema}.{wm_table}")
    if table is not None and not table.ours:
        return _fail(name, f"{shown} is not dbsync's", "Set DBSYNC_WM_TABLENAME to a name that is free.")
    if table is not None and not table.usable:
        return _fail(name, f"the role may not write {shown}", statement(conn, settings, control.GRANT_TABLE))
    if table is not None:
        return _ok(name, f"{shown} is there")
    if schema is None and not may_create:
        fix = statement(conn, settings, control.GRANT_DATABASE)
        return _fail(name, "the role may not create a schema in this database", fix)
    if schema is not None and not schema.usable:
        fix = statement(conn, settings, control.GRANT_SCHEMA)
        return _fail(name, "the role may not create a table in the control schema", fix)
    return _warn(name, f"{shown} is not created yet", "dbsync init")


def _publication(conn: Connection, settings: Settings) -> Iterator[Check]:
    found = control.publication(conn, settings)
    shown = statement(conn, settings, "{publication}")
    if found is None:
        fix = statement(conn, settings, control.CREATE_PUBLICATION)
        yield _fail("publication", f"{shown} does not exist", fix)
        return
    missing = ", ".join(sorted(_OPERATIONS - found.operations))
    if missing:
        fix = statement(conn, settings, control.PUBLISH_ALL)
        make = _warn if {"insert", "update"} <= found.operations else _fail
        yield make("publication", f"{shown} does not publish {missing}", fix)
    else:
        yield _ok("publication", f"{shown} publishes every kind of change")
    if found.covers_marks:
        yield _ok("publication entry", "the watermark table is published")
    elif found.owned:
        yield _warn("publication entry", "the watermark table is not published yet", "dbsync init")
    else:
        fix = statement(conn, settings, "ALTER PUBLICATION {publication} OWNER TO {role};")
        yield _fail("publication entry", f"{shown} belongs to {found.owner}, and the role may not add to it", fix)


def _tables(conn: Connection, settings: Settings) -> Iterator[Check]:
    names = {
        "publication": settings.publication,
        "schema": settings.ctrl_namespace,
        "wm_table": settings.wm_table,
        "refresh_table": control.REFRESH_TABLE,
    }
    tables = [_Table(*row) for row in conn.execute(_TABLES.format(unpublished=_unpublished(conn)), names)]
    if not tables:
        if control.publication(conn, settings) is not None:
            add = statement(conn, settings, "ALTER PUBLICATION {publication} ADD TABLE …;")
            yield _warn("published tables", "the publication has no table to follow", add)
        return
    yield _ok("published tables", f"{len(tables)}")
    yield from _each(conn, settings, tables, "SELECT privilege", lambda table: table.readable, _unreadable)
    yield from _each(conn, settings, tables, "replica identity", lambda table: table.identified, _unidentified)
    yield from _each(conn, settings, tables, "key", lambda table: table.keyed, _unkeyed)
    odd = [table for table in tables if table.odd_partition]
    yield from _each(conn, settings, odd, "partitions", lambda _: False, _oddly_identified)


def _unpublished(conn: Connection) -> str:
    """Whether a column is not published; column lists exist from PostgreSQL 15 on, published generated ones from 18."""
    version = conn.info.server_version
    if version >= 180000:
        return "att.attname <> ALL (pub.attnames)"
    return "att.attgenerated <> ''" + (" OR att.attname <> ALL (pub.attnames)" if version >= 150000 else "")


def _each(
    conn: Connection,
    settings: Settings,
    tables: list[_Table],
    name: str,
    good: Callable[[_Table], bool],
    bad: Callable[[_Table], tuple[Level, str, str]],
) -> Iterator[Check]:
    """One line for all the tables that are right, and one with its fix for each that is not."""
    right = sum(1 for table in tables if good(table))
    if right:
        yield _ok(name, f"{right} of {len(tables)} published tables")
    for table in tables:
        if not good(table):
            quoted = sql.Identifier(table.schema, table.name)
            level, detail, fix = bad(table)
            names = {
                "table": quoted,
                "table_schema": sql.Identifier(table.schema),
                "index": sql.Identifier(table.key_index or ""),
                "constraint": sql.Identifier(table.deferrable_key or ""),
                "partition": sql.SQL(table.odd_partition or ""),  # as PostgreSQL has quoted it
            }
            yield Check(
                name,
                level != "fail",
                level,
                f"{quoted.as_string(conn)} {detail}",
                statement(conn, settings, fix, **names),
            )


def _unreadable(table: _Table) -> tuple[Level, str, str]:
    grant = "GRANT USAGE ON SCHEMA {table_schema} TO {role}; GRANT SELECT ON {table} TO {role};"
    return "fail", "cannot be read by the role", grant


def _unidentified(table: _Table) -> tuple[Level, str, str]:
    detail = "has no replica identity, so PostgreSQL refuses to update or delete its rows while it is published"
    if table.has_primary_key:
        return "fail", detail, "ALTER TABLE {table} REPLICA IDENTITY DEFAULT;"
    if table.key_index:
        return "fail", detail, "ALTER TABLE {table} REPLICA IDENTITY USING INDEX {index};"
    return "fail", detail, "ALTER TABLE {table} ADD PRIMARY KEY (…); or ALTER TABLE {table} REPLICA IDENTITY FULL;"


def _unkeyed(table: _Table) -> tuple[Level, str, str]:
    but = "DBSYNC_KEYLESS decides about its changes, no refresh can read it"
    if table.key_is_cut:
        fix = (
            "ALTER PUBLICATION {publication} DROP TABLE {table}; ALTER PUBLICATION {publication} ADD TABLE {table} (…);"
        )
        return "warn", f"has a key whose columns are not all published: {but}", fix
    if table.deferrable_key:
        fix = "ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD PRIMARY KEY (…);"
        return "warn", f"has a key that is DEFERRABLE, so that two rows may have the same for a while: {but}", fix
    detail = f"has no key to tell its records apart: {but}"
    if table.key_index:
        return "warn", detail, "ALTER TABLE {table} REPLICA IDENTITY USING INDEX {index};"
    return "warn", detail, "ALTER TABLE {table} ADD PRIMARY KEY (…);"


def _oddly_identified(table: _Table) -> tuple[Level, str, str]:
    detail = f"has a key that the replica identity of {table.odd_partition} lacks: what is deleted there cannot be told"
    return "warn", detail, "ALTER TABLE {partition} REPLICA IDENTITY FULL;"


def _slot(conn: Connection, settings: Settings) -> Iterator[Check]:
    state = control.slot_state(conn, settings)
    if state is None:
        yield _warn("slot", f"{settings.slot} is not created yet", "dbsync init")
        return
    try:
        control.check_slot(conn, settings)
    except SlotError as error:
        yield _fail("slot", error.message, error.hint)
        return
    reader = f"read through PostgreSQL process {state.active_pid}" if state.active else "not being read"
    yield _ok("slot", f"{state.name} is {reader}")
    yield _held_wal(conn, state)


def _held_wal(conn: Connection, state: control.SlotState) -> Check:
    keep = _one(conn, "SELECT setting::int8 FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size'")
    held = state.held_bytes or 0
    detail = f"{size(held)} held, {size(state.lag_bytes or 0)} not acknowledged yet"
    if state.wal_status == "unreserved":
        return _warn("held WAL", f"{detail}; PostgreSQL is about to remove it and lose the slot", "dbsync run")
    if keep == -1 and held > HELD_WAL_BYTES:
        limit = "ALTER SYSTEM SET max_slot_wal_keep_size = '…'; SELECT pg_reload_conf();"
        return _warn("held WAL", f"{detail}; nothing limits it", f"dbsync run, or dbsync teardown, or {limit}")
    return _ok("held WAL", detail)


_LOOKS: tuple[Callable[[Connection, Settings], Iterator[Check]], ...] = (
    _server,
    _encoding,
    _standbys,
    _limits,
    _privileges,
    _publication,
    _tables,
    _slot,
)


def size(count: int) -> str:
    """A number of bytes for a person."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GB"


def _ok(name: str, detail: str) -> Check:
    return Check(name, True, "ok", detail)


def _warn(name: str, detail: str, fix: str | None) -> Check:
    return Check(name, True, "warn", detail, fix)


def _fail(name: str, detail: str, fix: str | None) -> Check:
    return Check(name, False, "fail", detail, fix)


def _one(conn: Connection, query: str) -> object:
    row = conn.execute(query).fetchone()
    return None if row is None else row[0]
