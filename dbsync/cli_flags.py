"""What the flags of the commands have in common: each names its variable, wins over it, and is checked like it.

Secrets have no flag, because a command line can be read by every user of the machine.
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dbsync.batcher import Batcher
from dbsync.config import ENVIRONMENT, Settings, Variable, mistyped
from dbsync.errors import ConfigError
from dbsync.handler import MessageHandler, MirrorHandler
from dbsync.targeturl import shown, url_secrets

if TYPE_CHECKING:
    from dbsync.syncer import Syncer

logger = logging.getLogger(__name__)

SOURCE = ("host", "port", "dbname", "user", "publication", "slot", "ctrl_namespace", "wm_table")
BATCHES = ("batch_events", "batch_bytes", "batch_seconds")
RUN = ("spark_master", "spool_dir", *BATCHES, "keyless", "retries", "retry_seconds")
CHUNKS = ("chunk_rows", "chunk_parallelism", "chunk_rest")
TARGET = (
    *("to", "target_schema", "target_prefix", "include_columns", "exclude_columns"),
    *("soft_delete", "drop_columns"),
)
# A Batcher of the user's is made without arguments, and hears of these no more than of the URL.
_NOT_FOR_BATCHERS = ("to", "soft_delete", "drop_columns")

SECRETS = """The password comes from POSTGRES_PASSWORD or POSTGRES_PASSWORD_FILE, a whole connection string from
POSTGRES_CONNSTR, what signs a webhook's requests from DBSYNC_WEBHOOK_SECRET. They have no flag: a command line can be
read by every user of the machine."""

INTERRUPTED = 130

_CONNECTION = frozenset({"host", "port", "dbname", "user"})
_METAVARS: dict[object, str] = {int: "NUMBER", float: "SECONDS", "chunk_rest": "TIMES"}

Function = TypeVar("Function", bound=Callable[..., Any])
Base = TypeVar("Base")


@dataclass(slots=True)
class Invocation:
    """What the flags said, and the settings they make together with the environment."""

    flags: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)  # the command's own, by their variables
    verbose: bool = False
    used: Settings | None = None

    def settings(self) -> Settings:
        """The environment's settings with the flags over them; a variable that a flag replaces is not even read."""
        replaced = {name for variable in ENVIRONMENT if variable.field in self.flags for name in variable.names}
        environ = {name: text for name, text in os.environ.items() if text and name not in replaced}
        found = Settings.from_env({**self.defaults, **environ})
        changes = dict(self.flags)
        if found.dsn is not None:
            parts = {name: changes.pop(name) for name in _CONNECTION & changes.keys()}
            changes["dsn"] = _dsn_with(found.dsn, parts)
        self.used = replace(found, **changes)
        return self.used

    def says(self, name: str) -> bool:
        """Whether a flag or a variable gives this setting, so that it is not the default by chance."""
        (variable,) = (variable for variable in ENVIRONMENT if variable.field == name)
        return name in self.flags or any(os.environ.get(one) for one in variable.names)

    def mistaken(self) -> list[str]:
        """A sentence for each variable that looks mistyped: it would be passed over without a word."""
        return [
            f"{name} is not a variable of dbsync's: is {near} meant?" for name, near in mistyped(os.environ).items()
        ]

    def mask(self, text: str) -> str:
        return self.used.mask(text) if self.used else text


def _dsn_with(dsn: str, parts: Mapping[str, Any]) -> str:
    known = conninfo_to_dict(dsn)
    if "host" in parts:
        # libpq connects to the address and only then looks at the host.
        known.pop("hostaddr", None)
    return make_conninfo("", **{**known, **parts})


def takes(*names: str, **defaults: str) -> Callable[[Function], Function]:
    """Give a command the flags of these settings; their values are checked like the variables'.

    `defaults` are settings too, with a default of the command's own.
    """

    def decorate(command: Function) -> Function:
        wanted = {*names, *defaults}
        for variable in reversed([variable for variable in ENVIRONMENT if variable.field in wanted]):
            command = _flag(variable, defaults.get(variable.field))(command)
        return command

    return decorate


def _flag(variable: Variable, default: str | None) -> Callable[[Function], Function]:
    name = flag_of(variable.field)
    as_flag = replace(variable, names=(name,))

    def keep(ctx: click.Context, _: click.Parameter, given: Any) -> None:
        invocation = ctx.ensure_object(Invocation)
        if default is not None:
            invocation.defaults[variable.names[-1]] = default
        value = as_flag.read({name: given}) if isinstance(given, str) else given
        if value is not None:
            invocation.flags[variable.field] = value

    return click.option(
        f"{name}/--no-{name.removeprefix('--')}" if variable.is_yes_or_no else name,
        variable.field,
        default=None,
        callback=keep,
        expose_value=False,
        metavar=None if variable.is_yes_or_no else _metavar(variable),
        help=f"{variable.help} [{', '.join(variable.names)}; default: {default or variable.default}]",
    )


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _metavar(variable: Variable) -> str:
    return _METAVARS.get(variable.field) or _METAVARS.get(variable.parse, "TEXT")


def verbose(command: Function) -> Function:
    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.ensure_object(Invocation).verbose = value

    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=keep,
        help="say more: a line for every batch, the traceback of an error",
    )(command)


json_flag = click.option("--json", "as_json", is_flag=True, help="one JSON object on stdout, for a program")


def target(command: Function) -> Function:
    """The flags that say who handles changes and where documents go."""
    handler = click.option(
        "--handler", metavar="MODULE:CLASS", help="a MessageHandler of yours; without it rows are mirrored"
    )
    batcher = click.option(
        "--batcher", metavar="MODULE:CLASS", help="a Batcher of yours, in place of a target that dbsync knows"
    )
    return takes(*TARGET)(handler(batcher(command)))


def make_syncer(invocation: Invocation, settings: Settings, handler: str | None, batcher: str | None) -> Syncer:
    from dbsync.syncer import Syncer

    if batcher:
        _keep_to_batcher(invocation, settings)
    if url_secrets(invocation.flags.get("to")):
        logger.warning(
            "--to holds what nobody should read, and every user of this machine can: put the URL into DBSYNC_TO."
        )
    # JSON is UTF-8 whatever the locale is.
    reconfigure(sys.stdout, encoding="utf-8")
    return Syncer(
        settings,
        handler=_make("--handler", handler, MessageHandler) if handler else MirrorHandler(),
        batcher=_make("--batcher", batcher, Batcher) if batcher else None,
    )


def _keep_to_batcher(invocation: Invocation, settings: Settings) -> None:
    """What would not reach the user's Batcher is refused where it was asked for, and told where it lies about."""
    asked = [name for name in _NOT_FOR_BATCHERS if getattr(settings, name)]
    flags = [flag_of(name) for name in asked if name in invocation.flags]
    if flags:
        raise ConfigError(
            f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} for targets that dbsync knows, and --batcher is"
            " one of your own.",
            "Leave one or the other out.",
        )
    variables = [name for variable in ENVIRONMENT if variable.field in asked for name in variable.names]
    if variables:
        logger.warning("What %s says is left out: --batcher is a target of your own.", ", ".join(variables))


def target_name(settings: Settings, batcher: str | None) -> str:
    """What the changes go to, whoever logs in there. It is stored in the source, and says nothing that is secret."""
    return batcher or shown(settings.to or "echo:")


def reconfigure(stream: Any, **how: str) -> None:
    # A test or an embedding program may have put something else in its place.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(**how)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")


def _make(flag: str, path: str, base: type[Base]) -> Base:
    """An instance of the class the user named; modules are also looked for in the working folder."""
    kind = _find_class(flag, path)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{flag} {path} is not a subclass of dbsync.{base.__name__}.", "Name one that is.")
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"{flag} {path} could not be made: it raised {one_line(error)}.", "dbsync makes it without arguments."
        ) from error


def _find_class(flag: str, path: str) -> object:
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"{flag} {path} cannot be used: it takes module:Class.", f"For example {flag} shop:Orders")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return operator.attrgetter(class_name)(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{flag} {path} cannot be found: there is no module {error.name}.",
                "Run dbsync in the folder that holds it, or install it.",
            ) from error
        raise _import_failed(flag, path, error) from error
    except AttributeError as error:
        module = sys.modules.get(module_name)
        if module is None or hasattr(module, class_name.partition(".")[0]):
            raise _import_failed(flag, path, error) from error
        raise ConfigError(
            f"{flag} {path} cannot be found: the module {module_name} has no {class_name}.", "Check its name."
        ) from error
    except Exception as error:
        raise _import_failed(flag, path, error) from error


def _import_failed(flag: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag} {path} cannot be imported: {one_line(error)}.", "See --verbose for where it happened.")
