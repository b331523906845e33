-- Drops the control schema, only when dbsync made it (its comment says so) and only when nothing else is in it.
-- Needs: to own the schema.

DROP SCHEMA {schema} RESTRICT;
