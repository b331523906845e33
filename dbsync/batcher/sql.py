"""A SQLite file, a MySQL or a MariaDB that is kept in step, exactly once. See `tables` for what a batch is and how
tables follow.

These know no schemas inside a database: `public.orders` is the table `orders`, `shop.orders` is `shop_orders`.

What has no type of its own is text, as PostgreSQL writes it; json and what a handler's documents nest is JSON, arrays
are JSON lists of such values. In SQLite that is all but integers, floats (NaN is the text `NaN` among them), booleans
and bytes. In MySQL numeric with a precision up to 65 is DECIMAL, times are TIME, DATE and DATETIME (timestamptz in UTC,
told by the column's comment), floats are DOUBLE; a column of these becomes text, with what it holds, when a value comes
that MySQL has no place for: NaN and infinity, a year before 1000 or past 9999, 24:00:00. Texts compare byte by byte,
and those of a key are at most 768 characters long.

MySQL commits when a table is altered. So that is done on a connection of its own, before the transaction has touched
the table; where it has, the transaction is taken back and the batch begins again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import Engine, bindparam, event
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import quoted_name

from dbsync import values
from dbsync.batcher import pgtext
from dbsync.batcher.samefile import SameFile
from dbsync.batcher.sqltypes import DATETIME_UTC, TEXT, UTC_COMMENT, MysqlTypes, SqliteTypes, SqlType, as_text
from dbsync.batcher.tables import DELETED_AT, POSITION, TABLES, Held, Place, Store, Table, TableBatcher, Values
from dbsync.batcher.urls import missing_extra
from dbsync.config import CONNECT_TIMEOUT_SECONDS, url_secrets
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.relation import Column

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

_KEYS_A_STATEMENT = 500
_LOCK_SECONDS = 60
_LONGEST_NAME = 64  # MySQL's; SQLite has no limit
_REBUILT = "dbsync_rebuilt"
_SQLITE_MOVED = 1032  # SQLITE_READONLY_DBMOVED; its words are of a file that may not be written


class SqlBatcher(TableBatcher[SqlType]):
    """Keeps the database behind a SQLAlchemy URL in step: sqlite:///FILE, mysql://… or mariadb://…."""

    def __init__(self, url: str, *, soft_delete: bool = False, drop_columns: bool = False) -> None:
        super().__init__(SqlStore(url), soft_delete=soft_delete, drop_columns=drop_columns)

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> SqlBatcher:
        return cls(url, soft_delete=options.soft_delete, drop_columns=options.drop_columns)


class SqlStore(Store[SqlType]):
    """A connection for the batch, opened when it is needed; beside it, where altering commits, one for that."""

    def __init__(self, url: str) -> None:
        self._url = _url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._types = SqliteTypes() if self._is_sqlite else MysqlTypes()
        self._engine = _engine(self._url)
        self._where = self._url.database if self._is_sqlite else f"{self._url.host}, database {self._url.database}"
        self._file = SameFile(Path(str(self._url.database).removeprefix("file:"))) if self._is_sqlite else None
        self._secrets = (*url_secrets(url), self._url.password or "")
        self._connection: Connection | None = None
        self._has_own_tables = False
        self._positions = _light(POSITION, ("log", "lsn", "attempt"))
        self._owners = _light(TABLES, ("name", "doctype"))

    def held(self, log: str) -> Held | None:
        try:
            with self._doing("read the position"):
                work = self._work()
                # A dbsync that was killed may have left a commit on its way: reading for update waits for that.
                held = self._held(log) if sqlalchemy.inspect(work).has_table(POSITION) else None
                work.rollback()
                return held
        except BatcherError:
            self._let_go()
            raise

    def begin(self, log: str) -> Held | None:
        if self._connection and self._connection.get_transaction():
            self._let_go()  # one whose COMMIT failed is no longer in a transaction, and SQLAlchemy keeps that one
        self._check_file()
        with self._doing("make dbsync's own tables"):
            self._work()
            if not self._has_own_tables:
                self._make_own_tables()
            return self._held(log)

    def commit(self, log: str, held: Held) -> None:
        self._check_file()
        try:
            with self._doing("commit"):
                before = self._held(log)
                lsn = max(held.lsn, before.lsn) if before else held.lsn
                row = {"log": log, "lsn": str(lsn), "attempt": held.attempt}
                self._work().execute(self._merge(self._positions, list(row), ["log"]).values(row))
                self._work().commit()
        except BatcherError:
            self._let_go()  # and of the locks, which a COMMIT that failed may have kept
            raise

    def close(self) -> None:
        self._let_go()
        if self._file:
            self._file.forget()

    def _let_go(self) -> None:
        """Of the connection, and of what is not committed; the next one goes on in the same file."""
        connection, self._connection = self._connection, None
        self._has_own_tables = False  # they may have been made in what is taken back
        if connection is not None:
            try:
                connection.close()
            except DBAPIError:
                connection.invalidate()  # it was gone already

    def place(self, doctype: str) -> Place:
        schema, dot, name = doctype.partition(".")
        return Place(None, f"{schema}_{name}" if dot and schema != "public" else name or doctype)

    def folded(self, name: str) -> str:
        return name.lower()

    def check_name(self, name: str, what: str) -> None:
        if not self._is_sqlite and len(name) > _LONGEST_NAME:
            raise BatcherError(
                f"{name} is too long as the name of {what}: MySQL takes {_LONGEST_NAME} characters.",
                "Rename it, or take a shorter DBSYNC_TARGET_PREFIX or DBSYNC_TARGET_SCHEMA.",
                retryable=False,
            )

    def table(self, place: Place) -> Table[SqlType] | None:
        with self._doing(f"look at {place}"), self._ddl() as ddl:
            inspector = sqlalchemy.inspect(ddl)
            if not inspector.has_table(place.name):
                return None
            owner = ddl.execute(
                sqlalchemy.select(self._owners.c.doctype).where(self._owners.c.name == place.name)
            ).scalar()
            columns = inspector.get_columns(place.name)
            key = inspector.get_pk_constraint(place.name)["constrained_columns"]
        return Table(
            place,
            {str(column["name"]): self._types.reflected(column["type"], column.get("comment")) for column in columns},
            tuple(map(str, key)),
            owner,
            frozenset(str(column["name"]) for column in columns if column.get("computed")),
        )

    def create(self, table: Table[SqlType]) -> None:
        with self._doing(f"make the table {table.place}"), self._ddl() as ddl:
            ddl.execute(self._owners.delete().where(self._owners.c.name == table.place.name))
            ddl.execute(self._owners.insert().values(name=table.place.name, doctype=table.owner))
            ddl.execute(CreateTable(self._defined(table.place.name, table.columns, table.key)))

    def add_column(self, table: Table[SqlType], name: str, type: SqlType) -> None:
        self._alter(table, f"add the column {name}", f"ADD COLUMN {self._column(name, type)}")

    def drop_column(self, table: Table[SqlType], name: str) -> None:
        if self._is_sqlite:
            self._rebuild(table, {column: type for column, type in table.columns.items() if column != name}, table.key)
        else:
            self._alter(table, f"drop the column {name}", f"DROP COLUMN {self._q(name)}")

    def change_type(self, table: Table[SqlType], name: str, type: SqlType) -> None:
        if self._is_sqlite:
            self._rebuild(table, {**table.columns, name: type}, table.key)
            return
        column = self._column(name, type) + (" NOT NULL" if name in table.key else "")
        texts = as_text(table.columns[name], self._q(name)) if type == TEXT or type.kind == "varchar" else self._q(name)
        update = f"UPDATE {self._q(table.place.name)} SET {self._q(name)} = {texts}"
        also = () if texts == self._q(name) else (update,)
        self._alter(table, f"make the column {name} {type}", f"MODIFY COLUMN {column}", *also)

    def change_key(self, table: Table[SqlType], key: tuple[str, ...]) -> None:
        if self._is_sqlite:
            self._rebuild(table, table.columns, key)
            return
        drop = "DROP PRIMARY KEY, " if table.key else ""
        self._alter(
            table, f"make ({', '.join(key)}) the key", f"{drop}ADD PRIMARY KEY ({', '.join(map(self._q, key))})"
        )

    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, SqlType]:
        return self._types.declared(columns, key)

    def type_of(self, items: Iterable[Any]) -> SqlType | None:
        return self._types.type_of(items)

    def text(self, *, in_key: bool) -> SqlType:
        return self._types.text(in_key=in_key)

    @property
    def timestamp(self) -> SqlType:
        return self._types.timestamp

    def holds(self, wider: SqlType, type: SqlType) -> bool:
        return self._types.holds(wider, type)

    def fits(self, column: Values[SqlType]) -> bool:
        return self._types.fits(column.type, column.items)

    def upsert(self, table: Table[SqlType], columns: Sequence[Values[SqlType]]) -> None:
        names = [column.name for column in columns]
        parameters = {name: f"dbsync_{number}" for number, name in enumerate(names)}
        target = _light(table.place.name, names)
        merge = self._merge(target, names, table.key)
        statement = merge.values({target.c[name]: bindparam(parameter) for name, parameter in parameters.items()})
        written = [self._types.written(column.type, column.spec, column.items) for column in columns]
        rows = [dict(zip(parameters.values(), row, strict=True)) for row in zip(*written, strict=True)]
        # PyMySQL does not find its way through a percent sign behind the values of many rows.
        at_once = [rows] if self._is_sqlite or not any("%" in name for name in names) else rows
        with self._doing(f"write to {table.place}"):
            for some in at_once:
                self._work().execute(statement, some)

    def delete(self, table: Table[SqlType], key: Sequence[Values[SqlType]], *, softly: bool) -> None:
        target = _light(table.place.name, [*(column.name for column in key), DELETED_AT])
        parts = [self._types.written(column.type, column.spec, _decoded(column)) for column in key]
        rows = list(zip(*parts, strict=True))
        columns = [target.c[column.name] for column in key]
        with self._doing(f"write to {table.place}"):
            for start in range(0, len(rows), _KEYS_A_STATEMENT):
                some = rows[start : start + _KEYS_A_STATEMENT]
                if len(columns) == 1:
                    which = columns[0].in_([row[0] for row in some])
                else:
                    which = sqlalchemy.tuple_(*columns).in_(some)
                self._work().execute(self._gone(target, softly=softly).where(which))

    def truncate(self, table: Table[SqlType], *, softly: bool) -> None:
        # MySQL's TRUNCATE commits.
        with self._doing(f"write to {table.place}"):
            self._work().execute(self._gone(_light(table.place.name, [DELETED_AT]), softly=softly))

    # Statements.

    def _gone(self, target: Any, *, softly: bool) -> Any:
        if not softly:
            return sqlalchemy.delete(target)
        (now,) = self._types.written(self.timestamp, None, [datetime.now(UTC)])
        return sqlalchemy.update(target).values({target.c[DELETED_AT]: now}).where(target.c[DELETED_AT].is_(None))

    def _merge(self, target: Any, names: Sequence[str], key: Sequence[str]) -> Any:
        """The dialect's own upsert, without values."""
        others = [name for name in names if name not in key]
        if self._is_sqlite:
            statement = sqlite_insert(target)
            if not others:
                return statement.on_conflict_do_nothing()
            new = {target.c[name]: statement.excluded[name] for name in others}
            return statement.on_conflict_do_update(index_elements=[target.c[name] for name in key], set_=new)
        insert = mysql_insert(target)
        return insert.on_duplicate_key_update([(name, self._inserted(insert, name)) for name in others or key[:1]])

    def _inserted(self, insert: Any, name: str) -> Any:
        if "%" not in name:
            return insert.inserted[name]
        # SQLAlchemy would double the percent sign of a name in here twice.
        return sqlalchemy.literal_column(f"VALUES({self._q(name).replace('%%', '%')})")

    def _defined(self, name: str, columns: Mapping[str, SqlType], key: Sequence[str]) -> Any:
        defined = [
            sqlalchemy.Column(
                quoted_name(column, True),
                self._types.rendered(type),
                nullable=column not in key,
                comment=UTC_COMMENT if type == DATETIME_UTC else None,
            )
            for column, type in columns.items()
        ]
        key_columns = [column for name in key for column in defined if column.name == name]
        return sqlalchemy.Table(
            quoted_name(name, True),
            sqlalchemy.MetaData(),
            *defined,
            sqlalchemy.PrimaryKeyConstraint(*key_columns),
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """How MySQL keeps a table: with transactions, all of Unicode, and texts compared byte by byte to their end."""
        if self._is_sqlite:
            return {}
        name = self._engine.dialect.name
        collation = "utf8mb4_nopad_bin" if self._engine.dialect.is_mariadb else "utf8mb4_0900_bin"  # type: ignore[attr-defined]
        return {f"{name}_engine": "InnoDB", f"{name}_charset": "utf8mb4", f"{name}_collate": collation}

    def _column(self, name: str, type: SqlType) -> str:
        comment = f" COMMENT '{UTC_COMMENT}'" if type == DATETIME_UTC else ""
        return f"{self._q(name)} {self._types.rendered(type).compile(self._engine.dialect)}{comment}"

    def _q(self, name: str) -> str:
        return self._engine.dialect.identifier_preparer.quote_identifier(name)

    def _alter(self, table: Table[SqlType], what: str, change: str, *also: str) -> None:
        with self._altering(table, what) as ddl:
            for statement in (f"ALTER TABLE {self._q(table.place.name)} {change}", *also):
                ddl.exec_driver_sql(statement)

    def _rebuild(self, table: Table[SqlType], columns: Mapping[str, SqlType], key: Sequence[str]) -> None:
        """SQLite cannot alter a column: the rows go into a new table, which takes the old one's place."""
        name = self._q(table.place.name)
        names = ", ".join(map(self._q, columns))
        old = ", ".join(self._rebuilt(column, table.columns[column], type) for column, type in columns.items())
        with self._altering(table, f"alter the columns of {table.place}") as ddl:
            kept = ddl.execute(_KEPT, {"name": table.place.name}).scalars().all()
            ddl.exec_driver_sql("PRAGMA legacy_alter_table = ON")  # views that read the table stay as they are
            ddl.execute(CreateTable(self._defined(_REBUILT, columns, key)))
            ddl.exec_driver_sql(f"INSERT INTO {self._q(_REBUILT)} ({names}) SELECT {old} FROM {name}")
            ddl.exec_driver_sql(f"DROP TABLE {name}")
            ddl.exec_driver_sql(f"ALTER TABLE {self._q(_REBUILT)} RENAME TO {name}")
            for statement in kept:
                ddl.exec_driver_sql(statement)

    def _rebuilt(self, name: str, has: SqlType, type: SqlType) -> str:
        texts = f"dbsync_text({as_text(has, self._q(name))})"
        return texts if type == TEXT and has != TEXT else self._q(name)

    # The connections, and what dbsync keeps here for itself.

    def _work(self) -> Connection:
        if self._connection is None:
            self._check_file()
            self._connection = self._connect()
            if self._file:
                self._file.opened()
        if not self._connection.in_transaction():
            self._connection.begin()
        return self._connection

    def _connect(self) -> Connection:
        try:
            return self._engine.connect()
        except (TypeError, ValueError) as error:
            raise _no_option(self._url) from error

    def _check_file(self) -> None:
        if self._file:
            self._file.check()

    @contextmanager
    def _ddl(self) -> Iterator[Connection]:
        """Where tables are looked at and altered: in the transaction of the batch, if the database can do that."""
        if self._is_sqlite:
            yield self._work()
            return
        with self._connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    @contextmanager
    def _altering(self, table: Table[SqlType], what: str) -> Iterator[Connection]:
        begins_again = table.is_touched and not self._is_sqlite
        if begins_again:
            self._let_go()  # or it would wait for what the batch has done to the table so far
        with self._doing(f"{what} of {table.place}"), self._ddl() as ddl:
            yield ddl
        if begins_again:
            raise BatcherError(
                f"The table {table.place} in the target had to be altered in the middle of the batch, to {what}.",
                "The batch begins again.",
            )

    def _make_own_tables(self) -> None:
        with self._ddl() as ddl:
            for table in (self._positions, self._owners):
                if not sqlalchemy.inspect(ddl).has_table(table.name):
                    key, *others = [column.name for column in table.columns]
                    columns = {key: self.text(in_key=True), **dict.fromkeys(others, TEXT)}
                    ddl.execute(CreateTable(self._defined(table.name, columns, [key]), if_not_exists=True))
        self._has_own_tables = True

    def _held(self, log: str) -> Held | None:
        table = self._positions
        query = sqlalchemy.select(table.c.lsn, table.c.attempt).where(table.c.log == log).with_for_update()
        row = self._work().execute(query).one_or_none()
        return Held(LSN(row.lsn), row.attempt) if row else None

    # What can go wrong.

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """What the database says to it is one sentence."""
        try:
            yield
        except DBAPIError as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: DBAPIError) -> BatcherError:
        if getattr(error.orig, "sqlite_errorcode", 0) == _SQLITE_MOVED:
            self._check_file()
        code, words = _said(error.orig)
        for secret in filter(None, self._secrets):
            words = words.replace(secret, "********")
        hint, retryable = (_SQLITE_CODES if self._is_sqlite else _MYSQL_CODES).get(code, (None, None))
        if retryable is None:
            lasting = (sqlalchemy.exc.DataError, sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError)
            retryable = not isinstance(error, lasting)
        return BatcherError(f"The target at {self._where} could not {what}: {words}.", hint, retryable=retryable)


def _url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # the second for a port that is no number
        raise ConfigError(
            "The target's URL cannot be read.",
            "It is written like mysql://user:password@HOST/database; escape special characters as %40 and so on.",
        ) from error
    if not url.database or ":memory:" in url.database or url.query.get("mode") == "memory":
        raise ConfigError(
            f"The target's URL, {url.get_backend_name()}:…, names no database.",
            "It is written sqlite:///FILE, with three slashes before a relative path, or mysql://HOST/database.",
        )
    return (
        url if "+" in url.drivername or url.drivername == "sqlite" else url.set(drivername=f"{url.drivername}+pymysql")
    )


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = _made(url, connect_args={"timeout": _LOCK_SECONDS, "check_same_thread": False})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    engine = _made(url, isolation_level="READ COMMITTED", connect_args={"connect_timeout": CONNECT_TIMEOUT_SECONDS})
    event.listen(engine, "connect", _prepare_mysql)
    return engine


def _made(url: URL, **options: Any) -> Engine:
    try:
        return sqlalchemy.create_engine(url, poolclass=NullPool, **options)
    except ImportError as error:
        if url.get_driver_name() == "pymysql":
            raise missing_extra(f"A target like {url.get_backend_name()}://…", "pymysql", "mysql") from error
        raise _no_driver(url) from error
    except NoSuchModuleError as error:
        raise _no_driver(url) from error
    except (TypeError, ValueError) as error:
        raise _no_option(url) from error


def _no_driver(url: URL) -> ConfigError:
    return ConfigError(
        f"The driver that the target's URL names, {url.drivername}, is not installed.",
        f"Install it, or leave it out: {url.get_backend_name()}:… takes one that goes with dbsync.",
    )


def _no_option(url: URL) -> ConfigError:
    return ConfigError(
        f"The driver of the target {url.get_backend_name()}:… does not take the options behind the ? in its URL.",
        "Leave them out, or see which ones it has.",
    )


def _prepare_sqlite(connection: Any, _: object) -> None:
    # The driver's own idea of when a transaction begins leaves CREATE TABLE out of it.
    connection.isolation_level = None
    connection.create_function("dbsync_text", 1, lambda value: None if value is None else pgtext.text(value))


def _prepare_mysql(connection: Any, _: object) -> None:
    with connection.cursor() as cursor:
        # What does not fit is an error and never cut; a day has no time zone but UTC.
        cursor.execute("SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00'")
        cursor.execute(f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}, innodb_lock_wait_timeout = {_LOCK_SECONDS}")


def _light(name: str, columns: Iterable[str]) -> Any:
    """A table without types, for statements whose values are as the driver takes them."""
    names = dict.fromkeys(columns)
    return sqlalchemy.table(quoted_name(name, True), *(sqlalchemy.column(quoted_name(name, True)) for name in names))


def _decoded(column: Values[SqlType]) -> list[Any]:
    return list(map(values.compile(column.spec), column.items)) if column.spec else list(column.items)


def _said(error: BaseException | None) -> tuple[int, str]:
    """The database's number for what went wrong, and its words."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF, str(error).rstrip(".")
    arguments = getattr(error, "args", ())
    code = arguments[0] if arguments and isinstance(arguments[0], int) else 0
    return code, str(arguments[-1] if arguments else error).partition("\n")[0].rstrip(".") or "the connection broke"


_KEPT = sqlalchemy.text("SELECT sql FROM sqlite_master WHERE tbl_name = :name AND type <> 'table' AND sql IS NOT NULL")

_CHECK_GRANTS = "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP on the database to the user in DBSYNC_TO."
_COMES_AGAIN = "The batch is not lost: it comes again."

# By the database's own number: what to do, and whether it may pass with time.
_SQLITE_CODES: dict[int, tuple[str | None, bool]] = {
    1: (None, False),
    5: ("Another process is writing to the file, and did not end.", True),
    8: ("Check that the file and its folder may be written, by the user dbsync runs as.", False),
    10: ("See that its disk has room, and is well.", True),
    11: ("The file is damaged: put it away, and copy into a new one.", False),
    13: ("Make room on the disk.", True),
    14: ("Check that its folder is there and may be written, by the user dbsync runs as.", True),
    26: ("Name another file, or put this one away.", False),
}
_MYSQL_CODES: dict[int, tuple[str | None, bool]] = {
    0: (_COMES_AGAIN, True),
    1044: (_CHECK_GRANTS, False),
    1045: ("Check the user and its password in DBSYNC_TO.", False),
    1049: ("Create the database, or name another in DBSYNC_TO.", False),
    1071: ("The key is too long for InnoDB: leave the table out, or give it a shorter one.", False),
    1118: ("The row is too wide for InnoDB: leave columns out with DBSYNC_EXCLUDE_COLUMNS.", False),
    1142: (_CHECK_GRANTS, False),
    1143: (_CHECK_GRANTS, False),
    1227: (_CHECK_GRANTS, False),
    1290: ("The server is read-only: name the one that is written to.", False),
    1406: ("A key is at most 768 characters long in MySQL, all its columns together.", False),
    1698: ("Check the user and its password in DBSYNC_TO.", False),
    2003: ("Check host and port in DBSYNC_TO, and that the server listens there.", True),
    2006: (_COMES_AGAIN, True),
    2013: (_COMES_AGAIN, True),
}
