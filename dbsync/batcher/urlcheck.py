"""Whether a target's URL can be meant as it is written; if not, what is wrong with it and what to write.

What takes the URL would find out too, but late, by an error of its own, or never: it makes a folder called `s3:`, or
passes over an option. So it is said before anything is made. No sentence shows a value of the URL: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_plus

from dbsync.errors import ConfigError
from dbsync.targeturl import address, is_ambiguous, is_url, scheme_of, shown

Check = Callable[[str, str], None]  # of a URL, by the form it should have

_PORTS = range(1, 65536)


def check_driver(url: str, form: str, drivers: tuple[str, ...]) -> None:
    """SQLAlchemy's URLs may name a driver, and dbsync has its own."""
    scheme, driver = scheme_of(url)
    if driver and driver not in drivers:
        raise ConfigError(
            f"A target like {form} does not go through {driver}.",
            f"Write {scheme}:…, without +{driver}: dbsync has a driver of its own.",
        )


def check_nothing_behind(url: str, form: str) -> None:
    if url not in (form, f"{form}//"):
        raise ConfigError(f"The target {form} takes nothing behind it.", f"Write {form}, or name another target.")


def check_folder(url: str, form: str) -> None:
    path = url.partition(":")[2].partition("?")[0]
    if not path or re.match("//(?!/)", path):
        raise ConfigError(
            f"The target {shown(url)} names no folder.",
            f"Write {form}; DIR is a path, relative or from its first / on.",
        )
    _check_path(path, form, "folder")


def check_file(url: str, form: str) -> None:
    scheme, _, rest = url.partition(":")
    path = rest.partition("?")[0].removeprefix("///")
    if not rest.startswith("///") or not path:
        raise ConfigError(
            f"The target's URL, {scheme}:…, names no file.",
            f"Write {form}, with three slashes before a relative path and four before an absolute one.",
        )
    if path.startswith(":memory:"):
        raise ConfigError(f"The target {shown(url)} is in memory, and would be gone with dbsync.", f"Write {form}.")
    _check_path(path, form, "file")
    if Path(path).is_dir():
        raise ConfigError(f"The target {shown(url)} is a folder, not a file.", f"Write {form}.")
    _check_options(url, form, {})


def check_server(url: str, form: str) -> None:
    scheme, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise ConfigError(
            f"A target like {form} is named by a URL, and what follows {scheme}: is not written as one.",
            f"Write {form}.",
        )
    if is_ambiguous(url):
        raise ConfigError(
            f"The target's URL, {scheme}:…, can be read in more than one way: an @ stands behind a /, ?, # or @ in it.",
            "In a user, a password, a path or an option write %40 for @, %2F for /, %3F for ? and %23 for #.",
        )
    login_and_place = re.split("[/?#]", rest.removeprefix("//"), maxsplit=1)[0]
    for host in login_and_place.rpartition("@")[2].split(","):
        _check_host(scheme, host, form)


def check_mysql(url: str, form: str) -> None:
    check_server(url, form)
    found = address(url)
    if found is None or not found.path:
        raise ConfigError(f"The target's URL, {scheme_of(url)[0]}:…, names no database.", f"Write {form}.")
    _check_options(url, form, _MYSQL_OPTIONS)


def check_stream(url: str, form: str) -> None:
    check_server(url, form)
    _check_options(url, form, {})


def _check_path(path: str, form: str, what: str) -> None:
    if is_url(path):
        raise ConfigError(
            f"Behind {form.partition(':')[0]}: comes a path, and {path.partition(':')[0]}:… is no path.",
            f"Write {form}, with a {what} of this machine: a path, relative or from its first / on.",
        )
    if path.startswith("~"):
        raise ConfigError(
            "The path of the target begins with ~, which only a shell understands.", "Write the path in full."
        )


def _check_host(scheme: str, host: str, form: str) -> None:
    found = re.fullmatch(r"(?:[\w.~%-]*|\[[\w.:%]*\])(?::(.*))?", host)
    if found is None:
        raise ConfigError(f"The target's URL, {scheme}:…, has a host that is none.", f"Write {form}.")
    port = found[1]
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and int(port) in _PORTS):
        raise ConfigError(
            f"The target's URL, {scheme}:…, has a port that is none.",
            "Behind the host comes nothing, or a colon and a number from 1 to 65535.",
        )


@dataclass(frozen=True, slots=True)
class _Option:
    """What an option takes, in words and as a question."""

    takes: str
    accepts: Callable[[str], bool]


def _check_options(url: str, form: str, known: Mapping[str, _Option]) -> None:
    seen: set[str] = set()
    for text in filter(None, url.partition("?")[2].partition("#")[0].split("&")):
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"The target's URL, {scheme_of(url)[0]}:…, has an option without a value.", _OPTIONS)
        if name not in known:
            # What is no name may be a piece of a password.
            which = name if re.fullmatch(r"[a-z_]{1,40}", name) else "that stands in its URL"
            raise ConfigError(
                f"A target like {form} does not take the option {which}.", f"It takes {', '.join(known) or 'none'}."
            )
        if name in seen:
            raise ConfigError(f"The target's URL gives the option {name} twice.", f"Give {name} once.")
        seen.add(name)
        if not known[name].accepts(unquote_plus(value)):
            raise ConfigError(
                f"In the target's URL the option {name} cannot be used: it takes {known[name].takes}.",
                "Give it such a value, or leave it out.",
            )


_OPTIONS = "Options are written ?name=value&name=value."

_TEXT = _Option("text", bool)
_A_FILE = _Option("the path of a file", lambda text: Path(text).is_file())
_A_FOLDER = _Option("the path of a folder", lambda text: Path(text).is_dir())
_SECONDS = _Option("a whole number of seconds", lambda text: re.fullmatch("[1-9][0-9]{0,6}", text) is not None)
_YES_OR_NO = _Option("true or false", lambda text: text in ("true", "false"))
_YES = _Option("true", lambda text: text == "true")  # as any text is to PyMySQL, "false" too

# Of those that PyMySQL and SQLAlchemy know, what does not get in the way of dbsync's own. Beside SQLAlchemy's `ssl_ca`,
# which alone has certificate and name verified, PyMySQL's `ssl_verify_…` would make it forget the authority.
_MYSQL_OPTIONS: Mapping[str, _Option] = {
    "charset": _Option("utf8mb4", lambda text: text == "utf8mb4"),
    "password": _TEXT,
    "read_default_file": _A_FILE,
    "read_default_group": _TEXT,
    "read_timeout": _SECONDS,
    "ssl_ca": _A_FILE,
    "ssl_capath": _A_FOLDER,
    "ssl_cert": _A_FILE,
    "ssl_check_hostname": _YES_OR_NO,
    "ssl_cipher": _TEXT,
    "ssl_disabled": _YES,
    "ssl_key": _A_FILE,
    "unix_socket": _TEXT,
    "user": _TEXT,
    "write_timeout": _SECONDS,
}
