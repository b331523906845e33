"""Batchers that remember, for the tests: in memory, or (where another process writes) in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from dbsync import LSN, Batcher
from dbsync.batcher import BatchInfo

# The executors do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Documents = dict[str, dict[str, dict[str, Any]]]


class RecordingBatcher(Batcher):
    """Keeps every call, and what a target would hold after it. It merges when it accepts partial documents."""

    def __init__(self, documents: Documents | None = None, *, accepts_partial: bool = False) -> None:
        self.accepts_partial = accepts_partial
        self.calls: list[tuple[str, str, Any]] = []
        self.batches: list[BatchInfo] = []
        self.documents: Documents = documents if documents is not None else {}
        self._handed_over = threading.Condition()

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self._say("upsert", doctype, dict(docs))
        held = self.documents.setdefault(doctype, {})
        for id, doc in docs.items():
            held[id] = {**held.get(id, {}), **doc} if self.accepts_partial else doc

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._say("delete", doctype, list(ids))
        for id in ids:
            self.documents.get(doctype, {}).pop(id, None)

    def batch_truncate(self, doctype: str) -> None:
        self._say("truncate", doctype, None)
        self.documents[doctype] = {}

    def commit(self, batch: BatchInfo) -> None:
        with self._handed_over:
            self.batches.append(batch)
            self._handed_over.notify_all()

    def wait_for_batches(self, count: int, seconds: float = 30) -> None:
        with self._handed_over:
            assert self._handed_over.wait_for(lambda: len(self.batches) >= count, seconds), self.calls

    def upserts(self, doctype: str) -> dict[str, dict[str, Any]]:
        """All documents of the type that were handed over, the newest of each."""
        return {id: doc for kind, t, docs in self.calls if (kind, t) == ("upsert", doctype) for id, doc in docs.items()}

    def deletes(self, doctype: str) -> list[str]:
        return [id for kind, t, ids in self.calls if (kind, t) == ("delete", doctype) for id in ids]

    def clear(self) -> None:
        self.calls.clear()

    def _say(self, kind: str, doctype: str, content: Any) -> None:
        self.calls.append((kind, doctype, content))


class FailingBatcher(RecordingBatcher):
    """Raises in one of its methods as often as told, then works."""

    def __init__(self, failures: float, where: str = "batch_upsert") -> None:
        super().__init__()
        self.failures = failures
        self.raised = 0
        setattr(self, where, self._failing(getattr(self, where)))

    def _failing(self, method: Callable[..., None]) -> Callable[..., None]:
        def raise_or_call(*args: Any) -> None:
            if self.raised < self.failures:
                self.raised += 1
                raise OSError("the target is on fire")
            method(*args)

        return raise_or_call


class SqliteBatcher(Batcher):
    """Documents in a SQLite file, so that any process may write them; stores the position where asked to."""

    def __init__(self, path: Path, *, distributed: bool = False, positioned: bool = False) -> None:
        self.path = path
        self.distributed = distributed
        self.positioned = positioned
        with self.open() as db:
            db.execute("CREATE TABLE IF NOT EXISTS docs (type, id, doc, PRIMARY KEY (type, id))")
            db.execute("CREATE TABLE IF NOT EXISTS calls (kind, type, ids)")
            db.execute("CREATE TABLE IF NOT EXISTS positions (lsn)")

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            yield db

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        rows = [(doctype, id, json.dumps(doc, default=str)) for id, doc in docs.items()]
        with self.open() as db:
            self._called(db, "upsert", doctype, docs)
            db.executemany("INSERT OR REPLACE INTO docs VALUES (?, ?, ?)", rows)

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        with self.open() as db:
            self._called(db, "delete", doctype, ids)
            db.executemany("DELETE FROM docs WHERE type = ? AND id = ?", [(doctype, id) for id in ids])

    def batch_truncate(self, doctype: str) -> None:
        with self.open() as db:
            self._called(db, "truncate", doctype, ())
            db.execute("DELETE FROM docs WHERE type = ?", [doctype])

    def commit(self, batch: BatchInfo) -> None:
        if self.positioned:
            with self.open() as db:
                db.execute("INSERT INTO positions VALUES (?)", [str(batch.last_lsn)])

    def position(self) -> LSN | None:
        with self.open() as db:
            found = [LSN(text) for (text,) in db.execute("SELECT lsn FROM positions")]
        return max(found, default=None)

    def documents(self) -> Documents:
        found: Documents = {}
        with self.open() as db:
            for doctype, id, doc in db.execute("SELECT type, id, doc FROM docs"):
                found.setdefault(doctype, {})[id] = json.loads(doc)
        return found

    def calls(self) -> list[tuple[str, str, list[str]]]:
        with self.open() as db:
            rows = db.execute("SELECT kind, type, ids FROM calls ORDER BY rowid").fetchall()
        return [(kind, doctype, json.loads(ids)) for kind, doctype, ids in rows]

    def _called(self, db: sqlite3.Connection, kind: str, doctype: str, ids: Iterable[str]) -> None:
        db.execute("INSERT INTO calls VALUES (?, ?, ?)", [kind, doctype, json.dumps(list(ids))])
