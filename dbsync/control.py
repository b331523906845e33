"""Everything dbsync creates, drops and asks for in the source; what creates or drops stands in `sql/`.

`setup` and `teardown` may be called again and again, by several processes at once, and after a crash in the middle:
each step looks first, does only what is missing, and is a transaction of its own. The publication is the user's: it
gets one entry and is never created or dropped. What is dbsync's own carries a comment that says so; nothing without it
is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.rows import kwargs_row

from dbsync.config import Settings
from dbsync.connection import Connection as Connection
from dbsync.connection import connect as connect
from dbsync.connection import identifier
from dbsync.errors import SetupError, SlotError, StreamError
from dbsync.lsn import LSN

MINIMUM_VERSION = 14
PLUGIN = "pgoutput"
SCHEMA_COMMENT = "dbsync control schema: made by dbsync init, dropped by dbsync teardown"
TABLE_COMMENT = "dbsync watermark table: low and high marks of what is being re-read"
REFRESH_TABLE = "dbsync_refreshes"
REFRESH_COMMENT = "dbsync refresh table: what was asked to be re-read, and how far it has come"

# "dbsync" in ASCII: the advisory lock under which one dbsync at a time changes the catalog of a database.
_SETUP_LOCK = int.from_bytes(b"dbsync")
_IDLE_SECONDS = 3.0

WAL_LEVEL_FIX = "ALTER SYSTEM SET wal_level = logical; and restart PostgreSQL."
CREATE_PUBLICATION = "CREATE PUBLICATION {publication} FOR TABLE …;"
PUBLISH_ALL = "ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate');"
GRANT_DATABASE = "GRANT CREATE ON DATABASE {database} TO {role};"
GRANT_SCHEMA = "GRANT USAGE, CREATE ON SCHEMA {schema} TO {role};"
GRANT_REFRESH = "GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.{refresh_table} TO {role};"
GRANT_TABLE = "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT, INSERT, DELETE ON {schema}.{wm_table} TO {role};"
ADD_TABLE = "ALTER PUBLICATION {publication} ADD TABLE {schema}.{wm_table};"
ALTER_ROLE = "ALTER ROLE {role} REPLICATION;"
DROP_SCHEMA = "DROP SCHEMA {schema};"

_CURRENT_LSN = """
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
         ELSE pg_catalog.pg_current_wal_lsn() END"""

_SLOT = f"""
    SELECT slot_name AS name, plugin, database, active, active_pid, restart_lsn::text, confirmed_flush_lsn::text,
           wal_status, safe_wal_size,
           pg_catalog.pg_wal_lsn_diff(now.lsn, restart_lsn)::int8 AS held_bytes,
           pg_catalog.pg_wal_lsn_diff(now.lsn, confirmed_flush_lsn)::int8 AS lag_bytes
    FROM pg_catalog.pg_replication_slots, (SELECT {_CURRENT_LSN} AS lsn) AS now
    WHERE slot_name = %(slot)s"""

# The view knows all three ways a table gets into a publication, whatever ways the server's version has.
_PUBLISHED_COLUMNS = """
    SELECT schemaname || '.' || tablename || '.' || attname
    FROM pg_catalog.pg_publication_tables
    JOIN pg_catalog.pg_namespace AS nsp ON nspname = schemaname
    JOIN pg_catalog.pg_class AS rel ON relnamespace = nsp.oid AND relname = tablename
    JOIN pg_catalog.pg_attribute ON attrelid = rel.oid AND attnum > 0 AND NOT attisdropped
    WHERE pubname = %(publication)s"""

_PUBLICATION = """
    SELECT pg_catalog.pg_get_userbyid(pubowner), pg_catalog.pg_has_role(pubowner, 'USAGE'),
           EXISTS (SELECT FROM pg_catalog.pg_publication_tables AS entry
                   WHERE entry.pubname = pub.pubname AND schemaname = %(schema)s AND tablename = %(wm_table)s),
           pubinsert, pubupdate, pubdelete, pubtruncate
    FROM pg_catalog.pg_publication AS pub
    WHERE pubname = %(publication)s"""

logger = logging.getLogger(__name__)

# An own one, for a snapshot's xmax leaves out transactions that began and of which no later one has ended.
_NEXT_XID = "SELECT pg_catalog.pg_current_xact_id()::text::int8"
_OLDEST_XID = "SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::int8"

_PUBLISHED = """
    SELECT schemaname, tablename, rel.oid::int8, added.xmin::text::int8
    FROM pg_catalog.pg_publication_tables
    JOIN pg_catalog.pg_namespace AS nsp ON nspname = schemaname
    JOIN pg_catalog.pg_class AS rel ON relnamespace = nsp.oid AND relname = tablename
    JOIN pg_catalog.pg_publication AS pub USING (pubname)
    LEFT JOIN pg_catalog.pg_publication_rel AS added ON prpubid = pub.oid AND prrelid = rel.oid
    WHERE pubname = %(publication)s
      AND (schemaname, tablename) NOT IN ((%(schema)s, %(wm_table)s), (%(schema)s, %(refresh_table)s))
    ORDER BY 1, 2"""

_FORGET_REFRESHES = sql.SQL("DELETE FROM {} WHERE slot = %s")

_SCHEMA = """
    SELECT pg_catalog.pg_get_userbyid(nspowner),
           coalesce(pg_catalog.obj_description(oid, 'pg_namespace') = %(comment)s, false),
           pg_catalog.has_schema_privilege(oid, 'CREATE') AND pg_catalog.has_schema_privilege(oid, 'USAGE')
    FROM pg_catalog.pg_namespace
    WHERE nspname = %(schema)s"""

_TABLE = """
    SELECT pg_catalog.pg_get_userbyid(rel.relowner),
           coalesce(pg_catalog.obj_description(rel.oid, 'pg_class') = %(comment)s, false),
           pg_catalog.has_schema_privilege(nsp.oid, 'USAGE')
           AND pg_catalog.has_table_privilege(rel.oid, 'SELECT')
           AND pg_catalog.has_table_privilege(rel.oid, 'INSERT')
           AND pg_catalog.has_table_privilege(rel.oid, 'DELETE')
    FROM pg_catalog.pg_class AS rel
    JOIN pg_catalog.pg_namespace AS nsp ON nsp.oid = rel.relnamespace
    WHERE nsp.nspname = %(schema)s AND rel.relname = %(table)s"""


@dataclass(frozen=True, slots=True)
class SlotState:
    """What PostgreSQL says about the slot. `held_bytes` is the WAL it keeps, `lag_bytes` what is not acknowledged."""

    name: str
    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None
    safe_wal_size: int | None
    held_bytes: int | None
    lag_bytes: int | None

    @property
    def lost(self) -> bool:
        return self.wal_status == "lost"


@dataclass(frozen=True, slots=True)
class Publication:
    """The user's publication: its owner, and which kinds of change it lets through."""

    name: str
    owner: str
    owned: bool
    operations: frozenset[str]
    covers_marks: bool


@dataclass(frozen=True, slots=True)
class ControlObject:
    """The control schema or the watermark table: whose it is, and whether this role may work with it."""

    owner: str
    ours: bool
    usable: bool


@dataclass(frozen=True, slots=True)
class OwnTable:
    """One of the tables dbsync keeps in the control schema, in the words for people and for SQL."""

    words: str
    file: str  # what its files in sql/ are called
    name: str
    key: str  # what `_names` calls it
    comment: str
    grant: str
    variables: str
    also: str = ""


MARKS = OwnTable(
    words="watermark table",
    file="watermark_table",
    name="{schema}.{wm_table}",
    key="wm_table",
    comment=TABLE_COMMENT,
    grant=GRANT_TABLE,
    variables="DBSYNC_CTRL_NAMESPACE or DBSYNC_WM_TABLENAME",
    also=" and its entry in the publication",
)
REFRESHES = OwnTable(
    words="refresh table",
    file="refresh_table",
    name="{schema}.{refresh_table}",
    key="refresh_table",
    comment=REFRESH_COMMENT,
    grant=GRANT_REFRESH,
    variables="DBSYNC_CTRL_NAMESPACE",
)


def load(name: str) -> str:
    """The text of a file in `sql/`, which a wheel carries inside the package and a checkout beside it."""
    package = Path(__file__).parent
    for folder in (package / "sql", package.parent / "sql"):
        if (path := folder / name).is_file():
            return path.read_text(encoding="utf-8")
    raise SetupError(f"dbsync's own file sql/{name} is missing.", "Install dbsync again.")


def setup(conn: Connection, settings: Settings) -> None:
    """Make the source ready: control schema, watermark table, its publication entry, slot. `conn` is in autocommit."""
    with _unbroken(conn):
        _check_server(conn, settings)
        _check_publication(conn, settings)
        _create_schema(conn, settings)
        _create_table(conn, settings, MARKS)
        _create_table(conn, settings, REFRESHES)
        _add_to_publication(conn, settings)
        _create_slot(conn, settings)


def teardown(conn: Connection, settings: Settings) -> list[str]:
    """Remove all that is dbsync's and nothing else; what was removed, in words. `conn` is in autocommit."""
    with _unbroken(conn):
        removed = (
            _drop_slot(conn, settings),
            _drop_table(conn, settings, MARKS),
            _drop_table(conn, settings, REFRESHES),
            _drop_schema(conn, settings),
        )
    return [words for words in removed if words]


def _check_server(conn: Connection, settings: Settings) -> None:
    version = conn.info.server_version // 10000
    if version < MINIMUM_VERSION:
        raise SetupError(
            f"PostgreSQL {version} is too old for dbsync.", f"dbsync needs PostgreSQL {MINIMUM_VERSION} or newer."
        )
    if _value(conn, "SELECT pg_catalog.pg_is_in_recovery()"):
        raise SetupError(
            f"PostgreSQL at {settings.describe()} is a standby, where dbsync cannot write its marks.",
            "Connect dbsync to the primary.",
        )
    wal_level = _value(conn, "SELECT pg_catalog.current_setting('wal_level')")
    if wal_level != "logical":
        raise SetupError(
            f"PostgreSQL runs with wal_level = {wal_level}, and dbsync needs logical.", f"Run {WAL_LEVEL_FIX}"
        )


def _check_publication(conn: Connection, settings: Settings) -> None:
    found = publication(conn, settings)
    if found is None:
        raise SetupError(
            f"The publication {statement(conn, settings, '{publication}')} does not exist in {_database(conn)}.",
            f"Create it for the tables to follow: {statement(conn, settings, CREATE_PUBLICATION)}",
        )
    if not {"insert", "update"} <= found.operations:
        published = ", ".join(sorted(found.operations)) or "nothing"
        raise SetupError(
            f"The publication {statement(conn, settings, '{publication}')} publishes only {published}.",
            f"Run {statement(conn, settings, PUBLISH_ALL)}",
        )


def _create_schema(conn: Connection, settings: Settings) -> None:
    with _step(conn, settings, "create the control schema {schema}", GRANT_DATABASE), _alone(conn):
        if control_schema(conn, settings) is None:
            _run(conn, settings, "create_schema.sql")


def _create_table(conn: Connection, settings: Settings, own: OwnTable) -> None:
    with _step(conn, settings, f"create the {own.words} {own.name}", GRANT_SCHEMA), _alone(conn):
        if own_table(conn, settings, own) is None:
            _run(conn, settings, f"create_{own.file}.sql")
    table = own_table(conn, settings, own)
    name = statement(conn, settings, own.name)
    if table is not None and not table.ours:
        raise SetupError(
            f"The table {name} is not a {own.words} of dbsync's.", f"Set {own.variables} to a name that is free."
        )
    if table is not None and not table.usable:
        raise SetupError(
            f"The role {_role(conn)} may not write the {own.words} {name}.",
            f"Run as {table.owner}: {statement(conn, settings, own.grant)}",
        )


def _add_to_publication(conn: Connection, settings: Settings) -> None:
    with _step(conn, settings, "add {schema}.{wm_table} to the publication {publication}", ADD_TABLE), _alone(conn):
        found = publication(conn, settings)
        if found is not None and not found.covers_marks:
            _run(conn, settings, "add_to_publication.sql")


def _create_slot(conn: Connection, settings: Settings) -> None:
    with _step(conn, settings, "create the replication slot {slot}", ALTER_ROLE):
        with _while_alone(conn, settings.slot):
            if slot_state(conn, settings) is None:
                _begin_anew(conn, settings)
        check_slot(conn, settings)


def _begin_anew(conn: Connection, settings: Settings) -> None:
    # What an earlier slot of this name had copied is not in step with the new one. Forgotten first: a crash in between
    # must not leave a slot that is new and tables that count as copied.
    conn.execute(_FORGET_REFRESHES.format(identifier(settings.ctrl_namespace, REFRESH_TABLE)), [settings.slot])
    try:
        _run(conn, settings, "create_slot.sql")
    except errors.DuplicateObject:
        pass  # made by somebody else at this moment; it is looked at like any other
    except errors.ConfigurationLimitExceeded as error:
        raise _no_slot_left(conn, settings) from error
    _wait_for_the_invisible(conn)


def _wait_for_the_invisible(conn: Connection) -> None:
    """A commit from before the slot may not be visible yet. No slot can be held at it, so nothing is re-read before."""
    now, told = next_xid(conn), False
    while not are_over(conn, now):
        if not told:
            logger.info("waiting for transactions that were open when the slot was made")
            told = True
        time.sleep(0.05)


def next_xid(conn: Connection) -> int:
    """A transaction that is younger than all there are."""
    row = conn.execute(_NEXT_XID).fetchone()
    assert row
    return int(row[0])


def are_over(conn: Connection, xid: int) -> bool:
    """Whether all transactions before that one have ended, for everybody to see."""
    row = conn.execute(_OLDEST_XID).fetchone()
    assert row
    return int(row[0]) >= xid


def check_slot(conn: Connection, settings: Settings) -> None:
    """Raise SlotError when there is a slot of that name that dbsync cannot read from."""
    state = slot_state(conn, settings)
    if state is None:
        return
    other = "Set DBSYNC_REPLSLOT to another name, or drop that slot if nobody needs it."
    if state.plugin is None:
        raise SlotError(f"The slot {state.name} is a physical one, and dbsync needs a logical one.", other)
    if state.plugin != PLUGIN:
        raise SlotError(f"The slot {state.name} has the plugin {state.plugin}, and dbsync needs {PLUGIN}.", other)
    if state.database != conn.info.dbname:
        raise SlotError(
            f"The slot {state.name} belongs to the database {state.database}, not {_database(conn)}.", other
        )
    if state.lost:
        raise SlotError(
            f"The slot {state.name} is lost: PostgreSQL removed WAL that dbsync had not read, so changes are missing.",
            "Run dbsync teardown and dbsync init, then copy the tables anew; "
            "raise max_slot_wal_keep_size so that it does not happen again.",
        )


def _no_slot_left(conn: Connection, settings: Settings) -> SlotError:
    idle = ", ".join(inactive_slots(conn)) or "none"
    return SlotError(
        f"There is no replication slot left for {settings.slot}.",
        f"Drop one that nobody needs (not in use now: {idle}), or raise max_replication_slots and restart PostgreSQL.",
    )


def _drop_slot(conn: Connection, settings: Settings) -> str | None:
    state = slot_state(conn, settings)
    if state is None or state.plugin != PLUGIN or state.database != conn.info.dbname:
        return None
    with _step(conn, settings, "drop the replication slot {slot}", ALTER_ROLE):
        _wait_until_idle(conn, settings)
        try:
            _run(conn, settings, "drop_slot.sql")
        except errors.UndefinedObject:
            return None
        except errors.ObjectInUse as error:
            raise _slot_in_use(settings, slot_state(conn, settings)) from error
    return f"replication slot {settings.slot}"


def _wait_until_idle(conn: Connection, settings: Settings) -> None:
    # A walsender needs a moment to notice that its dbsync is gone.
    deadline = time.monotonic() + _IDLE_SECONDS
    while (state := slot_state(conn, settings)) is not None and state.active:
        if time.monotonic() > deadline:
            raise _slot_in_use(settings, state)
        time.sleep(0.05)


def _slot_in_use(settings: Settings, state: SlotState | None) -> SlotError:
    reader = f"PostgreSQL process {state.active_pid}" if state is not None and state.active_pid else "another process"
    return SlotError(f"The slot {settings.slot} is being read through {reader}.", "Stop that dbsync first.")


def _drop_table(conn: Connection, settings: Settings, own: OwnTable) -> str | None:
    with _step(conn, settings, f"drop the {own.words} {own.name}", f"DROP TABLE {own.name};"), _alone(conn):
        table = own_table(conn, settings, own)
        if table is None or not table.ours:
            return None
        _run(conn, settings, f"drop_{own.file}.sql")
    return statement(conn, settings, f"{own.words} {own.name}{own.also}")


def _drop_schema(conn: Connection, settings: Settings) -> str | None:
    with _step(conn, settings, "drop the control schema {schema}", DROP_SCHEMA):
        try:
            with _alone(conn):
                schema = control_schema(conn, settings)
                if schema is None or not schema.ours:
                    return None
                _run(conn, settings, "drop_schema.sql")
        except errors.DependentObjectsStillExist:
            return None  # something of the user's is in it by now
    return statement(conn, settings, "control schema {schema}")


@contextmanager
def _alone(conn: Connection) -> Iterator[None]:
    """A transaction that no other dbsync's setup or teardown in this database runs beside."""
    with conn.transaction():
        conn.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
        yield


@contextmanager
def _while_alone(conn: Connection, slot: str) -> Iterator[None]:
    """The same around several transactions, and for one slot: making it takes as long as the oldest transaction."""
    key = "(pg_catalog.hashtext('dbsync slot'), pg_catalog.hashtext(%s))"
    conn.execute(f"SELECT pg_catalog.pg_advisory_lock{key}", [slot])
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute(f"SELECT pg_catalog.pg_advisory_unlock{key}", [slot])


@contextmanager
def _step(conn: Connection, settings: Settings, doing: str, fix: str) -> Iterator[None]:
    """Say what could not be done, and the statement that helps, instead of PostgreSQL's error alone."""
    try:
        yield
    except errors.InsufficientPrivilege as error:
        raise SetupError(
            f"The role {_role(conn)} may not {statement(conn, settings, doing)}.",
            f"Run as a superuser: {statement(conn, settings, fix)}",
        ) from error
    except psycopg.Error as error:
        if conn.closed:
            raise
        raise SetupError(f"PostgreSQL could not {statement(conn, settings, doing)}: {_words(error)}.") from error


@contextmanager
def _unbroken(conn: Connection) -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        if not conn.closed:
            raise
        raise StreamError(f"The connection to PostgreSQL broke: {_words(error)}.", "Try again.") from error


def _words(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error).partition("\n")[0]


def _run(conn: Connection, settings: Settings, name: str) -> None:
    values = {
        "slot": sql.Literal(settings.slot),
        "schema_comment": sql.Literal(SCHEMA_COMMENT),
        "table_comment": sql.Literal(TABLE_COMMENT),
        "refresh_comment": sql.Literal(REFRESH_COMMENT),
    }
    conn.execute(sql.SQL(load(name)).format(**_identifiers(settings), **values))


def statement(conn: Connection, settings: Settings, text: str, **identifiers: sql.Composable) -> str:
    """A text for people with its `{names}` quoted as PostgreSQL wants them: it can be pasted into psql."""
    known = {
        **_identifiers(settings),
        "slot": sql.SQL(settings.slot),
        "role": sql.Identifier(_value(conn, "SELECT current_user")),
        "database": sql.Identifier(conn.info.dbname),
    }
    return sql.SQL(text).format(**{**known, **identifiers}).as_string(conn)


def _identifiers(settings: Settings) -> dict[str, sql.Composable]:
    return {name: sql.Identifier(value) for name, value in _names(settings).items()}


def _role(conn: Connection) -> str:
    return str(_value(conn, "SELECT pg_catalog.quote_ident(current_user)"))


def _database(conn: Connection) -> str:
    return str(_value(conn, "SELECT pg_catalog.quote_ident(pg_catalog.current_database())"))


def current_lsn(conn: Connection) -> LSN:
    """Where the log ends now; on a standby, how far it is replayed."""
    return LSN(_value(conn, f"SELECT {_CURRENT_LSN}"))


def log_name(conn: Connection, settings: Settings) -> str:
    """What tells this log from every other one: positions in it mean nothing in another."""
    system = _value(conn, "SELECT system_identifier FROM pg_catalog.pg_control_system()")
    return f"{system}/{_database(conn)}/{settings.slot}"


def slot_state(conn: Connection, settings: Settings) -> SlotState | None:
    """The slot as PostgreSQL sees it now, or None when there is none of that name."""
    with conn.cursor(row_factory=kwargs_row(_slot_row)) as cursor:
        return cursor.execute(_SLOT, {"slot": settings.slot}).fetchone()


def publication(conn: Connection, settings: Settings) -> Publication | None:
    """The user's publication, or None when there is none of that name."""
    row = conn.execute(_PUBLICATION, _names(settings)).fetchone()
    if row is None:
        return None
    owner, owned, covers, *published = row
    kinds = ("insert", "update", "delete", "truncate")
    operations = frozenset(kind for kind, on in zip(kinds, published, strict=True) if on)
    return Publication(settings.publication, owner, owned, operations, covers)


def published_tables(conn: Connection, settings: Settings) -> list[tuple[str, str]]:
    """(schema, table) of every table the publication publishes, without dbsync's own."""
    return [(table.schema, table.name) for table in published_oids(conn, settings).values()]


def published_columns(conn: Connection, settings: Settings) -> list[str]:
    """`schema.table.column` of every column of those tables."""
    return [str(column) for (column,) in conn.execute(_PUBLISHED_COLUMNS, _names(settings))]


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """`added_by` is the transaction (32 bits) that put it into the publication; None where that is not written down."""

    schema: str
    name: str
    added_by: int | None


def published_oids(conn: Connection, settings: Settings) -> dict[int, PublishedTable]:
    """The same by their oids."""
    rows = conn.execute(_PUBLISHED, _names(settings))
    return {int(oid): PublishedTable(str(schema), str(table), added) for schema, table, oid, added in rows}


def inactive_slots(conn: Connection) -> list[str]:
    """The slots nobody reads, which are the first to look at when there is none left."""
    rows = conn.execute("SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE NOT active ORDER BY 1")
    return [str(name) for (name,) in rows]


def control_schema(conn: Connection, settings: Settings) -> ControlObject | None:
    """The control schema, if it is there; usable when this role may create tables in it."""
    return _object(conn, _SCHEMA, {**_names(settings), "comment": SCHEMA_COMMENT})


def own_table(conn: Connection, settings: Settings, own: OwnTable) -> ControlObject | None:
    """A table of dbsync's, if it is there; usable when this role may do with it what dbsync does."""
    names = _names(settings)
    return _object(conn, _TABLE, {**names, "table": names[own.key], "comment": own.comment})


def _slot_row(restart_lsn: str | None, confirmed_flush_lsn: str | None, **columns: Any) -> SlotState:
    return SlotState(
        restart_lsn=None if restart_lsn is None else LSN(restart_lsn),
        confirmed_flush_lsn=None if confirmed_flush_lsn is None else LSN(confirmed_flush_lsn),
        **columns,
    )


def _object(conn: Connection, query: str, names: dict[str, str]) -> ControlObject | None:
    row = conn.execute(query, names).fetchone()
    return None if row is None else ControlObject(*row)


def _names(settings: Settings) -> dict[str, str]:
    return {
        "schema": settings.ctrl_namespace,
        "wm_table": settings.wm_table,
        "refresh_table": REFRESH_TABLE,
        "publication": settings.publication,
    }


def _value(conn: Connection, query: str) -> Any:
    row = conn.execute(query).fetchone()
    assert row is not None
    return row[0]
