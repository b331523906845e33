"""Re-read rows wait on disk until they are in the target, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import GatedBatcher, ask, before_a_read, documents, in_background, state, wait_for

from dbsync import MessageHandler, Syncer
from dbsync.connection import connect
from dbsync.handler import Change
from dbsync.relation import Relation
from dbsync.requests import Requests
from dbsync.window import State


class CopyingHandler(MessageHandler):
    """Mirrors rows, and fails at one of those that are re-read as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def handle_insert(self, msg: Change, relation: Relation) -> None:
        self.syncer.mark_updated(relation.doctype, msg.id, msg.new)

    def handle_refresh(self, row: Change, relation: Relation) -> None:
        if row.id == "55" and self.failures:
            self.failures -= 1
            raise OSError("not yet")
        super().handle_refresh(row, relation)


def files(folder: Path) -> list[Path]:
    return list(folder.glob("run-*/windows/*"))


@pytest.mark.parametrize("failures", [0, 1], ids=["", "and again, as the log is read anew"])
def test_what_a_handler_has_got_is_removed_when_it_is_applied(
    items: Database, spark: SparkSession, tmp_path: Path, failures: int
) -> None:
    target = RecordingBatcher()
    settings = items.settings(chunk_rows=10, spool_dir=tmp_path, retry_seconds=0.01)
    with Syncer(settings, handler=CopyingHandler(failures), batcher=target, spark=spark) as syncer:
        assert syncer.refresh("SELECT * FROM items").rows == 100
        syncer.drain()
        wait_for(lambda: not files(tmp_path))
    assert target.documents["public.items"] == documents(items, "items")


@pytest.mark.parametrize("handler", [None, CopyingHandler()], ids=["mirrored", "handled"])
def test_what_a_cancelled_refresh_has_in_a_batch_goes_with_the_batch(
    items: Database, spark: SparkSession, tmp_path: Path, handler: MessageHandler | None
) -> None:
    """Its windows are forgotten at once; the batch that has their rows still needs them."""
    items.execute("CREATE TABLE first (id int PRIMARY KEY)")
    items.execute("ALTER PUBLICATION dbsync_mypub ADD TABLE first")
    target = GatedBatcher()
    settings = items.settings(chunk_rows=10, spool_dir=tmp_path)
    with Syncer(settings, handler=handler, batcher=target, spark=spark) as syncer:
        items.execute("INSERT INTO first VALUES (1)")
        wait_for(lambda: target.batches)
        id = ask(items, "SELECT * FROM items")
        windows = syncer._board._windows.all
        wait_for(lambda: sum(window.state is State.RELEASED for window in list(windows.values())) == 4)
        with connect(settings) as conn:
            assert Requests(conn, settings).cancel(id)
        wait_for(lambda: not windows)
        target.gate.set()
        syncer.drain()
        wait_for(lambda: not files(tmp_path))
        assert state(items, id) == "cancelled"
    assert len(target.documents["public.items"]) >= 10


def test_rows_of_a_chunk_of_which_a_range_could_not_be_read_are_removed(
    items: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its first range can be read, and is."""
    make = "CREATE OR REPLACE FUNCTION public.fine(id int) RETURNS bool LANGUAGE sql AS $$ SELECT {} $$"
    items.execute(make.format("true"))
    before_a_read(monkeypatch, 1, lambda: items.execute(make.format("1 / (id - 100) < 5")))
    settings = items.settings(spool_dir=tmp_path, chunk_parallelism=2)
    with Syncer(settings, batcher=RecordingBatcher(), spark=spark) as syncer:
        id = ask(items, "SELECT * FROM items WHERE public.fine(id)")
        wait_for(lambda: state(items, id) == "failed")
        assert not files(tmp_path)
        assert in_background(lambda: syncer.refresh("SELECT * FROM items"))().rows == 100
