"""The user's text and its parameters: split at the placeholders, and every character still known by its place."""

from __future__ import annotations

import pickle

import pytest

from dbsync.errors import RefreshError
from dbsync.statement import Param, Statement, bind


def test_without_params_a_percent_sign_is_one() -> None:
    assert bind("SELECT '50%', id % 2 FROM t WHERE a LIKE '%s'").text == "SELECT '50%', id % 2 FROM t WHERE a LIKE '%s'"


def test_params_in_order() -> None:
    statement = bind("SELECT * FROM t WHERE a = %s AND b LIKE 'x%%' AND c = %s", ["one", None])
    assert statement.text == "SELECT * FROM t WHERE a = $1 AND b LIKE 'x%' AND c = $2"
    assert statement.params == (Param("one"), Param(None))


def test_params_by_name_are_sent_once() -> None:
    statement = bind("SELECT * FROM t WHERE a = %(a)s OR b = %(b)s OR c = %(a)s", {"b": True, "a": "x", "unused": 1})
    assert statement.text == "SELECT * FROM t WHERE a = $1 OR b = $2 OR c = $1"
    assert [param.text for param in statement.params] == ["x", "t"]


@pytest.mark.parametrize(
    ("query", "params", "words"),
    [
        ("SELECT %s", [], "has 1 placeholders, and params has 0 values"),
        ("SELECT %s", [1, 2], "has 1 placeholders, and params has 2 values"),
        ("SELECT %(a)s", {}, "placeholder 'a'"),
        ("SELECT %(a)s", [1], "params is a sequence"),
        ("SELECT %s", {"a": 1}, "params is a mapping"),
        ("SELECT 5 % 2", [], "The % at character 10"),
        ("SELECT %s", "x", "neither a sequence nor a mapping"),
        ("SELECT %s", [object()], "cannot be sent"),
        ("SELECT 1\0", None, "NUL"),
    ],
)
def test_params_that_do_not_fit(query: str, params: object, words: str) -> None:
    with pytest.raises(RefreshError, match="^(?=.*" + words.replace("(", r"\(") + ")"):
        bind(query, params)  # type: ignore[arg-type]


def test_a_position_is_that_of_the_users_text() -> None:
    query = "SELECT %(long_name)s, '%%', oops"
    statement = bind(query, {"long_name": 1})
    for word in ("SELECT", "oops"):
        assert statement.user_position(statement.text.index(word) + 1) == query.index(word) + 1
    assert statement.user_position(statement.text.index("$1") + 1) == query.index("%(long_name)s") + 1
    assert statement.user_position(len(statement.text) + 1) == len(query) + 1


def test_a_cut_keeps_what_stands_before_it() -> None:
    statement = bind("SELECT %s ; -- %s", [1, 2])
    assert statement.cut(statement.text.index(";")).text == "SELECT $1 "
    assert statement.cut(len(statement.text)) == statement


def test_a_statement_can_be_stored_and_sent() -> None:
    statement = bind("SELECT * FROM t WHERE a = %s AND b = %s AND c = ANY (%s)", [1, None, ["ä", None]])
    assert Statement.from_json(statement.to_json()) == statement
    assert pickle.loads(pickle.dumps(statement)) == statement
