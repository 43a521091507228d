"""Traces with known stragglers: `synthesize(SynthSpec(...))`.

`schedules` defines the order of ops, `injected_causes` the faults, and `simulate` runs the job op by op.
"""

from tracekit.synth.injected_causes import CAUSES as CAUSES
from tracekit.synth.injected_causes import ClockOffset as ClockOffset
from tracekit.synth.injected_causes import FlappingNetwork as FlappingNetwork
from tracekit.synth.injected_causes import InjectedCause as InjectedCause
from tracekit.synth.injected_causes import LateDataLoading as LateDataLoading
from tracekit.synth.injected_causes import MissingRanks as MissingRanks
from tracekit.synth.injected_causes import MissingSteps as MissingSteps
from tracekit.synth.injected_causes import PythonGc as PythonGc
from tracekit.synth.injected_causes import SequenceLengthImbalance as SequenceLengthImbalance
from tracekit.synth.injected_causes import SlowHost as SlowHost
from tracekit.synth.injected_causes import SlowLastStage as SlowLastStage
from tracekit.synth.injected_causes import SlowNic as SlowNic
from tracekit.synth.injected_causes import SlowP2pLink as SlowP2pLink
from tracekit.synth.injected_causes import SlowSteps as SlowSteps
from tracekit.synth.injected_causes import SlowWorker as SlowWorker
from tracekit.synth.injected_causes import parse_cause as parse_cause
from tracekit.synth.simulate import SIMULATED_FILE as SIMULATED_FILE
from tracekit.synth.simulate import BaseCosts as BaseCosts
from tracekit.synth.simulate import SynthSpec as SynthSpec
from tracekit.synth.simulate import simulated_slowdown as simulated_slowdown
from tracekit.synth.simulate import synthesize as synthesize
from tracekit.synth.simulate import write_simulated as write_simulated
from tracekit.trace.compute_order import Schedule as Schedule
