-- The store: one row per job, per step and per op. Written by tracekit/store.py alone.
CREATE TABLE store_version (version INTEGER NOT NULL);
INSERT INTO store_version VALUES (1);

CREATE SEQUENCE job_id START 1;

CREATE TABLE job (
    job_id      INTEGER PRIMARY KEY DEFAULT nextval('job_id'),
    name        VARCHAR NOT NULL UNIQUE,
    source      VARCHAR NOT NULL,               -- where the trace came from
    imported_at TIMESTAMP NOT NULL,             -- UTC
    dp          INTEGER NOT NULL,
    pp          INTEGER NOT NULL,
    tp          INTEGER NOT NULL,
    cp          INTEGER NOT NULL,
    ep          INTEGER NOT NULL,
    vpp         INTEGER NOT NULL,
    dsp         INTEGER NOT NULL,
    world_size  INTEGER NOT NULL,
    steps       INTEGER NOT NULL,
    ops         BIGINT NOT NULL,
    metadata    VARCHAR NOT NULL                   -- free, as JSON text: framework, hosts, labels of a synthetic trace ...
);

-- What `whatif` found when the job was imported; no row where it was not asked or could not say.
CREATE TABLE report (
    job_id          INTEGER PRIMARY KEY,
    tracekit        VARCHAR NOT NULL,           -- the version that made it
    report          VARCHAR NOT NULL            -- JSON, as `whatif --json` prints it (docs/report-schema.md)
);

CREATE TABLE step (
    job_id     INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    started_at DOUBLE                           -- seconds since the epoch; null where unknown
);

CREATE TABLE op (
    job_id     INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    rank       INTEGER NOT NULL,
    dp_rank    INTEGER NOT NULL,
    pp_rank    SMALLINT NOT NULL,
    kind       VARCHAR NOT NULL,
    seq        INTEGER NOT NULL,                -- 0-based order of that kind on that worker in that step
    microbatch INTEGER,
    chunk      SMALLINT,
    start      DOUBLE NOT NULL,                 -- seconds from the start of the step
    duration   DOUBLE NOT NULL                  -- seconds
);
