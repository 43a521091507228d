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
    signature = "stragglers cost 9% or more, or more than noise does, and show none of the known signatures"
    next_check = "by_kind and the worker map; a timeline of the slowest step (`tracekit store export`)"


class Healthy(Detector):
    """The job does not straggle.

    Paper: S below 1.1.
    """

    kind = "healthy"
    title = "No straggler"
    signature = "stragglers cost less than 9%, hardly more than noise does, and show none of the known signatures"
    refuted_by = "stragglers cost 9% or more in another trace of the job"
