-- The control schema: the one place in the source where dbsync keeps anything of its own.
-- Runs once, by `dbsync init`, when the schema does not exist yet. A schema that exists already is used as it is.
-- Needs: CREATE on the database.

CREATE SCHEMA {schema};

-- By this comment `dbsync teardown` knows that the schema is dbsync's to drop.
COMMENT ON SCHEMA {schema} IS {schema_comment};
