"""`dbsync refresh` and the first copy as a script sees them: beside a dbsync that runs, and without one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import duckdb
import psycopg
import pytest
from commands import COMMAND, SECRET, WAIT_SECONDS, dbsync, environ, publish, refused, running, until
from fix_postgres import Database, fresh_database, new_server
from psycopg import sql
from psycopg.conninfo import make_conninfo

ALL = "SELECT id, note FROM public.orders"
RESULT = {"id", "state", "rows", "superseded", "chunks", "voided", "seconds"}


@pytest.fixture
def shop(database: Database) -> Database:
    publish(database)
    return database


@pytest.fixture
def full_shop(shop: Database) -> Database:
    shop.execute("INSERT INTO orders SELECT i, 'note ' || i FROM generate_series(1, 300) AS i")
    return shop


class Output:
    """What a process writes, read all the while so that it never has to wait for us."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream
        self.lines: list[str] = []
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self.lines.append(line)

    def has(self, words: str) -> bool:
        return any(words in line for line in list(self.lines))

    def ids(self, doctype: str) -> list[int]:
        found = [json.loads(line) for line in list(self.lines)]
        return [int(line["id"]) for line in found if (line["op"], line["type"]) == ("upsert", doctype)]

    def finish(self) -> str:
        self._thread.join(WAIT_SECONDS)
        return "".join(self.lines)


@contextmanager
def held(process: subprocess.Popen[str]) -> Iterator[None]:
    """Keep a dbsync from doing anything; its slot stays its own."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def asking(database: Database, query: str, stderr: int, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """A `dbsync refresh` beside the test."""
    with subprocess.Popen(
        [*COMMAND, "refresh", query],
        env=environ(database, **changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def watching(database: Database) -> Iterator[tuple[subprocess.Popen[str], Output]]:
    """A `dbsync refresh` that waits for another dbsync to do it, and what it says."""
    with asking(database, ALL, subprocess.PIPE) as process:
        told = Output(process.stderr)
        until(lambda: told.has("is asked for") or process.poll() is not None)
        yield process, told


def refreshes(database: Database) -> list[dict[str, Any]]:
    return list(json.loads(dbsync(database, "status", "--json").stdout)["refreshes"])


def newest(database: Database) -> int:
    return int(refreshes(database)[0]["id"])


def is_read(database: Database) -> bool:
    return bool(
        database.rows("SELECT FROM pg_replication_slots WHERE slot_name = %s AND active_pid > 0", [database.slot])
    )


def test_beside_a_dbsync_that_runs(full_shop: Database) -> None:
    shop = full_shop
    assert dbsync(shop, "init").returncode == 0
    # Without --snapshot and without its variable: a run copies what was there before it.
    with running(shop, DBSYNC_SNAPSHOT="") as process:
        out, err = Output(process.stdout), Output(process.stderr)
        until(lambda: len(out.lines) >= 300)
        assert sorted(out.ids("public.orders")) == list(range(1, 301))
        assert err.has("gets its first copy")

        shop.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later SELECT generate_series(1, 20)")
        shop.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE later")
        until(lambda: len(out.ids("public.later")) >= 20)
        assert sorted(out.ids("public.later")) == list(range(1, 21))
        until(lambda: {one["state"] for one in refreshes(shop)} == {"done"})
        assert {(one["kind"], one["rows"]) for one in refreshes(shop)} == {("initial", 300), ("initial", 20)}

        _asks_and_gets_the_result(shop, out)
        _is_told_of_a_failure(shop)
        _may_stop_watching(shop, process)
        _hears_of_a_cancellation(shop, process)
        _has_a_bar_on_a_terminal(shop, process)

        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    assert process.returncode == 0, err.finish()
    assert "Traceback" not in err.finish()


def _asks_and_gets_the_result(shop: Database, out: Output) -> None:
    before = len(out.lines)
    done = dbsync(shop, "refresh", f"{ALL} WHERE id <= 100", "--chunk-rows", "30", "--json", "--batcher", "my:Own")
    assert done.returncode == 0, done.stderr
    assert "What --batcher says is left out: the dbsync that runs keeps to its own." in done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == RESULT
    assert (told["state"], told["rows"], told["chunks"], told["superseded"]) == ("done", 100, 4, 0)
    until(lambda: len(out.lines) >= before + 100)
    assert len(out.lines) == before + 100
    assert sorted(out.ids("public.orders")[-100:]) == list(range(1, 101))
    plain = dbsync(shop, "refresh", f"{ALL} WHERE id = 7")
    assert plain.returncode == 0
    assert plain.stdout.startswith(f"refresh {newest(shop)}: 1 row in 1 chunk, 0 superseded, 0 voided, ")
    assert len(plain.stdout.splitlines()) == 1
    assert f"{newest(shop)} done: 1 row, 1 chunk" in dbsync(shop, "status").stdout


def _is_told_of_a_failure(shop: Database) -> None:
    failed = dbsync(shop, "refresh", f"{ALL} WHERE 1 / (id - 200) < 5", "--json")
    assert failed.returncode == 2, failed.stderr
    assert "division by zero" in failed.stderr
    assert json.loads(failed.stdout)["state"] == "failed"


def _may_stop_watching(shop: Database, process: subprocess.Popen[str]) -> None:
    with held(process), watching(shop) as (watcher, told):
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(WAIT_SECONDS) == 130
        id = newest(shop)
        assert f"Refresh {id} goes on; dbsync refresh --cancel {id} stops it." in told.finish()
        assert "Traceback" not in told.finish()
        assert watcher.stdout is not None
        assert watcher.stdout.read() == ""
    until(lambda: (refreshes(shop)[0]["id"], refreshes(shop)[0]["state"]) == (id, "done"))


def _hears_of_a_cancellation(shop: Database, process: subprocess.Popen[str]) -> None:
    with held(process), watching(shop) as (watcher, told):
        cancelled = dbsync(shop, "refresh", "--cancel", str(newest(shop)))
        assert (cancelled.returncode, cancelled.stdout) == (0, "")
        assert watcher.wait(WAIT_SECONDS) == 130
        assert f"refresh {newest(shop)} was cancelled" in told.finish()


def _has_a_bar_on_a_terminal(shop: Database, process: subprocess.Popen[str]) -> None:
    ours, theirs = pty.openpty()
    with Terminal(ours) as terminal, held(process), asking(shop, ALL, theirs, TERM="xterm", COLUMNS="120") as watcher:
        os.close(theirs)
        until(lambda: b"waiting for its turn" in terminal.shown)
        assert b"\x1b[" in terminal.shown
        process.send_signal(signal.SIGCONT)
        out, _ = watcher.communicate(timeout=WAIT_SECONDS)
    assert watcher.returncode == 0
    assert out.startswith(f"refresh {newest(shop)}: 300 rows in 1 chunk")
    assert "\x1b" not in out


class Terminal:
    """Shows what is written to it."""

    def __init__(self, descriptor: int) -> None:
        self.shown = b""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        try:
            while some := os.read(self._descriptor, 65536):
                self.shown += some
        except OSError:  # how Linux tells that the other end of a terminal is closed
            pass

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_SECONDS)
        os.close(self._descriptor)


def test_who_watches_waits_for_a_postgresql_that_restarts() -> None:
    with new_server() as server, fresh_database(server) as shop:
        publish(shop)
        shop.execute("INSERT INTO orders SELECT i, 'note ' || i FROM generate_series(1, 300) AS i")
        assert dbsync(shop, "init").returncode == 0
        with running(shop) as process:
            until(lambda: is_read(shop))
            with held(process), watching(shop) as (watcher, told):
                server.restart("immediate")  # otherwise it waits for the dbsync that is held to hear of its end
                until(lambda: told.has("waiting until it is back") or watcher.poll() is not None)
                process.send_signal(signal.SIGCONT)
                assert watcher.wait(WAIT_SECONDS) == 0, told.finish()
                assert watcher.stdout is not None
                assert watcher.stdout.read().startswith(f"refresh {newest(shop)}: 300 rows")


def test_with_no_dbsync_running_it_does_the_work(full_shop: Database) -> None:
    done = dbsync(full_shop, "refresh", f"{ALL} WHERE id > 250", "--chunk-rows", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert "is done here" in done.stderr
    *documents, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(int(line["id"]) for line in documents) == list(range(251, 301))
    assert result.keys() == RESULT
    assert (result["state"], result["rows"], result["chunks"]) == ("done", 50, 3)
    assert not is_read(full_shop)


def test_work_that_is_interrupted_waits_for_the_next_dbsync(full_shop: Database) -> None:
    with asking(full_shop, ALL, subprocess.PIPE) as process:
        told = Output(process.stderr)
        until(lambda: told.has("is done here") or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 130, told.finish()
    id = newest(full_shop)
    assert f"Refresh {id} is left to the next dbsync that runs; dbsync refresh --cancel {id} stops it." in told.finish()
    assert "Traceback" not in told.finish()
    assert refreshes(full_shop)[0]["state"] in ("queued", "running")
    assert not is_read(full_shop)


def test_what_nobody_does_yet_waits(shop: Database) -> None:
    refused(dbsync(shop, "refresh", "--detach", ALL), 4, "is not set up", "dbsync init")
    assert dbsync(shop, "init").returncode == 0
    asked = dbsync(shop, "refresh", "--detach", ALL)
    assert asked.returncode == 0
    id = int(asked.stdout)
    assert f"refresh {id} is done when one does" in asked.stderr
    (waiting,) = refreshes(shop)
    assert (waiting["id"], waiting["state"], waiting["kind"], waiting["query"]) == (id, "queued", "request", ALL)
    assert f"{id} queued: 0 rows, 0 chunks, not begun: {ALL}" in dbsync(shop, "status").stdout

    cancelled = dbsync(shop, "refresh", "--cancel", str(id), "--json")
    assert (cancelled.returncode, json.loads(cancelled.stdout)) == (0, {"id": id, "state": "cancelled"})
    assert f"Refresh {id} is cancelled" in cancelled.stderr
    assert refreshes(shop)[0]["state"] == "cancelled"
    refused(dbsync(shop, "refresh", "--cancel", str(id)), 2, f"Refresh {id} is over: it is cancelled.", "nothing")
    refused(dbsync(shop, "refresh", "--cancel", "4711"), 2, "There is no refresh 4711", "dbsync status")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["SELECT note FROM public.orders"], "key"),
        (["SELECT * FROM pg_class"], "pg_class"),
        (["SELEKT 1"], "at character 1"),
        (["DELETE FROM public.orders RETURNING *"], "is not a SELECT"),
        ([], "takes a SELECT, or --cancel"),
        ([ALL, "--cancel", "1"], "takes a SELECT, or --cancel"),
        (["--detach"], "takes a SELECT, or --cancel"),
        (["--detach", "--cancel", "1"], "takes a SELECT, or --cancel"),
        ([ALL, "--chunk-rows", "0"], "--chunk-rows='0' cannot be used"),
        ([ALL, "--batcher", "elsewhere:Batcher"], "there is no module elsewhere"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(shop: Database, arguments: list[str], sentence: str) -> None:
    done = dbsync(shop, "refresh", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    told, *hint = done.stderr.splitlines()
    assert told.startswith("dbsync: ")
    assert sentence in told
    assert len(hint) <= 1
    assert shop.rows("SELECT FROM pg_namespace WHERE nspname = 'dbsync_ctrl'") == []
    assert not is_read(shop)


def test_who_may_ask_is_a_matter_of_grants(shop: Database) -> None:
    assert dbsync(shop, "init").returncode == 0
    name = f"{shop.name}_role"
    role = sql.Identifier(name)
    limited = make_conninfo(shop.dsn, user=name, password=SECRET)
    with shop.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(SECRET)))
        try:
            for arguments in (["--detach", ALL], ["--cancel", "1"]):
                done = dbsync(shop, "refresh", *arguments, POSTGRES_CONNSTR=limited)
                refused(done, 4, f'The role "{name}" may not', f'ON "dbsync_ctrl"."dbsync_refreshes" TO "{name}";')
            assert json.loads(dbsync(shop, "status", "--json", POSTGRES_CONNSTR=limited).stdout)["refreshes"] is None

            conn.execute(done.stderr[done.stderr.index("GRANT") :])
            asked = dbsync(shop, "refresh", "--detach", ALL, POSTGRES_CONNSTR=limited)
            assert asked.returncode == 0, asked.stderr
            assert refreshes(shop)[0]["requested_by"] == name
            cancelled = dbsync(shop, "refresh", "--cancel", asked.stdout.strip(), POSTGRES_CONNSTR=limited)
            assert cancelled.returncode == 0, cancelled.stderr
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(role, role))


def test_a_refresh_of_its_own_keeps_to_what_the_slot_feeds(full_shop: Database, tmp_path: Path) -> None:
    file = f"duckdb:///{tmp_path / 'shop.duckdb'}"
    with running(full_shop, "--to", file, DBSYNC_SNAPSHOT="initial") as process:
        until(lambda: _copied(full_shop))
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0
    full_shop.execute("INSERT INTO orders VALUES (1000, 'while nobody runs')")
    refused(
        dbsync(full_shop, "refresh", ALL), 2, f"feeds {file}, and changes that wait in its log", "--to or --batcher"
    )
    done = dbsync(full_shop, "refresh", ALL, "--to", file)
    assert done.returncode == 0, done.stderr
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as db:
        assert db.execute("SELECT count(*), max(id) FROM public.orders").fetchall() == [(301, 1000)]


def _copied(database: Database) -> bool:
    try:
        return database.rows("SELECT state FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial'") == [("done",)]
    except psycopg.errors.UndefinedTable:
        return False
