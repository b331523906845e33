"""PostgreSQL as `--to`: see `fix_target` for what it has to stand; types, evolution and what can go wrong beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from commands import SECRET, dbsync, publish, refused, until
from fix_postgres import Database, Server, fresh_database
from fix_target import SOURCE, STAMPED, Rows, Target, survives
from kinds import KINDS
from mirrored import delete, documents, info, mirror, not_applied_twice, output, relation, upsert
from pyspark.sql import SparkSession

from dbsync.batcher.postgres import PostgresBatcher
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN
from dbsync.syncer import Syncer


@pytest.fixture
def target(postgres: Server) -> Iterator[Database]:
    with fresh_database(postgres) as fresh:
        yield fresh


@pytest.fixture
def batcher(target: Database) -> Iterator[PostgresBatcher]:
    made = PostgresBatcher(target.dsn)
    made.log_name = "test"
    yield made
    made.close()


def url(database: Database, **changes: Any) -> str:
    server = database.server
    user, password = changes.get("user", server.user), changes.get("password", server.password)
    name = changes.get("name", database.name)
    return f"postgresql://{user}:{password}@{server.host}:{changes.get('port', server.port)}/{name}"


def types(database: Database, table: str) -> dict[str, str]:
    return dict(
        database.rows(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            [table],
        )
    )


def test_postgres_survives(database: Database, target: Database) -> None:
    def read(table: str) -> Rows:
        return target.rows(SOURCE[table])

    survives(database, Target(url(target), read, stamp=lambda: target.execute(STAMPED)))


ONE_ROW = "CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 1);"


def feed_itself(database: Database, spark: SparkSession, where: str = "", **settings: Any) -> int:
    """The source as its own target: how many rows are written for a change of one."""
    batcher = PostgresBatcher(f"{database.dsn} {where}")
    with Syncer(database.settings(**settings), batcher=batcher, spark=spark) as syncer:
        database.execute("UPDATE t SET a = 2")
        for _ in range(3):
            syncer.drain()
        return syncer.status().totals.upserts


@pytest.mark.parametrize(
    ("publication", "settings", "table"),
    [
        ("FOR TABLE t", {}, r"public\.t"),
        ("FOR ALL TABLES", {}, r"public\.dbsync_position"),
        ("FOR ALL TABLES", {"target_schema": "copy"}, r"public\.dbsync_position"),
        pytest.param(
            "FOR TABLES IN SCHEMA public",
            {"target_schema": "copy"},
            r"public\.dbsync_position",
            marks=pytest.mark.pg(">= 15"),
        ),
        pytest.param(
            "FOR TABLES IN SCHEMA public, copy",
            {"target_schema": "copy", "where": "options=-csearch_path=home"},
            r"copy\.t",
            marks=pytest.mark.pg(">= 15"),
        ),
        pytest.param(
            "FOR TABLES IN SCHEMA public",
            {"target_prefix": "copy_", "where": "options=-csearch_path=home"},
            r"public\.copy_t",
            marks=pytest.mark.pg(">= 15"),
        ),
    ],
)
def test_what_would_come_back_for_ever_is_refused(
    database: Database, spark: SparkSession, publication: str, settings: dict[str, Any], table: str
) -> None:
    database.execute(f"{ONE_ROW} CREATE SCHEMA copy; CREATE SCHEMA home; CREATE PUBLICATION dbsync_mypub {publication}")
    with pytest.raises(
        BatcherError, match=f'target is the source itself, and the publication "dbsync_mypub" has the table {table} in'
    ) as raised:
        feed_itself(database, spark, **settings)
    assert not raised.value.retryable
    assert "Name another database in DBSYNC_TO" in (raised.value.hint or "")
    tables = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace::regnamespace::text = ANY (%s)"
    assert database.rows(tables, [["public", "copy", "home"]]) == [("t",)]


def test_a_copy_in_the_source_that_is_not_published_is_kept(database: Database, spark: SparkSession) -> None:
    database.execute(f"{ONE_ROW} CREATE PUBLICATION dbsync_mypub FOR TABLE t; CREATE PUBLICATION other FOR ALL TABLES")
    assert feed_itself(database, spark, target_schema="copy") == 1
    assert feed_itself(database, spark, target_prefix="copy_") == 1
    assert database.rows("SELECT * FROM copy.t") == database.rows("SELECT * FROM copy_t") == [(1, 2)]


def test_a_partition_of_what_is_published_is_refused_too(database: Database, spark: SparkSession) -> None:
    database.execute(
        f"{ONE_ROW} CREATE TABLE copy_t (id int PRIMARY KEY, a int) PARTITION BY RANGE (id);"
        "CREATE TABLE part PARTITION OF copy_t DEFAULT; CREATE PUBLICATION dbsync_mypub FOR TABLE t, part"
    )
    with pytest.raises(BatcherError, match=r"the publication .* has the table public\.copy_t in it"):
        feed_itself(database, spark, target_prefix="copy_")


def test_the_command_refuses_to_feed_the_source(database: Database) -> None:
    publish(database)
    database.execute("INSERT INTO orders VALUES (1, 'a')")
    done = dbsync(database, "run", DBSYNC_TO=url(database), DBSYNC_SNAPSHOT="initial")
    told = [line for line in done.stderr.splitlines() if " INFO " not in line and " ERROR " not in line]
    done.stderr = "\n".join(told)
    refused(done, 5, "The target is the source itself", "Name another database in DBSYNC_TO, or move the tables")
    assert database.rows("SELECT * FROM orders") == [(1, "a")]


def test_types_survive(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    database.execute(KINDS)
    described = mirror(batcher, 10, database, "kinds")
    names = list(described.column_names)
    for expected, found in zip(output(database, "kinds", names), output(target, "kinds", names), strict=True):
        differ = {name: pair for name, *pair in zip(names, expected, found, strict=True) if pair[0] != pair[1]}
        # Of json's two, the one that keeps its formatting there loses it here.
        assert set(differ) <= {"doc"}, differ
        for one, other in differ.values():
            assert json.loads(one) == json.loads(other)
    was, became = types(database, "kinds"), types(target, "kinds")
    assert {name: became[name] for name in names if became[name] != was[name]} == {
        "cash": "text", "class": "text", "feel": "text", "two": "text", "little": "bigint", "cost": "numeric",
        "at": "text", "feels": "text[]", "classes": "text[]",
    }  # fmt: skip


def test_what_a_value_loses_on_the_way(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    """As the README says."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, doc json, docb jsonb, span interval, mixed interval)")
    database.execute(
        "INSERT INTO t VALUES (1, ' {\"a\":1, \"b\":2,\"a\":3}', '{}', '24:00:00', '1 day -01:00'),"
        " (2, 'null', 'null', '1 mon', '-1 mon 24:00')"
    )
    mirror(batcher, 10, database, "t")
    assert output(target, "t", ["doc", "docb", "span", "mixed"]) == [
        ('{"a": 3, "b": 2}', "{}", "1 day", "23:00:00"),
        (None, None, "1 mon", "-1 mons +24:00:00"),
    ]


def test_a_batch_is_whole_or_not_there(target: Database, batcher: PostgresBatcher) -> None:
    assert batcher.position() is None
    upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    batcher.batch_delete("shop.thing", ["a"])
    batcher.batch_upsert("shop.thing", {"b": {"n": 2}})
    assert target.rows("SELECT * FROM shop.thing") == [("a", 1)]
    batcher.begin(info(20))
    batcher.batch_upsert("shop.thing", {"c": {"n": 3}})
    batcher.commit(info(20))
    batcher.begin(info(30))
    batcher.batch_delete("shop.thing", ["a", "c"])
    batcher.close()
    assert target.rows("SELECT * FROM shop.thing ORDER BY _id") == [("a", 1), ("c", 3)]
    assert batcher.position() == LSN(20)


def test_two_sources_keep_two_positions(target: Database, batcher: PostgresBatcher) -> None:
    upsert(batcher, 10, "one.thing", {"a": {"n": 1}})
    other = PostgresBatcher(target.dsn)
    other.log_name = "another"
    assert other.position() is None
    upsert(other, 99, "other.thing", {"a": {"n": 1}})
    other.close()
    assert batcher.position() == LSN(10)


def test_a_batch_whose_commit_was_not_answered_is_not_written_again(target: Database, batcher: PostgresBatcher) -> None:
    def hand_over() -> None:
        batcher.begin(info(20))
        batcher.batch_truncate("shop.thing")
        batcher.batch_delete("shop.thing", ["b"])
        batcher.batch_upsert("shop.thing", {"a": {"n": 2}})
        batcher.commit(info(20))

    upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    target.execute(AUDIT.format("shop.thing", "_id"))
    # The target ends the session when the batch is in, and before it could say so.
    store: Any = batcher._store
    commit = store.commit

    def commit_unanswered(*args: Any) -> None:
        commit(*args)
        store.commit = commit
        raise BatcherError("the connection broke")

    store.commit = commit_unanswered
    with pytest.raises(BatcherError):
        hand_over()
    written = target.rows("SELECT * FROM audit")
    hand_over()
    assert target.rows("SELECT * FROM audit") == written == [("TRUNCATE", None), ("INSERT", "a")]
    # A later batch up to the same place is another one: its rows were re-read.
    batcher.begin(info(20))
    batcher.batch_upsert("shop.thing", {"c": {"n": 3}})
    batcher.commit(info(20))
    assert target.rows("SELECT * FROM shop.thing ORDER BY _id") == [("a", 2), ("c", 3)]


AUDIT = """
CREATE TABLE public.audit (what text, id text);
CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.audit VALUES (TG_OP, to_jsonb(CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END) ->> TG_ARGV[0]);
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {0} FOR EACH ROW EXECUTE FUNCTION public.audit('{1}');
CREATE TRIGGER audit_truncate AFTER TRUNCATE ON {0} FOR EACH STATEMENT EXECUTE FUNCTION public.audit();
"""


def test_no_batch_is_applied_twice(database: Database, target: Database, spark: SparkSession) -> None:
    target.execute("CREATE TABLE t (id int PRIMARY KEY, name text);" + AUDIT.format("t", "id"))
    made = lambda: PostgresBatcher(target.dsn)  # noqa: E731
    not_applied_twice(database, spark, made, lambda: target.rows("SELECT * FROM audit"))
    assert target.rows("SELECT * FROM t ORDER BY id") == database.rows("SELECT * FROM t ORDER BY id")


def test_columns_follow_the_source(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    database.execute(
        "CREATE TABLE t (id int2 PRIMARY KEY, a int2, b varchar(3), c numeric(5, 2), d real, e date, f int[], old text)"
    )
    database.execute(
        "INSERT INTO t VALUES (1, 2, 'abc', 1.25, 0.5, '2024-01-02', '{1}', 'x'),"
        " (2, 3, 'x', 0, 0, 'infinity', '{}', 'y')"
    )
    mirror(batcher, 10, database, "t")
    database.execute(
        "ALTER TABLE t ALTER id TYPE int8, ALTER a TYPE numeric, ALTER b TYPE text, ALTER c TYPE numeric(9, 4),"
        " ALTER d TYPE float8, ALTER e TYPE timestamp, ALTER f TYPE int8[], DROP old, ADD added timestamptz;"
        "UPDATE t SET added = '2024-01-01 00:00+00', b = 'longer', f = '{9999999999}' WHERE id = 2"
    )
    described = relation(database, "t")
    docs = documents(database, described)
    upsert(batcher, 20, "public.t", {"2": docs["2"]}, described)
    expected = {**types(database, "t"), "old": "text"}
    assert types(target, "t") == expected
    columns = list(described.column_names)
    assert output(target, "t", columns) == output(database, "t", columns)
    assert target.rows("SELECT old FROM t ORDER BY id") == [("x",), (None,)]
    # The source may go back to a smaller type: what is here has room for it.
    database.execute("ALTER TABLE t ALTER id TYPE int4, ALTER e TYPE date")
    mirror(batcher, 30, database, "t")
    assert types(target, "t") == expected


def test_a_column_comes_to_one_table_of_several(target: Database, batcher: PostgresBatcher) -> None:
    for number, doc in enumerate(({"n": 1}, {"n": 2, "more": 3}, {"n": 4})):
        batcher.begin(info(number))
        batcher.batch_upsert("one", {"a": doc})
        batcher.batch_upsert("other", {"b": {"n": 5 * number}})
        batcher.commit(info(number))
    assert target.rows("SELECT * FROM one") == [("a", 4, None)]
    assert target.rows("SELECT * FROM other") == [("b", 10)]


def test_a_type_that_cannot_follow_names_the_column(
    database: Database, target: Database, batcher: PostgresBatcher
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, day date); INSERT INTO t VALUES (1, '2024-01-02')")
    mirror(batcher, 10, database, "t")
    database.execute("ALTER TABLE t ALTER day TYPE int USING 5")
    with pytest.raises(BatcherError, match=r"column day of public\.t is date .* integer, cannot") as raised:
        mirror(batcher, 20, database, "t")
    assert not raised.value.retryable
    target.execute("ALTER TABLE t DROP day")
    mirror(batcher, 20, database, "t")
    assert target.rows("SELECT * FROM t") == [(1, 5)]


def test_the_key_follows_if_the_rows_allow_it(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, place text NOT NULL); INSERT INTO t VALUES (1, 'a'), (2, 'a')"
    )
    mirror(batcher, 10, database, "t")
    database.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, place); INSERT INTO t VALUES (1, 'b')")
    described = mirror(batcher, 20, database, "t")
    assert target.rows("SELECT * FROM t ORDER BY 1, 2") == [(1, "a"), (1, "b"), (2, "a")]
    delete(batcher, 30, "public.t", ['["1", "a"]', '["9", "z"]'], described)
    assert target.rows("SELECT * FROM t ORDER BY 1, 2") == [(1, "b"), (2, "a")]
    database.execute(
        "TRUNCATE t; ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (place); INSERT INTO t VALUES (5, 'c')"
    )
    target.execute("INSERT INTO t VALUES (7, 'b')")
    with pytest.raises(BatcherError, match=r"could not make \(place\) the key of public\.t"):
        mirror(batcher, 40, database, "t")


def test_dropped_columns_go_where_that_is_asked_for(database: Database, target: Database) -> None:
    batcher = PostgresBatcher(target.dsn, drop_columns=True)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b int); INSERT INTO t VALUES (1, 2, 3)")
    mirror(batcher, 10, database, "t")
    database.execute("ALTER TABLE t DROP a")
    mirror(batcher, 20, database, "t")
    batcher.close()
    assert target.rows("SELECT * FROM t") == [(1, 3)]


def test_soft_deletes(database: Database, target: Database) -> None:
    batcher = PostgresBatcher(target.dsn, soft_delete=True)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 2), (2, 3), (3, 4)")
    described = mirror(batcher, 10, database, "t")
    gone = "SELECT id, _deleted_at FROM t WHERE _deleted_at IS NOT NULL ORDER BY id"
    delete(batcher, 20, "public.t", ["1", "9"], described)
    first = target.rows(gone)
    assert [id for id, _ in first] == [1]
    delete(batcher, 30, "public.t", ["1", "2"], described)
    assert target.rows(gone)[0] == first[0]
    upsert(batcher, 40, "public.t", {"2": {"id": 2, "a": 9}}, described)
    assert target.rows(gone) == first
    batcher.begin(info(50, described))
    batcher.batch_truncate("public.t")
    batcher.batch_upsert("public.t", {"3": {"id": 3, "a": 4}})
    batcher.commit(info(50, described))
    assert [id for id, _ in target.rows(gone)] == [1, 2]
    assert target.rows(gone)[0] == first[0]
    database.execute("ALTER TABLE t ADD _deleted_at timestamptz")
    with pytest.raises(BatcherError, match=r"public\.t has a column _deleted_at"):
        mirror(batcher, 60, database, "t")
    batcher.close()


def test_odd_names(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    database.execute(
        'CREATE SCHEMA "My %s Schema"; CREATE TABLE "My %s Schema"."select ""x"" %(a)s" ('
        '"Id %" int, "id %" text, "order" int, "k1" int, "%s" int, "ünï.""q""" text, PRIMARY KEY ("Id %", "id %"));'
        """INSERT INTO "My %s Schema"."select ""x"" %(a)s" VALUES (1, '["', 2, 3, 4, 'x'), (2, '\\', 3, 4, 5, NULL)"""
    )
    described = mirror(batcher, 10, database, 'select "x" %(a)s', "My %s Schema")
    rows = 'SELECT * FROM "My %s Schema"."select ""x"" %(a)s" ORDER BY 1'
    assert target.rows(rows) == database.rows(rows)
    delete(batcher, 20, described.doctype, list(documents(database, described))[:1], described)
    assert target.rows(rows) == database.rows(rows)[1:]


def test_documents_of_a_handler(target: Database, batcher: PostgresBatcher) -> None:
    many = {"a": {"n": 1, "tags": ["x", {"y": None}], "void": None}, "b": {"n": 2, "moment": "infinity"}}
    upsert(batcher, 10, "thing", many)
    upsert(batcher, 20, "thing", {"a": {"n": 2**70}, "c": {"void": True}})
    upsert(batcher, 30, "thing", {"d": {"n": "many", "void": 1}})
    assert types(target, "thing") == {"_id": "text", "n": "text", "tags": "jsonb", "moment": "text", "void": "text"}
    assert target.rows("SELECT _id, n, tags, moment, void FROM thing ORDER BY _id") == [
        ("a", str(2**70), None, None, None),
        ("b", "2", None, "infinity", None),
        ("c", None, None, None, "true"),
        ("d", "many", None, None, "1"),
    ]
    with pytest.raises(BatcherError, match="has a column _id"):
        upsert(batcher, 40, "thing", {"a": {"_id": 1}})


def test_a_table_that_was_there(database: Database, target: Database, batcher: PostgresBatcher) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text); INSERT INTO t VALUES (1, 'x')")
    target.execute(
        "CREATE TABLE t (mine int DEFAULT 7, id bigint PRIMARY KEY, a text,"
        " twice bigint GENERATED ALWAYS AS (id * 2) STORED)"
    )
    mirror(batcher, 10, database, "t")
    target.execute("UPDATE t SET mine = 8")
    mirror(batcher, 20, database, "t")
    assert target.rows("SELECT * FROM t") == [(8, 1, "x", 2)]
    database.execute("ALTER TABLE t ADD b int")
    with pytest.raises(BatcherError, match=r"public\.t in the target was not made by dbsync and lacks the column b"):
        mirror(batcher, 30, database, "t")
    target.execute("ALTER TABLE t ADD b int, DROP CONSTRAINT t_pkey")
    with pytest.raises(BatcherError, match=r"was not made by dbsync and has not \(id\) as its primary key"):
        mirror(batcher, 40, database, "t")
    database.execute("CREATE TABLE dbsync_position (id int PRIMARY KEY); INSERT INTO dbsync_position VALUES (1)")
    with pytest.raises(BatcherError, match="bears a name that dbsync needs for itself"):
        mirror(batcher, 50, database, "dbsync_position")


def test_a_name_that_is_too_long(batcher: PostgresBatcher) -> None:
    with pytest.raises(BatcherError, match="63 bytes"):
        upsert(batcher, 10, "public." + 32 * "ü", {"a": {"n": 1}})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"user": "nobody_here", "password": "geheim-4711"}, "did not let dbsync in"),
        ({"name": "not_there", "password": "geheim-4711"}, "did not let dbsync in"),
        ({"password": "geheim-4711"}, "did not let dbsync in"),
        ({"port": 1, "password": "geheim-4711"}, "cannot be reached"),
    ],
)
def test_a_connection_that_is_refused(target: Database, changes: dict[str, Any], sentence: str) -> None:
    if changes.get("name"):
        changes = {**changes, "password": target.server.password}
    batcher = PostgresBatcher(url(target, **changes))
    with pytest.raises(BatcherError, match=sentence) as raised:
        batcher.position()
    assert raised.value.retryable == ("port" in changes)
    assert raised.value.hint
    assert "geheim-4711" not in str(raised.value)
    assert target.server.password not in str(raised.value)


def test_the_command_says_it_in_one_sentence(database: Database, target: Database) -> None:
    publish(database)
    done = dbsync(database, "run", DBSYNC_TO=url(target, password=SECRET))
    refused(done, 5, "did not let dbsync in", "Check the role and its password in DBSYNC_TO.")


def test_a_url_that_is_none() -> None:
    with pytest.raises(ConfigError, match="not one that PostgreSQL's own programs would take") as raised:
        PostgresBatcher("postgresql://user:geheim-4711@HOST:port:9/x?unknown=1")
    assert "geheim-4711" not in str(raised.value)


def test_a_role_that_may_not(target: Database) -> None:
    target.execute(
        "DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN PASSWORD 'guest'; REVOKE ALL ON SCHEMA public FROM public"
    )
    target.execute("GRANT USAGE ON SCHEMA public TO guest")
    batcher = PostgresBatcher(url(target, user="guest", password="guest"))
    try:
        for sentence, statement in PERMISSIONS:
            with pytest.raises(BatcherError) as raised:
                upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
            assert sentence in raised.value.message
            assert not raised.value.retryable
            assert statement in (raised.value.hint or "").replace(target.name, "DB")
            target.execute((raised.value.hint or "").partition(", or")[0].rstrip(";"))
        upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    finally:
        batcher.close()
        target.execute("DROP OWNED BY guest CASCADE; DROP ROLE guest")


def test_a_statement_that_a_hint_names_can_be_run_whatever_the_names(target: Database) -> None:
    target.execute('DROP ROLE IF EXISTS "Guest"; CREATE ROLE "Guest" LOGIN PASSWORD \'guest\'')
    target.execute(
        'GRANT CREATE ON SCHEMA public TO "Guest"; CREATE SCHEMA "My Shop"; GRANT USAGE ON SCHEMA "My Shop" TO "Guest"'
    )
    target.execute('CREATE TABLE "My Shop"."Thing" (_id text PRIMARY KEY, n bigint)')
    batcher = PostgresBatcher(url(target, user="Guest", password="guest"))
    try:
        for doc, sentence, statement in (
            (
                {"n": 1},
                "may not write to My Shop.Thing",
                'GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {} TO "Guest"',
            ),
            ({"n": 1, "more": 2}, "may not add the column more", 'ALTER TABLE {} OWNER TO "Guest"'),
        ):
            with pytest.raises(BatcherError, match=sentence) as raised:
                upsert(batcher, 10, "My Shop.Thing", {"a": doc})
            assert raised.value.hint == statement.format('"My Shop"."Thing"') + ";"
            target.execute(raised.value.hint)
            upsert(batcher, 10, "My Shop.Thing", {"a": doc})
            # From here on the table is one that dbsync made, as far as it knows.
            target.execute("INSERT INTO dbsync_tables VALUES ('My Shop.Thing', 'My Shop.Thing') ON CONFLICT DO NOTHING")
            batcher.close()
    finally:
        batcher.close()
        target.execute('DROP OWNED BY "Guest" CASCADE; DROP ROLE "Guest"')


PERMISSIONS = [
    ('The role "guest" may not make dbsync\'s own tables', 'GRANT USAGE, CREATE ON SCHEMA "public" TO "guest"'),
    ('The role "guest" may not make the schema shop', 'GRANT CREATE ON DATABASE "DB" TO "guest"'),
]


def test_a_session_that_is_ended_in_the_middle(target: Database, batcher: PostgresBatcher) -> None:
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
    upsert(batcher, 10, "shop.thing", {"a": {"n": 1}})
    batcher.begin(info(20))
    batcher.batch_upsert("shop.thing", {"a": {"n": 2}})
    target.rows(end, [target.name])
    with pytest.raises(BatcherError, match=r"The connection to the target at .* broke") as raised:
        batcher.batch_upsert("shop.thing", {"b": {"n": 2}})
    assert raised.value.retryable
    assert target.rows("SELECT * FROM shop.thing") == [("a", 1)]
    upsert(batcher, 20, "shop.thing", {"a": {"n": 2}, "b": {"n": 2}})
    assert target.rows("SELECT * FROM shop.thing ORDER BY _id") == [("a", 2), ("b", 2)]
    assert batcher.position() == LSN(20)


def test_a_target_that_goes_away_and_comes_back(
    database: Database, target: Database, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int); CREATE PUBLICATION dbsync_mypub FOR TABLE t")
    batcher = PostgresBatcher(target.dsn)
    with Syncer(database.settings(retries=50, retry_seconds=0.1), batcher=batcher, spark=spark) as syncer:
        database.execute("INSERT INTO t VALUES (1, 1), (2, 2)")
        syncer.drain()
        _let_in(target, "false")
        database.execute("UPDATE t SET a = 3 WHERE id = 1; INSERT INTO t VALUES (4, 4); DELETE FROM t WHERE id = 2")
        until(lambda: caplog.text.count("Trying batch") > 2)
        _let_in(target, "true")
        syncer.drain()
    assert "broke" in caplog.text
    assert "cannot be reached" in caplog.text
    assert target.rows("SELECT * FROM t ORDER BY id") == [(1, 3), (4, 4)]


def _let_in(target: Database, anybody: str) -> None:
    with psycopg.connect(target.server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {target.name} ALLOW_CONNECTIONS {anybody}")
        admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [target.name])
