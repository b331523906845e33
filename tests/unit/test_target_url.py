"""What is told of a target's URL cannot be secret, tells targets apart, and is the same at every start."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from dbsync.targeturl import is_same, recalled, shown, url_secrets

SECRET = "geheim9"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://user:geheim9@HOST:5433/shop", "postgresql://HOST:5433/shop"),
        ("postgresql://HOST/shop?user=u&password=geheim9", "postgresql://HOST/shop"),
        ("postgresql://u@HOST/shop?sslmode=require&sslpassword=geheim9", "postgresql://HOST/shop"),
        ("postgresql+psycopg://u:geheim9@HOST/shop", "postgresql+psycopg://HOST/shop"),
        ("postgresql://u:geheim9@ONE:5432,TWO:5433/shop", "postgresql://ONE:5432,TWO:5433/shop"),
        ("postgresql://u:geheim9@[::1]:5432/shop", "postgresql://[::1]:5432/shop"),
        ("postgresql:///shop?host=/run/pg&password=geheim9&port=5433", "postgresql:///shop?host=/run/pg&port=5433"),
        ("postgresql://?service=lake&password=geheim9", "postgresql://?service=lake"),
        ("postgresql://HOST/host%3DHOST%20password%3Dgeheim9", "postgresql://HOST/***"),
        ("postgresql://HOST/?dbname=password%3dgeheim9&port=5433", "postgresql://HOST?port=5433"),
        ("postgresql://HOST/a%20b", "postgresql://HOST/a%20b"),
        ("mysql://HOST/shop?user=u&password=geheim9", "mysql://HOST/shop"),
        ("mysql+pymysql://u:geheim9@HOST/shop?ssl_key_password=geheim9", "mysql+pymysql://HOST/shop"),
        ("mysql://u:geheim9@/shop?unix_socket=/run/mysql", "mysql:///shop?unix_socket=/run/mysql"),
        ("nats://u:geheim9@HOST:4222/SHOP", "nats://HOST:4222/SHOP"),
        ("tls://geheim9@HOST/SHOP", "tls://HOST/SHOP"),
        ("duckdb:///x.duckdb?motherduck_token=geheim9", "duckdb:///x.duckdb"),
        ("sqlite:////data/a@b.db?key=geheim9", "sqlite:////data/a@b.db"),
        ("jsonl:log?rotate_bytes=1MB", "jsonl:log"),
        ("delta:/lake/a@b", "delta:/lake/a@b"),
        ("parquet:///lake", "parquet:///lake"),
        ("webhook+https://u:geheim9@HOST:8443/in?key=geheim9#geheim9", "webhook+https://HOST:8443/in"),
        ("webhook+https://HOST", "webhook+https://HOST"),
        ("webhook+https://HOST/api/v2/order-changed", "webhook+https://HOST/api/v2/order-changed"),
        ("webhook+https://HOST/services/T0/B0/geheim9", "webhook+https://HOST/services/***/***/***"),
        ("webhook+https://HOST/geheim9", "webhook+https://HOST/***"),
        ("echo:", "echo:"),
    ],
)
def test_it_tells_where_a_url_leads_and_nothing_else(url: str, told: str) -> None:
    assert shown(url) == told
    assert shown(told) == told


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:ge/heim9@HOST/shop",
        "mysql+pymysql://u:pa?geheim9@HOST/shop",
        "mysql://u:geheim9@x@HOST/shop",
        "mysql://u:12#geheim9@HOST/shop",
        "postgresql://u:12/geheim9@HOST/shop",
        "postgresql://HOST:geheim9/shop",
        "postgresql:geheim9",
        "webhook+https://u:12/geheim9@HOST/in",
        "jsonl://u:geheim9@HOST/log",
        "delta:s3://key:geheim9@bucket/lake",
        "redis://u:geheim9@HOST/0",
        "u:geheim9@HOST/shop",
    ],
)
def test_of_a_url_that_can_be_read_in_two_ways_it_tells_the_scheme_alone(url: str) -> None:
    assert shown(url).startswith(url.partition(":")[0] + ":")
    assert shown(url).endswith("***")
    assert "heim9" not in shown(url)
    assert "12" not in shown(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:geheim9@HOST/shop",
        "postgresql://u:geh%65im9@HOST/shop",
        "postgresql://HOST/shop?user=u&password=geheim9",
        "postgresql://HOST/shop?sslpassword=geheim9",
        "mysql://u:geheim9/geheim9@HOST/shop",
        "mysql://u:pa?geheim9@HOST/shop",
        "mysql://u:geheim9@x@HOST/shop",
        "nats://geheim9@HOST/SHOP",
        "duckdb:///x?motherduck_token=geheim9",
        "webhook+https://HOST/in?key=geheim9",
        "webhook+https://HOST/services/T0/B0/geheim9",
    ],
)
def test_it_knows_what_nobody_should_read_as_it_stands_there_and_as_it_is_meant(url: str) -> None:
    words = f"could not open {url}, {unquote(url)} with geheim9"
    for secret in url_secrets(url):
        words = words.replace(secret, "***")
    assert SECRET not in words


@pytest.mark.parametrize(
    "url",
    [
        "",
        "echo:",
        "postgresql://user@HOST:5432/shop?sslmode=require&keepalives=1",
        "mysql://HOST/shop?charset=utf8mb4",
        "sqlite:////data/a:b@c.db",
        "jsonl:log?rotate_bytes=64MB",
        "nats://HOST/SHOP",
        "webhook+https://HOST/api/v2/order-changed?v=2",
    ],
)
def test_where_nothing_is_secret_it_finds_nothing(url: str) -> None:
    assert url_secrets(url) == ()


def test_the_longest_secret_comes_first_so_that_nothing_of_it_is_left() -> None:
    found = url_secrets("postgresql://u:ge@HOST/shop?sslpassword=geheim")
    assert found == ("geheim", "ge")


def test_a_target_is_known_by_the_name_an_older_dbsync_gave_it() -> None:
    assert is_same("postgresql://HOST/shop", "postgresql://HOST/shop")
    assert is_same("postgresql://HOST/shop?user=u&password=geheim9", "postgresql://HOST/shop")
    assert is_same("mine:Target", "mine:Target")
    assert not is_same("postgresql://HOST/other", "postgresql://HOST/shop")
    assert not is_same("mine:Target", "yours:Target")


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ("postgresql://HOST/shop", "postgresql://HOST/shop"),
        ("postgresql://HOST/shop?user=u&password=geheim9", "postgresql://HOST/shop"),
        ("mysql://u:ge/heim9@HOST/shop", "mysql:***"),
        ("mine:Target", "mine:Target"),
        ("jsonl:log", "jsonl:log"),
    ],
)
def test_a_name_an_older_dbsync_gave_is_told_without_what_it_should_not_have_held(stored: str, told: str) -> None:
    assert recalled(stored) == told
