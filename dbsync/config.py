"""The settings, read once and checked at the start.

What is wrong is said before anything is touched: one sentence with the variable, its value and what it takes. What is
not set about the connection is left to libpq (`PG*`, the service file, `.pgpass`). Passwords are never shown: not by
`repr`, not by an error, not by `describe`. `Settings` is frozen and can be pickled.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dbsync import targeturl
from dbsync.errors import ConfigError
from dbsync.targeturl import MASK
from dbsync.targeturl import url_secrets as url_secrets

APPLICATION_NAME = "dbsync"
CONNECT_TIMEOUT_SECONDS = 10
_PASSWORD = "POSTGRES_PASSWORD"
_PASSWORD_FILE = "POSTGRES_PASSWORD_FILE"
_NAME_BYTES = 63
_MOST_ROWS = 2**31 - 1  # what the refresh table's integer holds
_SHOWN_CHARACTERS = 100
_NEAR_ENOUGH = 0.65  # so that what Kubernetes sets for a service called dbsync is not taken for a mistake
_BYTE_UNITS = {"": 1, "B": 1, "kB": 1024, "MB": 1024**2, "GB": 1024**3}


@dataclass(frozen=True, slots=True)
class Variable:
    """One field of `Settings`: the environment variables it comes from (first hit wins), and what it is for."""

    field: str
    names: tuple[str, ...]
    default: str
    takes: str
    help: str
    accept: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    secret: bool = False

    @property
    def is_yes_or_no(self) -> bool:
        return self.parse is _parse_flag

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value the environment has for this field, or None. An empty variable counts as unset."""
        for name in self.names:
            if text := environ.get(name):
                return self._usable(name, text, lambda text: self.accept(self.parse(text)))
        return None

    def check(self, value: Any) -> Any:
        """The value as the field keeps it, or a ConfigError."""
        return self._usable(self.field, value, self.accept)

    def _usable(self, name: str, value: Any, take: Callable[[Any], Any]) -> Any:
        try:
            return take(value)
        except (ValueError, TypeError, KeyError, psycopg.ProgrammingError):
            # The cause is cut off: libpq's complaint about a connection string quotes parts of it.
            raise ConfigError(
                f"{name}={self._shown(value)} cannot be used: it takes {self.takes}.",
                f"Give {name} such a value, or leave it out.",
            ) from None

    def _shown(self, value: object) -> str:
        # A URL in the wrong variable, or what was meant to be one, may carry a password.
        if self.secret or "://" in str(value) or "@" in str(value):
            return MASK
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _integer(least: int, most: float = math.inf) -> Callable[[Any], int]:
    def accept(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return accept


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError
    return float(value)


def _times(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError
    return float(value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def accept(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return accept


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value


def _password(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError
    return value


def _plain_text(value: Any) -> str:
    if "://" in _text(value):
        raise ValueError
    return str(value)


def _dsn(value: Any) -> str:
    conninfo_to_dict(_text(value))
    return str(value)


def _name(value: Any) -> str:
    if len(_text(value).encode()) > _NAME_BYTES:
        raise ValueError
    return str(value)


def _schema_name(value: Any) -> str:
    # PostgreSQL keeps this prefix for itself.
    if _name(value).startswith("pg_"):
        raise ValueError
    return str(value)


def _slot_name(value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", value):
        raise ValueError
    return str(value)


def _target(value: Any) -> str:
    if not re.match(r"[a-z][a-z0-9+._-]*:", _text(value)):
        raise ValueError
    return str(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _patterns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(re.fullmatch(r"\S(.*\S)?", pattern) for pattern in value):
        raise ValueError
    return tuple(value)


def _path(value: Any) -> Path:
    if isinstance(value, str):
        _text(value)
    return Path(value)


def parse_bytes(text: str) -> int:
    matched = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    if not matched or matched[2] not in _BYTE_UNITS:
        raise ValueError
    return int(matched[1]) * _BYTE_UNITS[matched[2]]


def _parse_flag(text: str) -> bool:
    return {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}[
        text.strip().lower()
    ]


def _parse_patterns(text: str) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in text.split(","))


_LIBPQ = "what libpq decides"
_A_NAME = f"a name of 1 to {_NAME_BYTES} bytes"
_A_COUNT = "a whole number from 1"
_SOME_SECONDS = "a number of seconds above 0"
_YES_OR_NO = "true or false"
_COLUMN_PATTERNS = "schema.table.column, with * for any of it, several with commas between them"

ENVIRONMENT: tuple[Variable, ...] = (
    Variable(
        "dsn",
        ("POSTGRES_CONNSTR",),
        default="made of the parts",
        takes="a libpq connection string or URL",
        help="connection string; wins over the parts",
        accept=_dsn,
        secret=True,
    ),
    Variable(
        "host",
        ("POSTGRES_HOST",),
        default=_LIBPQ,
        takes="a host name, an address or a socket's folder",
        help="host",
        accept=_plain_text,
    ),
    Variable(
        "port",
        ("POSTGRES_PORT",),
        default=_LIBPQ,
        takes="a whole number from 1 to 65535",
        help="port",
        accept=_integer(1, 65535),
        parse=int,
    ),
    Variable(
        "dbname",
        ("POSTGRES_DB",),
        default=_LIBPQ,
        takes="the name of a database (a URL goes into POSTGRES_CONNSTR)",
        help="database",
        accept=_plain_text,
    ),
    Variable(
        "user",
        ("POSTGRES_USER",),
        default=_LIBPQ,
        takes="the name of a role",
        help="role",
        accept=_plain_text,
    ),
    Variable(
        "password",
        (_PASSWORD, _PASSWORD_FILE),
        default=_LIBPQ,
        takes="text without NUL, or a file that holds it",
        help="password, or the file that holds it",
        accept=_password,
        secret=True,
    ),
    Variable(
        "ctrl_namespace",
        ("DBSYNC_CTRL_NAMESPACE", "DEFAULT_DBSYNC_CTRL_NAMESPACE"),
        default="dbsync_ctrl",
        takes=f"{_A_NAME} that does not start with pg_",
        help="schema for what dbsync keeps in the source",
        accept=_schema_name,
    ),
    Variable(
        "wm_table",
        ("DBSYNC_WM_TABLENAME", "DEFAULT_DBSYNC_WM_TABLENAME"),
        default="dbsync_wmtable",
        takes=_A_NAME,
        help="watermark table in that schema",
        accept=_name,
    ),
    Variable(
        "publication",
        ("DBSYNC_PUBNAME", "DEFAULT_DBSYNC_PUBNAME"),
        default="dbsync_mypub",
        takes=_A_NAME,
        help="publication to follow; it is yours and must exist",
        accept=_name,
    ),
    Variable(
        "slot",
        ("DBSYNC_REPLSLOT", "DEFAULT_DBSYNC_REPLSLOT"),
        default="dbsync_replslot",
        takes="1 to 63 of the characters a-z, 0-9 and _",
        help="replication slot",
        accept=_slot_name,
    ),
    Variable(
        "spark_master",
        ("DBSYNC_SPARK_MASTER",),
        default="local[*]",
        takes="a Spark master, like local[*] or spark://host:7077",
        help="Spark master",
        accept=_text,
    ),
    Variable(
        "spool_dir",
        ("DBSYNC_SPOOL_DIR",),
        default="a private temporary folder",
        takes="the path of a folder",
        help="where a batch waits on disk; on a cluster a folder that all executors see",
        accept=_path,
    ),
    Variable(
        "batch_events",
        ("DBSYNC_BATCH_EVENTS",),
        default="500000",
        takes=_A_COUNT,
        help="a batch ends at this many changes",
        accept=_integer(1),
        parse=int,
    ),
    Variable(
        "batch_bytes",
        ("DBSYNC_BATCH_BYTES",),
        default="128MB",
        takes="a number of bytes from 1, plain or with kB, MB or GB",
        help="a batch ends at this size",
        accept=_integer(1),
        parse=parse_bytes,
    ),
    Variable(
        "batch_seconds",
        ("DBSYNC_BATCH_SECONDS",),
        default="0.1",
        takes=_SOME_SECONDS,
        help="a batch ends after this time",
        accept=_seconds,
        parse=float,
    ),
    Variable(
        "chunk_rows",
        ("DBSYNC_CHUNK_ROWS",),
        default="100000",
        takes=f"{_A_COUNT} to {_MOST_ROWS}",
        help="rows a refresh reads at a time",
        accept=_integer(1, _MOST_ROWS),
        parse=int,
    ),
    Variable(
        "chunk_parallelism",
        ("DBSYNC_CHUNK_PARALLELISM",),
        default="2",
        takes=_A_COUNT,
        help="readers of a refresh side by side",
        accept=_integer(1),
        parse=int,
    ),
    Variable(
        "chunk_rest",
        ("DBSYNC_CHUNK_REST",),
        default="3",
        takes="a number from 0",
        help="while the source is at work, a refresh rests this many times as long as it reads",
        accept=_times,
        parse=float,
    ),
    Variable(
        "snapshot",
        ("DBSYNC_SNAPSHOT",),
        default="never",
        takes="initial or never",
        help="initial: copy each published table once; never: follow changes only",
        accept=_one_of("initial", "never"),
    ),
    Variable(
        "keyless",
        ("DBSYNC_KEYLESS",),
        default="append where the Batcher can, else error",
        takes="error, append or skip",
        help="changes of tables without a key: append makes each a document, error and skip leave them out",
        accept=_one_of("error", "append", "skip"),
    ),
    Variable(
        "retries",
        ("DBSYNC_RETRIES",),
        default="5",
        takes="a whole number from 0",
        help="how often what failed is tried again",
        accept=_integer(0),
        parse=int,
    ),
    Variable(
        "retry_seconds",
        ("DBSYNC_RETRY_SECONDS",),
        default="0.5",
        takes=_SOME_SECONDS,
        help="the first pause before trying again; it doubles, up to 30 seconds",
        accept=_seconds,
        parse=float,
    ),
    Variable(
        "to",
        ("DBSYNC_TO",),
        default="echo:",
        takes="the URL of a target, like duckdb:///shop.duckdb or echo:",
        help="the target; one that holds a password belongs into the variable",
        accept=_target,
    ),
    Variable(
        "target_schema",
        ("DBSYNC_TARGET_SCHEMA",),
        default="the source's",
        takes=_A_NAME,
        help="schema of the target's tables",
        accept=_name,
    ),
    Variable(
        "target_prefix",
        ("DBSYNC_TARGET_PREFIX",),
        default="none",
        takes=_A_NAME,
        help="what the target's tables are called begins with this",
        accept=_name,
    ),
    Variable(
        "include_columns",
        ("DBSYNC_INCLUDE_COLUMNS",),
        default="all",
        takes=_COLUMN_PATTERNS,
        help="columns to keep of the tables named here, schema.table.column; the key stays",
        accept=_patterns,
        parse=_parse_patterns,
    ),
    Variable(
        "exclude_columns",
        ("DBSYNC_EXCLUDE_COLUMNS",),
        default="none",
        takes=_COLUMN_PATTERNS,
        help="columns to leave out, schema.table.column, * for any",
        accept=_patterns,
        parse=_parse_patterns,
    ),
    Variable(
        "soft_delete",
        ("DBSYNC_SOFT_DELETE",),
        default="false",
        takes=_YES_OR_NO,
        help="a deleted row stays, with the time in _deleted_at",
        accept=_flag,
        parse=_parse_flag,
    ),
    Variable(
        "drop_columns",
        ("DBSYNC_DROP_COLUMNS",),
        default="false",
        takes=_YES_OR_NO,
        help="drop from the target's tables what the source has dropped, in place of leaving it NULL",
        accept=_flag,
        parse=_parse_flag,
    ),
    Variable(
        "webhook_secret",
        ("DBSYNC_WEBHOOK_SECRET",),
        default="none",
        takes="text",
        help="what signs the requests of a webhook target",
        accept=_password,
        secret=True,
    ),
)


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """Everything dbsync can be told. `Settings.from_env()` reads the environment; each field can also be given."""

    dsn: str | None = None
    host: str | None = None
    port: int | None = None
    dbname: str | None = None
    user: str | None = None
    password: str | None = None
    ctrl_namespace: str = "dbsync_ctrl"
    wm_table: str = "dbsync_wmtable"
    publication: str = "dbsync_mypub"
    slot: str = "dbsync_replslot"
    spark_master: str = "local[*]"
    spool_dir: Path | None = None
    batch_events: int = 500_000
    batch_bytes: int = 128 * 1024**2
    batch_seconds: float = 0.1
    chunk_rows: int = 100_000
    chunk_parallelism: int = 2
    chunk_rest: float = 3.0
    snapshot: str = "never"
    keyless: str | None = None
    retries: int = 5
    retry_seconds: float = 0.5
    to: str | None = None
    target_schema: str | None = None
    target_prefix: str | None = None
    include_columns: tuple[str, ...] | None = None
    exclude_columns: tuple[str, ...] | None = None
    soft_delete: bool = False
    drop_columns: bool = False
    webhook_secret: str | None = None

    def __post_init__(self) -> None:
        optional = {declared.name for declared in fields(self) if declared.default is None}
        for variable in ENVIRONMENT:
            value = getattr(self, variable.field)
            if value is not None or variable.field not in optional:
                object.__setattr__(self, variable.field, variable.check(value))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings the environment asks for, or a ConfigError that names what cannot be used."""
        environ = _with_password_file(environ)
        found = {variable.field: variable.read(environ) for variable in ENVIRONMENT}
        return cls(**{name: value for name, value in found.items() if value is not None})

    def conninfo(self, **extra: str | int) -> str:
        """The libpq string for these settings; `extra` parameters win over them."""
        parameters = self._parameters()
        parameters.setdefault("application_name", APPLICATION_NAME)
        if "connect_timeout" not in _libpq_defaults():
            parameters.setdefault("connect_timeout", CONNECT_TIMEOUT_SECONDS)
        return make_conninfo("", **{**parameters, **extra})

    def options(self) -> str:
        """The server options these settings or libpq's defaults carry already, to be added to and not replaced."""
        return str(self._known().get("options", ""))

    def describe(self) -> str:
        """Where the connection goes, for a person: `host:port/dbname as user`, as far as known, without secrets."""
        known = self._known()
        host = known.get("host") or known.get("hostaddr") or "local socket"
        user = known.get("user", "unknown role")
        return f"{host}:{known.get('port', 5432)}/{known.get('dbname', user)} as {user}"

    def mask(self, text: str) -> str:
        """The text without any secret of these settings."""
        if self.to is not None:
            text = text.replace(self.to, targeturl.shown(self.to))
        kept = (self.password, self.webhook_secret, *_secrets(self.dsn).values(), *url_secrets(self.to))
        # The longest first: what is left of a secret when a part of it is taken out tells too much.
        for secret in sorted(filter(None, kept), key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _parameters(self) -> dict[str, Any]:
        if self.dsn is not None:
            return dict(conninfo_to_dict(self.dsn))
        parts = {name: getattr(self, name) for name in ("host", "port", "dbname", "user", "password")}
        return {name: value for name, value in parts.items() if value is not None}

    def _known(self) -> dict[str, Any]:
        return {**_libpq_defaults(), **self._parameters()}

    def __repr__(self) -> str:
        shown = {variable.field: getattr(self, variable.field) for variable in ENVIRONMENT}
        for name in ("password", "webhook_secret"):
            if shown[name] is not None:
                shown[name] = MASK
        if self.to is not None:
            shown["to"] = targeturl.shown(self.to)
        if self.dsn is not None:
            shown["dsn"] = make_conninfo(self.dsn, **dict.fromkeys(_secrets(self.dsn), MASK))
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def mistyped(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are none of dbsync's but look as if they were meant to be, each with the one it is near to."""
    known = {name for variable in ENVIRONMENT for name in variable.names}
    unknown = [name for name, text in environ.items() if text and _is_ours(name) and name not in known]
    return {name: near for name in unknown if (near := _nearest(name))}


def _is_ours(name: str) -> bool:
    return name.upper().startswith(("DBSYNC_", "DEFAULT_DBSYNC_"))


def _nearest(name: str) -> str | None:
    prefix, _, rest = name.upper().partition("DBSYNC_")
    meant = dict(_meanings(f"{prefix}DBSYNC_"))
    # The prefix all of them share would make them all alike.
    found = difflib.get_close_matches(rest, meant, n=1, cutoff=_NEAR_ENOUGH)
    return meant[found[0]] if found else None


def _meanings(prefix: str) -> Iterator[tuple[str, str]]:
    """What may stand behind the prefix, and the variable that is meant by it: its name, or that of the flag."""
    for variable in ENVIRONMENT:
        for name in variable.names:
            if name.startswith(prefix):
                yield variable.field.upper(), name
                yield name.removeprefix(prefix), name


def _with_password_file(environ: Mapping[str, str]) -> Mapping[str, str]:
    path = environ.get(_PASSWORD_FILE)
    if not path:
        return environ
    if environ.get(_PASSWORD):
        raise ConfigError(
            f"{_PASSWORD} and {_PASSWORD_FILE}={path!r} are both set, and only one can be the password.",
            "Unset one of them.",
        )
    try:
        password = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_PASSWORD_FILE}={path!r} cannot be used: it takes a readable text file that holds the password.",
            "Check the path and who may read it.",
        ) from (error if isinstance(error, OSError) else None)
    return {**environ, _PASSWORD: password, _PASSWORD_FILE: ""}


def _secrets(dsn: str | None) -> dict[str, str]:
    """The parameters of a connection string that libpq itself would not show on a screen."""
    if dsn is None:
        return {}
    parsed = pq.Conninfo.parse(dsn.encode())
    return {option.keyword.decode(): option.val.decode() for option in parsed if option.val and option.dispchar == b"*"}


def _libpq_defaults() -> dict[str, str]:
    defaults = pq.Conninfo.get_defaults()
    return {option.keyword.decode(): os.fsdecode(option.val) for option in defaults if option.val}
