"""Traces with known stragglers: `synthesize(SynthSpec(...))`.

`schedules` says what runs after what, `causes` and `network` what goes wrong (`job`: what they share), and `simulate`
runs it op by op.
"""

from tracekit.synth.causes import (
    CAUSES,
    ClockOffset,
    LateDataLoading,
    MissingRanks,
    MissingSteps,
    PythonGc,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowSteps,
    SlowWorker,
    parse_cause,
)
from tracekit.synth.job import InjectedCause
from tracekit.synth.network import FlappingNetwork, SlowNic, SlowP2pLink
from tracekit.synth.schedules import Schedule
from tracekit.synth.simulate import BaseCosts, SynthSpec, synthesize

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
    "synthesize",
]
