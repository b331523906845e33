"""Refreshes as rows of the control schema: asked for by anyone who may insert, done by the dbsync that has the slot.

A row tells what to read and how far it has come; it is written when rows are in the target, not before, so a crash
costs the reading of a chunk and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from dbsync.config import Settings
from dbsync.connection import Connection, identifier
from dbsync.control import REFRESH_TABLE

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
REQUEST, INITIAL = "request", "initial"


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """What a refresh came to: rows re-read, how many a newer change had overtaken, windows, windows read again."""

    rows: int
    superseded: int
    chunks: int
    voided: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Refresh:
    """A row of the refresh table."""

    id: int
    slot: str
    kind: str
    query: str
    params: Any
    chunk_rows: int | None
    state: str
    part: int
    last_key: Any
    rows: int
    superseded: int
    chunks: int
    voided: int
    estimated_rows: int | None
    message: str | None
    requested_by: str
    requested_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    key_digest: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, FAILED, CANCELLED)

    @property
    def result(self) -> RefreshResult:
        ended, began = self.finished_at, self.started_at
        seconds = (ended - began).total_seconds() if ended and began else 0.0
        return RefreshResult(self.rows, self.superseded, self.chunks, self.voided, seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()
        }


_COLUMNS = sql.SQL(", ").join(sql.Identifier(name) for name in Refresh.__slots__)


class Requests:
    """The refresh table, through one connection."""

    def __init__(self, conn: Connection, settings: Settings) -> None:
        self._conn = conn
        self._slot = settings.slot
        self._table = identifier(settings.ctrl_namespace, REFRESH_TABLE)

    def submit(
        self,
        query: str,
        params: Any = None,
        chunk_rows: int | None = None,
        *,
        kind: str = REQUEST,
        relation: int | None = None,
    ) -> int:
        row = self._conn.execute(
            sql.SQL(
                "INSERT INTO {} (slot, kind, relation, query, params, chunk_rows) VALUES (%s, %s, %s, %s, %s, %s)"
                " RETURNING id"
            ).format(self._table),
            [self._slot, kind, relation, query, None if params is None else Jsonb(params), chunk_rows],
        ).fetchone()
        assert row
        return int(row[0])

    def get(self, id: int) -> Refresh | None:
        return self._one("id = %s", [id])

    def waiting(self) -> list[Refresh]:
        """What is to be done, the oldest first."""
        return self._many("slot = %s AND state IN ('queued', 'running') ORDER BY id", [self._slot])

    def recent(self, most: int = 20) -> list[Refresh]:
        """The newest, whatever their state, the newest first."""
        return self._many("slot = %s AND kind <> 'target' ORDER BY id DESC LIMIT %s", [self._slot, most])

    def first_copies(self) -> dict[int, str]:
        """The oids of tables whose first copy was asked for, and what became of the latest one."""
        query = sql.SQL(
            "SELECT relation::int8, state FROM {} WHERE slot = %s AND kind = 'initial' AND relation IS NOT NULL"
            " ORDER BY id"
        ).format(self._table)
        return {int(oid): str(state) for oid, state in self._conn.execute(query, [self._slot]).fetchall()}

    def target(self) -> str | None:
        """What `dbsync run` has fed from this slot, as far as anybody noted it."""
        query = sql.SQL("SELECT query FROM {} WHERE slot = %s AND kind = 'target'").format(self._table)
        found = self._conn.execute(query, [self._slot]).fetchone()
        return str(found[0]) if found else None

    def feeds(self, target: str) -> None:
        """Note what the slot feeds from now on."""
        with self._conn.transaction():
            self._conn.execute(
                sql.SQL("DELETE FROM {} WHERE slot = %s AND kind = 'target'").format(self._table), [self._slot]
            )
            self._conn.execute(
                sql.SQL("INSERT INTO {} (slot, kind, query, state) VALUES (%s, 'target', %s, 'done')").format(
                    self._table
                ),
                [self._slot, target],
            )

    def started(
        self, id: int, estimated_rows: int, *, key_digest: str, part: int, last_key: tuple[str, ...] | None
    ) -> None:
        """It is being done, from that place on; `key_digest` tells what the place means."""
        self._update(
            "state = 'running', started_at = coalesce(started_at, clock_timestamp()), estimated_rows = %s,"
            " key_digest = %s, part = %s, last_key = %s",
            [estimated_rows, key_digest, part, _json(last_key)],
            id,
        )

    def advanced(
        self, id: int, *, part: int, last_key: tuple[str, ...] | None, rows: int, superseded: int, voided: int
    ) -> None:
        """Another chunk is in the target."""
        self._update(
            "part = %s, last_key = %s, rows = rows + %s, superseded = superseded + %s, voided = voided + %s,"
            " chunks = chunks + 1",
            [part, _json(last_key), rows, superseded, voided],
            id,
        )

    def next_part(self, id: int, part: int) -> None:
        self._update("part = %s, last_key = NULL", [part], id)

    def finished(self, id: int, state: str, message: str | None = None) -> None:
        self._update("state = %s, message = %s, finished_at = clock_timestamp()", [state, message], id)

    def cancel(self, id: int) -> bool:
        """Ask for it to end; False when it has ended or there is none."""
        done = self._conn.execute(
            sql.SQL(
                "UPDATE {} SET state = 'cancelled', finished_at = clock_timestamp()"
                " WHERE id = %s AND slot = %s AND state IN ('queued', 'running')"
            ).format(self._table),
            [id, self._slot],
        )
        return done.rowcount == 1

    def _update(self, assignments: str, values: list[Any], id: int) -> None:
        # What was cancelled stays cancelled, whoever is late to hear of it.
        query = sql.SQL("UPDATE {} SET {} WHERE id = %s AND state IN ('queued', 'running')")
        self._conn.execute(query.format(self._table, sql.SQL(assignments)), [*values, id])

    def _one(self, condition: str, values: list[Any]) -> Refresh | None:
        found = self._many(condition, values)
        return found[0] if found else None

    def _many(self, condition: str, values: list[Any]) -> list[Refresh]:
        query = sql.SQL("SELECT {} FROM {} WHERE {}").format(_COLUMNS, self._table, sql.SQL(condition))
        with self._conn.cursor(row_factory=class_row(Refresh)) as cursor:
            return cursor.execute(query, values).fetchall()


def _json(key: tuple[str, ...] | None) -> Jsonb | None:
    return None if key is None else Jsonb(list(key))
