"""Every example runs as it stands, in a process of its own; and the README's SQL does what the README says of it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from fix_postgres import Database, Server
from psycopg import sql

from dbsync import Settings, control, selection
from dbsync.check import run_checks
from dbsync.connection import connect

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHARED = "source"  # no example, but where they get their PostgreSQL
AT_A_TIME = 2
TIMEOUT_SECONDS = 600

PROMISED = {
    "change_logger": r'"kind": "update", "table": "public\.products", .*"new": {"sku": "P1", "price": "8\.50", ',
    "custom_handler": r"\Acustomer 1: .*'city': 'Ghent'.*\nemail ada@new\.example: {'customer': 1}\Z",
    "batching": r"delete item K1\n(?=(?s:.*)upsert item K2 .*'value': 4)(?=(?s:.*)upsert item K3 )",
    "partial_refresh": r"rows re-read in \d+ chunks.*\nnorth: (\d+) rows in the source, \1 in the target, 0 differ\Z",
    "search_index": r"\Asnapshot: A2\nsnapshot: A3\nphotograph: A2\nwatermarks: nothing\Z",
}

Run = subprocess.CompletedProcess[str]


def run_example(name: str, folder: Path) -> Run:
    foreign = re.compile(r"(DEFAULT_)?DBSYNC_|POSTGRES_|PG")
    environ = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder,
        env={**environ, "DBSYNC_SPARK_MASTER": "local[1]", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[dict[str, Future[Run]]]:
    """All of them, side by side, since most of their time is Spark's start."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {name: pool.submit(run_example, name, folder) for name in PROMISED}


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROMISED, SHARED}


@pytest.mark.parametrize("name", PROMISED)
def test_an_example_shows_what_it_promises(name: str, runs: dict[str, Future[Run]]) -> None:
    run = runs[name].result()
    assert run.returncode == 0, run.stderr
    assert re.search(PROMISED[name], run.stdout.strip()), run.stdout


def test_the_examples_leave_nothing_behind(runs: dict[str, Future[Run]], folder: Path) -> None:
    for run in runs.values():
        run.result()
    assert list(folder.iterdir()) == []


def test_on_a_server_that_is_there_an_example_has_a_database_of_its_own(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRES_CONNSTR", postgres.dsn())
    spec = importlib.util.spec_from_file_location("examples_source", EXAMPLES / f"{SHARED}.py")
    assert spec
    assert spec.loader
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    with source.empty_database() as (settings, db):
        assert db.info.port == postgres.port
        assert db.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
        db.execute("CREATE PUBLICATION dbsync_mypub")
        with connect(settings) as conn:
            control.setup(conn, settings)
        name = db.info.dbname
    with psycopg.connect(postgres.dsn()) as admin:
        assert admin.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchall() == []
        assert admin.execute("SELECT FROM pg_replication_slots WHERE database = %s", [name]).fetchall() == []


def readme_sql(part: str) -> str:
    """The block of SQL in the README that contains these words."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"^```sql\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE) if part in text)
    return block


@pytest.fixture
def roles(database: Database) -> Iterator[dict[str, str]]:
    """Names for the README's roles that nobody else uses; a role belongs to the whole server."""
    names = {name: f"{name}_{uuid.uuid4().hex[:8]}" for name in ("dbsync", "analyst")}
    try:
        yield names
    finally:
        with database.connect() as conn:
            for name in names.values():
                if conn.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone():
                    conn.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(sql.Identifier(name)))


def test_the_privileges_of_the_readme_are_enough(database: Database, roles: dict[str, str]) -> None:
    def run(part: str) -> None:
        text = readme_sql(part)
        for name, unique in roles.items():
            text = re.sub(rf"\b{name}\b", unique, text)
        database.execute(text)

    database.execute("CREATE TABLE customers (id int PRIMARY KEY); CREATE TABLE orders (id int PRIMARY KEY)")
    run("CREATE PUBLICATION")
    run("CREATE ROLE")
    server = database.server
    settings = Settings(dsn=server.dsn(database.name, roles["dbsync"], "change me"), slot=database.slot)
    with connect(settings) as conn:
        control.setup(conn, settings)
        assert [line for line in run_checks(settings) if line.level != "ok"] == []
        assert len(selection.understand(conn, settings, "SELECT * FROM orders")) == 1

    database.execute(f"CREATE ROLE {roles['analyst']} LOGIN PASSWORD 'change me too'")
    run("GRANT USAGE ON SCHEMA dbsync_ctrl")
    with psycopg.connect(server.dsn(database.name, roles["analyst"], "change me too"), autocommit=True) as analyst:
        analyst.execute(readme_sql("INSERT INTO dbsync_ctrl").encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            analyst.execute("SELECT * FROM orders")
    asked = "SELECT state, query, requested_by FROM dbsync_ctrl.dbsync_refreshes"
    assert database.rows(asked) == [("queued", "SELECT * FROM orders", roles["analyst"])]


def test_the_monitoring_query_of_the_readme_runs(database: Database) -> None:
    database.execute("CREATE PUBLICATION dbsync_mypub")
    settings = database.settings()
    with connect(settings) as conn:
        control.setup(conn, settings)
    query = readme_sql("pg_replication_slots").replace("dbsync_replslot", database.slot)
    ((active, wal_status, _, lag_bytes),) = database.rows(query)
    assert (active, wal_status) == (False, "reserved")
    assert lag_bytes >= 0
