"""The command as a script sees it: exit codes, data on stdout, one sentence and a hint on stderr, no traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from commands import COMMAND, SECRET, WAIT_SECONDS, dbsync, environ, next_line, publish, refused, running, until
from fix_postgres import Database, fresh_database
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dbsync.embedded import EmbeddedPostgres
from dbsync.lsn import LSN

HANDLERS = """
from pathlib import Path
from dbsync import Batcher, EchoBatcher, MirrorHandler

class FaultyHandler(MirrorHandler):
    def handle_insert(self, msg, relation):
        with Path("calls").open("a") as calls:
            calls.write("insert\\n")
        raise RuntimeError("the handler's own fault")

class FaultyBatcher(EchoBatcher):
    def batch_upsert(self, doctype, docs):
        with Path("calls").open("a") as calls:
            calls.write("upsert\\n")
        raise RuntimeError("the target's own fault")

class Picky(Batcher):
    def __init__(self, needed): ...

class NoHandler: ...
"""


@pytest.fixture
def shop(database: Database) -> Database:
    """A database with a table and the user's publication for it."""
    publish(database)
    return database


def dsn(database: Database, **changes: str | int) -> str:
    return make_conninfo(database.dsn, **changes)


def test_a_wrong_password(shop: Database) -> None:
    changes = {"POSTGRES_CONNSTR": dsn(shop, password=SECRET)}
    for command in ("init", "run", "status"):
        refused(dbsync(shop, command, **changes), 4, "did not accept the password", "POSTGRES_PASSWORD")
    told = dbsync(shop, "init", "--verbose", **changes)
    assert "Traceback" in told.stderr
    assert SECRET not in told.stderr + told.stdout


def test_a_wrong_host_and_a_wrong_port(shop: Database) -> None:
    parts = conninfo_to_dict(shop.dsn)
    changes = {
        "POSTGRES_CONNSTR": "",
        "POSTGRES_DB": shop.name,
        "POSTGRES_USER": str(parts["user"]),
        "POSTGRES_PASSWORD": SECRET,
    }
    nowhere = dbsync(shop, "run", **changes, POSTGRES_HOST="nowhere.invalid")
    refused(nowhere, 4, "nowhere.invalid", "POSTGRES_HOST")
    refused(dbsync(shop, "status", "--port", "1", **changes, POSTGRES_HOST="127.0.0.1"), 4, "cannot be reached", "PORT")


def test_a_missing_publication(database: Database) -> None:
    sentence, hint = 'The publication "dbsync_mypub" does not exist', 'CREATE PUBLICATION "dbsync_mypub" FOR TABLE'
    refused(dbsync(database, "init"), 4, sentence, hint)
    refused(dbsync(database, "run"), 4, sentence, hint)


def test_a_server_that_does_not_log_for_us() -> None:
    with EmbeddedPostgres(options={"wal_level": "replica"}) as server, fresh_database(server) as database:
        publish(database)
        refused(dbsync(database, "init"), 4, "wal_level = replica", "ALTER SYSTEM SET wal_level = logical")
        looked = dbsync(database, "check")
        assert looked.returncode == 3
        assert "ALTER SYSTEM SET wal_level = logical" in looked.stdout


def test_a_full_slot_table() -> None:
    with EmbeddedPostgres(options={"max_replication_slots": "1"}) as server, fresh_database(server) as database:
        publish(database)
        database.execute("SELECT pg_create_physical_replication_slot('somebody_elses')")
        refused(dbsync(database, "init"), 4, "no replication slot left", "somebody_elses")
        assert dbsync(database, "check").returncode == 3


def test_a_role_without_replication(shop: Database) -> None:
    role = sql.Identifier(f"{shop.name}_role")
    with shop.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(SECRET)))
        try:
            conn.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(shop.name), role))
            conn.execute(sql.SQL("ALTER PUBLICATION dbsync_mypub OWNER TO {}").format(role))
            limited = dsn(shop, user=f"{shop.name}_role", password=SECRET)
            done = dbsync(shop, "init", POSTGRES_CONNSTR=limited)
            refused(done, 4, "may not create the replication slot", f'ALTER ROLE "{shop.name}_role" REPLICATION')
            looked = dbsync(shop, "check", POSTGRES_CONNSTR=limited)
            assert looked.returncode == 3
            assert SECRET not in looked.stdout + looked.stderr
        finally:
            conn.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER; DROP OWNED BY {}").format(role, role))
            conn.execute(sql.SQL("DROP ROLE {}").format(role))


def test_a_slot_of_another_plugin(shop: Database) -> None:
    with shop.connect() as conn:
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", [shop.slot])
        try:
            refused(dbsync(shop, "run"), 4, "physical", "DBSYNC_REPLSLOT")
            told = dbsync(shop, "status", "--json")
            assert told.returncode == 0
            assert json.loads(told.stdout)["set_up"] is False
        finally:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [shop.slot])


def test_a_slot_of_another_database(shop: Database) -> None:
    with fresh_database(shop.server) as other:
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.slot])
        refused(dbsync(shop, "run"), 4, f"belongs to the database {other.name}", "DBSYNC_REPLSLOT")


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("DBSYNC_REPLSLOT", "Not A Slot", "characters a-z"),
        ("DBSYNC_BATCH_EVENTS", "many", "a whole number"),
        ("POSTGRES_PORT", "99999", "65535"),
        ("POSTGRES_PASSWORD_FILE", "not there", "a readable text file"),
    ],
)
def test_an_unusable_variable_and_its_flag(shop: Database, name: str, value: str, takes: str) -> None:
    done = dbsync(shop, "run", **{"POSTGRES_PASSWORD": "", name: value})
    refused(done, 2, f"{name}={value!r} cannot be used: it takes", "")
    assert takes in done.stderr


def test_an_unusable_flag_and_an_unknown_one(shop: Database) -> None:
    refused(dbsync(shop, "run", "--batch-events", "many"), 2, "--batch-events='many' cannot be used", "--batch-events")
    refused(dbsync(shop, "run", "--nonsense"), 2, "No such option", "dbsync run --help")
    refused(dbsync(shop, "nonsense"), 2, "No such command", "dbsync --help")


def test_a_secret_in_a_connection_string_that_cannot_be_read(shop: Database) -> None:
    done = dbsync(shop, "run", POSTGRES_CONNSTR=f"postgres//app:{SECRET}@db")
    refused(done, 2, "POSTGRES_CONNSTR=***", "POSTGRES_CONNSTR")


@pytest.mark.parametrize(
    ("flag", "path", "sentence"),
    [
        ("--handler", "FaultyHandler", "it takes module:Class"),
        ("--handler", "elsewhere:Handler", "there is no module elsewhere"),
        ("--handler", "mine:Handler", "the module mine has no Handler"),
        ("--handler", "mine:NoHandler", "is not a subclass of dbsync.MessageHandler"),
        ("--batcher", "mine:FaultyHandler", "is not a subclass of dbsync.Batcher"),
        ("--batcher", "mine:Picky", "it raised TypeError"),
        ("--batcher", "broken:Batcher", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_class_that_cannot_be_used(shop: Database, tmp_path: Path, flag: str, path: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(HANDLERS)
    (tmp_path / "broken.py").write_text("1 / 0")
    refused(dbsync(shop, "run", flag, path, cwd=tmp_path), 2, sentence, "")
    assert shop.rows("SELECT FROM pg_replication_slots WHERE slot_name = %s", [shop.slot]) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--soft-delete"], "soft_delete was asked for, but a target like echo: has no tables"),
        (["--drop-columns"], "drop_columns was asked for, but a target like echo: has no tables"),
        (["--batcher", "mine:FaultyBatcher", "--soft-delete"], "--soft-delete is for targets that dbsync knows"),
        (["--batcher", "mine:FaultyBatcher", "--to", "echo:"], "--to is for targets that dbsync knows"),
    ],
)
def test_what_a_target_cannot_be_told(shop: Database, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "mine.py").write_text(HANDLERS)
    refused(dbsync(shop, "run", *arguments, cwd=tmp_path), 2, sentence, "Leave ")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"mysql://user:{SECRET}@localhost:port/shop", "has a port that is none"),
        (f"mysql+mysqldb://user:{SECRET}@localhost/shop", "does not go through mysqldb"),
        (f"mysql://user:ge/{SECRET}@localhost/shop", "can be read in more than one way"),
        (f"mysql://localhost/shop?nonsense={SECRET}", "does not take the option nonsense"),
        (f"oracle://user:{SECRET}@localhost/shop", "is of a kind that dbsync does not know"),
        (f"delta:s3://key:{SECRET}@bucket/lake", "s3:… is no path"),
        ("jsonl:~/log", "begins with ~"),
        ("sqlite:///shop.db?timeout=abc", "does not take the option timeout"),
    ],
)
def test_a_target_that_cannot_be_meant(shop: Database, tmp_path: Path, url: str, sentence: str) -> None:
    refused(dbsync(shop, "run", cwd=tmp_path, DBSYNC_TO=url), 2, sentence, "")
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_variable_is_told_and_stops_nothing(shop: Database) -> None:
    looked = dbsync(shop, "check", DBSYNC_BATCH_EVENT=SECRET)
    assert looked.returncode == 0
    assert looked.stderr == "DBSYNC_BATCH_EVENT is not a variable of dbsync's: is DBSYNC_BATCH_EVENTS meant?\n"


def test_a_signal_ends_the_wait_for_a_target(shop: Database) -> None:
    nobody = f"postgresql://user:{SECRET}@127.0.0.1:1/shop"
    environ = {"DBSYNC_TO": nobody, "DBSYNC_RETRY_SECONDS": "30", "DBSYNC_BATCH_EVENT": "7"}
    with running(shop, **environ) as process:
        assert process.stderr is not None
        told = [process.stderr.readline()]
        while "Trying again in 30.0 s." not in told[-1]:
            assert told[-1], told
            told.append(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    words = "".join(told) + rest
    assert "The target at 127.0.0.1, database shop cannot be reached" in words
    assert "WARNING DBSYNC_BATCH_EVENT is not a variable of dbsync's: is DBSYNC_BATCH_EVENTS meant?" in words
    assert SECRET not in words
    assert "Traceback" not in words


def test_where_the_changes_go_is_stored_and_told_without_a_password(shop: Database, tmp_path: Path) -> None:
    server = shop.server
    assert dbsync(shop, "init").returncode == 0
    with fresh_database(server) as target:
        name = f"postgresql://{server.host}:{server.port}/{target.name}"
        url = f"{name}?user={server.user}&password={server.password}"
        # As an older dbsync stored it.
        shop.execute(
            "INSERT INTO dbsync_ctrl.dbsync_refreshes (slot, kind, query, state) VALUES (%s, 'target', %s, 'done')",
            [shop.slot, url],
        )
        first = fed(shop, name, DBSYNC_TO=url)
        then = fed(shop, f"sqlite:///{tmp_path}/shop.db", DBSYNC_TO=f"sqlite:///{tmp_path}/shop.db")
    assert "has fed" not in first
    assert f"has fed {name};" in then
    assert server.password not in first + then


def fed(database: Database, name: str, **changes: str) -> str:
    """What a dbsync says that has stored what it feeds."""
    stored = "SELECT query FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'target'"
    with running(database, **changes) as process:
        until(lambda: database.rows(stored) == [(name,)] or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, err
    assert database.rows(stored) == [(name,)]
    return err


def test_init_check_status_teardown(shop: Database) -> None:
    before = dbsync(shop, "status")
    assert before.returncode == 0
    assert "not set up" in before.stderr
    assert dbsync(shop, "check").returncode == 0

    made = dbsync(shop, "init", "--json")
    assert (made.returncode, made.stderr) == (0, "")
    again = dbsync(shop, "init")
    assert again.returncode == 0
    assert shop.slot in again.stdout
    looked = dbsync(shop, "check", "--json")
    assert (looked.returncode, looked.stderr) == (0, "")
    answer = json.loads(looked.stdout)
    assert answer["ok"] is True
    assert all(line.keys() == {"name", "ok", "level", "detail", "fix"} for line in answer["checks"])

    told = json.loads(dbsync(shop, "status", "--json").stdout)
    assert told.keys() == json.loads(made.stdout).keys()
    assert told["set_up"] is True
    assert told["publication"] == {"name": "dbsync_mypub", "exists": True, "tables": ["public.orders"]}
    assert told["slot"]["active"] is False

    unasked = dbsync(shop, "teardown")
    refused(unasked, 2, "no terminal to ask on", "--yes")
    removed = dbsync(shop, "teardown", "--yes")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert [line.split()[0] for line in removed.stdout.splitlines()] == [
        "replication",
        "watermark",
        "refresh",
        "control",
    ]
    nothing = dbsync(shop, "teardown", "--yes")
    assert (nothing.returncode, nothing.stdout) == (0, "")


def test_the_keys_of_status_stay(shop: Database) -> None:
    told = json.loads(dbsync(shop, "status", "--json").stdout)
    assert told.keys() == {"set_up", "source", "server_lsn", "publication", "control", "slot", "refreshes"}
    assert told["publication"].keys() == {"name", "exists", "tables"}
    assert told["control"].keys() == {"schema", "table", "exists"}
    assert told["slot"].keys() == {
        "name",
        "exists",
        "plugin",
        "database",
        "active",
        "active_pid",
        "restart_lsn",
        "confirmed_flush_lsn",
        "wal_status",
        "safe_wal_size",
        "held_bytes",
        "lag_bytes",
    }


def test_check_prints_the_fix_under_what_failed(shop: Database) -> None:
    shop.execute("CREATE TABLE keyless (a int); ALTER PUBLICATION dbsync_mypub ADD TABLE keyless")
    utf8 = dbsync(shop, "check", PYTHONIOENCODING="utf-8")
    assert utf8.returncode == 3
    lines = utf8.stdout.splitlines()
    (failed,) = (number for number, line in enumerate(lines) if line.startswith("✗ replica identity"))
    assert lines[failed + 1].strip().startswith('ALTER TABLE "public"."keyless" ADD PRIMARY KEY')
    assert "1 of" in utf8.stderr
    assert "\x1b" not in utf8.stdout
    plain = dbsync(shop, "check", PYTHONIOENCODING="ascii")
    assert plain.returncode == 3
    assert plain.stdout.isascii()
    assert "FAIL replica identity" in plain.stdout


@pytest.mark.parametrize(("answer", "gone"), [("n", False), ("y", True)])
def test_teardown_asks_on_a_terminal(shop: Database, answer: str, gone: bool) -> None:
    assert dbsync(shop, "init").returncode == 0
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "teardown"], env=environ(shop), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as asking:
        os.write(ours, f"{answer}\n".encode())
        out, err = asking.communicate(timeout=WAIT_SECONDS)
    os.close(ours)
    os.close(theirs)
    assert asking.returncode == 0
    assert f"Remove the slot {shop.slot}" in err.decode()
    assert bool(out) is gone
    assert (shop.rows("SELECT FROM pg_replication_slots WHERE slot_name = %s", [shop.slot]) == []) is gone


def test_colours_only_on_a_terminal_that_wants_them(shop: Database) -> None:
    assert b"\x1b[" in on_a_terminal(shop, TERM="xterm")
    assert b"\x1b[3" not in on_a_terminal(shop, TERM="xterm", NO_COLOR="1")


def on_a_terminal(database: Database, **changes: str) -> bytes:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, "check"], env=environ(database, **changes), stdout=theirs) as shown:
        os.close(theirs)
        told = b""
        try:
            while some := os.read(ours, 65536):
                told += some
        except OSError:  # how Linux tells that the other end of a terminal is closed
            pass
    os.close(ours)
    assert shown.returncode == 0
    return told


def confirmed(database: Database) -> LSN:
    ((lsn,),) = database.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [database.slot]
    )
    return LSN(lsn)


def test_run_echoes_and_a_signal_finishes_the_batch(shop: Database) -> None:
    assert dbsync(shop, "init").returncode == 0
    shop.execute("INSERT INTO orders VALUES (1, 'größer')")
    with running(shop) as process:
        assert json.loads(next_line(process)) == {
            "op": "upsert",
            "type": "public.orders",
            "id": "1",
            "doc": {"id": 1, "note": "größer"},
        }
        told = json.loads(dbsync(shop, "status", "--json").stdout)
        assert told["slot"]["active"] is True
        busy = dbsync(shop, "teardown", "--yes")
        refused(busy, 4, "is being read", "Stop that dbsync first")

        shop.execute("DELETE FROM orders")
        ((end,),) = shop.rows("SELECT pg_current_wal_flush_lsn()::text")
        assert json.loads(next_line(process)) == {"op": "delete", "type": "public.orders", "id": "1"}
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, out) == (0, "")
    assert f"following 1 table of the publication dbsync_mypub through the slot {shop.slot}" in err
    assert "Traceback" not in err
    assert confirmed(shop) >= LSN(end)


def test_a_second_signal_ends_at_once(shop: Database, tmp_path: Path) -> None:
    slow = "import time\nfrom dbsync import EchoBatcher\nclass Slow(EchoBatcher):\n"
    slow += "    def begin(self, batch):\n        print('begun', flush=True)\n        time.sleep(600)\n"
    (tmp_path / "slow.py").write_text(slow)
    assert dbsync(shop, "init").returncode == 0
    held = confirmed(shop)
    shop.execute("INSERT INTO orders VALUES (1, 'held')")
    with running(shop, "--batcher", "slow:Slow", cwd=tmp_path) as process:
        assert next_line(process) == "begun\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert confirmed(shop) == held


@pytest.mark.parametrize(
    ("flag", "path", "fault"),
    [("--handler", "mine:FaultyHandler", "the handler's own"), ("--batcher", "mine:FaultyBatcher", "the target's own")],
)
def test_what_a_fault_held_back_comes_after_a_restart(
    shop: Database, tmp_path: Path, flag: str, path: str, fault: str
) -> None:
    (tmp_path / "mine.py").write_text(HANDLERS)
    assert dbsync(shop, "init").returncode == 0
    before = confirmed(shop)
    shop.execute("INSERT INTO orders VALUES (7, 'kept')")
    faulty = dbsync(shop, "run", flag, path, cwd=tmp_path)
    assert faulty.returncode == 5, faulty.stderr
    assert fault in faulty.stderr
    assert "Traceback" not in faulty.stderr
    assert faulty.stdout == ""
    assert len((tmp_path / "calls").read_text().splitlines()) >= 2
    assert confirmed(shop) == before
    with running(shop, cwd=tmp_path) as process:
        assert json.loads(next_line(process))["doc"] == {"id": 7, "note": "kept"}
        until(lambda: confirmed(shop) > before)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
