"""Every message survives encode → decode, and no bytes make the decoder fail in any way but its own."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from dbsync import pgoutput as pg
from dbsync.errors import DecodeError
from dbsync.lsn import LSN

uint8 = st.integers(0, 2**8 - 1)
uint32 = st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
lsns = st.integers(0, 2**64 - 1).map(LSN)
times = st.datetimes(timezones=st.just(UTC))
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
values = st.one_of(
    st.none(), st.just(pg.UNCHANGED), st.binary(max_size=20), st.builds(pg.Binary, st.binary(max_size=20))
)
tuples = st.lists(values, max_size=8).map(tuple)
xids = st.none() | uint32
old_kinds = st.sampled_from(["K", "O"])
columns = st.lists(st.builds(pg.Column, names, uint32, int32, st.booleans()), max_size=5).map(tuple)

update_with_old = st.builds(pg.Update, uint32, tuples, old_kinds, tuples, xids)
update_without_old = st.builds(pg.Update, uint32, st.none(), st.none(), tuples, xids)
abort_with_position = st.builds(pg.StreamAbort, uint32, uint32, lsns, times)

messages = st.one_of(
    st.builds(pg.Begin, lsns, times, uint32),
    st.builds(pg.Commit, uint8, lsns, lsns, times),
    st.builds(pg.Origin, lsns, names),
    st.builds(pg.Relation, uint32, names, names, st.sampled_from("dnfi"), columns, xids),
    st.builds(pg.Type, uint32, names, names, xids),
    st.builds(pg.Insert, uint32, tuples, xids),
    update_with_old,
    update_without_old,
    st.builds(pg.Delete, uint32, tuples, old_kinds, xids),
    st.builds(pg.Truncate, st.booleans(), st.booleans(), st.lists(uint32, max_size=4).map(tuple), xids),
    st.builds(pg.LogicalMessage, st.booleans(), lsns, names, st.binary(max_size=30), xids),
    st.builds(pg.StreamStart, uint32, st.booleans()),
    st.builds(pg.StreamStop),
    st.builds(pg.StreamCommit, uint32, uint8, lsns, lsns, times),
    st.builds(pg.StreamAbort, uint32, uint32),
    abort_with_position,
    st.builds(pg.BeginPrepare, lsns, lsns, times, uint32, names),
    st.builds(pg.Prepare, uint8, lsns, lsns, times, uint32, names),
    st.builds(pg.CommitPrepared, uint8, lsns, lsns, times, uint32, names),
    st.builds(pg.RollbackPrepared, uint8, lsns, lsns, times, times, uint32, names),
    st.builds(pg.StreamPrepare, uint8, lsns, lsns, times, uint32, names),
)


def number(layout: str, *numbers: int) -> bytes:
    return struct.pack(">" + layout, *numbers)


def name(text: str) -> bytes:
    return text.encode() + b"\0"


def time(at: datetime) -> bytes:
    since = at - datetime(2000, 1, 1, tzinfo=UTC)
    return number("q", (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds)


def value(column: pg.Value) -> bytes:
    if column is None:
        return b"n"
    if column is pg.UNCHANGED:
        return b"u"
    if isinstance(column, pg.Binary):
        return b"b" + number("I", len(column.data)) + column.data
    return b"t" + number("I", len(column)) + column


def row(columns: pg.Tuple) -> bytes:
    return number("H", len(columns)) + b"".join(map(value, columns))


def prepared(tag: bytes, flags: bytes, m: pg.BeginPrepare | pg.Prepare | pg.StreamPrepare) -> bytes:
    return (
        tag + flags + number("QQ", m.prepare_lsn, m.end_lsn) + time(m.prepare_time) + number("I", m.xid) + name(m.gid)
    )


def encode(m: pg.Message) -> bytes:
    """Written from PostgreSQL's description of the protocol, and not from the decoder."""
    xid = getattr(m, "xid", None)
    top = b"" if xid is None else number("I", xid)
    match m:
        case pg.Begin():
            return b"B" + number("Q", m.final_lsn) + time(m.commit_time) + number("I", m.xid)
        case pg.Commit():
            return b"C" + number("BQQ", m.flags, m.commit_lsn, m.end_lsn) + time(m.commit_time)
        case pg.Origin():
            return b"O" + number("Q", m.commit_lsn) + name(m.name)
        case pg.Relation():
            head = top + number("I", m.oid) + name(m.namespace) + name(m.name) + m.replica_identity.encode()
            columns = (
                number("B", c.is_key) + name(c.name) + number("Ii", c.type_oid, c.type_modifier) for c in m.columns
            )
            return b"R" + head + number("H", len(m.columns)) + b"".join(columns)
        case pg.Type():
            return b"Y" + top + number("I", m.oid) + name(m.namespace) + name(m.name)
        case pg.Insert():
            return b"I" + top + number("I", m.relation_oid) + b"N" + row(m.new)
        case pg.Update():
            old = b"" if m.old is None or m.old_kind is None else m.old_kind.encode() + row(m.old)
            return b"U" + top + number("I", m.relation_oid) + old + b"N" + row(m.new)
        case pg.Delete():
            return b"D" + top + number("I", m.relation_oid) + m.old_kind.encode() + row(m.old)
        case pg.Truncate():
            options = m.cascade | m.restart_identity << 1
            oids = b"".join(number("I", oid) for oid in m.relation_oids)
            return b"T" + top + number("IB", len(m.relation_oids), options) + oids
        case pg.LogicalMessage():
            body = number("I", len(m.content)) + m.content
            return b"M" + top + number("BQ", m.transactional, m.lsn) + name(m.prefix) + body
        case pg.StreamStart():
            return b"S" + number("IB", m.xid, m.first_segment)
        case pg.StreamStop():
            return b"E"
        case pg.StreamCommit():
            return b"c" + number("IBQQ", m.xid, m.flags, m.commit_lsn, m.end_lsn) + time(m.commit_time)
        case pg.StreamAbort():
            if m.abort_lsn is None or m.abort_time is None:
                return b"A" + number("II", m.xid, m.subxid)
            return b"A" + number("IIQ", m.xid, m.subxid, m.abort_lsn) + time(m.abort_time)
        case pg.BeginPrepare():
            return prepared(b"b", b"", m)
        case pg.Prepare():
            return prepared(b"P", number("B", m.flags), m)
        case pg.StreamPrepare():
            return prepared(b"p", number("B", m.flags), m)
        case pg.CommitPrepared():
            lsns = number("BQQ", m.flags, m.commit_lsn, m.end_lsn)
            return b"K" + lsns + time(m.commit_time) + number("I", m.xid) + name(m.gid)
        case pg.RollbackPrepared():
            lsns = number("BQQ", m.flags, m.prepare_end_lsn, m.rollback_end_lsn)
            at = time(m.prepare_time) + time(m.rollback_time)
            return b"r" + lsns + at + number("I", m.xid) + name(m.gid)


def is_streamed(message: pg.Message) -> bool:
    """Whether the message carries the xid that only messages inside a stream have in front."""
    fields = pg.Relation, pg.Type, pg.Insert, pg.Update, pg.Delete, pg.Truncate, pg.LogicalMessage
    return isinstance(message, fields) and message.xid is not None


def refusal(decode: Callable[[], object]) -> DecodeError | None:
    try:
        decode()
    except DecodeError as error:
        return error
    return None


def decode_or_refuse(data: bytes, streaming: bool) -> None:
    error = refusal(lambda: pg.decode(data, streaming=streaming))
    assert error is None or 0 <= error.offset <= len(data)


@given(messages)
def test_every_message_survives(message: pg.Message) -> None:
    assert pg.decode(encode(message), streaming=is_streamed(message)) == message


@given(messages, st.data(), st.booleans())
def test_a_cut_message_is_decoded_or_refused(message: pg.Message, data: st.DataObject, streaming: bool) -> None:
    encoded = encode(message)
    decode_or_refuse(encoded[: data.draw(st.integers(0, len(encoded)))], streaming)


@given(messages, st.data(), st.booleans())
def test_a_changed_message_is_decoded_or_refused(message: pg.Message, data: st.DataObject, streaming: bool) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(uint8)
    decode_or_refuse(bytes(encoded), streaming)


@given(st.sampled_from(b"BCORYIUDTMSEcAbPKrp"), st.binary(max_size=60), st.booleans())
@example(ord("T"), b"\xff\xff\xff\xff\0", False)
def test_noise_is_decoded_or_refused(tag: int, noise: bytes, streaming: bool) -> None:
    decode_or_refuse(bytes([tag]) + noise, streaming)


@given(st.binary(max_size=40) | st.tuples(st.sampled_from([b"w", b"k"]), st.binary(max_size=40)).map(b"".join))
def test_a_noisy_frame_is_decoded_or_refused(noise: bytes) -> None:
    error = refusal(lambda: pg.decode_frame(memoryview(noise)))
    assert error is None or 0 <= error.offset <= len(noise)


@given(tuples, st.binary(max_size=9), st.binary(max_size=9))
def test_a_tuple_is_found_between_other_bytes(values: pg.Tuple, before: bytes, after: bytes) -> None:
    data = before + row(values) + after
    assert pg.split_tuple(data, len(before)) == (list(values), len(data) - len(after))
