"""The user's SELECT as text and parameters, and how it is run: read-only, bound, with errors a person understands.

Parameters are bound, never pasted. Every transaction here is read-only, whatever the statement says, and is rolled
back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import psycopg
from psycopg import RawCursor, errors, pq
from psycopg.adapt import Dumper, PyFormat, Transformer
from psycopg.rows import TupleRow

from dbsync.connection import Connection
from dbsync.errors import RefreshError, StreamError

Params: TypeAlias = "Sequence[Any] | Mapping[str, Any] | None"

_PLACEHOLDER = re.compile(r"%(?:(?P<literal>%)|(?:\((?P<name>[^)]+)\))?[sbt])|(?P<wrong>%)")


@dataclass(frozen=True, slots=True)
class Param:
    """A value as PostgreSQL's text; a type of 0 is left to PostgreSQL to infer."""

    text: str | None
    type_oid: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """The user's text in pieces, each with its offset in what the user wrote: text, or the number of a parameter."""

    pieces: tuple[tuple[int, str | int], ...]
    params: tuple[Param, ...]

    @property
    def text(self) -> str:
        """The statement with PostgreSQL's own placeholders ($1, $2, …)."""
        return self.render(lambda number: f"${number + 1}")

    def render(self, placeholder: Callable[[int], str]) -> str:
        return "".join(piece if isinstance(piece, str) else placeholder(piece) for _, piece in self.pieces)

    def to_json(self) -> str:
        params = [(param.text, param.type_oid) for param in self.params]
        return json.dumps({"pieces": self.pieces, "params": params})

    @classmethod
    def from_json(cls, text: str) -> Statement:
        stored = json.loads(text)
        pieces = tuple((offset, piece) for offset, piece in stored["pieces"])
        return cls(pieces, tuple(Param(*param) for param in stored["params"]))

    def user_position(self, position: int) -> int:
        """Where the user wrote what stands at this character (from 1) of `text`."""
        start, written = 0, 0
        for offset, piece in self.pieces:
            length = len(piece if isinstance(piece, str) else f"${piece + 1}")
            written = offset + (min(position - 1 - start, length) if isinstance(piece, str) else 0)
            if position - 1 < start + length:
                break
            start += length
        return written + 1

    def cut(self, position: int) -> Statement:
        """The statement up to a character (from 0) of `text` that is not inside a placeholder."""
        kept: list[tuple[int, str | int]] = []
        start = 0
        for offset, piece in self.pieces:
            if start >= position:
                break
            kept.append((offset, piece[: position - start] if isinstance(piece, str) else piece))
            start += len(piece if isinstance(piece, str) else f"${piece + 1}")
        return replace(self, pieces=tuple(kept))


def bind(query: str, params: Params = None) -> Statement:
    """Split the user's text at its placeholders, `%s` or `%(name)s` as in psycopg; without `params` it has none."""
    if not isinstance(query, str):
        raise RefreshError(f"The statement is not text, but {type(query).__name__}.", "Pass one SELECT as a string.")
    if "\0" in query:
        raise RefreshError("The statement contains a NUL character.", "Remove it.")
    if params is None:
        return Statement(((0, query),), ())
    pieces: list[tuple[int, str | int]] = []
    names: list[str | None] = []
    end = 0
    for match in _PLACEHOLDER.finditer(query):
        if match["wrong"]:
            raise RefreshError(
                f"The % at character {match.start() + 1} of the statement is not a placeholder.",
                "With params, write %s or %(name)s for a value and %% for a percent sign.",
            )
        pieces.append((end, query[end : match.start()]))
        end = match.end()
        if match["literal"]:
            pieces.append((match.start(), "%"))
        else:
            pieces.append((match.start(), _number(names, match["name"])))
    pieces.append((end, query[end:]))
    return Statement(tuple(piece for piece in pieces if piece[1] != ""), _dump(_ordered(names, params)))


def _number(names: list[str | None], name: str | None) -> int:
    if name is not None and name in names:
        return names.index(name)
    names.append(name)
    return len(names) - 1


def _ordered(names: list[str | None], params: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    if isinstance(params, Mapping):
        if None in names:
            raise RefreshError("The statement has a %s, and params is a mapping.", "Write %(name)s.")
        missing = [name for name in names if name not in params]
        if missing:
            raise RefreshError(f"The statement has a placeholder {missing[0]!r} that params does not have.", "Add it.")
        return [params[cast(str, name)] for name in names]
    if isinstance(params, str | bytes) or not isinstance(params, Sequence):
        raise RefreshError("The params are neither a sequence nor a mapping.", "Pass a list, a tuple or a dict.")
    if any(name is not None for name in names):
        raise RefreshError("The statement has a %(name)s, and params is a sequence.", "Pass a mapping, or write %s.")
    if len(names) != len(params):
        raise RefreshError(
            f"The statement has {len(names)} placeholders, and params has {len(params)} values.",
            "Pass one value for each %s.",
        )
    return list(params)


def _dump(values: list[Any]) -> tuple[Param, ...]:
    transformer = Transformer()
    try:
        texts = transformer.dump_sequence(values, [PyFormat.TEXT] * len(values))
    except psycopg.Error as error:
        raise RefreshError(f"A value of params cannot be sent to PostgreSQL: {error}.") from error
    types = transformer.types or ()
    return tuple(
        Param(None if text is None else bytes(text).decode(), oid) for text, oid in zip(texts, types, strict=True)
    )


@contextmanager
def reading(conn: Connection) -> Iterator[None]:
    """A read-only transaction, or a part of the caller's, in which names mean what they mean to the user.

    It is rolled back, so that the caller's settings are what they were. One of its own is READ COMMITTED: parsing a
    statement waits for an ALTER TABLE and then sees its columns, and so must the look into the catalog that follows.
    """
    with conn.transaction(force_rollback=True):
        # Rows that a policy hides from this role would be missing without a word; with this it is an error.
        conn.execute("SET TRANSACTION READ ONLY; SET LOCAL search_path TO DEFAULT; SET LOCAL row_security = off")
        yield


@contextmanager
def unbroken(conn: Connection) -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        what = "The connection to PostgreSQL broke" if conn.closed else "PostgreSQL could not run the SELECT now"
        raise StreamError(f"{what}: {words_of(error)}.", "Try again.") from error


@contextmanager
def explained(statement: Statement | None = None) -> Iterator[None]:
    """Say in one sentence why PostgreSQL refuses the statement; `statement` is what a position refers to."""
    try:
        yield
    except psycopg.OperationalError:
        raise
    except errors.InsufficientPrivilege as error:
        raise RefreshError(
            f"The role may not read what the SELECT reads: {words_of(error)}.",
            "Grant it SELECT on the table and its partitions, USAGE on the schema, BYPASSRLS where policies hide rows.",
        ) from error
    except errors.ReadOnlySqlTransaction as error:
        raise writes_error(words_of(error)) from error
    except psycopg.Error as error:
        position = error.diag.statement_position
        at = f" at character {statement.user_position(int(position))}" if statement and position else ""
        raise RefreshError(f"PostgreSQL does not accept the SELECT{at}: {words_of(error)}.", _hint(error)) from error


def writes_error(words: str) -> RefreshError:
    return RefreshError(
        f"The statement writes, and a refresh only reads: {words}.",
        "Leave out what writes or locks rows, also in WITH and in the functions it calls.",
    )


def words_of(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error).partition("\n")[0]).rstrip(". ")


def _hint(error: psycopg.Error) -> str | None:
    told = error.diag.message_hint or error.diag.message_detail
    if told:
        return told
    for kind, hint in _HINTS:
        if isinstance(error, kind):
            return hint
    return None


_HINTS: tuple[tuple[type[psycopg.Error], str], ...] = (
    (errors.UndefinedTable, "Check its name, and write its schema before it: dbsync status lists what is published."),
    (errors.UndefinedColumn, "Check its name; a value goes into params, or between single quotes."),
    (errors.SyntaxError, "It takes one SELECT; placeholders like %s are for syncer.refresh(…, params=…)."),
    (errors.DataError, "A row of the table makes it fail: leave out such rows, or what fails there."),
)


class _ParamDumper(Dumper):
    """Sends a Param with the type it has."""

    def dump(self, obj: Param) -> bytes | None:
        return None if obj.text is None else obj.text.encode()

    def get_key(self, obj: Param, format: PyFormat) -> Any:
        return (self.cls, obj.type_oid)

    def upgrade(self, obj: Param, format: PyFormat) -> Dumper:
        dumper = type(self)(self.cls)
        dumper.oid = obj.type_oid
        return dumper


def execute(conn: Connection, query: str, params: Sequence[Param]) -> RawCursor[TupleRow]:
    cursor = RawCursor(conn)
    cursor.adapters.register_dumper(Param, _ParamDumper)
    return cursor.execute(query.encode(), params, prepare=False)


def cell(result: pq.abc.PGresult, row: int, column: int) -> str:
    value = result.get_value(row, column)
    assert value is not None
    return value.decode()
