-- The watermark table: while dbsync re-reads rows, it writes a `low` mark before and a `high` mark after. Both come back
-- through the log, and so tell which changes happened before, during and after the reading. Marks are deleted again, so
-- the table is all but empty at any time.
-- Runs once, by `dbsync init`, when the table does not exist yet.
-- Needs: CREATE on the control schema.

CREATE TABLE {schema}.{wm_table} (
    id   uuid        NOT NULL,
    mark text        NOT NULL CHECK (mark IN ('low', 'high')),
    at   timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (id, mark)
);

-- By this comment dbsync knows that the table is its own: to use, and to drop at `dbsync teardown`.
COMMENT ON TABLE {schema}.{wm_table} IS {table_comment};
COMMENT ON COLUMN {schema}.{wm_table}.id IS 'the window the mark belongs to';
COMMENT ON COLUMN {schema}.{wm_table}.mark IS 'low: before the rows are read; high: after';
COMMENT ON COLUMN {schema}.{wm_table}.at IS 'when the mark was written, for people';
