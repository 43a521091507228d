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
from tracekit.analysis.evidence.subject import JobKind, Subject
from tracekit.base.plug_ins import PlugIn, plug_ins

#: Of each kind of finding, the module and class of its detector, and the kinds of jobs in which that looks.
_DETECTORS = {
    "bad-worker": ("any_job.BadWorker", JobKind.PIPELINE | JobKind.GRAPH),
    "slow-host": ("slow_computes.SlowHosts", JobKind.PIPELINE),
    "slow-rank-group": ("slow_computes.SlowRankGroup", JobKind.PIPELINE),
    "slow-rank-of-worker": ("slow_computes.SlowRankOfWorker", JobKind.PIPELINE),
    "lockstep-jitter": ("slow_computes.LockstepJitter", JobKind.PIPELINE),
    "data-skew": ("any_job.DataSkew", JobKind.PIPELINE | JobKind.GRAPH),
    "hot-expert": ("uneven_experts.HotExpert", JobKind.PIPELINE | JobKind.GRAPH),
    "hot-rank": ("uneven_experts.HotRank", JobKind.PIPELINE | JobKind.GRAPH),
    "rotating": ("uneven_experts.Rotating", JobKind.PIPELINE | JobKind.GRAPH),
    "skew": ("uneven_experts.Skew", JobKind.PIPELINE | JobKind.GRAPH),
    "unknown-loads": ("uneven_experts.UnknownExpertLoads", JobKind.PIPELINE | JobKind.GRAPH),
    "one-launch-queue": ("late_rank.OneLaunchQueue", JobKind.GRAPH),
    "stage-imbalance": ("uneven_work.StageImbalance", JobKind.PIPELINE),
    "sequence-length-imbalance": ("uneven_work.UnevenSequences", JobKind.PIPELINE),
    "position-effect": ("uneven_work.PositionEffect", JobKind.PIPELINE),
    "random-variation": ("uneven_work.RandomVariation", JobKind.PIPELINE),
    "python-gc": ("any_job.GarbageCollection", JobKind.PIPELINE | JobKind.GRAPH),
    "process-pauses": ("pauses.ProcessPauses", JobKind.PIPELINE),
    "checkpoint-stalls": ("any_job.Checkpoints", JobKind.PIPELINE | JobKind.RECORDING),
    "evaluation": ("stops.Evaluations", JobKind.PIPELINE),
    "slow-steps": ("stops.StepsSlowForAll", JobKind.PIPELINE),
    "slow-p2p-link": ("network.SlowLink", JobKind.PIPELINE),
    "slow-nic": ("any_job.SlowNetworkCard", JobKind.PIPELINE | JobKind.GRAPH),
    "congestion": ("network.NetworkCongestion", JobKind.PIPELINE),
    "shared-network-card": ("network.SharedCard", JobKind.PIPELINE),
    "unrecorded-worker-late": ("trace_faults.UnrecordedWorkerLate", JobKind.PIPELINE),
    "late-data-loading": ("any_job.LateData", JobKind.PIPELINE | JobKind.GRAPH),
    "slow-optimizer": ("host_work.SlowOptimizer", JobKind.PIPELINE),
    "slow-host-code": ("any_job.SlowHostCode", JobKind.PIPELINE | JobKind.GRAPH),
    "host-bound-launch": ("any_job.HostBound", JobKind.PIPELINE | JobKind.RECORDING),
    "busy-cores": ("pauses.BusyCores", JobKind.PIPELINE),
    "clock-error": ("trace_faults.ClockError", JobKind.PIPELINE),
    "too-little-trace": ("trace_faults.TooLittleTrace", JobKind.PIPELINE),
    "warm-up": ("gpu_time.WarmUp", JobKind.RECORDING),
    "gpu-allocation": ("gpu_host.GpuAllocation", JobKind.RECORDING),
    "python-code": ("gpu_host.PythonCode", JobKind.RECORDING),
    "host-operator": ("gpu_host.HostOperators", JobKind.RECORDING),
    "slow-copies": ("gpu_time.SlowCopies", JobKind.RECORDING),
    "slow-kernels": ("slow_kernels.SlowKernels", JobKind.RECORDING),
    "recompute": ("gpu_time.Recompute", JobKind.RECORDING),
    "stream-waits": ("gpu_time.StreamWaits", JobKind.RECORDING),
    "idle-unseen": ("gpu_time.IdleUnseen", JobKind.RECORDING),
    "sync-calls": ("gpu_host.SyncCalls", JobKind.GRAPH),
    "late-start": ("late_rank.LateStart", JobKind.GRAPH),
    "late-rank": ("late_rank.LateRank", JobKind.GRAPH),
    "exposed-communication": ("gpu_time.ExposedCommunication", JobKind.RECORDING),
    "queueing": ("rl_losses.Queueing", JobKind.POST_TRAINING),
    "tail": ("rl_losses.Tail", JobKind.POST_TRAINING),
    "engines": ("rl_losses.UnevenEngines", JobKind.POST_TRAINING),
    "tools": ("rl_losses.Tools", JobKind.POST_TRAINING),
    "reward": ("rl_losses.Reward", JobKind.POST_TRAINING),
    "sync": ("rl_losses.WeightSync", JobKind.POST_TRAINING),
    "unexplained": ("all_detectors.Unexplained", JobKind.NONE),
    "healthy": ("all_detectors.Healthy", JobKind.NONE),
}

#: Kinds that only jobs with all-to-alls have, so that no other job loads their modules.
_OF_EXCHANGES = {"hot-expert", "hot-rank", "rotating", "skew", "unknown-loads"}


class PlugInError(Exception):
    """A detector of a plug-in has raised; the message names it. The diagnosis is made again without it."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def detectors(kind: JobKind, job: Subject | None = None) -> tuple[Detector, ...]:
    """Return the detectors that look in jobs of a kind, those of plug-ins last; no module of another one is loaded.

    `job`: leave out those that look for what this job cannot have.
    """
    return (*own_detectors(kind, job), *(plug_in.value for plug_in in _plugged()[0].values()))


def own_detectors(kind: JobKind = JobKind.ANY, job: Subject | None = None) -> tuple[Detector, ...]:
    """Return the detectors of tracekit that look in jobs of a kind. `job`: as for `detectors`."""
    of_kind = [name for name, (_, where) in _DETECTORS.items() if where & kind or kind is JobKind.ANY]
    return tuple(_own(name) for name in of_kind if job is None or name not in _OF_EXCHANGES or job.exchanges)


def kinds() -> frozenset[str]:
    """Return all kinds of findings."""
    return frozenset(_DETECTORS) | _plugged()[0].keys()


def left_out() -> tuple[str, ...]:
    """Return a sentence for each detector of a plug-in that cannot be used."""
    return _plugged()[1]


def detector_of(kind: str) -> Detector:
    """Return the detector of a kind of finding. Raises KeyError if there is none."""
    plugged: Detector = _own(kind) if kind in _DETECTORS else _plugged()[0][kind].value
    return plugged


@cache
def _own(kind: str) -> Detector:
    module, name = _DETECTORS[kind][0].split(".")
    detector: Detector = getattr(import_module(f"tracekit.analysis.detectors.{module}"), name)()
    return detector


def is_plug_in(kind: str) -> bool:
    """Whether findings of this kind come from a plug-in."""
    return kind not in _DETECTORS


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
    loaded, problems = plug_ins("detectors", frozenset(_DETECTORS), _fits)
    misnamed = tuple(
        f"{plug_in.source} is left out: its kind is {plug_in.value.kind!r:.40};"
        " give both the same name, one that tracekit itself does not use"
        for name, plug_in in loaded.items()
        if plug_in.value.kind != name
    )
    return {name: plug_in for name, plug_in in loaded.items() if plug_in.value.kind == name}, problems + misnamed


def _fits(value: object) -> bool:
    """Whether an object is a detector whose attributes have the types that `Detector` states."""
    return isinstance(value, Detector) and all(
        isinstance(getattr(value, name, None), get_args(stated)[0]) for name, stated in get_type_hints(Detector).items()
    )


def parts() -> tuple[str, ...]:
    """Return all parts of a rank that can be slow, each once."""
    return tuple(dict.fromkeys(detector.part for detector in detectors(JobKind.ANY) if detector.part is not None))


class Unexplained(Detector):
    """The job straggles, and no detector found out why.

    Paper: attributes S to workers, stages and op kinds, whatever the cause.
    """

    kind = "unexplained"
    title = "Slow for a reason tracekit does not know"
    signature = "stragglers cost 9% or more, or more than noise does, and show none of the known signatures"
    next_check = "by_kind and the worker map; a timeline of the slowest step (`tracekit store export`)"


class Healthy(Detector):
    """The job does not straggle.

    Paper: S below 1.1.
    """

    kind = "healthy"
    title = "No straggler"
    signature = "stragglers cost less than 9%, hardly more than noise does, and show none of the known signatures"
    refuted_by = "stragglers cost 9% or more in another trace of the job"
