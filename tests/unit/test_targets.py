"""From a target's URL to its Batcher, and what stands before any Batcher: other names, fewer columns."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from recording import RecordingBatcher

from dbsync import LSN, EchoBatcher, Settings
from dbsync.batcher import BatchInfo
from dbsync.batcher.duckdb import DuckDBBatcher
from dbsync.batcher.shaped import shaped
from dbsync.batcher.urls import KINDS, Kind, open_target
from dbsync.errors import ConfigError
from dbsync.relation import Column, Relation

USERS = Relation(
    1,
    "public",
    "users",
    "d",
    tuple(Column(name, 25, -1, "text") for name in ("id", "name", "password", "city")),
    (0,),
)
ROW = {"id": "1", "name": "Ada", "password": "geheim", "city": "London"}


def shape(**settings: Any) -> tuple[RecordingBatcher, Any]:
    batcher = RecordingBatcher()
    return batcher, shaped(batcher, Settings(**settings))


def info(*relations: Relation) -> BatchInfo:
    return BatchInfo(1, LSN(1), LSN(2), {relation.doctype: relation for relation in relations})


def test_without_a_url_it_echoes() -> None:
    assert type(open_target(Settings())) is EchoBatcher
    assert type(open_target(Settings(to="echo:"))) is EchoBatcher


def test_the_scheme_names_the_class_and_a_driver_may_stand_behind_it() -> None:
    assert isinstance(open_target(Settings(to="duckdb:///shop.duckdb")), DuckDBBatcher)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.form)
def test_every_kind_has_its_class(kind: Kind) -> None:
    module, _, name = kind.target.partition(":")
    found = getattr(__import__(f"dbsync.batcher.{module}", fromlist=[name]), name)
    assert callable(found.from_url)


def test_a_kind_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"The target redis:… is of a kind that dbsync does not know\..*MariaDB.*echo:.*--batcher"
    ):
        open_target(Settings(to="redis://user:geheim@localhost"))


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="DBSYNC_TO='shop' cannot be used: it takes the URL of a target"):
        Settings.from_env({"DBSYNC_TO": "shop"})


def test_a_package_that_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(
        ConfigError, match=r"the package duckdb, which is not installed\. pip install 'dbsync\[duckdb\]'"
    ):
        open_target(Settings(to="duckdb:///shop.duckdb"))


P = "geheim-9"


@pytest.mark.parametrize(
    ("url", "sentence", "write"),
    [
        # A character of the password's, read as one of the URL's.
        (f"mysql://u:ge/{P}@HOST/shop", "can be read in more than one way", "%2F for /"),
        (f"mysql://u:{P}@x@HOST/shop", "can be read in more than one way", "%40 for @"),
        (f"postgresql://u:12/{P}@HOST/shop", "can be read in more than one way", "%2F for /"),
        (f"webhook+https://u:12/{P}@HOST/in", "can be read in more than one way", "%2F for /"),
        (f"nats://u:12?{P}@HOST/S", "can be read in more than one way", "%3F for ?"),
        # Hosts, ports, databases.
        (f"mysql://u:{P}@HOST:port/shop", "a port that is none", "number from 1 to 65535"),
        (f"mysql://u:{P}@HOST:99999/shop", "a port that is none", "number from 1 to 65535"),
        (f"mariadb://u:{P}@HOST:0/shop", "a port that is none", "number from 1 to 65535"),
        (f"postgresql://u:{P}@HOST:port/shop", "a port that is none", "number from 1 to 65535"),
        (f"postgresql://u:{P}@ONE:5432,TWO:70000/shop", "a port that is none", "number from 1 to 65535"),
        (f"nats://u:{P}@HOST:99999/S", "a port that is none", "number from 1 to 65535"),
        (f"mysql://u:{P}@HO ST/shop", "a host that is none", "mysql://HOST/DATABASE"),
        (f"mysql://u:{P}@HOST", "names no database", "mysql://HOST/DATABASE"),
        (f"mysql://u:{P}@HOST/", "names no database", "mysql://HOST/DATABASE"),
        ("mysql:foo", "is not written as one", "mysql://HOST/DATABASE"),
        ("postgresql:foo", "is not written as one", "postgresql://HOST/DATABASE"),
        ("nats:foo", "is not written as one", "nats://HOST/STREAM"),
        # Drivers.
        (f"mysql+mysqldb://u:{P}@HOST/shop", "does not go through mysqldb", "mysql:…, without +mysqldb"),
        (f"mysql+foo://u:{P}@HOST/shop", "does not go through foo", "mysql:…, without +foo"),
        (f"postgresql+asyncpg://u:{P}@HOST/shop", "does not go through asyncpg", "postgresql:…, without +asyncpg"),
        ("sqlite+aiosqlite:///x.db", "does not go through aiosqlite", "sqlite:…, without +aiosqlite"),
        (f"sqlite+pysqlcipher://:{P}@/x.db", "does not go through pysqlcipher", "sqlite:…, without +pysqlcipher"),
        ("duckdb+engine:///x", "does not go through engine", "duckdb:…, without +engine"),
        ("jsonl+gz:x", "does not go through gz", "jsonl:…, without +gz"),
        # Options.
        ("sqlite:///x?timeout=abc", "does not take the option timeout", "It takes none"),
        ("sqlite:///x?foo=1", "does not take the option foo", "It takes none"),
        (f"duckdb:///x?motherduck_token={P}", "does not take the option motherduck_token", "It takes none"),
        ("nats://HOST/S?x=1", "does not take the option x", "It takes none"),
        (f"mysql://HOST/shop?nonsense={P}", "does not take the option nonsense", "It takes charset, "),
        (f"mysql://HOST/shop?{P}", "has an option without a value", "name=value"),
        (f"mysql://HOST/shop?geh%65im={P}", "does not take the option", "It takes charset, "),
        (f"mysql://HOST/shop?password={P}&password=x", "gives the option password twice", "once"),
        ("mysql://HOST/shop?charset=latin1", "option charset cannot be used: it takes utf8mb4", "leave it out"),
        (f"mysql://HOST/shop?read_timeout={P}", "option read_timeout cannot be used: it takes a whole number", "leave"),
        (f"mysql://HOST/shop?ssl_ca={P}.pem", "option ssl_ca cannot be used: it takes the path of a file", "leave it"),
        ("mysql://HOST/shop?ssl_disabled=false", "option ssl_disabled cannot be used: it takes true", "leave it out"),
        ("mysql://HOST/shop?ssl_verify_identity=true", "does not take the option ssl_verify_identity", "ssl_ca, "),
        # Files and folders.
        ("sqlite:x.db", "names no file", "sqlite:///FILE"),
        ("sqlite://x.db", "names no file", "sqlite:///FILE"),
        ("sqlite://", "names no file", "sqlite:///FILE"),
        ("duckdb:///", "names no file", "duckdb:///FILE"),
        ("duckdb:x", "names no file", "duckdb:///FILE"),
        ("sqlite:///:memory:", "in memory, and would be gone", "sqlite:///FILE"),
        ("duckdb:///:memory:", "in memory, and would be gone", "duckdb:///FILE"),
        ("sqlite:///file:x.db", "file:… is no path", "sqlite:///FILE"),
        ("sqlite:///.", "is a folder, not a file", "sqlite:///FILE"),
        ("sqlite:///~/x.db", "begins with ~, which only a shell understands", "Write the path in full"),
        ("duckdb:///~/x", "begins with ~, which only a shell understands", "Write the path in full"),
        ("jsonl:~/log", "begins with ~, which only a shell understands", "Write the path in full"),
        ("delta:~", "begins with ~, which only a shell understands", "Write the path in full"),
        ("jsonl:file:///x", "file:… is no path", "jsonl:DIR"),
        ("jsonl:file:x", "file:… is no path", "jsonl:DIR"),
        ("delta:s3://bucket/x", "s3:… is no path", "delta:DIR, with a folder of this machine"),
        (f"delta:s3://key:{P}@bucket/x", "s3:… is no path", "delta:DIR, with a folder of this machine"),
        (f"delta:abfss://{P}@y/z", "abfss:… is no path", "delta:DIR, with a folder of this machine"),
        ("parquet:s3://bucket/x", "s3:… is no path", "parquet:DIR, with a folder of this machine"),
        (f"parquet:s3a:{P}", "s3a:… is no path", "parquet:DIR, with a folder of this machine"),
        ("jsonl:", "names no folder", "jsonl:DIR"),
        (f"jsonl://u:{P}@HOST/log", "names no folder", "jsonl:DIR"),
        ("echo:log", "takes nothing behind it", "echo:"),
        ("echo://log", "takes nothing behind it", "echo:"),
        # What dbsync has no target for.
        (f"oracle://u:{P}@HOST/shop", "is of a kind that dbsync does not know", "PostgreSQL, SQLite, MySQL, MariaDB"),
        (f"mssql+pyodbc://u:{P}@HOST/shop", "is of a kind that dbsync does not know", "--batcher"),
        (f"https://u:{P}@HOST/in", "is of a kind that dbsync does not know", "webhook+https://HOST/PATH"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, sentence: str, write: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(to=url)
    with pytest.raises(ConfigError) as caught:
        open_target(settings)
    assert sentence in caught.value.message
    assert re.fullmatch(r"[^\n]+\.", caught.value.message)
    assert write in (caught.value.hint or "")
    assert P not in f"{caught.value} {settings!r} {caught.value.__cause__}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "echo:",
        "echo://",
        "sqlite:///x.db",
        "sqlite+pysqlite:////data/a@b:c.db",
        "postgres://HOST/shop",
        "postgresql+psycopg://u:p%40%2F@ONE:5432,TWO/shop?sslmode=require",
        "postgresql+psycopg2://HOST/shop",
        "postgresql:///shop?host=/run/pg",
        "postgresql://[::1]:5432/shop",
        "mysql+pymysql://u:p%40@HOST:3306/shop?charset=utf8mb4&read_timeout=60&ssl_check_hostname=false",
        "mysql:///shop?unix_socket=/run/mysql&user=u&password=p",
        "mariadb://HOST/shop",
        "nats://u:p@HOST:4222/S",
        "webhook+https://u:p%40@HOST:8443/in?key=1",
        "duckdb:///a b.duckdb",
        "jsonl:log?rotate_bytes=1MB",
        "jsonl:./a:b",
        "parquet:./s3:x",
        "delta:lake",
    ],
)
def test_a_url_that_can_be_meant_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_target(Settings(to=url)).close()


@pytest.mark.parametrize("name", ["soft_delete", "drop_columns"])
def test_what_only_tables_have_is_refused_for_others(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} was asked for, but a target like echo: has no tables"):
        open_target(Settings(**{name: True}))


def test_a_password_in_the_url_is_never_shown() -> None:
    settings = Settings(to="postgresql://user:ge%21heim@localhost/lake", webhook_secret="psst")
    assert "heim" not in repr(settings)
    assert "psst" not in repr(settings)
    assert (
        settings.mask("could not log in with ge!heim or ge%21heim or psst") == "could not log in with *** or *** or ***"
    )


def test_nothing_stands_before_a_batcher_that_is_asked_nothing() -> None:
    batcher, target = shape()
    assert target is batcher


def test_names_get_a_schema_and_a_prefix() -> None:
    batcher, target = shape(target_schema="lake", target_prefix="pg_")
    target.begin(info(USERS))
    target.batch_truncate("public.users")
    target.batch_delete("public.users", ["2"])
    target.batch_upsert("public.users", {"1": ROW})
    target.batch_upsert("order", {"7": {"total": 1}})
    assert [(kind, doctype) for kind, doctype, _ in batcher.calls] == [
        ("truncate", "lake.pg_users"),
        ("delete", "lake.pg_users"),
        ("upsert", "lake.pg_users"),
        ("upsert", "lake.pg_order"),
    ]


def test_a_prefix_alone_leaves_the_schema() -> None:
    batcher, target = shape(target_prefix="pg_")
    target.batch_upsert("sales.orders", {"1": {}})
    target.batch_upsert("order", {"1": {}})
    assert [doctype for _, doctype, _ in batcher.calls] == ["sales.pg_orders", "pg_order"]


def test_two_tables_of_one_name_are_not_thrown_together() -> None:
    _, target = shape(target_schema="lake")
    target.batch_upsert("public.users", {"1": ROW})
    with pytest.raises(ConfigError, match=r"Both public\.users and sales\.users would be lake\.users in the target"):
        target.batch_upsert("sales.users", {"1": ROW})


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"exclude_columns": ("public.users.password",)}, {"id", "name", "city"}),
        ({"exclude_columns": ("*.password", "*.city")}, {"id", "name"}),
        ({"include_columns": ("public.users.name",)}, {"id", "name"}),
        ({"include_columns": ("public.*.name", "public.users.c*")}, {"id", "name", "city"}),
        ({"include_columns": ("public.orders.name",)}, {"id", "name", "password", "city"}),
        ({"include_columns": ("*.users.*",), "exclude_columns": ("*.password",)}, {"id", "name", "city"}),
    ],
)
def test_columns_are_kept_and_left_out(settings: dict[str, Any], kept: set[str]) -> None:
    batcher, target = shape(**settings)
    begun: list[BatchInfo] = []
    batcher.begin = begun.append  # type: ignore[method-assign]
    target.begin(info(USERS))
    target.batch_upsert("public.users", {"1": ROW})
    assert batcher.upserts("public.users") == {"1": {name: ROW[name] for name in kept}}
    relation = begun[0].relations["public.users"]
    assert set(relation.column_names) == kept
    assert relation.key_names == ("id",)


def test_the_key_cannot_be_left_out() -> None:
    _, target = shape(exclude_columns=("*.id",))
    with pytest.raises(ConfigError, match=r"The column id of public\.users belongs to its key"):
        target.begin(info(USERS))


def test_a_column_without_its_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The column 'password' cannot be told from others\..*\*\.password"):
        shape(exclude_columns=("password",))


def test_it_hands_on_what_a_batcher_is_told_and_asked() -> None:
    batcher, target = shape(target_prefix="x_")
    batcher.position = lambda: LSN(7)  # type: ignore[method-assign]
    target.log_name = "system/shop/slot"
    assert batcher.log_name == target.log_name == "system/shop/slot"
    assert target.position() == LSN(7)
    target.commit(info())
    assert len(batcher.batches) == 1


def test_it_can_be_sent_to_an_executor() -> None:
    target = shaped(EchoBatcher(), Settings(target_prefix="x_", exclude_columns=("*.password",)))
    target.begin(info(USERS))
    assert pickle.loads(pickle.dumps(target))._renamed("a.b") == "a.x_b"
