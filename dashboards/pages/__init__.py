"""The pages, one module each. Importing this package registers them with Dash."""

from __future__ import annotations

from tracekit.dashboards.pages import (
    attribution,
    compare,
    fleet,
    hang,
    hosts,
    incidents,
    job,
    not_found_404,
    pipeline,
    study,
    time,
    timeline,
    whatif,
    workers,
)

__all__ = [
    "attribution",
    "compare",
    "fleet",
    "hang",
    "hosts",
    "incidents",
    "job",
    "not_found_404",
    "pipeline",
    "study",
    "time",
    "timeline",
    "whatif",
    "workers",
]
