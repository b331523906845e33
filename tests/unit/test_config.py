"""Settings come from the environment as documented, are checked at the start, and never show a password."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from psycopg.conninfo import conninfo_to_dict

from dbsync.config import ENVIRONMENT, Settings, Variable, mistyped, parse_bytes
from dbsync.errors import ConfigError

FAMILIES = {
    "ctrl_namespace": ("DBSYNC_CTRL_NAMESPACE", "DEFAULT_DBSYNC_CTRL_NAMESPACE"),
    "wm_table": ("DBSYNC_WM_TABLENAME", "DEFAULT_DBSYNC_WM_TABLENAME"),
    "publication": ("DBSYNC_PUBNAME", "DEFAULT_DBSYNC_PUBNAME"),
    "slot": ("DBSYNC_REPLSLOT", "DEFAULT_DBSYNC_REPLSLOT"),
}
LIBPQ_VARIABLES = (
    "PGHOST",
    "PGPORT",
    "PGUSER",
    "PGDATABASE",
    "PGPASSWORD",
    "PGOPTIONS",
    "PGSERVICE",
    "PGCONNECT_TIMEOUT",
)


@pytest.fixture(autouse=True)
def no_libpq_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBPQ_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_nothing_set_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert (settings.ctrl_namespace, settings.wm_table) == ("dbsync_ctrl", "dbsync_wmtable")
    assert (settings.publication, settings.slot) == ("dbsync_mypub", "dbsync_replslot")
    assert settings.spark_master == "local[*]"
    assert (settings.dsn, settings.host, settings.password, settings.spool_dir) == (None, None, None, None)


def test_every_field_has_its_variables_and_the_table_tells_the_true_default() -> None:
    fields = dataclasses.fields(Settings)
    assert [variable.field for variable in ENVIRONMENT] == [field.name for field in fields]
    for variable, field in zip(ENVIRONMENT, fields, strict=True):
        if field.default is not None:
            assert variable.accept(variable.parse(variable.default)) == field.default


def test_each_part_comes_from_its_variable() -> None:
    environ = {
        "POSTGRES_HOST": "db.example",
        "POSTGRES_PORT": "5433",
        "POSTGRES_DB": "shop",
        "POSTGRES_USER": "sync",
        "POSTGRES_PASSWORD": "it's a \\ secret",
        "DBSYNC_SPARK_MASTER": "spark://spark.example:7077",
        "DBSYNC_SPOOL_DIR": "spool",
        "DBSYNC_BATCH_EVENTS": "7",
        "DBSYNC_BATCH_BYTES": "64MB",
        "DBSYNC_BATCH_SECONDS": "2",
        "DBSYNC_CHUNK_ROWS": "8",
        "DBSYNC_CHUNK_PARALLELISM": "9",
        "DBSYNC_CHUNK_REST": "0",
        "DBSYNC_RETRIES": "0",
        "DBSYNC_RETRY_SECONDS": "0.25",
    }
    assert Settings.from_env(environ) == Settings(
        host="db.example",
        port=5433,
        dbname="shop",
        user="sync",
        password="it's a \\ secret",
        spark_master="spark://spark.example:7077",
        spool_dir=Path("spool"),
        batch_events=7,
        batch_bytes=64 * 1024**2,
        batch_seconds=2.0,
        chunk_rows=8,
        chunk_parallelism=9,
        chunk_rest=0.0,
        retries=0,
        retry_seconds=0.25,
    )


@pytest.mark.parametrize("field", FAMILIES)
def test_the_first_name_of_a_family_wins(field: str) -> None:
    first, second = FAMILIES[field]
    assert getattr(Settings.from_env({second: "theirs"}), field) == "theirs"
    assert getattr(Settings.from_env({second: "theirs", first: "ours"}), field) == "ours"
    assert getattr(Settings.from_env({second: "theirs", first: ""}), field) == "theirs"


@pytest.mark.parametrize("name", [name for variable in ENVIRONMENT for name in variable.names])
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert Settings.from_env({name: ""}) == Settings()


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("1B", 1), ("3kB", 3072), ("64 MB", 64 * 1024**2), ("2GB", 2 * 1024**3)],
)
def test_bytes_take_the_units_of_postgresql(text: str, count: int) -> None:
    assert Settings.from_env({"DBSYNC_BATCH_BYTES": text}).batch_bytes == count


UNUSABLE = [
    ("POSTGRES_HOST", " "),
    ("POSTGRES_PORT", "0"),
    ("POSTGRES_PORT", "65536"),
    ("POSTGRES_PORT", "five"),
    ("DBSYNC_CTRL_NAMESPACE", "x" * 64),
    ("DBSYNC_CTRL_NAMESPACE", "pg_mine"),
    ("DEFAULT_DBSYNC_WM_TABLENAME", "é" * 32),
    ("DBSYNC_PUBNAME", "x" * 64),
    ("DBSYNC_REPLSLOT", "Upper"),
    ("DEFAULT_DBSYNC_REPLSLOT", "with space"),
    ("DBSYNC_REPLSLOT", "x" * 64),
    ("DBSYNC_SPARK_MASTER", " "),
    ("DBSYNC_SPOOL_DIR", " "),
    ("DBSYNC_BATCH_EVENTS", "0"),
    ("DBSYNC_BATCH_EVENTS", "1.5"),
    ("DBSYNC_BATCH_BYTES", "12 mb"),
    ("DBSYNC_BATCH_BYTES", "-1"),
    ("DBSYNC_BATCH_SECONDS", "0"),
    ("DBSYNC_BATCH_SECONDS", "nan"),
    ("DBSYNC_BATCH_SECONDS", "inf"),
    ("DBSYNC_CHUNK_ROWS", "many"),
    ("DBSYNC_CHUNK_ROWS", "2147483648"),
    ("DBSYNC_CHUNK_PARALLELISM", "0"),
    ("DBSYNC_CHUNK_REST", "-1"),
    ("DBSYNC_CHUNK_REST", "inf"),
    ("DBSYNC_RETRIES", "-1"),
    ("DBSYNC_RETRY_SECONDS", "soon"),
]


@pytest.mark.parametrize(("name", "text"), UNUSABLE)
def test_a_value_that_cannot_be_used_is_named_with_what_it_takes(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({name: text})
    takes = next(variable.takes for variable in ENVIRONMENT if name in variable.names)
    assert caught.value.message == f"{name}={text!r} cannot be used: it takes {takes}."
    assert caught.value.hint is not None
    assert name in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "5432"),
        ("batch_events", True),
        ("batch_events", None),
        ("batch_bytes", 1.5),
        ("batch_seconds", float("nan")),
        ("slot", None),
        ("slot", 3),
        ("publication", "nul\0"),
        ("wm_table", ""),
        ("spool_dir", 5),
        ("host", ""),
    ],
)
def test_direct_construction_is_checked_too(field: str, value: object) -> None:
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"^{field}="):
        Settings(**arguments)


def test_the_password_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(" with spaces \n")
    assert Settings.from_env({"POSTGRES_PASSWORD_FILE": str(path)}).password == " with spaces "


def test_two_passwords_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("geheim1")
    with pytest.raises(ConfigError, match="both set") as caught:
        Settings.from_env({"POSTGRES_PASSWORD": "geheim2", "POSTGRES_PASSWORD_FILE": str(path)})
    assert "geheim" not in _everything_shown(caught.value)


def test_a_password_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match="POSTGRES_PASSWORD_FILE=") as caught:
        Settings.from_env({"POSTGRES_PASSWORD_FILE": str(missing)})
    assert str(missing) in caught.value.message


DSNS = [
    "postgresql://sync:geheim@db.example:5433/shop",
    "postgresql://db.example:5433/shop?user=sync&password=geheim&sslpassword=geheim",
    "host=db.example port=5433 dbname=shop user=sync password=geheim",
    "host=db.example port=5433 dbname=shop user=sync password='geheim with \\' quote'",
]


@pytest.mark.parametrize("dsn", DSNS)
def test_a_password_is_never_shown(dsn: str) -> None:
    settings = Settings(dsn=dsn, password="geheim too")
    assert "geheim" not in repr(settings) + str(settings) + f"{settings}" + settings.describe()
    assert "password='***'" in repr(settings)
    assert "password=***" in repr(settings)
    assert settings.describe() == "db.example:5433/shop as sync"
    assert "geheim" not in settings.mask(f"it is {conninfo_to_dict(dsn)['password']} or geheim too")
    assert "geheim" in settings.conninfo()


@pytest.mark.parametrize(
    "environ",
    [
        {"POSTGRES_CONNSTR": "geheim"},
        {"POSTGRES_CONNSTR": "password=geheim bogus=1"},
        {"POSTGRES_CONNSTR": "password='geheim"},
        {"POSTGRES_CONNSTR": "postgresql://u:geheim@[::1/db"},
        {"POSTGRES_DB": "postgresql://u:geheim@host/db"},
        {"POSTGRES_HOST": "postgresql://u:geheim@host/db"},
    ],
)
def test_an_unusable_connection_string_is_refused_without_showing_it(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"=\*\*\* cannot be used") as caught:
        Settings.from_env(environ)
    assert "geheim" not in _everything_shown(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:geheim%2D1@HOST/shop",
        "nats://user:geheim%2D1@HOST/SHOP",
        "nats://geheim%2D1@HOST/SHOP",
        "tls://geheim%2D1@HOST/SHOP",
        "webhook+https://user:geheim%2D1@HOST/in?key=geheim%2D1",
        "webhook+https://HOST/in?key=geheim%2D1",
        "webhook+https://HOST/services/T0/B0/geheim%2D1",
        "postgresql://HOST/shop?user=u&password=geheim%2D1",
        "postgresql://u@HOST/shop?sslpassword=geheim%2D1",
        "mysql://HOST/shop?user=u&password=geheim%2D1",
        "duckdb:///HOST.duckdb?motherduck_token=geheim%2D1",
    ],
)
def test_what_is_secret_of_a_target_is_never_shown(url: str) -> None:
    settings = Settings(to=url)
    assert "geheim" not in repr(settings)
    assert "HOST" in repr(settings)
    assert "geheim" not in settings.mask(f"{url} {unquote(url)}")


@pytest.mark.parametrize("url", ["mysql://u:ge/heim-1@HOST/shop", "mysql://u:heim-1@x@HOST/shop"])
def test_of_a_target_that_can_be_read_in_two_ways_the_scheme_is_shown(url: str) -> None:
    settings = Settings(to=url)
    assert "to='mysql:***'" in repr(settings)
    assert "heim-1" not in settings.mask(f"could not open {url}")


def test_what_is_not_secret_of_a_target_is_shown() -> None:
    for url in ("postgresql://HOST/shop", "nats://HOST:4222/SHOP", "webhook+https://HOST/in", "duckdb:///a"):
        assert repr(url) in repr(Settings(to=url))


def test_no_part_of_a_secret_is_left_where_another_is_hidden() -> None:
    settings = Settings(password="ge", to="postgresql://u@HOST/shop?sslpassword=geheim")
    assert settings.mask("it is geheim") == "it is ***"


def test_a_target_that_is_no_url_is_not_shown_where_it_may_hold_a_password() -> None:
    for text in ("User:geheim@HOST/shop", "MYSQL://user:geheim@HOST/shop"):
        with pytest.raises(
            ConfigError, match=r"DBSYNC_TO=\*\*\* cannot be used: it takes the URL of a target"
        ) as caught:
            Settings.from_env({"DBSYNC_TO": text})
        assert "geheim" not in _everything_shown(caught.value)


NUMBERS = [variable for variable in ENVIRONMENT if variable.parse in (int, float, parse_bytes)]


@pytest.mark.parametrize("variable", NUMBERS, ids=lambda variable: variable.field)
@pytest.mark.parametrize("text", ["many", "-1", "1e999", "nan", "9" * 5000, "0x10", "1x", "1 2"])
def test_a_number_that_is_none_is_said_in_one_sentence(variable: Variable, text: str) -> None:
    (name, *_) = variable.names
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({name: text})
    assert caught.value.message.startswith(f"{name}={text!r}"[:100])
    assert caught.value.message.endswith(f" cannot be used: it takes {variable.takes}.")
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DBSYNC_BATCH_EVENT", "DBSYNC_BATCH_EVENTS"),
        ("DBSYNC_BATCHBYTES", "DBSYNC_BATCH_BYTES"),
        ("DBSYNC_CHUNKREST", "DBSYNC_CHUNK_REST"),
        ("DBSYNC_SLOT", "DBSYNC_REPLSLOT"),
        ("DBSYNC_PUBLICATION", "DBSYNC_PUBNAME"),
        ("DBSYNC_WM_TABLE", "DBSYNC_WM_TABLENAME"),
        ("DEFAULT_DBSYNC_REPLSLOTS", "DEFAULT_DBSYNC_REPLSLOT"),
        ("DBSYNC_SOFTDELETE", "DBSYNC_SOFT_DELETE"),
        ("dbsync_to", "DBSYNC_TO"),
    ],
)
def test_a_mistyped_variable_is_noticed(name: str, meant: str) -> None:
    assert mistyped({name: "geheim"}) == {name: meant}


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "DBSYNC_TO": "echo:",
        "DEFAULT_DBSYNC_PUBNAME": "p",
        "DBSYNC_SERVICE_HOST": "10.0.0.1",  # what Kubernetes tells of a service that is called dbsync
        "DBSYNC_SERVICE_PORT": "80",
        "DBSYNC_PORT": "tcp://10.0.0.1:80",
        "DBSYNC_PORT_80_TCP_ADDR": "10.0.0.1",
        "DBSYNC_IMAGE": "dbsync:1",
        "DBSYNC_TEST_DSN": "x",
        "POSTGRES_INITDB_ARGS": "x",
        "PATH": "/bin",
        "DBSYNC_BATCH_EVENT": "",
    }
    assert mistyped(others) == {}


def test_the_connection_string_wins_over_the_parts() -> None:
    settings = Settings.from_env({"POSTGRES_CONNSTR": "host=one", "POSTGRES_HOST": "two", "POSTGRES_DB": "three"})
    assert conninfo_to_dict(settings.conninfo()) == {
        "host": "one",
        "application_name": "dbsync",
        "connect_timeout": "10",
    }


def test_what_is_not_set_is_left_to_libpq(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conninfo_to_dict(Settings().conninfo()) == {"application_name": "dbsync", "connect_timeout": "10"}
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "3")
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("PGUSER", "somebody")
    assert conninfo_to_dict(Settings().conninfo()) == {"application_name": "dbsync"}
    assert Settings().describe() == "elsewhere:5432/somebody as somebody"


def test_extra_parameters_win_and_the_users_own_are_kept() -> None:
    settings = Settings(dsn="host=one connect_timeout=3 application_name=mine")
    given = conninfo_to_dict(settings.conninfo(replication="database"))
    assert given == {"host": "one", "connect_timeout": "3", "application_name": "mine", "replication": "database"}
    assert conninfo_to_dict(settings.conninfo(application_name="other"))["application_name"] == "other"


def test_every_odd_character_of_a_part_arrives() -> None:
    odd = """it's "a" \\ b=c d"""
    settings = Settings(host="h", dbname=odd, user=odd, password=odd)
    given = conninfo_to_dict(settings.conninfo())
    assert (given["dbname"], given["user"], given["password"]) == (odd, odd, odd)


def test_settings_are_frozen_and_can_be_copied_and_pickled() -> None:
    settings = Settings(dsn=DSNS[0], spool_dir=Path("spool"))
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert dataclasses.replace(settings, slot="other").slot == "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.slot = "other"  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(settings, slot="Not One")


def _everything_shown(error: BaseException) -> str:
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return str(error) + (_everything_shown(following) if following else "")
