-- Gives the slot back, and with it the WAL it holds. PostgreSQL refuses this while a dbsync still reads the slot.
-- Needs: the REPLICATION attribute (or superuser).

SELECT pg_catalog.pg_drop_replication_slot({slot});
