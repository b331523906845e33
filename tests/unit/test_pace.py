"""How fast a refresh reads, by what the source has to do."""

from __future__ import annotations

import pytest

from dbsync import pace
from dbsync.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def busy(clock: Clock, rest: float = 3.0) -> Pace:
    found = Pace(rest)
    clock.now += 1
    found.look(200)
    assert found.is_busy
    return found


def test_a_quiet_source_is_read_as_fast_as_it_can_be(clock: Clock) -> None:
    quiet = Pace(3.0)
    clock.now += 1
    quiet.look(3)
    assert not quiet.is_busy
    assert quiet.rows(100_000) == 100_000
    assert quiet.readers(100_000, 2) == 2
    quiet.read(1.0, 100_000, 10_000_000)
    assert quiet.may_open(3)
    assert not quiet.may_open(4)


def test_beside_others_windows_are_small_and_alone_and_reading_rests(clock: Clock) -> None:
    beside = busy(clock)
    assert beside.rows(100_000) == 20_000
    assert beside.rows(50) == 50
    assert beside.readers(5_000, 4) == 1
    assert beside.readers(20_000, 4) == 2
    assert not beside.may_open(1)
    beside.read(0.2, 20_000, 2_000_000)
    assert not beside.may_open(0)
    clock.now += 0.5
    assert not beside.may_open(0)
    clock.now += 0.2
    assert beside.may_open(0)


def test_wide_rows_make_windows_of_fewer(clock: Clock) -> None:
    beside = busy(clock)
    beside.read(0.1, 10, 10 * 1024 * 1024)
    assert beside.rows(100_000) == 4
    beside.read(0.1, 1, 1 << 30)
    assert beside.rows(100_000) == 1
    beside.read(0.1, 0, 0)  # a chunk without rows says nothing of their width
    assert beside.rows(100_000) == 1


def test_whoever_wants_no_rest_gets_none(clock: Clock) -> None:
    beside = busy(clock, rest=0.0)
    beside.read(5.0, 100, 100)
    assert beside.may_open(0)


def test_work_that_ended_is_forgotten(clock: Clock) -> None:
    beside = busy(clock)
    clock.now += 0.1
    beside.look(200)
    assert beside.is_busy, "too soon to tell"
    clock.now += 1
    beside.look(201)
    assert not beside.is_busy
