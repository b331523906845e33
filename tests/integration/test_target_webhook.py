"""A webhook as `--to`: see `fix_target` for what it has to stand; and what the server may answer."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import pickle
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from commands import SECRET, dbsync, publish, refused, running, until
from fix_postgres import Database
from fix_target import COLUMNS, Rows, Target, drained, kinds_told, survives
from pyspark.sql import SparkSession

from dbsync.batcher import BatchInfo
from dbsync.batcher.webhook import WebhookBatcher
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
QUICK = {"patience_seconds": 0.3, "timeout_seconds": 0.3}


@dataclass(slots=True)
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    text: str = "thank you"
    hangs: bool = False
    breaks: bool = False  # in the middle of the answer


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: dict[str, str]
    body: bytes
    answer: Answer

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Receiver:
    """A web server that answers as it is told, and then with 200; it can go away and come back."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.script: list[Answer] = []
        self.always: Answer | None = None
        self.over = threading.Event()
        self._tls = tls
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.port = 0
        self.start()

    @property
    def taken(self) -> list[Request]:
        return [request for request in self.requests if request.answer.status == 200 and not request.answer.breaks]

    def url(self, rest: str = "/in", login: str = "") -> str:
        return f"webhook+{'https' if self._tls else 'http'}://{login}localhost:{self.port}{rest}"

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                receiver._open.add(self.connection)

            def finish(self) -> None:
                receiver._open.discard(self.connection)
                super().finish()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.answer(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients go away, that is what the tests are about."""

        self._server = Server(("localhost", self.port), Handler)
        if self._tls:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with self._lock:
            answer = self.always or (self.script.pop(0) if self.script else Answer())
            self.requests.append(Request(handler.path, dict(handler.headers), body, answer))
        if answer.hangs:
            self.over.wait(60)
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        content = answer.text.encode()
        handler.send_header("Content-Length", str(len(content) + (1000 if answer.breaks else 0)))
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = handler.close_connection or answer.breaks


@contextmanager
def receiving(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver = Receiver(tls)
    try:
        yield receiver
    finally:
        receiver.over.set()
        receiver.stop()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@contextmanager
def open_batch(url: str, number: int = 1, **arguments: Any) -> Iterator[WebhookBatcher]:
    batcher = WebhookBatcher(url, **{**QUICK, **arguments})
    batcher.log_name = "log"
    batcher.begin(BatchInfo(number, LSN("0/1"), LSN("0/20")))
    try:
        yield batcher
    finally:
        batcher.close()


def failure(receiver: Receiver, **arguments: Any) -> BatcherError:
    """What it is told when a request is not taken; never with what is secret."""
    url = receiver.url(f"/in?token={SECRET}1", login=f"somebody:{SECRET}2@")
    with open_batch(url, secret=f"{SECRET}3", **arguments) as batcher, pytest.raises(BatcherError) as raised:
        batcher.batch_upsert("public.orders", {"1": {"id": 1}})
    words = str(raised.value)
    assert f"http://localhost:{receiver.port}/in" in words or raised.value.retryable
    assert "somebody" not in words
    assert SECRET not in words
    assert re.fullmatch(r"[^\n]+\.", raised.value.message)
    return raised.value


def held(requests: Sequence[Request]) -> dict[str, dict[str, Any]]:
    """What is so after all of that, by type and id."""
    found: dict[str, dict[str, Any]] = {}
    for content in (request.content for request in requests):
        documents = found.setdefault(content["type"], {})
        for change in content["changes"]:
            match change["op"]:
                case "truncate":
                    documents.clear()
                case "delete":
                    documents.pop(change["id"], None)
                case "upsert":
                    documents[change["id"]] = change["doc"]
    return found


def rows(requests: Sequence[Request], table: str) -> Rows:
    documents = held(requests).get(f"public.{table}", {}).values()
    return sorted(tuple(document[name] for name in COLUMNS[table]) for document in documents)


def readme_verifies(secret: bytes, header: str, body: bytes) -> bool:
    """The README's lines for who receives, run as they stand there."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Dbsync-Signature" in code)
    names: dict[str, Any] = {"secret": secret, "body": body, "headers": {"Dbsync-Signature": header}}
    exec(code, names)
    return bool(names["genuine"])


def test_a_webhook_survives(database: Database, receiver: Receiver) -> None:
    environ = {"DBSYNC_WEBHOOK_SECRET": SECRET}
    survives(database, Target(receiver.url(), lambda table: rows(receiver.taken, table), environ, exactly_once=False))
    assert {request.content["log"] for request in receiver.taken} != {""}
    for request in receiver.requests:
        signed, _, found = request.headers["Dbsync-Signature"].removeprefix("t=").partition(",v1=")
        assert hmac.new(SECRET.encode(), f"{signed}.".encode() + request.body, hashlib.sha256).hexdigest() == found
    positions = [LSN(request.content["last_lsn"]) for request in receiver.taken]
    assert positions[-1] == max(positions)


def test_every_kind_of_value_is_told_by_the_engine(database: Database, receiver: Receiver, spark: SparkSession) -> None:
    kinds_told(database, WebhookBatcher(receiver.url()), spark, lambda: held(receiver.taken)["public.kinds"])


def test_one_that_goes_away_and_comes_back_misses_nothing(database: Database, receiver: Receiver) -> None:
    publish(database)
    with running(database, DBSYNC_TO=receiver.url(), DBSYNC_SNAPSHOT="initial") as process:
        database.execute("INSERT INTO orders SELECT i, 'first' FROM generate_series(1, 1000) AS i")
        until(lambda: len(held(receiver.taken).get("public.orders", {})) == 1000)
        receiver.script = [
            Answer(500),
            Answer(429, {"Retry-After": "1"}),
            Answer(200, breaks=True),
            Answer(503, {"Retry-After": format_datetime(datetime.now(UTC))}),
        ]
        database.execute("UPDATE orders SET note = 'second' WHERE id <= 900")
        until(lambda: not receiver.script)
        receiver.stop()
        database.execute("DELETE FROM orders WHERE id <= 10")
        database.execute("UPDATE orders SET note = 'third' WHERE id > 995")
        receiver.start()
        drained(database, process)
    expected = {str(i): "second" if i <= 900 else "first" if i <= 995 else "third" for i in range(11, 1001)}
    assert {id: doc["note"] for id, doc in held(receiver.taken)["public.orders"].items()} == expected


def test_a_refusal_ends_dbsync_with_one_sentence(database: Database, receiver: Receiver) -> None:
    publish(database)
    receiver.always = Answer(404, text="no such hook\nhere")
    database.execute("INSERT INTO orders VALUES (1, 'a')")
    url = receiver.url(f"/in?token={SECRET}", login=f"user:{SECRET}@")
    done = dbsync(database, "run", DBSYNC_TO=url, DBSYNC_SNAPSHOT="initial", DBSYNC_WEBHOOK_SECRET=SECRET)
    told = [line for line in done.stderr.splitlines() if " INFO " not in line and " ERROR " not in line]
    done.stderr = "\n".join(told)
    refused(done, 5, f"The webhook http://localhost:{receiver.port}/in answered 404: no such hook here.", "start")
    assert len(receiver.requests) == 1
    assert database.rows("SELECT rows FROM dbsync_ctrl.dbsync_refreshes WHERE kind = 'initial'") == [(0,)]


def test_a_body_is_bounded_and_says_what_and_where(receiver: Receiver) -> None:
    with open_batch(receiver.url(), max_records=3, max_bytes=400) as batcher:
        batcher.batch_truncate("s.t")
        batcher.batch_delete("s.t", [str(i) for i in range(7)])
        batcher.batch_upsert("s.t", {"b": {"v": Decimal("1.50")}, "a": {"v": "x" * 500}, "c": {"v": b"\1"}})
    head = {"type": "s.t", "last_lsn": "0/20", "log": "log"}
    assert [request.content for request in receiver.requests] == [
        {**head, "changes": [{"op": "truncate"}]},
        {**head, "changes": [{"op": "delete", "id": id} for id in "012"]},
        {**head, "changes": [{"op": "delete", "id": id} for id in "345"]},
        {**head, "changes": [{"op": "delete", "id": "6"}]},
        {**head, "changes": [{"op": "upsert", "id": "a", "doc": {"v": "x" * 500}}]},
        {
            **head,
            "changes": [
                {"op": "upsert", "id": "b", "doc": {"v": "1.50"}},
                {"op": "upsert", "id": "c", "doc": {"v": "\\x01"}},
            ],
        },
    ]
    assert all(len(request.body) <= 400 for request in receiver.requests if b"xxx" not in request.body)


def test_what_it_says_of_itself(receiver: Receiver) -> None:
    with open_batch(receiver.url("/in?a=b", login="user%40home:pass%3Aword@"), secret="s") as batcher:
        pickle.loads(pickle.dumps(batcher)).batch_delete("s.t", ["1"])
    (request,) = receiver.requests
    assert request.path == "/in?a=b"
    assert request.headers["Authorization"] == "Basic " + base64.b64encode(b"user@home:pass:word").decode()
    assert request.headers["User-Agent"].startswith("dbsync/")
    assert request.headers["Content-Type"] == "application/json"
    matched = re.fullmatch(r"t=(\d+),v1=([0-9a-f]{64})", request.headers["Dbsync-Signature"])
    assert matched
    assert hmac.new(b"s", matched[1].encode() + b"." + request.body, hashlib.sha256).hexdigest() == matched[2]
    assert readme_verifies(b"s", request.headers["Dbsync-Signature"], request.body)
    assert not readme_verifies(b"s", request.headers["Dbsync-Signature"], request.body + b" ")
    assert not readme_verifies(b"other", request.headers["Dbsync-Signature"], request.body)


def test_without_a_secret_nothing_is_signed(receiver: Receiver) -> None:
    with open_batch(receiver.url()) as batcher:
        batcher.batch_delete("s.t", ["1"])
    assert "Dbsync-Signature" not in receiver.requests[0].headers


def test_the_same_has_the_same_key_and_the_next_batch_another(receiver: Receiver) -> None:
    receiver.script = [Answer(503)]
    with open_batch(receiver.url()) as batcher:
        batcher.batch_upsert("s.t", {"1": {"v": 1}, "2": {"v": 2}})
        batcher.begin(BatchInfo(1, LSN("0/1"), LSN("0/20")))  # the engine tries the batch again
        pickle.loads(pickle.dumps(batcher)).batch_upsert("s.t", {"2": {"v": 2}, "1": {"v": 1}})
        batcher.batch_upsert("s.t", {"1": {"v": 1}})
        batcher.begin(BatchInfo(2, LSN("0/1"), LSN("0/20")))  # of the same transaction, as it may be
        batcher.batch_upsert("s.t", {"1": {"v": 1}, "2": {"v": 2}})
    first, again, retried, part, later = (request.headers["Idempotency-Key"] for request in receiver.requests)
    assert first == again == retried
    assert len({first, part, later}) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(500, text="out\nof order"), "answered 500: out of order."),
        (Answer(429, {"Retry-After": "86400"}, text=""), "answered 429."),
        (Answer(503, {"Retry-After": "soon"}, text=f"for {SECRET}2"), "answered 503: for ***."),
        (Answer(hangs=True), "did not answer in time."),
        (Answer(breaks=True), "cannot be reached: "),
    ],
)
def test_what_may_pass_is_tried_again_and_then_left_to_the_engine(
    receiver: Receiver, answer: Answer, words: str
) -> None:
    receiver.always = answer
    error = failure(receiver)
    assert error.retryable
    assert words in error.message
    assert len(receiver.requests) > 1 or answer.hangs  # patience may end with the wait for the answer


def test_nobody_there_is_tried_again_and_then_left_to_the_engine(receiver: Receiver) -> None:
    receiver.stop()
    error = failure(receiver)
    receiver.start()
    assert error.retryable
    assert "cannot be reached: " in error.message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(400, text=f"{SECRET}1, {SECRET}2, {SECRET}3"), "answered 400: ***, ***, ***."),
        (Answer(401, text="x" * 100_000), "answered 401: " + "x" * 200 + "."),
        (Answer(413, text=""), "answered 413."),
        (
            Answer(301, {"Location": f"https://u:{SECRET}@elsewhere/new?t={SECRET}"}),
            "a redirect to https://elsewhere/n",
        ),
        (Answer(304, text=""), "answered 304."),
    ],
)
def test_any_other_answer_stops_at_once(receiver: Receiver, answer: Answer, words: str) -> None:
    receiver.always = answer
    error = failure(receiver)
    assert not error.retryable
    assert words in error.message
    assert len(receiver.requests) == 1


HOOK = f"/services/T0123456/{SECRET}8/{SECRET}9"  # where the path is all that keeps others out


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, text=f"there is no {HOOK}"),
        Answer(403, text=f"not with {SECRET}9"),
        Answer(500, text=f"{HOOK} is broken"),
        Answer(302, {"Location": f"https://elsewhere{HOOK}"}),
        Answer(302, {"Location": HOOK}),
        Answer(hangs=True),
        Answer(breaks=True),
    ],
)
def test_a_path_that_is_a_secret_is_never_told(
    receiver: Receiver, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver.always = answer
    with open_batch(receiver.url(HOOK)) as batcher, pytest.raises(BatcherError) as raised:
        batcher.batch_delete("s.t", ["1"])
    assert receiver.requests[0].path == HOOK
    assert f"http://localhost:{receiver.port}/services/***/***/***" in str(raised.value)
    for told in (str(raised.value), caplog.text):
        assert SECRET not in told
        assert "T0123456" not in told


def test_no_log_tells_the_url(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with open_batch(receiver.url(f"/in?token={SECRET}", login=f"user:{SECRET}@")) as batcher:
        batcher.batch_delete("s.t", ["1"])
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "webhook+ftp://localhost/",
        "webhook+https:///in",
        "webhook+https://localhost:0/in",
        f"webhook+https://user:{SECRET}@localhost:eight/in",
        f"webhook+https://user:{SECRET}@[localhost/in",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"takes webhook\+https://HOST/PATH") as raised:
        WebhookBatcher(url)
    assert SECRET not in str(raised.value)


def test_a_certificate_nobody_vouches_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    with receiving(tls) as receiver:
        with open_batch(receiver.url()) as batcher, pytest.raises(BatcherError, match="CERTIFICATE_VERIFY_FAILED"):
            batcher.batch_delete("s.t", ["1"])
        assert receiver.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        with open_batch(receiver.url()) as batcher:
            batcher.batch_delete("s.t", ["1"])
        assert len(receiver.requests) == 1
