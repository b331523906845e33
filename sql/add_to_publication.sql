-- Lets the marks through: adds the watermark table to the publication dbsync follows. Nothing else about the publication
-- is changed. Not needed, and not run, when the publication covers the table already (FOR ALL TABLES, TABLES IN SCHEMA).
-- Needs: to own the publication and the watermark table.

ALTER PUBLICATION {publication} ADD TABLE {schema}.{wm_table};
