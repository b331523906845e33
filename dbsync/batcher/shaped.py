"""Other names and fewer columns in the target than in the source, for any Batcher.

What is renamed and left out is known only here: the Batcher behind it sees types, columns and documents as if the
source were so. The key of a table always stays, because nothing could be found again without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.tables import TableBatcher
from dbsync.config import Settings
from dbsync.errors import ConfigError
from dbsync.keyless import OPERATION
from dbsync.lsn import LSN
from dbsync.relation import Relation


def shaped(batcher: Batcher, settings: Settings) -> Batcher:
    """The Batcher itself where the settings ask for nothing of the kind."""
    if isinstance(batcher, TableBatcher):
        batcher.follows(settings.publication)
    wanted = (settings.target_schema, settings.target_prefix, settings.include_columns, settings.exclude_columns)
    return ShapedBatcher(batcher, settings) if any(wanted) else batcher


def unmatched(settings: Settings, columns: Iterable[str]) -> list[str]:
    """The patterns of the column lists that none of these columns, written `schema.table.column`, goes by."""
    known = list(columns)
    patterns = (*(settings.include_columns or ()), *(settings.exclude_columns or ()))
    return [pattern for pattern in patterns if not any(fnmatchcase(column, pattern) for column in known)]


class ShapedBatcher(Batcher):
    """Stands before another Batcher."""

    def __init__(self, batcher: Batcher, settings: Settings) -> None:
        self._batcher = batcher
        self._schema = settings.target_schema
        self._prefix = settings.target_prefix or ""
        self._columns = ColumnLists(settings.include_columns or (), settings.exclude_columns or ())
        self._sources: dict[str, str] = {}
        self.distributed = batcher.distributed
        self.accepts_partial = batcher.accepts_partial
        self.appends = batcher.appends

    @property
    def log_name(self) -> str:
        return self._batcher.log_name

    @log_name.setter
    def log_name(self, name: str) -> None:
        self._batcher.log_name = name

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self._batcher.batch_upsert(self._renamed(doctype), self._columns.documents(doctype, docs))

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._batcher.batch_delete(self._renamed(doctype), ids)

    def batch_truncate(self, doctype: str) -> None:
        self._batcher.batch_truncate(self._renamed(doctype))

    def begin(self, batch: BatchInfo) -> None:
        relations = {
            self._renamed(doctype): self._columns.relation(relation) for doctype, relation in batch.relations.items()
        }
        self._batcher.begin(replace(batch, relations=relations))

    def commit(self, batch: BatchInfo) -> None:
        self._batcher.commit(batch)

    def position(self) -> LSN | None:
        return self._batcher.position()

    def close(self) -> None:
        self._batcher.close()

    def _renamed(self, doctype: str) -> str:
        schema, dot, table = doctype.rpartition(".")
        name = f"{self._schema or schema}{'.' if dot or self._schema else ''}{self._prefix}{table}"
        first = self._sources.setdefault(name, doctype)
        if first != doctype:
            raise ConfigError(
                f"Both {first} and {doctype} would be {name} in the target.",
                "Leave out DBSYNC_TARGET_SCHEMA: tables of the same name need schemas of their own.",
            )
        return name


class ColumnLists:
    """Which columns of a table stay: patterns of `schema.table.column`.

    A table that an included column names keeps those and its key; every other table keeps all that is not excluded.
    A document of a table without a key always says what happened.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._known: dict[tuple[str, str], bool] = {}
        for pattern in (*include, *exclude):
            if pattern.count(".") < 1:
                raise ConfigError(
                    f"The column {pattern!r} cannot be told from others.",
                    f"Write schema.table.column, or *.{pattern} for that column of every table.",
                )

    def documents(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
        names = {name for doc in docs.values() for name in doc}
        gone = {name for name in names if not self.keeps(doctype, name)}
        if not gone:
            return docs
        return {id: {name: value for name, value in doc.items() if name not in gone} for id, doc in docs.items()}

    def relation(self, relation: Relation) -> Relation:
        # Unless it is a column of a table with a key, that name is ours: it tells an insert from a delete.
        is_theirs = bool(relation.key) and OPERATION in relation.column_names
        self._known[relation.doctype, OPERATION] = not is_theirs or self._decide(relation.doctype, OPERATION)
        for name in relation.key_names:
            if self._is_excluded(relation.doctype, name):
                raise ConfigError(
                    f"The column {name} of {relation.doctype} belongs to its key and cannot be left out.",
                    "Take it out of --exclude-columns, or DBSYNC_EXCLUDE_COLUMNS.",
                )
            self._known[relation.doctype, name] = True
        kept = [place for place, name in enumerate(relation.column_names) if self.keeps(relation.doctype, name)]
        return replace(
            relation,
            columns=tuple(relation.columns[place] for place in kept),
            key=tuple(kept.index(place) for place in relation.key),
        )

    def keeps(self, doctype: str, name: str) -> bool:
        if (doctype, name) not in self._known:
            self._known[doctype, name] = name == OPERATION or self._decide(doctype, name)
        return self._known[doctype, name]

    def _decide(self, doctype: str, name: str) -> bool:
        if self._is_excluded(doctype, name):
            return False
        mine = [pattern for pattern in self._include if fnmatchcase(doctype, pattern.rpartition(".")[0])]
        return not mine or any(fnmatchcase(f"{doctype}.{name}", pattern) for pattern in mine)

    def _is_excluded(self, doctype: str, name: str) -> bool:
        return any(fnmatchcase(f"{doctype}.{name}", pattern) for pattern in self._exclude)
