"""Tables to be refreshed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fix_postgres import Database, fresh_database, new_server

from dbsync.embedded import EmbeddedPostgres


@pytest.fixture
def items(database: Database) -> Database:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, note text)")
    database.execute("INSERT INTO items SELECT g, 'old', 'n' || g FROM generate_series(1, 100) AS g")
    database.execute("CREATE TABLE others (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO others SELECT g, 'old' FROM generate_series(1, 10) AS g")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items, others")
    return database


@pytest.fixture
def standbyless() -> Iterator[tuple[EmbeddedPostgres, Database]]:
    """A server of its own on which commits wait for a standby that does not exist, but for those that do not ask."""
    with new_server(synchronous_commit="local") as server, fresh_database(server) as database:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text)")
        database.execute("INSERT INTO items VALUES (1, 'old'), (2, 'old')")
        database.execute("CREATE TABLE others (id int PRIMARY KEY, name text)")
        database.execute("INSERT INTO others VALUES (1, 'old')")
        database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items, others")
        yield server, database
