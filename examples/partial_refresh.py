"""Re-read a part of a table while it is being written to.

The target starts empty, after the rows were made, so the log alone would never tell it about most of them. `refresh`
brings one region into the target; the writer is not stopped, and what it changes meanwhile is not overwritten by what
was read a moment earlier.
"""

import threading

import psycopg
from source import empty_database

from dbsync import Batcher, Syncer


class InMemory(Batcher):
    """The target: documents by id."""

    def __init__(self):
        self.documents = {}

    def batch_upsert(self, doctype, docs):
        self.documents |= docs

    def batch_delete(self, doctype, ids):
        for id in ids:
            self.documents.pop(id, None)


def write(dsn, stop):
    """Change, delete and insert accounts of both regions until told to stop."""
    with psycopg.connect(dsn, autocommit=True) as db:
        turn = 0
        while not stop.wait(0.01):
            turn += 1
            db.execute("UPDATE accounts SET balance = balance + 1 WHERE id %% 997 = %s", [turn % 997])
            db.execute("DELETE FROM accounts WHERE id = %s", [turn * 31 % 20_000])
            db.execute("INSERT INTO accounts VALUES (%s, 'north', 0), (%s, 'south', 0)", [-turn, 20_000 + turn])


with empty_database() as (settings, db):
    db.execute("CREATE TABLE accounts (id int PRIMARY KEY, region text, balance int)")
    db.execute(
        "INSERT INTO accounts SELECT n, (ARRAY['north', 'south'])[1 + n % 2], 0 FROM generate_series(1, 20000) AS n"
    )
    db.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE accounts")

    target, stop = InMemory(), threading.Event()
    writer = threading.Thread(target=write, args=(settings.dsn, stop))
    with Syncer(settings, batcher=target) as syncer:
        writer.start()
        try:
            result = syncer.refresh("SELECT * FROM accounts WHERE region = %s", params=["north"], chunk_rows=2_500)
        finally:
            stop.set()
            writer.join()
        syncer.drain()

    rows = db.execute("SELECT id, balance FROM accounts WHERE region = 'north'").fetchall()
    copied = {(doc["id"], doc["balance"]) for doc in target.documents.values() if doc["region"] == "north"}

print(f"{result.rows} rows re-read in {result.chunks} chunks, {result.superseded} of them overtaken by newer changes")
print(f"north: {len(rows)} rows in the source, {len(copied)} in the target, {len(set(rows) ^ copied)} differ")
assert result.chunks > 1
assert set(rows) == copied
