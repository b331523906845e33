"""From a URL to the Batcher that keeps what it names in step.

Every target of dbsync's own is a class with `from_url(url, options)` in a file of its own, imported when its URL is
used. What a target needs beyond dbsync's own packages is an extra; where that is missing, one sentence says so.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from dbsync.batcher.base import Batcher
from dbsync.config import Settings
from dbsync.errors import ConfigError


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
    package: str | None = None  # what is imported, where it is not one of dbsync's own packages
    extra: str | None = None  # of dbsync's, with that package
    has_tables: bool = False


KINDS: tuple[Kind, ...] = (
    Kind("echo:", ("echo",), "echo:EchoBatcher"),
    Kind("jsonl:DIR", ("jsonl",), "jsonl:JsonlBatcher"),
    Kind("parquet:DIR", ("parquet",), "parquet:ParquetBatcher"),
    Kind("delta:DIR", ("delta",), "delta:DeltaBatcher", "deltalake", "delta", has_tables=True),
    Kind("duckdb:///FILE", ("duckdb",), "duckdb:DuckDBBatcher", "duckdb", "duckdb", has_tables=True),
    Kind("postgresql://…", ("postgresql", "postgres"), "postgres:PostgresBatcher", has_tables=True),
    Kind("sqlite:///FILE", ("sqlite",), "sql:SqlBatcher", has_tables=True),
    Kind("mysql://…", ("mysql",), "sql:SqlBatcher", "pymysql", "mysql", has_tables=True),
    Kind("mariadb://…", ("mariadb",), "sql:SqlBatcher", "pymysql", "mysql", has_tables=True),
    Kind("webhook+https://…", ("webhook+https", "webhook+http"), "webhook:WebhookBatcher", "httpx", "webhook"),
    Kind("nats://HOST/STREAM", ("nats", "tls"), "nats:NatsBatcher", "nats", "nats"),
)


def open_target(settings: Settings) -> Batcher:
    """The Batcher for the target the settings name; what cannot be used is said before anything is touched."""
    url = settings.to or "echo:"
    kind = _kind(url)
    for name in ("soft_delete", "drop_columns"):
        if getattr(settings, name) and not kind.has_tables:
            raise ConfigError(
                f"{name} was asked for, but a target like {kind.form} has no tables: it is told of what happened.",
                f"Leave out --{name.replace('_', '-')} and its variable, or name a database.",
            )
    options = TargetOptions(settings.soft_delete, settings.drop_columns, settings.webhook_secret)
    return _load(kind).from_url(url, options)


def _kind(url: str) -> Kind:
    scheme = url.partition(":")[0].lower()
    # SQLAlchemy names the driver behind a plus sign: postgresql+psycopg.
    for name in (scheme, scheme.partition("+")[0]):
        for kind in KINDS:
            if name in kind.schemes:
                return kind
    raise ConfigError(
        f"The target {scheme}:… is of a kind that dbsync does not know.",
        f"It knows {', '.join(kind.form for kind in KINDS)}; for anything else there is --batcher.",
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
