"""Traces with known stragglers: `synthesize(SynthSpec(...))`.

`schedules` defines the order of ops, `injected_causes` the faults (`job_shape`: their shared parts), and `simulate`
runs the job op by op.
"""

from tracekit.synth.injected_causes import (
    CAUSES,
    ClockOffset,
    FlappingNetwork,
    InjectedCause,
    LateDataLoading,
    MissingRanks,
    MissingSteps,
    PythonGc,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    parse_cause,
)
from tracekit.synth.simulate import BaseCosts, SynthSpec, simulated_slowdown, synthesize
from tracekit.trace.compute_order import Schedule

__all__ = [
    "CAUSES",
    "BaseCosts",
    "ClockOffset",
    "FlappingNetwork",
    "InjectedCause",
    "LateDataLoading",
    "MissingRanks",
    "MissingSteps",
    "PythonGc",
    "Schedule",
    "SequenceLengthImbalance",
    "SlowHost",
    "SlowLastStage",
    "SlowNic",
    "SlowP2pLink",
    "SlowSteps",
    "SlowWorker",
    "SynthSpec",
    "parse_cause",
    "simulated_slowdown",
    "synthesize",
]
