"""A Batcher that writes what it is handed to a text stream, one JSON object a line. At least once.

Who reads may have seen enough and go, as `head` does: that ends dbsync, and what was not acknowledged comes again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.jsontext import dumps
from dbsync.errors import BatcherError

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
        self._write({"op": "upsert", "type": doctype, "id": id, "doc": doc} for id, doc in docs.items())

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._write({"op": "delete", "type": doctype, "id": id} for id in ids)

    def batch_truncate(self, doctype: str) -> None:
        self._write([{"op": "truncate", "type": doctype}])

    def commit(self, batch: BatchInfo) -> None:
        with self._told():
            self._stream.flush()

    @property
    def _stream(self) -> IO[str]:
        return self._out or sys.stdout

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        with self._told():
            for line in lines:
                self._stream.write(dumps(line) + "\n")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            if self._out is None:
                # What could not be written is still in there, and Python would complain of it at the end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise BatcherError(
                "Nobody reads what dbsync writes to its output any more.",
                "Start it again: it goes on with the batch that was not read to its end.",
                retryable=False,
            ) from error
        except OSError as error:
            raise BatcherError(
                f"dbsync cannot write to its output: {error.strerror or error}.", "See that its disk has room."
            ) from error
