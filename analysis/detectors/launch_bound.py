"""Hosts that cannot launch work as fast as the GPUs do it, in recordings of GPUs.

In: a recording. Out: candidates of `host_bound.HostBound`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, on_each, share_of
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.gpu_losses import idle_gpu, leads
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import LONGEST_DISPATCH_S, computes_on_host, host_time, in_head
from tracekit.analysis.evidence.launches import launch_latency_s, waiting_calls, without_waits
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.whatif.interventions import AddTime, Intervention, LessTime, Together
from tracekit.base.text import code_name
from tracekit.report.finding import Figure, Place, Spent, Unit, confidence_from
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.gpu_recording import OF_TORCH

#: So many operators are named.
_MOST_NAMES = 16
_MOST_REASONS = 3
_OF_LOADER = (IdleReason.LOADER,)
_OF_LAUNCHES = (IdleReason.OPERATOR, IdleReason.RUNTIME_CALL, IdleReason.LAUNCH_CALL, IdleReason.LAUNCH_LATENCY)


def launch_bound(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield where a recording waits for launches. `kind`: of the findings."""
    gpu = idle_gpu(job)
    if gpu is not None:
        yield from _in_one_gpu(kind, job, gpu)
    if not job.shows(Fact.RANKS) or not leads(job, LossKind.HOST):
        return
    idle_s = job.idle_s
    share = idle_s / job.recorded_s
    yield Candidate(
        kind,
        Place(),
        f"every GPU is idle for at least {share:.0%} of the recording{_mostly(job)}",
        (Figure("idle, over the recording", share, SMALLEST_HEADLINE_SHARE, Unit.SHARE),),
        confidence_from((Figure("idle", share, SMALLEST_HEADLINE_SHARE),)),
        AddTime(-idle_s),
        bound=True,
        title="The GPUs are idle",
        next_check="a timeline of the hosts' threads while the GPUs are idle (`tracekit store export`); py-spy",
        suggested_fix=(
            "see to what the hosts do meanwhile, as the other findings price it; launch fewer and larger kernels"
            " (torch.compile, CUDA graphs) or give the data loader more workers"
        ),
    )


def _in_one_gpu(kind: str, job: RecordingSubject, gpu: GpuTimes) -> Iterator[Candidate]:
    """Dispatch of operators and launches, from the recording of one rank."""
    work = host_time(job)
    dispatch = work.mask(IdleReason.OPERATOR, IdleReason.RUNTIME_CALL) | work.mask(
        IdleReason.PYTHON, where=lambda what: OF_TORCH.match(what.name) is not None
    )
    short = work.seconds < LONGEST_DISPATCH_S * work.pieces
    dispatch &= ~in_head(job) & (short | work.mask(IdleReason.OPERATOR)) & ~computes_on_host(job)
    taken_s = float(work.steady_s[dispatch].sum())
    opened_s = gpu.idle_opened_by
    if opened_s.get("synchronise", 0.0) > opened_s.get("host", 0.0):
        return  # the host falls behind because it waited: the waits are to be removed
    if share_of(job, taken_s) < SMALLEST_SHARE:
        return
    named = [part for part in work.by_name(IdleReason.OPERATOR) if dispatch[part.parts].any()]
    names = tuple(part.name for part in named[:_MOST_NAMES])
    longest = f", longest of {code_name(names[0])} ({on_each(job, named[0].seconds)})" if names else ""
    launch = gpu.launch
    waits, loader = _without_waits(job), _without_loader(job)
    gone = [one for one in (waits, loader) if one is not None]
    first: tuple[str, ...] = () if waits is None else ("sync-calls", "gpu-allocation")
    if loader is not None and _idle_s(gpu, *_OF_LOADER) > _idle_s(gpu, *_OF_LAUNCHES):
        first += ("late-data-loading",)
    tell = None if repeats(job) else "steps launch different work, which no CUDA graph can repeat"
    yield candidate(
        kind,
        job,
        Spent("launch-bound", names[0] if names else "launches", "", names, launch.calls, taken_s, tell),
        f"the GPU waits for dispatch and launch{longest}: {launch.short_kernels:,} of {launch.kernels:,} kernels"
        " are shorter than 10 us",
        Together(
            (
                work.less_s(np.where(dispatch, work.steady_s, 0.0)),
                LessTime(np.zeros(len(work.called_s)), launch_latency_s(job)),
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


def _without_waits(job: RecordingSubject) -> Intervention | None:
    """The job without the calls that wait for the GPU, if steps have several: a CUDA graph can hold none of them."""
    waiting = [waiting_calls(job, allocates=of) for of in (True, False)]
    calls = waiting[0].calls | waiting[1].calls
    return without_waits(job, calls) if np.count_nonzero(calls) > job.steps_in_whole else None


def _without_loader(job: RecordingSubject) -> Intervention | None:
    """The job without its data loader, if it has one.

    A host that launches at once runs ahead of the GPU, and hides the loader: that is no time that launches take.
    """
    loads = host_time(job).mask(IdleReason.LOADER)
    return host_time(job).less(loads) if loads.any() else None


def _idle_s(gpu: GpuTimes, *reasons: IdleReason) -> float:
    """How long the GPU is idle for these reasons, before its first op too, seconds."""
    idle_s = sum(idle.seconds for idle in gpu.idle_by_reason if idle.reason in reasons)
    return idle_s + sum(gpu.before_first.by_reason.get(reason, 0.0) for reason in reasons)


def _mostly(job: RecordingSubject) -> str:
    """What the host of the rank that is idle least does meanwhile, in words."""
    gpu = job.gpu
    reasons = () if gpu is None else gpu.idle_by_reason[:_MOST_REASONS]
    if gpu is None or not reasons:
        return ""
    named = [f"{one.reason} {one.seconds / job.recorded_s:.0%}" for one in reasons]
    return f", that of rank {gpu.rank} for {', '.join(named)}"


@evidence(RecordingSubject)
def repeats(job: RecordingSubject) -> bool:
    """Whether most marked steps launch the same kernels in the same order; of one step, nothing else is known."""
    if "profiler_step" not in job.ops.columns:
        return True
    ops = job.ops.select("role", "profiler_step", "name")
    gpu = ops.filter(pl.col("role") == "gpu", pl.col("profiler_step").is_not_null())
    name, step = numbered(gpu["name"]), gpu["profiler_step"].to_numpy()
    order = np.argsort(step, kind="stable")
    steps = Counter(mine.tobytes() for mine in np.split(name[order], np.flatnonzero(np.diff(step[order])) + 1))
    return len(steps) < 2 or 2 * max(steps.values()) >= steps.total()
