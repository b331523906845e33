"""A web server that is told of what is now so, in POSTs of JSON. At least once.

A body holds changes of one type, bounded in number and size (a larger single one goes alone):

    {"type": …, "last_lsn": …, "log": …, "changes": [{"op": "upsert", "id": …, "doc": {…}}, …]}

or {"op": "delete", "id": …}, or the one change {"op": "truncate"}. `last_lsn` is where in the log `log` the batch ends,
as of which all of it holds. A batch is sent when the one before it has been taken, and its truncates, deletes and
upserts in this order; requests of one kind go out side by side, from the executors.

2xx takes a request. 429, 5xx, a broken connection and no answer in time are waited for, at least as long as Retry-After
says but not longer than `patience_seconds` in all, and then left to the engine, which tries the batch again. Any other
answer ends dbsync: sending the same again would not help. A request that is sent again has the same Idempotency-Key.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.batchkey import BatchKey
from dbsync.batcher.jsontext import dumps
from dbsync.batcher.urls import missing_extra
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.targeturl import MASK, shown_path, url_secrets

try:
    import httpx
except ImportError as error:
    raise missing_extra("A webhook", "httpx", "webhook") from error

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_ANSWER_BYTES = 64 * 1024
_SHOWN_CHARACTERS = 200

_HINTS = {
    401: "Check the user and the password in its URL, and DBSYNC_WEBHOOK_SECRET.",
    403: "Check the user and the password in its URL, and DBSYNC_WEBHOOK_SECRET.",
    413: "WebhookBatcher(…, max_bytes=…) sends less at a time.",
}
_STOPPED = "Nothing of the batch was acknowledged: put it right there, and start dbsync again."


@dataclass(frozen=True, slots=True)
class _Later:
    """Why a request was not taken, where trying again can help."""

    words: str
    wait_seconds: float = 0.0
    cause: Exception | None = None


class WebhookBatcher(Batcher):
    """POSTs to `url`, with or without `webhook+` in front; `secret` signs what is sent."""

    distributed = True
    appends = True

    def __init__(
        self,
        url: str,
        *,
        secret: str | None = None,
        max_records: int = 500,
        max_bytes: int = 1024 * 1024,
        timeout_seconds: float = 30.0,
        patience_seconds: float = 30.0,
    ) -> None:
        parts = _parts(url)
        self._address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._shown = _shown(parts)
        self._login = (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None
        self._secrets = url_secrets(f"webhook+{parts.geturl()}")
        self._secret = secret
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._last_lsn = LSN(0)
        self._key = BatchKey()
        self._name = uuid.uuid4().hex

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> WebhookBatcher:
        return cls(url, secret=options.secret)

    def begin(self, batch: BatchInfo) -> None:
        self._last_lsn = batch.last_lsn
        self._key.begin(batch)

    def batch_truncate(self, doctype: str) -> None:
        self._send(doctype, [{"op": "truncate"}])

    # In the order of their ids, so that a batch that is tried again is cut into the same requests.

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._send(doctype, ({"op": "delete", "id": id} for id in sorted(ids)))

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self._send(doctype, ({"op": "upsert", "id": id, "doc": docs[id]} for id in sorted(docs)))

    def close(self) -> None:
        client = _clients.pop((os.getpid(), self._name), None)
        if client is not None:
            client.close()

    def _send(self, doctype: str, changes: Iterable[dict[str, Any]]) -> None:
        head = dumps({"type": doctype, "last_lsn": str(self._last_lsn), "log": self.log_name})
        for body in self._bodies(head[:-1].encode() + b', "changes": [', changes):
            self._post(body)

    def _bodies(self, head: bytes, changes: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        texts: list[bytes] = []
        size = start = len(head) + 2
        for change in changes:
            text = dumps(change).encode()
            if texts and (len(texts) >= self._max_records or size + len(text) > self._max_bytes):
                yield head + b", ".join(texts) + b"]}"
                texts, size = [], start
            texts.append(text)
            size += len(text) + 2
        if texts:
            yield head + b", ".join(texts) + b"]}"

    def _post(self, body: bytes) -> None:
        """Send until it is taken, as long as patience lasts."""
        key = self._key.name(body)
        until, pause = time.monotonic() + self._patience_seconds, _FIRST_PAUSE_SECONDS
        while (later := self._try(body, key)) is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise BatcherError(
                    f"The webhook {self._shown} {later.words}.", "See whether it is there and well."
                ) from later.cause
            time.sleep(min(left, max(pause, later.wait_seconds)))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _try(self, body: bytes, key: str) -> _Later | None:
        try:
            with self._client().stream("POST", self._address, content=body, headers=self._headers(body, key)) as answer:
                said = self._beginning(answer)
        except httpx.TimeoutException as error:
            return _Later("did not answer in time", cause=error)
        except httpx.RequestError as error:
            return _Later(f"cannot be reached: {self._hidden(str(error)) or type(error).__name__}", cause=error)
        if answer.is_success:
            return None
        if answer.status_code == 429 or answer.is_server_error:
            return _Later(f"answered {answer.status_code}{said}", _retry_after(answer.headers.get("Retry-After")))
        raise self._refused(answer, said)

    def _refused(self, answer: httpx.Response, said: str) -> BatcherError:
        status = answer.status_code
        if answer.has_redirect_location:
            target = self._hidden(_shown(urlsplit(answer.headers["Location"])))
            return BatcherError(
                f"The webhook {self._shown} answered {status}, a redirect to {target}, and redirects are not followed.",
                "Give the address that takes the requests itself.",
                retryable=False,
            )
        return BatcherError(
            f"The webhook {self._shown} answered {status}{said}.", _HINTS.get(status, _STOPPED), retryable=False
        )

    def _headers(self, body: bytes, key: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        if self._secret is not None:
            headers["Dbsync-Signature"] = signature(self._secret, int(time.time()), body)
        return headers

    def _client(self) -> httpx.Client:
        """One for each process, kept out of the Batcher, which has to be picklable."""
        place = (os.getpid(), self._name)
        if place not in _clients:
            # httpx logs each request with its URL, and the query may hold a secret.
            logging.getLogger("httpx").addFilter(_not_ours)
            _clients[place] = httpx.Client(
                auth=self._login,
                headers={"User-Agent": f"dbsync/{version('dbsync')}"},
                timeout=self._timeout_seconds,
                follow_redirects=False,
            )
            _addresses.add(str(httpx.URL(self._address)))
        return _clients[place]

    def _beginning(self, answer: httpx.Response) -> str:
        """How the answer begins, on one line; read to its end where it has one, since half an answer is none."""
        read = b""
        for some in answer.iter_bytes():
            read += some
            if len(read) > _ANSWER_BYTES:
                break
        text = " ".join(re.sub(r"[^\x20-\x7e\u00a0-\U0010ffff]+", " ", read.decode(errors="replace")).split())
        shown = self._hidden(text)[:_SHOWN_CHARACTERS].rstrip(". ")
        return f": {shown}" if shown else ""

    def _hidden(self, text: str) -> str:
        """The text without what nobody should read: the other side may repeat what it was sent."""
        user, password = self._login or ("", "")
        token = base64.b64encode(f"{user}:{password}".encode()).decode() if self._login else ""
        for secret in filter(None, (token, self._secret, *self._secrets)):
            text = text.replace(secret, MASK)
        return text


def signature(secret: str, seconds: int, body: bytes) -> str:
    """What the header Dbsync-Signature says: when it was signed, and the HMAC-SHA256 of that time and the body."""
    signed = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256)
    return f"t={seconds},v1={signed.hexdigest()}"


def _parts(url: str) -> SplitResult:
    # What urlsplit and httpx complain of quotes the URL, with its password.
    with contextlib.suppress(ValueError, httpx.InvalidURL):
        parts = urlsplit(url.removeprefix("webhook+"))
        httpx.URL(parts.geturl())
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise ConfigError(
        "The URL of the webhook cannot be used: it takes webhook+https://HOST/PATH or webhook+http://HOST/PATH.",
        "A user and a password stand before the host, USER:PASSWORD@HOST, with %40 for an @ of theirs.",
    )


def _shown(parts: SplitResult) -> str:
    """The address without what may be a secret: login, query, and what in its path is no word."""
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=place, path=shown_path(parts.path), query="", fragment="").geturl()


def _retry_after(value: str | None) -> float:
    """Seconds to wait: the header holds them, or a date."""
    if value is None:
        return 0.0
    if re.fullmatch(r"\d{1,9}", value.strip()):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, ((at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds())


_clients: dict[tuple[int, str], httpx.Client] = {}
_addresses: set[str] = set()


def _not_ours(record: logging.LogRecord) -> bool:
    return not any(str(part) in _addresses for part in record.args or ())
