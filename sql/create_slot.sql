-- The replication slot: PostgreSQL keeps the log from here on until dbsync says it has applied it. It holds WAL for as
-- long as it exists, so a slot that nobody reads has to be dropped (`dbsync teardown`).
-- Waits for the transactions that are running now to end. Has to be alone in its transaction.
-- Needs: the REPLICATION attribute (or superuser), wal_level = logical, a free slot in max_replication_slots.

SELECT lsn
FROM pg_catalog.pg_create_logical_replication_slot(slot_name => {slot}, plugin => 'pgoutput', temporary => false);
