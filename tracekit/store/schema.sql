-- The catalogue of a store: what lists need of jobs and windows, and which files there are. Ops, reports and slowdowns
-- of workers are files (folder.py). Written by tracekit/store/catalogue.py and live_tables.py alone. The tables of
-- version_7.sql belong to it, too. Whoever changes this
-- raises STORE_VERSION there, and migrates the version before.
CREATE TABLE store_version (version INTEGER NOT NULL);

CREATE SEQUENCE job_id START 1;                 -- never used twice, so that a path never holds two things

CREATE TABLE jobs (
    job_id      INTEGER PRIMARY KEY DEFAULT nextval('job_id'),
    name        VARCHAR NOT NULL UNIQUE,
    source      VARCHAR NOT NULL                -- where the trace came from
);

-- A window is a trace of a part of a job; a finished trace is a job with one window.
CREATE TABLE windows (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,               -- 0, 1, ... in the order in which they were added
    kind        VARCHAR NOT NULL,               -- of the trace: pipeline (version 1) or ops (version 2)
    added_at    TIMESTAMP NOT NULL,             -- UTC
    dp          INTEGER,                        -- sizes: null where the kind of trace has none
    pp          INTEGER,
    tp          INTEGER,
    cp          INTEGER,
    ep          INTEGER,
    vpp         INTEGER,
    dsp         INTEGER,
    world_size  INTEGER NOT NULL,               -- GPUs of the layout; ranks of an op trace
    steps       INTEGER NOT NULL,
    first_step  INTEGER NOT NULL,
    last_step   INTEGER NOT NULL,
    started_at  DOUBLE,                         -- seconds since the epoch, of the first and the last step
    ended_at    DOUBLE,
    ops         BIGINT NOT NULL,
    metadata    VARCHAR NOT NULL,               -- JSON: of the free metadata what is one short value
    -- What the analysis found, or why it found nothing; all null where it was not asked.
    tracekit    VARCHAR,                        -- the version that analysed
    problem     VARCHAR,                        -- why there is no report
    slowdown    DOUBLE,
    waste       DOUBLE,
    straggling  BOOLEAN,
    trustworthy BOOLEAN,
    recorded_s  DOUBLE,                         -- mean step times
    original_s  DOUBLE,
    ideal_s     DOUBLE,
    lost_gpu_hours  DOUBLE,                     -- in the traced steps
    lost_gpu_hours_per_day DOUBLE,              -- at this rate
    cause_kinds     VARCHAR[],                  -- costliest first
    cause_places    VARCHAR[],                  -- where each is, in words
    cause_hosts     VARCHAR[]                   -- the one host that each is on, null where there are several
);

-- The hosts of a job, so that a host can be asked for its jobs.
CREATE TABLE hosts (
    job_id      INTEGER NOT NULL,
    host        VARCHAR NOT NULL
);

-- Every file of the store. A file that is not here is left over from a writer that was killed.
CREATE TABLE files (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    part        VARCHAR NOT NULL,               -- ops, report or workers
    bytes       BIGINT NOT NULL,
    crc32       BIGINT NOT NULL
);

-- What was found in a window, in words and in the figures that alerts need: one row per window that was analysed.
CREATE TABLE findings (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    verdict     VARCHAR NOT NULL,               -- kind of loss
    headline    VARCHAR NOT NULL,
    share       DOUBLE NOT NULL,                -- of the step, lost in all
    confidence  DOUBLE,                         -- in the leading cause
    trust       VARCHAR NOT NULL,
    fix         VARCHAR,                        -- the best one, and what it saves
    saved_gpu_hours_per_day DOUBLE,             -- by that fix
    ranks_missing INTEGER NOT NULL,             -- without a whole step in the window
    dropped_records BIGINT NOT NULL             -- by the recorders, since the job began
);

-- The costliest causes of each window, by whom they sit on.
CREATE TABLE culprits (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    kind        VARCHAR NOT NULL,
    part        VARCHAR,                        -- what of a rank is slow
    ranks       INTEGER[] NOT NULL,
    hosts       VARCHAR[] NOT NULL,
    gpu_uuids   VARCHAR[] NOT NULL,
    cost_s      DOUBLE NOT NULL,                -- of the mean step
    share       DOUBLE NOT NULL,
    confidence  DOUBLE NOT NULL
);

CREATE SEQUENCE incident_id START 1;

-- What slows a place of a job down for one window or more, or a hang.
CREATE TABLE incidents (
    incident_id INTEGER PRIMARY KEY,
    job_id      INTEGER NOT NULL,
    kind        VARCHAR NOT NULL,
    cause       VARCHAR NOT NULL,               -- JSON: all that the last window that shows it says (answer.accounts)
    opened_at   TIMESTAMP NOT NULL,             -- UTC
    opened_window INTEGER,                      -- null for a hang
    seen_window INTEGER,                        -- the last that showed it
    clear       INTEGER NOT NULL,               -- windows in a row that no longer showed it, until it is settled
    closed_at   TIMESTAMP,                      -- null while it is open
    closed_window INTEGER
);

-- Jobs that are, or were, cut into windows while they ran.
CREATE TABLE watches (
    job_id      INTEGER PRIMARY KEY,
    began_at    TIMESTAMP NOT NULL,             -- UTC
    ended_at    TIMESTAMP                       -- null while it is watched
);

-- The GPUs of a job, so that a GPU can be asked for its jobs.
CREATE TABLE gpus (
    job_id      INTEGER NOT NULL,
    gpu         VARCHAR NOT NULL,               -- its UUID
    host        VARCHAR                         -- null where unknown
);

-- How jobs that were watched ended, where their launchers have said so.
CREATE TABLE endings (
    job_id      INTEGER PRIMARY KEY,
    ending      VARCHAR NOT NULL                -- as in "ended with exit code 1"
);
