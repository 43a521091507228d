"""Hosts that cannot launch work as fast as the GPUs do it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, gpu_of, on_each, share_of
from tracekit.analysis.detectors.slow_host_code import slow_host_code
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.ops import LONGEST_DISPATCH_S, OpEvidence
from tracekit.analysis.evidence.waiting import waiting_calls
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.analysis.whatif.interventions import AddTime, Intervention, LessTime, Together, step_times
from tracekit.base.text import code_name
from tracekit.report.finding import Figure, Finding, Place, Spent, Unit, confidence_from
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.gpu_recording import OF_TORCH

#: Name launch delays and other host work if they take at least this share of the step, not counting waits for data.
HOST_BOUND_SHARE = 0.04
#: So many operators are named.
_MOST_NAMES = 16
_MOST_REASONS = 3
_OF_LOADER = (IdleReason.LOADER,)
_OF_LAUNCHES = (IdleReason.OPERATOR, IdleReason.RUNTIME_CALL, IdleReason.LAUNCH_CALL, IdleReason.LAUNCH_LATENCY)


class HostBound(Detector):
    """Launch delays and host work between ops: Python or kernel launches cannot keep up with the GPUs.

    Paper: as for late data; above 5 %, the job's replay is not trusted. tracekit names it if it takes at least 4 % of
    the step, not counting waits for data and what single workers take longer than their peers.
    """

    kind = "host-bound-launch"
    title = "The host cannot keep up: launch delays and host work between ops"
    signature = "launch delays and host work between ops that together make up a large share of the step"
    refuted_by = "CUDA graphs or larger microbatches leave the gaps as they are"
    next_check = "a CPU profile of the launching thread; host: run queue, steal, CPU frequency; gaps in a Kineto trace"
    suggested_fix = (
        "launch less: CUDA graphs or torch.compile(mode='reduce-overhead'), no .item() or logging within the step; pin"
        " the launching threads to cores"
    )
    part = "host"
    loss = LossKind.HOST
    explains_delays = False  # its whole signature is launch delays, and waits that the graph lacks look the same
    repair = Repair(
        "hide-launch-delays", "Remove launch delays and host work between ops", assumes="all launch delays go"
    )

    def in_ops(self, evidence: OpEvidence) -> Iterator[Candidate]:
        gpu = gpu_of(evidence)
        if gpu is not None:
            yield from self._in_one_gpu(evidence, gpu)
        if evidence.kept is None or evidence.alone or not evidence.leads(self.loss):
            return
        idle_s = evidence.kept.idle_s
        share = idle_s / evidence.recorded_s
        yield Candidate(
            self.kind,
            Place(),
            f"every GPU is idle for at least {share:.0%} of the recording{_mostly(evidence)}",
            (Figure("idle, over the recording", share, SMALLEST_HEADLINE_SHARE, Unit.SHARE),),
            confidence_from((Figure("idle", share, SMALLEST_HEADLINE_SHARE),)),
            AddTime(-idle_s),
            bound=True,
            title="The GPUs are idle",
            next_check="a timeline of the hosts' threads while the GPUs are idle (`tracekit export`); py-spy",
            suggested_fix=(
                "see to what the hosts do meanwhile, as the other findings price it; launch fewer and larger kernels"
                " (torch.compile, CUDA graphs) or give the data loader more workers"
            ),
        )

    def _in_one_gpu(self, evidence: OpEvidence, gpu: GpuTimes) -> Iterator[Candidate]:
        """Dispatch of operators and launches, from the recording of one rank."""
        work = evidence.host_time
        dispatch = work.mask(IdleReason.OPERATOR, IdleReason.RUNTIME_CALL) | work.mask(
            IdleReason.PYTHON, where=lambda what: OF_TORCH.match(what.name) is not None
        )
        short = work.seconds < LONGEST_DISPATCH_S * work.pieces
        dispatch &= ~evidence.in_head & (short | work.mask(IdleReason.OPERATOR)) & ~evidence.computes_on_host
        taken_s = float(work.steady_s[dispatch].sum())
        opened_s = gpu.idle_opened_by
        if opened_s.get("synchronise", 0.0) > opened_s.get("host", 0.0):
            return  # the host falls behind because it waited: the waits are to be removed
        if share_of(evidence, taken_s) < SMALLEST_SHARE:
            return
        named = [part for part in work.by_name(IdleReason.OPERATOR) if dispatch[part.parts].any()]
        names = tuple(part.name for part in named[:_MOST_NAMES])
        longest = f", longest of {code_name(names[0])} ({on_each(evidence, named[0].seconds)})" if names else ""
        launch = gpu.launch
        waits, loader = _without_waits(evidence), _without_loader(evidence)
        gone = [one for one in (waits, loader) if one is not None]
        first: tuple[str, ...] = () if waits is None else ("sync-calls", "gpu-allocation")
        if loader is not None and _idle_s(gpu, *_OF_LOADER) > _idle_s(gpu, *_OF_LAUNCHES):
            first += ("late-data-loading",)
        tell = None if evidence.repeats else "steps launch different work, which no CUDA graph can repeat"
        yield candidate(
            self.kind,
            evidence,
            Spent("launch-bound", names[0] if names else "launches", "", names, launch.calls, taken_s, tell),
            f"the GPU waits for dispatch and launch{longest}: {launch.short_kernels:,} of {launch.kernels:,} kernels"
            " are shorter than 10 us",
            Together(
                (
                    work.less_s(np.where(dispatch, work.steady_s, 0.0)),
                    LessTime(np.zeros(len(work.called_s)), evidence.launch_latency_s),
                )
            ),
            bound=tell is not None,
            after=Together(tuple(gone)) if gone else None,
            follows=first,
            title="The GPU waits for launches",
            next_check="torch.compile on the model: are the gaps gone?",
            suggested_fix=(
                "launch less: torch.compile(mode='reduce-overhead') or CUDA graphs, a fused or foreach optimizer, a"
                " larger batch"
            ),
        )

    def fixes(self, found: Finding) -> Iterator[Plan]:
        """See `Detector.fixes`. Of one GPU, the price is that of a graph."""
        for plan in super().fixes(found):
            graph = {"assumes": "one launch for all kernels"}
            yield plan if found.spent is None else structs.replace(plan, details=graph)

    def in_pipeline(self, evidence: Evidence) -> Iterator[Candidate]:
        change = evidence.host_code.none_but_beyond(slow_host_code(evidence))
        share = 1 - float(step_times(evidence.replay, (change,)).mean()) / evidence.unchanged_s
        if share < HOST_BOUND_SHARE:
            return
        figures = (Figure("launch delays and host work, over the step", share, HOST_BOUND_SHARE, Unit.SHARE),)
        effect = f"launch delays and host work between ops take {share:.0%} of the step"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change)


def _without_waits(evidence: OpEvidence) -> Intervention | None:
    """The job without the calls that wait for the GPU, if steps have several: a CUDA graph can hold none of them."""
    found = [waiting_calls(evidence, allocates=of) for of in (True, False)]
    calls = found[0].calls | found[1].calls
    return evidence.without_waits(calls) if np.count_nonzero(calls) > evidence.steps_in_whole else None


def _without_loader(evidence: OpEvidence) -> Intervention | None:
    """The job without its data loader, if it has one.

    A host that launches at once runs ahead of the GPU, and hides the loader: that is no time that launches take.
    """
    loads = evidence.host_time.mask(IdleReason.LOADER)
    return evidence.host_time.less(loads) if loads.any() else None


def _idle_s(gpu: GpuTimes, *reasons: IdleReason) -> float:
    """How long the GPU is idle for these reasons, before its first op too, seconds."""
    idle_s = sum(idle.seconds for idle in gpu.idle_by_reason if idle.reason in reasons)
    return idle_s + sum(gpu.before_first.by_reason.get(reason, 0.0) for reason in reasons)


def _mostly(evidence: OpEvidence) -> str:
    """What the host of the rank that is idle least does meanwhile, in words."""
    gpu = evidence.gpu
    reasons = () if gpu is None else gpu.idle_by_reason[:_MOST_REASONS]
    if gpu is None or not reasons:
        return ""
    named = [f"{one.reason} {one.seconds / evidence.recorded_s:.0%}" for one in reasons]
    return f", that of rank {gpu.rank} for {', '.join(named)}"
