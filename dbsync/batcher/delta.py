"""A Delta table for each type, kept in step; what comes again changes nothing.

The type `schema.table` is the table in the folder of that name. `_id` is the document's id, the columns follow the
source's types; numeric without a precision, time, interval, uuid, json, arrays and all that Delta has no type for are
text, and what a type cannot hold stands in `_text` (see `columns`).

All that a batch brings for a table is one Delta commit, in which the application transaction named after the log holds
the position. The commits of a batch come one after another, so a crash may leave some tables with the batch and some
without it. The position of the whole, `_dbsync/position.json`, is written when every table has it: a start resumes
there, and the changes come again, in batches that may have other borders. For a table that is ahead, such a batch
- ends before the table's own position: then the table has all of it, and it is passed over. Applying it would show the
  table as it was before;
- ends there or later: then it brings final state as of a later time than the table's, and is applied. What of it the
  table has already is only written once more. (At the very position it has to be: a batch that an `ALTER TABLE` cut off
  in a transaction reaches further than its position tells.)
A table the batch does not touch needs no position: nothing of the batch is for it.

A column added in the source is added; one dropped there stays and is NULL in what comes later, or goes with
`drop_columns`; one that got a wider type is widened. The last two write the whole table anew, in one commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.columns import (
    TEXTS,
    ZONED,
    Kind,
    Rows,
    declared,
    guessed,
    holds,
    only_case_differs,
    refuse_ours,
    widens,
)
from dbsync.batcher.folder import TargetFolder, checked_folder, file_name, folder_errors, folder_url, sync_folder
from dbsync.batcher.frames import Frame, framed, tables_of
from dbsync.batcher.pgtext import text
from dbsync.batcher.urls import missing_extra
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN

try:
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError
    from deltalake.schema import Schema
except ImportError as error:
    raise missing_extra("A Delta table", "deltalake", "delta") from error

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

_ID = "_id"
_DELETED_AT = "_deleted_at"
_GONE = "_dbsync_gone"  # of the rows a batch brings, not of the table
_OURS = (_ID, TEXTS, _DELETED_AT, _GONE)
_POSITION = "position.json"
_DECODED = re.compile("%[0-9A-Fa-f]{2}")


@dataclass(slots=True)
class _Work:
    """What a batch brings for a table."""

    table: DeltaTable | None
    has: dict[str, pa.DataType]
    wanted: dict[str, pa.DataType] = field(default_factory=dict)  # of the batch's own columns
    frames: list[Frame] = field(default_factory=list)
    is_truncated: bool = False


class DeltaBatcher(Batcher):
    """Keeps Delta tables in a folder in step; it is made if it is not there. Runs in the process that reads."""

    def __init__(self, folder: str | Path, *, soft_delete: bool = False, drop_columns: bool = False) -> None:
        self.path = checked_folder(Path(folder))
        if _DECODED.search(str(self.path.absolute())):
            raise ConfigError(
                f"The folder {self.path} cannot hold Delta tables: deltalake takes a % and two digits for a character.",
                "Name a folder without them.",
            )
        self._folder = TargetFolder(self.path)
        self._soft_delete = soft_delete
        self._drop_columns = drop_columns
        self._rows: IO[bytes] | None = None
        self._work: dict[str, _Work] = {}
        self._declared: dict[str, dict[str, Kind]] = {}
        self._now = datetime.now(UTC)

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> DeltaBatcher:
        path, _ = folder_url(url, "delta")
        return cls(path, soft_delete=options.soft_delete, drop_columns=options.drop_columns)

    def position(self) -> LSN | None:
        self._folder.open()
        found = self._folder.load(_POSITION).get(self.log_name)
        return None if found is None else LSN(found)

    def begin(self, batch: BatchInfo) -> None:
        self._folder.open()
        self._forget()
        self._now = datetime.now(UTC)
        self._declared = {
            doctype: {column.name: declared(column, without=[pa.time64("us")]) for column in relation.columns}
            for doctype, relation in batch.relations.items()
        }
        with folder_errors(self.path):
            # Unbuffered: what a full disk refuses must not come later.
            self._rows = self._rows_path.open("wb", buffering=0)

    def commit(self, batch: BatchInfo) -> None:
        for doctype, work in self._work.items():
            with self._delta_errors(doctype):
                self._apply(doctype, work, batch.last_lsn)
        positions = self._folder.load(_POSITION)
        last = max(batch.last_lsn, LSN(positions.get(self.log_name, 0)))
        self._folder.store(_POSITION, {**positions, self.log_name: str(last)})
        self._forget()

    def close(self) -> None:
        """Throw away an unfinished batch and let go of the folder."""
        self._forget()
        self._folder.close()

    def batch_truncate(self, doctype: str) -> None:
        self._work_for(doctype).is_truncated = True

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._write(doctype, pa.array(ids, pa.string()), {}, gone=True)

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        rows = Rows(docs)
        refuse_ours(doctype, rows.names, _OURS if self._soft_delete else {*_OURS} - {_DELETED_AT})
        work = self._work_for(doctype)
        columns = {}
        for name in dict.fromkeys([*self._declared.get(doctype, {}), *rows.names]):
            if kind := self._kind(doctype, work, name, rows):
                work.wanted[name] = kind.type
                columns[name] = rows.column(name, kind)
        self._write(doctype, pa.array(list(docs), pa.string()), {TEXTS: rows.texts(), **columns}, gone=False)

    @property
    def _rows_path(self) -> Path:
        return self._folder.ours / "batch.arrow"

    def _forget(self) -> None:
        rows, self._rows = self._rows, None
        self._work = {}
        if rows is not None:
            with folder_errors(self.path):
                rows.close()
                self._rows_path.unlink(missing_ok=True)

    def _work_for(self, doctype: str) -> _Work:
        if doctype not in self._work:
            with self._delta_errors(doctype):
                path = str(self._path_of(doctype))
                table = DeltaTable(path) if DeltaTable.is_deltatable(path) else None
            has = {} if table is None else _fields(table)
            if table is not None and _ID not in has:
                raise BatcherError(
                    f"The Delta table {self._path_of(doctype)} has no column {_ID}, so it is not one of dbsync's.",
                    "Name another folder, or give the table another name with --target-prefix.",
                    retryable=False,
                )
            self._work[doctype] = _Work(table, has)
        return self._work[doctype]

    def _path_of(self, doctype: str) -> Path:
        return self.path / file_name(doctype)

    def _kind(self, doctype: str, work: _Work, name: str, rows: Rows) -> Kind | None:
        """What the table's column holds once this batch is in it; None while nothing tells."""
        if "`" in name:
            raise BatcherError(
                f"The column {name} of {doctype} has a backtick in its name, which Delta cannot merge.",
                f"Rename it, or leave it out with --exclude-columns {doctype}.{name}.",
                retryable=False,
            )
        wanted = self._declared.get(doctype, {}).get(name)
        has = work.wanted.get(name) or work.has.get(name)
        if has is None:
            for taken in (*work.has, *work.wanted):
                if taken.lower() == name.lower():
                    raise only_case_differs("Delta", f"columns of {doctype}", taken, name)
            return wanted or guessed(rows.values(name))
        if wanted is None or holds(has, wanted.type):
            return Kind(has, wanted.text if wanted else text)
        if not widens(has, wanted.type):
            raise BatcherError(
                f"The column {name} of {doctype} is {wanted.type} now, and its {has} in the target cannot become that.",
                "Remove the table from the target's folder and refresh it, or leave the column out.",
                retryable=False,
            )
        return wanted

    def _write(self, doctype: str, ids: pa.Array, columns: Mapping[str, pa.Array], *, gone: bool) -> None:
        if self._rows is None:
            raise BatcherError("DeltaBatcher was called outside a batch.", "Call begin first.", retryable=False)
        marks = {_GONE: pa.repeat(gone, len(ids))}
        if self._soft_delete:
            marks[_DELETED_AT] = pa.repeat(pa.scalar(self._now if gone else None, ZONED), len(ids))
        table = pa.table({_ID: ids, **marks, **columns})
        with folder_errors(self.path):
            offset = self._rows.tell()
            left = memoryview(framed(doctype, table)).cast("B")
            while left:
                left = left[self._rows.write(left) :]
        self._work_for(doctype).frames.append(Frame(doctype, table.schema, offset))

    def _apply(self, doctype: str, work: _Work, lsn: LSN) -> None:
        if work.table is None and not work.wanted:
            return  # there is nothing to delete
        table = work.table or self._create(doctype, work)
        if (table.transaction_version(self.log_name) or 0) > lsn:
            return
        before = table.version()
        self._evolve(doctype, table, work)
        columns = _fields(table)
        mark = CommitProperties(app_transactions=[Transaction(self.log_name, int(lsn))])
        if work.is_truncated and not self._soft_delete:
            kept = pa.schema(columns.items())
            with self._source(work, kept, only_kept=True) as rows:
                write_deltalake(table, rows, mode="overwrite", commit_properties=mark)
        else:
            source = pa.schema({**columns, _GONE: pa.bool_()}.items())
            with self._source(work, source) as rows:
                self._merge(table, rows, work, mark)
        self._settle(doctype, before, table.version())
        work.table, work.has = table, columns

    def _merge(self, table: DeltaTable, rows: pa.RecordBatchReader, work: _Work, mark: CommitProperties) -> None:
        merger = table.merge(
            rows,
            predicate=f"t.{_ID} = s.{_ID}",
            source_alias="s",
            target_alias="t",
            commit_properties=mark,
        )
        merger = merger.when_matched_update_all(predicate=f"NOT s.{_GONE}", except_cols=[_GONE])
        merger = merger.when_not_matched_insert_all(predicate=f"NOT s.{_GONE}", except_cols=[_GONE])
        if not self._soft_delete:
            merger = merger.when_matched_delete(f"s.{_GONE}")
        else:
            # A row that was deleted before keeps the time of that.
            merger = merger.when_matched_update(
                {_DELETED_AT: f"s.{_DELETED_AT}"}, predicate=f"s.{_GONE} AND t.{_DELETED_AT} IS NULL"
            )
            if work.is_truncated:
                now = f"CAST('{self._now.isoformat()}' AS TIMESTAMP WITH TIME ZONE)"
                merger = merger.when_not_matched_by_source_update({_DELETED_AT: now}, f"t.{_DELETED_AT} IS NULL")
        merger.execute()

    def _create(self, doctype: str, work: _Work) -> DeltaTable:
        path = self._path_of(doctype)
        path.mkdir(exist_ok=True)
        sync_folder(self.path)
        fields = {_ID: pa.string(), **work.wanted, **self._marks()}
        table = DeltaTable.create(str(path), pa.schema(fields.items()), name=doctype)
        self._settle(doctype, -1, table.version())
        return table

    def _marks(self) -> dict[str, pa.DataType]:
        return {TEXTS: pa.string(), **({_DELETED_AT: ZONED} if self._soft_delete else {})}

    def _evolve(self, doctype: str, table: DeltaTable, work: _Work) -> None:
        has = _fields(table)
        wanted = {**work.wanted, **self._marks()}
        changed = {name: type for name, type in wanted.items() if has.get(name, type) != type}
        dropped = self._dropped(doctype, work, has)
        if changed or dropped:
            kept = {name: changed.get(name, type) for name, type in has.items() if name not in dropped}
            _rewrite(table, pa.schema(kept.items()))
        if added := {name: type for name, type in wanted.items() if name not in has}:
            table.alter.add_columns(list(Schema.from_arrow(pa.schema(added.items())).fields))

    def _dropped(self, doctype: str, work: _Work, has: Mapping[str, pa.DataType]) -> set[str]:
        """Columns of the table that neither the source nor any document of this batch has."""
        if not self._drop_columns or doctype not in self._declared or not work.wanted:
            return set()
        return has.keys() - work.wanted.keys() - self._declared[doctype].keys() - set(_OURS)

    @contextmanager
    def _source(self, work: _Work, schema: pa.Schema, *, only_kept: bool = False) -> Iterator[pa.RecordBatchReader]:
        """The batch's rows for a table, read from the disk as they are asked for."""
        with pa.memory_map(str(self._rows_path)) as file:
            frames = [frame for frame in work.frames if not only_kept or TEXTS in frame.schema.names]
            batches = (batch for table in tables_of(file, frames, schema) for batch in table.to_batches())
            yield pa.RecordBatchReader.from_batches(schema, batches)

    def _settle(self, doctype: str, before: int, now: int) -> None:
        """See that what the commits after `before` wrote outlasts a crash of the machine: the position will say so."""
        folder = self._path_of(doctype)
        for version in range(before + 1, now + 1):
            commit = folder / "_delta_log" / f"{version:020}.json"
            for line in commit.read_text(encoding="utf-8").splitlines():
                if added := json.loads(line).get("add"):
                    _sync_path(folder / unquote(added["path"]))
            _sync_path(commit)
        for changed in (folder, folder / "_delta_log"):
            sync_folder(changed)

    @contextmanager
    def _delta_errors(self, doctype: str) -> Iterator[None]:
        try:
            with folder_errors(self.path):
                yield
        except (DeltaError, pa.ArrowException) as error:
            words = str(error).partition("\n")[0].rstrip(".")
            raise BatcherError(
                f"The Delta table {self._path_of(doctype)} cannot be written: {words}.",
                "See that dbsync may write to its folder, and that its disk has room.",
            ) from error


def _sync_path(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _fields(table: DeltaTable) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in pa.schema(table.schema().to_arrow())}


def _rewrite(table: DeltaTable, schema: pa.Schema) -> None:
    """The same rows with other types and without columns that are not in the schema, in one commit."""
    dataset = table.to_pyarrow_dataset()
    batches = (batch.select(schema.names).cast(schema) for batch in dataset.to_batches(columns=schema.names))
    rows = pa.RecordBatchReader.from_batches(schema, batches)
    write_deltalake(table, rows, mode="overwrite", schema_mode="overwrite")
