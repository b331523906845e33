"""Tables of a database, kept in step exactly once: what every such target has in common.

A batch is one transaction from `begin` to `commit`, and the position in the log is stored in it, in the table
`dbsync_position` under the name of the log. So the target holds all of a batch or nothing, a start resumes where the
target is, and a batch whose commit went through though its answer was lost is not written again.

A type that mirrors a table has that table's columns and primary key, with the target's types. A type of a handler's own
has the primary key `_id`, and a column for each name that comes up, of the type its values have; what does not fit
that later makes the column text. A document replaces the row: columns it lacks become NULL. Defaults, NOT NULL, unique
and foreign keys are not copied.

Tables follow the source. A column that is added there is added here with the next document. One that is dropped there
stays, and is NULL in rows written from then on; with `drop_columns` it is dropped. A column whose type grows grows; any
other change of type, and a new key that the rows do not fit, stops dbsync with a sentence that names the column.

`dbsync_tables` holds which tables dbsync made, and for which type. A table that it does not hold is used as it is, if
its key and its columns allow that, and is never altered.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dbsync import values
from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.errors import BatcherError
from dbsync.fold import key_texts
from dbsync.lsn import LSN
from dbsync.relation import Column, Relation

logger = logging.getLogger(__name__)

POSITION, TABLES = "dbsync_position", "dbsync_tables"
ID, DELETED_AT = "_id", "_deleted_at"

T = TypeVar("T")
"""A column's type in the target, as its Store knows it; two that are equal are the same type."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is; a target without schemas knows its name only."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"


@dataclass(slots=True)
class Table(Generic[T]):
    """A table of the target. `owner` is the type dbsync made it for; None where somebody else made it."""

    place: Place
    columns: dict[str, T]
    key: tuple[str, ...]
    owner: str | None = None
    generated: frozenset[str] = frozenset()  # columns nobody can write to
    is_touched: bool = False  # by the transaction that is open


@dataclass(frozen=True, slots=True)
class Values(Generic[T]):
    """What goes into a column. `spec` is how the source's values were decoded, where the source declares the column."""

    name: str
    type: T
    spec: values.Spec | None
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """What the target holds of a log: all up to `lsn`. `attempt` is the batch that wrote that."""

    lsn: LSN
    attempt: str


class Store(ABC, Generic[T]):
    """A database that holds tables. What it raises is a BatcherError."""

    publication: str | None = None
    """What dbsync follows, where that is known: a target in the source itself must not be part of it."""

    @abstractmethod
    def held(self, log: str) -> Held | None:
        """Outside a batch. Waits for a commit that is still under way."""

    @abstractmethod
    def begin(self, log: str) -> Held | None:
        """Take back what is not committed, and begin a transaction that no other of the same log runs beside."""

    @abstractmethod
    def commit(self, log: str, held: Held) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Take back what is not committed, and let go of the connection."""

    @abstractmethod
    def place(self, doctype: str) -> Place:
        """Where the documents of a type go."""

    @abstractmethod
    def folded(self, name: str) -> str:
        """The name in the form in which the database compares names."""

    @abstractmethod
    def check_name(self, name: str, what: str) -> None:
        """Raise where the database cannot have a name like that."""

    @abstractmethod
    def table(self, place: Place) -> Table[T] | None: ...

    @abstractmethod
    def create(self, table: Table[T]) -> None: ...

    @abstractmethod
    def add_column(self, table: Table[T], name: str, type: T) -> None: ...

    @abstractmethod
    def drop_column(self, table: Table[T], name: str) -> None: ...

    @abstractmethod
    def change_type(self, table: Table[T], name: str, type: T) -> None:
        """Keep what the column holds, as the other type."""

    @abstractmethod
    def change_key(self, table: Table[T], key: tuple[str, ...]) -> None: ...

    @abstractmethod
    def declared(self, columns: Sequence[Column], key: Sequence[str]) -> dict[str, T]:
        """The types for columns of the source."""

    @abstractmethod
    def type_of(self, items: Iterable[Any]) -> T | None:
        """The type for values nobody declared; None where all of them are None."""

    @abstractmethod
    def text(self, *, in_key: bool) -> T: ...

    @property
    @abstractmethod
    def timestamp(self) -> T:
        """The type of `_deleted_at`."""

    @abstractmethod
    def holds(self, wider: T, type: T) -> bool:
        """Whether every value of the type has a place in the wider one."""

    @abstractmethod
    def fits(self, column: Values[T]) -> bool:
        """Whether these values have a place in their column."""

    @abstractmethod
    def upsert(self, table: Table[T], columns: Sequence[Values[T]]) -> None: ...

    @abstractmethod
    def delete(self, table: Table[T], key: Sequence[Values[T]], *, softly: bool) -> None:
        """Rows by the texts of their key; those that are not there pass."""

    @abstractmethod
    def truncate(self, table: Table[T], *, softly: bool) -> None: ...


@dataclass(slots=True)
class _Attempt:
    """A batch on its way, known again when it comes again."""

    batch: tuple[int, LSN, LSN]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class TableBatcher(Batcher, Generic[T]):
    """Keeps the tables of a Store in step."""

    def __init__(self, store: Store[T], *, soft_delete: bool = False, drop_columns: bool = False) -> None:
        self._store = store
        self._soft_delete = soft_delete
        self._drop_columns = drop_columns
        self._relations: Mapping[str, Relation] = {}
        self._tables: dict[str, Table[T]] = {}
        self._doctypes: dict[str, str] = {}
        self._attempt: _Attempt | None = None
        self._is_open = False
        self._is_done = False  # the target holds the batch already

    def follows(self, publication: str) -> None:
        """Told before `position` is asked."""
        self._store.publication = publication

    def position(self) -> LSN | None:
        held = self._store.held(self.log_name)
        return held.lsn if held else None

    def begin(self, batch: BatchInfo) -> None:
        if self._is_open:
            self._tables = {}  # what an attempt that failed made of them is taken back
        self._is_open = True
        self._relations = batch.relations
        about = (batch.number, batch.first_lsn, batch.last_lsn)
        if self._attempt is None or self._attempt.batch != about:
            self._attempt = _Attempt(about)
        held = self._store.begin(self.log_name)
        self._is_done = held is not None and held.attempt == self._attempt.id
        if held is not None and held.lsn > batch.last_lsn:
            raise BatcherError(
                f"The target holds the log up to {held.lsn} already, and batch {batch.number} ends before that.",
                "Another dbsync has taken over the slot; it does the work now, or the next start does.",
                retryable=False,
            )
        if self._is_done:
            logger.info("Batch %d is in the target already: only the answer to its commit was lost.", batch.number)

    def commit(self, batch: BatchInfo) -> None:
        if not self._is_done:
            attempt = self._begun
            self._store.commit(self.log_name, Held(batch.last_lsn, attempt.id))
        self._attempt, self._is_open, self._is_done = None, False, False
        for table in self._tables.values():
            table.is_touched = False

    def close(self) -> None:
        self._tables, self._is_open = {}, False
        self._store.close()

    def batch_truncate(self, doctype: str) -> None:
        if self._passes_over() or (table := self._known(doctype)) is None:
            return
        if self._soft_delete:
            self._have_deleted_at(table)
        table.is_touched = True
        self._store.truncate(table, softly=self._soft_delete)

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        if self._passes_over() or self._known(doctype) is None:
            return
        relation = self._relation(doctype)
        table = self._ready(doctype, relation, {})
        key = self._key(doctype, relation, table, ids)
        table.is_touched = True
        self._store.delete(table, key, softly=self._soft_delete)

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        if self._passes_over() or not docs:
            return
        relation = self._relation(doctype)
        found = _by_column(docs)
        if relation is None:
            if ID in found:
                raise _reserved(doctype, ID)
            found = {ID: list(docs), **found}
        else:
            _check_key(doctype, relation, found)
        table = self._ready(doctype, relation, found)
        columns = self._filled(doctype, table, found, len(docs))
        table.is_touched = True
        self._store.upsert(table, columns)

    @property
    def _begun(self) -> _Attempt:
        if self._attempt is None or not self._is_open:
            raise BatcherError("The target was called outside a batch.", "Call begin first.", retryable=False)
        return self._attempt

    def _passes_over(self) -> bool:
        return bool(self._begun) and self._is_done

    def _relation(self, doctype: str) -> Relation | None:
        """The table of the source that the type mirrors."""
        relation = self._relations.get(doctype)
        return relation if relation and relation.key else None

    # What the table looks like, and what it should.

    def _known(self, doctype: str) -> Table[T] | None:
        """The table as it is now, or None when there is none yet."""
        if doctype not in self._tables:
            table = self._store.table(self._place(doctype))
            if table is None:
                return None
            if table.owner is not None and table.owner != doctype:
                raise _two_in_one(table.place, table.owner, doctype)
            self._tables[doctype] = table
        return self._tables[doctype]

    def _place(self, doctype: str) -> Place:
        place = self._store.place(doctype)
        for name in filter(None, (place.schema, place.name)):
            self._store.check_name(name, f"a table for {doctype}")
        if self._store.folded(place.name) in (POSITION, TABLES):
            raise BatcherError(
                f"The table {place} for {doctype} bears a name that dbsync needs for itself in the target.",
                "Give the target's tables another name with DBSYNC_TARGET_PREFIX, or leave this one out.",
                retryable=False,
            )
        first = self._doctypes.setdefault(self._store.folded(str(place)), doctype)
        if first != doctype:
            raise _two_in_one(place, first, doctype)
        return place

    def _ready(self, doctype: str, relation: Relation | None, found: Mapping[str, Sequence[Any]]) -> Table[T]:
        """The table, with a place for everything the source declares and the documents hold."""
        table = self._known(doctype)
        key = relation.key_names if relation else (ID,)
        declared = self._store.declared(relation.columns, key) if relation else {ID: self._store.text(in_key=True)}
        if self._soft_delete and DELETED_AT in (*declared, *found):
            raise _reserved(doctype, DELETED_AT)
        if table is None:
            return self._create(doctype, declared, found, key)
        for name, type in declared.items():
            self._have(table, name, type, is_declared=True)
        for name, items in found.items():
            if name not in declared and (undeclared := self._store.type_of(items)) is not None:
                self._have(table, name, undeclared, is_declared=False)
        if self._soft_delete:
            self._have_deleted_at(table)
        if relation and self._drop_columns and table.owner:
            self._drop_others(table, {*declared, *found})
        if sorted(table.key) != sorted(key):
            self._change_key(table, key)
        return table

    def _create(
        self, doctype: str, declared: dict[str, T], found: Mapping[str, Sequence[Any]], key: tuple[str, ...]
    ) -> Table[T]:
        columns = dict(declared)
        for name, items in found.items():
            if name not in columns and (type := self._store.type_of(items)) is not None:
                columns[name] = type
        if self._soft_delete:
            columns[DELETED_AT] = self._store.timestamp
        table: Table[T] = Table(self._place(doctype), {}, key, doctype)
        for name, type in columns.items():
            self._check_column(table, name)
            table.columns[name] = type
        self._store.create(table)
        self._tables[doctype] = table
        return table

    def _have(self, table: Table[T], name: str, type: T, *, is_declared: bool) -> None:
        """The column, with a type that has a place for all of this type."""
        has = table.columns.get(name)
        if has is None:
            self._check_column(table, name)
            self._may_alter(table, f"lacks the column {name} ({type})")
            self._store.add_column(table, name, type)
            table.columns[name] = type
        elif not self._store.holds(has, type):
            if self._store.holds(type, has):
                self._change_type(table, name, type)
            elif is_declared:
                raise _other_type(table.place, name, has, type)
            else:
                self._change_type(table, name, self._store.text(in_key=name in table.key))

    def _have_deleted_at(self, table: Table[T]) -> None:
        if DELETED_AT not in table.columns:
            self._have(table, DELETED_AT, self._store.timestamp, is_declared=True)

    def _check_column(self, table: Table[T], name: str) -> None:
        self._store.check_name(name, f"a column of {table.place}")
        for taken in table.columns:
            if self._store.folded(taken) == self._store.folded(name):
                raise BatcherError(
                    f"Two columns of {table.place} are one to the target, which does not tell upper from lower case:"
                    f" {taken} and {name}.",
                    "Rename one of them, or leave it out with DBSYNC_EXCLUDE_COLUMNS.",
                    retryable=False,
                )

    def _change_type(self, table: Table[T], name: str, type: T) -> None:
        has = table.columns[name]
        self._may_alter(table, f"has {has} as the type of the column {name}, where {type} is needed")
        logger.info("%s: column %s changes from %s to %s.", table.place, name, has, type)
        self._store.change_type(table, name, type)
        table.columns[name] = type

    def _change_key(self, table: Table[T], key: tuple[str, ...]) -> None:
        self._may_alter(table, f"has not ({', '.join(key)}) as its primary key, which the source has")
        logger.info("%s: the key changes from %s to %s.", table.place, table.key, key)
        self._store.change_key(table, key)
        table.key = key

    def _drop_others(self, table: Table[T], wanted: set[str]) -> None:
        """What the source has dropped. A column of the old key goes when the key has changed."""
        for name in [name for name in table.columns if name not in (*wanted, *table.key, DELETED_AT)]:
            self._store.drop_column(table, name)
            del table.columns[name]

    def _may_alter(self, table: Table[T], reason: str) -> None:
        if table.owner is None:
            raise BatcherError(
                f"The table {table.place} in the target was not made by dbsync and {reason}.",
                "Alter it by hand, or move it away: dbsync then makes its own.",
                retryable=False,
            )

    # What goes into it.

    def _filled(self, doctype: str, table: Table[T], found: Mapping[str, Sequence[Any]], count: int) -> list[Values[T]]:
        """All columns of the row: what the documents lack is NULL. In a table of somebody else's the rest stays."""
        relation = self._relation(doctype)
        specs = {column.name: column.spec for column in relation.columns} if relation else {}
        names = table.columns if table.owner else [*specs, *found, *([DELETED_AT] if self._soft_delete else [])]
        columns = []
        for name in dict.fromkeys(names):
            if name in table.generated or name not in table.columns:
                continue
            column = Values(name, table.columns[name], specs.get(name), found.get(name) or [None] * count)
            if name in found and not self._store.fits(column):
                self._change_type(table, name, self._store.text(in_key=name in table.key))
                column = Values(name, table.columns[name], column.spec, column.items)
            columns.append(column)
        return columns

    def _key(self, doctype: str, relation: Relation | None, table: Table[T], ids: Sequence[str]) -> list[Values[T]]:
        if relation is None:
            return [Values(ID, table.columns[ID], None, ids)]
        try:
            texts = zip(*(key_texts(relation, id) for id in ids), strict=True)
            return [
                Values(
                    relation.columns[at].name, table.columns[relation.columns[at].name], relation.columns[at].spec, part
                )
                for at, part in zip(relation.key, texts, strict=True)
            ]
        except ValueError as error:
            raise _no_key(doctype, relation) from error


def _by_column(docs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(itertools.chain.from_iterable(docs.values()))
    return {name: [doc.get(name) for doc in docs.values()] for name in names}


def _check_key(doctype: str, relation: Relation, found: Mapping[str, Sequence[Any]]) -> None:
    if any(name not in found or None in found[name] for name in relation.key_names):
        raise _no_key(doctype, relation)


def _no_key(doctype: str, relation: Relation) -> BatcherError:
    return BatcherError(
        f"A document of the type {doctype} does not carry the key of that table: {', '.join(relation.key_names)}.",
        "Give documents that are no rows of it a type of their own.",
        retryable=False,
    )


def _reserved(doctype: str, name: str) -> BatcherError:
    return BatcherError(
        f"{doctype} has a column {name}, which is the name of a column of dbsync's own in the target.",
        "Rename it, or leave it out with DBSYNC_EXCLUDE_COLUMNS.",
        retryable=False,
    )


def _two_in_one(place: Place, first: str, second: str) -> BatcherError:
    return BatcherError(
        f"Both {first} and {second} would be the table {place} in the target.",
        "Leave one of them out of the publication, or rename it.",
        retryable=False,
    )


def _other_type(place: Place, name: str, has: object, wanted: object) -> BatcherError:
    return BatcherError(
        f"The column {name} of {place} is {has} in the target, and what the source has by now, {wanted}, cannot be put"
        " in its place without loss.",
        "Alter the column in the target by hand, or drop it there: it is made anew, and a refresh fills it.",
        retryable=False,
    )
