"""Fixes for slow workers and hosts: replace them, or give them less work.

In: a pipeline and `Cause`s. Out: `Plan`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import as_fast_as_peers, worker_factor
from tracekit.analysis.fixes.plan import MACHINE, SPEED_OF_PEERS, Plan
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Place
from tracekit.trace.model import Worker

#: A healthy worker is as fast as its peers: the trace has no better reference.
LIKE_PEERS = "as fast as its peers"
#: Look for the smallest set of workers whose repair brings the slowdown below this.
TARGET_SLOWDOWN = 1.05
#: What a repair of a worker makes faster.
COMPUTES = "kind=forward-compute,backward-compute,optimizer"
#: Workers that an edit names one by one.
MOST_NAMED = 16
_Item = TypeVar("_Item")


def worker_plans(job: PipelineSubject, slow: Sequence[Cause]) -> Iterator[Plan]:
    """Make slow workers as fast as their peers; repair only as few as needed; or give a slow worker less work.

    The price assumes a healthy worker in its place. A plan says "replace" or "drain" only if there is evidence that the
    machine is at fault.
    """
    names = job.names
    for cause in slow:
        host = cause.where.host is not None
        hardware = cause.hardware
        drained = f"Drain {cause.where.host}" if host and hardware else None
        yield Plan(
            "drain-host" if host else "replace-workers",
            drained or _repair(names, cause.where, hardware=hardware),
            cause.where,
            cause.change,
            step_times=cause.without_s,
            details={"assumes": LIKE_PEERS} if hardware else {},
            cause=cause,
            reached="the speed of other hosts afterwards" if host else SPEED_OF_PEERS,
            excludes=MACHINE,
            edit=_repair_text(cause.where.workers),
        )
    workers = tuple(worker for cause in slow for worker in cause.where.workers)
    if len(workers) > 1:
        yield from _fewest(job, workers, slow)
    if len(workers) == 1:
        yield from _shifted(job, workers[0], slow[0])


def _fewest(job: PipelineSubject, workers: tuple[Worker, ...], slow: Sequence[Cause]) -> Iterator[Plan]:
    """The smallest set of slow workers whose repair brings the slowdown below the target."""
    attribution = job.attribution
    ranked = sorted(
        workers,
        key=lambda worker: -attribution.worker_slowdown[attribution.dp_ranks.index(worker.dp_rank), worker.pp_rank],
    )
    target_s = TARGET_SLOWDOWN * attribution.ideal_s * job.unchanged_s / attribution.original_s

    def reached(chosen: Sequence[Worker]) -> bool:
        return float(job.step_times((as_fast_as_peers(job, chosen),)).mean()) <= target_s

    chosen = fewest_that_suffice(ranked, reached)
    if chosen is None or len(chosen) == len(workers):
        return
    where = Place(workers=tuple(sorted(chosen)))
    hardware = all(cause.hardware for cause in slow if {*cause.where.workers} & {*chosen})
    yield Plan(
        "replace-workers",
        f"{_repair(job.names, where, hardware=hardware)}: enough for a slowdown under {TARGET_SLOWDOWN:g}",
        where,
        as_fast_as_peers(job, chosen),
        details={"assumes": LIKE_PEERS} if hardware else {},
        cause=min(slow, key=lambda cause: cause.confidence),
        reached=SPEED_OF_PEERS,
        excludes=MACHINE,
        edit=_repair_text(chosen),
    )


def _repair_text(workers: Sequence[Worker]) -> str | None:
    """The computes of these workers as fast as their peers, as an edit; None if they are too many to name."""
    named = " or ".join(f"worker={worker.dp_rank},{worker.pp_rank}" for worker in sorted(workers))
    if not 0 < len(workers) <= MOST_NAMED:
        return None
    return f"({named}) and {COMPUTES}" if len(workers) > 1 else f"{named} and {COMPUTES}"


def _repair(names: Names, where: Place, *, hardware: bool) -> str:
    """What the price assumes; without evidence against the machine, blames nobody."""
    place = names.place(where)
    assert place is not None, "what is slow has a place"
    return f"Replace {place.words}" if hardware else f"Make {place.words} as fast as {place.verb('its', 'their')} peers"


def fewest_that_suffice(
    ranked: Sequence[_Item], reached: Callable[[Sequence[_Item]], bool]
) -> tuple[_Item, ...] | None:
    """The fewest of `ranked` (worst first) for which `reached` holds; None if all do not suffice or none is needed.

    Finds the shortest sufficient prefix by bisection, then drops each member that the rest can do without. Repairing
    more never slows a job, so `reached` is monotone.
    """
    if not ranked or not reached(ranked) or reached(()):
        return None
    low, high = 1, len(ranked)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(ranked[:middle]) else (middle + 1, high)
    chosen = list(ranked[:high])
    for item in list(reversed(chosen)):
        rest = [other for other in chosen if other != item]
        if len(chosen) <= 16 and reached(rest):
            chosen = rest
    return tuple(chosen)


def _shifted(job: PipelineSubject, worker: Worker, cause: Cause) -> Iterator[Plan]:
    """Fewer microbatches for the slow worker's DP rank; the other DP ranks take the rest."""
    profile = job.profile
    microbatches, dp_ranks = job.table.shape[3], len(job.dp_ranks)
    if profile is None or dp_ranks < 2 or microbatches < 2:
        return
    dp_index = job.dp_index[worker.dp_rank]
    factor = float(worker_factor(job)[worker.pp_rank, dp_index])
    # Move as many microbatches k as make (m - k) x factor equal to m + k / (dp - 1).
    even = microbatches * (factor - 1) / (factor + 1 / (dp_ranks - 1))
    plans = []
    for moved in sorted({int(np.floor(even)), int(np.ceil(even))} - {0}):
        if moved >= microbatches:
            continue
        share = np.full(dp_ranks, 1 + moved / (dp_ranks - 1) / microbatches)
        share[dp_index] = 1 - moved / microbatches
        change = Scale(job.table, share[None, None, None, None, None, :])
        times = job.step_times((change,))
        title = f"Take {moved} of {microbatches} microbatches a step from dp {worker.dp_rank}"
        plans.append(
            Plan(
                "shift-work-from-slow-worker",
                title,
                Place(dp_ranks=(worker.dp_rank,)),
                change,
                step_times=times,
                bound=True,
                details={
                    "microbatches_moved": moved,
                    "slowness": factor,
                    "assumes": "equal microbatches",
                },
                cause=cause,
                around=True,
                excludes=MACHINE,
                edit=f"dp_rank={worker.dp_rank} and kind=~compute * {share[dp_index]:.6g}"
                f" + kind=~compute but dp_rank={worker.dp_rank} * {share[dp_index - 1]:.6g}",
            )
        )
    if plans:
        yield min(plans, key=lambda plan: float(np.mean(plan.step_times if plan.step_times is not None else np.inf)))
