"""A change log in Parquet, a folder for each type, each batch in it exactly once.

A row is what happened to a document: `_op` ("upsert", "delete", "truncate"; of a table without a key "insert", "update"
or "delete", with the row as it is or was), `_id`, `_lsn` (the position of its batch
in the log, as a number), `_seq` (counts all rows of the target, so the row with the highest one tells how a document is
now), `_text`, and the document's columns, NULL for a delete.

Columns have the source's types, with numeric without a precision, interval, uuid, json, arrays and all that Arrow has
no type for as text; what a type cannot hold stands in `_text` (see `columns`). A file has the columns the source had
then: files from before and after an `ALTER TABLE` can be read together where the types can be unified.

A file is there when it is complete: when what came has reached `rotate_bytes` or `rotate_seconds`, or dbsync stops.
Until then it waits below `_dbsync`, as it may after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dbsync.batcher.base import BatchInfo
from dbsync.batcher.columns import GUESSES, TEXTS, Kind, Rows, declared, guessed, refuse_ours
from dbsync.batcher.folder import file_name, folder_url, some_bytes, some_seconds, sync, sync_folder
from dbsync.batcher.frames import Frame, framed, frames_of, tables_of
from dbsync.batcher.journal import JournalBatcher, renamed
from dbsync.batcher.pgtext import text
from dbsync.keyless import OPERATION

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

_OURS = ("_op", "_id", "_lsn", "_seq", TEXTS)
_GROUP_ROWS = 100_000
_GROUP_BYTES = 16 * 1024 * 1024


class ParquetBatcher(JournalBatcher):
    """Writes what happened into files in a folder, which is made if it is not there. Runs in the process that reads."""

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> ParquetBatcher:
        path, rotation = folder_url(url, "parquet", {"rotate_bytes": some_bytes, "rotate_seconds": some_seconds})
        return cls(path, **rotation)

    def begin(self, batch: BatchInfo) -> None:
        super().begin(batch)
        self._declared = {
            doctype: {column.name: declared(column) for column in relation.columns}
            for doctype, relation in batch.relations.items()
        }
        # Of documents nobody declared, a column keeps the type it had first.
        self._guessed = {doctype: dict(names) for doctype, names in self._state.get("types", {}).items()}

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        op = self._operations(doctype, docs)
        if op is not None:
            docs = {id: {name: value for name, value in doc.items() if name != OPERATION} for id, doc in docs.items()}
        rows = Rows(docs)
        refuse_ours(doctype, rows.names, _OURS)
        kinds = {name: self._kind(doctype, name, rows) for name in self._names(doctype, rows)}
        columns = {name: rows.column(name, kind) for name, kind in kinds.items() if kind is not None}
        self._write(doctype, "upsert" if op is None else op, pa.array(list(docs), pa.string()), rows.texts(), columns)

    def _operations(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> pa.Array | None:
        """What happened to rows of a table without a key, whose documents say so; None for all others."""
        if doctype not in self._declared or OPERATION in self._declared[doctype]:
            return None
        said = [doc.get(OPERATION) for doc in docs.values()]
        return pa.array([op or "upsert" for op in said], pa.string()) if any(said) else None

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._write(doctype, "delete", pa.array(ids, pa.string()))

    def batch_truncate(self, doctype: str) -> None:
        self._write(doctype, "truncate", pa.nulls(1, pa.string()))

    def _names(self, doctype: str, rows: Rows) -> list[str]:
        # The source's order first, and also the columns that no document of this batch has.
        return list(dict.fromkeys([*self._declared.get(doctype, {}), *rows.names]))

    def _kind(self, doctype: str, name: str, rows: Rows) -> Kind | None:
        if kind := self._declared.get(doctype, {}).get(name):
            return kind
        known = self._guessed.setdefault(doctype, {})
        if name not in known:
            kind = guessed(rows.values(name))
            if kind is None:
                return None
            known[name] = str(kind.type)
        return Kind(_TYPES[known[name]], text)

    def _write(
        self,
        doctype: str,
        op: str | pa.Array,
        ids: pa.Array,
        texts: pa.Array | None = None,
        columns: Mapping[str, pa.Array] | None = None,
    ) -> None:
        count = len(ids)
        table = pa.table(
            {
                "_op": pa.repeat(op, count) if isinstance(op, str) else op,
                "_id": ids,
                "_lsn": pa.repeat(pa.scalar(int(self._lsn), pa.int64()), count),
                "_seq": pa.array(range(self._rows + 1, self._rows + count + 1), pa.int64()),
                TEXTS: pa.nulls(count, pa.string()) if texts is None else texts,
                **(columns or {}),
            }
        )
        self._append(framed(doctype, table))
        self._rows += count

    def _more_state(self) -> dict[str, Any]:
        return {"types": self._guessed}

    def _publish(self, part: Path, number: int) -> None:
        with pa.memory_map(str(part)) as journal:
            by_type: dict[str, list[Frame]] = {}
            for frame in frames_of(journal):
                by_type.setdefault(frame.doctype, []).append(frame)
            for doctype, frames in by_type.items():
                folder = self.path / file_name(doctype)
                folder.mkdir(exist_ok=True)
                sync_folder(self.path)
                for place, (schema, group) in enumerate(_of_one_shape(frames)):
                    written = part.with_name("parquet.new")
                    _write_file(written, schema, tables_of(journal, group, schema))
                    renamed(written, folder / f"{number:012}-{place:03}.parquet")
        part.unlink()


# What `guessed` may find, by the names under which the state keeps them.
_TYPES = {str(type): type for type in GUESSES}


def _of_one_shape(frames: Sequence[Frame]) -> Iterator[tuple[pa.Schema, list[Frame]]]:
    """Neighbours whose columns go together; a column that changes its type starts another file."""
    schema, group = frames[0].schema, [frames[0]]
    for frame in frames[1:]:
        try:
            schema = pa.unify_schemas([schema, frame.schema])
        except pa.ArrowException:
            yield schema, group
            schema, group = frame.schema, []
        group.append(frame)
    yield schema, group


def _write_file(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema) as writer:
            for table in _in_groups(tables):
                writer.write_table(table)
        sync(file)


def _in_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Larger ones out of small ones, so that a file does not fall to pieces."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        waiting.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)
