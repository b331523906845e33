-- Drops the watermark table, and with it its entry in the publication. The publication itself is the user's and stays.
-- Needs: to own the table.

DROP TABLE {schema}.{wm_table} RESTRICT;
