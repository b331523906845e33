"""Arrow tables of many types and shapes, one behind the other in a file.

Each frame is an Arrow stream of its own whose schema carries the document type, so a table is written once, in the
order in which things happened, and read back type by type without holding the file in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

_DOCTYPE = b"dbsync.type"


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a table lies, what type its rows are of, and which columns they have."""

    doctype: str
    schema: pa.Schema
    offset: int


def framed(doctype: str, table: pa.Table) -> pa.Buffer:
    out = pa.BufferOutputStream()
    schema = table.schema.with_metadata({_DOCTYPE: doctype})
    with pa.ipc.new_stream(out, schema) as writer:
        writer.write_table(table.cast(schema))
    return out.getvalue()


def frames_of(file: pa.MemoryMappedFile) -> list[Frame]:
    """All frames of a file that holds whole ones only."""
    found = []
    while (offset := file.tell()) < file.size():
        with pa.ipc.open_stream(file) as reader:
            for _ in reader:
                pass
            schema = reader.schema
        found.append(Frame(schema.metadata[_DOCTYPE].decode(), schema.remove_metadata(), offset))
    return found


def tables_of(file: pa.MemoryMappedFile, frames: Iterable[Frame], schema: pa.Schema) -> Iterator[pa.Table]:
    """The frames' tables, all with the columns of `schema`; what a frame does not have is NULL."""
    for frame in frames:
        file.seek(frame.offset)
        with pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
        arrays = [
            table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
        yield pa.table(arrays, schema=schema)
