"""What each kind of loss costs a job of any graph, and which one leads.

In: a job of any graph. Out: seconds by kind of loss, as recorded and without the profiler, and time that is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.evidence.culprit import at_pace, culprit_of, uneven_experts, unknown_loads
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject, RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.evidence.unprofiled_steps import in_production_s, profiler_s, saves_step, unprofiled_step
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import NOT_THE_HOST, IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.gpu.gpu_times import GpuTimes


def exposed_communication_s(job: GraphSubject) -> float:
    """Return what a recording would save if transfers took no time once all ranks have arrived, seconds; 0 for other
    jobs.
    """
    return _exposed_s(job) or 0.0


@evidence(RecordingSubject)
def _exposed_s(job: RecordingSubject) -> float:
    from tracekit.analysis.gpu.behind import exposed_s  # only jobs of any graph need it

    return exposed_s(job.pace, job.ops)


@evidence(GraphSubject)
def named_s(job: GraphSubject) -> float:
    """What the rank that stands out and uneven experts cost, seconds; 0 if there are none."""
    uneven, late = uneven_experts(job), (unknown_loads(job), culprit_of(job))
    uneven_s = 0.0 if uneven is None else uneven.saved_s * job.steps_in_whole
    return uneven_s + sum(one.saved_s for one in late if one is not None)


@evidence(GraphSubject)
def parts_of_s(job: GraphSubject) -> Parts:
    """What S consists of: the rank that stands out, noise, and the rest. A rank alone is nobody's straggler."""
    explained_s = named_s(job) if job.shows(Fact.RANKS) else job.noise.lost_s
    return structs.replace(job.noise, explained_s=explained_s)


@evidence(GraphSubject)
def losses_s(job: GraphSubject) -> Mapping[LossKind, float]:
    """What each kind of loss costs, seconds. All ranks lose what the busiest GPU is idle."""
    exposed_s = max(exposed_communication_s(job), 0.0)
    of_one = _idle_by_loss(job)
    if of_one is not None:
        return {LossKind.COMMUNICATION: exposed_s, **of_one}
    straggling_s = named_s(job) + parts_of_s(job).unexplained_s * parts_of_s(job).headline
    return {
        LossKind.STRAGGLER: max(straggling_s, job.straggling_s),
        LossKind.HOST: job.idle_s,
        LossKind.COMMUNICATION: exposed_s,
    }


@evidence(RecordingSubject)
def gpu_alone(job: RecordingSubject) -> GpuTimes | None:
    """What the GPU of a rank did that is compared with nobody; None if there are several."""
    return None if job.shows(Fact.RANKS) else job.gpu


@evidence(RecordingSubject)
def _idle_by_loss(job: RecordingSubject) -> dict[LossKind, float] | None:
    """The time in which the GPU of a rank alone does nothing, before its first op too, by the kind of loss; seconds."""
    gpu = gpu_alone(job)
    if gpu is None:
        return None
    by_loss = dict.fromkeys((LossKind.HOST, LossKind.INPUT, LossKind.IDLE), 0.0)
    by_reason = [*((idle.reason, idle.seconds) for idle in gpu.idle_by_reason), *gpu.before_first.by_reason.items()]
    for reason, spent_s in by_reason:
        unseen = LossKind.IDLE if reason in NOT_THE_HOST else LossKind.HOST
        by_loss[LossKind.INPUT if reason == str(IdleReason.LOADER) else unseen] += spent_s
    by_loss[LossKind.IDLE] += unseen_head_s(job)
    return by_loss


@evidence(GraphSubject)
def leading_loss(job: GraphSubject) -> LossKind:
    """The kind of loss that costs most: one rank, or what all ranks lose together."""
    return _costliest(job, losses_s(job), job.recorded_s)


def leads(job: GraphSubject, kind: LossKind) -> bool:
    """Return whether this kind of loss costs most, as recorded or without the profiler."""
    return kind in {leading_loss(job), _costliest(job, lost_in_production_s(job), in_production_s(job))}


def _costliest(job: GraphSubject, lost_s: Mapping[LossKind, float], whole_s: float) -> LossKind:
    kind = max(lost_s, key=lambda each: lost_s[each])
    if lost_s[kind] >= SMALLEST_HEADLINE_SHARE * (whole_s or 1.0):
        return kind
    return LossKind.BALANCED if culprit_of(job) is None else LossKind.MINOR


@evidence(GraphSubject)
def lost_in_production_s(job: GraphSubject) -> Mapping[LossKind, float]:
    """What each kind of loss costs of `in_production_s`, seconds: of the hosts', without what is the profiler's; of a
    rank, what its peers' pace saves then; of what is not seen, without what lies before the step.
    """
    lost_s = dict(losses_s(job))
    culprit = culprit_of(job)
    if culprit is not None and (saves := saves_step(job, (at_pace(job, culprit.rank),))) is not None:
        rest_s = max(lost_s[LossKind.STRAGGLER] - culprit.saved_s, 0.0)
        lost_s[LossKind.STRAGGLER] = min(lost_s[LossKind.STRAGGLER], rest_s + saves.value * job.steps_in_whole)
    lost_s[LossKind.HOST] = max(lost_s[LossKind.HOST] - (profiler_s(job) or 0.0), 0.0)
    if LossKind.IDLE in lost_s and unprofiled_step(job) is not None:
        lost_s[LossKind.IDLE] = max(lost_s[LossKind.IDLE] - (unseen_head_s(job) or 0.0), 0.0)
    return lost_s


@evidence(GraphSubject)
def discrepancy(job: GraphSubject) -> float:
    """The share of time that launch delays add, T(recorded) / T(original) - 1.

    Without time in which the GPU of a rank alone idles, and its host is not late: a finding says so.
    """
    return (job.recorded_s - unseen_s(job)) / (float(job.times.original.mean()) or float("nan")) - 1


def unseen_s(job: GraphSubject) -> float:
    """Return how much of the time of a rank alone goes to what the recording does not show, by a finding, seconds."""
    return _unseen_s(job) or 0.0


@evidence(RecordingSubject)
def _unseen_s(job: RecordingSubject) -> float:
    gpu = gpu_alone(job)
    if gpu is None:
        return 0.0
    idle_s = sum(idle.seconds for idle in gpu.idle_by_reason if idle.reason in NOT_THE_HOST)
    gone_s = max(unseen_head_s(job), _backlog_s(job)) + idle_s
    return max(min(gone_s, job.recorded_s - float(job.times.original.mean())), 0.0)


@evidence(RecordingSubject)
def _backlog_s(job: RecordingSubject) -> float:
    """How long streams still did what had been launched before the recording, and is not in it, seconds."""
    first = job.ops.select(pl.struct("rank", "stream").is_first_distinct() & pl.col("role").eq("gpu"))
    before = first.to_series().fill_null(value=False).to_numpy() & (host_time(job).launched_by < 0)
    return float(job.replay.delay_of_ops[before].max(initial=0.0))


@evidence(RecordingSubject)
def unseen_head_s(job: RecordingSubject) -> float:
    """How long the GPU of a rank alone did something from before the recording, seconds.

    That is from when the call returned that launched its first op, or from the beginning of a recording without
    that call, to when the op began.
    """
    gpu = gpu_alone(job)
    if gpu is None or not gpu.before_first.seconds:
        return 0.0
    on_gpu = job.ops["role"].eq("gpu").fill_null(value=False).to_numpy()
    first = int(np.where(on_gpu, job.graph.ops.start, np.inf).argmin())
    call_s = np.append(host_time(job).called_s, 0.0)[host_time(job).launched_by[first]]
    head = gpu.before_first
    return max(head.seconds - sum(head.by_reason.values()) - float(call_s), 0.0)


def idles(job: GraphSubject) -> bool:
    """Return whether to ask what the hosts do while GPUs idle: of a rank alone, or if nothing costs several ranks
    more.
    """
    return bool(_idles(job))


@evidence(RecordingSubject)
def _idles(job: RecordingSubject) -> bool:
    return not job.shows(Fact.RANKS) or leads(job, LossKind.HOST)


@evidence(RecordingSubject)
def idle_gpu(job: RecordingSubject) -> GpuTimes | None:
    """The times of the GPU to explain: of one rank, or of the busiest of several that all idle most."""
    return job.gpu if idles(job) else None
