"""How much of a finding another one explains.

In: a job and two changes. Out: the share of the first one's price that the second one takes away.
"""

from __future__ import annotations

from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.numeric.robust import NOTHING
from tracekit.analysis.whatif.interventions import Intervention

#: A finding gives way to another that explains this share of its price.
MOST_OF_PRICE = 0.5


def explained(job: Subject, change: Intervention, other: Intervention) -> float:
    """The share of what `change` saves that is gone after `other`, 0 to 1; 0 if it saves nothing."""
    saved_s = job.unchanged_s - float(job.step_times((change,)).mean())
    left_s = float((job.step_times((other,)) - job.step_times((other, change))).mean())
    return 1 - min(max(left_s / saved_s, 0.0), 1.0) if saved_s > NOTHING else 0.0
