"""Fixes that several findings share: plans for workers that are slow or busy, and for layers that other stages take.

In: a pipeline and `Cause`s. Out: `Plan`s, which the diagnosis prices. If the layers of each stage are known, a plan
gives the best integer split, and the split that leaves the loss layer alone on the last stage. If they are not, a split
would be a guess: the plan gives the amount of work that each stage should have, which is valid for any layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heapreplace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.congestion import rings_faster
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives
from tracekit.analysis.evidence.slow_workers import (
    SLOW_WORKERS,
    as_fast_as_peers,
    microbatch_cost,
    stage_slowness,
    usual_base_s,
    worker_factor,
)
from tracekit.analysis.evidence.subject import LAYERS, MACHINE, SPEED_OF_PEERS, Cause, Names, Plan
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.statistics import safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.errors import SelectionError
from tracekit.report.finding import Place
from tracekit.trace.model import DP_COLLECTIVES, Worker

if TYPE_CHECKING:
    from tracekit.analysis.plans.best_plans import OneLane, StageModel

#: A healthy worker is as fast as its peers: the trace has no better reference.
LIKE_PEERS = "as fast as its peers"
#: What a repair of a worker makes faster.
COMPUTES = "kind=forward-compute,backward-compute,optimizer"
#: Workers that an edit names one by one.
MOST_NAMED = 16
_Item = TypeVar("_Item")
#: Stop improving the deal of a step after this many swaps.
SWAPS = 200
#: Compression shrinks gradients and parameters by this factor: 16 to 8 bits. Definition.
COMPRESSION = 2
SAME_LAYERS = "all layers cost the same"
ANY_AMOUNT = "work moves in any amount (whatif --layers 8,8,... says which layers)"


class WorkerFixThresholds(Struct, frozen=True):
    """When fixes of workers suffice."""

    #: Slowdown below which as few workers as possible are to bring the job. Chosen: half of what makes a straggler.
    target_slowdown: float = 1.05
    #: Share of the load of the busiest DP rank that a swap of microbatches takes off. Chosen: tests deal within 1 % of
    #: the best.
    smallest_gain: float = 1e-4


WORKER_FIXES = WorkerFixThresholds()


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
    target_s = WORKER_FIXES.target_slowdown * attribution.ideal_s * job.unchanged_s / attribution.original_s

    def reached(chosen: Sequence[Worker]) -> bool:
        return float(job.step_times((as_fast_as_peers(job, chosen),)).mean()) <= target_s

    chosen = fewest_that_suffice(ranked, reached)
    if chosen is None or len(chosen) == len(workers):
        return
    where = Place(workers=tuple(sorted(chosen)))
    hardware = all(cause.hardware for cause in slow if {*cause.where.workers} & {*chosen})
    yield Plan(
        "replace-workers",
        f"{_repair(job.names, where, hardware=hardware)}: enough for a slowdown under {WORKER_FIXES.target_slowdown:g}",
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
                details={"microbatches_moved": moved, "slowness": factor, "assumes": "equal microbatches"},
                cause=cause,
                around=True,
                excludes=MACHINE,
                edit=f"dp_rank={worker.dp_rank} and kind=~compute * {share[dp_index]:.6g}"
                f" + kind=~compute but dp_rank={worker.dp_rank} * {share[dp_index - 1]:.6g}",
            )
        )
    if plans:
        yield min(plans, key=lambda plan: float(np.mean(plan.step_times if plan.step_times is not None else np.inf)))


def deal_step(cost: Floats) -> Ints:
    """Deal the microbatches of one step, the longest first, each to the DP rank with the least load that has room.

    `cost`: [microbatches, dp_ranks], relative or in seconds. Returns positions in `cost.ravel()`, of the same shape: DP
    rank d runs those in column d, in this order.
    """
    flat = cost.ravel()
    lengths, dealt = flat.tolist(), [[0] * cost.shape[1] for _ in range(len(cost))]
    least = [(0.0, dp_rank, 0) for dp_rank in range(cost.shape[1])]  # load and number of microbatches so far
    for item in np.argsort(-flat, kind="stable").tolist():
        load, dp_rank, count = least[0]
        dealt[count][dp_rank] = item
        if count + 1 < len(dealt):
            heapreplace(least, (load + lengths[item], dp_rank, count + 1))
        else:
            heappop(least)
    return np.array(dealt, np.int64).reshape(cost.shape)


def best_deal_of_step(cost: Floats, dealt: Ints) -> Ints:
    """As `dealt` by `deal_step`; then microbatches change places with those of the busiest DP rank while that helps."""
    flat, dealt = cost.ravel(), dealt.copy()
    load = flat[dealt].sum(axis=0)
    for _ in range(SWAPS):
        if not _swap(flat, dealt, load):
            break
    return dealt


def _swap(flat: Floats, dealt: Ints, load: Floats) -> bool:
    """Make the swap that helps the busiest DP rank most; return False if no swap helps.

    Changes the arrays of `best_deal_of_step` in place.
    """
    busiest = int(load.argmax())
    partners = np.argsort(load, kind="stable")[:8]
    partners = partners[partners != busiest]
    if not len(partners):
        return False
    costs = flat[dealt[:, busiest]]
    # The load that each swap moves from the busiest DP rank to each partner, [mine, partners, theirs].
    moved = costs[:, None, None] - flat[dealt[:, partners]].T[None]
    gap = (load[busiest] - load[partners])[None, :, None]
    higher = np.maximum(load[busiest] - moved, load[partners][None, :, None] + moved)
    higher = np.where((moved > 0) & (moved < gap), higher, np.inf)
    best = np.unravel_index(int(higher.argmin()), higher.shape)
    if not higher[best] < load[busiest] * (1 - WORKER_FIXES.smallest_gain):
        return False
    mine_at, partner_at, theirs_at = (int(cell) for cell in best)
    partner = int(partners[partner_at])
    amount = moved[best]
    dealt[mine_at, busiest], dealt[theirs_at, partner] = dealt[theirs_at, partner], dealt[mine_at, busiest]
    load[busiest] -= amount
    load[partner] += amount
    return True


def deal_job(cost: Floats) -> Ints:
    """Deal every step: `cost` [microbatches, steps, dp_ranks] to positions in each step's [microbatches x dp_ranks]."""
    return np.stack([deal_step(cost[:, step]) for step in range(cost.shape[1])], axis=1)


def dealt_cost(cost: Floats, deal: Ints) -> Floats:
    """The cost of the microbatch at each place after the deal, [microbatches, steps, dp_ranks]."""
    microbatches, steps, dp_ranks = cost.shape
    by_step = cost.transpose(1, 0, 2).reshape(steps, microbatches * dp_ranks)
    new = np.take_along_axis(by_step, deal.transpose(1, 0, 2).reshape(steps, -1), axis=1)
    return new.reshape(steps, microbatches, dp_ranks).transpose(1, 0, 2)


def grouped_cost(cost: Floats) -> Floats:
    """The same with the most alike in the same step, the cheapest in the step that was cheapest: [microbatches, steps,
    dp_ranks].
    """
    microbatches, steps, dp_ranks = cost.shape
    alike = np.sort(cost, axis=None).reshape(steps, microbatches, dp_ranks)
    grouped = np.empty_like(alike)
    grouped[np.argsort(cost.sum(axis=(0, 2)), kind="stable")] = alike
    return grouped.transpose(1, 0, 2)


def balance_plans(job: PipelineSubject, causes: Sequence[Cause]) -> Iterator[Plan]:
    """Microbatches dealt anew over the DP ranks of each step, for those of `causes` that make them uneven.

    No deal can give the busiest DP rank less than the mean. With one microbatch a step, it has the longest one,
    whatever the deal, so only sequences of similar length in the same step help.
    """
    profile = job.profile
    if not causes or profile is None:
        return
    cost = microbatch_cost(job)
    cause = max(causes, key=lambda finding: finding.saved_s)
    elastic = profile.elasticity[:, :, :, None, None, None]
    if len(cost) == 1:
        yield Plan(
            "group-sequences",
            "Have the sampler give each step sequences of similar length: with one microbatch per DP rank, no deal"
            " within a step helps",
            Place(),
            Scale(job.table, (1 + elastic * (grouped_cost(cost) - 1)) / safe(1 + elastic * (cost - 1))),
            details={"assumes": "the sequences of these steps may change places, and cost the same on any DP rank"},
            cause=cause,
        )
        return
    load, deal = cost.sum(axis=0), deal_job(cost)
    better = [best_deal_of_step(cost[:, step], deal[:, step]) for step in range(cost.shape[1])]
    dealt, best = dealt_cost(cost, deal), dealt_cost(cost, np.stack(better, axis=1))
    change = Scale(job.table, (1 + elastic * (dealt - 1)) / safe(1 + elastic * (cost - 1)))
    removals = [finding.change for finding in causes if finding.change is not None]
    bound_s = float(job.step_times(removals).mean())
    offset = job.attribution.recorded_s - job.unchanged_s
    yield Plan(
        "balance-sequences",
        "Deal microbatches over DP ranks by cost in the sampler: by the sum of squared sequence lengths, not by count",
        Place(),
        change,
        details={
            "busiest_over_mean_now": float((load.max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_then": float((dealt.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_best": float((best.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "bound_step_s": bound_s + offset,
            "assumes": "same cost on any DP rank; the longest first, each to the DP rank with the least work",
        },
        cause=cause,
    )


def general_plans(job: PipelineSubject) -> Iterator[Plan]:
    """Plans that do not depend on a cause.

    Most are upper bounds.
    """
    if not collectives(job).empty:
        # Waiting for an unrecorded worker is not transfer time, so it stays.
        kinds = f"kind={','.join(sorted(DP_COLLECTIVES & set(job.replay.graph.job.kinds)))}"
        transfers = traffic_of(job).transfer_share[..., None]
        yield Plan(
            "overlap-dp-communication",
            "Overlap data-parallel communication with compute, all of it",
            Place(),
            Scale(collectives(job), 1 - transfers),
            bound=True,
            edit=f"{kinds} * 0" if (transfers == 1).all() else None,
        )
        yield Plan(
            "compress-dp-communication",
            "Halve data-parallel bytes",
            Place(),
            rings_faster(traffic_of(job), 1 - traffic_of(job).transfer_share * (1 - 1 / COMPRESSION)),
            details={"ratio": COMPRESSION, "assumes": "transfer time follows bytes"},
        )
    profile = job.profile
    if profile is not None and job.stages > 1:
        chunks = job.table.shape[2]
        # With twice as many microbatches of half the size, the bubble of (pp - 1) / chunks microbatches is half as
        # long.
        slot_s = float(profile.stage_s.sum(axis=1).mean())
        saved_s = slot_s * (job.stages - 1) / chunks / 2
        yield Plan(
            "more-microbatches",
            "Run twice as many microbatches of half the size",
            Place(),
            None,
            step_times=job.unchanged - saved_s,
            bound=True,
            details={"bubble_s": 2 * saved_s, "assumes": "compute time follows size"},
        )


class LayerFixThresholds(Struct, frozen=True):
    """When work moves between stages."""

    #: Share of what the largest giver gives up that a stage gives up which is named. Chosen: only words follow.
    named_share: float = 0.5
    #: Share of the work of a stage that has to move. Chosen: as little as a fix has to save.
    smallest_move: float = 0.01


LAYER_FIXES = LayerFixThresholds()


def layer_plans(
    job: PipelineSubject, uneven_stages: Sequence[Cause], machines: Sequence[Cause], layers: tuple[int, ...] | None
) -> Iterator[Plan]:
    """Plans for a stage with too much work and for the stage of a slow worker."""
    profile = job.profile
    if profile is None or job.stages < 2:
        return
    uneven = next(iter(uneven_stages), None)
    slow = next((cause for cause in machines if cause.where.workers and cause.where.host is None), None)
    if uneven is None and slow is None:
        return
    job.trace.check_layers(layers)
    # Without the slowness of a worker, which is no work of its stage: a fix of the worker takes it away.
    split, base_s = job.trace.layers(layers), usual_base_s(job)
    for cause, around in ((uneven, False), (slow, True)):
        if cause is None:
            continue
        slowness = stage_slowness(job) if around else np.ones(job.stages)
        if split is None and cause.where.chunks:
            yield from _even_chunks(cause)
        elif split is None:
            yield from _shares(job, base_s.sum(axis=(0, 2)), slowness, cause, around=around)
        else:
            from tracekit.analysis.plans.best_plans import stage_model  # few traces say which layers stages have

            model = replace(stage_model(base_s, split), slowness=slowness)
            yield from _repartitioned(job, model, cause, around=around)


def _even_chunks(cause: Cause) -> Iterator[Plan]:
    """Give a chunk the speed of other chunks; if forwards and backwards both lack it, also those of one alone."""
    details, factor = {"assumes": "the speed of other chunks afterwards"}, cause.change.factor
    title = f"Make {cause.where} as fast as other chunks: fewer layers, or a faster head, loss or embedding"
    yield Plan("even-chunks", title, cause.where, cause.change, cause.without_s, details=details, cause=cause,
               excludes=("even-chunks",))  # fmt: skip
    slower = [kind for kind in (BACKWARD, FORWARD) if factor[kind].min() < 1 / (1 + SLOW_WORKERS.stage_excess)]
    for kind in slower if len(factor) > 1 and len(slower) > 1 else ():
        alone, name = np.ones_like(factor), "backward" if kind == BACKWARD else "forward"
        alone[kind] = factor[kind]
        yield Plan(f"even-chunk-{name}s", f"Make the {name}s of {cause.where} alone as fast as those of other chunks",
                   cause.where, Scale(cause.change.ops, alone), details=details, cause=cause,
                   excludes=("even-chunks",))  # fmt: skip


def _shares(job: PipelineSubject, work_s: Floats, slowness: Floats, cause: Cause, *, around: bool) -> Iterator[Plan]:
    """Move work, `work_s` of each stage on a usual worker, until all stages take equally long.

    Assumes that any part of the work can move, including embedding, loss and fractions of a layer.
    """
    speed = 1 / slowness
    factor = work_s.sum() * speed / speed.sum() / work_s
    share = 1 - factor
    if not np.isfinite(factor).all() or share.max() < LAYER_FIXES.smallest_move:
        return
    giving = np.flatnonzero(share >= LAYER_FIXES.named_share * share.max())
    named = f"stage{'s' if len(giving) > 1 else ''} {', '.join(map(str, giving))}"
    keeps = "Keep the slow worker, move" if around else "Move"
    last = ", the last" if giving.tolist() == [job.stages - 1] else ""
    title = f"{keeps} layers off {named}{last}: about {share[giving].mean():.0%} less work there, more on the others"
    details = {
        "work_now": (work_s / work_s.mean()).tolist(),
        "work_then": (work_s * factor / work_s.mean()).tolist(),
        "assumes": ANY_AMOUNT,
    }
    change = Scale(job.table, factor[None, :, None, None, None, None])
    edit = " + ".join(f"stage={stage} and kind=~compute * {scale:.6g}" for stage, scale in enumerate(factor.tolist()))
    yield _moved(title, change, details, cause, around=around, edit=edit)


def _repartitioned(job: PipelineSubject, model: StageModel, cause: Cause, *, around: bool) -> Iterator[Plan]:
    """Split the layers anew; `around`: fewer of them for a slow worker that cannot be replaced."""
    from tracekit.analysis.plans.best_plans import OneLane, best_split

    lane = OneLane.of(job.replay)
    best = best_split(model, lane)
    if best == model.layers:
        return
    details = _details(model, best)
    if not around and (alone := _loss_alone(model, lane)) is not None:
        details["loss_alone"] = alone
    title = f"{'Keep the slow worker, split' if around else 'Split'} the layers {_listed(best)} over the stages"
    edit = f"layers={_listed(model.layers)}>{_listed(best)}"
    yield _moved(title, _split(job, model, best), details, cause, around=around, edit=edit)


def _loss_alone(model: StageModel, lane: OneLane) -> dict[str, Any] | None:
    """A split that leaves only the loss on the last stage and its layers on the other stages."""
    if model.extra_s[:, -1].sum() == 0 or len(model.layers) < 2:
        return None
    others = len(model.layers) - 1
    total = sum(model.layers)
    split = (*(total // others + (place < total % others) for place in range(others)), 0)
    now_s = lane.step_s(model.chunk_s(model.layers))
    return {"layers": list(split), "step_over_now": lane.step_s(model.chunk_s(split)) / now_s}


def split_again(job: PipelineSubject, now: tuple[int, ...], then: tuple[int, ...]) -> Scale:
    """The layers of each stage `then` in place of `now`, as fixes split them. Raises SelectionError for splits that do
    not fit the job.
    """
    from tracekit.analysis.plans.best_plans import stage_model

    job.trace.check_layers(now)
    if len(then) != len(now) or sum(then) != sum(now):
        raise SelectionError(f"layers={_listed(now)}>{_listed(then)}: expected {sum(now)} layers on {len(now)} stages")
    if job.profile is None or job.stages < 2:
        raise SelectionError("layers move between the stages of a pipeline; this job has none")
    return _split(job, stage_model(usual_base_s(job), now), then)


def _split(job: PipelineSubject, model: StageModel, layers: tuple[int, ...]) -> Scale:
    return Scale(job.table, (model.chunk_s(layers) / model.chunk_s(model.layers))[:, :, :, None, None, None])


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def _moved(title: str, change: Scale, details: dict[str, Any], cause: Cause, *, around: bool, edit: str) -> Plan:
    """Return the plan that moves layers; `around`: those of a slow worker, which stays slow."""
    kind, excludes = ("shift-work-from-slow-worker", MACHINE + LAYERS) if around else ("repartition-stages", LAYERS)
    return Plan(kind, title, Place(), change, details=details, cause=cause, around=around, excludes=excludes, edit=edit)


def _details(model: StageModel, best: tuple[int, ...]) -> dict[str, Any]:
    return {
        "layers_now": list(model.layers),
        "layers_then": list(best),
        "layers_assumed": False,
        "layer_s": float(model.layer_s.sum()),
        "embedding_s": float(model.extra_s[:, 0].sum()),
        "loss_s": float(model.extra_s[:, -1].sum()),
        "assumes": SAME_LAYERS,
    }
