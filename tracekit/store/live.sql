-- What a store of version 4 knows beside the tables of schema.sql. Read by tracekit/store/catalogue.py alone.

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

-- A cause that acts on a job for one window or more, or a hang.
CREATE TABLE incidents (
    incident_id INTEGER PRIMARY KEY,
    job_id      INTEGER NOT NULL,
    kind        VARCHAR NOT NULL,
    cause       VARCHAR NOT NULL,               -- JSON: all that the last window that shows it says (answer.accounts)
    opened_at   TIMESTAMP NOT NULL,             -- UTC
    opened_window INTEGER,                      -- null for a hang
    seen_window INTEGER,                        -- the last that showed it
    clear       INTEGER NOT NULL,               -- windows in a row that no longer showed it
    closed_at   TIMESTAMP,                      -- null while it is open
    closed_window INTEGER
);

-- Jobs that are, or were, cut into windows while they ran.
CREATE TABLE watches (
    job_id      INTEGER PRIMARY KEY,
    began_at    TIMESTAMP NOT NULL,             -- UTC
    ended_at    TIMESTAMP                       -- null while it is watched
);
