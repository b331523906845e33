"""What a table looks like at one point of the log, and how a row of it becomes a document.

pgoutput describes a table before its first change and again whenever it changed; `Catalog` adds what that description
leaves out (what a type outside the built-in ones is made of, the primary key of a table that sends whole old rows,
whether the key is whole). A `Relation` is plain data, so it can be sent to an executor together with the rows it
describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, Protocol

import psycopg

from dbsync import values
from dbsync.errors import StreamError
from dbsync.pgoutput import UNCHANGED
from dbsync.pgoutput import Relation as RelationMessage

# Types below this oid are the same in every database; `values` knows them without asking. (Some of PostgreSQL's own are
# not: the domains of information_schema, the arrays of catalog rows.)
FIRST_GENBKI_OID = 10000


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_oid: int
    type_modifier: int
    spec: values.Spec


@dataclass(frozen=True, slots=True)
class Relation:
    """A published table: its name, its columns as the log carries them, and which of them are its key."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    key: tuple[int, ...]  # positions in `columns`, in the order of the columns
    may_lack_key: bool = field(default=False, compare=False)  # whether a change may come without a part of its key

    @property
    def doctype(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(self.columns[position].name for position in self.key)

    @property
    def is_immutable(self) -> bool:
        """Whether no value of a row can be changed where it is, as a list or a parsed JSON document can."""
        return all(isinstance(column.spec, str) and column.spec != "json" for column in self.columns)

    @property
    def has_full_identity(self) -> bool:
        return self.replica_identity == "f"


class Row(dict[str, Any]):
    """A row's values by column; `missing` names the columns whose value the log did not carry.

    A copy knows what is missing too, so a document that is a row, or a row with something added, is completed.
    `unopened` is the frame the row came in, for as long as the row is just what stands there.
    """

    __slots__ = ("missing", "unopened")

    def __init__(self, *args: Any, missing: frozenset[str] = frozenset(), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.missing = missing
        self.unopened: memoryview | None = None

    @classmethod
    def whole(cls, items: Iterable[tuple[str, Any]], unopened: memoryview | None) -> Row:
        """A row that lacks nothing. Made by the million, and so without a call of `__init__`."""
        row = cls.__new__(cls)
        dict.update(row, items)
        row.missing = _NOTHING
        row.unopened = unopened
        return row

    def copy(self) -> Row:
        return Row(self, missing=self.missing)

    def __or__(self, other: Any) -> Any:
        return Row({**self, **other}, missing=self.missing - set(other)) if isinstance(other, dict) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return (_row, (dict(self), self.missing))


_NOTHING: frozenset[str] = frozenset()


def _changing(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    @wraps(change)
    def method(self: Row, *args: Any, **kwargs: Any) -> Any:
        self.unopened = None
        return change(self, *args, **kwargs)

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Row, _name, _changing(_name))


def _row(content: dict[str, Any], missing: frozenset[str]) -> Row:
    return Row(content, missing=missing)


class RowDecoder:
    """Turns the split tuple of one relation into Python values. Compiled once, used for every row."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        self._columns: list[tuple[str, Callable[[str], Any]]] = [
            (column.name, values.compile(column.spec)) for column in relation.columns
        ]

    def document(self, raw: Sequence[Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The values that are there, and the names of the columns that are not."""
        doc: dict[str, Any] = {}
        missing: tuple[str, ...] = ()
        for (name, convert), value in zip(self._columns, raw, strict=True):
            if value is None:
                doc[name] = None
            elif value is UNCHANGED:
                missing += (name,)
            else:
                doc[name] = convert(str(value, "utf-8"))
        return doc, missing

    def key(self, raw: Sequence[Any]) -> dict[str, Any]:
        """The key's values, as far as they are there."""
        told: dict[str, Any] = {}
        for position in self.relation.key:
            (name, convert), value = self._columns[position], raw[position]
            if value is not UNCHANGED:
                told[name] = None if value is None else convert(str(value, "utf-8"))
        return told


class LineDecoder:
    """Turns a line of COPY's text format into Python values; `columns` names what is in the line, in its order."""

    def __init__(self, relation: Relation, columns: Sequence[str]) -> None:
        specs = {column.name: column.spec for column in relation.columns}
        self._columns = [(name, values.compile(specs[name])) for name in columns]

    def document(self, line: bytes) -> dict[str, Any]:
        texts = str(line, "utf-8").split("\t")
        return {
            name: None if text == "\\N" else convert(text if "\\" not in text else unescape(text))
            for (name, convert), text in zip(self._columns, texts, strict=True)
        }


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def unescape(text: str) -> str:
    """A value of COPY's text format as PostgreSQL's plain text."""
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text)


def identifier(texts: Sequence[str]) -> str:
    """The id of a row from the texts of its key: the text itself, or a JSON array where the key has several columns."""
    return texts[0] if len(texts) == 1 else json.dumps(texts)


def row_id(relation: Relation, raw: Sequence[Any]) -> str | None:
    """The id of a row given as a split tuple; None where it does not tell its whole key."""
    key = [raw[position] for position in relation.key]
    if not key or None in key or UNCHANGED in key:
        return None
    return identifier([str(part, "utf-8") for part in key])


class Catalog:
    """Completes pgoutput's description of a table with what only the system catalog knows.

    The catalog is asked as it is now, the description is as of the log; only facts that do not change under the same
    oid are taken from it (what a type is made of), and the primary key where the log does not single it out. (When that
    key came to be cannot be told: reindexing makes a new index, and transactions may be older than a key they follow.)
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._types: dict[int, values.TypeInfo] = {}
        self._keys: dict[int, list[str]] = {}

    def relation(self, message: RelationMessage) -> Relation:
        self._learn_types(column.type_oid for column in message.columns)
        columns = tuple(
            Column(c.name, c.type_oid, c.type_modifier, values.decoder(c.type_oid, self._types))
            for c in message.columns
        )
        now = self._now(message)
        return Relation(
            message.oid,
            message.namespace,
            message.name,
            message.replica_identity,
            columns,
            self._key(message, now),
            # The columns of an ordinary table's identity are never NULL; a partition may have another than its root.
            message.replica_identity not in ("d", "i") or not any(column.is_plain for column in now),
        )

    def _now(self, message: RelationMessage) -> list[_ColumnNow]:
        """The columns of the table as they are by now; of one that was dropped, those of the table of its name."""
        with self._asking() as conn:
            # Column lists exist from PostgreSQL 15 on.
            query = _COLUMNS.format(listed=_LISTED if conn.info.server_version >= 150000 else "false")
            names = {
                "oid": message.oid,
                "identity": message.replica_identity,
                "schema": message.namespace,
                "table": message.name,
            }
            return [_ColumnNow(*row) for row in conn.execute(query, names)]

    def _key(self, message: RelationMessage, now: list[_ColumnNow]) -> tuple[int, ...]:
        names = [column.name for column in message.columns]
        # A table with full (or no) identity flags every column (or none): its primary key, if it has one, is its key.
        if message.replica_identity in ("d", "i"):
            if any(column.is_key and column.may_be_unpublished and column.name not in names for column in now):
                return ()  # several rows would look the same
            return tuple(position for position, column in enumerate(message.columns) if column.is_key)
        primary = [column.name for column in now if column.is_key]
        if any(column.is_same_table for column in now):
            self._keys[message.oid] = primary
        else:
            primary = self._keys.get(message.oid, primary)
        if not set(primary) <= set(names) and was_renamed(message.columns, now):
            names = [column.name for column in now[: len(names)]]
        return tuple(sorted(names.index(name) for name in primary)) if set(primary) <= set(names) else ()

    @contextmanager
    def _asking(self) -> Iterator[psycopg.Connection[Any]]:
        try:
            with self._connect() as conn:
                yield conn
        except psycopg.OperationalError as error:
            raise StreamError("The connection to PostgreSQL broke.") from error

    def _learn_types(self, oids: Iterable[int]) -> None:
        wanted = {oid for oid in oids if oid >= FIRST_GENBKI_OID} - self._types.keys()
        if not wanted:
            return
        with self._asking() as conn:
            while wanted:
                found = [values.TypeInfo(*row) for row in conn.execute(_TYPES, [list(wanted)]).fetchall()]
                # A type dropped since the log was written is not found; its values arrive as text.
                self._types |= {info.oid: info for info in found}
                parts = {oid for info in found for oid in (info.base, info.element)}
                wanted = {oid for oid in parts if oid >= FIRST_GENBKI_OID} - self._types.keys()


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def type_oid(self) -> int: ...


class _ColumnNow(NamedTuple):
    """A column of a table as it is by now."""

    name: str
    type_oid: int
    is_key: bool
    may_be_unpublished: bool
    is_same_table: bool
    is_plain: bool  # the same table, and not partitioned


def was_renamed(columns: Sequence[_Named], now: Sequence[_Named]) -> bool:
    """Whether the log's columns are the table's first ones of today, but for names that are no longer in use."""
    known = {column.name for column in now}
    return len(columns) <= len(now) and all(
        then.type_oid == column.type_oid and (then.name == column.name or then.name not in known)
        for then, column in zip(columns, now, strict=False)
    )


# A primary key that is DEFERRABLE, or not valid, does not keep two rows from having the same key for a while.
_COLUMNS = """
SELECT a.attname, a.atttypid::int8, coalesce(a.attnum = ANY ((i.indkey::int2[])[0 : i.indnkeyatts - 1]), false),
       a.attgenerated <> '' OR {listed}, rel.oid = %(oid)s, rel.oid = %(oid)s AND rel.relkind = 'r'
  FROM pg_catalog.pg_class rel
  JOIN pg_catalog.pg_namespace nsp ON nsp.oid = rel.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_catalog.pg_index i
    ON i.indrelid = rel.oid
   AND CASE %(identity)s WHEN 'i' THEN i.indisreplident ELSE i.indisprimary AND i.indimmediate AND i.indisvalid END
 WHERE rel.oid = %(oid)s
    OR nspname = %(schema)s AND relname = %(table)s
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_class known WHERE known.oid = %(oid)s)
 ORDER BY a.attnum
"""

_LISTED = """EXISTS (
           SELECT FROM pg_catalog.pg_publication_rel
            WHERE prrelid = rel.oid AND prattrs IS NOT NULL AND a.attnum <> ALL (prattrs::int2[]))"""

_TYPES = """
SELECT oid::int8, typname, typtype::text, typbasetype::int8,
       CASE WHEN typcategory = 'A' THEN typelem::int8 ELSE 0 END, typdelim::text
  FROM pg_catalog.pg_type WHERE oid = ANY (%s::oid[])
"""
