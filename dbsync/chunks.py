"""How a selection is read in chunks by key.

The ranges of successive chunks touch and do not overlap: each row of the selection is in exactly one of them. Their
order is that of the key's own index (its operators and collations), so it is total, and the index can serve it. Rows
that the publication does not publish are not read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from psycopg import errors, pq, sql
from psycopg.errors import error_from_result

from dbsync.connection import Connection
from dbsync.errors import StreamError
from dbsync.relation import Relation
from dbsync.statement import Param, Statement, cell, execute, explained, reading, unbroken

Key: TypeAlias = tuple[str, ...]
"""The texts of a key's columns, in the order of the key's index."""

_CUTS_A_RANGE = 16


class TableLockedError(StreamError):
    """Somebody holds a lock that the SELECT would have to wait for; it may be let go."""


# How many lines of a range are in memory at once.
ROWS_A_GROUP = 20_000
BYTES_A_GROUP = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """One column of the key's index: where the statement has it, and how the index compares it."""

    name: str
    output: int  # its number (from 1) in the statement's result
    type_name: str
    schema: str  # of the operators
    less: str
    less_equal: str
    equal: str
    greater_equal: str
    greater: str
    collation: tuple[str, str] | None  # only where it is not the column's own


@dataclass(frozen=True, slots=True)
class Restriction:
    """A table the rows have to be in, and the row filter they have to pass there."""

    only: bool
    row_filter: str | None
    image: tuple[tuple[str, int], ...]  # columns that tell apart rows of several tables with the same key


@dataclass(frozen=True, slots=True)
class Selection:
    """A SELECT that can be refreshed, or the part of it that one table of the log holds. It can be pickled.

    `columns` are those of the relation that the SELECT carries, in the order in which COPY gives them: the key first
    (in the order of `relation.key`), then the rest. `left_out` are the published ones it does not carry.
    """

    statement: Statement
    relation: Relation
    columns: tuple[str, ...]
    left_out: tuple[str, ...]
    estimated_rows: int
    outputs: tuple[int, ...]  # where (from 1) the statement's result has each of `columns`
    width: int  # how many columns the statement's result has
    param_types: tuple[str, ...]
    key: tuple[KeyColumn, ...]
    restriction: Restriction | None

    @property
    def params(self) -> tuple[Param, ...]:
        return self.statement.params

    @property
    def positions(self) -> tuple[int, ...]:
        """Where `relation.columns` has each of `columns`."""
        names = self.relation.column_names
        return tuple(names.index(name) for name in self.columns)


@dataclass(frozen=True, slots=True)
class Range:
    """Keys after `lower` up to and including `upper`; None is open."""

    lower: Key | None
    upper: Key | None


def next_ranges(conn: Connection, selection: Selection, after: Key | None, rows: int, parallelism: int) -> list[Range]:
    """The next chunk: at most `rows` rows after the key, in up to `parallelism` ranges with about as many rows each.

    The last range is open at its end when nothing comes after the chunk. Runs in the transaction `conn` has open, if
    any; the count holds for the snapshot it was taken in.
    """
    grain = max(1, rows // (parallelism * _CUTS_A_RANGE))
    bound = _Bound(list(selection.params))
    query = _cuts_query(selection, after, bound, rows, grain)
    with unbroken(conn), _unlocked(selection), explained(), reading(conn):
        result = execute(conn, query, bound.params).pgresult
        assert result is not None
        found = [[cell(result, row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    cuts = [(int(number), tuple(key)) for number, *key in found]
    more = bool(cuts) and cuts[-1][0] > rows
    inside = [cut for cut in cuts if cut[0] <= rows]
    total = rows if more else (inside[-1][0] + grain // 2 if inside else 0)
    bounds = _even(inside, total, parallelism)
    last = inside[-1][1] if more else None
    # Several rows may have the same key where the statement repeats a row.
    uppers = [*dict.fromkeys(key for key in bounds if key != last), last]
    return [Range(lower, upper) for lower, upper in zip([after, *uppers], uppers, strict=False)]


def _even(cuts: list[tuple[int, Key]], total: int, parallelism: int) -> list[Key]:
    """The keys that part `total` rows about evenly, out of those that are known."""
    found = []
    for part in range(1, parallelism):
        wanted = total * part / parallelism
        near = [cut for cut in cuts if 0 < cut[0] < total]
        if near:
            found.append(min(near, key=lambda cut: abs(cut[0] - wanted)))
    return [key for _, key in sorted(set(found))]


def copy_out(conn: Connection, selection: Selection, range: Range) -> Generator[list[bytes]]:
    """The rows of a range as lines of COPY's text format, with the columns of `selection.columns`, in groups.

    Runs in the transaction `conn` has open (with the window's snapshot), if any.
    """
    values = _Settings()
    query = f"COPY ({_rows_query(selection, range, values)}) TO STDOUT"
    with unbroken(conn), _unlocked(selection), explained(), reading(conn):
        values.apply(conn)
        yield from _copied(conn, query.encode())


def _copied(conn: Connection, query: bytes) -> Generator[list[bytes]]:
    """What COPY sends. libpq is asked itself: psycopg's own way costs more a line than all that is done with it."""
    result = conn.pgconn.exec_(query)
    more = result.status == pq.ExecStatus.COPY_OUT
    try:
        while more:
            lines, more = _group(conn.pgconn)
            yield lines
    except GeneratorExit:
        conn.cancel_safe()
        while more:
            _, more = _group(conn.pgconn)
        raise
    finally:
        while following := conn.pgconn.get_result():
            result = following
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise error_from_result(result)


def _group(pgconn: pq.abc.PGconn) -> tuple[list[bytes], bool]:
    """The next lines, and whether there may be more."""
    lines: list[bytes] = []
    room = BYTES_A_GROUP
    while room > 0 and len(lines) < ROWS_A_GROUP:
        size, line = pgconn.get_copy_data(0)
        if size <= 0:
            return lines, False
        # As bytes: a hundred thousand memoryviews would have Python's collector look through them again and again.
        lines.append(bytes(line))
        room -= size
    return lines, True


@contextmanager
def _unlocked(selection: Selection) -> Iterator[None]:
    try:
        yield
    except errors.LockNotAvailable as error:
        raise TableLockedError(f"Somebody holds a lock on {selection.relation.doctype}.", "Wait.") from error


def dry_run(conn: Connection, selection: Selection) -> None:
    """Read one row as it will be read, so that a function that writes or a missing grant shows now."""
    bound = _Bound(list(selection.params))
    with explained():
        execute(conn, f"{_rows_query(selection, Range(None, None), bound)} LIMIT 1", bound.params)


class _Bound:
    """Values that go with a query as the protocol's own parameters."""

    def __init__(self, params: list[Param]) -> None:
        self.params = params

    def param(self, selection: Selection, number: int) -> str:
        return f"${number + 1}"

    def value(self, text: str, type_name: str) -> str:
        self.params.append(Param(text))
        return f"CAST(${len(self.params)} AS {type_name})"


class _Settings:
    """Values that a COPY, which takes no parameters, finds in settings of its transaction, where they come bound."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def param(self, selection: Selection, number: int) -> str:
        text, type_name = selection.params[number].text, selection.param_types[number]
        if text is None:
            return f"CAST(NULL AS {type_name})"
        # A subquery is evaluated once; the setting itself would be read and parsed for every row.
        return f"CAST((SELECT {self.value(text, type_name)}) AS {type_name})"

    def value(self, text: str, type_name: str) -> str:
        name = f"dbsync.value_{len(self.texts) + 1}"
        self.texts[name] = text
        return f"CAST(pg_catalog.current_setting('{name}') AS {type_name})"

    def apply(self, conn: Connection) -> None:
        conn.execute(_SET, [list(self.texts), list(self.texts.values())])


def _rows_query(selection: Selection, range: Range, values: _Bound | _Settings) -> str:
    columns = ", ".join(f"q.c{output}" for output in selection.outputs)
    return f"SELECT {columns} FROM {_source(selection, values)} WHERE {_condition(selection, range, values)}"


def _cuts_query(selection: Selection, after: Key | None, values: _Bound, rows: int, grain: int) -> str:
    """Every `grain`th key of the next `rows` keys, the last of them, and the one after that."""
    keys = [f"k{number}" for number in range(1, len(selection.key) + 1)]
    inner = ", ".join(f"q.c{part.output} AS {key}" for part, key in zip(selection.key, keys, strict=True))
    by_output = ", ".join(_order(part, f"q.c{part.output}") for part in selection.key)
    by_key = ", ".join(_order(part, f"k.{key}") for part, key in zip(selection.key, keys, strict=True))
    # The limit is inside, so that the index is read no further and a sort keeps only that many.
    return (
        f"SELECT n, {', '.join(keys)} FROM (SELECT k.*, pg_catalog.row_number() OVER (ORDER BY {by_key}) AS n "
        f"FROM (SELECT {inner} FROM {_source(selection, values)} "
        f"WHERE {_condition(selection, Range(after, None), values)} ORDER BY {by_output} LIMIT {rows + 1}) AS k) AS s "
        f"WHERE n % CAST({grain} AS bigint) = CAST(0 AS bigint) OR n >= CAST({rows} AS bigint) ORDER BY n"
    )


def _source(selection: Selection, values: _Bound | _Settings) -> str:
    text = selection.statement.render(lambda number: values.param(selection, number))
    aliases = ", ".join(f"c{number}" for number in range(1, selection.width + 1))
    # The line break ends a comment the statement may end with.
    return f"({text}\n) AS q ({aliases})"


def _condition(selection: Selection, range: Range, values: _Bound | _Settings) -> str:
    conditions = _within(selection.key, range, values, [f"q.c{part.output}" for part in selection.key])
    if selection.restriction is not None:
        conditions.append(_exists(selection, selection.restriction, range, values))
    return " AND ".join(conditions) or "true"


def _within(key: tuple[KeyColumn, ...], range: Range, values: _Bound | _Settings, columns: list[str]) -> list[str]:
    return [
        _compare(
            key, columns, [values.value(text, part.type_name) for part, text in zip(key, bound, strict=True)], last
        )
        for bound, last in ((range.lower, "greater"), (range.upper, "less_equal"))
        if bound is not None
    ]


def _compare(key: tuple[KeyColumn, ...], columns: list[str], bound: list[str], last: str) -> str:
    """Compare as one row; column by column only where the columns' operators are not of the same name."""
    operators = {_operator(part, last) for part in key}
    left = [_collated(part, column) for part, column in zip(key, columns, strict=True)]
    if len(operators) == 1:
        return f"({', '.join(left)}) {operators.pop()} ({', '.join(bound)})"
    strict, loose = ("greater", "greater_equal") if last == "greater" else ("less", "less_equal")
    condition = f"{left[-1]} {_operator(key[-1], last)} {bound[-1]}"
    for part, column, value in reversed(list(zip(key[:-1], left, bound, strict=False))):
        beyond, not_before = _operator(part, strict), _operator(part, loose)
        condition = f"({column} {not_before} {value} AND ({column} {beyond} {value} OR {condition}))"
    return condition


def _exists(selection: Selection, restriction: Restriction, range: Range, values: _Bound | _Settings) -> str:
    """That the row is in the relation itself and passes its filter; with the range here too, the index serves both."""
    table = sql.Identifier(selection.relation.namespace, selection.relation.name).as_string()
    own = [f"f.{sql.Identifier(part.name).as_string()}" for part in selection.key]
    conditions = [
        f"{_collated(part, column)} {_operator(part, 'equal')} q.c{part.output}"
        for part, column in zip(selection.key, own, strict=True)
    ]
    conditions += _within(selection.key, range, values, own)
    if restriction.image:
        theirs = ", ".join(f"f.{sql.Identifier(name).as_string()}" for name, _ in restriction.image)
        ours = ", ".join(f"q.c{output}" for _, output in restriction.image)
        conditions.append(f"CAST(ROW({theirs}) AS record) OPERATOR(pg_catalog.*=) CAST(ROW({ours}) AS record)")
    if restriction.row_filter is not None:
        conditions.append(f"({restriction.row_filter})")
    only = "ONLY " if restriction.only else ""
    return f"EXISTS (SELECT FROM {only}{table} AS f WHERE {' AND '.join(conditions)})"


def _order(part: KeyColumn, column: str) -> str:
    return f"{_collated(part, column)} USING {_operator(part, 'less')}"


def _operator(part: KeyColumn, name: str) -> str:
    return f"OPERATOR({sql.Identifier(part.schema).as_string()}.{getattr(part, name)})"


def _collated(part: KeyColumn, column: str) -> str:
    return column if part.collation is None else f"{column} COLLATE {sql.Identifier(*part.collation).as_string()}"


_SET = """
SELECT pg_catalog.set_config(name, value, true)
  FROM ROWS FROM (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) AS given (name, value)
"""
