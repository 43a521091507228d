-- What a store of version 6 knows beside the tables of schema.sql, live.sql and gpus.sql. Read by
-- tracekit/store/catalogue.py alone.

-- How jobs that were watched ended, where their launchers have said so.
CREATE TABLE endings (
    job_id      INTEGER PRIMARY KEY,
    ending      VARCHAR NOT NULL                -- as in "ended with exit code 1"
);
