"""What dbsync makes in the source: made once, by however many; removed without a trace; refused with a reason."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from fix_postgres import Database, Server, new_server
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dbsync import control
from dbsync.config import Settings
from dbsync.connection import connect, connection_error
from dbsync.errors import DbsyncError, SetupError, SlotError, StreamError
from dbsync.lsn import LSN

# Everything in a database's catalog that setup could leave behind.
CATALOG = """
    SELECT 'schema', nspname, nspacl::text, obj_description(oid, 'pg_namespace') FROM pg_namespace
    WHERE nspname !~ '^pg_'
    UNION ALL SELECT 'relation', oid::regclass::text, relkind::text, obj_description(oid, 'pg_class') FROM pg_class
    WHERE relnamespace::regnamespace::text !~ '^pg_' AND relnamespace::regnamespace::text <> 'information_schema'
    UNION ALL SELECT 'publication', pubname, row(puballtables, pubinsert, pubupdate)::text, '' FROM pg_publication
    UNION ALL SELECT 'entry', pubname, schemaname, tablename FROM pg_publication_tables
    UNION ALL SELECT 'slot', slot_name, plugin, database FROM pg_replication_slots
    WHERE database = current_database() OR database IS NULL
    UNION ALL SELECT 'type', typname, typtype::text, '' FROM pg_type
    WHERE typnamespace::regnamespace::text !~ '^pg_' AND typnamespace::regnamespace::text <> 'information_schema'
    ORDER BY 1, 2, 3, 4"""

PUBLICATION = "CREATE PUBLICATION {publication} FOR TABLE orders"


@pytest.fixture
def settings(database: Database) -> Iterator[Settings]:
    """A database with a table and the user's publication for it; the slot is gone afterwards."""
    given = database.settings()
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    create(database, PUBLICATION, given)
    yield given
    drop_slot(database, given.slot)


def create(database: Database, text: str, settings: Settings) -> None:
    with database.connect() as conn:
        conn.execute(sql.SQL(text).format(publication=sql.Identifier(settings.publication)))


def drop_slot(database: Database, slot: str) -> None:
    with database.connect() as conn:
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        )


def catalog(database: Database) -> list[Any]:
    with database.connect() as conn:
        return list(conn.execute(CATALOG).fetchall())


def setup(settings: Settings) -> None:
    with connect(settings) as conn:
        control.setup(conn, settings)


def teardown(settings: Settings) -> list[str]:
    with connect(settings) as conn:
        return control.teardown(conn, settings)


def refusal(settings: Settings, kind: type[DbsyncError] = SetupError) -> DbsyncError:
    """The error setup stops with, which is always one sentence with a hint and exit code 4."""
    with pytest.raises(kind) as caught:
        setup(settings)
    error = caught.value
    assert type(error) is kind
    assert error.hint
    assert error.message.endswith(".")
    assert "\n" not in error.message
    assert error.exit_code == 4
    return error


def as_role(settings: Settings, role: str, password: str) -> Settings:
    assert settings.dsn is not None
    return dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, user=role, password=password))


@contextmanager
def role(database: Database, settings: Settings, attributes: str = "LOGIN") -> Iterator[Settings]:
    """The settings with a role of its own that may do no more than it is given."""
    name = f"limited {settings.slot}"
    quoted = sql.Identifier(name)
    with database.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} PASSWORD 'geheim' " + attributes).format(quoted))
    try:
        yield as_role(settings, name, "geheim")
    finally:
        with database.connect() as conn:
            conn.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(quoted, quoted))


@contextmanager
def reading(settings: Settings) -> Iterator[int]:
    """Somebody reads the slot; gives the PostgreSQL process that serves it."""
    # `closing`, because psycopg's own `with` would COMMIT into the running stream.
    with closing(psycopg.connect(settings.conninfo(replication="database"), autocommit=True)) as conn:
        command = f"START_REPLICATION SLOT {settings.slot} LOGICAL 0/0 (proto_version '1', publication_names 'x')"
        result = conn.pgconn.exec_(command.encode())
        assert result.status == psycopg.pq.ExecStatus.COPY_BOTH
        yield conn.pgconn.backend_pid


def test_the_session_is_the_same_whatever_the_role_prefers(settings: Settings, database: Database) -> None:
    assert settings.dsn is not None
    own = "-c DateStyle=German -c statement_timeout=5 -c work_mem=5MB"
    theirs = dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, options=own))
    with connect(theirs) as conn:
        shown = {
            name: conn.execute("SELECT current_setting(%s)", (name,)).fetchone()
            for name in ("DateStyle", "IntervalStyle", "TimeZone", "bytea_output", "synchronous_commit", "search_path")
        }
        assert conn.execute("SHOW statement_timeout").fetchone() == ("0",)
        assert conn.execute("SHOW default_transaction_isolation").fetchone() == ("read committed",)
        assert conn.execute("SHOW application_name").fetchone() == ("dbsync",)
        assert conn.execute("SHOW work_mem").fetchone() == ("5MB",)
        conn.execute("RESET search_path")
        assert conn.execute("SHOW search_path").fetchone() == ('"$user", public',)
    assert shown == {
        "DateStyle": ("ISO, DMY",),
        "IntervalStyle": ("postgres",),
        "TimeZone": ("UTC",),
        "bytea_output": ("hex",),
        "synchronous_commit": ("local",),
        "search_path": ("pg_catalog, pg_temp",),
    }


@pytest.mark.pg(">= 17")
def test_no_timeout_of_the_roles_cuts_dbsync_short(settings: Settings) -> None:
    assert settings.dsn is not None
    theirs = make_conninfo(settings.dsn, options="-c transaction_timeout=9 -c idle_session_timeout=9 -c lock_timeout=9")
    with connect(dataclasses.replace(settings, dsn=theirs)) as conn:
        names = "transaction_timeout", "idle_session_timeout", "lock_timeout", "idle_in_transaction_session_timeout"
        for name in names:
            assert conn.execute("SELECT current_setting(%s)", (name,)).fetchone() == ("0",)


def test_a_connection_may_be_without_autocommit(settings: Settings) -> None:
    with connect(settings, autocommit=False) as conn:
        assert not conn.autocommit
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_wrong_password_is_said_without_showing_it(settings: Settings, database: Database) -> None:
    error = refusal(as_role(settings, database.server.user, "geheim"))
    assert "did not accept the password" in error.message
    assert "POSTGRES_PASSWORD" in str(error.hint)
    assert ".pgpass" in str(error.hint)
    assert "geheim" not in f"{error}{error.__cause__}"
    assert not error.retryable


def test_no_password_is_said(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "no such file")
    error = refusal(as_role(settings, database.server.user, ""))
    assert "asks for a password and none is set" in error.message


def test_a_host_that_is_not_there_may_be_tried_again(settings: Settings) -> None:
    assert settings.dsn is not None
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        closed = dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, host="127.0.0.1", port=port))
        error = refusal(closed, StreamError)
    assert f"127.0.0.1:{port}/" in error.message
    assert error.retryable
    unknown = dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, host="nowhere.invalid"))
    error = refusal(unknown, StreamError)
    assert "nowhere.invalid" in error.message
    assert "POSTGRES_HOST" in str(error.hint)


def test_a_server_that_does_not_answer_may_be_tried_again(settings: Settings) -> None:
    assert settings.dsn is not None
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        there = dataclasses.replace(
            settings, dsn=make_conninfo(settings.dsn, host="127.0.0.1", port=port, connect_timeout=2)
        )
        assert refusal(there, StreamError).retryable


def test_a_missing_database_and_a_missing_role_are_said(settings: Settings) -> None:
    assert settings.dsn is not None
    error = refusal(dataclasses.replace(settings, dsn=make_conninfo(settings.dsn, dbname="no such database")))
    assert '"no such database" does not exist' in error.message
    assert "POSTGRES_DB" in str(error.hint)
    error = refusal(as_role(settings, "no such role", "geheim"))
    assert "did not accept the password" in error.message


def test_a_role_that_may_not_log_in_is_said(settings: Settings, database: Database) -> None:
    with role(database, settings, "NOLOGIN") as limited:
        error = refusal(limited)
    assert "did not let the role in" in error.message


def test_no_connection_left_may_be_tried_again(settings: Settings, database: Database) -> None:
    with role(database, settings, "LOGIN CONNECTION LIMIT 0") as limited:
        error = refusal(limited, StreamError)
    assert "no connection left" in error.message
    assert error.retryable


def test_a_replication_connection_that_is_not_allowed_names_what_the_role_needs(
    settings: Settings, database: Database
) -> None:
    with role(database, settings) as limited:
        conninfo = limited.conninfo(replication="database")
        with pytest.raises(psycopg.OperationalError) as caught:
            psycopg.connect(conninfo)
        error = connection_error(limited, conninfo, caught.value)
    assert isinstance(error, SetupError)
    assert "REPLICATION" in str(error.hint)


def test_a_connection_that_breaks_in_the_middle_may_be_tried_again(settings: Settings, database: Database) -> None:
    with connect(settings) as conn:
        database.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
        with pytest.raises(StreamError, match="broke") as caught:
            control.setup(conn, settings)
    assert caught.value.retryable


def test_setup_makes_everything_and_may_be_called_again(settings: Settings, database: Database) -> None:
    setup(settings)
    once = catalog(database)
    setup(settings)
    assert catalog(database) == once
    with connect(settings) as conn:
        state = control.slot_state(conn, settings)
        found = control.publication(conn, settings)
        assert control.published_tables(conn, settings) == [("public", "orders")]
        assert control.current_lsn(conn) > LSN()
        assert state is not None
        assert (state.plugin, state.database, state.active) == ("pgoutput", conn.info.dbname, False)
    assert found is not None
    assert found.covers_marks
    assert isinstance(state.confirmed_flush_lsn, LSN)
    assert state.held_bytes is not None
    assert state.lag_bytes is not None
    assert state.held_bytes >= state.lag_bytes >= 0


def test_a_slot_that_is_new_never_finds_tables_that_count_as_copied(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is gone, and setup is killed right after it has made it anew."""

    def killed_after(conn: psycopg.Connection[Any], settings: Settings, name: str) -> None:
        run(conn, settings, name)
        if name == "create_slot.sql":
            raise KeyboardInterrupt

    with connect(settings) as conn:
        control.setup(conn, settings)
        conn.execute(
            "INSERT INTO dbsync_ctrl.dbsync_refreshes (slot, kind, relation, query, state)"
            " VALUES (%s, 'initial', 'public.orders'::regclass, 'SELECT * FROM orders', 'done')",
            [settings.slot],
        )
        drop_slot(database, settings.slot)
        run = control._run
        monkeypatch.setattr(control, "_run", killed_after)
        with pytest.raises(KeyboardInterrupt):
            control.setup(conn, settings)
        monkeypatch.undo()
        control.setup(conn, settings)
    assert database.rows("SELECT query FROM dbsync_ctrl.dbsync_refreshes") == []


def test_marks_come_through_the_slot(settings: Settings, database: Database) -> None:
    setup(settings)
    table = sql.Identifier(settings.ctrl_namespace, settings.wm_table)
    with connect(settings) as conn:
        conn.execute(sql.SQL("INSERT INTO {} (id, mark) VALUES (gen_random_uuid(), 'low')").format(table))
        with pytest.raises(psycopg.errors.CheckViolation):
            conn.execute(sql.SQL("INSERT INTO {} (id, mark) VALUES (gen_random_uuid(), 'middle')").format(table))
        changes = conn.execute(
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', quote_ident(%s)) WHERE get_byte(data, 0) = ascii('I')",
            (settings.slot, settings.publication),
        ).fetchone()
    assert changes == (1,)


@pytest.mark.parametrize(
    "target",
    ["ALL TABLES", pytest.param("TABLES IN SCHEMA dbsync_ctrl, public", marks=pytest.mark.pg(">= 15"))],
)
def test_a_publication_that_covers_the_marks_gets_no_entry(settings: Settings, database: Database, target: str) -> None:
    there = dataclasses.replace(settings, publication="covering", ctrl_namespace="dbsync_ctrl")
    if "SCHEMA" in target:
        database.execute("CREATE SCHEMA dbsync_ctrl")
    database.execute(f"CREATE PUBLICATION covering FOR {target}")
    before = catalog(database)
    setup(there)
    setup(there)
    with connect(there) as conn:
        entries = conn.execute(
            "SELECT count(*) FROM pg_publication_rel JOIN pg_publication AS pub ON pub.oid = prpubid"
            " WHERE pubname = 'covering'"
        ).fetchone()
        found = control.publication(conn, there)
        assert control.published_tables(conn, there) == [("public", "orders")]
    assert entries == (0,)
    assert found is not None
    assert found.covers_marks
    teardown(there)
    assert catalog(database) == before


def test_odd_names_are_quoted(settings: Settings, database: Database) -> None:
    odd = dataclasses.replace(
        settings, ctrl_namespace='My "control" schema', wm_table="Marks; it's 100%", publication='My {0} "pub"'
    )
    assert '"My {0} ""pub"""' in str(refusal(odd))
    create(database, PUBLICATION, odd)
    before = catalog(database)
    setup(odd)
    setup(odd)
    assert teardown(odd) == [
        f"replication slot {odd.slot}",
        'watermark table "My ""control"" schema"."Marks; it\'s 100%" and its entry in the publication',
        'refresh table "My ""control"" schema"."dbsync_refreshes"',
        'control schema "My ""control"" schema"',
    ]
    assert catalog(database) == before


def test_many_may_start_at_once(settings: Settings, database: Database) -> None:
    together = threading.Barrier(6)

    def start() -> None:
        with connect(settings) as conn:
            together.wait()
            control.setup(conn, settings)

    with ThreadPoolExecutor(6) as pool:
        for started in [pool.submit(start) for _ in range(6)]:
            started.result()
    once = catalog(database)
    setup(settings)
    assert catalog(database) == once


def test_teardown_leaves_nothing_of_ours_and_all_of_the_users(settings: Settings, database: Database) -> None:
    before = catalog(database)
    assert teardown(settings) == []
    setup(settings)
    assert catalog(database) != before
    assert len(teardown(settings)) == 4
    assert catalog(database) == before
    assert teardown(settings) == []


def test_teardown_works_when_only_some_parts_exist(settings: Settings, database: Database) -> None:
    before = catalog(database)
    table = sql.Identifier(settings.ctrl_namespace, settings.wm_table)
    publication = sql.Identifier(settings.publication)
    for damage in (
        sql.SQL("DROP TABLE {}").format(table),
        sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(publication, table),
        sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(settings.ctrl_namespace)),
        sql.SQL("SELECT pg_drop_replication_slot({})").format(sql.Literal(settings.slot)),
    ):
        setup(settings)
        with database.connect() as conn:
            conn.execute(damage)
        assert teardown(settings)
        assert catalog(database) == before
    setup(settings)
    with database.connect() as conn:
        conn.execute(sql.SQL("DROP PUBLICATION {}").format(publication))
    assert len(teardown(settings)) == 4


def test_the_users_schema_stays(settings: Settings, database: Database) -> None:
    theirs = dataclasses.replace(settings, ctrl_namespace="theirs")
    database.execute("CREATE SCHEMA theirs")
    before = catalog(database)
    setup(theirs)
    teardown(theirs)
    assert catalog(database) == before


def test_our_schema_stays_while_something_of_the_users_is_in_it(settings: Settings, database: Database) -> None:
    setup(settings)
    theirs = sql.Identifier(settings.ctrl_namespace, "theirs")
    with database.connect() as conn:
        conn.execute(sql.SQL("CREATE TABLE {} ()").format(theirs))
    assert len(teardown(settings)) == 3
    with database.connect() as conn:
        conn.execute(sql.SQL("DROP TABLE {}").format(theirs))
    assert len(teardown(settings)) == 1


def test_a_table_of_the_users_is_neither_used_nor_dropped(settings: Settings, database: Database) -> None:
    theirs = dataclasses.replace(settings, ctrl_namespace="public", wm_table="orders")
    before = catalog(database)
    assert "public" in refusal(theirs).message
    assert teardown(theirs) == []
    assert catalog(database) == before


def test_a_missing_publication_is_named_with_the_statement_to_run(settings: Settings) -> None:
    error = refusal(dataclasses.replace(settings, publication="Not There"))
    assert '"Not There"' in error.message
    assert 'CREATE PUBLICATION "Not There" FOR TABLE' in str(error.hint)


def test_a_publication_that_holds_changes_back_is_refused(settings: Settings, database: Database) -> None:
    with database.connect() as conn:
        name = sql.Identifier(settings.publication)
        conn.execute(sql.SQL("ALTER PUBLICATION {} SET (publish = 'insert, delete')").format(name))
        error = refusal(settings)
        assert "publishes only delete, insert" in error.message
        assert error.hint is not None
        conn.execute(error.hint.removeprefix("Run "))
    setup(settings)


def test_a_role_without_rights_is_told_each_statement_and_then_may(settings: Settings, database: Database) -> None:
    with role(database, settings) as limited:
        told = []
        for _ in range(3):
            error = refusal(limited)
            assert "may not" in error.message
            assert error.hint is not None
            fix = error.hint.partition(": ")[2]
            told.append(fix.split()[0:2])
            database.execute(fix)
        setup(limited)
        assert told == [["GRANT", "CREATE"], ["ALTER", "PUBLICATION"], ["ALTER", "ROLE"]]
        assert len(teardown(limited)) == 4


def test_a_role_may_run_on_what_another_has_made(settings: Settings, database: Database) -> None:
    setup(settings)
    with role(database, settings, "LOGIN REPLICATION") as limited:
        error = refusal(limited)
        assert "may not write the watermark table" in error.message
        assert error.hint is not None
        database.execute(error.hint.partition(": ")[2])
        error = refusal(limited)
        assert "may not write the refresh table" in error.message
        assert error.hint is not None
        database.execute(error.hint.partition(": ")[2])
        setup(limited)
        with pytest.raises(SetupError, match="may not drop the watermark table"), connect(limited) as conn:
            control.teardown(conn, limited)


def test_a_physical_slot_of_that_name_is_refused_and_left_alone(settings: Settings, database: Database) -> None:
    with database.connect() as conn:
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", (settings.slot,))
    error = refusal(settings, SlotError)
    assert "physical" in error.message
    assert "DBSYNC_REPLSLOT" in str(error.hint)
    assert f"replication slot {settings.slot}" not in teardown(settings)
    with connect(settings) as conn:
        assert control.slot_state(conn, settings) is not None


def test_a_slot_of_another_database_is_refused_and_left_alone(settings: Settings, postgres: Server) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (settings.slot,))
    error = refusal(settings, SlotError)
    assert "belongs to the database postgres" in error.message
    assert f"replication slot {settings.slot}" not in teardown(settings)
    with psycopg.connect(postgres.dsn(), autocommit=True) as conn:
        conn.execute("SELECT pg_drop_replication_slot(%s)", (settings.slot,))


def test_a_slot_that_is_being_read_is_not_dropped(settings: Settings, database: Database) -> None:
    setup(settings)
    before = catalog(database)
    with reading(settings) as pid:
        with connect(settings) as conn:
            state = control.slot_state(conn, settings)
        assert state is not None
        assert (state.active, state.active_pid) == (True, pid)
        with pytest.raises(SlotError, match=str(pid)) as caught, connect(settings) as conn:
            control.teardown(conn, settings)
        assert "Stop that dbsync" in str(caught.value.hint)
        assert catalog(database) == before
    assert len(teardown(settings)) == 4


@contextmanager
def server(**options: str) -> Iterator[Settings]:
    """A server of its own, for what cannot be tried on one that others use."""
    with new_server(**options) as postgres:
        with psycopg.connect(postgres.dsn(), autocommit=True) as conn:
            conn.execute("CREATE PUBLICATION dbsync_mypub")
        yield Settings(dsn=postgres.dsn())


def test_wal_level_replica_is_refused_with_the_statement_to_run() -> None:
    with server(wal_level="replica") as settings:
        error = refusal(settings)
        assert "wal_level = replica" in error.message
        assert "ALTER SYSTEM SET wal_level = logical" in str(error.hint)


def test_a_full_slot_table_and_a_lost_slot_are_said() -> None:
    with server(max_replication_slots="1", max_slot_wal_keep_size="1MB") as settings, connect(settings) as conn:
        conn.execute("SELECT pg_create_physical_replication_slot('somebody_elses')")
        error = refusal(settings, SlotError)
        assert "no replication slot left" in error.message
        assert "max_replication_slots" in str(error.hint)
        assert "somebody_elses" in str(error.hint)

        conn.execute("SELECT pg_drop_replication_slot('somebody_elses')")
        setup(settings)
        for _ in range(3):
            conn.execute("SELECT pg_logical_emit_message(false, 'fill', 'x'), pg_switch_wal()")
        conn.execute("CHECKPOINT")
        error = refusal(settings, SlotError)
        assert "is lost" in error.message
        assert "dbsync teardown" in str(error.hint)
        assert len(teardown(settings)) == 4
        setup(settings)
