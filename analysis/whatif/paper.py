"""The questions of the paper as changes: ops ideal in the job as it ran, or as recorded in the ideal job.

In: selections. Out: interventions for `step_times`. Questions are about steps alone, without stalls between steps and
without the overlap of steps. See "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25).
"""

from __future__ import annotations

from tracekit.analysis.whatif.interventions import Idealise, Intervention, NoDelays, NoOverlap, NoStalls, OnlyDelays
from tracekit.analysis.whatif.selection import Selection, everything

Changes = tuple[Intervention, ...]

_STEPS_ALONE: Changes = (NoStalls(), NoOverlap())
#: The job as it ran, without launch delays.
ORIGINAL: Changes = (NoDelays(), *_STEPS_ALONE)
#: Every op at its ideal cost, without launch delays.
IDEAL: Changes = (Idealise(everything()), *ORIGINAL)


def delayed(selection: Selection) -> Changes:
    """The job as it ran, with the launch delays of the selection only."""
    return (OnlyDelays(selection), *_STEPS_ALONE)


#: The job as it ran, with all launch delays.
RECORDED = delayed(everything())


def removal(selection: Selection) -> Changes:
    """The original job with the selection ideal: what fixing the selection would save."""
    return (Idealise(selection), *ORIGINAL)


def addition(selection: Selection) -> Changes:
    """The ideal job with the selection as recorded: what the selection costs alone (S_x in the paper)."""
    return (Idealise(~selection), *ORIGINAL)
