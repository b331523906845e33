"""An LSN is a number that reads and prints the way PostgreSQL does."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsync.lsn import LSN

NUMBERS = st.integers(min_value=0, max_value=2**64 - 1)


@given(NUMBERS)
def test_text_and_number_are_the_same_position(number: int) -> None:
    lsn = LSN(number)
    assert lsn == number
    assert LSN(str(lsn)) == LSN.parse(str(lsn)) == lsn
    assert pickle.loads(pickle.dumps(lsn)) == lsn


@given(NUMBERS, NUMBERS)
def test_order_is_the_order_of_the_log(one: int, other: int) -> None:
    assert (LSN(one) < LSN(other)) == (one < other)
    assert (LSN(one) == LSN(other)) == (one == other)


def test_it_prints_as_postgresql_does() -> None:
    lsn = LSN("16/B374D848")
    assert lsn == 0x16B374D848
    assert str(lsn) == f"{lsn}" == "16/B374D848"
    assert repr(lsn) == "LSN('16/B374D848')"
    assert f"{lsn:d}" == str(int(lsn))
    assert str(LSN()) == "0/0"


@pytest.mark.parametrize("text", ["", "16", "/", "16/", "/16", "16/123456789", "x/1", "1/1/1", "-1/0", "0x1/0", "1 /2"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        LSN(text)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_outside_the_log_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        LSN(number)
