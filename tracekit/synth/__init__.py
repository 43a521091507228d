"""Traces with known stragglers: `synthesize(SynthSpec(...))`.

`schedules` defines the order of ops, `causes` the injected faults (`job`: their shared parts), and `simulate` runs the
job op by op.
"""

from tracekit.synth.causes import (
    CAUSES,
    ClockOffset,
    FlappingNetwork,
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
from tracekit.synth.job import InjectedCause
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
