"""The names under which causes and fixes know `analysis.whatif.interventions`."""

from tracekit.analysis.whatif.interventions import (
    ChangedRows,
    CostOverlay,
    Intervention,
    NoDelays,
    NoOverlap,
    NoStalls,
    Scale,
    ScaleDelays,
    Together,
    delayed_step_times,
    keeps_delay,
    scaled,
    step_times,
)

Change = Intervention
step_times_with = step_times

__all__ = [
    "Change",
    "ChangedRows",
    "CostOverlay",
    "NoDelays",
    "NoOverlap",
    "NoStalls",
    "Scale",
    "ScaleDelays",
    "Together",
    "delayed_step_times",
    "keeps_delay",
    "scaled",
    "step_times_with",
]
