"""What users may import, all of it in one place."""

from __future__ import annotations

import dbsync


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(dbsync.__all__) == {
        *("Settings", "Syncer", "MessageHandler", "EchoMessageHandler", "MirrorHandler"),
        *("Batcher", "EchoBatcher", "RefreshResult", "LSN", "DbsyncError"),
    }
    assert all(hasattr(dbsync, name) for name in dbsync.__all__)


def test_a_syncer_has_the_whole_surface() -> None:
    surface = (
        *("setup", "start", "stop", "run", "drain", "pause", "resume", "status", "teardown", "refresh"),
        *("mark_updated", "mark_deleted", "__enter__", "__exit__"),
    )
    assert [name for name in surface if not callable(getattr(dbsync.Syncer, name, None))] == []


def test_a_handler_has_a_method_for_every_message() -> None:
    kinds = ("begin", "commit", "relation", "insert", "update", "delete", "truncate", "message", "refresh")
    assert {name for name in dir(dbsync.MessageHandler) if name.startswith("handle_")} == {f"handle_{k}" for k in kinds}


def test_a_batcher_has_its_methods_and_its_two_switches() -> None:
    public = {name for name in dir(dbsync.Batcher) if not name.startswith("_")}
    assert {"batch_upsert", "batch_delete", "batch_truncate", "begin", "commit", "position"} < public
    assert (dbsync.Batcher.distributed, dbsync.Batcher.accepts_partial) == (False, False)
    assert dbsync.Batcher().position() is None
