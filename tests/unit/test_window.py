"""The rules of a window, one by one: what is released, where it stands, and what is thrown away."""

from __future__ import annotations

import pytest

from dbsync.lsn import LSN
from dbsync.window import HIGH, LOW, Commit, Snapshot, State, Unseen, Window, Windows, widen

TABLE, OTHER = 100, 200
EVERYTHING = Snapshot(1_000, 1_000, frozenset())


def opened(windows: Windows, id: str = "w", *, snapshot: Snapshot = EVERYTHING, low: int = 50) -> Window:
    """A window whose low mark was read and whose rows are all there."""
    window = windows.expect(id, TABLE)
    windows.mark(id, LOW, (low, 1))
    windows.see(id, snapshot)
    windows.read(id, ["rows"])
    return window


def commit(xid: int, lsn: int, *relations: int) -> Commit:
    return Commit(xid, LSN(lsn), frozenset(relations))


def test_rows_are_released_by_the_high_mark_and_stand_at_the_low_mark() -> None:
    windows = Windows()
    window = opened(windows, low=50)
    assert window.state is State.OPEN
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.RELEASED
    assert window.low == (50, 1)
    assert window.content == ["rows"]


def test_a_change_between_the_marks_does_not_void_the_window_since_it_stands_after_its_rows() -> None:
    windows = Windows()
    window = opened(windows, snapshot=Snapshot(10, 12, frozenset({10})), low=50)
    windows.commit(commit(10, 60, TABLE))
    windows.commit(commit(12, 70, TABLE))
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.RELEASED


def test_an_empty_chunk_is_released_like_any_other() -> None:
    windows = Windows()
    windows.expect("w", TABLE)
    windows.mark("w", LOW, (50, 1))
    windows.see("w", EVERYTHING)
    windows.read("w", [])
    window = windows.mark("w", HIGH, (90, 1))
    assert window is not None
    assert window.state is State.RELEASED


def test_no_batch_may_end_while_a_window_is_open() -> None:
    windows = Windows()
    windows.expect("w", TABLE)
    assert not windows.open  # its low mark is not read yet
    windows.mark("w", LOW, (50, 1))
    assert len(windows.open) == 1
    windows.see("w", EVERYTHING)
    windows.read("w", [])
    windows.mark("w", HIGH, (90, 1))
    assert not windows.open


@pytest.mark.parametrize(
    "snapshot",
    [Snapshot(7, 20, frozenset({7, 9})), Snapshot(7, 9, frozenset({7}))],
    ids=["running then", "begun later"],
)
def test_a_commit_before_the_low_mark_that_the_snapshot_does_not_see_voids_the_window(snapshot: Snapshot) -> None:
    windows = Windows()
    windows.commit(commit(9, 40, TABLE))
    window = opened(windows, snapshot=snapshot, low=50)
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.VOID
    assert window.reason is not None
    assert "transaction 9" in window.reason
    assert window.content is None


def test_a_hidden_commit_to_another_table_does_not_matter() -> None:
    windows = Windows()
    windows.commit(commit(9, 40, OTHER))
    window = opened(windows, snapshot=Snapshot(7, 20, frozenset({9})), low=50)
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.RELEASED


def test_a_commit_that_became_visible_is_forgotten_only_when_no_waiting_window_was_read_without_it() -> None:
    windows = Windows()
    windows.commit(commit(9, 40, TABLE))
    windows.expect("w", TABLE)
    windows.see("w", Snapshot(7, 20, frozenset({9})))
    windows.prune(EVERYTHING)
    assert windows.unseen.hold_lsn == 40
    windows.forget("w")
    windows.prune(EVERYTHING)
    assert windows.unseen.hold_lsn is None


def test_only_commits_that_can_still_void_a_window_are_remembered_for_it() -> None:
    windows = Windows()
    opened(windows, snapshot=Snapshot(7, 8, frozenset({7})), low=50)
    windows.commit(commit(7, 40, TABLE))
    windows.commit(commit(9, 45, OTHER))
    for xid in range(10, 10_010):
        windows.commit(commit(xid, 50 + xid, TABLE))
    windows.prune(Snapshot(20_000, 20_000, frozenset()))
    assert len(windows.unseen) == 1
    windows.mark("w", HIGH, (90_000, 1))
    assert windows.all["w"].state is State.VOID


def test_as_long_as_the_low_mark_is_not_read_all_that_the_snapshot_does_not_see_is_remembered() -> None:
    windows = Windows()
    windows.expect("w", TABLE)
    windows.see("w", Snapshot(9, 9, frozenset()))
    windows.commit(commit(9, 40, TABLE))
    windows.prune(EVERYTHING)
    assert windows.unseen.hold_lsn == 40


def test_rows_that_were_thrown_away_are_dropped_once() -> None:
    windows = Windows()
    opened(windows, "a")
    opened(windows, "b")
    windows.void("a", "the table was altered")
    windows.forget("a")
    windows.forget("b")
    assert windows.dropped == [["rows"], ["rows"]]


def test_rows_that_come_for_a_void_window_are_dropped() -> None:
    windows = Windows()
    windows.expect("w", TABLE)
    windows.void("w", "its marks came out of order")
    windows.read("w", ["rows"])
    assert windows.dropped == [["rows"]]


@pytest.mark.parametrize("forgotten", [True, False], ids=["forgotten", "void"])
def test_rows_that_a_batch_has_are_not_dropped_and_what_is_read_later_is_another_reading(forgotten: bool) -> None:
    windows = Windows()
    window = opened(windows)
    windows.mark("w", HIGH, (90, 1))
    windows.forget("w") if forgotten else windows.mark("w", HIGH, (95, 1))
    assert windows.dropped == []
    assert windows.expect("again", TABLE).reading != window.reading
    windows.applied({"w": 0})
    windows.replay()
    assert windows.dropped == []  # the batch has removed them itself


def test_rows_that_only_an_abandoned_batch_had_are_dropped() -> None:
    windows = Windows()
    opened(windows)
    windows.mark("w", HIGH, (90, 1))
    windows.forget("w")
    windows.replay()
    assert windows.dropped == [["rows"]]


def test_windows_that_are_read_one_after_the_other_are_one_reading() -> None:
    windows = Windows()
    first = opened(windows, "a", low=50)
    windows.mark("a", HIGH, (60, 1))
    voided = opened(windows, "b", low=70)
    windows.void("b", "the table was altered")
    windows.applied({"a": 0})
    windows.forget("a")
    windows.forget("b")
    assert first.reading == voided.reading == windows.expect("c", TABLE).reading


def test_a_foreign_mark_changes_nothing() -> None:
    windows = Windows()
    window = opened(windows)
    assert windows.mark("somebody else's", LOW, (60, 1)) is None
    assert windows.mark("somebody else's", HIGH, (61, 1)) is None
    assert window.state is State.OPEN


def test_a_forgotten_window_is_foreign() -> None:
    windows = Windows()
    opened(windows)
    windows.forget("w")
    assert windows.mark("w", HIGH, (90, 1)) is None


def test_a_second_low_mark_voids_the_window() -> None:
    windows = Windows()
    window = opened(windows)
    windows.mark("w", LOW, (60, 1))
    assert window.state is State.VOID
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.VOID


def test_a_high_mark_without_its_low_mark_voids_the_window() -> None:
    windows = Windows()
    window = windows.expect("w", TABLE)
    windows.see("w", EVERYTHING)
    windows.read("w", ["rows"])
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.VOID


def test_a_second_high_mark_voids_what_is_not_yet_applied() -> None:
    windows = Windows()
    window = opened(windows)
    windows.mark("w", HIGH, (90, 1))
    windows.mark("w", HIGH, (95, 1))
    assert window.state is State.VOID


def test_a_high_mark_before_the_rows_are_all_there_voids_the_window() -> None:
    windows = Windows()
    window = windows.expect("w", TABLE)
    windows.mark("w", LOW, (50, 1))
    windows.see("w", EVERYTHING)
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.VOID


def test_windows_of_several_refreshes_may_be_open_at_once() -> None:
    windows = Windows()
    first, second = opened(windows, "a", low=50), opened(windows, "b", low=60)
    windows.mark("b", HIGH, (70, 1))
    assert (first.state, second.state) == (State.OPEN, State.RELEASED)
    windows.mark("a", HIGH, (80, 1))
    assert first.state is State.RELEASED


def test_an_interruption_voids_open_windows_only() -> None:
    windows = Windows()
    released = opened(windows, "a")
    windows.mark("a", HIGH, (60, 1))
    caught = opened(windows, "b")
    expected = windows.expect("c", TABLE)
    windows.interrupt("the table changed")
    assert (released.state, caught.state, expected.state) == (State.RELEASED, State.VOID, State.EXPECTED)


def test_after_a_reconnect_the_marks_come_again_and_release_the_same_rows() -> None:
    windows = Windows()
    window = opened(windows)
    windows.mark("w", HIGH, (90, 1))
    windows.replay()
    assert window.state is State.EXPECTED
    windows.mark("w", LOW, (50, 1))
    windows.mark("w", HIGH, (90, 1))
    assert window.state is State.RELEASED
    assert window.content == ["rows"]


def test_what_is_applied_stays_applied_through_a_reconnect() -> None:
    windows = Windows()
    window = opened(windows)
    windows.mark("w", HIGH, (90, 1))
    windows.applied({"w": 3})
    windows.replay()
    assert window.state is State.APPLIED
    assert window.superseded == 3


def test_the_slot_is_held_at_the_first_commit_that_is_not_yet_visible() -> None:
    unseen = Unseen()
    for found in (commit(5, 30, TABLE), commit(9, 40, OTHER), commit(11, 50, TABLE)):
        unseen.remember(found)
    assert unseen.hold_lsn == 30
    unseen.prune(Snapshot(9, 12, frozenset({9})), [])
    assert unseen.hold_lsn == 40
    assert len(unseen) == 1


def test_transactions_that_changed_no_table_are_not_remembered() -> None:
    windows = Windows()
    windows.commit(commit(5, 30))
    assert len(windows.unseen) == 0


@pytest.mark.parametrize(
    ("xid", "near", "wide"),
    [
        (10, 12, 10),
        (0xFFFFFFF0, 0x1_0000_0005, 0xFFFFFFF0),  # just before the wrap, seen from just after it
        (5, 0x1_0000_0005, 0x1_0000_0005),
        (5, 0xFFFFFFF0, 0x1_0000_0005),  # just after the wrap, seen from just before it
        (3, 0x7_0000_0000, 0x7_0000_0003),
        (0xFFFFFFFF, 0x7_0000_0000, 0x6_FFFF_FFFF),
    ],
)
def test_a_transaction_id_of_32_bits_is_widened_to_the_nearest_of_64(xid: int, near: int, wide: int) -> None:
    assert widen(xid, near) == wide


def test_a_snapshot_is_read_as_postgresql_writes_it() -> None:
    assert Snapshot.parse("10:20:10,14,15") == Snapshot(10, 20, frozenset({10, 14, 15}))
    assert Snapshot.parse("10:10:") == Snapshot(10, 10, frozenset())
