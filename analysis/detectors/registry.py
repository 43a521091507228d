"""The detectors of tracekit, in the order in which they look.

A detector is registered by one line here, or by an entry point of the group `tracekit.detectors` (docs/extending.md).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tracekit.analysis.detectors.detector import Detector

#: Module and class of each detector.
_DETECTORS = (
    "bad_worker.BadWorker",
    "slow_host.SlowHost",
    "slow_rank_group.SlowRankGroup",
    "slow_rank_of_worker.SlowRankOfWorker",
    "lockstep_jitter.LockstepJitter",
    "data_skew.DataSkew",
    "stage_imbalance.StageImbalance",
    "sequence_length_imbalance.SequenceLengthImbalance",
    "position_effect.PositionEffect",
    "random_variation.RandomVariation",
    "python_gc.PythonGc",
    "process_pauses.ProcessPauses",
    "checkpoint_stalls.Checkpoints",
    "evaluation.Evaluations",
    "slow_steps.SlowSteps",
    "slow_link.SlowLink",
    "slow_nic.SlowNic",
    "congestion.Congestion",
    "shared_card.SharedCard",
    "unrecorded_worker_late.UnrecordedWorkerLate",
    "late_data.LateData",
    "slow_optimizer.SlowOptimizer",
    "slow_host_code.SlowHostCode",
    "host_bound.HostBound",
    "busy_cores.BusyCores",
    "clock_error.ClockError",
    "too_little_trace.TooLittleTrace",
    "sync_calls.SyncCalls",
    "late_start.LateStart",
    "late_rank.LateRank",
    "exposed_communication.ExposedCommunication",
    "nothing_found.Unexplained",
    "nothing_found.Healthy",
)


@cache
def detectors() -> tuple[Detector, ...]:
    """Return every detector."""
    return tuple(_loaded(name) for name in _DETECTORS)


def _loaded(name: str) -> Detector:
    module, found = name.split(".")
    made: Detector = getattr(import_module(f"tracekit.analysis.detectors.{module}"), found)()
    return made


def detector_of(kind: str) -> Detector:
    """Return the detector of a kind of finding. Raises KeyError if there is none."""
    return _by_kind()[kind]


@cache
def _by_kind() -> dict[str, Detector]:
    return {detector.kind: detector for detector in detectors()}


def parts() -> tuple[str, ...]:
    """Return all parts of a rank that can be slow, each once."""
    return tuple(dict.fromkeys(detector.part for detector in detectors() if detector.part is not None))
