"""A real PostgreSQL for the whole run, and a database of its own for every test.

The server is of the version in DBSYNC_TEST_PG_VERSION (default 18): the wheel's, or Debian's package for what the
wheel lacks (`apt-get install postgresql-15`; its service is not needed). DBSYNC_TEST_POSTGRES=docker takes a container
of that version instead, and DBSYNC_TEST_DSN a server that is already there (a superuser's connection string).

What rows and types are is tested on every version this machine has.
"""

from __future__ import annotations

import operator
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dbsync.config import Settings
from dbsync.embedded import EmbeddedPostgres, _find_install
from dbsync.errors import ConfigError

VERSION = int(os.environ.get("DBSYNC_TEST_PG_VERSION", "18"))

_OURS = re.compile(r"(DEFAULT_)?DBSYNC_|POSTGRES_|PG")
_CONDITION = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CREATED = re.compile(r"CREATE TABLE (\w+) \(")
_EXTERNAL = re.compile(r"(\w+) (\w+) STORAGE\s+EXTERNAL")
_CONTAINER_SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_prepared_transactions": "10",
    "fsync": "off",
}


class Server(Protocol):
    """What the tests ask of a server, wherever it comes from."""

    version: int
    host: str
    port: int
    user: str
    password: str

    @property
    def bin(self) -> Path | None: ...

    def dsn(self, dbname: str = "postgres", user: str | None = None, password: str | None = None) -> str: ...


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """A server we did not start: its programs are not at hand."""

    version: int
    host: str
    port: int
    user: str
    password: str
    bin: Path | None = None

    @classmethod
    def at(cls, dsn: str) -> ForeignServer:
        parts = conninfo_to_dict(dsn)
        with psycopg.connect(dsn) as connection:
            info = connection.info
            return cls(
                version=info.server_version // 10000,
                host=info.host,
                port=info.port,
                user=info.user,
                password=str(parts.get("password") or ""),
            )

    def dsn(self, dbname: str = "postgres", user: str | None = None, password: str | None = None) -> str:
        return make_conninfo(
            host=self.host,
            port=self.port,
            dbname=dbname,
            user=self.user if user is None else user,
            password=self.password if password is None else password,
        )


@dataclass(frozen=True, slots=True)
class Database:
    """A fresh database; it goes away after the test, with its slots and whoever is connected."""

    server: Server
    name: str

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def slot(self) -> str:
        return f"{self.name}_slot"

    def connect(self, **changes: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, **{"autocommit": True, **changes})

    def execute(self, statement: str, params: Sequence[Any] | None = None) -> None:
        with self.connect() as connection:
            connection.execute(statement, params)

    def rows(self, statement: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(statement, params).fetchall()

    def settings(self, **changes: Any) -> Settings:
        return Settings(**{"dsn": self.dsn, "slot": self.slot, "spark_master": "local[2]", **changes})

    def environ(self, **changes: str) -> dict[str, str]:
        """The environment for a `dbsync` of its own process, without what the developer's shell says of databases."""
        kept = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
        ours = {"POSTGRES_CONNSTR": self.dsn, "DBSYNC_REPLSLOT": self.slot, "DBSYNC_SPARK_MASTER": "local[2]"}
        return {**kept, **ours, **changes}


def told_to(server: Server, statement: str) -> str:
    """The statement as the server knows it: before 16, CREATE TABLE cannot say how a column is stored."""
    created = _CREATED.search(statement)
    external = [column for column, _ in _EXTERNAL.findall(statement)]
    if server.version >= 16 or not created or not external:
        return statement
    later = ", ".join(f"ALTER {column} SET STORAGE EXTERNAL" for column in external)
    plain = _EXTERNAL.sub(r"\1 \2", statement)
    return f"{plain}; ALTER TABLE {created[1]} {later}"


@contextmanager
def fresh_database(server: Server, encoding: str = "UTF8") -> Iterator[Database]:
    database = Database(server, f"test_{uuid.uuid4().hex[:12]}")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        name = sql.Identifier(database.name)
        # From 17 on the servers' own locale knows UTF-8 only; before 15 it cannot be said whose locale it is.
        locale = "LOCALE 'C' LOCALE_PROVIDER libc" if encoding != "UTF8" and server.version >= 15 else ""
        create = sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} {}")
        admin.execute(create.format(name, sql.Literal(encoding), sql.SQL(locale)))
        try:
            yield database
        finally:
            # A test may have restarted or killed the server under this connection.
            with psycopg.connect(server.dsn(), autocommit=True) as cleaner:
                _drop_slots(cleaner, database.name)
                cleaner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def _drop_slots(admin: psycopg.Connection[Any], dbname: str) -> None:
    """Drop the database's slots, taking them from their walsenders; one may be taken again meanwhile by a reconnect."""
    deadline = time.monotonic() + 30
    while slots := admin.execute(
        "SELECT slot_name, active_pid FROM pg_catalog.pg_replication_slots WHERE database = %s", [dbname]
    ).fetchall():
        for slot_name, active_pid in slots:
            if active_pid is not None:
                admin.execute("SELECT pg_catalog.pg_terminate_backend(%s, 5000)", [active_pid])
            try:
                admin.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", [slot_name])
            except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextmanager
def _container(version: int) -> Iterator[ForeignServer]:
    from testcontainers.postgres import PostgresContainer

    options = " ".join(f"-c {name}={value}" for name, value in _CONTAINER_SETTINGS.items())
    with PostgresContainer(f"postgres:{version}", driver=None).with_command(f"postgres {options}") as container:
        yield ForeignServer.at(container.get_connection_url())


def _skip_unless_version(request: pytest.FixtureRequest, server: Server) -> None:
    for marker in request.node.iter_markers("pg"):
        condition = _CONDITION.fullmatch(marker.args[0].strip())
        if condition is None:
            raise pytest.UsageError(f"pg({marker.args[0]!r}) is not a version condition such as '>= 16'")
        if not _COMPARE[condition[1]](server.version, int(condition[2])):
            pytest.skip(f"needs PostgreSQL {condition[0]}, this is {server.version}")


def new_server(**options: str) -> EmbeddedPostgres:
    """A server of the version that is tested, not started yet; `options` are its settings."""
    try:
        return EmbeddedPostgres(VERSION, options=options)
    except ConfigError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    if dsn := os.environ.get("DBSYNC_TEST_DSN"):
        yield ForeignServer.at(dsn)
    elif os.environ.get("DBSYNC_TEST_POSTGRES") == "docker":
        with _container(VERSION) as server:
            yield server
    else:
        with new_server() as embedded:
            yield embedded


@pytest.fixture(scope="session")
def postgres16() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(16) as server:
        yield server


@pytest.fixture(scope="session")
def postgres15() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(15) as server:
        yield server


def _other_servers() -> list[str]:
    if "DBSYNC_TEST_DSN" in os.environ or "DBSYNC_TEST_POSTGRES" in os.environ:
        return []
    return [f"postgres{version}" for version in (16, 15) if version != VERSION and _is_here(version)]


def _is_here(version: int) -> bool:
    try:
        _find_install(version)
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="session", params=["postgres", *_other_servers()])
def each_postgres(request: pytest.FixtureRequest) -> Server:
    """One version after the other, as far as this machine has them."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def each_database(each_postgres: Server) -> Iterator[Database]:
    with fresh_database(each_postgres) as fresh:
        yield fresh


@pytest.fixture
def database(request: pytest.FixtureRequest, postgres: Server) -> Iterator[Database]:
    _skip_unless_version(request, postgres)
    with fresh_database(postgres) as fresh:
        yield fresh


@pytest.fixture
def database16(postgres16: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres16) as fresh:
        yield fresh
