"""A Batcher of one's own: thirty lines keep a search index in step, through the bulk API of its HTTP server.

The server is a small one that runs in this file: it takes lines of JSON at `/_bulk`, answers for each of them, and
searches.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

from source import empty_database

from dbsync import Batcher, Syncer
from dbsync.batcher.jsontext import dumps
from dbsync.errors import BatcherError


class SearchIndex(Batcher):
    distributed = True  # it holds an address and nothing else, so the executors can have it

    def __init__(self, url):
        self.url = url

    def batch_upsert(self, doctype, docs):
        self.bulk([line for id, doc in docs.items() for line in ({"index": {"_index": doctype, "_id": id}}, doc)])

    def batch_delete(self, doctype, ids):
        self.bulk([{"delete": {"_index": doctype, "_id": id}} for id in ids])

    def batch_truncate(self, doctype):
        try:
            self.send(Request(f"{self.url}/{quote(doctype)}", method="DELETE"))
        except HTTPError as error:
            if error.code != 404:  # there is no such index yet, or no longer
                raise

    def bulk(self, lines):
        body = "".join(dumps(line) + "\n" for line in lines).encode()
        request = Request(f"{self.url}/_bulk", body, {"Content-Type": "application/x-ndjson"})
        for item in self.send(request)["items"]:
            for action, result in item.items():
                self.check(action, result["_id"], result["status"], result.get("error"))

    def check(self, action, id, status, error):
        if status < 300 or (action == "delete" and status == 404):  # a batch may come again: it may be gone already
            return
        busy = status == 429 or status >= 500  # try again; anything else would be refused again
        raise BatcherError(f"The index refused to {action} {id}: {status}, {error}.", retryable=busy)

    def send(self, request):
        with urlopen(request, timeout=30) as answer:  # what it raises, the engine tries again
            return json.load(answer)


class Server(BaseHTTPRequestHandler):
    """The other side: documents in memory, by index and id, and a search for words."""

    indexes: ClassVar[dict[str, dict]] = {}
    lock = threading.Lock()

    def do_POST(self):
        lines = iter(self.rfile.read(int(self.headers["Content-Length"])).splitlines())
        with self.lock:
            self.answer({"items": [self.take(json.loads(line), lines) for line in lines]})

    def do_DELETE(self):
        with self.lock:
            gone = self.indexes.pop(unquote(self.path[1:]), None)
        self.answer({}, 404 if gone is None else 200)

    def do_GET(self):
        index, _, word = unquote(self.path[1:]).partition("/")
        with self.lock:
            documents = self.indexes.get(index, {}).items()
            self.answer([id for id, doc in documents if word in re.findall(r"\w+", str(doc).lower())])

    def take(self, action, lines):
        ((kind, where),) = action.items()
        documents = self.indexes.setdefault(where["_index"], {})
        if kind == "index":
            documents[where["_id"]] = json.loads(next(lines))
            status = 201
        else:
            status = 200 if documents.pop(where["_id"], None) else 404
        return {kind: {"_id": where["_id"], "status": status}}

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Silent."""


def search(word):
    with urlopen(f"{url}/public.articles/{quote(word)}", timeout=30) as answer:
        found = sorted(json.load(answer))
    print(f"{word}: {', '.join(found) or 'nothing'}")
    return found


server = ThreadingHTTPServer(("localhost", 0), Server)
url = f"http://localhost:{server.server_port}"
threading.Thread(target=server.serve_forever, daemon=True).start()

with empty_database() as (settings, db):
    db.execute("CREATE TABLE articles (id text PRIMARY KEY, title text, words int)")
    db.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE articles")
    db.execute("INSERT INTO articles VALUES ('A1', 'Watermarks, exactly', 900), ('A2', 'A snapshot in time', 300)")

    with Syncer(settings, batcher=SearchIndex(url)) as syncer:
        syncer.refresh("SELECT * FROM articles")  # what was there before
        assert search("snapshot") == ["A2"]

        db.execute("INSERT INTO articles VALUES ('A3', 'Watermarks and a snapshot', 1200)")
        db.execute("UPDATE articles SET title = 'A photograph' WHERE id = 'A2'")
        db.execute("DELETE FROM articles WHERE id = 'A1'")
        syncer.drain()
        assert search("snapshot") == ["A3"]
        assert search("photograph") == ["A2"]

        db.execute("TRUNCATE articles")
        syncer.drain()
        assert search("watermarks") == []

server.shutdown()
server.server_close()
