"""Log every change of a table, as it stands in PostgreSQL's log: one line of JSON a message.

EchoMessageHandler writes and marks nothing, so no Batcher gets anything to do. Give it no file and it writes to stdout.
"""

import json
import tempfile

from source import empty_database

from dbsync import EchoMessageHandler, Syncer

with empty_database() as (settings, db), tempfile.TemporaryFile("w+", encoding="utf-8") as log:
    db.execute("CREATE TABLE products (sku text PRIMARY KEY, price numeric(8, 2), tags text[])")
    db.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE products")

    with Syncer(settings, handler=EchoMessageHandler(log)) as syncer:
        with db.transaction():
            db.execute("INSERT INTO products VALUES ('P1', 9.90, '{new}'), ('P2', 25, NULL)")
            db.execute("UPDATE products SET price = 8.50 WHERE sku = 'P1'")
        db.execute("DELETE FROM products WHERE sku = 'P2'")
        db.execute("TRUNCATE products")
        syncer.drain()  # until all of that has been handled

    log.seek(0)
    lines = [json.loads(line) for line in log]

for line in lines:
    print(json.dumps(line, ensure_ascii=False))

# In the order of the log, transaction by transaction.
kinds = [line["kind"] for line in lines if line["kind"] != "relation"]
expected = "begin insert insert update commit begin delete commit begin truncate commit"
assert kinds == expected.split(), kinds
(update,) = (line["new"] for line in lines if line["kind"] == "update")
assert update == {"sku": "P1", "price": "8.50", "tags": ["new"]}
