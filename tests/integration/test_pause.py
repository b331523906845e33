"""While it is paused dbsync reads nothing more; what it has read goes its way to the target and to the slot."""

from __future__ import annotations

from fix_postgres import Database
from pyspark.sql import SparkSession
from recording import RecordingBatcher
from refreshing import wait_for

from dbsync import LSN, Syncer


def test_what_was_read_is_applied_and_acknowledged_during_a_pause(items: Database, spark: SparkSession) -> None:
    target = RecordingBatcher()
    with Syncer(items.settings(batch_seconds=1.0), batcher=target, spark=spark) as syncer:
        syncer.drain()
        items.execute("INSERT INTO items VALUES (1000, 'read')")
        written = LSN(items.rows("SELECT pg_current_wal_lsn()::text")[0][0])
        wait_for(lambda: (syncer.status().received_lsn or 0) >= written)
        syncer.pause()
        items.execute("INSERT INTO items VALUES (1001, 'not read')")
        wait_for(lambda: "1000" in target.upserts("public.items"))
        wait_for(lambda: (syncer.status().confirmed_lsn or 0) >= written)
        assert syncer.status().paused
        assert "1001" not in target.upserts("public.items")
        syncer.resume()
        wait_for(lambda: "1001" in target.upserts("public.items"))
