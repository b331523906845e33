-- Drops the refresh table, and with it the record of what was refreshed.
-- Needs: to own the table.

DROP TABLE {schema}.{refresh_table} RESTRICT;
