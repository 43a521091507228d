"""A store as version 0.1.0 of tracekit wrote it: version 6 of the catalogue, and reports of version 2."""

from __future__ import annotations

import zlib

import duckdb

from tracekit.store import Store
from tracekit.store.folder import CATALOGUE


def as_version_6(store: Store) -> None:
    """Take from a store of today what version 6 did not have. Reports that are not whole stay as they are."""
    with duckdb.connect(str(store.path / CATALOGUE)) as connection:
        connection.execute("DROP TABLE costs; DROP TABLE beginnings; UPDATE store_version SET version = 6")
        for path in store.path.glob("jobs/*/*.report.json"):
            old = path.read_bytes().replace(b'"report_version":3', b'"report_version":2', 1)
            path.write_bytes(old)
            of_window = [int(path.parent.name), int(path.name.partition(".")[0])]
            connection.execute(
                "UPDATE files SET crc32 = ? WHERE part = 'report' AND bytes = ? AND job_id = ? AND number = ?",
                [zlib.crc32(old), len(old), *of_window],
            )
