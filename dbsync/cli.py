"""The command `dbsync`: data on stdout, words on stderr, and an exit code a script can rely on.

A flag wins over its variable, and its help names the variable. Secrets have no flag, because a command line can be
read by every user of the machine. An error is one sentence and a hint; a traceback comes only with --verbose. Nothing
but this module configures logging. What takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import psycopg

from dbsync import control
from dbsync.check import run_checks
from dbsync.cli_flags import (
    CHUNKS,
    INTERRUPTED,
    RUN,
    SECRETS,
    SOURCE,
    Invocation,
    json_flag,
    make_syncer,
    one_line,
    reconfigure,
    takes,
    target,
    target_name,
    verbose,
)
from dbsync.cli_refresh import refresh
from dbsync.cli_show import (
    configure_logging,
    count,
    look,
    print_json,
    say,
    show_checks,
    show_overview,
    words_console,
)
from dbsync.config import Settings
from dbsync.connection import connect
from dbsync.errors import CheckError, ConfigError, DbsyncError, StreamError
from dbsync.requests import INITIAL

logger = logging.getLogger(__name__)

_LOG_LEVELS = ("debug", "info", "warning", "error")

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    unexpected
  2    usage or configuration
  3    a check failed
  4    PostgreSQL
  5    handler or Batcher
  130  interrupted"""


@click.group(
    invoke_without_command=True,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="dbsync", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Keep anything in step with PostgreSQL: read its log, reduce it in Spark, hand over final state."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@app.command(epilog=SECRETS)
@takes(*SOURCE)
@json_flag
@verbose
@click.pass_obj
def init(invocation: Invocation, as_json: bool) -> None:
    """Create what dbsync needs in the source.

    That is the control schema, the watermark table, its entry in the publication, and the slot. It can be run again and
    again, and prints what is there, like `dbsync status`.
    """
    settings = invocation.settings()
    with connect(settings) as conn:
        control.setup(conn, settings)
    show_overview(look(settings), as_json)


@app.command(epilog=SECRETS)
@takes(*SOURCE)
@json_flag
@verbose
@click.pass_obj
def check(invocation: Invocation, as_json: bool) -> None:
    """Look whether the source is ready.

    Changes nothing, and says how to put right what is not as it must be.

    --json prints {"ok": …, "checks": [{"name", "ok", "level", "detail", "fix"}, …]}; level is ok, warn or fail.
    """
    settings = invocation.settings()
    for sentence in invocation.mistaken():
        say(sentence)
    checks = run_checks(settings)
    if as_json:
        print_json({"ok": all(line.ok for line in checks), "checks": [asdict(line) for line in checks]})
    else:
        show_checks(checks)
    failed = sum(1 for line in checks if not line.ok)
    if failed:
        raise CheckError(f"{failed} of {len(checks)} checks failed.", "Each one's fix is printed with it.")


@app.command(epilog=SECRETS)
@takes(*SOURCE, *RUN, *CHUNKS, snapshot=INITIAL)
@target
@click.option(
    "--log-level", type=click.Choice(_LOG_LEVELS), help="how much to say on stderr [default: info, with -v debug]"
)
@verbose
@click.pass_obj
def run(invocation: Invocation, handler: str | None, batcher: str | None, log_level: str | None) -> None:
    """Follow the log until told to stop.

    Each published table is copied once, when it is first seen, while its changes are followed; --snapshot never leaves
    that out. What `dbsync refresh` asks for is done beside it.

    The first SIGINT or SIGTERM finishes the batch and acknowledges it, a second one stops at once.

    Without --to or --batcher, final upserts and deletes are written to stdout, one JSON object a line.
    """
    settings = invocation.settings()
    configure_logging(log_level or ("debug" if invocation.verbose else "info"), settings.mask)
    for sentence in invocation.mistaken():
        logger.warning("%s", sentence)
    _announce(settings)
    syncer = make_syncer(invocation, settings, handler, batcher)
    syncer.feeds = target_name(settings, batcher)
    syncer.run()


app.add_command(refresh)


@app.command(epilog=SECRETS)
@takes(*SOURCE)
@json_flag
@verbose
@click.pass_obj
def status(invocation: Invocation, as_json: bool) -> None:
    """Show the slot, its lag, what is published and what was refreshed.

    It asks PostgreSQL, so it works beside a dbsync that runs and without one.

    \b
    --json prints these keys, and they stay:
      set_up       all that `dbsync init` creates is there
      source       host:port/dbname as user
      server_lsn   where the log ends
      publication  name, exists, tables ["schema.table", …]
      control      schema, table, exists
      slot         name, exists, plugin, database, active, active_pid, restart_lsn,
                   confirmed_flush_lsn, wal_status, safe_wal_size, held_bytes, lag_bytes
      refreshes    the last 20, the newest first, or null where this role may not read them:
                   id, kind (request or initial), state (queued, running, done, failed or
                   cancelled), query, rows, superseded, chunks, voided, estimated_rows, message,
                   requested_by, requested_at, started_at, finished_at
    """
    overview = look(invocation.settings())
    show_overview(overview, as_json)
    if not overview.set_up:
        say("dbsync is not set up here yet: run dbsync init.")


@app.command(epilog=SECRETS)
@takes(*SOURCE)
@click.option("--yes", is_flag=True, help="do not ask")
@verbose
@click.pass_obj
def teardown(invocation: Invocation, yes: bool) -> None:
    """Remove all that is dbsync's from the source.

    What was removed is printed. The publication stays: it is yours. Changes that are made after this, and before the
    next `dbsync init`, are not seen.
    """
    settings = invocation.settings()
    if not yes and not _confirmed(settings):
        say("Nothing was removed.")
        return
    with connect(settings) as conn:
        removed = control.teardown(conn, settings)
    for words in removed:
        click.echo(words)
    if not removed:
        say("There was nothing of dbsync's to remove.")


@app.command()
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, show_default=True, help="how long it goes on")
@click.option("--rows", type=click.IntRange(min=1), default=300_000, show_default=True, help="rows of the shop")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="keep the DuckDB file here")
@verbose
@click.pass_context
def demo(ctx: click.Context, seconds: float, rows: int, keep: Path | None) -> None:
    """See it work, on a PostgreSQL of its own.

    Keeps a DuckDB file in step with a private PostgreSQL that is written to, then compares the two row by row.

    It needs the extra: pip install 'dbsync[embedded]'. Exit code 0 says that target and source are equal.
    """
    from dbsync.demo import run

    configure_logging("debug" if ctx.ensure_object(Invocation).verbose else "warning")
    if not run(seconds=seconds, keep=keep, rows=rows, console=words_console()):
        ctx.exit(DbsyncError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    # What the terminal cannot show is replaced: a fix that is printed must not end in an encoding error.
    reconfigure(sys.stdout, errors="replace")
    invocation = Invocation()
    try:
        code = app.main(arguments, prog_name="dbsync", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        # Python remembers an interrupt that came while it ran a string (a dataclass being made), and in the end would
        # raise the signal again in place of our exit code, although it is caught. Another string makes it forget.
        eval("0")
        say("dbsync: interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; without this Python complains again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DbsyncError.exit_code
    except click.ClickException as error:
        ctx = error.ctx if isinstance(error, click.UsageError) else None
        path = ctx.command_path if ctx else "dbsync"
        return _tell(ConfigError(error.format_message(), f"See {path} --help."), invocation)
    except DbsyncError as error:
        return _tell(error, invocation)
    except psycopg.Error as error:
        words = error.diag.message_primary or one_line(error)
        return _tell(_because(error, StreamError(f"PostgreSQL did not do it: {words}.", "Try again.")), invocation)
    except Exception as error:
        return _tell(_because(error, DbsyncError(f"An unexpected {one_line(error)}")), invocation)


def _because(cause: Exception, error: DbsyncError) -> DbsyncError:
    error.__cause__ = cause
    return error


def _tell(error: DbsyncError, invocation: Invocation) -> int:
    say(invocation.mask(f"dbsync: {error.message}"))
    if error.hint:
        say(invocation.mask(error.hint))
    cause = error.__cause__
    if cause is not None and invocation.verbose:
        say(invocation.mask("".join(traceback.format_exception(cause)).rstrip()))
    elif cause is not None and error.exit_code == DbsyncError.exit_code:
        say("Run it with --verbose for the traceback.")
    return error.exit_code


def _announce(settings: Settings) -> None:
    with connect(settings) as conn:
        if control.publication(conn, settings) is None:
            return
        tables = control.published_tables(conn, settings)
    logger.info(
        "following %s of the publication %s through the slot %s at %s",
        count(len(tables), "table"),
        settings.publication,
        settings.slot,
        settings.describe(),
    )


def _confirmed(settings: Settings) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "dbsync teardown asks before it removes anything, and there is no terminal to ask on.", "Add --yes."
        )
    question = f"Remove the slot {settings.slot} and all else of dbsync's from {settings.describe()}?"
    return click.confirm(question, err=True)
