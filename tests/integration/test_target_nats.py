"""A NATS JetStream stream as `--to`: see `fix_target` for what it has to stand; and what may be wrong with a server."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import trustme
from commands import SECRET, dbsync, publish, refused, running
from fix_nats import NatsServer, Published, nats_serving
from fix_postgres import Database
from fix_target import COLUMNS, Rows, Target, drained, kinds_told, survives
from nats.js import JetStreamContext
from pyspark.sql import SparkSession

from dbsync.batcher import BatchInfo
from dbsync.batcher.nats import NatsBatcher, subject
from dbsync.errors import BatcherError, ConfigError
from dbsync.lsn import LSN

QUICK = {"patience_seconds": 0.3, "timeout_seconds": 2.0}
USERS = """
accounts {
  SHOP: {
    jetstream: enabled
    users: [
      {user: "all", password: "all"}
      {user: "sender", password: "geheim-4711", permissions: {publish: ["$JS.API.>"], subscribe: "_INBOX.>"}}
      {user: "writer", password: "geheim-4711", permissions: {publish: ["SHOP.>"], subscribe: "_INBOX.>"}}
    ]
  }
  OTHER: { users: [{user: "plain", password: "plain"}] }
}
"""


@contextmanager
def open_batch(url: str, number: int = 1, **arguments: Any) -> Iterator[NatsBatcher]:
    batcher = NatsBatcher(url, **{**QUICK, **arguments})
    try:
        batcher.position()
        batcher.begin(batch(number))
        yield batcher
    finally:
        batcher.close()


def batch(number: int) -> BatchInfo:
    return BatchInfo(number, LSN("0/1"), LSN("0/20"))


def failure(url: str, **docs: dict[str, Any]) -> BatcherError:
    """What it says when it cannot publish; never with what is secret."""
    with pytest.raises(BatcherError) as raised, open_batch(url) as batcher:
        batcher.batch_upsert("public.orders", docs)
    assert SECRET not in str(raised.value)
    assert re.fullmatch(r"[^\n]+\.", raised.value.message)
    return raised.value


def held(messages: list[Published]) -> dict[str, dict[str, Any]]:
    """What is so after all of that, by type and id."""
    found: dict[str, dict[str, Any]] = {}
    for content in (message.content for message in messages):
        documents = found.setdefault(content["type"], {})
        match content["op"]:
            case "truncate":
                documents.clear()
            case "delete":
                documents.pop(content["id"], None)
            case "upsert":
                documents[content["id"]] = content["doc"]
    return found


def rows(messages: list[Published], table: str) -> Rows:
    documents = held(messages).get(f"public.{table}", {}).values()
    return sorted(tuple(document[name] for name in COLUMNS[table]) for document in documents)


def test_a_stream_survives(database: Database, nats_server: NatsServer) -> None:
    def read(table: str) -> Rows:
        return rows(nats_server.published("SHOP"), table)

    survives(database, Target(nats_server.url("SHOP"), read, exactly_once=False))
    messages = nats_server.published("SHOP")
    assert len({message.id for message in messages}) == len(messages)
    assert {message.subject for message in messages} == {f"SHOP.public.{table}" for table in COLUMNS}


def test_every_kind_of_value_is_told_by_the_engine(
    database: Database, nats_server: NatsServer, spark: SparkSession
) -> None:
    kinds_told(
        database,
        NatsBatcher(nats_server.url("SHOP")),
        spark,
        lambda: held(nats_server.published("SHOP"))["public.kinds"],
    )


def test_one_that_goes_away_and_comes_back_misses_nothing(database: Database, nats_server: NatsServer) -> None:
    publish(database)
    with running(database, DBSYNC_TO=nats_server.url("SHOP"), DBSYNC_SNAPSHOT="initial") as process:
        database.execute("INSERT INTO orders SELECT i, 'first' FROM generate_series(1, 1000) AS i")
        drained(database, process)
        nats_server.stop()
        database.execute("UPDATE orders SET note = 'second' WHERE id <= 900")
        nats_server.start()
        drained(database, process)
        nats_server.kill()
        database.execute("DELETE FROM orders WHERE id <= 10")
        nats_server.start()
        drained(database, process)
    expected = {str(i): "second" if i <= 900 else "first" for i in range(11, 1001)}
    assert {id: doc["note"] for id, doc in held(nats_server.published("SHOP"))["public.orders"].items()} == expected


def test_what_is_wrong_with_the_server_ends_dbsync_with_one_sentence(database: Database, tmp_path: Path) -> None:
    publish(database)
    with nats_serving(tmp_path, USERS, login="all:all@") as server:
        where = f"The NATS server nats://localhost:{server.port}"
        for login, sentence, hint in (
            (f"all:{SECRET}@", f"{where} did not let dbsync in.", "the password in the target's URL"),
            (f"writer:{SECRET}@", f"{where} does not let the user publish.", "publish SHOP.> and $JS.API.>"),
            ("plain:plain@", f"JetStream is off at {where.removeprefix('The NATS server ')}.", "Turn it on there."),
        ):
            refused(dbsync(database, "run", DBSYNC_TO=server.url("SHOP", login)), 5, sentence, hint)


def test_a_change_is_a_message(nats_server: NatsServer) -> None:
    with open_batch(nats_server.url("SHOP")) as batcher:
        batcher.batch_truncate("s.t")
        batcher.batch_delete("s.t", ["1"])
        pickle.loads(pickle.dumps(batcher)).batch_upsert("s.t", {"2": {"v": Decimal("1.50"), "ü": "ß"}})
    messages = nats_server.published("SHOP")
    assert [message.content for message in messages] == [
        {"op": "truncate", "type": "s.t"},
        {"op": "delete", "type": "s.t", "id": "1"},
        {"op": "upsert", "type": "s.t", "id": "2", "doc": {"v": "1.50", "ü": "ß"}},
    ]
    assert {message.subject for message in messages} == {"SHOP.s.t"}


def test_a_stream_that_is_not_there_is_made_and_one_that_is_stays_as_it_is(nats_server: NatsServer) -> None:
    with open_batch(nats_server.url("SHOP")) as batcher:
        batcher.batch_delete("s.t", ["1"])
        info = nats_server.run(lambda js: js.stream_info("SHOP"))
        assert info.config.subjects == ["SHOP.>"]
        nats_server.run(lambda js: js.delete_stream("SHOP"))
        batcher.begin(batch(2))
        batcher.batch_delete("s.t", ["2"])
        assert [message.content["id"] for message in nats_server.published("SHOP")] == ["2"]
    nats_server.run(lambda js: js.add_stream(name="KEPT", subjects=["KEPT.s.*"]))
    with open_batch(nats_server.url("KEPT")) as batcher:
        batcher.batch_delete("s.t", ["1"])
    assert nats_server.run(lambda js: js.stream_info("KEPT")).config.subjects == ["KEPT.s.*"]


@pytest.mark.parametrize(
    ("doctype", "expected"),
    [
        ("public.orders", "S.public.orders"),
        ("public.my table", "S.public.my%20table"),
        ("a.b.c", "S.a.b%2Ec"),
        ("*.>", "S.%2A.%3E"),
        ("ä.50%", "S.%C3%A4.50%25"),
        ("order", "S.order"),
        (".x", "S.%2Ex"),
        ("x.", "S.x%2E"),
    ],
)
def test_any_name_has_a_subject_and_can_be_had_back(doctype: str, expected: str) -> None:
    assert subject("S", doctype) == expected
    assert ".".join(map(unquote, expected.split(".")[1:])) == doctype


def test_odd_names_arrive(nats_server: NatsServer) -> None:
    doctypes = ["public.my table", "a.b.c", "*.>", "ä.50%", "order", '"."', "a\tb.c\nd"]
    with open_batch(nats_server.url("SHOP")) as batcher:
        for doctype in doctypes:
            batcher.batch_delete(doctype, ["1"])
    messages = nats_server.published("SHOP")
    assert [message.content["type"] for message in messages] == doctypes
    assert [".".join(map(unquote, message.subject.split(".")[1:])) for message in messages] == doctypes


def test_the_same_change_is_in_the_stream_once_and_a_later_state_is_not_lost(nats_server: NatsServer) -> None:
    with open_batch(nats_server.url("SHOP")) as batcher:
        batcher.batch_upsert("s.t", {"1": {"v": "A"}, "2": {"v": "A"}})
        batcher.begin(batch(1))  # the engine tries the batch again
        pickle.loads(pickle.dumps(batcher)).batch_upsert("s.t", {"2": {"v": "A"}, "1": {"v": "A"}, "3": {"v": "A"}})
        for number, value in ((2, "B"), (3, "A")):  # of the same transaction, as it may be: the LSN is the same
            batcher.begin(batch(number))
            batcher.batch_upsert("s.t", {"1": {"v": value}})
    found = [(message.content["id"], message.content["doc"]["v"]) for message in nats_server.published("SHOP")]
    assert found == [("1", "A"), ("2", "A"), ("3", "A"), ("1", "B"), ("1", "A")]


def test_after_a_restart_no_older_state_comes_after_a_newer_one(nats_server: NatsServer) -> None:
    """The log is cut into other batches then, and one of them is what it was before."""
    for numbers in ((1, 2), (1, 3, 2)):
        with open_batch(nats_server.url("SHOP")) as batcher:
            for number in numbers:
                batcher.begin(BatchInfo(number, LSN(number), LSN(10 * number)))
                batcher.batch_upsert("s.t", {"1": {"v": "B" if number == 2 else "A"}})
    assert nats_server.published("SHOP")[-1].content["doc"] == {"v": "B"}


def test_many_messages_are_under_way_together_and_all_arrive_in_order(nats_server: NatsServer) -> None:
    with open_batch(nats_server.url("SHOP")) as batcher:
        batcher.batch_upsert("s.t", {str(i): {"v": "x" * 500} for i in range(5_000)})
    assert [message.content["id"] for message in nats_server.published("SHOP")] == [str(i) for i in range(5_000)]


def test_a_server_that_breaks_off_in_the_middle_is_waited_for(nats_server: NatsServer) -> None:
    def bounce() -> None:
        nats_server.kill()
        nats_server.start()

    with open_batch(nats_server.url("SHOP"), patience_seconds=60) as batcher:
        outage = threading.Thread(target=bounce)
        outage.start()
        for start in range(0, 20_000, 1_000):
            batcher.batch_upsert("s.t", {str(i): {"v": i} for i in range(start, start + 1_000)})
        outage.join()
    assert held(nats_server.published("SHOP"))["s.t"].keys() == {str(i) for i in range(20_000)}


def test_a_server_that_stays_away_is_left_to_the_engine(nats_server: NatsServer) -> None:
    nats_server.stop()
    error = failure(nats_server.url("SHOP", f"somebody:{SECRET}@"))
    assert error.retryable
    assert error.message.startswith(f"The NATS server nats://localhost:{nats_server.port} cannot be reached: ")


def test_a_record_that_is_too_large_is_named(tmp_path: Path) -> None:
    with nats_serving(tmp_path, "max_payload: 2000") as server:
        with open_batch(server.url("SHOP")) as batcher:
            batcher.batch_upsert("public.orders", {"7": {"note": "x" * 1700}})
        error = failure(server.url("SHOP"), a={"note": "x"}, b={"note": "x" * 1950})
        assert not error.retryable
        assert re.match(r"The record public\.orders b makes a message of 2\d+ bytes, and .* takes 2000", error.message)
        server.run(lambda js: js.add_stream(name="SMALL", subjects=["SMALL.>"], max_msg_size=500))
        error = failure(server.url("SMALL"), a={"note": "x"}, b={"note": "x" * 600})
        assert not error.retryable
        assert re.match(r"The record public\.orders b .* more than the stream SMALL takes", error.message)


def test_a_message_just_within_the_limit_is_taken(tmp_path: Path) -> None:
    with nats_serving(tmp_path, "max_payload: 2000") as server:
        too_large = failure(server.url("SHOP"), a={"note": "x" * 2_000}).message
        size = re.search(r"a message of (\d+) bytes", too_large)
        assert size
        fits = 4_000 - int(size[1])
        with open_batch(server.url("SHOP")) as batcher:
            batcher.batch_upsert("public.orders", {"a": {"note": "x" * fits}})
        assert "a message of 2001 bytes" in failure(server.url("SHOP"), a={"note": "x" * (fits + 1)}).message


def test_a_stream_for_other_subjects_is_said_to_be_so(nats_server: NatsServer) -> None:
    async def prepare(js: JetStreamContext) -> None:
        await js.add_stream(name="NARROW", subjects=["NARROW.public.customers"])
        await js.add_stream(name="WRONG", subjects=["elsewhere"])
        await js.add_stream(name="CATCHES", subjects=["WRONG.>"])

    nats_server.run(prepare)
    for stream in ("NARROW", "WRONG"):
        error = failure(nats_server.url(stream), a={"note": "x"})
        assert not error.retryable
        assert error.message == f"The stream {stream} does not take the subject {stream}.public.orders."
        assert error.hint == f"Add {stream}.> to its subjects."


def test_a_full_stream_may_have_room_again(nats_server: NatsServer) -> None:
    async def prepare(js: JetStreamContext) -> None:
        await js.add_stream(name="FULL", subjects=["FULL.>"], max_msgs=1, discard="new")

    nats_server.run(prepare)
    error = failure(nats_server.url("FULL"), a={"note": "x"}, b={"note": "x"})
    assert error.retryable
    assert "The stream FULL at" in error.message
    assert "maximum messages exceeded" in error.message


def test_a_user_who_may_not_publish_is_told_so(tmp_path: Path) -> None:
    with nats_serving(tmp_path, USERS, login="all:all@") as server:
        error = failure(server.url("SHOP", f"sender:{SECRET}@"), a={"note": "x"})
        assert not error.retryable
        assert "does not let the user publish." in error.message


def test_a_token_logs_in(tmp_path: Path) -> None:
    with nats_serving(tmp_path, f'authorization {{ token: "{SECRET}@" }}', login=f"{SECRET}%40@") as server:
        with open_batch(server.url("SHOP")) as batcher:
            batcher.batch_delete("s.t", ["1"])
        assert "did not let dbsync in" in failure(server.url("SHOP", f"{SECRET}@")).message


def test_tls_is_verified_and_insisted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, key, chain = trustme.CA(), tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(key)
    for part in certificate.cert_chain_pems:
        part.write_to_path(chain, append=True)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    with nats_serving(tmp_path, f'tls {{ cert_file: "{chain}", key_file: "{key}" }}') as server:
        assert "CERTIFICATE_VERIFY_FAILED" in failure(server.url("SHOP", "", "tls")).message
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        with open_batch(server.url("SHOP", "", "tls")) as batcher:
            batcher.batch_delete("s.t", ["1"])
    with nats_serving(tmp_path) as server:
        for login in ("", f"user:{SECRET}@", f"{SECRET}@"):
            error = failure(server.url("SHOP", login, "tls"))
            assert not error.retryable
            assert "does not ask for TLS" in error.message


@pytest.mark.parametrize(
    "rest",
    [
        f"user:{SECRET}@localhost",
        f"user:{SECRET}@localhost/a.b",
        f"user:{SECRET}@localhost:eight/a",
        "/a",
        "localhost/a b",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_shown(rest: str) -> None:
    with pytest.raises(ConfigError, match="takes nats://HOST/STREAM") as raised:
        NatsBatcher(f"nats://{rest}")
    assert SECRET not in str(raised.value)
