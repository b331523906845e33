"""The types of SQLite and of MySQL as targets: which one a column gets, what has a place in it, how a value is written.

Nothing is rounded or cut: where a database has no type that holds all a column of the source may hold, the column is
text, or becomes text when the first value comes that does not fit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from sqlalchemy import types
from sqlalchemy.dialects import mysql

from dbsync import values
from dbsync.batcher import jsontext, pgtext
from dbsync.relation import Column

INT2, INT4, TIME_OID, NUMERIC = 21, 23, 1083, 1700

UTC_COMMENT = "UTC"
"""What tells a timestamptz from a timestamp in MySQL, which has one type for both."""


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type of the target: what it is called here, its length or precision, its scale."""

    kind: str
    size: int = 0
    scale: int = 0

    def __str__(self) -> str:
        sizes = [str(number) for number in (self.size, self.scale) if number]
        return f"{self.kind}({', '.join(sizes)})" if sizes else self.kind


TEXT, BLOB, BOOLEAN, DOUBLE = SqlType("text"), SqlType("blob"), SqlType("boolean"), SqlType("double")
SMALLINT, INTEGER, BIGINT = SqlType("smallint"), SqlType("integer"), SqlType("bigint")
DATE, TIME, DATETIME, DATETIME_UTC = SqlType("date"), SqlType("time"), SqlType("datetime"), SqlType("datetime in UTC")

_BITS = {SMALLINT: 15, INTEGER: 31, BIGINT: 63}
_DIGITS = {SMALLINT: 5, INTEGER: 10, BIGINT: 19}


class SqlTypes(ABC):
    """What one kind of database makes of the source's types."""

    timestamp: SqlType

    @abstractmethod
    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, SqlType]:
        """The types for columns of the source."""

    @abstractmethod
    def type_of(self, items: Iterable[Any]) -> SqlType | None:
        """The type for values nobody declared; None where all of them are None."""

    @abstractmethod
    def text(self, *, in_key: bool) -> SqlType: ...

    @abstractmethod
    def fits(self, type: SqlType, items: Sequence[Any]) -> bool:
        """Whether the values have a place in a column of the type."""

    @abstractmethod
    def written(self, type: SqlType, spec: values.Spec | None, items: Sequence[Any]) -> Sequence[Any]:
        """The values as the driver takes them."""

    @abstractmethod
    def rendered(self, type: SqlType) -> types.TypeEngine[Any]: ...

    @abstractmethod
    def reflected(self, type: types.TypeEngine[Any], comment: str | None) -> SqlType:
        """What a type found in the database is called here."""

    def holds(self, wider: SqlType, type: SqlType) -> bool:
        """Whether every value of the one type has a place in the other."""
        if wider in (type, TEXT) or (wider.kind == "varchar" and type not in (TEXT, BLOB) and type.kind != "varchar"):
            return True
        if wider.kind == type.kind:
            return wider.size - wider.scale >= type.size - type.scale and wider.scale >= type.scale
        if wider in _BITS and type in _BITS:
            return _BITS[wider] > _BITS[type]
        if wider.kind == "decimal":
            return type in _DIGITS and wider.size - wider.scale >= _DIGITS[type]
        return (wider, type) == (DATETIME, DATE) or (wider, type.kind) == (BLOB, "varbinary")


class SqliteTypes(SqlTypes):
    """Integers, floats, booleans and bytes; everything else is text, as PostgreSQL writes it, times in UTC."""

    timestamp = TEXT

    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, SqlType]:
        return {column.name: self._declared(column) for column in columns}

    def _declared(self, column: Column) -> SqlType:
        return _SQLITE.get(column.spec, TEXT) if isinstance(column.spec, str) else TEXT

    def type_of(self, items: Iterable[Any]) -> SqlType | None:
        found = _type_of(items)
        return found if found in (None, BIGINT, DOUBLE, BOOLEAN, BLOB) else TEXT

    def text(self, *, in_key: bool) -> SqlType:
        return TEXT

    def fits(self, type: SqlType, items: Sequence[Any]) -> bool:
        # A column of floats holds what is no number as text, beside the numbers.
        return _fits(type, items)

    def written(self, type: SqlType, spec: values.Spec | None, items: Sequence[Any]) -> Sequence[Any]:
        if type == TEXT:
            return _each(_texts(spec), items)
        # SQLite takes a NaN for NULL.
        return _each(_sqlite_float, items) if type == DOUBLE else items

    def rendered(self, type: SqlType) -> types.TypeEngine[Any]:
        return _SQLITE_RENDERED[type]

    def reflected(self, type: types.TypeEngine[Any], comment: str | None) -> SqlType:
        match type:
            case types.Boolean():
                return BOOLEAN
            case types.Integer():
                return BIGINT
            case types.Float():
                return DOUBLE
            case types.LargeBinary():
                return BLOB
            case types.String():
                return TEXT
        return SqlType(str(type).lower())


class MysqlTypes(SqlTypes):
    """MySQL's and MariaDB's own types where they hold all but odd values. Text in a key has a length that fits one."""

    timestamp = DATETIME_UTC

    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, SqlType]:
        found = {column.name: _mysql(column) for column in columns}
        long = [name for name in key if found[name] in (TEXT, BLOB)]
        if long:
            room = (_KEY_BYTES - _WIDEST_SCALAR_BYTES * (len(key) - len(long))) // len(long)
            for name in long:
                is_text = found[name] == TEXT
                found[name] = SqlType("varchar", room // _UTF8_BYTES) if is_text else SqlType("varbinary", room)
        return found

    def type_of(self, items: Iterable[Any]) -> SqlType | None:
        return _type_of(items)

    def text(self, *, in_key: bool) -> SqlType:
        return SqlType("varchar", _KEY_BYTES // _UTF8_BYTES) if in_key else TEXT

    def fits(self, type: SqlType, items: Sequence[Any]) -> bool:
        if not _fits(type, items):
            return False
        if type == DOUBLE:
            return all(item is None or math.isfinite(item) for item in items)
        if type.kind == "decimal":
            return all(item is None or item.is_finite() for item in items)
        if type in (DATE, DATETIME, DATETIME_UTC):
            return all(item is None or item.year >= _FIRST_YEAR for item in items)
        return True

    def written(self, type: SqlType, spec: values.Spec | None, items: Sequence[Any]) -> Sequence[Any]:
        if type == TEXT or type.kind == "varchar":
            return _each(_texts(spec), items)
        if type == DATETIME_UTC:
            return _each(lambda at: at.astimezone(UTC).replace(tzinfo=None), items)
        return items

    def rendered(self, type: SqlType) -> types.TypeEngine[Any]:
        match type.kind:
            case "varchar":
                return mysql.VARCHAR(type.size)
            case "varbinary":
                return mysql.VARBINARY(type.size)
            case "decimal":
                return mysql.DECIMAL(type.size, type.scale)
        return _MYSQL_RENDERED[type]

    def reflected(self, type: types.TypeEngine[Any], comment: str | None) -> SqlType:
        match type:
            case mysql.DATETIME(fsp=6):
                return DATETIME_UTC if comment == UTC_COMMENT else DATETIME
            case mysql.TIME(fsp=6):
                return TIME
            case mysql.TINYINT(display_width=1):
                return BOOLEAN
            case mysql.VARCHAR(length=int(length)):
                return SqlType("varchar", length)
            case types.VARBINARY(length=int(length)):
                return SqlType("varbinary", length)
            case mysql.DECIMAL(precision=int(precision), scale=int(scale), unsigned=False):
                return SqlType("decimal", precision, scale)
        if getattr(type, "unsigned", False):
            return SqlType(f"unsigned {type.__class__.__name__.lower()}")
        return _MYSQL_REFLECTED.get(type.__class__, SqlType(type.__class__.__name__.lower()))


def as_text(has: SqlType, column: str) -> str:
    """The expression for what a column held before it became text, as it would have been written had it been text then.

    `column` is its quoted name. MySQL gives six digits after the point, and the point, whatever they are.
    """
    if has == BOOLEAN:
        return f"CASE {column} WHEN '1' THEN 'true' WHEN '0' THEN 'false' ELSE {column} END"
    if has in (TIME, DATETIME, DATETIME_UTC):
        short = f"TRIM(TRAILING '.' FROM TRIM(TRAILING '0' FROM {column}))"
        return f"CONCAT({short}, '+00')" if has == DATETIME_UTC else short
    return column


def _fits(type: SqlType, items: Sequence[Any]) -> bool:
    if type == TEXT or type.kind == "varchar":
        return True
    wanted = _CLASSES.get(type) or _CLASSES.get(SqlType(type.kind))
    found = {item.__class__ for item in items if item is not None}
    if wanted is None or not found <= {wanted}:
        return wanted is None
    if type in _BITS:
        most = 2 ** _BITS[type]
        return all(item is None or -most <= item < most for item in items)
    return True


def _type_of(items: Iterable[Any]) -> SqlType | None:
    found = {_type_of_value(item) for item in items if item is not None}
    return TEXT if len(found) > 1 else (found.pop() if found else None)


def _type_of_value(value: Any) -> SqlType:
    match value:
        case bool():
            return BOOLEAN
        case int():
            return BIGINT if -(2**63) <= value < 2**63 else TEXT
        case datetime():
            return DATETIME_UTC if value.tzinfo else DATETIME
        case time():
            return TEXT if value.tzinfo else TIME
    return _BY_CLASS.get(value.__class__, TEXT)


def _mysql(column: Column) -> SqlType:
    if column.spec == "numeric":
        return _decimal(column.type_modifier) if column.type_oid == NUMERIC else TEXT
    if column.type_oid in _MYSQL_BY_OID:
        return _MYSQL_BY_OID[column.type_oid]
    # Of a domain over a time, nobody says here whether it has a zone.
    if column.spec == "time" and column.type_oid != TIME_OID:
        return TEXT
    return _MYSQL.get(column.spec, TEXT) if isinstance(column.spec, str) else TEXT


def _decimal(type_modifier: int) -> SqlType:
    """numeric's modifier is its precision in the upper and its scale, which has a sign, in the lower bits."""
    if type_modifier < 4:
        return TEXT
    precision, scale = (type_modifier - 4) >> 16, ((type_modifier - 4) & 0x7FF ^ 0x400) - 0x400
    fits = 0 <= scale <= min(precision, _LARGEST_SCALE) and precision <= _WIDEST_DECIMAL
    return SqlType("decimal", precision, scale) if fits else TEXT


def _texts(spec: values.Spec | None) -> Callable[[Any], str]:
    return jsontext.exact if spec == "json" else pgtext.text


def _each(write: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [None if item is None else write(item) for item in items]


def _sqlite_float(value: float) -> float | str:
    return "NaN" if math.isnan(value) else value


_FIRST_YEAR = 1000  # of MySQL's dates
_WIDEST_DECIMAL, _LARGEST_SCALE = 65, 30
_KEY_BYTES, _UTF8_BYTES, _WIDEST_SCALAR_BYTES = 3072, 4, 30  # what InnoDB takes as a key

_CLASSES: dict[SqlType, type] = {
    SMALLINT: int, INTEGER: int, BIGINT: int, DOUBLE: float, SqlType("decimal"): Decimal, BOOLEAN: bool, BLOB: bytes,
    SqlType("varbinary"): bytes, DATE: date, TIME: time, DATETIME: datetime, DATETIME_UTC: datetime,
}  # fmt: skip

_BY_CLASS: dict[type, SqlType] = {float: DOUBLE, bytes: BLOB, date: DATE}

_SQLITE = {"int": BIGINT, "float": DOUBLE, "bool": BOOLEAN, "bytea": BLOB}

_SQLITE_RENDERED: dict[SqlType, types.TypeEngine[Any]] = {
    TEXT: types.TEXT(), BIGINT: types.BIGINT(), DOUBLE: types.REAL(), BOOLEAN: types.BOOLEAN(), BLOB: types.BLOB(),
}  # fmt: skip

_MYSQL_BY_OID = {INT2: SMALLINT, INT4: INTEGER}

_MYSQL = {
    "int": BIGINT, "float": DOUBLE, "bool": BOOLEAN, "bytea": BLOB, "date": DATE, "time": TIME, "timestamp": DATETIME,
    "timestamptz": DATETIME_UTC,
}  # fmt: skip

_MYSQL_RENDERED: dict[SqlType, types.TypeEngine[Any]] = {
    TEXT: mysql.LONGTEXT(), BLOB: mysql.LONGBLOB(), BOOLEAN: mysql.BOOLEAN(), SMALLINT: mysql.SMALLINT(),
    INTEGER: mysql.INTEGER(), BIGINT: mysql.BIGINT(), DOUBLE: mysql.DOUBLE(), DATE: mysql.DATE(),
    TIME: mysql.TIME(fsp=6), DATETIME: mysql.DATETIME(fsp=6), DATETIME_UTC: mysql.DATETIME(fsp=6),
}  # fmt: skip

_MYSQL_REFLECTED: dict[type, SqlType] = {
    mysql.LONGTEXT: TEXT, mysql.LONGBLOB: BLOB, mysql.SMALLINT: SMALLINT, mysql.INTEGER: INTEGER,
    mysql.BIGINT: BIGINT, mysql.DOUBLE: DOUBLE, types.DATE: DATE,
}  # fmt: skip
