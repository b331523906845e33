"""A SELECT is taken or refused by what PostgreSQL says of it, and read in chunks that hold every row exactly once."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from fix_postgres import Database, Server, fresh_database
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from dbsync import chunks as chunking
from dbsync import pgoutput
from dbsync.chunks import Key, Range, Selection, copy_out, next_ranges
from dbsync.config import Settings
from dbsync.connection import Connection, connect
from dbsync.errors import RefreshError, StreamError
from dbsync.relation import Catalog
from dbsync.selection import _nodes, fingerprint, understand
from dbsync.statement import Param, bind, execute, reading

SCHEMA = """
CREATE TABLE orders (id int PRIMARY KEY, note text, amount numeric(10,2));
CREATE TABLE items (order_id int, line int, sku text, PRIMARY KEY (line, order_id));
CREATE TABLE other (id int PRIMARY KEY, note text);
CREATE TABLE keyless (id int, note text);
CREATE VIEW seen AS SELECT * FROM orders;
CREATE MATERIALIZED VIEW kept AS SELECT * FROM orders;
CREATE FUNCTION writes(int) RETURNS bool LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO other VALUES ($1, 'written'); RETURN true; END $$;
INSERT INTO orders SELECT g, 'note ' || g, g * 1.5 FROM generate_series(1, 10) AS g;
CREATE PUBLICATION dbsync_mypub FOR TABLE orders, items, keyless;
"""


@pytest.fixture(scope="module")
def shop(postgres: Server) -> Iterator[Database]:
    """One database for the tests that only ask."""
    with fresh_database(postgres) as database:
        database.execute(SCHEMA)
        database.execute("CREATE SEQUENCE numbers")
        yield database


@pytest.fixture(scope="module")
def typed(postgres: Server) -> Iterator[Database]:
    """One database for the tests of keys, with types of its own."""
    with fresh_database(postgres) as database:
        create_types(database)
        yield database


@pytest.fixture(scope="module")
def asking(shop: Database) -> Iterator[Connection]:
    with closing(connect(shop.settings())) as connection:
        yield connection


@pytest.fixture
def settings(database: Database) -> Settings:
    database.execute(SCHEMA)
    return database.settings()


@pytest.fixture
def conn(settings: Settings) -> Iterator[Connection]:
    with closing(connect(settings)) as connection:
        yield connection


def lines(conn: Connection, selection: Selection, part: Range) -> list[str]:
    groups = copy_out(conn, selection, part)
    return [bytes(line).decode().removesuffix("\n") for group in groups for line in group]


def everything(conn: Connection, selection: Selection) -> list[str]:
    return lines(conn, selection, Range(None, None))


def chunks(conn: Connection, selection: Selection, rows: int, parallelism: int) -> Iterator[list[Range]]:
    after: Key | None = None
    while True:
        ranges = next_ranges(conn, selection, after, rows, parallelism)
        yield ranges
        after = ranges[-1].upper
        if after is None:
            return


def page(
    conn: Connection, selection: Selection, rows: int = 3, between: Callable[[], object] = lambda: None
) -> list[str]:
    """Everything, read in chunks; each chunk keeps its promises."""
    read = []
    before: Key | None = None
    for ranges in chunks(conn, selection, rows, 2):
        assert 1 <= len(ranges) <= 2
        assert ranges[0].lower == before
        assert all(one.upper == two.lower for one, two in itertools.pairwise(ranges))
        before = ranges[-1].upper
        found = [line for part in ranges for line in lines(conn, selection, part)]
        assert len(found) <= rows
        read += found
        between()
    return read


REFUSED = [
    ("several statements", "SELECT id FROM orders; SELECT id FROM orders", "several statements"),
    ("a second one that writes", "SELECT id FROM orders; DELETE FROM orders", "several statements"),
    ("nothing", "", "no statement"),
    ("a comment only", " -- SELECT id FROM orders\n ; /* ; */", "no statement"),
    ("INSERT", "INSERT INTO orders VALUES (11)", "not a SELECT"),
    ("INSERT RETURNING", "INSERT INTO orders VALUES (11) RETURNING id", "not a SELECT"),
    ("UPDATE RETURNING", "UPDATE orders SET note = '' RETURNING id;", "not a SELECT"),
    ("DELETE", "DELETE FROM orders", "not a SELECT"),
    ("TRUNCATE", "TRUNCATE orders", "not a SELECT"),
    ("DDL", "CREATE TABLE x AS SELECT * FROM orders", "not a SELECT"),
    ("SELECT INTO", "SELECT * INTO x FROM orders", "not a SELECT"),
    ("INTO after a comment with a semicolon", "SELECT id -- FROM orders; \n INTO x FROM orders", "not a SELECT"),
    ("SHOW", "SHOW work_mem", "not a SELECT"),
    ("EXPLAIN", "EXPLAIN ANALYZE DELETE FROM orders", "not a SELECT"),
    ("VALUES", "VALUES (1, 2)", "reads no column of a table"),
    ("no table", "SELECT 1", "reads no column of a table"),
    ("a write in WITH", "WITH x AS (DELETE FROM orders RETURNING id) SELECT id FROM x", "writes"),
    ("a function that writes", "SELECT id FROM orders WHERE writes(id)", "writes"),
    ("a hidden one", "SELECT id FROM (SELECT id, writes(id) FROM orders) AS o", "writes"),
    ("nextval", "SELECT id FROM orders WHERE nextval('numbers') > 0", "writes"),
    ("FOR UPDATE", "SELECT id FROM orders FOR UPDATE", "writes"),
    ("FOR SHARE below", "SELECT id FROM (SELECT id FROM orders FOR SHARE) AS o", "writes"),
    ("a join", "SELECT o.id FROM orders o JOIN other USING (id)", r'"public"."orders", "public"."other"'),
    ("columns of two tables", "SELECT o.id, x.note FROM orders o, other x", r'"public"."orders", "public"."other"'),
    ("a second table below", "SELECT id FROM orders WHERE id IN (SELECT id FROM other)", '"public"."other"'),
    (
        "a second table by a view",
        "SELECT id FROM items, orders WHERE id IN (SELECT id FROM seen)",
        "more than one table",
    ),
    ("itself", "SELECT a.id, b.note FROM orders a, orders b", "twice"),
    ("itself by WITH", "WITH x AS (SELECT * FROM orders) SELECT a.id, b.note FROM x a, x b", "twice"),
    ("itself below", "SELECT id FROM orders WHERE amount > (SELECT avg(amount) FROM orders)", "twice"),
    ("an outer join", "SELECT id FROM generate_series(1, 99) g LEFT JOIN orders ON id = g", "outer join"),
    ("grouping sets", "SELECT id, note FROM orders GROUP BY ROLLUP (id, note)", "grouping sets"),
    ("a union", "SELECT id FROM orders UNION ALL SELECT id FROM orders", "reads no column of a table"),
    ("not published", "SELECT * FROM other", '"public"."other" is not in the publication "dbsync_mypub"'),
    ("a catalog", "SELECT oid FROM pg_class", '"pg_catalog"."pg_class" is not in the publication'),
    ("no key", "SELECT * FROM keyless", '"public"."keyless" has no key'),
    ("no column", "SELECT FROM orders", "no columns"),
    ("the key missing", "SELECT note FROM orders", 'leaves out "id" of the key'),
    ("a part of the key missing", "SELECT line, sku FROM items", 'leaves out "order_id" of the key'),
    ("all of the key missing", "SELECT sku FROM items", 'leaves out "order_id", "line" of the key'),
    ("computed", "SELECT id, upper(note) AS loud FROM orders", r"Column 2 of the SELECT \(loud\)"),
    ("cast", "SELECT id::bigint FROM orders", "reads no column of a table"),
    ("a constant", "SELECT id, note, 1 FROM orders", r"Column 3 of the SELECT \(\?column\?\)"),
    ("a system column", "SELECT id, ctid FROM orders", r"Column 2 of the SELECT \(ctid\)"),
    ("the row as one", "SELECT id, orders FROM orders", r"Column 2 of the SELECT \(orders\)"),
    ("a view", "SELECT * FROM seen", '"public"."seen" is a view'),
    ("a materialized view", "SELECT * FROM kept", '"public"."kept" is a materialized view'),
    ("a syntax error", "SELECT id FRM orders o", "at character 15: syntax error"),
    ("an open string", "SELECT id FROM orders WHERE note = 'x", "at character 36: unterminated"),
    ("parentheses that do not close", "SELECT 1) AS a, (SELECT 2", "at character 9: syntax error"),
    ("an unknown table", "SELECT ä FROM nowhere", "at character 15: relation"),
    ("an unknown column", "SELECT id, nothing FROM orders", "at character 12: column"),
    ("an unbound parameter", "SELECT id FROM orders WHERE id = $1", "parameter"),
]


@pytest.mark.parametrize(("query", "words"), [rule[1:] for rule in REFUSED], ids=[rule[0] for rule in REFUSED])
def test_refused_in_one_sentence_and_nothing_is_written(
    shop: Database, asking: Connection, query: str, words: str
) -> None:
    with pytest.raises(RefreshError, match=words) as refusal:
        understand(asking, shop.settings(), query)
    assert refusal.value.message.endswith(".")
    assert "\n" not in refusal.value.message
    assert shop.rows("SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM other)") == [(10, 0)]
    assert asking.info.transaction_status == TransactionStatus.IDLE
    assert asking.execute("SHOW search_path").fetchone() == ("pg_catalog, pg_temp",)


def test_the_statement_that_publishes_the_table_is_said(settings: Settings, conn: Connection) -> None:
    with pytest.raises(RefreshError) as refusal:
        understand(conn, settings, "SELECT * FROM other")
    assert refusal.value.hint == 'Run ALTER PUBLICATION "dbsync_mypub" ADD TABLE "public"."other";'
    with psycopg.connect(settings.conninfo(), autocommit=True) as user:
        user.execute(refusal.value.hint.removeprefix("Run "))
    assert understand(conn, settings, "SELECT * FROM other")


def test_a_position_counts_in_the_users_own_text(settings: Settings, conn: Connection) -> None:
    query = "SELECT id FROM orders WHERE note LIKE '%%' AND id = %(the_id)s AND nothing"
    with pytest.raises(RefreshError, match=f"at character {query.index('nothing') + 1}: "):
        understand(conn, settings, query, {"the_id": 1})


def test_dbsyncs_own_tables_are_refused(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("CREATE SCHEMA dbsync_ctrl; CREATE TABLE dbsync_ctrl.dbsync_wmtable (id int PRIMARY KEY)")
    database.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE dbsync_ctrl.dbsync_wmtable")
    with pytest.raises(RefreshError, match="dbsync's own table"):
        understand(conn, settings, "SELECT id FROM dbsync_ctrl.dbsync_wmtable")


def test_a_foreign_table_is_refused(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w")
    database.execute("CREATE FOREIGN TABLE far (id int) SERVER s")
    with pytest.raises(RefreshError, match=r'"public"."far" is a foreign table'):
        understand(conn, settings, "SELECT id FROM far")


@pytest.fixture
def reader(database: Database, settings: Settings) -> Iterator[Settings]:
    """The settings of a role that may log in and nothing else."""
    role = f"{database.name}_reader"
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'reader'")
    yield database.settings(dsn=make_conninfo(database.dsn, user=role, password="reader"))
    database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_missing_grant_is_said(database: Database, reader: Settings) -> None:
    with closing(connect(reader)) as conn:
        with pytest.raises(RefreshError, match=r"may not read .* permission denied for table orders"):
            understand(conn, reader, "SELECT * FROM orders")
        database.execute(f"GRANT SELECT ON orders TO {database.name}_reader")
        assert understand(conn, reader, "SELECT * FROM orders")


def test_rows_that_a_policy_hides_are_not_left_out_in_silence(database: Database, reader: Settings) -> None:
    database.execute(f"GRANT SELECT ON orders TO {database.name}_reader")
    database.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
    with closing(connect(reader)) as conn, pytest.raises(RefreshError, match="row-level security"):
        understand(conn, reader, "SELECT * FROM orders")


def test_a_broken_connection_may_be_tried_again(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("SELECT pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
    with pytest.raises(StreamError) as broken:
        understand(conn, settings, "SELECT * FROM orders")
    assert broken.value.retryable


TAKEN = [
    "SELECT * FROM orders",
    "TABLE orders",
    "(SELECT * FROM public.orders)",
    "SELECT * FROM orders;",
    "SELECT * FROM orders ; ; -- that's; it",
    "SELECT * FROM orders -- all; of it",
    "/* ; */ SELECT * FROM orders WHERE note <> 'a;b' /* ; */;\n",
    "SELECT *, id, id FROM orders",
    'SELECT amount AS id, id AS "a ""b", note AS amount FROM orders',
    "WITH x AS (SELECT * FROM orders) SELECT * FROM x",
    "SELECT * FROM (SELECT DISTINCT * FROM orders ORDER BY note LIMIT 99) AS o",
    "SELECT orders.* FROM orders WHERE id IN (SELECT generate_series(1, 10))",
    "SELECT id, note, amount FROM orders GROUP BY id",
]


@pytest.mark.parametrize("query", TAKEN)
def test_taken_however_it_is_written(shop: Database, asking: Connection, query: str) -> None:
    (selection,) = understand(asking, shop.settings(), query)
    assert selection.columns == ("id", "note", "amount")
    assert selection.positions == (0, 1, 2)
    assert selection.left_out == ()
    wanted = shop.rows("SELECT id::text, note, amount::text FROM orders")
    assert sorted(page(asking, selection)) == sorted("\t".join(row) for row in wanted)


def test_what_a_selection_says(settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT sku AS a, order_id AS b, line AS c FROM items WHERE sku > 'a'")
    assert selection.relation.doctype == "public.items"
    assert selection.relation.key_names == ("order_id", "line")
    assert selection.columns == ("order_id", "line", "sku")
    assert [part.name for part in selection.key] == ["line", "order_id"]
    assert selection.estimated_rows > 0
    assert pickle.loads(pickle.dumps(selection)) == selection


def test_columns_left_out_are_named(settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT amount, id FROM orders")
    assert selection.columns == ("id", "amount")
    assert selection.left_out == ("note",)
    assert everything(conn, selection)[0] == "1\t1.50"


def test_names_mean_what_they_mean_to_the_user(database: Database, settings: Settings) -> None:
    database.execute(
        'CREATE SCHEMA "My Schema"; CREATE TABLE "My Schema"."Ordérs %s" ("The Id" int PRIMARY KEY, "q.c1" text);'
        """INSERT INTO "My Schema"."Ordérs %s" VALUES (1, 'x');"""
        'ALTER PUBLICATION dbsync_mypub ADD TABLE "My Schema"."Ordérs %s"'
    )
    database.execute(sql.SQL("ALTER DATABASE {} SET search_path = 'My Schema'").format(sql.Identifier(database.name)))  # type: ignore[arg-type]
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, 'SELECT * FROM "Ordérs %s"')
        assert selection.relation.doctype == "My Schema.Ordérs %s"
        assert page(conn, selection) == ["1\tx"]


def test_params_are_bound(settings: Settings, conn: Connection) -> None:
    evil = "'; DROP TABLE orders; --"
    query = "SELECT id FROM orders WHERE note IN (%s, %s) OR id = ANY (%s) OR amount = %s LIMIT %s"
    (selection,) = understand(conn, settings, query, [evil, "note 3", [5, 6], None, 9])
    assert evil not in selection.statement.text
    assert sorted(page(conn, selection, rows=1)) == ["3", "5", "6"]
    (named,) = understand(conn, settings, "SELECT id FROM orders WHERE note LIKE %(a)s||'%%0'", {"a": "note"})
    assert page(conn, named) == ["10"]


def test_a_statement_from_storage_is_understood(settings: Settings, conn: Connection) -> None:
    statement = bind("SELECT id FROM orders WHERE amount > %s ;", [13.0])
    (selection,) = understand(conn, settings, type(statement).from_json(statement.to_json()))
    assert page(conn, selection) == ["9", "10"]


def test_a_param_of_the_wrong_type_is_said(settings: Settings, conn: Connection) -> None:
    with pytest.raises(RefreshError, match="invalid input syntax"):
        understand(conn, settings, "SELECT id FROM orders WHERE id = %s", ["x"])


def test_a_function_that_writes_later_is_stopped_then(database: Database, settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT id FROM orders WHERE id < 5 OR writes(id)")
    with pytest.raises(RefreshError, match="writes"):
        everything(conn, selection)
    assert database.rows("SELECT count(*) FROM other") == [(0,)]


COLUMN_LISTS = pytest.mark.parametrize("which", ["database", "database16"])


@COLUMN_LISTS
def test_the_row_filter_applies(request: pytest.FixtureRequest, which: str) -> None:
    database: Database = request.getfixturevalue(which)
    settings = database.settings()
    database.execute(
        "CREATE TABLE t (a int, b text, open bool, PRIMARY KEY (b, a)); "
        "INSERT INTO t SELECT g, g % 3, g % 2 = 0 FROM generate_series(1, 20) AS g;"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t WHERE (open AND b <> '0') WITH (publish = 'insert')"
    )
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT b, a FROM t WHERE a > %s", [2])
        wanted = database.rows("SELECT a || E'\\t' || b FROM t WHERE open AND b <> '0' AND a > 2")
        assert sorted(page(conn, selection)) == sorted(line for (line,) in wanted)


@COLUMN_LISTS
def test_the_column_list_applies(request: pytest.FixtureRequest, which: str) -> None:
    database: Database = request.getfixturevalue(which)
    settings = database.settings()
    database.execute(
        "CREATE TABLE t (secret text, id int PRIMARY KEY, b text, c text); INSERT INTO t VALUES ('s', 1, 'b', 'c');"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t (id, c)"
    )
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        assert selection.relation.column_names == selection.columns == ("id", "c")
        assert everything(conn, selection) == ["1\tc"]
        (selection,) = understand(conn, settings, "SELECT secret, id FROM t")
        assert (selection.columns, selection.left_out) == (("id",), ("c",))


def test_a_key_that_is_not_published_is_no_key(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b text); "
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t (b) WITH (publish = 'insert')"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn, pytest.raises(RefreshError, match="no key that is published"):
        understand(conn, settings, "SELECT * FROM t")


RELATIONS = {
    "dropped": "CREATE TABLE t (a int, b text, gone int, c varchar(9), PRIMARY KEY (c, a)); ALTER TABLE t DROP gone",
    "generated": "CREATE TABLE t (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a + 1) STORED, b text, c text)",
    "index": "CREATE TABLE t (a int NOT NULL, b text NOT NULL, c text); CREATE UNIQUE INDEX i ON t (b); "
    "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
    "full": "CREATE TABLE t (a int, b text, c text, PRIMARY KEY (b, a)); ALTER TABLE t REPLICA IDENTITY FULL",
    "nothing": "CREATE TABLE t (a int, b text, c text, PRIMARY KEY (b, a)); ALTER TABLE t REPLICA IDENTITY NOTHING",
    "include": "CREATE TABLE t (a int, b text NOT NULL, c text, PRIMARY KEY (a) INCLUDE (b))",
    "types": "CREATE DOMAIN d AS text; CREATE TYPE e AS ENUM ('1'); "
    "CREATE TABLE t (a d PRIMARY KEY, b e, c numeric(9,2))",
}


@COLUMN_LISTS
@pytest.mark.parametrize("kind", RELATIONS)
def test_the_relation_is_as_the_log_describes_it(request: pytest.FixtureRequest, which: str, kind: str) -> None:
    database: Database = request.getfixturevalue(which)
    settings = database.settings()
    database.execute(f"{RELATIONS[kind]}; CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    with closing(connect(settings)) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [database.slot])
        database.execute("INSERT INTO t (a, b, c) VALUES ('1', '1', '1')")
        changes = conn.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
            "'publication_names', 'dbsync_mypub')",
            [database.slot],
        )
        messages = [pgoutput.decode(data) for (data,) in changes]
        (message,) = [found for found in messages if isinstance(found, pgoutput.Relation)]
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        assert selection.relation == Catalog(lambda: connect(settings)).relation(message)


@pytest.mark.pg(">= 18")
def test_generated_columns_count_where_they_are_published(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a + 1) STORED); INSERT INTO t VALUES (1);"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t WITH (publish_generated_columns = stored)"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        assert selection.columns == ("a", "b")
        assert everything(conn, selection) == ["1\t2"]


PARTITIONS = """
CREATE TABLE sales (id int, region text, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE sales_eu PARTITION OF sales FOR VALUES IN ('eu', 'uk');
CREATE TABLE sales_us (note text, extra int, region text NOT NULL, id int NOT NULL);
ALTER TABLE sales_us DROP extra;
ALTER TABLE sales ATTACH PARTITION sales_us FOR VALUES IN ('us');
INSERT INTO sales SELECT g, (ARRAY['eu', 'us', 'uk'])[g % 3 + 1], 'n' || g FROM generate_series(1, 20) AS g;
"""


@pytest.mark.parametrize("which", ["database", "database16"])
def test_a_partition_root_published_as_itself(request: pytest.FixtureRequest, which: str) -> None:
    database: Database = request.getfixturevalue(which)
    settings = database.settings()
    database.execute(PARTITIONS)
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE sales WITH (publish_via_partition_root)")
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM sales")
        assert selection.relation.doctype == "public.sales"
        assert len(page(conn, selection)) == 20
        assert len(set(page(conn, selection))) == 20
        with pytest.raises(RefreshError, match=r'under the name of "public"."sales"'):
            understand(conn, settings, "SELECT * FROM sales_eu")


@pytest.mark.parametrize("which", ["database", "database16"])
def test_a_partition_root_published_as_its_leaves(request: pytest.FixtureRequest, which: str) -> None:
    database: Database = request.getfixturevalue(which)
    settings = database.settings()
    database.execute(PARTITIONS)
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE sales")
    with closing(connect(settings)) as conn:
        selections = understand(conn, settings, "SELECT note, id, region FROM sales")
        assert [one.relation.name for one in selections] == ["sales_eu", "sales_us"]
        assert [one.columns for one in selections] == [("id", "region", "note"), ("region", "id", "note")]
        assert [one.restriction.image for one in selections if one.restriction] == [(), ()]
        for one in selections:
            table = one.relation.name
            wanted = database.rows(f"SELECT {' || chr(9) || '.join(one.columns)} FROM {table}")
            assert sorted(page(conn, one)) == sorted(line for (line,) in wanted)
        assert [one.relation.name for one in understand(conn, settings, "SELECT * FROM sales_eu")] == ["sales_eu"]
        (pruned,) = understand(conn, settings, "SELECT * FROM sales WHERE region = %s", ["us"])
        assert pruned.relation.name == "sales_us"
        (empty,) = understand(conn, settings, "SELECT * FROM sales WHERE false")
        assert page(conn, empty) == []


def test_leaves_with_the_same_keys_keep_their_own_rows(database: Database) -> None:
    database.execute(
        "CREATE TABLE log (id int, day int, doc json) PARTITION BY LIST (day);"
        "CREATE TABLE log_1 PARTITION OF log (PRIMARY KEY (id)) FOR VALUES IN (1);"
        "CREATE TABLE log_2 PARTITION OF log (PRIMARY KEY (id)) FOR VALUES IN (2);"
        "INSERT INTO log SELECT g % 5, g / 5 + 1, json_build_object('g', g) FROM generate_series(0, 9) AS g;"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE log"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn:
        for one in understand(conn, settings, "SELECT * FROM log"):
            wanted = database.rows(f"SELECT id || E'\\t' || day || E'\\t' || doc FROM {one.relation.name}")
            assert sorted(page(conn, one)) == sorted(line for (line,) in wanted)


def test_children_are_read_as_what_the_log_calls_them(database: Database) -> None:
    database.execute(
        "CREATE TABLE parent (id int PRIMARY KEY, note text);"
        "CREATE TABLE child (more int, PRIMARY KEY (id)) INHERITS (parent);"
        "CREATE TABLE hidden (PRIMARY KEY (id)) INHERITS (parent);"
        "INSERT INTO parent SELECT g, 'parent' FROM generate_series(1, 7) AS g;"
        "INSERT INTO child SELECT g, 'child' FROM generate_series(3, 9) AS g;"
        "INSERT INTO hidden SELECT g, 'hidden' FROM generate_series(1, 9) AS g;"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE ONLY parent, child"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn:
        parent, child = understand(conn, settings, "SELECT * FROM parent")
        assert (parent.relation.name, child.relation.name) == ("parent", "child")
        assert child.left_out == ("more",)
        assert page(conn, parent) == [f"{g}\tparent" for g in range(1, 8)]
        assert page(conn, child) == [f"{g}\tchild" for g in range(3, 10)]
        (alone,) = understand(conn, settings, "SELECT * FROM ONLY parent")
        assert page(conn, alone) == page(conn, parent)


KEYS = {
    "int": ("int", "SELECT g - 11 FROM generate_series(1, 20) AS g"),
    "bigint": ("bigint", "SELECT g * -1000000000000 FROM generate_series(1, 20) AS g"),
    "numeric": (
        "numeric",
        "SELECT (g - 10) / 7.0 FROM generate_series(1, 18) AS g UNION SELECT 'NaN' UNION SELECT '-Infinity'",
    ),
    "float": ("float8", "SELECT (g - 10) / 7.0::float8 FROM generate_series(1, 18) AS g UNION SELECT '-Infinity'"),
    "text": ("text", r"SELECT chr(60 + g * 3) || E'\t\\''\n%s' FROM generate_series(1, 19) AS g UNION SELECT ''"),
    "text C": ('text COLLATE "C"', "SELECT chr(200 + g * 31) FROM generate_series(1, 20) AS g"),
    "varchar": ("varchar(10)", "SELECT chr(60 + g) FROM generate_series(1, 20) AS g"),
    "char": ("char(5)", "SELECT chr(64 + g) || repeat(' ', g % 3) || 'x' FROM generate_series(1, 20) AS g"),
    "uuid": ("uuid", "SELECT md5(g::text)::uuid FROM generate_series(1, 20) AS g"),
    "timestamp": (
        "timestamp(3)",
        "SELECT timestamp '1999-12-31' + g * interval '7 h 0.001 s' FROM generate_series(-10, 9) AS g",
    ),
    "timestamptz": (
        "timestamptz",
        "SELECT '0044-03-15 BC'::timestamptz + g * interval '9 year' FROM generate_series(1, 20) AS g",
    ),
    "date": ("date", "SELECT date '2000-01-01' + g FROM generate_series(1, 19) AS g UNION SELECT 'infinity'"),
    "interval": ("interval", "SELECT (g - 10) * interval '1 mon 3 h' FROM generate_series(1, 20) AS g"),
    "bytea": ("bytea", "SELECT decode(md5(g::text), 'hex') FROM generate_series(1, 19) AS g UNION SELECT ''"),
    "bool": ("bool", "VALUES (true), (false)"),
    "enum": ("mood", "SELECT unnest(enum_range(NULL::mood))"),
    "domain": ("word", "SELECT 'w' || g FROM generate_series(1, 20) AS g"),
    "inet": ("inet", "SELECT inet '10.0.0.250' + g FROM generate_series(1, 20) AS g"),
    "array": ("int[]", "SELECT ARRAY[g % 3, -g] FROM generate_series(1, 20) AS g"),
    "range": ("int4range", "SELECT int4range(g, g + 5) FROM generate_series(1, 20) AS g"),
    "name": ("name", "SELECT 'n' || g FROM generate_series(1, 20) AS g"),
    "folded": (
        "types.folded",
        "SELECT (ARRAY['a', 'B', 'c', 'D', 'e'])[g % 5 + 1] || g FROM generate_series(1, 20) AS g",
    ),
}

# A type whose operators are in a schema that is in nobody's search_path, and order otherwise than those of text.
FOLDED = """
CREATE SCHEMA types; CREATE TYPE types.folded;
CREATE FUNCTION types.folded_in(cstring) RETURNS types.folded LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION types.folded_out(types.folded) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE types.folded (INPUT = types.folded_in, OUTPUT = types.folded_out, LIKE = text);
CREATE CAST (types.folded AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (text AS types.folded) WITHOUT FUNCTION AS ASSIGNMENT;
CREATE FUNCTION types.cmp(types.folded, types.folded) RETURNS int LANGUAGE sql IMMUTABLE STRICT AS
    'SELECT pg_catalog.bttextcmp(pg_catalog.lower($1::text), pg_catalog.lower($2::text))';
"""
OPERATORS = ("<", "<=", "=", ">=", ">")
OPERATOR = """
CREATE FUNCTION types."f{name}"(types.folded, types.folded) RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS
    'SELECT types.cmp($1, $2) {name} 0';
CREATE OPERATOR types.{name} (FUNCTION = types."f{name}", LEFTARG = types.folded, RIGHTARG = types.folded);
"""
OPERATOR_CLASS = """
CREATE OPERATOR CLASS types.folded_ops DEFAULT FOR TYPE types.folded USING btree AS
    OPERATOR 1 types.<, OPERATOR 2 types.<=, OPERATOR 3 types.=, OPERATOR 4 types.>=, OPERATOR 5 types.>,
    FUNCTION 1 types.cmp(types.folded, types.folded);
"""


def create_types(database: Database) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('z', 'happy', 'a', 'sad', 'm', 'so-so', 'b')")
    database.execute("CREATE DOMAIN word AS varchar(20) CHECK (value <> '')")
    database.execute(FOLDED + "".join(OPERATOR.format(name=name) for name in OPERATORS) + OPERATOR_CLASS)


def check_paging(database: Database, columns: str, key: str, rows: str) -> None:
    """Rows that stay are read exactly once, in tiny chunks, while others come and go."""
    database.execute('DROP TABLE IF EXISTS "T t", spare; DROP PUBLICATION IF EXISTS dbsync_mypub')
    database.execute(
        f'CREATE TABLE "T t" (first int, {columns}, "a note" text, PRIMARY KEY ({key}));'
        'CREATE TABLE spare (LIKE "T t", n serial);'
        f"INSERT INTO spare ({key}) {rows};"
        f"""INSERT INTO "T t" ({key}, "a note") SELECT {key}, 'stays' FROM spare WHERE n % 3 > 0;"""
        'CREATE PUBLICATION dbsync_mypub FOR TABLE "T t"'
    )
    settings = database.settings()
    with database.connect() as writer, closing(connect(settings)) as conn:

        def churn() -> None:
            writer.execute("""DELETE FROM "T t" WHERE "a note" = 'moves' AND random() < 0.5""")
            writer.execute(
                f"""INSERT INTO "T t" ({key}, "a note") SELECT {key}, 'moves' FROM spare
                    WHERE n % 3 = 0 AND random() < 0.5 ON CONFLICT DO NOTHING"""
            )

        (selection,) = understand(conn, settings, 'SELECT "a note", * FROM "T t"')
        stays = everything(conn, selection)
        assert len(stays) > 1
        assert sorted(page(conn, selection, rows=1)) == sorted(page(conn, selection)) == sorted(stays)
        read = page(conn, selection, between=churn)
        assert sorted(line for line in read if not line.endswith("moves")) == sorted(stays)


@pytest.mark.parametrize("kind", KEYS)
def test_every_kind_of_key_is_paged_completely(typed: Database, kind: str) -> None:
    type_name, rows = KEYS[kind]
    check_paging(typed, f'"K ""k" {type_name}', '"K ""k"', rows)


PAIRS = {
    "same operators": ("b int, a text", "SELECT chr(65 + g % 4), g / 4 - 3 FROM generate_series(1, 24) AS g"),
    "other operators": ("b int, a types.folded", "SELECT chr(65 + g % 4), g / 4 - 3 FROM generate_series(1, 24) AS g"),
    "other collations": (
        'b int, a text COLLATE "POSIX"',
        "SELECT chr(65 + g % 4), g / 4 FROM generate_series(1, 24) AS g",
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_key_of_several_columns_is_paged_completely(typed: Database, kind: str) -> None:
    columns, rows = PAIRS[kind]
    check_paging(typed, columns, "a, b", rows)


def test_a_key_of_three_columns_with_other_operators(typed: Database) -> None:
    rows = "SELECT g % 2, chr(65 + g % 5), g / 10 FROM generate_series(0, 29) AS g"
    check_paging(typed, "c int, a types.folded, b int", "b, a, c", rows)


@pytest.mark.parametrize(
    "index",
    ["(a text_pattern_ops, b)", '(a COLLATE "C", b DESC)', "(b, a) INCLUDE (id)"],
)
def test_the_order_is_that_of_the_identity_index(database: Database, index: str) -> None:
    database.execute(
        "CREATE TABLE t (id int NOT NULL, a text NOT NULL, b int NOT NULL);"
        "INSERT INTO t SELECT g, chr(65 + g % 7), g / 7 FROM generate_series(1, 20) AS g;"
        f"CREATE UNIQUE INDEX i ON t {index}; ALTER TABLE t REPLICA IDENTITY USING INDEX i;"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        assert len(selection.key) == 2
        assert sorted(page(conn, selection)) == sorted(everything(conn, selection))


def test_keys_that_only_a_collation_tells_apart(database: Database) -> None:
    try:
        database.execute(
            "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
            "CREATE COLLATION strict (provider = icu, locale = 'und')"
        )
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL has no ICU")
    rows = "SELECT chr(97 + g % 10) || g FROM generate_series(1, 20) AS g"
    check_paging(database, "a text COLLATE loose", "a", rows)
    database.execute(
        "CREATE TABLE t (a text COLLATE loose NOT NULL); INSERT INTO t VALUES ('a'), ('A'), ('b'), ('B');"
        "CREATE UNIQUE INDEX i ON t (a COLLATE strict); ALTER TABLE t REPLICA IDENTITY USING INDEX i;"
        "ALTER PUBLICATION dbsync_mypub ADD TABLE t"
    )
    settings = database.settings()
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        assert sorted(page(conn, selection, rows=1)) == ["A", "B", "a", "b"]


def test_an_empty_table_is_one_open_range(database: Database, settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT * FROM items")
    assert next_ranges(conn, selection, None, 3, 2) == [Range(None, None)]


def test_keys_can_be_stored_as_json(settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT * FROM orders")
    first = next_ranges(conn, selection, None, 4, 2)
    assert first == [Range(None, ("2",)), Range(("2",), ("4",))]
    stored = tuple(json.loads(json.dumps(first[-1].upper)))
    assert next_ranges(conn, selection, stored, 4, 4)[-1] == Range(("7",), ("8",))


def test_a_short_chunk_is_shared_out_evenly(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("INSERT INTO items SELECT 1, g FROM generate_series(1, 5000) AS g")
    (selection,) = understand(conn, settings, "SELECT * FROM items")
    ranges = next_ranges(conn, selection, None, 20_000, 4)
    counts = [len(lines(conn, selection, part)) for part in ranges]
    assert sum(counts) == 5000
    assert len(counts) == 4
    assert max(counts) - min(counts) < 1000


def test_a_wide_row_fits_through(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("UPDATE orders SET note = repeat('wide', 5000000) WHERE id = 4")
    (selection,) = understand(conn, settings, "SELECT * FROM orders")
    assert max(map(len, page(conn, selection))) > 20_000_000


def test_a_chunk_is_read_in_the_callers_transaction(database: Database, settings: Settings, conn: Connection) -> None:
    (selection,) = understand(conn, settings, "SELECT * FROM orders")
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        snapshot = conn.execute("SELECT pg_export_snapshot()").fetchone()
        assert snapshot is not None
        database.execute("DELETE FROM orders")
        with closing(connect(settings)) as other, other.transaction():
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            other.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot[0]))
            assert len(page(other, selection)) == 10
            assert other.execute("SHOW search_path").fetchone() == ("pg_catalog, pg_temp",)
        assert len(page(conn, selection)) == 10
    assert page(conn, selection) == []


def plan(conn: Connection, query: str, params: Sequence[Param]) -> list[dict[str, Any]]:
    """The nodes that read a table, with what they really read."""
    with reading(conn):
        row = execute(conn, f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", params).fetchone()
    assert row is not None
    return list(_nodes(row[0][0]["Plan"]))


def read_rows(nodes: list[dict[str, Any]]) -> list[int]:
    scans = [node for node in nodes if "Relation Name" in node]
    return [node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0) for node in scans]


def test_the_keys_index_serves_the_chunks(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute("INSERT INTO items SELECT g, g % 1000, 'x' FROM generate_series(1, 100000) AS g")
    database.execute("VACUUM ANALYZE items")
    (selection,) = understand(conn, settings, "SELECT * FROM items WHERE sku = %s", ["x"])
    assert 90_000 < selection.estimated_rows < 110_000
    bound = chunking._Bound(list(selection.params))
    nodes = plan(conn, chunking._cuts_query(selection, ("500", "50500"), bound, 100, 10), bound.params)
    assert read_rows(nodes) == [101]
    values = chunking._Settings()
    query = chunking._rows_query(selection, Range(("500", "50500"), ("501", "1501")), values)
    with conn.transaction():
        values.apply(conn)
        nodes = plan(conn, query, [])
    assert read_rows(nodes) == [51]
    assert any("order_id" in node.get("Index Cond", "") for node in nodes)


def test_a_filtered_chunk_reads_only_its_range(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, open bool); "
        "INSERT INTO t SELECT g, g % 2 = 0 FROM generate_series(1, 50000) AS g;"
        "CREATE PUBLICATION dbsync_mypub FOR TABLE t WHERE (open) WITH (publish = 'insert')"
    )
    database.execute("VACUUM ANALYZE t")
    settings = database.settings()
    with closing(connect(settings)) as conn:
        (selection,) = understand(conn, settings, "SELECT * FROM t")
        bound = chunking._Bound([])
        nodes = plan(conn, chunking._rows_query(selection, Range(("40000",), ("40100",)), bound), bound.params)
        assert max(read_rows(nodes)) <= 200
        bound = chunking._Bound([])
        nodes = plan(conn, chunking._cuts_query(selection, ("40000",), bound, 100, 10), bound.params)
        assert max(read_rows(nodes)) <= 20_000


CHANGES = [
    "TRUNCATE orders",
    "ALTER TABLE orders ALTER id TYPE bigint",
    "ALTER TABLE orders ADD more int",
    "ALTER TABLE orders DROP note",
    "ALTER TABLE orders RENAME note TO words",
    "ALTER TABLE orders ALTER amount TYPE numeric(12,2)",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
    "VACUUM FULL orders",
    "CREATE TABLE below () INHERITS (orders)",
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_shows_what_a_snapshot_hides(
    database: Database, settings: Settings, conn: Connection, change: str
) -> None:
    database.execute("DROP VIEW seen; DROP MATERIALIZED VIEW kept")
    (selection,) = understand(conn, settings, "SELECT * FROM orders")
    before = fingerprint(conn, selection.relation.oid)
    database.execute("UPDATE orders SET note = 'x'; CREATE INDEX ON orders (note); ANALYZE orders")
    assert fingerprint(conn, selection.relation.oid) == before
    database.execute(change)
    assert fingerprint(conn, selection.relation.oid) != before


def test_the_fingerprint_covers_partitions(database: Database, settings: Settings, conn: Connection) -> None:
    database.execute(PARTITIONS)
    (oid,) = database.rows("SELECT 'sales'::regclass::oid::int8")[0]
    before = fingerprint(conn, oid)
    database.execute("TRUNCATE sales_us")
    assert fingerprint(conn, oid) != before


def test_a_column_that_is_added_while_the_statement_is_parsed_is_known(database: Database) -> None:
    """Parsing waits for the lock of the ALTER TABLE, and then sees what the transaction's first snapshot would not."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    database.execute("CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.connect(autocommit=False) as altering, connect(database.settings()) as conn:
        altering.execute("ALTER TABLE t ADD note text")

        def commit_when_it_waits() -> None:
            while not database.rows(waiting):
                pass
            altering.commit()

        committing = threading.Thread(target=commit_when_it_waits)
        committing.start()
        (found,) = understand(conn, database.settings(), "SELECT * FROM t")
        committing.join()
    assert found.columns == ("id", "a", "note")


def test_whoever_stops_reading_leaves_the_connection_as_it_was(
    database: Database, settings: Settings, conn: Connection
) -> None:
    database.execute("INSERT INTO orders SELECT g, repeat('n', 200) FROM generate_series(11, 100000) g")
    (selection,) = understand(conn, settings, "SELECT id, note FROM orders")
    groups = copy_out(conn, selection, Range(None, None))
    assert next(groups)
    groups.close()
    assert conn.info.transaction_status is TransactionStatus.IDLE
    assert len(everything(conn, selection)) == 100_000
