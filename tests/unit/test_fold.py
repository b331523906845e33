"""Columns are folded, not rows: an event takes what it lacks from the newest event before it that has it."""

from __future__ import annotations

import pickle
from typing import Any

import oracle
import pytest

from dbsync.errors import DecodeError
from dbsync.fold import Event, Final, Opener, Partial, Source, fold, key_texts, merge
from dbsync.spool import DELETED, FRAME, FULL, PARTIAL, PICKLE

TABLE = oracle.table(1, "t")
PAIR = oracle.table(2, "pair", key=2)
SOURCE = Source(TABLE, ("1",))


def full(id: str, **doc: Any) -> Event:
    return Event("t", id, FULL, PICKLE, -1, pickle.dumps(doc))


def partial(id: str, *missing: str, prior: str | None = None, **doc: Any) -> Event:
    return Event("t", id, PARTIAL, PICKLE, -1, pickle.dumps(Partial(doc, missing, SOURCE)), prior)


def deleted(id: str) -> Event:
    return Event("t", id, DELETED, PICKLE, -1, None)


def folded(*events: Event) -> dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]]:
    return {final.id: (final.doc, final.missing) for final in fold([events], Opener(()))}


def test_the_newest_whole_event_counts() -> None:
    assert folded(full("1", a=1), full("1", a=2)) == {"1": ({"a": 2}, ())}


def test_a_left_out_value_comes_from_the_newest_that_has_it() -> None:
    events = full("1", a=1, big="x"), full("1", a=2, big="y"), partial("1", "big", a=3), partial("1", "big", a=4)
    assert folded(*events) == {"1": ({"a": 4, "big": "y"}, ())}


def test_each_column_comes_from_its_own_event() -> None:
    events = full("1", a=1, b=1), partial("1", "b", a=2), partial("1", "a", b=3)
    assert folded(*events) == {"1": ({"a": 2, "b": 3}, ())}


def test_null_is_a_value() -> None:
    assert folded(full("1", big=None), partial("1", "big", a=1)) == {"1": ({"a": 1, "big": None}, ())}


def test_what_nobody_had_stays_missing() -> None:
    assert folded(partial("1", "b", "c", a=1), partial("1", "a", "c", b=2)) == {"1": ({"a": 1, "b": 2}, ("c",))}


def test_a_deleted_row_gives_nothing_to_its_successor() -> None:
    assert folded(full("1", big="x"), deleted("1"), partial("1", "big", a=1)) == {"1": ({"a": 1}, ("big",))}


def test_a_delete_is_final() -> None:
    assert folded(full("1", a=1), deleted("1")) == {"1": (None, ())}


def test_a_changed_key_takes_its_values_along() -> None:
    events = full("1", big="x"), deleted("1"), partial("2", "big", prior="1", a=1)
    assert folded(*events) == {"1": (None, ()), "2": ({"a": 1, "big": "x"}, ())}


def test_a_changed_key_takes_nothing_from_who_had_the_key_before() -> None:
    events = (
        *(full("2", big="other"), deleted("2"), full("1", big="x")),
        *(deleted("1"), partial("2", "big", prior="1", a=1)),
    )
    assert folded(*events)["2"] == ({"a": 1, "big": "x"}, ())


def test_a_key_that_changes_and_changes_back() -> None:
    events = (
        *(full("1", big="x"), deleted("1"), partial("2", "big", prior="1", a=1)),
        *(deleted("2"), partial("1", "big", prior="2", a=2)),
    )
    assert folded(*events) == {"1": ({"a": 2, "big": "x"}, ()), "2": (None, ())}


def test_groups_do_not_mix() -> None:
    finals = list(fold([[full("1", big="x")], [partial("1", "big", a=1)]], Opener(())))
    assert [final.missing for final in finals] == [(), ("big",)]


def test_a_frame_is_opened_with_its_relation() -> None:
    source = oracle.Source(TABLE, PAIR)
    source.insert("public.pair", k0="ü", k1="", plain=None, big="B", huge="H")
    source.update("public.pair", oracle.row_id(PAIR, {"k0": "ü", "k1": ""}), k1="2")
    source.commit()
    insert, update = source.log[0].messages
    opener = Opener((TABLE, PAIR))
    whole = opener.open(Event("t", "id", FULL, FRAME, 1, insert))
    assert whole == Final("t", "id", {"k0": "ü", "k1": "", "plain": None, "big": "B", "huge": "H"})
    moved = opener.open(Event("t", '["ü", "2"]', PARTIAL, FRAME, 1, update))
    assert moved.doc == {"k0": "ü", "k1": "2", "plain": None}
    assert moved.missing == ("big", "huge")
    assert moved.source == Source(PAIR, ("ü", "2"))


def test_a_damaged_frame_is_refused() -> None:
    source = oracle.Source(TABLE)
    source.insert("public.t", k0="1", plain="x")
    source.commit()
    frame = source.log[0].messages[0]
    with pytest.raises(DecodeError):
        Opener((TABLE,)).open(Event("t", "1", FULL, FRAME, 0, frame[:-3]))


def test_merging_with_nothing_changes_nothing() -> None:
    newer = Final("t", "1", {"a": 1}, ("b",))
    assert merge(Final("t", "1", None), newer) is newer
    assert merge(Final("t", "1", {"b": 2}), newer) == Final("t", "1", {"a": 1, "b": 2})


@pytest.mark.parametrize("texts", [("",), ("a",), ('["x"]',)])
def test_an_id_of_one_column_is_its_text(texts: tuple[str, ...]) -> None:
    assert key_texts(TABLE, texts[0]) == texts


def test_an_id_of_several_columns_is_a_json_array() -> None:
    assert key_texts(PAIR, '["1", "\\u00fc\\""]') == ("1", 'ü"')
