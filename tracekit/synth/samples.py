"""Simulated jobs for demonstration, each with one cause.

In: nothing. Out: specifications by name. `sample_traces/make.py` writes some of them, `tracekit open` shows all.
"""

from __future__ import annotations

from typing import Any

from tracekit.synth.injected_causes import parse_cause
from tracekit.synth.simulate import SynthSpec
from tracekit.trace.compute_order import Schedule
from tracekit.trace.model import Layout


def _job(name: str, layout: Layout, steps: int, seed: int, cause: str | None = None, **settings: Any) -> SynthSpec:
    causes = () if cause is None else (parse_cause(cause),)
    return SynthSpec(layout, steps=steps, seed=seed, causes=causes, name=name, **settings)


#: The jobs in `sample_traces/`, by the name of their file.
SAMPLES = {
    "healthy": _job("healthy", Layout(dp=4, pp=4), 12, 1),
    "slow_worker": _job("slow-worker", Layout(dp=4, pp=4), 12, 2, "slow-worker:dp=1,pp=2,factor=1.8"),
    "slow_last_stage": _job(
        "slow-last-stage",
        Layout(dp=2, pp=4, vpp=2),
        10,
        3,
        "slow-last-stage",
        schedule=Schedule.INTERLEAVED,
        overlap_dp=True,
        record_no_ops=True,
    ),
    "sequence_lengths": _job("sequence-lengths", Layout(dp=8, pp=2), 10, 4, "sequence-length-imbalance"),
    "python_gc": _job("python-gc", Layout(dp=8, pp=1), 40, 5, "python-gc"),
}
#: The jobs of `tracekit open` without a path: all of these, and three more causes.
DEMO = (
    *SAMPLES.values(),
    _job("late-data", Layout(dp=4, pp=4), 20, 6, "late-data-loading"),
    _job("slow-link", Layout(dp=4, pp=4), 20, 3, "slow-p2p-link"),
    _job("slow-steps", Layout(dp=4, pp=4), 20, 4, "slow-steps"),
)
