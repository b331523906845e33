"""Files of JSON lines, each batch in them exactly once.

A line is what happened to a document: `{"op": "upsert", "type": …, "id": …, "doc": …, "lsn": …, "seq": …}`, or a
"delete" without a doc, or a "truncate" without an id. `lsn` is the position of its batch in the log; `seq` counts all
lines of the folder, so the line with the highest one tells how a document is now. Files are numbered, and one is there
when it is complete: when it has reached `rotate_bytes` or `rotate_seconds`, or dbsync stops. Files may be taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbsync.batcher.folder import folder_url, some_bytes, some_seconds
from dbsync.batcher.journal import JournalBatcher, renamed
from dbsync.batcher.jsontext import dumps

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions


class JsonlBatcher(JournalBatcher):
    """Writes what happened into files in a folder, which is made if it is not there. Runs in the process that reads."""

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> JsonlBatcher:
        path, rotation = folder_url(url, "jsonl", {"rotate_bytes": some_bytes, "rotate_seconds": some_seconds})
        return cls(path, **rotation)

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self._write({"op": "upsert", "type": doctype, "id": id, "doc": doc} for id, doc in docs.items())

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._write({"op": "delete", "type": doctype, "id": id} for id in ids)

    def batch_truncate(self, doctype: str) -> None:
        self._write([{"op": "truncate", "type": doctype}])

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        lsn = str(self._lsn)
        texts = [dumps({**line, "lsn": lsn, "seq": seq}) for seq, line in enumerate(lines, self._rows + 1)]
        self._append("".join(f"{text}\n" for text in texts).encode())
        self._rows += len(texts)

    def _publish(self, part: Path, number: int) -> None:
        renamed(part, self.path / f"{number:012}.jsonl")
