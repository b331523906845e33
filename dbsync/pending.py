"""Where transactions wait that PostgreSQL streams before it knows how they end.

A file a transaction, removed when the transaction ends. What is given back at its commit is what was added and not
rolled back, in the order it came, in the form a transaction that is sent whole has. In memory are one buffer, whatever
the number and the size of the transactions, and a number for each savepoint that changed something. Nothing outlives
the connection: PostgreSQL sends what was not acknowledged again from its start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dbsync.errors import DecodeError
from dbsync.pgoutput import XLOG_DATA
from dbsync.private import disk_errors

BUFFER_BYTES = 1024 * 1024

# Inside a stream the id of the subtransaction stands between the tag and the rest of the message.
_XID_AT = XLOG_DATA.size + 1
_XID_END = _XID_AT + 4
_XID_BYTES = 4
_SIZE_BYTES = 4
_ORIGIN, _RELATION = b"OR"


@dataclass(slots=True)
class _Transaction:
    path: Path
    xid: int
    size_bytes: int = 0  # of the file, and of what is still in the buffer
    last: bytes = b""  # the subtransaction of the newest frame
    origin: bytes = b""  # the frame that says where all of it came from
    # Where each subtransaction has its first frame, in the order of the file.
    starts: dict[int, int] = field(default_factory=dict)
    # When each table was described last, as a count of descriptions.
    described: dict[int, int] = field(default_factory=dict)


class Pending:
    """The transactions in progress. Only one of them is `open` at a time: the one whose segment is being sent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._transactions: dict[int, _Transaction] = {}
        self._buffer = bytearray()
        self.descriptions = 0  # of tables, in this connection; also counted by who takes whole transactions
        self.open: _Transaction | None = None

    def __len__(self) -> int:
        return len(self._transactions)

    def start(self, xid: int, *, first: bool) -> None:
        """A segment of the transaction begins."""
        if first:
            self.forget(xid)
            self._transactions[xid] = _Transaction(self._folder / f"transaction-{xid}", xid)
        if xid not in self._transactions:
            raise DecodeError(f"The log goes on with transaction {xid}, which it did not begin.")
        self.open = self._transactions[xid]

    def add(self, frame: memoryview) -> None:
        """A frame of the open segment, as it came."""
        transaction = self.open
        assert transaction
        tag = frame[XLOG_DATA.size]
        if tag == _ORIGIN:  # carries no subtransaction
            transaction.origin = frame.tobytes()
            return
        subxid = frame[_XID_AT:_XID_END].tobytes()
        if subxid != transaction.last:
            transaction.last = subxid
            transaction.starts.setdefault(int.from_bytes(subxid, "big"), transaction.size_bytes)
        if tag == _RELATION:
            self.descriptions += 1
            transaction.described[int.from_bytes(frame[_XID_END : _XID_END + 4], "big")] = self.descriptions
        size = len(frame) - _XID_BYTES
        buffer = self._buffer
        buffer += size.to_bytes(_SIZE_BYTES, "big")
        buffer += frame[:_XID_AT]
        buffer += frame[_XID_END:]
        transaction.size_bytes += _SIZE_BYTES + size
        if len(buffer) >= BUFFER_BYTES:
            self._write(transaction)

    def stop(self) -> None:
        """The open segment ends. Its file is not kept open: there may be more transactions than files one may open."""
        if self.open:
            self._write(self.open)
            self.open = None

    def abort(self, xid: int, subxid: int) -> None:
        """The transaction was rolled back, or this subtransaction of it.

        What came since a subtransaction's first change is its own or of one within it, and those are rolled back too.
        """
        if xid == subxid:
            return self.forget(xid)
        transaction = self._transactions.get(xid)
        if transaction is None:
            return None
        # PostgreSQL describes the tables anew after this, in whatever comes next.
        transaction.described.clear()
        transaction.last = b""
        start = transaction.starts.get(subxid)
        if start is None:
            return None
        while transaction.starts and next(reversed(transaction.starts.values())) >= start:
            transaction.starts.popitem()
        with disk_errors(self._folder):
            os.truncate(transaction.path, start)
        transaction.size_bytes = start
        return None

    def frames(self, xid: int) -> Iterator[memoryview]:
        """What the transaction is made of now that it has committed, each frame as if it came outside a stream."""
        transaction = self._transactions.get(xid)
        if transaction is None:
            raise DecodeError(f"The log commits transaction {xid}, which it did not begin.")
        if transaction.origin:
            yield memoryview(transaction.origin)
        if transaction.size_bytes:
            with disk_errors(self._folder):
                yield from _read(transaction.path)

    def described(self, xid: int) -> dict[int, int]:
        """When the transaction had its tables described: by oid, as a count of descriptions."""
        return self._transactions[xid].described

    def forget(self, xid: int) -> None:
        """The transaction is over."""
        transaction = self._transactions.pop(xid, None)
        if transaction:
            transaction.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """The connection is gone, and all that was in progress with it."""
        self._transactions.clear()
        self._buffer.clear()
        self.open = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, transaction: _Transaction) -> None:
        if self._buffer:
            with disk_errors(self._folder), transaction.path.open("ab", buffering=0) as file:
                _write_all(file.fileno(), self._buffer)
            self._buffer.clear()


def _write_all(descriptor: int, content: bytearray) -> None:
    with memoryview(content) as rest:
        written = 0
        while written < len(rest):
            written += os.write(descriptor, rest[written:])


def _read(path: Path) -> Iterator[memoryview]:
    """The frames of a file, a buffer in memory at a time; they stay what they are when the next ones are read."""
    with path.open("rb") as file:
        left, wanted = b"", BUFFER_BYTES
        while read := file.read(wanted):
            content = memoryview(left + read)
            at, wanted = 0, BUFFER_BYTES
            while (start := at + _SIZE_BYTES) <= len(content):
                end = start + int.from_bytes(content[at:start], "big")
                if end > len(content):
                    wanted = max(wanted, end - len(content))  # a wide row is read at once, not a buffer at a time
                    break
                yield content[start:end]
                at = end
            left = content[at:].tobytes()
    if left:
        raise DecodeError(f"{path.name} ends in the middle of a frame.")
