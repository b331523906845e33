"""A target's URL, read with distrust: where it leads, and what in it nobody should read.

What is told of a URL (`shown`) is made only of what cannot be secret: the scheme, host and port, the database, stream,
file or folder, and those words of a webhook's path that are words. All else is left out, because a mask would have to
know everything it has to hide. Where a URL can be read in more than one way (a password with a slash in it), nothing is
told but its scheme: what one reading takes for a host is a part of the password in another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, unquote_plus

MASK = "***"

FOLDERS = ("jsonl", "parquet", "delta")
FILES = ("sqlite", "duckdb")
DATABASES = ("postgresql", "postgres", "mysql", "mariadb")
STREAMS = ("nats", "tls")
WEBHOOKS = ("webhook+https", "webhook+http")

_LONG_ENOUGH = 6  # a shorter piece of a webhook's URL is a setting, and may be part of any word

_HOST = r"(?:[\w.~%-]*|\[[\w.:%]*\])(?::\d*)?"
_PLACE = rf"{_HOST}(?:,{_HOST})*"
_ADDRESS = re.compile(
    rf"[^:]+://(?:[^@/?#]*@)?(?P<place>{_PLACE})(?:/(?P<path>[^@?#]*))?(?:\?(?P<query>[^@#]*))?(?:#[^@]*)?"
)

# As the drivers find it: up to the last @ before a slash, up to the first @ wherever it is, up to the last of all.
_PASSWORDS = (r"[^:/?#]+://[^/?#@]*?:([^/?#]*)@", r"[^:/?#]+://[^:/@]*:([^@]*)@", r"[^:/?#]+://[^:/@]*:(.*)@")
_TOKEN = r"(?:nats|tls)://([^/?#@:]+)@"
_SECRET_NAMES = re.compile(r"pass|pwd|secret|token|key|cred|sig", re.IGNORECASE)

# Options of a database's URL that say where it is. What has an equals sign in it, %3D, may hold options of its own.
_WHERE = re.compile(r"(?:host|hostaddr|port|dbname|service|unix_socket)=(?:[\w./:,~-]|%(?!3[Dd]))*")
_DATABASE = re.compile(r"(?:[\w.~$+ -]|%(?!3[Dd]))*")

_WORD = re.compile(r"[A-Z]?[a-z]{1,15}(?:[._-][a-z]{1,15}){0,3}|v\d{1,2}|\d{1,4}|")


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of `scheme://login@place/path?query` that lead somewhere."""

    place: str  # host:port, or several with commas between them
    path: str
    query: str


def scheme_of(url: str) -> tuple[str, str]:
    """The scheme and, where one stands behind a plus sign, the driver."""
    scheme = url.partition(":")[0]
    if scheme in WEBHOOKS:
        return scheme, ""
    name, _, driver = scheme.partition("+")
    return name, driver


def is_url(path: str) -> bool:
    """Whether what should be a path begins with a scheme."""
    return re.match(r"[A-Za-z][\w+.-]*:", path) is not None


def address(url: str) -> Address | None:
    """None where there is more than one way to read it, or none."""
    found = _ADDRESS.fullmatch(url)
    return Address(found["place"], found["path"] or "", found["query"] or "") if found else None


def is_ambiguous(url: str) -> bool:
    """Whether an @ stands where it leaves open which part of the URL is the password."""
    return re.search(r"[@/?#].*@", url.partition("://")[2], re.DOTALL) is not None


def shown(url: str) -> str:
    """Where the URL leads, in a form that may be stored, logged and read by anybody; the same for the same place."""
    written, _, rest = url.partition(":")
    scheme, _ = scheme_of(url)
    where = rest.partition("?")[0]
    if scheme == "echo":
        return "echo:"
    if scheme in FOLDERS and not re.match("//(?!/)", where):
        return f"{written}:{shown(where) if is_url(where) else where}"
    if scheme in FILES and where.startswith("///"):
        return f"{written}:{where}"
    if scheme in (*DATABASES, *STREAMS, *WEBHOOKS) and (found := address(url)):
        return f"{written}://{found.place}{_path(scheme, found.path)}{_options(scheme, found.query)}"
    return f"{written}:{MASK}"


def shown_path(path: str) -> str:
    """The path of a webhook, often all that keeps others out: words are shown, and what is none may be a key."""
    return "/".join(part if _WORD.fullmatch(part) else MASK for part in path.split("/"))


def url_secrets(url: str | None) -> tuple[str, ...]:
    """What nobody should read of the URL, as it stands there and as it is meant; the longest first, so that taking one
    out leaves nothing of another."""
    written = {*_login_secrets(url), *_option_secrets(url), *_path_secrets(url)} if url else set()
    meant = {read(secret) for secret in written for read in (unquote, unquote_plus)}
    return tuple(sorted((written | meant) - {""}, key=lambda secret: (-len(secret), secret)))


def recalled(stored: str) -> str:
    """A target's name as it was stored, perhaps by a dbsync that told more of a URL; or a class of the user's."""
    return shown(stored) if "://" in stored else stored


def is_same(stored: str, now: str) -> bool:
    """Whether what was stored is the target that is called `now`."""
    return recalled(stored) == now


def _path(scheme: str, path: str) -> str:
    if not path:
        return ""
    if scheme in WEBHOOKS:
        return f"/{shown_path(path)}"
    return f"/{path if _DATABASE.fullmatch(path) else MASK}"


def _options(scheme: str, query: str) -> str:
    where = [option for option in query.split("&") if scheme in DATABASES and _WHERE.fullmatch(option)]
    return f"?{'&'.join(where)}" if where else ""


def _login_secrets(url: str) -> set[str]:
    found = {matched[1] for form in (*_PASSWORDS, _TOKEN) if (matched := re.match(form, url, re.DOTALL))}
    if not is_ambiguous(url):
        return found
    return found | {piece for text in found for piece in re.split(r"[/?#@:]", text) if len(piece) >= _LONG_ENOUGH}


def _option_secrets(url: str) -> set[str]:
    options = re.findall(r"[?&]([^=&#]*)=([^&#]*)", url)
    if scheme_of(url)[0] not in WEBHOOKS:
        return {value for name, value in options if _SECRET_NAMES.search(name)}
    query = url.partition("?")[2].partition("#")[0]
    return {text for text in (query, *(value for _, value in options)) if len(text) >= _LONG_ENOUGH}


def _path_secrets(url: str) -> set[str]:
    found = address(url) if scheme_of(url)[0] in WEBHOOKS else None
    if found is None or shown_path(found.path) == found.path:
        return set()
    hidden = {part for part in found.path.split("/") if not _WORD.fullmatch(part)}
    return {part for part in (found.path, *hidden) if len(part) >= _LONG_ENOUGH}
