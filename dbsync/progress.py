"""How far a run has come, shared by the thread that reads, the thread that applies, and whoever waits for them.

`applied` only grows, and is what may be acknowledged: everything before it is in the target. A failure ends the run;
who waits gets it raised.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dbsync.errors import DbsyncError
from dbsync.lsn import LSN
from dbsync.spool import Batch


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch that was applied: what went in, what came out, how long Spark and the Batcher took."""

    number: int
    first_lsn: LSN
    last_lsn: LSN
    changes: int
    events: int
    upserts: int
    deletes: int
    truncates: int
    seconds: float
    at: datetime


@dataclass(frozen=True, slots=True)
class Totals:
    changes: int = 0
    batches: int = 0
    events: int = 0
    upserts: int = 0
    deletes: int = 0

    def plus(self, report: BatchReport) -> Totals:
        return Totals(
            self.changes + report.changes,
            self.batches + 1,
            self.events + report.events,
            self.upserts + report.upserts,
            self.deletes + report.deletes,
        )


@dataclass(slots=True)
class Progress:
    applied: LSN = field(default_factory=LSN)
    received: LSN = field(default_factory=LSN)
    read: LSN = field(default_factory=LSN)  # the end of the last transaction that was read whole, on any connection
    held: LSN = field(default_factory=LSN)  # applied up to here, but not acknowledged: a commit is not yet visible
    totals: Totals = field(default_factory=Totals)
    last_batch: BatchReport | None = None
    failure: DbsyncError | None = None
    pending_since: datetime | None = None  # commit time of the oldest change that is read and not applied
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _finished: bool = False

    def advance(self, lsn: LSN, report: BatchReport | None = None) -> None:
        with self._changed:
            self.applied = max(self.applied, lsn)
            if report:
                self.last_batch = report
                self.totals = self.totals.plus(report)
            self._changed.notify_all()

    def fail(self, error: DbsyncError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def wait_for(self, lsn: LSN) -> None:
        """Until everything before `lsn` is applied; raises what ended the run before that."""
        with self._changed:
            self._changed.wait_for(lambda: self.applied >= lsn or self.failure or self._finished)
            if self.applied >= lsn:
                return
            if self.failure:
                raise self.failure
            raise DbsyncError(f"dbsync was stopped at {self.applied}, before it had applied {lsn}.")

    def wait_until_over(self, seconds: float) -> bool:
        """True when the run has finished or failed within that time."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._finished or self.failure, seconds))

    def lag_seconds(self) -> float:
        since = self.pending_since
        return max(0.0, (datetime.now(UTC) - since).total_seconds()) if since else 0.0


class Handoff:
    """One batch at a time from the thread that reads to the thread that applies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batch: Batch | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        return self._batch is None

    @property
    def in_work(self) -> Batch | None:
        return self._batch

    def offer(self, batch: Batch) -> bool:
        """Hand a batch over as soon as the one before it is applied; False when nobody takes batches any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch is None or self._closed)
            if self._closed:
                return False
            self._batch = batch
            self._changed.notify_all()
            return True

    def take(self) -> Batch | None:
        """The next batch; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch is not None or self._closed)
            return self._batch

    def done(self) -> None:
        with self._changed:
            self._batch = None
            self._changed.notify_all()

    def settle(self) -> None:
        """Until no batch is in work."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch is None or self._closed)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Backoff:
    """Growing pauses between tries, cut short when the run is stopped."""

    def __init__(self, stopping: threading.Event, first_seconds: float, most_seconds: float = 30.0) -> None:
        self._stopping = stopping
        self._first = first_seconds
        self._most = most_seconds
        self.tries = 0

    def reset(self) -> None:
        self.tries = 0

    @property
    def next_seconds(self) -> float:
        return float(min(self._most, self._first * 2 ** min(self.tries, 16)))

    def pause(self) -> None:
        seconds = self.next_seconds
        self.tries += 1
        self._stopping.wait(seconds)


def as_plain(value: Any) -> Any:
    """LSNs as PostgreSQL's text and times as ISO 8601, for JSON."""
    if isinstance(value, LSN):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else value
