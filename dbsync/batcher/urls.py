"""From a URL to the Batcher that keeps what it names in step.

Every target of dbsync's own is a class with `from_url(url, options)` in a file of its own, imported when its URL is
used. What a target needs beyond dbsync's own packages is an extra; where that is missing, one sentence says so.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from dbsync.batcher.base import Batcher
from dbsync.batcher.urlcheck import (
    Check,
    check_driver,
    check_file,
    check_folder,
    check_mysql,
    check_nothing_behind,
    check_server,
    check_stream,
)
from dbsync.config import Settings
from dbsync.errors import ConfigError
from dbsync.targeturl import scheme_of


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a target can be told beside its URL."""

    soft_delete: bool = False  # a deleted row stays, with the time in `_deleted_at`
    drop_columns: bool = False  # drop what the source has dropped, in place of leaving it NULL
    secret: str | None = None  # signs what is sent


class _Target(Protocol):
    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> Batcher: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of target: how its URLs look, which class keeps it in step, what that class needs."""

    form: str
    schemes: tuple[str, ...]
    target: str  # module:class
    check: Check
    package: str | None = None  # what is imported, where it is not one of dbsync's own packages
    extra: str | None = None  # of dbsync's, with that package
    drivers: tuple[str, ...] = ()  # that a URL of SQLAlchemy's may name
    has_tables: bool = False


KINDS: tuple[Kind, ...] = (
    Kind("echo:", ("echo",), "echo:EchoBatcher", check_nothing_behind),
    Kind("jsonl:DIR", ("jsonl",), "jsonl:JsonlBatcher", check_folder),
    Kind("parquet:DIR", ("parquet",), "parquet:ParquetBatcher", check_folder),
    Kind("delta:DIR", ("delta",), "delta:DeltaBatcher", check_folder, "deltalake", "delta", has_tables=True),
    Kind("duckdb:///FILE", ("duckdb",), "duckdb:DuckDBBatcher", check_file, "duckdb", "duckdb", has_tables=True),
    Kind(
        "postgresql://HOST/DATABASE",
        ("postgresql", "postgres"),
        "postgres:PostgresBatcher",
        check_server,
        drivers=("psycopg", "psycopg2"),
        has_tables=True,
    ),
    Kind("sqlite:///FILE", ("sqlite",), "sql:SqlBatcher", check_file, drivers=("pysqlite",), has_tables=True),
    Kind(
        "mysql://HOST/DATABASE",
        ("mysql", "mariadb"),
        "sql:SqlBatcher",
        check_mysql,
        "pymysql",
        "mysql",
        drivers=("pymysql",),
        has_tables=True,
    ),
    Kind(
        "webhook+https://HOST/PATH",
        ("webhook+https", "webhook+http"),
        "webhook:WebhookBatcher",
        check_server,
        "httpx",
        "webhook",
    ),
    Kind("nats://HOST/STREAM", ("nats", "tls"), "nats:NatsBatcher", check_stream, "nats", "nats"),
)


def open_target(settings: Settings) -> Batcher:
    """The Batcher for the target the settings name; what cannot be used is said before anything is touched."""
    url = settings.to or "echo:"
    kind = _kind(url)
    check_driver(url, kind.form, kind.drivers)
    kind.check(url, kind.form)
    for name in ("soft_delete", "drop_columns"):
        if getattr(settings, name) and not kind.has_tables:
            raise ConfigError(
                f"{name} was asked for, but a target like {kind.form} has no tables: it is told of what happened.",
                f"Leave out --{name.replace('_', '-')} and its variable, or name a database.",
            )
    options = TargetOptions(settings.soft_delete, settings.drop_columns, settings.webhook_secret)
    return _load(kind).from_url(url, options)


def _kind(url: str) -> Kind:
    scheme, _ = scheme_of(url)
    for kind in KINDS:
        if scheme in kind.schemes:
            return kind
    raise ConfigError(
        f"The target {url.partition(':')[0]}:… is of a kind that dbsync does not know.",
        "Its databases are PostgreSQL, SQLite, MySQL, MariaDB and DuckDB; a target is written"
        f" {', '.join(kind.form for kind in KINDS)}; for anything else there is --batcher.",
    )


def _load(kind: Kind) -> type[_Target]:
    if kind.package is not None:
        try:
            importlib.import_module(kind.package)
        except ImportError as error:
            raise missing_extra(f"A target like {kind.form}", kind.package, kind.extra or kind.package) from error
    module, _, name = kind.target.partition(":")
    return cast("type[_Target]", getattr(importlib.import_module(f"dbsync.batcher.{module}"), name))


def missing_extra(what: str, package: str, extra: str) -> ConfigError:
    return ConfigError(f"{what} needs the package {package}, which is not installed.", f"pip install 'dbsync[{extra}]'")
