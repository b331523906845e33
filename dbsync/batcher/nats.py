"""A NATS JetStream stream that gets every change as a message of its own. At least once.

A change of `schema.table` goes to the subject `STREAM.schema.table`, as {"op": "upsert", "type": …, "id": …, "doc": …},
or with "delete", or with "truncate" for the whole type. What a subject cannot hold of a name is percent-encoded:
unquoted and joined with a dot, the tokens behind the first are the type again.

Messages of one call are under way together, and the call returns when the stream has acknowledged all of them. So for
each record the stream has its states in the order of the log; its last message is what is so.

Nats-Msg-Id is the same when the same change of the same batch is sent again, in whatever attempt, and the stream drops
it while it remembers it (`duplicate_window`). It is another one in any other batch: a record that goes from A to B and
back to A is three messages. After a restart of dbsync what was not acknowledged comes again under new ids, on purpose;
`batchkey` tells why.

The executors publish, one connection a process. A connection that breaks, or a server that is away, is waited for up to
`patience_seconds`, and then left to the engine, which tries the batch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import ssl
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.batchkey import BatchKey
from dbsync.batcher.jsontext import dumps
from dbsync.batcher.urls import missing_extra
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.errors import NoServersError
    from nats.js.errors import APIError, NoStreamResponseError, NotFoundError, ServiceUnavailableError
except ImportError as error:
    raise missing_extra("A NATS stream", "nats", "nats") from error

if TYPE_CHECKING:
    from dbsync.batcher.urls import TargetOptions

_AT_A_TIME = 1_000
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_CLOSE_SECONDS = 1.0
_HEADER_FRAME_BYTES = len(b"NATS/1.0\r\n\r\n")
_NO_RESPONDERS = "503"
_JETSTREAM_OFF = (10039, 10076)  # for the account, for the server
_MESSAGE_TOO_LARGE = 10054
_WRONG_STREAM = 10060

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """Where to connect, and as whom. What is shown of it is the address alone."""

    address: str  # scheme://host:port
    user: str | None = None
    password: str | None = None

    @property
    def needs_tls(self) -> bool:
        return self.address.startswith("tls:")


@dataclass(frozen=True, slots=True)
class Message:
    """A change on its way to the stream; `record` says which it is."""

    subject: str
    payload: bytes
    headers: dict[str, str]
    record: str

    @property
    def size_bytes(self) -> int:
        """As the server counts it against its max_payload: with the headers."""
        headers = sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers.items())
        return len(self.payload) + headers + _HEADER_FRAME_BYTES


class NatsBatcher(Batcher):
    """Publishes to the stream of that name at `nats://[USER:PASSWORD@]HOST[:PORT]/STREAM`, or `tls://…`.

    A stream that is not there is made, for the subjects `STREAM.>`.
    """

    distributed = True
    appends = True

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, patience_seconds: float = 30.0) -> None:
        self._server, self._stream = _parts(url)
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._key = BatchKey()
        self._name = uuid.uuid4().hex

    @classmethod
    def from_url(cls, url: str, options: TargetOptions) -> NatsBatcher:
        return cls(url)

    def position(self) -> LSN | None:
        """No position is kept; but a start is when to hear that there is no such stream to write to."""
        self._courier().have_stream()
        return None

    def begin(self, batch: BatchInfo) -> None:
        self._key.begin(batch)
        self._courier().have_stream()

    def batch_truncate(self, doctype: str) -> None:
        self._publish(doctype, [{"op": "truncate", "type": doctype}])

    def batch_delete(self, doctype: str, ids: Sequence[str]) -> None:
        self._publish(doctype, ({"op": "delete", "type": doctype, "id": id} for id in ids))

    def batch_upsert(self, doctype: str, docs: Mapping[str, dict[str, Any]]) -> None:
        self._publish(doctype, ({"op": "upsert", "type": doctype, "id": id, "doc": doc} for id, doc in docs.items()))

    def close(self) -> None:
        courier = _couriers.pop((os.getpid(), self._name), None)
        if courier is not None:
            courier.close()

    def _publish(self, doctype: str, changes: Iterable[dict[str, Any]]) -> None:
        messages = self._messages(subject(self._stream, doctype), doctype, changes)
        while some := list(itertools.islice(messages, _AT_A_TIME)):
            self._courier().publish(some)

    def _messages(self, subject: str, doctype: str, changes: Iterable[dict[str, Any]]) -> Iterator[Message]:
        for change in changes:
            payload = dumps(change).encode()
            headers = {"Nats-Msg-Id": self._key.name(payload), "Nats-Expected-Stream": self._stream}
            yield Message(subject, payload, headers, f"{doctype} {change.get('id', '')}".rstrip())

    def _courier(self) -> _Courier:
        """One for each process, kept out of the Batcher, which has to be picklable."""
        place = (os.getpid(), self._name)
        if place not in _couriers:
            _couriers[place] = _Courier(self._server, self._stream, self._timeout_seconds, self._patience_seconds)
        return _couriers[place]


def subject(stream: str, doctype: str) -> str:
    """The stream's name, the schema's and the table's; a type of another form is one token."""
    schema, _, table = doctype.partition(".")
    return ".".join((stream, *map(_token, (schema, table) if schema and table else (doctype,))))


def _token(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E")


def _parts(url: str) -> tuple[Server, str]:
    try:
        parts = urlsplit(url)
        port = parts.port or 4222
    except ValueError:  # it quotes the URL, which may hold a password
        raise _unusable() from None
    stream = unquote(parts.path.removeprefix("/"))
    if parts.scheme not in ("nats", "tls") or not parts.hostname or not re.fullmatch(r"[^\s.*>/\\\x00-\x1f]+", stream):
        raise _unusable()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    return Server(f"{parts.scheme}://{host}:{port}", user, password), stream


def _unusable() -> ConfigError:
    return ConfigError(
        "The URL of the NATS stream cannot be used: it takes nats://HOST/STREAM, or tls:// in place of nats://.",
        "The stream is a name without dots, spaces, * and >; a port stands behind the host, USER:PASSWORD@ before it.",
    )


class _Link:
    """A connection; `failed` tells at once what makes it pointless to wait for anything on it."""

    def __init__(self, client: Client, timeout_seconds: float) -> None:
        self.client = client
        self.jetstream = client.jetstream(timeout=timeout_seconds)
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._inbox = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[NatsError | None]] = {}
        self._sent = itertools.count()

    async def listen(self) -> None:
        await self.client.subscribe(f"{self._inbox}.*", cb=self._answered)

    async def send(self, message: Message) -> asyncio.Future[NatsError | None]:
        """What comes is the stream's answer: None, or why it did not take the message.

        nats-py's own publish_async never tells of a message that was refused.
        """
        reply = f"{self._inbox}.{next(self._sent)}"
        self._waiting[reply] = answer = asyncio.get_running_loop().create_future()
        await self.client.publish(message.subject, message.payload, reply, message.headers)
        return answer

    async def _answered(self, answer: Msg) -> None:
        waiting = self._waiting.pop(answer.subject, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(_refusal(answer))

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def wait(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if self.failed.done() and (task.cancelled() or task.exception()):
            raise self.failed.result()
        return task.result()


class _Courier:
    """Publishes for one process: an event loop in a thread, and a connection that is made anew when it breaks."""

    def __init__(self, server: Server, stream: str, timeout_seconds: float, patience_seconds: float) -> None:
        self._server = server
        self._stream = stream
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._link: _Link | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dbsync-nats", daemon=True)
        self._thread.start()

    def have_stream(self) -> None:
        self._do(self._have_stream)

    def publish(self, messages: Sequence[Message]) -> None:
        self._do(lambda link: self._publish(link, messages))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Callable[[_Link], Awaitable[None]]) -> None:
        asyncio.run_coroutine_threadsafe(self._patiently(work), self._loop).result()

    async def _patiently(self, work: Callable[[_Link], Awaitable[None]]) -> None:
        """Do it, on a new connection when one breaks; what is sent twice that way has the same id."""
        until, pause = time.monotonic() + self._patience_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                link = await self._connected()
                return await link.wait(work(link))
            except (OSError, NatsError, TimeoutError) as error:
                await self._drop()
                failure = self._told(error)
                if not failure.retryable or time.monotonic() >= until:
                    raise failure from error
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _connected(self) -> _Link:
        if self._link is None or self._link.failed.done():
            await self._drop()
            self._link = await self._connect()
        return self._link

    async def _connect(self) -> _Link:
        client = Client()
        link = _Link(client, self._timeout_seconds)

        async def closed() -> None:
            link.fail(NatsError("the connection broke"))

        connecting = True

        async def erred(error: Exception) -> None:
            if connecting:
                raise error  # or nats-py would go on for minutes, whatever it was told of reconnecting
            if "permissions violation" in str(error).lower():
                link.fail(error)

        try:
            await client.connect(
                self._server.address,
                name="dbsync",
                allow_reconnect=False,
                connect_timeout=math.ceil(self._timeout_seconds),
                closed_cb=closed,
                error_cb=erred,
                **self._login(client),
            )
            connecting = False
            self._demand_tls(client)
            await link.listen()
        except BaseException:
            await _close(client)
            raise
        return link

    def _login(self, client: Client) -> dict[str, Any]:
        """Asked for when the greeting of the server is known, so that nothing is told in the clear that must not be."""
        user, password = self._server.user, self._server.password

        def told(value: str) -> Callable[[], str]:
            def tell() -> str:
                self._demand_tls(client)
                return value

            return tell

        login: dict[str, Any] = {"tls": ssl.create_default_context()} if self._server.needs_tls else {}
        if user is not None and password is None:
            login["token"] = told(user)
        elif user is not None:
            login |= {"user": told(user), "password": told(password or "")}
        return login

    def _demand_tls(self, client: Client) -> None:
        # nats-py goes on in the clear where the server does not ask for TLS, whatever the URL says.
        if self._server.needs_tls and not client._server_info.get("tls_required"):
            raise BatcherError(
                f"The NATS server {self._server.address} does not ask for TLS.",
                "Turn it on there, or write nats:// in the target's URL.",
                retryable=False,
            )

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await _close(link.client)

    async def _have_stream(self, link: _Link) -> None:
        try:
            await link.jetstream.stream_info(self._stream)
        except NotFoundError:
            await link.jetstream.add_stream(name=self._stream, subjects=[f"{self._stream}.>"])

    async def _publish(self, link: _Link, messages: Sequence[Message]) -> None:
        for message in messages:
            self._check_size(message, link.client.max_payload)
        async with asyncio.timeout(self._timeout_seconds):
            answers = [await link.send(message) for message in messages]
            refusals = await asyncio.gather(*answers)
        for message, refusal in zip(messages, refusals, strict=True):
            if refusal is not None:
                raise await self._not_taken(link, message, refusal) from refusal

    def _check_size(self, message: Message, most_bytes: int) -> None:
        if message.size_bytes > most_bytes:
            raise BatcherError(
                f"The record {message.record} makes a message of {message.size_bytes} bytes, and {self._server.address}"
                f" takes {most_bytes} at the most.",
                "Raise max_payload there, or leave a column out with DBSYNC_EXCLUDE_COLUMNS.",
                retryable=False,
            )

    async def _not_taken(self, link: _Link, message: Message, error: NatsError) -> Exception:
        """What is wrong with the stream for this message; the error itself where that is all there is to say."""
        if isinstance(error, APIError) and error.err_code == _MESSAGE_TOO_LARGE:
            return BatcherError(
                f"The record {message.record} makes a message of {message.size_bytes} bytes, more than the stream"
                f" {self._stream} takes.",
                "Raise its max_msg_size, or leave a column out with DBSYNC_EXCLUDE_COLUMNS.",
                retryable=False,
            )
        elsewhere = isinstance(error, APIError) and error.err_code == _WRONG_STREAM
        if elsewhere or (isinstance(error, NoStreamResponseError) and not await self._captures(link, message.subject)):
            return BatcherError(
                f"The stream {self._stream} does not take the subject {message.subject}.",
                f"Add {self._stream}.> to its subjects.",
                retryable=False,
            )
        return error

    async def _captures(self, link: _Link, subject: str) -> bool:
        try:
            return bool(await link.jetstream.find_stream_name_by_subject(subject))
        except NotFoundError:
            # A stream that has gone meanwhile is made again when the batch is tried again.
            return not await self._exists(link)

    async def _exists(self, link: _Link) -> bool:
        try:
            return bool(await link.jetstream.stream_info(self._stream))
        except NotFoundError:
            return False

    def _told(self, error: Exception) -> BatcherError:
        words = str(error).removeprefix("nats: ").strip("'\r\n ") or type(error).__name__
        lower = words.lower()
        where = self._server.address
        if "permissions violation" in lower:
            return BatcherError(
                f"The NATS server {where} does not let the user {'publish' if 'publish' in lower else 'subscribe'}.",
                f"It takes permission to publish {self._stream}.> and $JS.API.>, and to subscribe _INBOX.>.",
                retryable=False,
            )
        if "authorization violation" in lower:
            return BatcherError(
                f"The NATS server {where} did not let dbsync in.",
                "Check the user and the password in the target's URL.",
                retryable=False,
            )
        if isinstance(error, APIError):
            return self._told_by_jetstream(error)
        if isinstance(error, NoStreamResponseError):
            words = f"the stream {self._stream} does not answer"
        elif isinstance(error, TimeoutError):
            words = "no answer in time"
        elif isinstance(error, NoServersError):
            words = "no server answers"
        return BatcherError(f"The NATS server {where} cannot be reached: {words}.", "See whether it is there and well.")

    def _told_by_jetstream(self, error: APIError) -> BatcherError:
        # Without JetStream nobody answers its requests at all, and the error has no number.
        absent = isinstance(error, ServiceUnavailableError) and error.err_code is None
        if absent or error.err_code in _JETSTREAM_OFF:
            return BatcherError(f"JetStream is off at {self._server.address}.", "Turn it on there.", retryable=False)
        return BatcherError(
            f"The stream {self._stream} at {self._server.address} cannot be written: {error.description}.",
            "See its limits and its state there.",
        )


async def _close(client: Client) -> None:
    # What is to be let go of may be broken, and a connection that failed in the middle of a handshake does not end.
    with contextlib.suppress(OSError, NatsError, TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await client.close()


def _refusal(answer: Msg) -> NatsError | None:
    if (answer.headers or {}).get("Status") == _NO_RESPONDERS:
        return NoStreamResponseError()
    error = json.loads(answer.data).get("error")
    return APIError(error.get("code"), error.get("description"), error.get("err_code")) if error else None


_couriers: dict[tuple[int, str], _Courier] = {}
