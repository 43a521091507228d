-- The tables that version 7 of the catalogue added: a store of version 6 gets them when it is next written.

-- What the mean step of each window that was analysed goes to: `ClaimedCosts` of tracekit/costs/__init__.py as JSON.
-- Windows of a store of version 6 have none until a repair analyses them again.
CREATE TABLE costs (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    content     VARCHAR NOT NULL
);

-- The first step that the cause of an incident slowed down, and when it began.
CREATE TABLE beginnings (
    incident_id INTEGER PRIMARY KEY,
    job_id      INTEGER NOT NULL,
    first_step  INTEGER NOT NULL,
    since       DOUBLE                          -- seconds since the epoch, null where unknown
);
