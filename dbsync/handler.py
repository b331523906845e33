"""What users subclass to see changes: one method a kind of message, in log order, in the process that reads.

A method that raises stops nothing for good: nothing of the open batch is acknowledged, the changes come again after a
pause, and after some tries dbsync stops with the reason. So a handler may see a change more than once.
"""

from __future__ import annotations

from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from dbsync.batcher.jsontext import dumps
from dbsync.lsn import LSN
from dbsync.relation import Relation, Row

if TYPE_CHECKING:
    from dbsync.syncer import Syncer


class Transaction(NamedTuple):
    """Given to handle_begin and handle_commit."""

    lsn: LSN
    commit_lsn: LSN
    xid: int
    commit_time: datetime
    origin: str | None = None  # the replication origin, where the transaction came from another server


class Change(NamedTuple):
    """One row that changed, with typed Python values.

    What comes under the name of a partitioned table has the old values of the partition's replica identity: where that
    is another than the root's, what it leaves out of `old` looks like NULL, and `id` or `old_id` may not be told.
    """

    lsn: LSN
    commit_lsn: LSN
    xid: int
    commit_time: datetime
    new: Row  # empty for a delete
    old: dict[str, Any]  # what the log carries of the row before: nothing, its key, or (full identity) all of it
    key: dict[str, Any]
    missing: frozenset[str]  # columns whose value the log did not carry, because they are TOASTed and did not change
    id: str | None  # the key as text: what MirrorHandler calls the document; None where the log does not tell it
    old_id: str | None  # the id before, where the key changed


class Truncation(NamedTuple):
    lsn: LSN
    commit_lsn: LSN
    xid: int
    commit_time: datetime
    cascade: bool
    restart_identity: bool


class Message(NamedTuple):
    """What pg_logical_emit_message wrote. One that is not transactional has no xid and no commit time."""

    lsn: LSN
    commit_lsn: LSN
    xid: int | None
    commit_time: datetime | None
    transactional: bool
    prefix: str
    content: bytes


class MessageHandler:
    """Subclass and override; every method does nothing by default. `self.syncer` is set before the first call."""

    syncer: Syncer

    def handle_begin(self, msg: Transaction) -> None: ...

    def handle_commit(self, msg: Transaction) -> None: ...

    def handle_relation(self, relation: Relation) -> None: ...

    def handle_insert(self, msg: Change, relation: Relation) -> None: ...

    def handle_update(self, msg: Change, relation: Relation) -> None: ...

    def handle_delete(self, msg: Change, relation: Relation) -> None: ...

    def handle_truncate(self, msg: Truncation, relations: list[Relation]) -> None: ...

    def handle_message(self, msg: Message) -> None: ...

    def handle_refresh(self, row: Change, relation: Relation) -> None:
        """A row that was re-read; it stands for the row as a whole, like an insert."""
        self.handle_insert(row, relation)


class MirrorHandler(MessageHandler):
    """Documents that are the rows: type is `schema.table`, id is the key. The default.

    As it is, no Python runs per row. A subclass that overrides a method sees every change like any other handler.
    """

    def handle_insert(self, msg: Change, relation: Relation) -> None:
        if msg.id is not None:
            self.syncer.mark_updated(relation.doctype, msg.id, msg.new)

    def handle_update(self, msg: Change, relation: Relation) -> None:
        if msg.old_id is not None:
            self.syncer.mark_deleted(relation.doctype, msg.old_id)
        self.handle_insert(msg, relation)

    def handle_delete(self, msg: Change, relation: Relation) -> None:
        if msg.id is not None:
            self.syncer.mark_deleted(relation.doctype, msg.id)

    def handle_truncate(self, msg: Truncation, relations: list[Relation]) -> None:
        for relation in relations:
            self.syncer.mark_truncated(relation.doctype)


class EchoMessageHandler(MessageHandler):
    """Writes every message as a line of JSON to stdout (or another stream), and marks nothing."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out

    def handle_begin(self, msg: Transaction) -> None:
        self._say("begin", msg)

    def handle_commit(self, msg: Transaction) -> None:
        self._say("commit", msg)

    def handle_relation(self, relation: Relation) -> None:
        self._write({"kind": "relation", "table": relation.doctype, "columns": relation.column_names})

    def handle_insert(self, msg: Change, relation: Relation) -> None:
        self._say("insert", msg, relation)

    def handle_update(self, msg: Change, relation: Relation) -> None:
        self._say("update", msg, relation)

    def handle_delete(self, msg: Change, relation: Relation) -> None:
        self._say("delete", msg, relation)

    def handle_truncate(self, msg: Truncation, relations: list[Relation]) -> None:
        for relation in relations:
            self._say("truncate", msg, relation)

    def handle_message(self, msg: Message) -> None:
        self._say("message", msg)

    def handle_refresh(self, row: Change, relation: Relation) -> None:
        self._say("refresh", row, relation)

    def _say(self, kind: str, msg: NamedTuple, relation: Relation | None = None) -> None:
        line: dict[str, Any] = {"kind": kind}
        if relation:
            line["table"] = relation.doctype
        fields = msg._asdict()
        positions = {name: str(fields.pop(name)) for name in ("lsn", "commit_lsn")}
        self._write(
            line | positions | {name: value for name, value in fields.items() if value not in (None, {}, frozenset())}
        )

    def _write(self, line: dict[str, Any]) -> None:
        print(dumps(line), file=self._out, flush=True)
