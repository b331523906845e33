"""A batch reduced by Spark SQL: events grouped by `(type, id)` over as many tasks as they deserve.

Where no event of the batch lacks values, the newest event of a record is its final state and SQL finds it by keys and
places alone: bodies stay in the spool, and the executors read those of the survivors from there. Otherwise events are
brought together by record, in their order, to be folded.
Rows that were re-read are events at their low mark; those whose key nothing else in the batch touched are final as they
are and pass by without a shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, coalesce, col, lit, max_by, shiftright, when
from pyspark.sql.functions import max as newest_of

from dbsync.finish import DELETES_TURN, Chunk, Finish
from dbsync.spark import map_in_arrow
from dbsync.spool import BLOCK_BITS, FULL, LINE, PARTIAL, ROW_BITS, Batch

EVENTS = (
    "type string, id string, lsn long, ordinal long, rank long, at long, op byte, form byte, relation int,"
    " body binary, prior string"
)
CHUNKS = "kind byte, type string, records int, payload binary, path string, offset long, size long"

ROWS_AT_A_TIME = 4_096
BYTES_AT_A_TIME = 16 * 1024 * 1024
PLACES_AT_A_TIME = 65_536

PARTITION_BYTES = 16 * 1024 * 1024
PARTITION_EVENTS = 1_000_000
BROADCAST_EVENTS = 300_000  # up to this many, the keys that were touched are sent to where the re-read rows are


def chunks(spark: SparkSession, batch: Batch, finish: Finish, turns: Sequence[str | None]) -> Iterator[Chunk]:
    """Chunks of all final states, a turn after the other."""
    _fit(spark, batch)
    states = final_states(spark, batch)
    if DELETES_TURN not in turns or states.reduced is None:
        yield from _collect(states, finish.in_turn(turns[-1]))
        return
    reduced = states.reduced.persist()
    try:
        yield from _collect(States(reduced, None), finish.in_turn(DELETES_TURN))
        yield from _collect(states._replace(reduced=reduced), finish.in_turn(turns[-1]))
    finally:
        reduced.unpersist()


def _fit(spark: SparkSession, batch: Batch) -> None:
    """Set how much Spark takes up at a time: it counts rows, and the widest may be as large as PostgreSQL allows."""
    rows = max(1, min(ROWS_AT_A_TIME, BYTES_AT_A_TIME // max(1, batch.widest_bytes)))
    spark.conf.set("spark.sql.shuffle.partitions", str(_partitions(spark, batch)))
    spark.conf.set("spark.sql.parquet.columnarReaderBatchSize", str(rows if batch.folds else ROWS_AT_A_TIME))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows if batch.folds else PLACES_AT_A_TIME))


def _partitions(spark: SparkSession, batch: Batch) -> int:
    """As many shuffle partitions as the batch deserves: one a core, and never more in each than fits a worker."""
    parts = -(-batch.size_bytes // PARTITION_BYTES) if batch.folds else -(-batch.events // PARTITION_EVENTS)
    return max(spark.sparkContext.defaultParallelism, parts)


class States(NamedTuple):
    """A batch reduced: records several events speak of, and re-read rows that nothing else speaks of.

    The latter are places in the spool; so are the former, with the window whose row of the same record came to nothing,
    unless the batch folds: then they are events in order.
    """

    reduced: DataFrame | None
    untouched: DataFrame | None


def final_states(spark: SparkSession, batch: Batch) -> States:
    """The batch reduced by (type, id)."""
    rows = _reread_rows(spark, batch)
    if not batch.segments:
        if rows is None or batch.keys_are_distinct:
            return States(None, rows)
        return States(_reduced(rows, batch), None)
    events = _counted(spark.read.schema(EVENTS).parquet(*batch.segments), batch)
    untouched = None
    if rows is not None and batch.events <= BROADCAST_EVENTS and batch.keys_are_distinct:
        touched = broadcast(events.select("type", "id").distinct())
        untouched = rows.join(touched, ["type", "id"], "left_anti")
        rows = rows.join(touched, ["type", "id"], "left_semi")
    events = events if rows is None else events.unionByName(rows)
    return States(_reduced(events, batch), untouched)


def _reduced(events: DataFrame, batch: Batch) -> DataFrame:
    return _in_order(events, batch) if batch.folds else _newest(events, batch)


def _newest(events: DataFrame, batch: Batch) -> DataFrame:
    """Where the newest event of each record lies, in the order of the spool."""
    window = newest_of(when(col("form") == LINE, col("relation")))
    # Numbers only, so that Spark aggregates by hashing; with a body in it, it would sort all of them twice.
    newest = events.groupBy("type", "id").agg(max_by("at", "rank").alias("at"), window.alias("window"))
    places = newest.select("at", "window").repartition(shiftright("at", BLOCK_BITS))
    return places.sortWithinPartitions("at")


def _reread_rows(spark: SparkSession, batch: Batch) -> DataFrame | None:
    """The rows of all windows of the batch as events at their low mark."""
    found: DataFrame | None = None
    placed = zip(batch.windows, batch.ranks, batch.first_sources, strict=True)
    for index, ((rows, (lsn, ordinal)), rank, first) in enumerate(placed):
        if not rows.segments:
            continue
        events = spark.read.schema("id string, row long, body binary").parquet(*rows.segments)
        events = events.select(
            lit(rows.layout.relation.doctype).alias("type"),
            "id",
            lit(int(lsn)).cast("long").alias("lsn"),
            lit(int(ordinal)).cast("long").alias("ordinal"),
            lit(rank).cast("long").alias("rank"),
            (col("row") + lit(first << ROW_BITS)).alias("at"),
            lit(PARTIAL if rows.layout.left_out else FULL).cast("byte").alias("op"),
            lit(LINE).cast("byte").alias("form"),
            lit(index).alias("relation"),
            "body",
            lit(None).cast("string").alias("prior"),
        )
        found = events if found is None else found.unionByName(events)
    return None if found is None else _counted(found, batch)


def _counted(events: DataFrame, batch: Batch) -> DataFrame:
    """Without what a TRUNCATE made void, and without a transaction that was not read to its end."""
    if batch.cut_lsn is not None:
        events = events.where(col("lsn") <= int(batch.cut_lsn))
    for doctype, (lsn, ordinal) in batch.truncates.items():
        at = int(lsn)
        before = (col("lsn") < at) | ((col("lsn") == at) & (col("ordinal") < ordinal))
        events = events.where((col("type") != doctype) | ~before)
    return events


def _in_order(events: DataFrame, batch: Batch) -> DataFrame:
    """Events of a record, and of the records it took values from, together and in order."""
    if batch.lineage:
        rows = [(doctype, id, root) for (doctype, id), root in batch.lineage.items()]
        roots = events.sparkSession.createDataFrame(rows, "type string, id string, root string")
        events = events.join(broadcast(roots), ["type", "id"], "left")
    else:
        events = events.withColumn("root", lit(None).cast("string"))
    events = events.withColumn("root", coalesce("root", "id"))
    ordered = events.repartition("type", "root").sortWithinPartitions("type", "root", "lsn", "ordinal")
    return ordered.select("type", "id", "op", "form", "relation", "body", "prior", "root")


def _collect(states: States, finish: Finish) -> list[Chunk]:
    parts = []
    if states.reduced is not None:
        parts.append(map_in_arrow(states.reduced, finish, CHUNKS))
    if states.untouched is not None:
        plain = states.untouched.select("at", lit(None).cast("int").alias("window"))
        parts.append(map_in_arrow(plain, finish.unfolded(), CHUNKS))
    both = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
    return [Chunk(*row) for row in both.collect()]
