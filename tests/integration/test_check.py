"""`check` looks at everything, changes nothing, and each fix it prints puts right what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import psycopg
import pytest
from fix_postgres import Database, Server, fresh_database, new_server
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dbsync import check, control
from dbsync.check import Check, run_checks
from dbsync.config import Settings
from dbsync.connection import connect
from dbsync.embedded import EmbeddedPostgres


@pytest.fixture
def settings(database: Database) -> Iterator[Settings]:
    """A database with a table and the user's publication for it; the slot is gone afterwards."""
    given = database.settings()
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    publish(database, "CREATE PUBLICATION {} FOR TABLE orders", given)
    yield given
    with database.connect() as conn:
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (given.slot,)
        )


def publish(database: Database, text: str, settings: Settings) -> None:
    with database.connect() as conn:
        conn.execute(sql.SQL(text).format(sql.Identifier(settings.publication)))


def setup(settings: Settings) -> None:
    with connect(settings) as conn:
        control.setup(conn, settings)


def found(settings: Settings, name: str) -> Check:
    """The first line of that name that is not fine, or the one that is."""
    lines = [line for line in run_checks(settings) if line.name == name]
    return min(lines, key=lambda line: ("fail", "warn", "ok").index(line.level))


def test_before_init_nothing_fails_and_what_init_makes_is_said(settings: Settings) -> None:
    lines = run_checks(settings)
    assert all(line.ok for line in lines)
    waiting = {line.name: line.fix for line in lines if line.level == "warn"}
    assert waiting == dict.fromkeys(("control schema", "publication entry", "slot"), "dbsync init")


def test_after_init_all_is_well(settings: Settings) -> None:
    setup(settings)
    lines = run_checks(settings)
    assert {line.level for line in lines} == {"ok"}
    assert [line.name for line in lines] == [
        "connection",
        "server version",
        "wal_level",
        "replication slots",
        "wal senders",
        "replication privilege",
        "control schema",
        "publication",
        "publication entry",
        "published tables",
        "SELECT privilege",
        "replica identity",
        "key",
        "slot",
        "held WAL",
    ]


def test_a_connection_that_fails_is_one_line(settings: Settings) -> None:
    assert settings.dsn is not None
    (line,) = run_checks(dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, password="geheim")))
    assert (line.name, line.level, line.ok) == ("connection", "fail", False)
    assert "POSTGRES_PASSWORD" in str(line.fix)
    assert "geheim" not in repr(line)


def test_nothing_is_written(settings: Settings) -> None:
    assert settings.dsn is not None
    read_only = make_conninfo(settings.dsn, options="-c default_transaction_read_only=on")
    assert run_checks(dataclasses.replace(settings, dsn=read_only)) == run_checks(settings)
    with connect(settings) as conn:
        assert control.slot_state(conn, settings) is None
        assert control.control_schema(conn, settings) is None


def test_a_missing_publication_fails_with_the_statement(settings: Settings) -> None:
    line = found(dataclasses.replace(settings, publication="Not There"), "publication")
    assert line.level == "fail"
    assert line.fix == 'CREATE PUBLICATION "Not There" FOR TABLE …;'


def test_a_publication_that_holds_changes_back(settings: Settings, database: Database) -> None:
    publish(database, "ALTER PUBLICATION {} SET (publish = 'insert, update')", settings)
    line = found(settings, "publication")
    assert (line.level, "does not publish delete, truncate" in line.detail) == ("warn", True)
    publish(database, "ALTER PUBLICATION {} SET (publish = 'insert')", settings)
    line = found(settings, "publication")
    assert line.level == "fail"
    database.execute(str(line.fix))
    assert found(settings, "publication").level == "ok"


def test_a_publication_without_tables(settings: Settings, database: Database) -> None:
    publish(database, "ALTER PUBLICATION {} DROP TABLE orders", settings)
    assert found(settings, "published tables").level == "warn"


@pytest.mark.parametrize(
    ("definition", "fix"),
    [
        ("(id int PRIMARY KEY); ALTER TABLE {} REPLICA IDENTITY NOTHING", "REPLICA IDENTITY DEFAULT;"),
        ('(id int NOT NULL CONSTRAINT "A key" UNIQUE)', 'REPLICA IDENTITY USING INDEX "A key";'),
        ("(id int UNIQUE)", "REPLICA IDENTITY FULL;"),
        ("(id int)", "REPLICA IDENTITY FULL;"),
        ("(id int NOT NULL); CREATE UNIQUE INDEX ON {} (id) WHERE id > 0", "REPLICA IDENTITY FULL;"),
    ],
)
def test_a_table_without_a_replica_identity_gets_its_fix(
    settings: Settings, database: Database, definition: str, fix: str
) -> None:
    table = 'public."It""s odd"'
    database.execute(f"CREATE TABLE {table} " + definition.replace("{}", table))
    publish(database, f"ALTER PUBLICATION {{}} ADD TABLE {table}", settings)
    line = found(settings, "replica identity")
    assert line.level == "fail"
    assert line.detail.startswith('"public"."It""s odd" has no replica identity')
    assert str(line.fix).endswith(fix)
    database.execute(str(line.fix).split(" or ")[-1])
    assert found(settings, "replica identity").level == "ok"


def test_a_table_without_a_key_is_told_even_with_a_full_identity(settings: Settings, database: Database) -> None:
    database.execute("CREATE TABLE keyless (id int); ALTER TABLE keyless REPLICA IDENTITY FULL")
    publish(database, "ALTER PUBLICATION {} ADD TABLE keyless", settings)
    line = found(settings, "key")
    assert line.level == "warn"
    assert line.fix == 'ALTER TABLE "public"."keyless" ADD PRIMARY KEY (…);'


def test_a_key_that_rows_may_share_is_told(settings: Settings, database: Database) -> None:
    database.execute('CREATE TABLE late (id int CONSTRAINT "A key" PRIMARY KEY DEFERRABLE)')
    publish(database, "ALTER PUBLICATION {} ADD TABLE late", settings)
    assert found(settings, "replica identity").level == "fail"
    database.execute("ALTER TABLE late REPLICA IDENTITY FULL")
    line = found(settings, "key")
    assert (line.level, "DEFERRABLE" in line.detail) == ("warn", True)
    assert line.fix == 'ALTER TABLE "public"."late" DROP CONSTRAINT "A key", ADD PRIMARY KEY (…);'
    database.execute(line.fix.replace("…", "id"))
    assert found(settings, "key").level == "ok"


def test_a_key_that_is_not_published_whole_is_told(settings: Settings, database: Database) -> None:
    database.execute(
        """CREATE TABLE made (a int, g int GENERATED ALWAYS AS (a + 1) STORED, PRIMARY KEY (a, g));
        CREATE TABLE fine (a int, b int, g int GENERATED ALWAYS AS (a + 1) STORED, PRIMARY KEY (a))"""
    )
    publish(database, "ALTER PUBLICATION {} ADD TABLE made, fine", settings)
    lines = [line for line in run_checks(settings) if line.name == "key"]
    assert [line.level for line in lines] == ["ok", "warn"]
    assert '"public"."made" has a key whose columns are not all published' in lines[1].detail


@pytest.mark.pg(">= 15")
def test_a_key_that_a_column_list_cuts_is_told(settings: Settings, database: Database) -> None:
    database.execute("CREATE TABLE pairs (a int, b int, v text, PRIMARY KEY (a, b))")
    publish(database, "ALTER PUBLICATION {} ADD TABLE pairs (a, v)", settings)
    line = found(settings, "key")
    assert (line.level, "not all published" in line.detail) == ("warn", True)
    database.execute(str(line.fix).replace("…", "a, b"))
    assert found(settings, "key").level == "ok"


def test_a_partition_that_does_not_log_its_roots_key_is_told(settings: Settings, database: Database) -> None:
    database.execute(
        """CREATE TABLE parts (id int PRIMARY KEY, a int NOT NULL) PARTITION BY RANGE (id);
        CREATE TABLE "Part 1" PARTITION OF parts FOR VALUES FROM (0) TO (10);
        CREATE TABLE part2 PARTITION OF parts FOR VALUES FROM (10) TO (20);
        CREATE UNIQUE INDEX by_a ON "Part 1" (a)"""
    )
    publish(database, "ALTER PUBLICATION {} ADD TABLE parts", settings)
    publish(database, "ALTER PUBLICATION {} SET (publish_via_partition_root)", settings)
    assert "partitions" not in {line.name for line in run_checks(settings)}
    database.execute('ALTER TABLE "Part 1" REPLICA IDENTITY USING INDEX by_a')
    line = found(settings, "partitions")
    assert line.level == "warn"
    assert line.detail.startswith('"public"."parts" has a key that the replica identity of public."Part 1" lacks')
    database.execute(str(line.fix))
    assert "partitions" not in {line.name for line in run_checks(settings)}


def test_an_encoding_that_holds_anything_is_told(postgres: Server) -> None:
    with fresh_database(postgres, encoding="SQL_ASCII") as database:
        assert found(database.settings(), "encoding").level == "warn"


def test_a_role_without_rights_gets_every_statement_and_then_may(settings: Settings, database: Database) -> None:
    name = f"limited {settings.slot}"
    quoted = sql.Identifier(name)
    with database.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'geheim'").format(quoted))
        assert settings.dsn is not None
        limited = dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, user=name, password="geheim"))
        failed = [line for line in run_checks(limited) if not line.ok]
        assert [line.name for line in failed] == [
            "replication privilege",
            "control schema",
            "publication entry",
            "SELECT privilege",
        ]
        for line in failed:
            conn.execute(str(line.fix))
        assert all(line.ok for line in run_checks(limited))
        setup(limited)
        assert {line.level for line in run_checks(limited)} == {"ok"}
        conn.execute(
            sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER; DROP OWNED BY {}; DROP ROLE {}").format(*[quoted] * 3)
        )


def test_a_role_on_what_another_has_made(settings: Settings, database: Database) -> None:
    setup(settings)
    name = f"limited {settings.slot}"
    quoted = sql.Identifier(name)
    with database.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'geheim'").format(quoted))
        assert settings.dsn is not None
        limited = dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, user=name, password="geheim"))
        line = found(limited, "control schema")
        assert line.level == "fail"
        conn.execute(str(line.fix))
        assert found(limited, "control schema").level == "ok"
        conn.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(quoted, quoted))


def test_a_table_of_the_users_in_our_place_fails(settings: Settings) -> None:
    assert (
        found(dataclasses.replace(settings, ctrl_namespace="public", wm_table="orders"), "control schema").level
        == "fail"
    )


def test_a_physical_slot_of_that_name_fails(settings: Settings, database: Database) -> None:
    with database.connect() as conn:
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", (settings.slot,))
    line = found(settings, "slot")
    assert (line.level, "physical" in line.detail) == ("fail", True)


def test_much_held_wal_without_a_limit_is_told(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup(settings)
    assert found(settings, "held WAL").level == "ok"
    monkeypatch.setattr(check, "HELD_WAL_BYTES", 1000)
    database.execute("SELECT pg_logical_emit_message(true, 'fill', repeat('x', 10000))")
    line = found(settings, "held WAL")
    assert line.level == "warn"
    assert "max_slot_wal_keep_size" in str(line.fix)


def test_a_server_that_is_not_ready() -> None:
    options = {"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1"}
    with EmbeddedPostgres(options=options) as postgres:
        settings = Settings(dsn=postgres.dsn())
        with psycopg.connect(postgres.dsn(), autocommit=True) as conn:
            conn.execute("SELECT pg_create_physical_replication_slot('somebody_elses')")
        failed = {line.name: str(line.fix) for line in run_checks(settings) if not line.ok}
    assert set(failed) == {"wal_level", "replication slots", "publication"}
    assert "ALTER SYSTEM SET wal_level = logical" in failed["wal_level"]
    assert "pg_drop_replication_slot('somebody_elses')" in failed["replication slots"]
    assert "ALTER SYSTEM SET max_replication_slots = 2" in failed["replication slots"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2 kB"), (5 * 1024**2, "5 MB"), (3 * 2**40, "3072.0 GB")]
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert check.size(count) == text


def test_a_name_that_makes_a_standby_of_everybody_is_told() -> None:
    with new_server(synchronous_standby_names="*", synchronous_commit="local") as server:
        found = [one for one in run_checks(Settings(dsn=server.dsn())) if one.name == "synchronous standbys"]
    assert [(one.level, one.detail.startswith("*: dbsync may count as one")) for one in found] == [("warn", True)]
