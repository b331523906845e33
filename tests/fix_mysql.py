"""A real MariaDB or MySQL for the whole run, where its server is installed; a database of its own for every test."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
import pytest

PASSWORD = "geheim-4712"
_START_SECONDS = 60


@dataclass(frozen=True, slots=True)
class MysqlDatabase:
    port: int
    name: str

    @property
    def url(self) -> str:
        return self.at()

    def at(self, scheme: str = "mysql", user: str = "dbsync", password: str = PASSWORD, name: str | None = None) -> str:
        return f"{scheme}://{user}:{password}@127.0.0.1:{self.port}/{name or self.name}"

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(_connect(self.port, self.name)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


@pytest.fixture(scope="session")
def mysql_port() -> Iterator[int]:
    server = shutil.which("mariadbd") or shutil.which("mysqld")
    if server is None:
        pytest.skip("needs a MariaDB or MySQL server: mariadbd or mysqld is not on the PATH")
    # Its socket's path may be no longer than some hundred characters.
    with tempfile.TemporaryDirectory(prefix="dbsync-mysql-") as folder:
        yield from _running(server, Path(folder))


@pytest.fixture
def mysql(mysql_port: int) -> Iterator[MysqlDatabase]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with closing(_connect(mysql_port)) as admin, admin.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        yield MysqlDatabase(mysql_port, name)
        cursor.execute(f"DROP DATABASE {name}")


def _running(server: str, folder: Path) -> Iterator[int]:
    user, data = pwd.getpwuid(os.getuid()).pw_name, folder / "data"
    init = folder / "init.sql"
    init.write_text(
        f"CREATE USER dbsync@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
        "GRANT ALL ON *.* TO dbsync@'127.0.0.1' WITH GRANT OPTION;\n"
    )
    _make_data_folder(server, user, data)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    options = [
        f"--datadir={data}",
        f"--user={user}",
        f"--port={port}",
        f"--socket={folder}/s",
        f"--pid-file={folder}/p",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                server,
                "--no-defaults",
                *options,
                "--bind-address=127.0.0.1",
                f"--init-file={init}",
                "--skip-name-resolve",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait(process, port, folder / "log")
        yield port
    finally:
        process.terminate()
        process.wait()


def _make_data_folder(server: str, user: str, data: Path) -> None:
    if install := shutil.which("mariadb-install-db"):
        command = [install, "--no-defaults", f"--datadir={data}", f"--user={user}", "--skip-test-db"]
    else:
        command = [server, "--no-defaults", "--initialize-insecure", f"--datadir={data}", f"--user={user}"]
    subprocess.run(command, check=True, capture_output=True)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return _connect(port).close()
        except pymysql.err.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-2000:]) from None
            time.sleep(0.1)


def _connect(port: int, name: str | None = None) -> Any:
    return pymysql.connect(
        host="127.0.0.1", port=port, user="dbsync", password=PASSWORD, database=name, autocommit=True
    )
