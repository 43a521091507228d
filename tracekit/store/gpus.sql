-- What a store of version 5 knows beside the tables of schema.sql and live.sql. Read by tracekit/store/catalogue.py alone.

-- The GPUs of a job, so that a GPU can be asked for its jobs; those that jobs before version 5 ran on are not known.
CREATE TABLE gpus (
    job_id      INTEGER NOT NULL,
    gpu         VARCHAR NOT NULL,               -- its UUID
    host        VARCHAR                         -- null where unknown
);
