"""A PostgreSQL database that is kept in step, exactly once. See `tables` for what a batch is and how tables follow.

The type `schema.table` is the table of that name in the schema of that name, which is made where it is missing; a type
without a dot goes into the schema that is first on the role's search_path, where dbsync's own tables are too.

A column has the very type it has in the source, with its length or precision, as long as that type is built in. The
others are made of what both databases know: a domain is its base type without a length (integers bigint, json in its
textual form), an enum, a composite and all else of the source's own is text. So are `money`, which says something else
under another locale, and types that name things of one database: `regclass` and its kin, `aclitem`.

Rows come by COPY into a temporary table and go from there in one INSERT … ON CONFLICT; the types read them from the
text that PostgreSQL itself writes, so infinity, BC, ranges and the like arrive as they are. What a value loses is what
it lost on the way here: formatting of json, keys that come twice, and its null, which is NULL; lower bounds of arrays;
an interval's 24 hours are a day. An array of json has one dimension.

The target may be the source itself as long as nothing that is written there, dbsync's own tables included, is in the
publication. That is looked at in the transaction that would write, when the table is there: PostgreSQL then says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dbsync.batcher import jsontext, pgtext
from dbsync.batcher.pgtypes import BOX_ARRAY, TEXT, TEXTS, TIMESTAMPTZ, PgType, holds, type_here, type_of
from dbsync.batcher.tables import DELETED_AT, POSITION, TABLES, Held, Place, Store, Table, TableBatcher, Values
from dbsync.config import CONNECT_TIMEOUT_SECONDS, url_secrets
from dbsync.connection import identifier, refusal, server_words
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.relation import Column

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

Connection = psycopg.Connection[tuple[Any, ...]]

_LONGEST_NAME_BYTES = 63


class PostgresBatcher(TableBatcher[PgType]):
    """Keeps the database that `dsn` names in step: a libpq string or a URL."""

    def __init__(self, dsn: str, *, soft_delete: bool = False, drop_columns: bool = False) -> None:
        super().__init__(PostgresStore(dsn), soft_delete=soft_delete, drop_columns=drop_columns)

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> PostgresBatcher:
        # SQLAlchemy names the driver behind a plus sign, which libpq does not know.
        dsn = re.sub(r"^[A-Za-z+\d]+:", "postgresql:", url)
        return cls(dsn, soft_delete=options.soft_delete, drop_columns=options.drop_columns)


class PostgresStore(Store[PgType]):
    """One connection, opened when it is needed."""

    def __init__(self, dsn: str) -> None:
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ConfigError(
                "The target's URL is not one that PostgreSQL's own programs would take.",
                "It is written postgresql://user:password@HOST/database; escape special characters as %40 and so on.",
            ) from error
        self._dsn = make_conninfo(dsn, **{"connect_timeout": CONNECT_TIMEOUT_SECONDS, **parts})
        self._where = f"{parts.get('host') or 'the default host'}, database {parts.get('dbname') or 'by default'}"
        self._secrets = (str(parts.get("password") or ""), *url_secrets(dsn))
        self._connection: Connection | None = None
        self._home = ""  # the schema of dbsync's own tables
        self._is_source = False  # of the log of that name
        self._looked_for: str | None = None
        self._type_names: dict[tuple[int, int], PgType] = {}
        self._staged: dict[Place, _Staging] = {}
        self._stagings = 0

    def held(self, log: str) -> Held | None:
        try:
            with self._doing("read the position", self._on_table(POSITION)):
                work = self._work()
                # A dbsync that was killed may have left a COMMIT on its way.
                work.execute("SET LOCAL lock_timeout = '30s'")
                held = self._held(log) if self._has_own_tables() else None
                self._look_for(log)
                if self._is_source:
                    with self._making_own_tables():
                        self._have_own_tables()  # to be looked at, and taken back
                work.rollback()
                return held
        except BatcherError:
            self.close()  # nobody may come to do that, and a transaction holds things up where it is
            raise

    def begin(self, log: str) -> Held | None:
        if self._connection and self._connection.info.transaction_status != pq.TransactionStatus.IDLE:
            self.close()
        with self._making_own_tables():
            self._look_for(log)
            self._have_own_tables()
            return self._held(log)

    def commit(self, log: str, held: Held) -> None:
        with self._doing("commit", lambda: ""):
            work = self._work()
            work.execute(
                sql.SQL(
                    "INSERT INTO {} AS p (log, lsn, attempt) VALUES (%s, %s, %s) ON CONFLICT (log)"
                    " DO UPDATE SET lsn = greatest(p.lsn, EXCLUDED.lsn), attempt = EXCLUDED.attempt"
                ).format(self._own(POSITION)),
                [log, str(held.lsn), held.attempt],
            )
            work.commit()
        for staging in self._staged.values():
            staging.is_filled = False

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._staged, self._looked_for = {}, None
        if connection is not None:
            connection.close()

    def place(self, doctype: str) -> Place:
        schema, dot, name = doctype.partition(".")
        return Place(schema, name) if dot else Place(self._home, doctype)

    def folded(self, name: str) -> str:
        return name

    def check_name(self, name: str, what: str) -> None:
        if len(name.encode()) > _LONGEST_NAME_BYTES:
            raise BatcherError(
                f"{name} is too long as the name of {what}: PostgreSQL takes {_LONGEST_NAME_BYTES} bytes.",
                "Take a shorter DBSYNC_TARGET_PREFIX or DBSYNC_TARGET_SCHEMA.",
                retryable=False,
            )

    def table(self, place: Place) -> Table[PgType] | None:
        with self._doing(f"look at {place}", self._on_table(TABLES)):
            work = self._work()
            found = work.execute(_COLUMNS, [place.schema, place.name]).fetchall()
            if not found:
                return None
            self._refuse_published(place, _ELSEWHERE)
            owner = work.execute(
                sql.SQL("SELECT doctype FROM {} WHERE name = %s").format(self._own(TABLES)), [str(place)]
            ).fetchone()
        return Table(
            place,
            {name: PgType(oid, modifier, type) for name, oid, modifier, type, _, _ in found},
            tuple(name for name, *_, is_key in found if is_key),
            owner[0] if owner else None,
            frozenset(name for name, *_, is_generated, _ in found if is_generated),
        )

    def create(self, table: Table[PgType]) -> None:
        schema, name = table.place.schema or "", table.place.name
        with self._doing(
            f"make the schema {schema}",
            lambda: f"GRANT CREATE ON DATABASE {self._database()} TO {self._role()}, or CREATE SCHEMA {_q(schema)}",
        ):
            work = self._work()
            # Who may not create a schema may not ask for one that is there either.
            if not work.execute("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s", [schema]).fetchone():
                work.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        with self._doing(f"make the table {table.place}", self._in_schema(lambda: schema)):
            columns = [_column(name, type) for name, type in table.columns.items()]
            work.execute(
                sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}))").format(
                    sql.Identifier(schema, name), sql.SQL(", ").join(columns), _names(table.key)
                )
            )
            work.execute(
                sql.SQL(
                    "INSERT INTO {} (name, doctype) VALUES (%s, %s)"
                    " ON CONFLICT (name) DO UPDATE SET doctype = EXCLUDED.doctype"
                ).format(self._own(TABLES)),
                [str(table.place), table.owner],
            )
            self._refuse_published(table.place, _ELSEWHERE)

    def add_column(self, table: Table[PgType], name: str, type: PgType) -> None:
        self._alter(table, f"add the column {name}", sql.SQL("ADD COLUMN {}").format(_column(name, type)))

    def drop_column(self, table: Table[PgType], name: str) -> None:
        self._alter(table, f"drop the column {name}", sql.SQL("DROP COLUMN {}").format(sql.Identifier(name)))

    def change_type(self, table: Table[PgType], name: str, type: PgType) -> None:
        self._alter(
            table,
            f"make the column {name} {type}",
            sql.SQL("ALTER COLUMN {0} TYPE {1} USING {0}::{1}").format(sql.Identifier(name), sql.SQL(type.name)),
        )

    def change_key(self, table: Table[PgType], key: tuple[str, ...]) -> None:
        with self._doing(f"look at {table.place}", self._on_table(TABLES)):
            found = self._work().execute(_PRIMARY_KEY, [table.place.schema, table.place.name]).fetchone()
        old = sql.SQL("DROP CONSTRAINT {}, ").format(sql.Identifier(found[0])) if found else sql.SQL("")
        new = sql.SQL("ADD PRIMARY KEY ({})").format(_names(key))
        self._alter(table, f"make ({', '.join(key)}) the key", old + new)

    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, PgType]:
        wanted = {column.name: type_here(column) for column in columns}
        unknown = set(wanted.values()) - self._type_names.keys()
        if unknown:
            with self._doing("look at the types", lambda: ""):
                for oid, modifier in unknown:
                    row = (
                        self._work()
                        .execute("SELECT pg_catalog.format_type(%s::oid, %s::int4)", [oid, modifier])
                        .fetchone()
                    )
                    # An older server does not know every type of a newer one.
                    known = row and row[0] != "???"
                    self._type_names[oid, modifier] = PgType(oid, modifier, row[0]) if row and known else TEXT
        return {name: self._type_names[type] for name, type in wanted.items()}

    def type_of(self, items: Iterable[Any]) -> PgType | None:
        return type_of(items)

    def text(self, *, in_key: bool) -> PgType:
        return TEXT

    @property
    def timestamp(self) -> PgType:
        return TIMESTAMPTZ

    def holds(self, wider: PgType, type: PgType) -> bool:
        return holds(wider, type)

    def fits(self, column: Values[PgType]) -> bool:
        return True  # a column has its source's type, or one that holds what `type_of` found

    def upsert(self, table: Table[PgType], columns: Sequence[Values[PgType]]) -> None:
        staging = self._staging(table, columns)
        names = _names([column.name for column in columns])
        others = [sql.Identifier(column.name) for column in columns if column.name not in table.key]
        update = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in others)
        merge = sql.SQL(
            "INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM {rows}"
            " ON CONFLICT ({key}) DO {action}"
        ).format(
            table=_named(table),
            names=names,
            rows=staging.name,
            key=_names(table.key),
            action=sql.SQL("UPDATE SET {}").format(update) if others else sql.SQL("NOTHING"),
        )
        with self._writing(table), self._work().cursor() as cursor:
            with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(staging.name, names)) as copy:
                for row in zip(*map(_written, columns), strict=True):
                    copy.write_row(row)
            cursor.execute(merge)

    def delete(self, table: Table[PgType], key: Sequence[Values[PgType]], *, softly: bool) -> None:
        parts = [f"k{number}" for number in range(len(key))]
        keys = sql.SQL("unnest({}) AS k ({})").format(
            sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in key), _names(parts)
        )
        equal = sql.SQL(" AND ").join(
            sql.SQL("t.{} = k.{}::{}").format(identifier(column.name), sql.Identifier(part), sql.SQL(column.type.name))
            for part, column in zip(parts, key, strict=True)
        )
        name = identifier(table.place.schema or "", table.place.name)
        if softly:
            statement = sql.SQL(
                "UPDATE {} AS t SET {deleted_at} = pg_catalog.now() FROM {} WHERE {} AND t.{deleted_at} IS NULL"
            ).format(name, keys, equal, deleted_at=sql.Identifier(DELETED_AT))
        else:
            statement = sql.SQL("DELETE FROM {} AS t USING {} WHERE {}").format(name, keys, equal)
        with self._writing(table):
            self._work().execute(statement, [list(column.items) for column in key])

    def truncate(self, table: Table[PgType], *, softly: bool) -> None:
        if softly:
            statement = sql.SQL("UPDATE {} SET {deleted_at} = pg_catalog.now() WHERE {deleted_at} IS NULL")
        else:
            statement = sql.SQL("TRUNCATE {}")
        with self._writing(table):
            self._work().execute(statement.format(_named(table), deleted_at=sql.Identifier(DELETED_AT)))

    # The connection, and what dbsync keeps here for itself.

    def _work(self) -> Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        try:
            connection = psycopg.connect(self._dsn, autocommit=True, client_encoding="UTF8")
        except psycopg.OperationalError as error:
            raise self._not_connected(error) from error
        connection.execute(_SESSION)
        if connection.info.server_version >= 140000:
            connection.execute("SET idle_session_timeout = 0")
        if connection.info.server_version >= 170000:
            connection.execute("SET transaction_timeout = 0")
        row = connection.execute("SELECT pg_catalog.current_schema()").fetchone()
        if row is None or row[0] is None:
            connection.close()
            raise BatcherError(
                f"In the target at {self._where}, none of the schemas on the search_path of the role exists.",
                "dbsync keeps its position in the first of them: create one, or set the role's search_path.",
                retryable=False,
            )
        self._home = row[0]
        connection.execute("SET search_path = pg_catalog, pg_temp")
        connection.autocommit = False
        return connection

    def _has_own_tables(self) -> bool:
        work = self._work()
        names = [sql.Identifier(self._home, name).as_string(None) for name in (POSITION, TABLES)]
        row = work.execute(
            "SELECT bool_and(pg_catalog.to_regclass(name) IS NOT NULL) FROM unnest(%s::text[]) AS name", [names]
        ).fetchone()
        return bool(row and row[0])

    def _have_own_tables(self) -> None:
        if not self._has_own_tables():
            self._make_own_tables()
        for name in (POSITION, TABLES):
            self._refuse_published(Place(self._home, name), _ANOTHER_DATABASE)

    def _make_own_tables(self) -> None:
        self._work().execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (log text PRIMARY KEY, lsn pg_lsn NOT NULL, attempt text NOT NULL);"
                "CREATE TABLE IF NOT EXISTS {} (name text PRIMARY KEY, doctype text NOT NULL)"
            ).format(sql.Identifier(self._home, POSITION), sql.Identifier(self._home, TABLES))
        )

    def _look_for(self, log: str) -> None:
        """See whether this database is where the log is read from: it has the slot. (A copy of the server has not.)"""
        if self._looked_for == log:
            return
        work = self._work()
        row = work.execute(_MAY_IDENTIFY).fetchone()
        self._is_source = bool(row and row[0] and work.execute(_IS_SOURCE, [log]).fetchone())
        self._looked_for = log

    def _refuse_published(self, place: Place, hint: str) -> None:
        """What dbsync wrote to a table that it follows would come back to it, to be written again, and so on."""
        if not self._is_source:
            return
        found = self._work().execute(_PUBLISHES, [place.schema, place.name, self.publication]).fetchone()
        if found:
            raise BatcherError(
                f"The target is the source itself, and the publication {_q(found[0])} has the table {place} in it:"
                " what dbsync wrote there would come back to it, for ever.",
                hint,
                retryable=False,
            )

    def _held(self, log: str) -> Held | None:
        row = (
            self._work()
            .execute(
                sql.SQL("SELECT lsn::text, attempt FROM {} WHERE log = %s FOR UPDATE").format(self._own(POSITION)),
                [log],
            )
            .fetchone()
        )
        return Held(LSN(row[0]), row[1]) if row else None

    def _own(self, name: str) -> sql.Composable:
        """One of dbsync's own tables, for a statement with parameters."""
        return identifier(self._home, name)

    def _staging(self, table: Table[PgType], columns: Sequence[Values[PgType]]) -> _Staging:
        """An empty temporary table for rows of these columns; it is kept for the next batch."""
        wanted = tuple((column.name, column.type) for column in columns)
        staging = self._staged.get(table.place)
        with self._doing(
            "make a temporary table", lambda: f"GRANT TEMPORARY ON DATABASE {self._database()} TO {self._role()}"
        ):
            if staging and staging.columns != wanted:
                self._work().execute(sql.SQL("DROP TABLE {}").format(staging.name))
                del self._staged[table.place]
                staging = None
            if staging is None:
                self._stagings += 1
                staging = _Staging(sql.Identifier("pg_temp", f"dbsync_rows_{self._stagings}"), wanted)
                self._work().execute(
                    sql.SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DELETE ROWS").format(
                        staging.name, sql.SQL(", ").join(_column(name, type) for name, type in wanted)
                    )
                )
                self._staged[table.place] = staging
            elif staging.is_filled:
                self._work().execute(sql.SQL("TRUNCATE {}").format(staging.name))
        staging.is_filled = True
        return staging

    def _alter(self, table: Table[PgType], what: str, change: sql.Composable) -> None:
        grant = f"ALTER TABLE {_qualified(table)} OWNER TO "
        with self._doing(f"{what} of {table.place}", lambda: grant + self._role()):
            self._work().execute(sql.SQL("ALTER TABLE {} ").format(_named(table)) + change)

    # What can go wrong.

    @contextmanager
    def _doing(self, what: str, grant: Callable[[], str]) -> Iterator[None]:
        """What PostgreSQL says to it is one sentence; `grant` gives what is missing where the role may not."""
        try:
            yield
        except psycopg.Error as error:
            raise self._failed(what, grant, error) from error

    def _writing(self, table: Table[PgType]) -> Any:
        return self._doing(
            f"write to {table.place}",
            lambda: f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {_qualified(table)} TO {self._role()}",
        )

    def _making_own_tables(self) -> Any:
        return self._doing("make dbsync's own tables", self._in_schema(lambda: self._home))

    def _on_table(self, name: str) -> Callable[[], str]:
        return lambda: f"GRANT SELECT, INSERT, UPDATE ON {_q(self._home)}.{name} TO {self._role()}"

    def _in_schema(self, schema: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"GRANT USAGE, CREATE ON SCHEMA {_q(schema())} TO {self._role()}"

    def _role(self) -> str:
        return _q(self._connection.info.user) if self._connection and not self._connection.closed else "the role"

    def _database(self) -> str:
        return _q(self._connection.info.dbname) if self._connection and not self._connection.closed else "it"

    def _failed(self, what: str, grant: Callable[[], str], error: psycopg.Error) -> BatcherError:
        state = error.sqlstate or ""
        words = self._masked(error.diag.message_primary or str(error).partition("\n")[0]).rstrip(".")
        if self._connection is None or self._connection.closed:
            return BatcherError(
                f"The connection to the target at {self._where} broke: {words}.",
                "The batch is not lost: it comes again.",
            )
        if state == psycopg.errors.InsufficientPrivilege.sqlstate:
            return BatcherError(
                f"The role {self._role()} may not {what} in the target: {words}.", f"{grant()};", retryable=False
            )
        if state == psycopg.errors.LockNotAvailable.sqlstate:
            return BatcherError(f"Another session holds the position of this log in the target at {self._where}.")
        # What the rows or the tables are does not pass with time; a lock, a full disk or a restart may.
        passes = isinstance(error, psycopg.OperationalError) if not state else not state.startswith(_LASTING)
        return BatcherError(f"The target could not {what}: {words}.", retryable=passes or state == "23505")

    def _not_connected(self, error: psycopg.OperationalError) -> BatcherError:
        words = self._masked(server_words(error))
        if error.pgconn is not None and error.pgconn.needs_password:
            return BatcherError(
                f"The target at {self._where} asks for a password and its URL has none.",
                "Put it into the URL in DBSYNC_TO, or into .pgpass.",
                retryable=False,
            )
        has_answered = error.pgconn is not None and not isinstance(error, psycopg.errors.ConnectionTimeout)
        state = refusal(self._dsn) if has_answered else None
        if state in _REFUSALS:
            return BatcherError(
                f"The target at {self._where} did not let dbsync in: {words}.", _REFUSALS[state], retryable=False
            )
        return BatcherError(
            f"The target at {self._where} cannot be reached: {words}.",
            "Check host and port in DBSYNC_TO, and that PostgreSQL listens there.",
        )

    def _masked(self, text: str) -> str:
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "********")
        return text


@dataclass(slots=True)
class _Staging:
    """A temporary table of this session."""

    name: sql.Identifier
    columns: tuple[tuple[str, PgType], ...]
    is_filled: bool = False


def _q(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _named(table: Table[PgType]) -> sql.Identifier:
    return sql.Identifier(table.place.schema or "", table.place.name)


def _qualified(table: Table[PgType]) -> str:
    return _named(table).as_string(None)


def _names(names: Iterable[str]) -> sql.Composable:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _column(name: str, type: PgType) -> sql.Composable:
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type.name))


# From values to what COPY sends.


def _written(column: Values[PgType]) -> Sequence[Any]:
    """The values in a form that psycopg writes as the text the column's type reads."""
    write = _writer(column)
    return column.items if write is None else [None if item is None else write(item) for item in column.items]


def _writer(column: Values[PgType]) -> Callable[[Any], str] | None:
    spec, oid = column.spec, column.type.oid
    if spec == "json":
        return jsontext.exact
    if isinstance(spec, tuple):
        is_json, delimiter = spec[2] == "json", ";" if oid == BOX_ARRAY else ","
        element = jsontext.exact if is_json else pgtext.text
        return lambda value: pgtext.array(value, element, delimiter, flat=is_json)
    if spec is None and oid in (114, 3802):
        return jsontext.dumps
    return pgtext.text if (oid in TEXTS and spec != "text") or spec == "interval" else None


_ANOTHER_DATABASE = "Name another database in DBSYNC_TO, or a publication of single tables in DBSYNC_PUBNAME."
_ELSEWHERE = (
    "Name another database in DBSYNC_TO, or move the tables with DBSYNC_TARGET_SCHEMA or DBSYNC_TARGET_PREFIX to where"
    " the publication does not reach."
)

_LASTING = ("0A", "22", "23", "42")

_REFUSALS = {
    "28P01": "Check the role and its password in DBSYNC_TO.",
    "28000": "Check that the role exists and has LOGIN, and that pg_hba.conf of the target admits it from here.",
    "3D000": "Create the database, or name another in DBSYNC_TO.",
    "42501": "The role needs CONNECT on the database.",
}

# Values come and go as text in one form whatever the role's own defaults are, nothing is cut short by a timeout meant
# for people, and what is committed is on disk before it is acknowledged.
_SESSION = """
SET DateStyle = ISO;
SET IntervalStyle = postgres;
SET TimeZone = 'UTC';
SET extra_float_digits = 1;
SET bytea_output = hex;
SET xmloption = content;
SET default_transaction_isolation = 'read committed';
SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SELECT pg_catalog.set_config('synchronous_commit', 'on', false)
 WHERE pg_catalog.current_setting('synchronous_commit') = 'off'
"""

_COLUMNS = """
SELECT a.attname, a.atttypid::int8, a.atttypmod, pg_catalog.format_type(a.atttypid, a.atttypmod),
       a.attgenerated <> '', coalesce(a.attnum = ANY (i.indkey::int2[]), false)
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary
 WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
 ORDER BY a.attnum
"""

_MAY_IDENTIFY = "SELECT pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')"

_IS_SOURCE = """
SELECT 1
  FROM pg_catalog.pg_control_system() AS system, pg_catalog.pg_replication_slots AS slot
 WHERE slot.database = pg_catalog.current_database()
   AND %s = system.system_identifier || '/' || pg_catalog.quote_ident(slot.database) || '/' || slot.slot_name
"""

# A table is published with its partitions, or under the name of the table it is a partition of.
_PUBLISHES = """
WITH place AS (
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %s AND c.relname = %s
), kin AS (
    SELECT oid FROM place
    UNION SELECT relid FROM place, pg_catalog.pg_partition_tree(place.oid)
    UNION SELECT relid FROM place, pg_catalog.pg_partition_ancestors(place.oid)
)
SELECT p.pubname
  FROM kin
  JOIN pg_catalog.pg_class c ON c.oid = kin.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_publication_tables p ON p.schemaname = n.nspname AND p.tablename = c.relname
 WHERE p.pubname = coalesce(%s, p.pubname)
"""

_PRIMARY_KEY = """
SELECT conname FROM pg_catalog.pg_constraint WHERE contype = 'p' AND conrelid = (
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %s AND c.relname = %s)
"""
