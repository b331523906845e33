"""The private PostgreSQL starts, keeps strangers out, survives a crash, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from dbsync import embedded
from dbsync.embedded import EmbeddedPostgres
from dbsync.errors import ConfigError, SetupError

RUN_UNTIL_KILLED = """
import time
from dbsync.embedded import EmbeddedPostgres
server = EmbeddedPostgres()
server.start()
print(server.pid, server.folder, flush=True)
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    # In a container nobody may collect the dead, which then stay as zombies.
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("version", [16, 18])
def test_starts_ready_for_logical_replication_and_leaves_nothing(version: int) -> None:
    with EmbeddedPostgres(version) as server:
        with psycopg.connect(server.dsn()) as connection:
            assert connection.info.server_version // 10000 == version
            shown = connection.execute(
                "SELECT current_setting('wal_level'), current_setting('listen_addresses'),"
                " current_setting('server_encoding'), current_setting('synchronous_commit')"
            ).fetchone()
            assert shown == ("logical", "127.0.0.1", "UTF8", "on")
        with psycopg.connect(server.dsn(), replication="database", autocommit=True) as walsender:
            assert walsender.execute("IDENTIFY_SYSTEM").fetchone() is not None
        assert (server.bin / "pg_recvlogical").is_file()
        assert (server.bin / "pgbench").is_file()
        pid, folder = server.pid, server.folder
        assert pid is not None
    assert is_gone(pid)
    assert not folder.exists()


def test_wrong_password_is_refused() -> None:
    with EmbeddedPostgres() as server:
        for replication in (None, "database"):
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(server.dsn(password="wrong"), replication=replication)


def test_password_is_in_no_process_list() -> None:
    with EmbeddedPostgres() as server:
        commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        assert not [command for command in commands if server.password in command]


def test_options_override_and_alter_system_overrides_them() -> None:
    with EmbeddedPostgres(options={"wal_level": "replica", "search_path": 'it\'s, "quoted"'}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            assert connection.execute("SHOW wal_level").fetchone() == ("replica",)
            connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
        server.restart()
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SHOW wal_level").fetchone() == ("logical",)


def test_committed_rows_and_port_survive_a_crash() -> None:
    with EmbeddedPostgres() as server:
        port = server.port
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS id")
        children = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        assert all(is_gone(child.pid) for child in children)
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn())
        server.start()
        assert server.port == port
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT id FROM kept").fetchall() == [(1,)]


def test_failed_start_shows_the_log_and_leaves_nothing(open_folder: Path) -> None:
    server = EmbeddedPostgres(folder=open_folder, options={"wal_level": "nonsense"})
    with pytest.raises(SetupError, match="nonsense"):
        server.start()
    assert list(open_folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_server_goes_with_the_process_that_started_it(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", RUN_UNTIL_KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        owner.send_signal(number)
        owner.wait()
    wait_until(lambda: is_gone(int(pid)) and not Path(folder).exists())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as somebody else")
def test_root_runs_it_as_somebody_else_even_from_a_closed_virtualenv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EmbeddedPostgres(16) as server:
        assert psutil.Process(server.pid).uids().real != 0
        package = server.bin.parent.parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(name), closed / name, symlinks=True)
    monkeypatch.setattr(embedded, "_find_install", lambda _: closed / package.name / "pginstall")
    with EmbeddedPostgres(16) as server:
        assert server.bin.is_relative_to(server.folder)
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_version_that_neither_the_wheel_nor_debian_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"There is no private PostgreSQL 9: .* is not there"):
        EmbeddedPostgres(9)


def test_a_version_the_wheel_lacks_is_taken_from_where_debian_puts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "17").symlink_to(EmbeddedPostgres(18).bin.parent)
    monkeypatch.setattr(embedded, "_DEBIAN", tmp_path)
    assert EmbeddedPostgres(17).bin == tmp_path / "17" / "bin"


def test_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        EmbeddedPostgres()
    assert "pip install 'dbsync[embedded]'" in str(caught.value)
