"""Batching with compaction: ten changes go in, three final states come out.

The handler sees every change in the order of the log. Spark reduces what it marked to one final state for each record,
and only that is handed to the Batcher.
"""

from source import empty_database

from dbsync import Batcher, MessageHandler, Syncer


class Items(MessageHandler):
    """Marks each row as a document, and notes what it saw."""

    def __init__(self):
        self.seen = []

    def handle_insert(self, msg, relation):
        self.seen.append(f"insert {msg.id}")
        self.syncer.mark_updated("item", msg.id, msg.new)

    def handle_update(self, msg, relation):
        self.seen.append(f"update {msg.id}")
        self.syncer.mark_updated("item", msg.id, msg.new)

    def handle_delete(self, msg, relation):
        self.seen.append(f"delete {msg.id}")
        self.syncer.mark_deleted("item", msg.id)


class Printing(Batcher):
    def __init__(self):
        self.handed_over = []

    def batch_delete(self, doctype, ids):
        self.handed_over += [f"delete {doctype} {id}" for id in ids]

    def batch_upsert(self, doctype, docs):
        self.handed_over += [f"upsert {doctype} {id} {doc}" for id, doc in docs.items()]

    def commit(self, batch):
        print(f"batch {batch.first_lsn} to {batch.last_lsn}:", *self.handed_over, sep="\n  ")


with empty_database() as (settings, db):
    db.execute("CREATE TABLE items (id text PRIMARY KEY, value int)")
    db.execute("INSERT INTO items VALUES ('K1', 0), ('K2', 0)")
    db.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE items")

    handler, batcher = Items(), Printing()
    with Syncer(settings, handler=handler, batcher=batcher) as syncer:
        with db.transaction():  # a batch ends between transactions, so this is all in one
            db.execute("UPDATE items SET value = 1 WHERE id = 'K1'")
            db.execute("DELETE FROM items WHERE id = 'K1'")
            db.execute("INSERT INTO items VALUES ('K1', 2)")
            for value in (1, 2, 3):
                db.execute("UPDATE items SET value = %s WHERE id = 'K2'", [value])
            db.execute("INSERT INTO items VALUES ('K3', 1)")
            db.execute("DELETE FROM items WHERE id = 'K2'")
            db.execute("INSERT INTO items VALUES ('K2', 4)")
            db.execute("DELETE FROM items WHERE id = 'K1'")
        syncer.drain()

print(f"{len(handler.seen)} changes: {', '.join(handler.seen)}")
assert len(handler.seen) == 10
assert sorted(batcher.handed_over) == [
    "delete item K1",
    "upsert item K2 {'id': 'K2', 'value': 4}",
    "upsert item K3 {'id': 'K3', 'value': 1}",
]
