"""A PostgreSQL for the examples: an empty database, of which nothing is left when the example ends.

It is one on the server that POSTGRES_CONNSTR, POSTGRES_HOST, PGHOST or PGSERVICE speak of (the role must be allowed to
create databases and to replicate); where none of them is set, a private server is started from the `embedded` extra.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import psycopg
from psycopg import sql

from dbsync import Settings, Syncer
from dbsync.embedded import EmbeddedPostgres

NAMES_A_SERVER = ("POSTGRES_CONNSTR", "POSTGRES_HOST", "PGHOST", "PGSERVICE")


@contextmanager
def empty_database() -> Iterator[tuple[Settings, psycopg.Connection]]:
    """Settings for a Syncer, and a connection for the example's own SQL."""
    settings = Settings.from_env()
    own = not any(os.environ.get(name) for name in NAMES_A_SERVER)
    with EmbeddedPostgres() if own else nullcontext() as server:
        start = server.dsn() if server else settings.conninfo()
        name = f"dbsync_example_{os.getpid()}"
        with psycopg.connect(start, autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            settings = replace(settings, dsn=psycopg.conninfo.make_conninfo(start, dbname=name), slot=name)
            try:
                with psycopg.connect(settings.dsn, autocommit=True) as connection:
                    yield settings, connection
            finally:
                Syncer(settings).teardown()
                admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
