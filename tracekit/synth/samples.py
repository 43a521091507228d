"""Simulated jobs for demonstration, each with one cause.

In: nothing. Out: specifications by name. `sample_traces/make.py` writes some of them, `tracekit demo` shows all.
"""

from __future__ import annotations

from tracekit.synth.causes import parse_cause
from tracekit.synth.schedules import Schedule
from tracekit.synth.simulate import SynthSpec
from tracekit.trace.model import Layout

#: The jobs in `sample_traces/`, by the name of their file.
SAMPLES = {
    "healthy": SynthSpec(layout=Layout(dp=4, pp=4), steps=12, seed=1, name="healthy"),
    "slow_worker": SynthSpec(
        layout=Layout(dp=4, pp=4),
        steps=12,
        seed=2,
        causes=(parse_cause("slow-worker:dp=1,pp=2,factor=1.8"),),
        name="slow-worker",
    ),
    "slow_last_stage": SynthSpec(
        layout=Layout(dp=2, pp=4, vpp=2),
        schedule=Schedule.INTERLEAVED,
        steps=10,
        seed=3,
        overlap_dp=True,
        record_no_ops=True,
        causes=(parse_cause("slow-last-stage"),),
        name="slow-last-stage",
    ),
    "sequence_lengths": SynthSpec(
        layout=Layout(dp=8, pp=2),
        steps=10,
        seed=4,
        causes=(parse_cause("sequence-length-imbalance"),),
        name="sequence-lengths",
    ),
    "python_gc": SynthSpec(
        layout=Layout(dp=8, pp=1), steps=40, seed=5, causes=(parse_cause("python-gc"),), name="python-gc"
    ),
}
#: The jobs of `tracekit demo`: all of these, and three more causes.
DEMO = (
    *SAMPLES.values(),
    SynthSpec(
        layout=Layout(dp=4, pp=4), steps=20, seed=6, causes=(parse_cause("late-data-loading"),), name="late-data"
    ),
    SynthSpec(layout=Layout(dp=4, pp=4), steps=20, seed=3, causes=(parse_cause("slow-p2p-link"),), name="slow-link"),
    SynthSpec(layout=Layout(dp=4, pp=4), steps=20, seed=4, causes=(parse_cause("slow-steps"),), name="slow-steps"),
)
