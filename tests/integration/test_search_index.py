"""The README's Batcher for a search index: the example's own text, against a server that answers what the test says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from dbsync.errors import BatcherError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(CODE,) = (code for code in re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE) if "_bulk" in code)


class Index:
    """A search index that keeps what it was asked, and answers with `status` and the `items` of a bulk request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.status = 200
        self.items: list[tuple[str, int]] = []

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.asked.append((handler.command, handler.path, body))
        items = [
            {action: {"_id": str(place), "status": status, "error": "why"}}
            for place, (action, status) in enumerate(self.items)
        ]
        answer = json.dumps({"items": items}).encode()
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def batcher(index: Index) -> Iterator[Any]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            index.take(self)

        def do_DELETE(self) -> None:
            index.take(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    names: dict[str, Any] = {}
    exec(CODE, names)
    with ThreadingHTTPServer(("localhost", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield names["SearchIndex"](f"http://localhost:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_the_example_has_the_text_of_the_readme() -> None:
    batcher = CODE[CODE.index("class ") :].strip()
    assert len([line for line in batcher.splitlines() if line]) <= 30
    assert f"\n\n\n{batcher}\n\n\n" in (ROOT / "examples" / "search_index.py").read_text(encoding="utf-8")


def test_it_sends_lines_of_json(index: Index, batcher: Any) -> None:
    index.items = [("index", 201), ("index", 200)]
    batcher.batch_upsert("s.t", {"1": {"total": Decimal("1.50")}, "2": {"total": None}})
    index.items = [("delete", 200)]
    batcher.batch_delete("s.t", ["1"])
    batcher.batch_truncate("s.a b")
    assert index.asked == [
        (
            "POST",
            "/_bulk",
            (
                b'{"index": {"_index": "s.t", "_id": "1"}}\n{"total": "1.50"}\n'
                b'{"index": {"_index": "s.t", "_id": "2"}}\n{"total": null}\n'
            ),
        ),
        ("POST", "/_bulk", b'{"delete": {"_index": "s.t", "_id": "1"}}\n'),
        ("DELETE", "/s.a%20b", b""),
    ]


@pytest.mark.parametrize(("status", "retryable"), [(429, True), (503, True), (400, False), (404, False)])
def test_it_looks_at_every_item(index: Index, batcher: Any, status: int, retryable: bool) -> None:
    index.items = [("index", 201), ("index", status)]
    with pytest.raises(BatcherError, match=f"^The index refused to index 1: {status}, why\\.$") as raised:
        batcher.batch_upsert("s.t", {"0": {}, "1": {}})
    assert raised.value.retryable == retryable


def test_it_bears_being_repeated(index: Index, batcher: Any) -> None:
    index.items = [("delete", 200), ("delete", 404)]
    batcher.batch_delete("s.t", ["1", "2"])
    index.status = 404
    batcher.batch_truncate("s.t")


def test_a_server_that_is_not_well_is_left_to_the_engine(index: Index, batcher: Any) -> None:
    index.status = 503
    for call in (lambda: batcher.batch_delete("s.t", ["1"]), lambda: batcher.batch_truncate("s.t")):
        with pytest.raises(HTTPError):
            call()
