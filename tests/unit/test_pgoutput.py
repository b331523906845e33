"""pgoutput against bytes recorded from real servers, and against bytes that are wrong in a known place."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dbsync.errors import DecodeError
from dbsync.lsn import LSN
from dbsync.pgoutput import (
    UNCHANGED,
    Begin,
    Binary,
    Column,
    Commit,
    Delete,
    Insert,
    Keepalive,
    LogicalMessage,
    Message,
    Relation,
    StreamAbort,
    Truncate,
    Update,
    XLogData,
    decode,
    decode_frame,
    microseconds,
    split_tuple,
    standby_status,
    timestamp,
)

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = (16, 18)

BEGIN = b"B" + struct.pack(">QqI", 0x16_0000_0010, 0, 7)
INSERT = b"I\0\0\0\x05N\0\x03" + b"t\0\0\0\x02ab" + b"n" + b"u"


def recorded(version: int) -> list[dict[str, Any]]:
    text = (RECORDED / f"pgoutput_{version}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def decode_recorded(line: dict[str, Any]) -> Message:
    return decode(bytes.fromhex(line["hex"]), streaming=line["streaming"])


@pytest.mark.parametrize("version", VERSIONS)
def test_decodes_what_postgresql_sent(version: int) -> None:
    for line in recorded(version):
        assert repr(decode_recorded(line)) == line["repr"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recording_holds_every_message(version: int) -> None:
    kinds = {type(decode_recorded(line)) for line in recorded(version)}
    assert kinds == set(Message.__args__)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_message_cut_short_or_prolonged_is_refused(version: int) -> None:
    for line in recorded(version):
        data, streaming = bytes.fromhex(line["hex"]), line["streaming"]
        # The position and the time at the end of a StreamAbort may be left out.
        optional = 9 if isinstance(decode_recorded(line), StreamAbort) else None
        for length in range(len(data)):
            if length != optional:
                with pytest.raises(DecodeError):
                    decode(data[:length], streaming=streaming)
        if len(data) != optional:
            with pytest.raises(DecodeError) as caught:
                decode(data + b"\0", streaming=streaming)
            assert caught.value.offset == len(data)


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_changes_say_what_was_done(version: int) -> None:
    messages = [decode_recorded(line) for line in recorded(version) if line["part"] == "plain"]
    relations = {m.name: m for m in messages if isinstance(m, Relation)}
    plain, whole, indexed = (relations[name].oid for name in ("plain", "whole", "indexed"))
    assert [column.name for column in relations["indexed"].columns if column.is_key] == ["a", "b"]
    assert relations["Größe x"].columns[0] == Column("spalte ü", 23, -1, True)
    assert [relations[n].replica_identity for n in ("plain", "whole", "indexed")] == ["d", "f", "i"]
    assert Update(plain, None, None, (b"1", b"b", b"sad", b"1.50", UNCHANGED)) in messages
    assert Update(plain, (b"2", None, None, None, None), "K", (b"3", None, None, b"NaN", b"")) in messages
    assert Delete(whole, (b"2", None), "O") in messages
    assert Update(indexed, (b"1", b"a", None), "K", (b"1", b"b", b"y")) in messages
    assert Truncate(True, True, (whole, indexed)) in messages
    contents = [(m.transactional, m.prefix, m.content) for m in messages if isinstance(m, LogicalMessage)]
    assert contents == [(True, "prefix", b"content"), (False, "ß", b"\x00\xff")]


def test_a_memoryview_decodes_like_bytes() -> None:
    assert decode(memoryview(INSERT)) == decode(INSERT) == Insert(5, (b"ab", None, UNCHANGED))


def test_positions_and_times_have_their_types() -> None:
    message = decode(BEGIN)
    assert message == Begin(LSN("16/10"), datetime(2000, 1, 1, tzinfo=UTC), 7)
    assert isinstance(message, Begin)
    assert isinstance(message.final_lsn, LSN)


def test_a_streamed_change_carries_its_xid() -> None:
    assert decode(b"I\0\0\0\x09\0\0\0\x05N\0\x00", streaming=True) == Insert(5, (), 9)


def test_the_sign_of_a_type_modifier_is_kept_and_oids_have_none() -> None:
    data = b"R\xff\xff\xff\xffs\0t\0d\0\x01\0c\0\xff\xff\xff\xfe\xff\xff\xff\xff"
    assert decode(data) == Relation(0xFFFFFFFF, "s", "t", "d", (Column("c", 0xFFFFFFFE, -1, False),))


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        pytest.param(b"", 0, id="nothing"),
        pytest.param(b"?", 0, id="unknown tag"),
        pytest.param(b"B\0\0", 3, id="cut"),
        pytest.param(BEGIN + b"x", len(BEGIN), id="trailing byte"),
        pytest.param(b"I\0\0\0\x05", 5, id="no tuple"),
        pytest.param(b"I\0\0\0\x05X\0\0", 5, id="not a new tuple"),
        pytest.param(b"D\0\0\0\x05N\0\0", 5, id="delete with a new tuple"),
        pytest.param(b"U\0\0\0\x05K\0\0", 8, id="old tuple only"),
        pytest.param(b"U\0\0\0\x05K\0\0O\0\0", 8, id="two old tuples"),
        pytest.param(b"I\0\0\0\x05N\0\x01", 8, id="column missing"),
        pytest.param(b"I\0\0\0\x05N\0\x01t\0\0", 11, id="length cut"),
        pytest.param(b"I\0\0\0\x05N\0\x01t\xff\xff\xff\xffab", 15, id="negative length"),
        pytest.param(b"I\0\0\0\x05N\0\x01t\0\0\0\x03ab", 15, id="value cut"),
        pytest.param(b"I\0\0\0\x05N\0\x01b\0\0\0\x03ab", 15, id="binary value cut"),
        pytest.param(b"I\0\0\0\x05N\0\x01z", 8, id="unknown kind of value"),
        pytest.param(b"O" + bytes(8) + b"name", 9, id="name without an end"),
        pytest.param(b"O" + bytes(8) + b"na\xffme\0", 11, id="name not UTF-8"),
        pytest.param(b"R\0\0\0\x01s\0t\0?\0\0", 9, id="unknown replica identity"),
        pytest.param(b"B" + struct.pack(">QqI", 1, 2**63 - 1, 7), 9, id="time out of range"),
        pytest.param(b"T\xff\xff\xff\xff\0\0\0\0\x01", 10, id="more relations than bytes"),
        pytest.param(b"M\0" + bytes(8) + b"p\0\xff\xff\xff\xffx", 17, id="negative content length"),
    ],
)
def test_garbage_says_where_it_is(data: bytes, offset: int) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(data)
    assert caught.value.offset == offset


def test_split_tuple_starts_and_ends_where_told() -> None:
    data = b"??\0\x04" + b"t\0\0\0\0" + b"n" + b"u" + b"b\0\0\0\x01\xff" + b"rest"
    assert split_tuple(data, 2) == ([b"", None, UNCHANGED, Binary(b"\xff")], len(data) - 4)


def test_unchanged_is_one_object_wherever_it_goes() -> None:
    assert pickle.loads(pickle.dumps(UNCHANGED)) is UNCHANGED
    assert copy.deepcopy([UNCHANGED])[0] is UNCHANGED
    assert repr(UNCHANGED) == "UNCHANGED"


def test_messages_can_be_pickled_and_not_changed() -> None:
    message = decode(INSERT)
    assert pickle.loads(pickle.dumps(message)) == message
    with pytest.raises(AttributeError):
        message.xid = 1  # type: ignore[misc, union-attr]


def test_xlog_data() -> None:
    frame = b"w" + struct.pack(">QQq", 1, 2, -3) + BEGIN
    assert decode_frame(frame) == decode_frame(memoryview(frame)) == XLogData(LSN(1), LSN(2), -3, BEGIN)


def test_keepalive() -> None:
    frame = b"k" + struct.pack(">QqB", 0x16_0000_0010, 1_000_000, 1)
    assert decode_frame(frame) == Keepalive(LSN("16/10"), datetime(2000, 1, 1, 0, 0, 1, tzinfo=UTC), True)


@pytest.mark.parametrize(
    "frame",
    [b"", b"x", b"w" + bytes(23), b"k" + bytes(16), b"k" + bytes(18), b"k" + struct.pack(">QqB", 1, -(2**63), 0)],
)
def test_a_broken_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_frame(memoryview(frame))


def test_standby_status() -> None:
    expected = b"r" + struct.pack(">QQQqB", 3, 2, 1, 4, 1)
    assert standby_status(LSN(3), LSN(2), LSN(1), 4, reply=True) == expected
    assert standby_status(3, 2, 1, 4)[-1:] == b"\0"


def test_times_are_microseconds_since_2000() -> None:
    assert timestamp(-1) == datetime(1999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert microseconds(timestamp(830_000_000_123_456)) == 830_000_000_123_456


def test_commit() -> None:
    data = b"C\0" + struct.pack(">QQq", 1, 2, 0)
    assert decode(data) == Commit(0, LSN(1), LSN(2), datetime(2000, 1, 1, tzinfo=UTC))
