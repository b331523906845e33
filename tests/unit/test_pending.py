"""What waits for its commit comes back whole, in order, and without what was rolled back."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from dbsync import pending as module
from dbsync.errors import DecodeError
from dbsync.pending import Pending

HEADER = b"w" + bytes(24)


def frame(subxid: int, content: bytes, tag: bytes = b"I") -> memoryview:
    return memoryview(HEADER + tag + struct.pack(">I", subxid) + content)


def plain(content: bytes) -> bytes:
    return HEADER + b"I" + content


class Transaction:
    """The truth: a stack of savepoints, each with what was done since it, as (subxid, content) in order."""

    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.levels: list[tuple[int, list[int]]] = [(xid, [xid])]  # the subxid, and all that became part of it
        self.done: list[tuple[int, bytes]] = []
        self.started = False


def step(chance: random.Random, store: Pending, transaction: Transaction, new_xid: int) -> None:
    """A segment, or a savepoint set, released or rolled back."""
    levels, kind = transaction.levels, chance.choice(["segment", "segment", "savepoint", "release", "rollback"])
    if kind == "segment":
        store.start(transaction.xid, first=not transaction.started)
        transaction.started = True
        for _ in range(chance.randrange(6)):
            content = chance.randbytes(chance.choice([0, 5, 40, 300]))
            store.add(frame(levels[-1][0], content))
            transaction.done.append((levels[-1][0], content))
        store.stop()
    elif kind == "savepoint":
        levels.append((new_xid, [new_xid]))
    elif len(levels) > 1:
        _, parts = levels.pop()
        if kind == "release":
            levels[-1][1].extend(parts)
        else:
            for subxid in sorted(parts, reverse=chance.random() < 0.5):
                store.abort(transaction.xid, subxid)
            transaction.done = [one for one in transaction.done if one[0] not in parts]


@pytest.mark.parametrize("seed", range(60))
def test_interleaved_transactions_come_back_as_they_were_left(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", 64)
    chance, store, xids = random.Random(seed), Pending(tmp_path), iter(range(1, 10_000))
    running: dict[int, Transaction] = {}
    for _ in range(400):
        if len(running) < 4:
            xid = next(xids)
            running[xid] = Transaction(xid)
        transaction = chance.choice(list(running.values()))
        step(chance, store, transaction, next(xids))
        if chance.random() < 0.05 and transaction.started:
            del running[transaction.xid]
            if chance.random() < 0.3:
                store.abort(transaction.xid, transaction.xid)
                continue
            got = [bytes(found) for found in store.frames(transaction.xid)]
            assert got == [plain(content) for _, content in transaction.done]
            store.forget(transaction.xid)
    kept = {f"transaction-{xid}" for xid, one in running.items() if one.started}
    assert {path.name for path in tmp_path.iterdir()} <= kept
    assert len(store) == len(kept)


def test_what_was_rolled_back_takes_no_room(tmp_path: Path) -> None:
    store = Pending(tmp_path)
    for n in range(50):
        store.start(1, first=n == 0)
        store.add(frame(2 + n, bytes(1000)))
        store.stop()
        store.abort(1, 2 + n)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0
    assert list(store.frames(1)) == []


def test_the_origin_of_a_transaction_comes_first_whatever_is_rolled_back(tmp_path: Path) -> None:
    store, origin = Pending(tmp_path), HEADER + b"O" + bytes(8) + b"elsewhere\0"
    store.start(1, first=True)
    store.add(memoryview(origin))
    store.add(frame(2, b"gone"))
    store.stop()
    store.abort(1, 2)
    store.start(1, first=False)
    store.add(frame(1, b"row"))
    store.stop()
    assert [bytes(found) for found in store.frames(1)] == [origin, plain(b"row")]


def test_a_frame_larger_than_the_buffer_comes_back_whole(tmp_path: Path) -> None:
    store, large = Pending(tmp_path), bytes(3 * module.BUFFER_BYTES)
    store.start(1, first=True)
    store.add(frame(1, large))
    store.add(frame(1, b"small"))
    store.stop()
    assert [bytes(found) for found in store.frames(1)] == [plain(large), plain(b"small")]


def test_nothing_is_left_when_the_connection_is_gone(tmp_path: Path) -> None:
    store = Pending(tmp_path / "pending")
    (tmp_path / "pending").mkdir()
    store.start(1, first=True)
    store.add(frame(1, b"row"))
    store.discard()
    assert (list(tmp_path.iterdir()), len(store), store.open) == ([], 0, None)


def test_a_transaction_that_was_never_begun_is_refused(tmp_path: Path) -> None:
    store = Pending(tmp_path)
    with pytest.raises(DecodeError, match="transaction 7"):
        store.start(7, first=False)
    with pytest.raises(DecodeError, match="transaction 7"):
        list(store.frames(7))
