"""A Batcher that writes what it is handed to a text stream, one JSON object a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.jsontext import dumps

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions


class EchoBatcher(Batcher):
    """Shows final state on stdout (or another stream); lines are flushed before the batch is acknowledged."""

    appends = True

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> EchoBatcher:
        return cls()

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        for id, doc in docs.items():
            self._write({"op": "upsert", "type": doctype, "id": id, "doc": doc})

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        for id in ids:
            self._write({"op": "delete", "type": doctype, "id": id})

    def batch_truncate(self, doctype: str) -> None:
        self._write({"op": "truncate", "type": doctype})

    def commit(self, batch: BatchInfo) -> None:
        self._stream.flush()

    @property
    def _stream(self) -> IO[str]:
        return self._out or sys.stdout

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write(dumps(line) + "\n")
