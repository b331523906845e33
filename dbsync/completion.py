"""Values that no event of a batch carried, re-read from the source by key before the batch is handed over.

An UPDATE that leaves a TOASTed value alone does not carry it, and where the row's INSERT is not in the batch either,
nobody has sent it. The rows are read under the rules of a window: one snapshot, and void where the table was rewritten
meanwhile or where a commit of the log is still hidden from the snapshot. They need no marks, because only values that
the batch says did not change are taken from them: whatever changes one of them later stands later in the log and
carries it.

A key that is not there was deleted or changed later in the log: its document is left out, and the later change settles
it. Only when a commit is hidden can a key be missing because it is not yet visible; then it is asked for again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from dbsync import selection, values
from dbsync.board import WindowBoard
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.errors import DbsyncError, StreamError
from dbsync.fold import Final, Source
from dbsync.lsn import LSN
from dbsync.ranges import impatient, one_snapshot
from dbsync.refresh import current_snapshot
from dbsync.relation import Relation, was_renamed
from dbsync.statement import words_of

logger = logging.getLogger(__name__)

KEYS_A_QUERY = 1_000
_GONE = ("08", "57P")  # SQLSTATEs of a connection that broke, of a server that is starting or stopping
_PAUSE_SECONDS = 0.05

Rows = dict[tuple[str, ...], dict[str, Any]]


class SourceLostError(StreamError):
    """The source cannot be reached; like the stream, whoever needs it waits until it is back."""


class Completion:
    """Completes the documents of one batch, which ends at `before`."""

    def __init__(self, settings: Settings, board: WindowBoard, before: LSN, stopping: threading.Event) -> None:
        self._settings = settings
        self._board = board
        self._before = before
        self._stopping = stopping

    def __call__(self, finals: list[Final]) -> Iterator[Final]:
        try:
            with connect(self._settings) as conn:
                for _, group in itertools.groupby(sorted(finals, key=_table), key=_table):
                    for some in _batched(group):
                        yield from self._complete(conn, some)
        except psycopg.Error as error:
            kind = SourceLostError if _is_gone(error) else StreamError
            raise kind(f"Missing values could not be read: {words_of(error)}.") from error
        except StreamError as error:
            raise SourceLostError(error.message, error.hint) from error

    def _complete(self, conn: Connection, finals: list[Final]) -> Iterator[Final]:
        relation = _source(finals[0]).relation
        wanted = sorted({name for final in finals for name in final.missing})
        moved = any(final.moved for final in finals)
        found = self._rows(conn, relation, [_source(final).key for final in finals], wanted, moved)
        for final in finals:
            row = found.get(_source(final).key)
            if row is not None:
                doc = (final.doc or {}) | {name: row.get(name) for name in final.missing}
                yield final._replace(doc=doc, missing=())

    def _rows(
        self, conn: Connection, relation: Relation, keys: list[tuple[str, ...]], wanted: Sequence[str], moved: bool
    ) -> Rows:
        """Rows by the texts of their key, read until nothing that should be there can be missing.

        Where a row has `moved` to its key, the one a hidden commit leaves there to be seen may be another.
        """
        pause = _PAUSE_SECONDS
        while True:
            before = selection.fingerprint(conn, relation.oid)
            hidden = found = None
            with (
                suppress(psycopg.errors.LockNotAvailable),
                connect(self._settings) as reader,
                impatient(reader),
                one_snapshot(reader),
            ):
                take = lambda: current_snapshot(reader)  # noqa: E731  (called before the next turn)
                hidden = self._board.hidden_now(take, relation.oid, self._before)
                found = _read(reader, relation, keys, wanted)
            if found is None:
                reason = "somebody holds a lock on the table"
            elif selection.fingerprint(conn, relation.oid) != before:
                reason = "the table was altered"
            elif hidden and (moved or len(found) < len(set(keys))):
                reason = f"transaction {hidden.xid} is in the log but not yet visible"
            else:
                return found
            logger.warning("Missing values of %s are read again: %s.", relation.doctype, reason)
            if self._stopping.wait(pause):
                raise DbsyncError(f"dbsync was stopped while it waited for values of {relation.doctype}.")
            pause = min(2 * pause, 5.0)


def _is_gone(error: psycopg.Error) -> bool:
    # Where the connection itself broke, libpq has no SQLSTATE.
    is_operational = isinstance(error, psycopg.OperationalError)
    return is_operational and (error.sqlstate is None or error.sqlstate.startswith(_GONE))


def _source(final: Final) -> Source:
    assert final.source
    return final.source


def _table(final: Final) -> tuple[int, str]:
    relation = _source(final).relation
    return relation.oid, relation.doctype


def _batched(finals: Iterable[Final]) -> Iterator[list[Final]]:
    iterator = iter(finals)
    while some := list(itertools.islice(iterator, KEYS_A_QUERY)):
        yield some


def _read(conn: Connection, relation: Relation, keys: list[tuple[str, ...]], wanted: Sequence[str]) -> Rows:
    """What the table holds of these keys now, as far as it still has the columns the log speaks of."""
    table, now = _table_now(conn, relation.oid)
    today = _names_today(relation, now)
    if table is None or not set(relation.key_names) <= today.keys():
        return {}  # dropped since, or its key is another: what the log has of that settles it
    columns = [column for column in relation.columns if column.name in wanted and column.name in today]
    types = {column.name: column.type_name for column in now}
    key = [today[name] for name in relation.key_names]
    query = _query(table, key, [today[column.name] for column in columns], types)
    try:
        # By number and not by key: what the key looks like here need not be the text it has in the log.
        with psycopg.RawCursor(conn) as cursor:
            cursor.execute(query.as_bytes(conn), [list(part) for part in zip(*keys, strict=True)])
            result = cursor.pgresult
    except psycopg.errors.DataError:
        return {}  # its key has another type by now
    assert result is not None
    decode = [(column.name, values.compile(column.spec)) for column in columns]
    rows: Rows = {}
    for row in range(result.ntuples):
        texts = [result.get_value(row, column) for column in range(result.nfields)]
        rows[keys[int(texts[0] or 0) - 1]] = {
            name: None if text is None else convert(str(text, "utf-8"))
            for (name, convert), text in zip(decode, texts[1:], strict=True)
        }
    return rows


class _Column(NamedTuple):
    """A column of the table as it is by now."""

    name: str
    type_oid: int
    type_name: str


def _names_today(relation: Relation, now: Sequence[_Column]) -> dict[str, str]:
    """What the columns the log speaks of are called by now, as far as they are there. No row is logged for a rename."""
    if was_renamed(relation.columns, now):
        return {then.name: column.name for then, column in zip(relation.columns, now, strict=False)}
    return {column.name: column.name for column in now}


def _table_now(conn: Connection, oid: int) -> tuple[sql.Identifier | None, list[_Column]]:
    """The table's name, and its columns, as they are by now."""
    name = conn.execute(
        "SELECT nspname, relname FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
        [oid],
    ).fetchone()
    columns = conn.execute(
        "SELECT attname, atttypid::int8, pg_catalog.format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute"
        " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [oid],
    ).fetchall()
    return sql.Identifier(*name) if name else None, [_Column(*column) for column in columns]


def _query(table: sql.Identifier, key: list[str], columns: list[str], types: dict[str, str]) -> sql.Composed:
    names = [sql.Identifier(name) for name in key]
    equal = [
        sql.SQL("t.{0} = k.{0}::{1}").format(name, sql.SQL(types[text])) for name, text in zip(names, key, strict=True)
    ]
    return sql.SQL(
        "SELECT k.number{columns} FROM {table} AS t"
        " JOIN unnest({arrays}) WITH ORDINALITY AS k ({names}, number) ON {equal}"
    ).format(
        columns=sql.SQL("").join(sql.SQL(", t.{}").format(sql.Identifier(name)) for name in columns),
        table=table,
        arrays=sql.SQL(", ").join(sql.SQL(f"${number}::text[]") for number in range(1, len(names) + 1)),
        names=sql.SQL(", ").join(names),
        equal=sql.SQL(" AND ").join(equal),
    )
