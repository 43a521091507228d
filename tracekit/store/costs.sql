-- What the mean step of each window that was analysed goes to: `ClaimedCosts` of tracekit/costs/claimed.py as JSON.
-- Since version 7; a store of version 6 gets it from its reports.
CREATE TABLE costs (
    job_id      INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    content     VARCHAR NOT NULL
);
