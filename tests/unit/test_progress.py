"""Two threads and whoever waits for them: nobody waits for ever, and nobody is told too much."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dbsync.errors import BatcherError, DbsyncError
from dbsync.lsn import LSN
from dbsync.progress import Backoff, BatchReport, Handoff, Progress, Totals, as_plain


def report(upserts: int = 1, deletes: int = 2) -> BatchReport:
    return BatchReport(1, LSN(1), LSN(2), 5, 4, upserts, deletes, 0, 0.1, datetime.now(UTC))


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(work())
        except DbsyncError as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, told


def test_applied_only_grows() -> None:
    progress = Progress()
    progress.advance(LSN(10))
    progress.advance(LSN(5))
    assert progress.applied == LSN(10)


def test_reports_add_up() -> None:
    progress = Progress()
    progress.advance(LSN(1), report())
    progress.advance(LSN(2), report())
    assert progress.totals == Totals(changes=10, batches=2, events=8, upserts=2, deletes=4)
    assert progress.last_batch is not None


def test_who_waits_for_a_position_goes_on_when_it_is_applied() -> None:
    progress = Progress()
    thread, told = in_thread(lambda: progress.wait_for(LSN(10)))
    progress.advance(LSN(9))
    assert thread.is_alive()
    progress.advance(LSN(11))
    thread.join(5)
    assert told == [None]


def test_who_waits_is_told_the_first_failure() -> None:
    progress = Progress()
    thread, told = in_thread(lambda: progress.wait_for(LSN(10)))
    first = BatcherError("first")
    progress.fail(first)
    progress.fail(BatcherError("second"))
    thread.join(5)
    assert told == [first]


def test_who_waits_is_told_when_the_run_was_stopped() -> None:
    progress = Progress()
    thread, told = in_thread(lambda: progress.wait_for(LSN(10)))
    progress.finish()
    thread.join(5)
    assert "stopped" in str(told[0])


def test_what_was_applied_before_a_failure_counts() -> None:
    progress = Progress()
    progress.advance(LSN(10))
    progress.fail(BatcherError("later"))
    progress.wait_for(LSN(10))


def test_a_run_that_goes_on_is_not_over() -> None:
    progress = Progress()
    assert not progress.wait_until_over(0.01)
    progress.finish()
    assert progress.wait_until_over(0.01)


def test_lag_is_the_age_of_the_oldest_change_not_applied() -> None:
    progress = Progress()
    assert progress.lag_seconds() == 0
    progress.pending_since = datetime.now(UTC) - timedelta(seconds=5)
    assert 5 <= progress.lag_seconds() < 10
    progress.pending_since = datetime.now(UTC) + timedelta(seconds=5)
    assert progress.lag_seconds() == 0, "the server's clock may be ahead of ours"


def test_batches_are_handed_over_one_at_a_time() -> None:
    handoff = Handoff()
    one, two = Any, object()
    assert handoff.offer(one)  # type: ignore[arg-type]
    assert handoff.in_work is one
    thread, told = in_thread(lambda: handoff.offer(two))  # type: ignore[arg-type]
    assert handoff.take() is one
    time.sleep(0.05)
    assert thread.is_alive()
    handoff.done()
    thread.join(5)
    assert told == [True]
    assert handoff.take() is two


def test_settle_waits_for_the_batch_in_work() -> None:
    handoff = Handoff()
    handoff.offer(object())  # type: ignore[arg-type]
    thread, _ = in_thread(handoff.settle)
    time.sleep(0.05)
    assert thread.is_alive()
    handoff.done()
    thread.join(5)
    assert not thread.is_alive()
    assert handoff.idle


def test_a_closed_handoff_keeps_nobody_waiting() -> None:
    handoff = Handoff()
    handoff.offer(object())  # type: ignore[arg-type]
    offering, told = in_thread(lambda: handoff.offer(object()))  # type: ignore[arg-type]
    settling, _ = in_thread(handoff.settle)
    handoff.close()
    offering.join(5)
    settling.join(5)
    assert told == [False]


def test_a_closed_and_empty_handoff_has_no_more_batches() -> None:
    handoff = Handoff()
    thread, told = in_thread(handoff.take)
    handoff.close()
    thread.join(5)
    assert told == [None]


def test_pauses_grow_up_to_a_limit_and_start_anew_after_a_reset() -> None:
    stopping = threading.Event()
    stopping.set()
    backoff = Backoff(stopping, 0.5, most_seconds=3.0)
    pauses = []
    for _ in range(5):
        pauses.append(backoff.next_seconds)
        backoff.pause()
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.tries == 5
    backoff.reset()
    assert backoff.next_seconds == 0.5


def test_a_pause_does_not_overflow_after_days() -> None:
    backoff = Backoff(threading.Event(), 0.5)
    backoff.tries = 100_000
    assert backoff.next_seconds == 30.0


def test_stopping_cuts_a_pause_short() -> None:
    stopping = threading.Event()
    backoff = Backoff(stopping, 30.0)
    thread, _ = in_thread(backoff.pause)
    stopping.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("value", "plain"),
    [(LSN("1/A"), "1/A"), (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"), (5, 5), (None, None)],
)
def test_plain_values_for_json(value: object, plain: object) -> None:
    assert as_plain(value) == plain
