"""The detectors of tracekit, in the order in which they look.

A detector is registered by one line here, or by an entry point of the group `tracekit.detectors` (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import get_args, get_type_hints

from tracekit.analysis.detectors.detector import Detector
from tracekit.base.plug_ins import PlugIn, plug_ins

#: Module and class of each detector.
_DETECTORS = (
    "bad_worker.BadWorker",
    "slow_host.SlowHost",
    "slow_rank_group.SlowRankGroup",
    "slow_rank_of_worker.SlowRankOfWorker",
    "lockstep_jitter.LockstepJitter",
    "data_skew.DataSkew",
    "uneven_experts.HotExpert",
    "uneven_experts.HotRank",
    "uneven_experts.Rotating",
    "uneven_experts.Skew",
    "uneven_experts.UnknownLoads",
    "one_launch_queue.OneLaunchQueue",
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
    "warm_up.WarmUp",
    "gpu_allocation.GpuAllocation",
    "python_code.PythonCode",
    "host_operators.HostOperators",
    "slow_copies.SlowCopies",
    "slow_kernels.SlowKernels",
    "recompute.Recompute",
    "stream_waits.StreamWaits",
    "idle_unseen.IdleUnseen",
    "sync_calls.SyncCalls",
    "late_start.LateStart",
    "late_rank.LateRank",
    "exposed_communication.ExposedCommunication",
    "post_training.Queueing",
    "post_training.Tail",
    "post_training.UnevenEngines",
    "post_training.Tools",
    "post_training.Reward",
    "post_training.WeightSync",
    "nothing_found.Unexplained",
    "nothing_found.Healthy",
)


class PlugInError(Exception):
    """A detector of a plug-in has raised; the message names it. The diagnosis is made again without it."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def detectors() -> tuple[Detector, ...]:
    """Return every detector, those of plug-ins last."""
    return (*own_detectors(), *(plug_in.value for plug_in in _plugged()[0].values()))


def left_out() -> tuple[str, ...]:
    """Return a sentence for each detector of a plug-in that cannot be used."""
    return _plugged()[1]


@cache
def own_detectors() -> tuple[Detector, ...]:
    """Return the detectors of tracekit."""
    named = (name.split(".") for name in _DETECTORS)
    return tuple(getattr(import_module(f"tracekit.analysis.detectors.{module}"), found)() for module, found in named)


def detector_of(kind: str) -> Detector:
    """Return the detector of a kind of finding. Raises KeyError if there is none."""
    own = _own_by_kind().get(kind)
    made: Detector = _plugged()[0][kind].value if own is None else own
    return made


@cache
def _own_by_kind() -> dict[str, Detector]:
    return {detector.kind: detector for detector in own_detectors()}


def is_plug_in(kind: str) -> bool:
    """Whether findings of this kind come from a plug-in."""
    return kind not in _own_by_kind()


@contextmanager
def guarded(kind: str) -> Iterator[None]:
    """Raise PlugInError for whatever the body raises, if the detector of this kind is a plug-in."""
    if not is_plug_in(kind):
        yield
        return
    with _plugged()[0][kind].guarded(partial(PlugInError, kind)):
        yield


def _plugged() -> tuple[dict[str, PlugIn], tuple[str, ...]]:
    """The plug-ins by kind, and why others are left out."""
    found, problems = plug_ins("detectors", frozenset(_own_by_kind()), _fits)
    misnamed = tuple(
        f"{plug_in.source} is left out: its kind is {plug_in.value.kind!r:.40};"
        " give both the same name, one that tracekit itself does not use"
        for name, plug_in in found.items()
        if plug_in.value.kind != name
    )
    return {name: plug_in for name, plug_in in found.items() if plug_in.value.kind == name}, problems + misnamed


def _fits(made: object) -> bool:
    """Whether an object is a detector whose attributes have the types that `Detector` states."""
    return isinstance(made, Detector) and all(
        isinstance(getattr(made, name, None), get_args(stated)[0]) for name, stated in get_type_hints(Detector).items()
    )


def parts() -> tuple[str, ...]:
    """Return all parts of a rank that can be slow, each once."""
    return tuple(dict.fromkeys(detector.part for detector in detectors() if detector.part is not None))
