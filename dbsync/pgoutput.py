"""From the bytes of logical replication to messages, and back for the one message a client sends.

A pure decoder for pgoutput, protocol versions 1 to 4, and for the frames that carry it. It knows no connection and
keeps no state: the same bytes always give the same message. A message is decoded whole or not at all, and whatever is
wrong with the bytes is a `DecodeError` that carries the offset.

Column values stay the bytes PostgreSQL sent: a tuple holds `bytes` (text format), `None` (NULL), `UNCHANGED` (a TOASTed
value the log does not carry) or `Binary`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from struct import Struct
from typing import Final, Literal, TypeAlias

from dbsync.errors import DecodeError
from dbsync.lsn import LSN


class Unchanged(Enum):
    """The type of `UNCHANGED`; an Enum, so that the one member stays the same object through pickle and copy."""

    UNCHANGED = "u"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Binary:
    """A value in the type's binary format, which comes only when the option `binary` is asked for."""

    data: bytes


Value: TypeAlias = bytes | Binary | Literal[Unchanged.UNCHANGED] | None
Tuple: TypeAlias = tuple[Value, ...]
OldKind: TypeAlias = Literal["K", "O"]


@dataclass(frozen=True, slots=True)
class Begin:
    final_lsn: LSN
    commit_time: datetime
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    flags: int
    commit_lsn: LSN
    end_lsn: LSN
    commit_time: datetime


@dataclass(frozen=True, slots=True)
class Origin:
    commit_lsn: LSN
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """What a table looks like from here on. `namespace` is empty for pg_catalog, as PostgreSQL sends it."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Type:
    oid: int
    namespace: str
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    relation_oid: int
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """`old` is the old key ('K'), the whole old row ('O'), or absent when the key did not change."""

    relation_oid: int
    old: Tuple | None
    old_kind: OldKind | None
    new: Tuple
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    relation_oid: int
    old: Tuple
    old_kind: OldKind
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    cascade: bool
    restart_identity: bool
    relation_oids: tuple[int, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    transactional: bool
    lsn: LSN
    prefix: str
    content: bytes
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    xid: int
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    pass


@dataclass(frozen=True, slots=True)
class StreamCommit:
    xid: int
    flags: int
    commit_lsn: LSN
    end_lsn: LSN
    commit_time: datetime


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The position and the time come with protocol 4 and `streaming 'parallel'` only."""

    xid: int
    subxid: int
    abort_lsn: LSN | None = None
    abort_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    flags: int
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    flags: int
    commit_lsn: LSN
    end_lsn: LSN
    commit_time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    flags: int
    prepare_end_lsn: LSN
    rollback_end_lsn: LSN
    prepare_time: datetime
    rollback_time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    flags: int
    prepare_lsn: LSN
    end_lsn: LSN
    prepare_time: datetime
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)


@dataclass(frozen=True, slots=True)
class XLogData:
    start_lsn: LSN
    end_lsn: LSN
    sent_at_us: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    wal_end: LSN
    sent_at: datetime
    reply_requested: bool


XLOG_DATA: Final = Struct(">xQQq")
"""The header in front of an XLogData frame's payload, for a reader that has no time for `decode_frame`."""

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_BYTE = Struct(">B")
_UINT16 = Struct(">H")
_UINT32 = Struct(">I")
_INT32 = Struct(">i")
_UINT64 = Struct(">Q")
_INT64 = Struct(">q")
_KEEPALIVE = Struct(">xQqB")
_STANDBY_STATUS = Struct(">cQQQqB")

# Eight bytes are always an LSN: what its constructor checks cannot fail here, and costs a call per frame.
_lsn: Callable[[int], LSN] = partial(int.__new__, LSN)

_read_uint16 = _UINT16.unpack_from
_read_uint32 = _UINT32.unpack_from

_N, _K, _O = b"NKO"
_TEXT, _NULL, _UNCHANGED, _BINARY = b"tnub"
_REPLICA_IDENTITIES = frozenset("dnfi")


def timestamp(us: int) -> datetime:
    """PostgreSQL's microseconds since 2000-01-01 as a time in UTC."""
    return _time_at(us, 0)


def microseconds(at: datetime) -> int:
    """A time with a zone as PostgreSQL's microseconds since 2000-01-01: the inverse of `timestamp`."""
    return (at - _EPOCH) // _MICROSECOND


def decode(data: bytes | memoryview, *, streaming: bool = False) -> Message:
    """Decode one message. `streaming` says that it stands between a StreamStart and its StreamStop."""
    data = bytes(data)
    if not data:
        raise DecodeError("A message without a single byte is not pgoutput.", offset=0)
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        raise DecodeError(f"{data[:1]!r} is not the tag of any pgoutput message.", offset=0)
    return decoder(data, streaming)


def split_tuple(data: bytes, offset: int) -> tuple[list[Value], int]:
    """Cut the tuple at `offset` into its column values; also returns where the tuple ends."""
    values: list[Value] = []
    append = values.append
    read_length = _read_uint32
    try:
        (count,) = _read_uint16(data, offset)
        offset += 2
        for _ in range(count):
            kind = data[offset]
            if kind == _TEXT:
                # Read without a sign, a negative length points far past the end, where the check below finds it.
                start = offset + 5
                offset = start + read_length(data, offset + 1)[0]
                append(data[start:offset])
            elif kind == _NULL:
                append(None)
                offset += 1
            elif kind == _UNCHANGED:
                append(UNCHANGED)
                offset += 1
            elif kind == _BINARY:
                start = offset + 5
                offset = start + read_length(data, offset + 1)[0]
                append(Binary(data[start:offset]))
            else:
                raise DecodeError(f"{chr(kind)!r} is not the kind of any column value.", offset=offset)
    except (IndexError, struct.error) as error:
        raise _truncated(data) from error
    if offset > len(data):
        raise _truncated(data)
    return values, offset


def filled(old: Sequence[Value], new: Sequence[Value]) -> Tuple:
    """The new row, with what it left out taken from the old one.

    A value that is left out is TOASTed and so never NULL: where the old row has a NULL there, it is not known. (Under
    the name of a root with FULL identity a partition with another identity sends old rows that hold only its own key.)
    """
    return tuple(o if n is UNCHANGED and o is not None else n for o, n in zip(old, new, strict=True))


def decode_frame(data: bytes | memoryview) -> XLogData | Keepalive:
    """Decode what the walsender puts into one CopyData message."""
    tag = bytes(data[:1])
    if tag == b"w":
        return _xlog_data(data)
    if tag == b"k":
        return _keepalive(data)
    raise DecodeError(f"{tag!r} is not the tag of any replication frame.", offset=0)


def standby_status(write: int, flush: int, apply: int, now_us: int, reply: bool = False) -> bytes:
    """Encode the feedback for the walsender: how far the log is received, safe and applied."""
    return _STANDBY_STATUS.pack(b"r", write, flush, apply, now_us, reply)


def _xlog_data(data: bytes | memoryview) -> XLogData:
    if len(data) < XLOG_DATA.size:
        raise _truncated(data)
    start, end, sent_at_us = XLOG_DATA.unpack_from(data)
    return XLogData(_lsn(start), _lsn(end), sent_at_us, bytes(data[XLOG_DATA.size :]))


def _keepalive(data: bytes | memoryview) -> Keepalive:
    if len(data) < _KEEPALIVE.size:
        raise _truncated(data)
    if len(data) > _KEEPALIVE.size:
        raise _trailing(data, _KEEPALIVE.size)
    wal_end, sent_at_us, reply = _KEEPALIVE.unpack(data)
    return Keepalive(_lsn(wal_end), _time_at(sent_at_us, 9), reply != 0)


def _time_at(us: int, offset: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=us)
    except OverflowError as error:
        raise DecodeError(f"{us} microseconds since 2000 is not a time Python can hold.", offset=offset) from error


def _truncated(data: bytes | memoryview) -> DecodeError:
    return DecodeError(f"The message ends too early, after {len(data)} bytes.", offset=len(data))


def _trailing(data: bytes | memoryview, offset: int) -> DecodeError:
    return DecodeError(f"The message goes on for {len(data) - offset} bytes after its end.", offset=offset)


def _insert(data: bytes, streaming: bool) -> Insert:
    xid, relation_oid, offset = _row_head(data, streaming)
    if data[offset] != _N:
        raise _bad_tuple_tag(data, offset)
    new, end = split_tuple(data, offset + 1)
    if end != len(data):
        raise _trailing(data, end)
    return Insert(relation_oid, tuple(new), xid)


def _update(data: bytes, streaming: bool) -> Update:
    xid, relation_oid, offset = _row_head(data, streaming)
    old: Tuple | None = None
    old_kind: OldKind | None = None
    tag = data[offset]
    if tag in (_K, _O):
        old_kind = "K" if tag == _K else "O"
        values, offset = split_tuple(data, offset + 1)
        old = tuple(values)
        if offset == len(data):
            raise _truncated(data)
        tag = data[offset]
    if tag != _N:
        raise _bad_tuple_tag(data, offset)
    new, end = split_tuple(data, offset + 1)
    if end != len(data):
        raise _trailing(data, end)
    return Update(relation_oid, old, old_kind, tuple(new), xid)


def _delete(data: bytes, streaming: bool) -> Delete:
    xid, relation_oid, offset = _row_head(data, streaming)
    tag = data[offset]
    if tag not in (_K, _O):
        raise _bad_tuple_tag(data, offset)
    old, end = split_tuple(data, offset + 1)
    if end != len(data):
        raise _trailing(data, end)
    return Delete(relation_oid, tuple(old), "K" if tag == _K else "O", xid)


def _row_head(data: bytes, streaming: bool) -> tuple[int | None, int, int]:
    """The xid of a streamed change, the relation, and the offset of the first tuple's tag, which is sure to exist."""
    tag_at = 9 if streaming else 5
    if len(data) <= tag_at:
        raise _truncated(data)
    (relation_oid,) = _read_uint32(data, tag_at - 4)
    return (_read_uint32(data, 1)[0] if streaming else None), relation_oid, tag_at


def _bad_tuple_tag(data: bytes, offset: int) -> DecodeError:
    return DecodeError(f"{data[offset : offset + 1]!r} does not start a tuple here.", offset=offset)


class _Reader:
    """Reads the fields of one of the rarer messages in turn."""

    __slots__ = ("_data", "_offset")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 1

    def _number(self, layout: Struct) -> int:
        start = self._offset
        self._offset = start + layout.size
        if self._offset > len(self._data):
            raise _truncated(self._data)
        number: int = layout.unpack_from(self._data, start)[0]
        return number

    def byte(self) -> int:
        return self._number(_BYTE)

    def uint16(self) -> int:
        return self._number(_UINT16)

    def uint32(self) -> int:
        return self._number(_UINT32)

    def int32(self) -> int:
        return self._number(_INT32)

    def lsn(self) -> LSN:
        return _lsn(self._number(_UINT64))

    def time(self) -> datetime:
        return _time_at(self._number(_INT64), self._offset - _INT64.size)

    def string(self) -> str:
        start = self._offset
        end = self._data.find(0, start)
        if end < 0:
            raise DecodeError("A name in the message does not end.", offset=start)
        self._offset = end + 1
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError as error:
            raise DecodeError("A name in the message is not UTF-8.", offset=start + error.start) from error

    def bytes(self, length: int) -> bytes:
        start = self._offset
        self._offset = start + length
        if self._offset > len(self._data):
            raise _truncated(self._data)
        return self._data[start : self._offset]

    def choice(self, allowed: frozenset[str], what: str) -> str:
        start = self._offset
        letter = chr(self.byte())
        if letter not in allowed:
            raise DecodeError(f"{letter!r} is not a {what}.", offset=start)
        return letter

    def xid(self, streaming: bool) -> int | None:
        return self.uint32() if streaming else None

    def at_end(self) -> bool:
        return self._offset == len(self._data)

    def end(self) -> None:
        if self._offset != len(self._data):
            raise _trailing(self._data, self._offset)


def _begin(reader: _Reader, _: bool) -> Begin:
    return Begin(reader.lsn(), reader.time(), reader.uint32())


def _commit(reader: _Reader, _: bool) -> Commit:
    return Commit(reader.byte(), reader.lsn(), reader.lsn(), reader.time())


def _origin(reader: _Reader, _: bool) -> Origin:
    return Origin(reader.lsn(), reader.string())


def _relation(reader: _Reader, streaming: bool) -> Relation:
    xid = reader.xid(streaming)
    oid, namespace, name = reader.uint32(), reader.string(), reader.string()
    replica_identity = reader.choice(_REPLICA_IDENTITIES, "replica identity")
    columns = tuple(_column(reader) for _ in range(reader.uint16()))
    return Relation(oid, namespace, name, replica_identity, columns, xid)


def _column(reader: _Reader) -> Column:
    flags = reader.byte()
    return Column(reader.string(), reader.uint32(), reader.int32(), bool(flags & 1))


def _type(reader: _Reader, streaming: bool) -> Type:
    xid = reader.xid(streaming)
    return Type(reader.uint32(), reader.string(), reader.string(), xid)


def _truncate(reader: _Reader, streaming: bool) -> Truncate:
    xid = reader.xid(streaming)
    count, options = reader.uint32(), reader.byte()
    oids = tuple(reader.uint32() for _ in range(count))
    return Truncate(bool(options & 1), bool(options & 2), oids, xid)


def _logical_message(reader: _Reader, streaming: bool) -> LogicalMessage:
    xid = reader.xid(streaming)
    flags, lsn, prefix = reader.byte(), reader.lsn(), reader.string()
    return LogicalMessage(bool(flags & 1), lsn, prefix, reader.bytes(reader.uint32()), xid)


def _stream_start(reader: _Reader, _: bool) -> StreamStart:
    return StreamStart(reader.uint32(), reader.byte() == 1)


def _stream_stop(_reader: _Reader, _: bool) -> StreamStop:
    return StreamStop()


def _stream_commit(reader: _Reader, _: bool) -> StreamCommit:
    return StreamCommit(reader.uint32(), reader.byte(), reader.lsn(), reader.lsn(), reader.time())


def _stream_abort(reader: _Reader, _: bool) -> StreamAbort:
    xid, subxid = reader.uint32(), reader.uint32()
    if reader.at_end():
        return StreamAbort(xid, subxid)
    return StreamAbort(xid, subxid, reader.lsn(), reader.time())


def _begin_prepare(reader: _Reader, _: bool) -> BeginPrepare:
    return BeginPrepare(reader.lsn(), reader.lsn(), reader.time(), reader.uint32(), reader.string())


def _prepare(reader: _Reader, _: bool) -> Prepare:
    return Prepare(reader.byte(), reader.lsn(), reader.lsn(), reader.time(), reader.uint32(), reader.string())


def _commit_prepared(reader: _Reader, _: bool) -> CommitPrepared:
    return CommitPrepared(reader.byte(), reader.lsn(), reader.lsn(), reader.time(), reader.uint32(), reader.string())


def _rollback_prepared(reader: _Reader, _: bool) -> RollbackPrepared:
    return RollbackPrepared(
        reader.byte(), reader.lsn(), reader.lsn(), reader.time(), reader.time(), reader.uint32(), reader.string()
    )


def _stream_prepare(reader: _Reader, _: bool) -> StreamPrepare:
    return StreamPrepare(reader.byte(), reader.lsn(), reader.lsn(), reader.time(), reader.uint32(), reader.string())


def _whole(read: Callable[[_Reader, bool], Message]) -> Callable[[bytes, bool], Message]:
    """A decoder that also sees to it that nothing is left over."""

    def decoder(data: bytes, streaming: bool) -> Message:
        reader = _Reader(data)
        message = read(reader, streaming)
        reader.end()
        return message

    return decoder


_DECODERS: dict[int, Callable[[bytes, bool], Message]] = {
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("B"): _whole(_begin),
    ord("C"): _whole(_commit),
    ord("O"): _whole(_origin),
    ord("R"): _whole(_relation),
    ord("Y"): _whole(_type),
    ord("T"): _whole(_truncate),
    ord("M"): _whole(_logical_message),
    ord("S"): _whole(_stream_start),
    ord("E"): _whole(_stream_stop),
    ord("c"): _whole(_stream_commit),
    ord("A"): _whole(_stream_abort),
    ord("b"): _whole(_begin_prepare),
    ord("P"): _whole(_prepare),
    ord("K"): _whole(_commit_prepared),
    ord("r"): _whole(_rollback_prepared),
    ord("p"): _whole(_stream_prepare),
}
