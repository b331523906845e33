"""A DuckDB file that is kept in step, exactly once.

A batch is one DuckDB transaction from `begin` to `commit`, and the position in the log is stored in it. So the file
holds all of a batch or nothing, a start resumes where the file is, and a batch that comes again changes nothing.

The type `schema.table` is the table of that name in the schema of that name; a type without a dot is a table in `main`.
The document's id is the primary key `_id`, the columns follow the source's types. A column starts with a type that
suits what PostgreSQL declares, and becomes VARCHAR, with what it holds, when a value comes that has no place there (NaN
in a numeric, a timestamp past the year 294246): nothing is rounded, nothing is dropped. numeric without a precision,
json, arrays and all that DuckDB has no type for are VARCHAR from the start; json and arrays hold JSON text.

A column added in the source is added with the first document that has it. One dropped in the source stays, and is NULL
in documents that come later, or goes with `drop_columns`. One that gets another type there stays as it is where it has
room for that, and follows where all it holds is the same in that type; what becomes text becomes what PostgreSQL
writes. Any other change stops dbsync with a sentence that names the column.

With `soft_delete` a deleted row stays, with the time in `_deleted_at`; a truncate marks them all.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

import pyarrow as pa

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.columns import decimal_of, only_case_differs, refuse_ours
from dbsync.batcher.jsontext import dumps
from dbsync.batcher.pgtext import text
from dbsync.batcher.samefile import SameFile
from dbsync.batcher.urls import missing_extra
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.relation import Column

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from dbsync.batcher.urls import TargetOptions

logger = logging.getLogger(__name__)

_VARCHAR = "VARCHAR"
_ZONED = "TIMESTAMP WITH TIME ZONE"
_DELETED_AT = "_deleted_at"

_ARROW: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "UINTEGER": pa.uint32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", "UTC"),
}

# DuckDB reads these from text without rounding, and knows more of them than Python: infinity, BC, 24:00:00, months.
_READ_FROM_TEXT = frozenset({"DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "INTERVAL", "UUID"})

_BY_OID = {21: "SMALLINT", 23: "INTEGER", 26: "UINTEGER", 700: "FLOAT", 1266: _VARCHAR}  # 1266: timetz

_BY_SPEC = {
    "bool": "BOOLEAN",
    "int": "BIGINT",
    "float": "DOUBLE",
    "bytea": "BLOB",
    "date": "DATE",
    "time": "TIME",
    "timestamp": "TIMESTAMP",
    "timestamptz": "TIMESTAMP WITH TIME ZONE",
    "interval": "INTERVAL",
    "uuid": "UUID",
}

_BY_CLASS: dict[type, str] = {
    bool: "BOOLEAN",
    int: "BIGINT",
    float: "DOUBLE",
    bytes: "BLOB",
    date: "DATE",
    time: "TIME",
    timedelta: "INTERVAL",
    UUID: "UUID",
}


_BITS = {"SMALLINT": 15, "INTEGER": 31, "UINTEGER": 32, "BIGINT": 63}
_INTEGER_DIGITS = {"SMALLINT": 5, "INTEGER": 10, "UINTEGER": 10, "BIGINT": 19}

_MAY_WRITE = "Check that it and its folder may be written, by the user dbsync runs as."

# By what DuckDB says: what to do, and whether it may pass with time.
_CAUSES: tuple[tuple[str, str, bool], ...] = (
    ("Could not set lock", "One process at a time can write to it: close it elsewhere.", True),
    ("not a valid DuckDB", "Name another file, or put this one away.", False),
    ("version number", "Another DuckDB made it: install that one, or put the file away.", False),
    (" depend", "Drop what depends on the table, and make it again afterwards.", False),
    ("Corrupt", "Put it away, and copy into a new one.", False),
    (os.strerror(errno.ENOENT), "Check that its folder is there.", True),
    (os.strerror(errno.EISDIR), "Name a file.", False),
    (os.strerror(errno.EACCES), _MAY_WRITE, False),
    (os.strerror(errno.EROFS), _MAY_WRITE, False),
    (os.strerror(errno.ENOSPC), "Make room on the disk.", True),
)


@dataclass(slots=True)
class _Table:
    """A table of the target: its quoted name and its columns' types, without the id."""

    sql: str
    columns: dict[str, str]


Method = TypeVar("Method", bound=Callable[..., Any])


def _told(method: Method) -> Method:
    """What DuckDB refuses is said in a sentence; a full disk, above all, may pass."""

    @wraps(method)
    def call(self: DuckDBBatcher, *args: Any) -> Any:
        try:
            return method(self, *args)
        except self._duckdb.Error as error:
            # After some errors DuckDB wants the file opened anew; nothing of the batch is in it.
            self._let_go()
            raise self._failed("read" if method.__name__ == "position" else "written", error) from error

    return cast("Method", call)


class DuckDBBatcher(Batcher):
    """Keeps the DuckDB file at `path` in step; it is made if it is not there. `close` lets go of it."""

    def __init__(
        self, path: str | Path, *, id_column: str = "_id", soft_delete: bool = False, drop_columns: bool = False
    ) -> None:
        self._duckdb = _duckdb()
        self._path = Path(path)
        if str(path).startswith(":memory:"):
            raise ConfigError(
                "DuckDB's :memory: is gone when dbsync ends, and the log does not come again.",
                "Name a file: duckdb:///FILE.",
            )
        self._file = SameFile(self._path)
        self._id = id_column
        self._soft_delete = soft_delete
        self._drop_columns = drop_columns
        self._lock = threading.Lock()
        self._connection: DuckDBPyConnection | None = None
        self._work: DuckDBPyConnection | None = None
        self._tables: dict[str, _Table] = {}
        self._declared: Mapping[str, dict[str, Column]] = {}

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> DuckDBBatcher:
        path = url.removeprefix("duckdb:///")
        if path in (url, ""):
            raise ConfigError("A DuckDB target is written duckdb:///FILE, with three slashes before a relative path.")
        return cls(path, soft_delete=options.soft_delete, drop_columns=options.drop_columns)

    def cursor(self) -> DuckDBPyConnection:
        """A connection of its own to the file, for any thread: it sees whole batches only. The caller closes it."""
        with self._lock:
            if self._connection is None:
                self._file.check()
                self._connection = self._open()
                self._file.opened()
            cursor = self._connection.cursor()
        # Text that becomes a timestamp, and the other way round, is UTC on every machine.
        cursor.execute("SET TimeZone = 'UTC'")
        return cursor

    def close(self) -> None:
        """Throw away an unfinished batch and close the file; the next call opens it again, or makes it."""
        self._let_go()
        self._file.forget()

    def _let_go(self) -> None:
        """Of the file, for one that is opened again has to be the same."""
        self._rollback()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @_told
    def position(self) -> LSN | None:
        with self.cursor() as cursor:
            return _stored_position(cursor, self.log_name)

    @_told
    def begin(self, batch: BatchInfo) -> None:
        self._rollback()
        self._check_file()
        self._declared = {
            doctype: {column.name: column for column in relation.columns}
            for doctype, relation in batch.relations.items()
        }
        self._work = self.cursor()
        self._work.begin()

    @_told
    def commit(self, batch: BatchInfo) -> None:
        work = self._transaction
        last = max(batch.last_lsn, _stored_position(work, self.log_name) or LSN(0))
        _store_position(work, self.log_name, last)
        self._check_file()
        work.commit()
        work.close()
        self._work = None

    @_told
    def batch_truncate(self, doctype: str) -> None:
        table = self._table(doctype)
        if table is None:
            return
        if self._soft_delete:
            self._transaction.execute(self._mark_deleted(table, doctype))
        else:
            self._transaction.execute(f"TRUNCATE {table.sql}")

    @_told
    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        table = self._table(doctype)
        if table is None:
            return
        id = _quoted(self._id)
        among = f"{id} IN (SELECT {id} FROM dbsync_rows)"
        self._with_rows(
            pa.table({self._id: pa.array(ids, pa.string())}),
            f"{self._mark_deleted(table, doctype)} AND {among}"
            if self._soft_delete
            else f"DELETE FROM {table.sql} WHERE {among}",
        )

    @_told
    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        names = dict.fromkeys(itertools.chain.from_iterable(docs.values()))
        refuse_ours(doctype, names, {self._id.lower(), *([_DELETED_AT] if self._soft_delete else [])})
        table = self._table(doctype) or self._create(doctype)
        if self._soft_delete:
            self._add_deleted_at(table, doctype)
        if self._drop_columns and doctype in self._declared:
            self._drop(table, table.columns.keys() - names.keys() - self._declared[doctype].keys() - {_DELETED_AT})
        arrays = {self._id: pa.array(list(docs), pa.string())}
        for name in names:
            values = [doc.get(name) for doc in docs.values()]
            if self._have_column(table, doctype, name, values):
                arrays[name] = self._fitted(table, doctype, name, values)
        # A document replaces the one before it: what it does not have, the row has no longer.
        given = [
            f"CAST({_quoted(name)} AS {type})" if name in arrays else f"NULL::{type}"
            for name, type in table.columns.items()
        ]
        into = [_quoted(self._id), *map(_quoted, table.columns)]
        # MERGE takes half to twice as long, longer the more rows come: 100 to 50,000 rows, tables of 10,000 and
        # 500,000. DELETE and INSERT take twelve to fifty times as long on rows that are there.
        self._with_rows(
            pa.table(arrays),
            f"INSERT OR REPLACE INTO {table.sql} ({', '.join(into)})"
            f" SELECT {', '.join([_quoted(self._id), *given])} FROM dbsync_rows",
        )

    @property
    def _transaction(self) -> DuckDBPyConnection:
        if self._work is None:
            raise BatcherError("DuckDBBatcher was called outside a batch.", "Call begin first.", retryable=False)
        return self._work

    def _open(self) -> DuckDBPyConnection:
        try:
            connection: DuckDBPyConnection = self._duckdb.connect(str(self._path))
            return connection
        except self._duckdb.Error as error:
            raise self._failed("opened", error) from error

    def _check_file(self) -> None:
        """DuckDB itself does not notice that its file is no longer where it was."""
        try:
            self._file.check()
        except BatcherError:
            self._let_go()
            raise

    def _failed(self, what: str, error: Exception) -> BatcherError:
        told = str(error).partition("\n")[0].removeprefix("IO Error: ")
        words = told.partition(" See also ")[0].rstrip(".!")
        hint, retryable = self._cause(error, words)
        return BatcherError(f"The DuckDB file {self._path} cannot be {what}: {words}.", hint, retryable=retryable)

    def _cause(self, error: Exception, words: str) -> tuple[str | None, bool]:
        duckdb = self._duckdb
        if isinstance(error, duckdb.DataError | duckdb.IntegrityError):
            return None, False
        # DuckDB has no numbers for what went wrong; what the system said ends with the system's words.
        for sign, hint, retryable in _CAUSES:
            if sign in words:
                return hint, retryable
        if isinstance(error, duckdb.ProgrammingError):
            return None, False
        return "See that its disk has room, and is well.", True

    def _rollback(self) -> None:
        # Closing takes back what is not committed, whatever state a failed statement left the transaction in.
        work, self._work = self._work, None
        self._tables = {}
        if work is not None:
            work.close()

    def _table(self, doctype: str) -> _Table | None:
        """The table as it is now, or None when there is none yet."""
        if doctype not in self._tables:
            schema, name = _names(doctype)
            found = self._transaction.execute(_COLUMNS, [schema, name]).fetchall()
            if not found:
                return None
            for stored_schema, stored_name, *_ in found:
                if (stored_schema, stored_name) != (schema, name):
                    raise only_case_differs("DuckDB", "tables", f"{stored_schema}.{stored_name}", doctype)
            columns = {column: type for *_, column, type in found if column != self._id}
            self._tables[doctype] = _Table(self._qualified(schema, name), columns)
        return self._tables[doctype]

    def _create(self, doctype: str) -> _Table:
        schema, name = _names(doctype)
        table = _Table(self._qualified(schema, name), {})
        self._transaction.execute(f"CREATE SCHEMA IF NOT EXISTS {self._qualified(schema)}")
        self._transaction.execute(f"CREATE TABLE {table.sql} ({_quoted(self._id)} VARCHAR PRIMARY KEY)")
        self._tables[doctype] = table
        return table

    def _qualified(self, *names: str) -> str:
        # With the database's name in front: a schema may bear the same name as the file.
        ((database,),) = self._transaction.execute("SELECT current_database()").fetchall()
        return ".".join(_quoted(name) for name in (database, *names))

    def _have_column(self, table: _Table, doctype: str, name: str, values: list[Any]) -> bool:
        """Add the column, or change its type, as the source declares it; False while nothing tells what type it has."""
        declared = self._declared.get(doctype, {}).get(name)
        wanted = _type_for(declared) if declared else _type_of(values)
        has = table.columns.get(name)
        if has is None:
            if wanted is not None:
                self._add_column(table, doctype, name, wanted)
            return wanted is not None
        if declared and wanted and not _holds(has, wanted):
            self._follow(table, doctype, name, wanted)
        return True

    def _follow(self, table: _Table, doctype: str, name: str, type: str) -> None:
        """The source has given the column another type, which the one here has no room for."""
        has = table.columns[name]
        if not _holds(type, has) and not self._survives(table, name, type):
            raise BatcherError(
                f"The column {name} of {doctype} is {has} in the target, and what the source has by now, {type}, cannot"
                " be put in its place without loss.",
                "Alter the column in the target by hand, or drop it there: it is made anew, and a refresh fills it.",
                retryable=False,
            )
        self._change_type(table, name, type)

    def _add_column(self, table: _Table, doctype: str, name: str, type: str) -> None:
        for taken in (self._id, *table.columns):
            if taken.lower() == name.lower():
                raise only_case_differs("DuckDB", f"columns of {doctype}", taken, name)
        self._transaction.execute(f"ALTER TABLE {table.sql} ADD COLUMN {_quoted(name)} {type}")
        table.columns[name] = type

    def _mark_deleted(self, table: _Table, doctype: str) -> str:
        """The statement that does, for rows that are not deleted yet; more conditions may follow."""
        self._add_deleted_at(table, doctype)
        return f"UPDATE {table.sql} SET {_DELETED_AT} = now() WHERE {_DELETED_AT} IS NULL"

    def _add_deleted_at(self, table: _Table, doctype: str) -> None:
        if _DELETED_AT not in table.columns:
            self._add_column(table, doctype, _DELETED_AT, _ZONED)

    def _drop(self, table: _Table, names: Iterable[str]) -> None:
        for name in names:
            logger.info("%s: column %s is dropped.", table.sql, name)
            self._transaction.execute(f"ALTER TABLE {table.sql} DROP COLUMN {_quoted(name)}")
            del table.columns[name]

    def _survives(self, table: _Table, name: str, type: str) -> bool:
        """Whether all values of the column can be had back from the other type."""
        column, has = _quoted(name), table.columns[name]
        back = f"TRY_CAST(TRY_CAST({column} AS {type}) AS {has})"
        lost = f"SELECT 1 FROM {table.sql} WHERE {column} IS DISTINCT FROM {back} LIMIT 1"
        return not self._transaction.execute(lost).fetchall()

    def _change_type(self, table: _Table, name: str, type: str) -> None:
        has, column = table.columns[name], _quoted(name)
        logger.info("%s: column %s changes from %s to %s.", table.sql, name, has, type)
        held = _as_postgres_text(has, column) if type == _VARCHAR else f"CAST({column} AS {type})"
        self._transaction.execute(f"ALTER TABLE {table.sql} ALTER COLUMN {column} TYPE {type} USING {held}")
        table.columns[name] = type

    def _fitted(self, table: _Table, doctype: str, name: str, values: list[Any]) -> pa.Array:
        """The values as Arrow that can be cast to the column's type; the column is widened if it has to be."""
        declared = self._declared.get(doctype, {}).get(name)
        if declared and declared.spec == "json":
            return _as_text(values, dumps)
        type = table.columns[name]
        if type == _VARCHAR:
            return _as_text(values, text)
        if (array := _as_arrow(values, type)) is not None:
            return array
        if type in _READ_FROM_TEXT:
            array = _as_text(values, _duckdb_text)
            if self._can_be_read(array, type):
                return array
        self._change_type(table, name, _VARCHAR)
        return _as_text(values, text)

    def _can_be_read(self, texts: pa.Array, type: str) -> bool:
        unreadable = f"SELECT 1 FROM dbsync_rows WHERE text IS NOT NULL AND TRY_CAST(text AS {type}) IS NULL LIMIT 1"
        return not self._with_rows(pa.table({"text": texts}), unreadable)

    def _with_rows(self, rows: pa.Table, statement: str) -> list[Any]:
        """Run a statement that reads `rows` as dbsync_rows."""
        work = self._transaction
        work.register("dbsync_rows", rows)
        try:
            # To the end: a result that is not read out keeps the connection busy.
            return work.execute(statement).fetchall()
        finally:
            work.unregister("dbsync_rows")


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise missing_extra("A DuckDB file", "duckdb", "duckdb") from error
    return duckdb


def _stored_position(cursor: DuckDBPyConnection, log_name: str) -> LSN | None:
    there = {
        column
        for (column,) in cursor.execute(
            "SELECT column_name FROM duckdb_columns() WHERE database_name = current_database()"
            " AND schema_name = '_dbsync' AND table_name = 'position'"
        ).fetchall()
    }
    if not there:
        return None
    if "log" not in there:
        found = cursor.execute("SELECT lsn FROM _dbsync.position").fetchall()
    else:
        mine_first = "SELECT lsn FROM _dbsync.position WHERE log = ? OR log IS NULL ORDER BY log NULLS LAST"
        found = cursor.execute(mine_first, [log_name]).fetchall()
    return LSN(found[0][0]) if found else None


def _store_position(cursor: DuckDBPyConnection, log_name: str, lsn: LSN) -> None:
    cursor.execute("CREATE SCHEMA IF NOT EXISTS _dbsync")
    cursor.execute("CREATE TABLE IF NOT EXISTS _dbsync.position (log VARCHAR, lsn VARCHAR NOT NULL)")
    # A file from before positions had a log's name holds one, of the only log there was: whoever goes on with it.
    cursor.execute("ALTER TABLE _dbsync.position ADD COLUMN IF NOT EXISTS log VARCHAR")
    cursor.execute("DELETE FROM _dbsync.position WHERE log = ? OR log IS NULL", [log_name])
    cursor.execute("INSERT INTO _dbsync.position (log, lsn) VALUES (?, ?)", [log_name, str(lsn)])


def _names(doctype: str) -> tuple[str, str]:
    schema, dot, table = doctype.partition(".")
    return (schema, table) if dot else ("main", doctype)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type_for(column: Column) -> str:
    """The DuckDB type for a column of the source."""
    if column.spec == "numeric":
        precision_scale = decimal_of(column)
        return f"DECIMAL({precision_scale[0]},{precision_scale[1]})" if precision_scale else _VARCHAR
    by_spec = _BY_SPEC.get(column.spec, _VARCHAR) if isinstance(column.spec, str) else _VARCHAR
    return _BY_OID.get(column.type_oid, by_spec)


def _type_of(values: Iterable[Any]) -> str | None:
    """The DuckDB type for values nobody declared; None when all of them are None."""
    classes = {value.__class__ for value in values if value is not None}
    if classes == {datetime}:
        zones = {value.tzinfo is None for value in values if value is not None}
        return {frozenset({True}): "TIMESTAMP", frozenset({False}): "TIMESTAMP WITH TIME ZONE"}.get(
            frozenset(zones), _VARCHAR
        )
    if len(classes) == 1:
        return _BY_CLASS.get(classes.pop(), _VARCHAR)
    return _VARCHAR if classes else None


def _holds(wider: str, type: str) -> bool:
    """Whether every value of the one type is, unchanged, one of the other."""
    if wider in (type, _VARCHAR):
        return True
    if wider in _BITS and type in _BITS:
        return _BITS[wider] > _BITS[type] and wider != "UINTEGER"
    if decimal := _decimal(wider):
        whole, scale = _digits(type)
        return whole is not None and whole <= decimal[0] - decimal[1] and scale <= decimal[1]
    return (wider, type) == ("DOUBLE", "FLOAT")


def _digits(type: str) -> tuple[int | None, int]:
    """The most digits before and behind the point that a number of the type may have."""
    if decimal := _decimal(type):
        return decimal[0] - decimal[1], decimal[1]
    return _INTEGER_DIGITS.get(type), 0


def _decimal(type: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"DECIMAL\((\d+),(\d+)\)", type)
    return (int(found[1]), int(found[2])) if found else None


def _as_postgres_text(has: str, column: str) -> str:
    """The expression for what a column held before it became text: what would have come had it been text then."""
    match has:
        case "BLOB":
            return f"'\\x' || lower(hex({column}))"
        case "FLOAT" | "DOUBLE":
            infinity = f"CASE WHEN {column} > 0 THEN 'Infinity' ELSE '-Infinity' END"
            return (
                f"CASE WHEN isnan({column}) THEN 'NaN' WHEN isinf({column}) THEN {infinity}"
                f" ELSE CAST({column} AS VARCHAR) END"
            )
        case "DATE" | "TIMESTAMP" | "TIMESTAMP WITH TIME ZONE":
            return f"regexp_replace(CAST({column} AS VARCHAR), '^(\\S+) \\(BC\\)(.*)$', '\\1\\2 BC')"
        case "INTERVAL":
            return f"replace(CAST({column} AS VARCHAR), 'month', 'mon')"
    return f"CAST({column} AS VARCHAR)"


def _as_arrow(values: list[Any], type: str) -> pa.Array | None:
    """None when DuckDB's type has no Arrow type to go by, or a value does not fit it."""
    decimal = _decimal(type)
    arrow = pa.decimal128(*decimal) if decimal else _ARROW.get(type)
    if arrow is None:
        return None
    try:
        return pa.array(values, arrow)
    except (pa.ArrowException, OverflowError):
        return None


def _as_text(values: list[Any], form: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else form(value) for value in values], pa.string())


def _duckdb_text(value: Any) -> str:
    """The same in a form DuckDB reads: it writes BC after the date, and no plus sign in an interval."""
    if not isinstance(value, str):
        return text(value)
    if value.endswith(" BC"):
        return re.sub(r"^(\S+)(.*) BC$", r"\1 (BC)\2", value)
    return value.replace(" +", " ")


_COLUMNS = """
SELECT schema_name, table_name, column_name, data_type
  FROM duckdb_columns()
 WHERE database_name = current_database() AND lower(schema_name) = lower(?) AND lower(table_name) = lower(?)
 ORDER BY column_index
"""
