"""From the messages of the log to the open batch: straight for a mirror, through the handler's methods otherwise.

Messages are taken in log order by the thread that reads. A transaction that comes while it is in progress waits apart
(`pending`) and is taken at its commit, as if it came only then. One that the target already holds is passed over. A
table that comes with other columns than the batch has seen ends the batch first, so that within a batch a table has one
shape. Watermarks are recognised here, and the rows of a window released at its high mark go into the batch at its low
mark; a handler of the user's own gets them when the low mark is read, before the changes that follow it.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dbsync import mirror, pgoutput
from dbsync.ahead import Ahead, Block
from dbsync.board import WindowBoard
from dbsync.columns import FrameColumns
from dbsync.config import Settings
from dbsync.control import REFRESH_TABLE
from dbsync.errors import DbsyncError, HandlerError
from dbsync.fold import Partial, Source, key_texts
from dbsync.handler import Change, Message, MessageHandler, MirrorHandler, Transaction, Truncation
from dbsync.keyless import Keyless, appended
from dbsync.lsn import LSN
from dbsync.mirror import DELETE, INSERT, UPDATE
from dbsync.pending import Pending
from dbsync.relation import Catalog, LineDecoder, Relation, Row, RowDecoder, row_id
from dbsync.spool import DELETED, FRAME, FULL, PARTIAL, BatchWriter, WindowRows, read_rows
from dbsync.stream import HEADER_BYTES
from dbsync.window import Commit, State, Window

logger = logging.getLogger(__name__)

ROWS = frozenset((INSERT, UPDATE, DELETE))
STREAM_STOP = ord("E")
_TAG_AND_OID = struct.Struct(">BI")  # how a row change begins
_FRAMES_A_LOOK = 1_000  # how often to see whether dbsync is stopped
MESSAGE_PREFIX = "dbsync-internal"  # of what dbsync itself writes into the log


@dataclass(slots=True)
class _Open:
    """The transaction being read."""

    commit_lsn: LSN
    commit_time: datetime
    xid: int
    origin: str | None = None


class Dispatch(ABC):
    """Keeps what every way of handling needs: the open transaction, the tables seen, the batch being written."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        board: WindowBoard,
        split: Callable[[], BatchWriter],
        resume_lsn: LSN,
        pending: Pending,
        stopping: threading.Event,
    ) -> None:
        self.writer: BatchWriter
        self.relations: dict[int, Relation] = {}
        self.end_lsn = LSN(0)  # of the last transaction read to its end
        self.committed_at = datetime.now(UTC)  # when that one was committed
        self.open: _Open | None = None
        self.is_cut = False  # stopped inside a transaction: nothing more can be taken
        self._pending = pending
        self._stopping = stopping
        self._described: dict[int, tuple[int, pgoutput.Relation]] = {}  # with when that was, as a count
        self._settings = settings
        self._catalog = catalog
        self._board = board
        self._split = split
        self._resume_lsn = resume_lsn
        self._ignored: set[int] = set()
        self._marks_oid = 0
        self._touched: set[int] = set()
        self._relation_sets: dict[frozenset[int], frozenset[int]] = {}
        self._passing = False

    def take_rows(self, frames: Sequence[memoryview], begin: int) -> int:
        """Take as many row changes as follow one another from `begin` on; where something else stands, or the end."""
        if self._pending.open or self._passing or not self.open:
            return begin
        unpack, ignored, last, end = _TAG_AND_OID.unpack_from, self._ignored, None, begin
        try:
            for frame in itertools.islice(frames, begin, None):
                tag, oid = unpack(frame, HEADER_BYTES)
                if tag not in ROWS:
                    break
                if oid != last:
                    if oid in ignored:
                        break
                    self._touched.add(oid)
                    last = oid
                end += 1
        except struct.error:  # too short to be a row change
            pass
        if end > begin:
            self.writer.changes += end - begin
            self._rows(frames, begin, end)
        return end

    def take(self, frame: memoryview) -> bool:
        """Take an XLogData frame; True when it completed a transaction."""
        tag = frame[HEADER_BYTES]
        if self._pending.open:
            if tag == STREAM_STOP:
                self._pending.stop()
            else:
                self._pending.add(frame)
            return False
        if tag in ROWS:
            oid = _oid(frame)
            if oid in self._ignored:
                if oid == self._marks_oid and tag == INSERT and not self._passing:
                    self._mark(pgoutput.decode(frame[HEADER_BYTES:]))
                return False
            self._touched.add(oid)
            if not self._passing:
                self.writer.changes += 1
                self._row(frame)
            return False
        message = pgoutput.decode(frame[HEADER_BYTES:])
        match message:
            case pgoutput.Begin():
                self._begin(message)
            case pgoutput.Commit():
                self._commit(message)
                return True
            case pgoutput.Origin() if self.open:
                self.open.origin = message.name
            case pgoutput.Relation():
                self._pending.descriptions += 1
                self._described[message.oid] = (self._pending.descriptions, message)
                self._relation(message)
            case pgoutput.StreamStart():
                self._pending.start(message.xid, first=message.first_segment)
            case pgoutput.StreamAbort():
                self._pending.abort(message.xid, message.subxid)
            case pgoutput.StreamCommit():
                return self._replay(message)
            case pgoutput.Truncate():
                self._touched.update(message.relation_oids)
                relations = [self.relations[oid] for oid in message.relation_oids]
                if not self._passing:
                    self._truncate(message, [r for r in relations if not self._is_ours(r)], _start_lsn(frame))
            case pgoutput.LogicalMessage() if not self._passing and message.prefix != MESSAGE_PREFIX:
                # One that stands outside a transaction is passed over by itself.
                if self.open or message.lsn >= self._resume_lsn:
                    self._message(message)
        return False

    def _replay(self, message: pgoutput.StreamCommit) -> bool:
        """Take a transaction that came while it was in progress; False when dbsync is stopped before its end."""
        before = dict(self._described)
        self._begin(pgoutput.Begin(message.commit_lsn, message.commit_time, message.xid))
        for count, frame in enumerate(self._pending.frames(message.xid)):
            if count % _FRAMES_A_LOOK == 0 and self._stopping.is_set():
                self.is_cut = True
                return False
            self.take(frame)
        self._settle_descriptions(before, self._pending.described(message.xid))
        self._commit(pgoutput.Commit(message.flags, message.commit_lsn, message.end_lsn, message.commit_time))
        self._pending.forget(message.xid)
        return True

    def _settle_descriptions(self, before: dict[int, tuple[int, pgoutput.Relation]], came: Mapping[int, int]) -> None:
        """The description of a table that PostgreSQL sent last counts from here on, whichever transaction it was in.

        A publication may change its columns while a transaction is in progress: others had them described since.
        """
        for oid, (at, description) in list(self._described.items()):
            known, arrived = before.get(oid), came.get(oid, 0)
            if known is None or arrived > known[0]:
                self._described[oid] = (min(at, arrived), description)
            elif known[0] != at:
                self._described[oid] = known
                if known[1] != description:
                    self._relation(known[1])

    def continue_in(self, writer: BatchWriter) -> None:
        """Go on in a new batch, in the middle of a transaction if there is one open."""
        self.writer = writer
        for relation in self.relations.values():
            if relation.oid not in self._ignored:
                writer.describe(relation)
        if self.open:
            writer.begin(self.open.commit_lsn, self.open.commit_time)

    def _begin(self, message: pgoutput.Begin) -> None:
        self.open = _Open(message.final_lsn, message.commit_time, message.xid)
        # The position a target stores is the end of a commit, and lies behind the start of that commit's record.
        self._passing = message.final_lsn < self._resume_lsn
        if not self._passing:
            self.writer.begin(message.final_lsn, message.commit_time)

    def _commit(self, message: pgoutput.Commit) -> None:
        assert self.open
        if not self._passing:
            self.writer.commit(message.commit_lsn, message.end_lsn)
        self._board.commit(Commit(self.open.xid, message.commit_lsn, self._relations_touched()))
        self.open = None
        self._passing = False
        self.end_lsn = message.end_lsn
        self.committed_at = message.commit_time

    def _relations_touched(self) -> frozenset[int]:
        # Transactions are many and the sets of tables they change are few: one object each.
        touched = frozenset(self._touched)
        self._touched.clear()
        return self._relation_sets.setdefault(touched, touched)

    def _mark(self, message: Any) -> None:
        """A watermark: a row of the table (id, mark, at). What it releases stands at its low mark."""
        names = self.relations[message.relation_oid].column_names
        row = dict(zip(names, message.new, strict=True))
        window = self._board.mark(row["id"].decode(), row["mark"].decode(), self.writer.hold_position())
        if window is not None:
            self._window(window)

    def _relation(self, message: pgoutput.Relation) -> None:
        relation = self._catalog.relation(message)
        oid = message.oid
        if (known := self.relations.get(oid)) and _has_other_ids(known, relation):
            logger.warning(
                "%s has another key now, (%s) and not (%s): what the target holds under the old ids stays there."
                " Empty it there, and refresh the table.",
                relation.doctype,
                ", ".join(relation.key_names),
                ", ".join(known.key_names),
            )
        self._ignored.discard(oid)
        if self._is_ours(relation):
            self._ignored.add(oid)
            if relation.name == self._settings.wm_table:
                self._marks_oid = oid
        elif self._takes(relation):
            if self.writer.conflicts(relation):
                # The batch has to end here, and no batch ends inside a window.
                self._board.interrupt(f"{relation.doctype} changed its columns")
                self.continue_in(self._split())
            self.writer.describe(relation)
        else:
            self._ignored.add(oid)
        self.relations[message.oid] = relation

    def _is_ours(self, relation: Relation) -> bool:
        ours = (self._settings.wm_table, REFRESH_TABLE)
        return relation.namespace == self._settings.ctrl_namespace and relation.name in ours

    @abstractmethod
    def _takes(self, relation: Relation) -> bool:
        """Whether changes of this table can be taken."""

    @abstractmethod
    def _row(self, frame: memoryview) -> None: ...

    def _rows(self, frames: Sequence[memoryview], begin: int, end: int) -> None:
        """The same for many."""
        for frame in frames[begin:end]:
            self._row(frame)

    @abstractmethod
    def _window(self, window: Window) -> None:
        """A mark of this window was read."""

    @abstractmethod
    def _truncate(self, message: pgoutput.Truncate, relations: list[Relation], lsn: LSN) -> None: ...

    @abstractmethod
    def _message(self, message: pgoutput.LogicalMessage) -> None: ...


class MirrorDispatch(Dispatch):
    """Frames go into the batch unopened; but those of a table without a key become documents here, one a change."""

    def __init__(self, keyless: Keyless, *args: Any) -> None:
        super().__init__(*args)
        self._keyless = keyless
        self._doubtful: dict[int, Relation] = {}  # tables with changes that may lack a key
        self._decoders: dict[int, RowDecoder] = {}  # of those
        self._appends = 0  # so far in the open transaction

    def _begin(self, message: pgoutput.Begin) -> None:
        super()._begin(message)
        self._appends = 0

    def _takes(self, relation: Relation) -> bool:
        self._doubtful.pop(relation.oid, None)
        if not relation.key and not self._keyless.takes(relation):
            return False
        if not relation.key or relation.may_lack_key:
            self._doubtful[relation.oid], self._decoders[relation.oid] = relation, RowDecoder(relation)
        return True

    def _row(self, frame: memoryview) -> None:
        row = frame[HEADER_BYTES:]
        relation = self._doubtful.get(_oid(frame)) if self._doubtful else None
        if relation is None or _ids(relation, pgoutput.decode(row))[0] is not None:
            self.writer.add_frame(row)
        else:
            self._add_keyless(row)

    def _rows(self, frames: Sequence[memoryview], begin: int, end: int) -> None:
        rows = [frame[HEADER_BYTES:] for frame in frames[begin:end]]
        at = 0
        for place in mirror.keyless(rows, self._doubtful) if self._doubtful else ():
            if at < place:
                self.writer.add_frames(rows[at:place])
            self._add_keyless(rows[place])
            at = place + 1
        if at < len(rows):
            self.writer.add_frames(rows[at:])

    def _add_keyless(self, row: memoryview) -> None:
        """The id is the change's place in its transaction: the same whenever PostgreSQL sends it, in whatever batch."""
        assert self.open
        message: Any = pgoutput.decode(row)
        relation = self._doubtful[message.relation_oid]
        _, old_id = _ids(relation, message)
        if old_id is not None:  # what it was before had a key
            self.writer.add_mark(relation.doctype, old_id, DELETED, None)
        if relation.key and not self._keyless.takes_row(relation):
            return
        self._appends += 1
        doctype, id = relation.doctype, f"{self.open.commit_lsn}/{self._appends}"
        self.writer.add_mark(doctype, id, FULL, _pickled(doctype, id, appended(self._decoders[relation.oid], message)))

    def _window(self, window: Window) -> None:
        if window.state is State.RELEASED:
            assert window.low
            self.writer.add_window(window.content, window.low)

    def _truncate(self, message: pgoutput.Truncate, relations: list[Relation], lsn: LSN) -> None:
        for relation in relations:
            if relation.oid not in self._ignored:
                self.writer.truncate(relation.doctype)

    def _message(self, message: pgoutput.LogicalMessage) -> None:
        """A mirror has no use for messages."""


class HandlerDispatch(Dispatch):
    """Every message is decoded and goes to the handler; what it marks goes into the batch."""

    def __init__(self, handler: MessageHandler, *args: Any) -> None:
        super().__init__(*args)
        self._handler = handler
        self._decoders: dict[int, RowDecoder] = {}
        self._tables: dict[int, tuple[Relation, FrameColumns]] = {}
        self._ahead = Ahead()
        self._handling = False
        self._begun = False  # whether the handler knows of the open transaction
        self._current: tuple[Change, Relation] | None = None

    def mark_updated(self, doctype: str, id: object, doc: Mapping[str, Any]) -> None:
        if type(doctype) is str and id is not None and (unopened := self._unopened(doc)) is not None:
            self.writer.add_mark(doctype, id if type(id) is str else str(id), FULL, bytes(unopened), form=FRAME)
            return
        self._check_mark("mark_updated", doctype, id)
        if not isinstance(doc, Mapping):
            raise HandlerError(f"mark_updated takes a dict as the document, not {type(doc).__name__}.", retryable=False)
        missing = tuple(doc.missing) if isinstance(doc, Row) else ()
        if missing and self._current and self._current[0].id is not None:
            self._mark_partial(doctype, str(id), dict(doc), missing, *self._current)
        else:
            self.writer.add_mark(doctype, str(id), FULL, _pickled(doctype, id, dict(doc)))

    def _unopened(self, doc: Mapping[str, Any]) -> memoryview | None:
        """The frame of a document that is the very row the handler was called for, and need not be stored anew."""
        if self._current is None or doc is not (row := self._current[0].new):
            return None
        return row.unopened

    def mark_deleted(self, doctype: str, id: object) -> None:
        self._check_mark("mark_deleted", doctype, id)
        self.writer.add_mark(doctype, str(id), DELETED, None)

    def mark_truncated(self, doctype: str) -> None:
        self._check_mark("mark_truncated", doctype, "")
        self.writer.truncate(doctype)

    def _mark_partial(
        self, doctype: str, id: str, doc: dict[str, Any], missing: tuple[str, ...], change: Change, relation: Relation
    ) -> None:
        assert change.id is not None
        source = Source(relation, key_texts(relation, change.id))
        mirrors = (doctype, id) == (relation.doctype, change.id)
        prior = change.old_id if mirrors else None
        if prior is not None:
            self.writer.chain(doctype, prior, id)
        body = _pickled(doctype, id, Partial(doc, missing, source))
        self.writer.add_mark(doctype, id, PARTIAL, body, prior)

    def _check_mark(self, name: str, doctype: object, id: object) -> None:
        if not self._handling:
            raise HandlerError(f"{name} was called outside a handler's method.", retryable=False)
        if not isinstance(doctype, str) or id is None:
            raise HandlerError(
                f"{name} takes a document type (a str) and an id, not {doctype!r} and {id!r}.", retryable=False
            )

    def _takes(self, relation: Relation) -> bool:
        self._decoders[relation.oid] = RowDecoder(relation)
        self._tables[relation.oid] = relation, FrameColumns(relation)
        self._ahead.forget()
        return True

    def _commit(self, message: pgoutput.Commit) -> None:
        if self._begun:
            self._call(self._handler.handle_commit, self._transaction(message.commit_lsn))
            self._begun = False
        super()._commit(message)

    def _tell(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method for something in a transaction."""
        self._tell_begin()
        self._call(method, *args)

    def _tell_begin(self) -> None:
        """Before the first thing there is to tell: a transaction that holds only dbsync's own marks is not begun."""
        if self.open and not self._begun:
            self._begun = True
            self._call(self._handler.handle_begin, self._transaction(self.open.commit_lsn))

    def _relation(self, message: pgoutput.Relation) -> None:
        super()._relation(message)
        relation = self.relations[message.oid]
        if not self._is_ours(relation):
            self._call(self._handler.handle_relation, relation)

    def _row(self, frame: memoryview) -> None:
        message = pgoutput.decode(frame[HEADER_BYTES:])
        relation = self.relations[message.relation_oid]  # type: ignore[union-attr]
        lsn = _start_lsn(frame)
        decoder = self._decoders[relation.oid]
        match message:
            case pgoutput.Insert():
                self._change(self._handler.handle_insert, relation, self._inserted(decoder, message, lsn))
            case pgoutput.Update():
                self._change(self._handler.handle_update, relation, self._updated(decoder, message, lsn))
            case pgoutput.Delete():
                self._change(self._handler.handle_delete, relation, self._deleted(decoder, message, lsn))

    def _rows(self, frames: Sequence[memoryview], begin: int, end: int) -> None:
        blocks = self._ahead.blocks(frames, begin, self._tables)
        at = begin
        while at < end:
            if blocks[at] is None:
                self._row(frames[at])
                at += 1
            else:
                at = self._decoded_rows(frames, blocks, at, end)

    def _decoded_rows(self, frames: Sequence[memoryview], blocks: list[Block | None], begin: int, end: int) -> int:
        """The same as `_row` for the rows up to one that is not decoded ahead, with one guard around all of them."""
        assert self.open
        commit_lsn, commit_time, xid = self.open.commit_lsn, self.open.commit_time, self.open.xid
        self._tell_begin()
        insert, update = self._handler.handle_insert, self._handler.handle_update
        make, nothing = tuple.__new__, frozenset[str]()
        self._handling = True
        try:
            for at in range(begin, end):
                block, frame = blocks[at], frames[at]
                if block is None:
                    return at
                relation = block.relation
                lsn, new, key, id = block.take(frame)
                # As the tuple that it is: the class's own way takes three times as long.
                change = make(Change, (lsn, commit_lsn, xid, commit_time, new, {}, key, nothing, id, None))
                handle = insert if frame[HEADER_BYTES] == INSERT else update
                self._current = change, relation
                handle(change, relation)
        except DbsyncError:
            raise
        except Exception as error:
            raise self._failed(handle, (change, relation), error) from error
        finally:
            self._handling, self._current = False, None
        return end

    def _window(self, window: Window) -> None:
        """Re-read rows go through the handler where they stand: at the low mark, as soon as they are all there."""
        if window.state is State.OPEN and (rows := self._board.wait_until_read(window.id)):
            assert window.low
            self.writer.add_window(rows.given_to_handler(), window.low)
            for change, relation in self._reread(rows):
                self._change(self._handler.handle_refresh, relation, change)

    def _reread(self, rows: WindowRows) -> Iterator[tuple[Change, Relation]]:
        relation, missing = rows.layout.relation, frozenset(rows.layout.left_out)
        decoder = LineDecoder(relation, rows.layout.columns)
        for id, line in read_rows(rows):
            doc = decoder.document(line)
            key = {name: doc[name] for name in relation.key_names}
            lsn = LSN(self.writer.next_position[0])
            yield self._where(lsn, Row(doc, missing=missing), {}, key, missing, id, None), relation

    def _inserted(self, decoder: RowDecoder, message: pgoutput.Insert, lsn: LSN) -> Change:
        return self._built(decoder, lsn, message.new, {}, None)

    def _updated(self, decoder: RowDecoder, message: pgoutput.Update, lsn: LSN) -> Change:
        new, old = message.new, message.old
        if old is None:
            return self._built(decoder, lsn, new, {}, None)
        before = decoder.document(old)[0] if message.old_kind == "O" else decoder.key(old)
        return self._built(decoder, lsn, pgoutput.filled(old, new), before, row_id(decoder.relation, old))

    def _deleted(self, decoder: RowDecoder, message: pgoutput.Delete, lsn: LSN) -> Change:
        old = message.old
        before = decoder.document(old)[0] if message.old_kind == "O" else decoder.key(old)
        return self._where(lsn, Row(), before, decoder.key(old), frozenset(), row_id(decoder.relation, old), None)

    def _built(self, decoder: RowDecoder, lsn: LSN, raw: Any, before: dict[str, Any], old_id: str | None) -> Change:
        doc, left_out = decoder.document(raw)
        missing = frozenset(left_out)
        key = {name: doc[name] for name in decoder.relation.key_names if name in doc}
        id = row_id(decoder.relation, raw)
        moved_from = None if old_id == id else old_id
        return self._where(lsn, Row(doc, missing=missing), before, key, missing, id, moved_from)

    def _where(
        self,
        lsn: LSN,
        new: Row,
        old: dict[str, Any],
        key: dict[str, Any],
        missing: frozenset[str],
        id: str | None,
        old_id: str | None,
    ) -> Change:
        assert self.open
        return Change(
            lsn, self.open.commit_lsn, self.open.xid, self.open.commit_time, new, old, key, missing, id, old_id
        )

    def _truncate(self, message: pgoutput.Truncate, relations: list[Relation], lsn: LSN) -> None:
        assert self.open
        if relations:
            told = Truncation(
                lsn,
                self.open.commit_lsn,
                self.open.xid,
                self.open.commit_time,
                message.cascade,
                message.restart_identity,
            )
            self._tell(self._handler.handle_truncate, told, relations)

    def _message(self, message: pgoutput.LogicalMessage) -> None:
        within = self.open if message.transactional else None
        told = Message(
            message.lsn,
            within.commit_lsn if within else message.lsn,
            within.xid if within else None,
            within.commit_time if within else None,
            message.transactional,
            message.prefix,
            message.content,
        )
        if within:
            self._tell(self._handler.handle_message, told)
        else:
            # It stands in the log by itself, like a transaction of its own that ends where it is.
            self.writer.begin(message.lsn, datetime.now(UTC))
            self._call(self._handler.handle_message, told)
            self.writer.commit(message.lsn, message.lsn)
            self.end_lsn = max(self.end_lsn, message.lsn)

    def _transaction(self, lsn: LSN) -> Transaction:
        assert self.open
        return Transaction(lsn, self.open.commit_lsn, self.open.xid, self.open.commit_time, self.open.origin)

    def _change(self, method: Callable[[Change, Relation], None], relation: Relation, change: Change) -> None:
        self._current = (change, relation)
        self._tell(method, change, relation)
        self._current = None

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        self._handling = True
        try:
            method(*args)
        except DbsyncError:
            raise
        except Exception as error:
            raise self._failed(method, args, error) from error
        finally:
            self._handling = False

    def _failed(self, method: Callable[..., None], args: tuple[Any, ...], error: Exception) -> HandlerError:
        words = str(error).partition("\n")[0]
        return HandlerError(
            f"{type(self._handler).__name__}.{method.__name__} raised {type(error).__name__}: {words} ({_place(args)})."
        )


def _place(args: tuple[Any, ...]) -> str:
    where = [arg.doctype for arg in args if isinstance(arg, Relation)]
    return " ".join([*(f"in {table}" for table in where), *(f"at {arg.lsn}" for arg in args if hasattr(arg, "lsn"))])


def mirrors(handler: MessageHandler) -> bool:
    """Whether all that the handler does is to mirror rows."""
    methods = [name for name in dir(MirrorHandler) if name.startswith("handle_")]
    return all(getattr(type(handler), name) is getattr(MirrorHandler, name) for name in methods)


def dispatch_for(handler: MessageHandler, keyless: Keyless, *args: Any) -> Dispatch:
    """The way changes go: unopened for a plain mirror, message by message for a handler of the user's own."""
    return MirrorDispatch(keyless, *args) if mirrors(handler) else HandlerDispatch(handler, *args)


def hears_messages(handler: MessageHandler) -> bool:
    """Whether the handler does something with logical messages.

    In a transaction in progress PostgreSQL does not say which savepoint a message belongs to: one that was rolled back
    could not be told from one that was not. So for such a handler transactions have to come at their commit.
    """
    return type(handler).handle_message is not MessageHandler.handle_message


def _oid(frame: memoryview) -> int:
    oid: int = _TAG_AND_OID.unpack_from(frame, HEADER_BYTES)[1]
    return oid


def _start_lsn(frame: memoryview) -> LSN:
    return LSN(int.from_bytes(frame[1:9], "big"))


def _has_other_ids(known: Relation, relation: Relation) -> bool:
    """Whether ids are made of other columns; one that was only renamed is the same."""
    is_renamed = known.key == relation.key and not set(known.key_names) & set(relation.column_names)
    return bool(known.key) and known.key_names != relation.key_names and not is_renamed


def _ids(relation: Relation, message: Any) -> tuple[str | None, str | None]:
    """The id of the row that changed, and the one it had before if that was another; None where it is not told."""
    match message:
        case pgoutput.Update(old=old, new=new) if old is not None:
            id, old_id = row_id(relation, pgoutput.filled(old, new)), row_id(relation, old)
            return id, None if old_id == id else old_id
        case pgoutput.Delete(old=old):
            return row_id(relation, old), None
    return row_id(relation, message.new), None


def _pickled(doctype: str, id: object, content: object) -> bytes:
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise HandlerError(
            f"The document of {doctype} {id} cannot be stored: {error}.",
            "Mark documents of plain values: dicts, lists, numbers, text, dates.",
            retryable=False,
        ) from error
