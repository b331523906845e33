"""Documents of another shape than the rows: a handler decides what a change means and marks what is now so, or gone.

Here one row of `customers` makes two documents: the customer, and an entry by which it is found under its e-mail
address. A customer with `closed_at` set is gone for the target, although its row is still there.
"""

from source import empty_database

from dbsync import Batcher, MessageHandler, Syncer


class Customers(MessageHandler):
    def handle_insert(self, msg, relation):
        row = msg.new
        if row["closed_at"] is not None:
            self.syncer.mark_deleted("customer", row["id"])
            self.syncer.mark_deleted("email", row["email"])
            return
        address = {"street": row["street"], "city": row["city"]}
        self.syncer.mark_updated("customer", row["id"], {"name": row["name"], "address": address})
        self.syncer.mark_updated("email", row["email"], {"customer": row["id"]})

    def handle_update(self, msg, relation):
        # What the row made before is gone, unless it makes it again: of several marks in a batch the last one counts.
        self.handle_delete(msg, relation)
        self.handle_insert(msg, relation)

    def handle_delete(self, msg, relation):
        # The whole row as it was is in `msg.old`, because the table has REPLICA IDENTITY FULL.
        self.syncer.mark_deleted("customer", msg.old["id"])
        self.syncer.mark_deleted("email", msg.old["email"])


class InMemory(Batcher):
    """The target: a dict by type and id. What comes twice changes nothing."""

    def __init__(self):
        self.documents = {}

    def batch_upsert(self, doctype, docs):
        self.documents |= {(doctype, id): doc for id, doc in docs.items()}

    def batch_delete(self, doctype, ids):
        for id in ids:
            self.documents.pop((doctype, id), None)


with empty_database() as (settings, db):
    db.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, name text, email text, street text, city text, closed_at date)"
    )
    db.execute("ALTER TABLE customers REPLICA IDENTITY FULL")
    db.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE customers")

    target = InMemory()
    with Syncer(settings, handler=Customers(), batcher=target) as syncer:
        db.execute("INSERT INTO customers VALUES (1, 'Ada', 'ada@old.example', 'Elm St 1', 'Ghent')")
        db.execute("INSERT INTO customers VALUES (2, 'Ben', 'ben@mail.example', 'Oak St 2', 'Turin')")
        db.execute("UPDATE customers SET email = 'ada@new.example' WHERE id = 1")
        db.execute("UPDATE customers SET closed_at = current_date WHERE id = 2")
        syncer.drain()

for (doctype, id), document in sorted(target.documents.items()):
    print(f"{doctype} {id}: {document}")

assert target.documents == {
    ("customer", "1"): {"name": "Ada", "address": {"street": "Elm St 1", "city": "Ghent"}},
    ("email", "ada@new.example"): {"customer": 1},
}
