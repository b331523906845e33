"""Lines on stdout as `--to`: at least once, whoever reads them and for however long."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

from commands import publish, running, until
from fix_postgres import Database
from fix_target import COLUMNS, Rows, Target, drained, survives


class Listener:
    """Reads the output of one process after the other. A line that a kill cut off is none."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._threads: list[threading.Thread] = []

    def hear(self, process: subprocess.Popen[str]) -> None:
        self._threads.append(threading.Thread(target=self._read, args=(process.stdout,)))
        self._threads[-1].start()

    def docs(self, table: str) -> dict[str, dict[str, Any]]:
        """How the rows of the table are now."""
        docs: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            if line["type"] != f"public.{table}":
                continue
            match line["op"]:
                case "upsert":
                    docs[line["id"]] = line["doc"]
                case "delete":
                    docs.pop(line["id"], None)
                case "truncate":
                    docs.clear()
        return docs

    def all_read(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self, stdout: Any) -> None:
        self.lines.extend(json.loads(line) for line in stdout if line.endswith("\n"))


def test_echo_survives(database: Database) -> None:
    listener = Listener()

    def read(table: str) -> Rows:
        listener.all_read()
        return sorted(tuple(doc[name] for name in COLUMNS[table]) for doc in listener.docs(table).values())

    survives(database, Target("echo:", read, exactly_once=False, heard=listener.hear))


def test_who_reads_has_seen_enough(database: Database) -> None:
    """As with `dbsync run | head -n 1`."""
    publish(database)
    database.execute("INSERT INTO orders SELECT i, 'first' FROM generate_series(1, 20000) AS i")
    with running(database, DBSYNC_SNAPSHOT="initial", DBSYNC_RETRIES="50") as process:
        assert process.stdout
        assert process.stderr
        head = subprocess.run(["head", "-n", "1"], stdin=process.stdout, capture_output=True, text=True, check=True)
        process.stdout.close()
        assert json.loads(head.stdout)["type"] == "public.orders"
        words = process.stderr.read()
        assert process.wait(60) == 5
    told = [line for line in words.splitlines() if " INFO " not in line and " ERROR " not in line]
    assert told == [
        "dbsync: Nobody reads what dbsync writes to its output any more.",
        "Start it again: it goes on with the batch that was not read to its end.",
    ]
    listener = Listener()
    with running(database, DBSYNC_SNAPSHOT="initial") as process:
        listener.hear(process)
        until(lambda: len(listener.docs("orders")) == 20_000)
        drained(database)
        process.terminate()
        listener.all_read()
