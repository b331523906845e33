"""`dbsync refresh`: asks the dbsync that runs to re-read what a SELECT gives, or does it itself where none runs.

What is asked for is a row of the refresh table either way, so it survives whoever watches it: only --cancel ends it
before it is done. A SELECT that cannot be refreshed is refused before anything is written.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias

import click
import psycopg
from psycopg import errors

from dbsync import control, selection
from dbsync.batcher import EchoBatcher
from dbsync.cli_flags import (
    CHUNKS,
    INTERRUPTED,
    RUN,
    SECRETS,
    SOURCE,
    TARGET,
    Invocation,
    flag_of,
    json_flag,
    make_syncer,
    takes,
    target,
    target_name,
    verbose,
)
from dbsync.cli_show import configure_logging, count, print_json, say, words_console
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.errors import ConfigError, RefreshError, SetupError, StreamError
from dbsync.requests import CANCELLED, FAILED, QUEUED, Refresh, Requests
from dbsync.targeturl import is_same, recalled

GRANT_ASKING = (
    "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT, INSERT, UPDATE ON {schema}.{refresh_table} TO {role};"
)

if TYPE_CHECKING:
    from dbsync.cli_progress import View

_POLL_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0  # between tries to connect again
_UNREAD_SECONDS = 10.0  # how long nobody may read the slot before that is worth a word

_EPILOG = f"""\b
Exit codes, besides those of dbsync --help:
  0    done; with --detach asked for; with --cancel cancelled
  2    the SELECT cannot be refreshed, or the refresh failed; --cancel found nothing to cancel
  {INTERRUPTED}  somebody cancelled it, or Ctrl-C: it is then not cancelled

{SECRETS}"""


@click.command(epilog=_EPILOG)
@click.argument("query", required=False, metavar="[SELECT]")
@click.option("--detach", is_flag=True, help="only ask for it: print its id and return")
@click.option("--cancel", type=int, metavar="ID", help="stop the refresh with this id")
@takes(*SOURCE, *CHUNKS, *RUN)
@target
@json_flag
@verbose
@click.pass_context
def refresh(
    ctx: click.Context,
    query: str | None,
    detach: bool,
    cancel: int | None,
    handler: str | None,
    batcher: str | None,
    as_json: bool,
) -> None:
    """Re-read what a SELECT gives, while writes go on.

    It takes one SELECT over one published table, with its whole key, and returns when the rows are in the target.

    The dbsync that runs for the slot does it, with its own handler, Batcher and settings; of the flags, only
    --chunk-rows goes along. Ctrl-C stops watching, and the refresh goes on. Where no dbsync runs, this command does
    the work itself, as `dbsync run` would: what else waits in the log or was asked for is taken up too, and without
    --to or --batcher the documents come on stdout before the result.

    \b
    --json prints one object, the last line on stdout:
      id, state    done, failed or cancelled; with --detach queued
      rows         re-read and in the target; superseded: of these, overtaken by a newer change
      chunks       windows they came in; voided: windows that were read again
      seconds      from its beginning to its end
    """
    invocation = ctx.ensure_object(Invocation)
    settings = invocation.settings()
    if (query is None) == (cancel is None) or (detach and query is None):
        raise ConfigError("dbsync refresh takes a SELECT, or --cancel and an id.", "See dbsync refresh --help.")
    if cancel is not None:
        _cancel(settings, cancel, as_json)
        return
    assert query is not None
    with connect(settings) as conn:
        running = _is_running(conn, settings)
        _check(conn, settings, query, elsewhere=running or detach)
    asked = Asked(invocation, settings, query, settings.chunk_rows if invocation.says("chunk_rows") else None)
    if detach:
        _detach(asked, running, as_json)
        return
    with _termination_interrupts():
        if running:
            _say_what_does_not_count(invocation, handler, batcher)
            over = asked.watch()
        else:
            configure_logging("debug" if invocation.verbose else "warning", settings.mask)
            _keep_to_target(settings, target_name(settings, batcher))
            over = asked.do(handler, batcher)
    ctx.exit(_report(over, as_json))


@dataclass(frozen=True, slots=True)
class Asked:
    """A refresh somebody asks for."""

    invocation: Invocation
    settings: Settings
    query: str
    chunk_rows: int | None

    def submit(self, conn: Connection) -> int:
        with _allowed(conn, self.settings, "ask for a refresh"):
            return Requests(conn, self.settings).submit(self.query, chunk_rows=self.chunk_rows)

    def watch(self) -> Refresh:
        """Let the running dbsync do it; how it ended."""
        with _Undone("goes on") as undone:
            with connect(self.settings) as conn:
                undone.id = self.submit(conn)
            say(f"Refresh {undone.id} is asked for; the dbsync that runs does it.")
            return _follow(self.settings, undone.id, _Unread(self.settings).look, bar=True)

    def do(self, handler: str | None, batcher: str | None) -> Refresh:
        """Do it here; how it ended."""
        # A first copy of other tables is not what was asked for.
        syncer = make_syncer(self.invocation, replace(self.settings, snapshot="never"), handler, batcher)
        # A bar and documents on the same screen would spoil each other.
        bar = not isinstance(syncer.batcher, EchoBatcher) or not sys.stdout.isatty()
        with _Undone("is left to the next dbsync that runs") as undone, syncer:
            with connect(self.settings) as conn:
                undone.id = self.submit(conn)
            say(f"No dbsync runs for the slot {self.settings.slot}: refresh {undone.id} is done here.")
            return _follow(self.settings, undone.id, lambda _: syncer.running, bar=bar)


Going: TypeAlias = "Callable[[Connection | None], bool]"
"""Whether somebody still does it; without a connection, as far as that can be told."""


def _follow(settings: Settings, id: int, going: Going, *, bar: bool) -> Refresh:
    """Show how far it is until it is over, or nobody does it any more. A PostgreSQL that is away is waited for."""
    from dbsync.cli_progress import view

    pause = _POLL_SECONDS
    with view(words_console(), bar=bar) as shown:
        while True:
            try:
                with closing(connect(settings)) as conn:
                    pause = _POLL_SECONDS
                    return _watch(conn, settings, id, going, shown)
            except (psycopg.OperationalError, StreamError):
                if not going(None):
                    raise
                if pause == _POLL_SECONDS:
                    say("The connection to PostgreSQL broke; waiting until it is back.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _watch(conn: Connection, settings: Settings, id: int, going: Going, shown: View) -> Refresh:
    requests = Requests(conn, settings)
    while True:
        found = requests.get(id)
        if found is None:
            raise RefreshError(f"Refresh {id} is gone from the refresh table.", "Ask for it again.")
        shown.show(found)
        if found.is_over or not going(conn):
            return found
        time.sleep(_POLL_SECONDS)


class _Undone:
    """Says what becomes of a refresh that nobody watches to its end."""

    def __init__(self, fate: str) -> None:
        self._fate = fate
        self.id: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.id is None or error is None or isinstance(error, RefreshError):
            return
        say(f"Refresh {self.id} {self._fate}; dbsync refresh --cancel {self.id} stops it.")
        if isinstance(error, psycopg.OperationalError):
            raise StreamError("The connection to PostgreSQL broke.", "See dbsync status.") from error


class _Unread:
    """Notices that the dbsync that was to do it has gone."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._said = False
        self._seen = time.monotonic()

    def look(self, conn: Connection | None) -> bool:
        now = time.monotonic()
        if conn is None or _is_running(conn, self._settings):
            self._seen, self._said = now, False
        elif not self._said and now > self._seen + _UNREAD_SECONDS:
            self._said = True
            say(f"No dbsync runs for the slot {self._settings.slot} any more; waiting until one does.")
        return True


def _is_running(conn: Connection, settings: Settings) -> bool:
    slot = control.slot_state(conn, settings)
    return slot is not None and slot.active


def _check(conn: Connection, settings: Settings, query: str, *, elsewhere: bool) -> None:
    """Refuse a SELECT that breaks a rule before anything is written."""
    try:
        selection.understand(conn, settings, query)
    except RefreshError as error:
        # It runs with the rights of the dbsync that does it; who may ask need not be able to read the table.
        if not elsewhere or not isinstance(error.__cause__, errors.InsufficientPrivilege):
            raise


def _keep_to_target(settings: Settings, target: str) -> None:
    """Doing a refresh here takes out of the log what waits in it: it must go where it always went."""
    with connect(settings) as conn:
        refreshes = control.own_table(conn, settings, control.REFRESHES)
        known = Requests(conn, settings).target() if refreshes and refreshes.ours else None
    if known is not None and not is_same(known, target):
        raise ConfigError(
            f"The slot {settings.slot} feeds {recalled(known)}, and changes that wait in its log would go to"
            f" {target} instead.",
            "Name that target with --to or --batcher, or use --detach and start dbsync run.",
        )


def _say_what_does_not_count(invocation: Invocation, handler: str | None, batcher: str | None) -> None:
    names = {"handler": handler, "batcher": batcher} | {
        name: invocation.flags.get(name) for name in (*CHUNKS, *RUN, *TARGET) if name != "chunk_rows"
    }
    given = [flag_of(name) for name, value in names.items() if value is not None]
    if given:
        say(f"What {', '.join(given)} says is left out: the dbsync that runs keeps to its own.")


def _detach(asked: Asked, running: bool, as_json: bool) -> None:
    with connect(asked.settings) as conn:
        id = asked.submit(conn)
    if as_json:
        print_json({"id": id, "state": QUEUED})
    else:
        click.echo(id)
    if not running:
        say(f"No dbsync runs for the slot {asked.settings.slot}: refresh {id} is done when one does.")


def _cancel(settings: Settings, id: int, as_json: bool) -> None:
    with connect(settings) as conn, _allowed(conn, settings, "cancel a refresh"):
        requests = Requests(conn, settings)
        if not requests.cancel(id):
            found = requests.get(id)
            if found is None or found.slot != settings.slot:
                raise RefreshError(f"There is no refresh {id} of the slot {settings.slot}.", "See dbsync status.")
            raise RefreshError(f"Refresh {id} is over: it is {found.state}.", "There is nothing to cancel.")
    if as_json:
        print_json({"id": id, "state": CANCELLED})
    say(f"Refresh {id} is cancelled; rows that are in the target already stay there.")


@contextmanager
def _allowed(conn: Connection, settings: Settings, doing: str) -> Iterator[None]:
    try:
        yield
    except errors.InsufficientPrivilege as error:
        role, fix = (control.statement(conn, settings, text) for text in ("{role}", GRANT_ASKING))
        raise SetupError(f"The role {role} may not {doing}.", f"Run as the owner of that table: {fix}") from error
    except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
        raise SetupError(f"dbsync is not set up in {settings.describe()}.", "Run dbsync init.") from error


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends the command like Ctrl-C: what is open is closed, and it says what becomes of the refresh."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(over: Refresh, as_json: bool) -> int:
    """Print how it ended; the exit code."""
    result = over.result
    if as_json:
        print_json({"id": over.id, "state": over.state, **asdict(result)})
    if over.state == FAILED:
        raise RefreshError(over.message or f"Refresh {over.id} failed.")
    if over.state == CANCELLED:
        say(f"dbsync: refresh {over.id} was cancelled.")
        return INTERRUPTED
    if not as_json:
        click.echo(
            f"refresh {over.id}: {count(result.rows, 'row')} in {count(result.chunks, 'chunk')},"
            f" {result.superseded:,} superseded, {result.voided:,} voided, {result.seconds:.1f} s"
        )
    return 0
