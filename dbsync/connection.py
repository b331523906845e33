"""Ordinary SQL connections to the source, and what it means when one fails.

Every session speaks the same dialect whatever the role's defaults are. A failure is one sentence and a hint, tells
whether trying again can help, and never shows a password.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time

import psycopg
from psycopg import errors, pq, sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from dbsync.config import CONNECT_TIMEOUT_SECONDS, Settings
from dbsync.errors import DbsyncError, SetupError, StreamError

Connection = psycopg.Connection[TupleRow]

# What psycopg has to say of a connection that broke is for a log, where there is one; dbsync says it in its own words.
logging.getLogger("psycopg").addHandler(logging.NullHandler())

_PASSWORD_HINT = (
    "Set POSTGRES_PASSWORD, POSTGRES_PASSWORD_FILE or the line in .pgpass (or, where POSTGRES_CONNSTR is set, the"
    " password there) to the password of that role."
)

# Values come as text in one form whatever the role's own defaults are, nothing dbsync does is cut short by a timeout
# meant for people, and its own small commits do not wait for a standby.
_SESSION = {
    "synchronous_commit": "local",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "array_nulls": "on",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}


def connect(settings: Settings, *, autocommit: bool = True) -> Connection:
    """An ordinary SQL connection with dbsync's session settings, or a DbsyncError that says what to do."""
    conninfo = settings.conninfo(options=session_options(settings), client_encoding="UTF8")
    try:
        connection = psycopg.connect(conninfo, autocommit=True)
    except psycopg.OperationalError as error:
        raise connection_error(settings, conninfo, error) from error
    try:
        _prepare(connection)
        connection.autocommit = autocommit
    except psycopg.OperationalError as error:
        connection.close()
        raise StreamError(f"The connection to {settings.describe()} broke as it was made.", "Try again.") from error
    return connection


def _prepare(connection: Connection) -> None:
    # By SET and not with the options above, so that RESET search_path gives the user's own for the user's SELECT.
    connection.execute("SET search_path = pg_catalog, pg_temp")
    # An option the server does not know would end the connection before its version can be told.
    if connection.info.server_version >= 140000:
        connection.execute("SET idle_session_timeout = 0")
    if connection.info.server_version >= 170000:
        connection.execute("SET transaction_timeout = 0")


def identifier(*names: str) -> sql.Composable:
    """A name for a query that also takes parameters: a percent sign in it must not be taken for one."""
    return sql.SQL(sql.Identifier(*names).as_string(None).replace("%", "%%"))


def session_options(settings: Settings) -> str:
    """libpq's `options` for a session of dbsync's: the user's own first, then the settings dbsync relies on."""
    ours = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _SESSION.items())
    return f"{settings.options()} {ours}".strip()


def connection_error(settings: Settings, conninfo: str, error: psycopg.OperationalError) -> DbsyncError:
    """What a failed connection means: StreamError when trying again can help, SetupError when somebody has to act."""
    where = settings.describe()
    words = settings.mask(server_words(error))
    if error.pgconn is not None and error.pgconn.needs_password:
        return SetupError(f"PostgreSQL at {where} asks for a password and none is set.", _PASSWORD_HINT)
    state = None if error.pgconn is None or isinstance(error, errors.ConnectionTimeout) else refusal(conninfo)
    match state:
        case None:
            return StreamError(
                f"PostgreSQL at {where} cannot be reached: {words}.",
                "Check POSTGRES_HOST and POSTGRES_PORT, or POSTGRES_CONNSTR, and that PostgreSQL listens there.",
            )
        case "28P01":
            return SetupError(f"PostgreSQL at {where} did not accept the password.", _PASSWORD_HINT)
        case "28000":
            return SetupError(
                f"PostgreSQL at {where} did not let the role in: {words}.",
                "Check POSTGRES_USER, that the role exists and has LOGIN, and that pg_hba.conf admits it from here.",
            )
        case "3D000":
            return SetupError(
                f"PostgreSQL at {where} does not have that database: {words}.",
                "Set POSTGRES_DB (or dbname in POSTGRES_CONNSTR) to one that exists.",
            )
        case "42501":
            return SetupError(
                f"PostgreSQL at {where} does not allow the role this connection: {words}.",
                "The role needs CONNECT on the database, and for replication: ALTER ROLE … REPLICATION.",
            )
        case "53300":
            return StreamError(
                f"PostgreSQL at {where} has no connection left for dbsync: {words}.",
                "Close some, or raise max_connections, max_wal_senders or the role's CONNECTION LIMIT.",
            )
        case _ if state.startswith(("08", "53", "57", "58", "XX")):
            return StreamError(
                f"PostgreSQL at {where} does not take connections now: {words}.",
                "It may be starting or stopping: wait.",
            )
        case _:
            return SetupError(
                f"PostgreSQL at {where} refused the connection: {words}.", "Check the connection settings."
            )


def server_words(error: psycopg.Error) -> str:
    """What the server, or libpq, said about a connection that was not made."""
    first = str(error).partition("\n")[0].removeprefix("connection failed: ")
    return re.sub(r"\b[A-Z]+:  ", "", first).rstrip(". ")


def refusal(conninfo: str) -> str | None:
    """The SQLSTATE with which the server turns this connection away; None without a server, "" when it is not known.

    libpq keeps the SQLSTATE of a failed connection to itself, and the words that go with it are in the server's
    language. Its ping tells whether there is a server at all, and its trace shows the answer.
    """
    match pq.PGconn.ping(make_conninfo(conninfo, password="").encode()):
        case pq.Ping.NO_RESPONSE:
            return None
        case pq.Ping.REJECT:
            return errors.CannotConnectNow.sqlstate
        case pq.Ping.NO_ATTEMPT:
            return ""
    return _traced_refusal(conninfo) if sys.platform == "linux" else ""


def _traced_refusal(conninfo: str) -> str | None:
    connection = pq.PGconn.connect_start(conninfo.encode())
    # In memory only: with some ways of authentication the trace holds the password.
    trace = os.memfd_create("dbsync")
    try:
        connection.trace(trace)
        _finish_connecting(connection)
        connection.untrace()
        os.lseek(trace, 0, os.SEEK_SET)
        answers = re.findall(rb'\tErrorResponse\t S ".*?" V "[A-Z]+" C "([0-9A-Z]{5})"', os.read(trace, 1 << 20))
    finally:
        connection.finish()
        os.close(trace)
    # No answer, or by now a welcome: it was the way to the server and not the server that refused.
    return answers[-1].decode() if answers else None


def _finish_connecting(connection: pq.abc.PGconn) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT_SECONDS
    while (status := connection.connect_poll()) in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
        poll = select.poll()
        poll.register(connection.socket, select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return
