-- The store: one row per job, per step and per op. Written by tracekit/store.py alone.
CREATE TABLE store_version (version INTEGER NOT NULL);
INSERT INTO store_version VALUES (2);

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

-- What the analysis found when the job was imported, or why it found nothing; no row where it was not asked.
CREATE TABLE report (
    job_id          INTEGER PRIMARY KEY,
    tracekit        VARCHAR NOT NULL,           -- the version that made it
    problem         VARCHAR,                    -- why there is no report
    report          VARCHAR,                    -- JSON, as `whatif --json` prints it (docs/report-schema.md)
    -- Figures of the report that lists of jobs show, so that nobody parses a thousand reports.
    slowdown        DOUBLE,
    waste           DOUBLE,
    straggling      BOOLEAN,
    trustworthy     BOOLEAN,
    recorded_s      DOUBLE,                     -- mean step times
    original_s      DOUBLE,
    ideal_s         DOUBLE,
    lost_gpu_hours  DOUBLE,                     -- in the traced steps
    lost_gpu_hours_per_day DOUBLE,              -- at this rate
    cause_kinds     VARCHAR[],                  -- dearest first
    cause_places    VARCHAR[]                   -- where each is, in words
);

-- Exact slowdown of each worker in each step: one row per step, one list over all workers.
CREATE TABLE worker_slowdown (
    job_id     INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    dp_ranks   INTEGER[] NOT NULL,              -- DP ranks in the order of the list
    slowdown   FLOAT[] NOT NULL                 -- dp_ranks x stages, stages next to each other
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
