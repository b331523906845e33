"""Errors say what happened and what to do, and survive the way from an executor to the driver."""

from __future__ import annotations

import pickle

import pytest

from dbsync import errors
from dbsync.errors import DbsyncError

EXIT_CODES = {
    "DbsyncError": 1,
    "ConfigError": 2,
    "CheckError": 3,
    "SetupError": 4,
    "SlotError": 4,
    "StreamError": 4,
    "DecodeError": 4,
    "RefreshError": 2,
    "HandlerError": 5,
    "BatcherError": 5,
}
RETRYABLE = {"StreamError", "HandlerError", "BatcherError"}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DbsyncError)]


def test_the_tree_is_the_documented_one() -> None:
    assert {kind.__name__ for kind in KINDS} == set(EXIT_CODES)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in EXIT_CODES)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_knows_its_exit_code_and_whether_trying_again_helps(kind: type[DbsyncError]) -> None:
    error = kind("It broke.")
    assert error.exit_code == EXIT_CODES[kind.__name__]
    assert error.retryable == (kind.__name__ in RETRYABLE)


def test_the_text_is_the_sentence_and_then_the_hint() -> None:
    assert str(DbsyncError("It broke.")) == "It broke."
    assert str(DbsyncError("It broke.", "Mend it.")) == "It broke. Mend it."


@pytest.mark.parametrize("kind", KINDS)
def test_errors_can_be_pickled(kind: type[DbsyncError]) -> None:
    error = pickle.loads(pickle.dumps(kind("It broke.", "Mend it.", retryable=True)))
    assert type(error) is kind
    assert (error.message, error.hint, error.retryable) == ("It broke.", "Mend it.", True)
