"""What a report says where no detector found anything that costs time: the job is healthy, or nobody knows why not.

The diagnosis adds one of the two; neither looks for anything.
"""

from __future__ import annotations

from tracekit.analysis.detectors.detector import Detector


class Unexplained(Detector):
    """The job straggles, and no detector found out why.

    Paper: attributes S to workers, stages and op kinds, whatever the cause.
    """

    kind = "unexplained"
    title = "Slow for a reason tracekit does not know"
    signature = "S of at least 1.1, or more than noise makes of it, and none of the known signatures"
    next_check = "by_kind and the worker map; a timeline of the slowest step (`tracekit store export`)"


class Healthy(Detector):
    """The job does not straggle.

    Paper: S below 1.1.
    """

    kind = "healthy"
    title = "No straggler"
    signature = "S below 1.1, hardly more than noise makes of it, and none of the known signatures"
    refuted_by = "S of at least 1.1 in another trace of the job"
