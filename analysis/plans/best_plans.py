"""The best plan of a space, proven: whole splits are replayed in the order of their bounds until none is left below.

In: a `PlanModel`. Out: `SearchResult`. Schedules and numbers of microbatches are searched side by side. Only splits
whose bound is within a limit are made, and the limit rises until the best replayed plan is within it.
"""

from __future__ import annotations

from math import comb
from time import monotonic

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.plans.bounds import MOST_PARTS, Bounds
from tracekit.analysis.plans.model import PlanModel, Space, TrainingPlan
from tracekit.analysis.plans.replay import step_times
from tracekit.analysis.plans.stages import Stages

#: The limit rises by this share of the least bound at first, then by twice as much each time.
FIRST_RISE = 1e-3
#: Splits of equal bounds that are replayed first; then twice as many each time.
_FIRST_REPLAYED = 4
#: First stages that are kept to find the most promising splits of a kind, and how many of these are replayed.
_PROMISING, _OF_KIND = 1 << 10, 2
#: Times closer than this share are equal: sums in another order differ by rounding.
ROUNDING = 1e-11
#: Plans that a search returns at most.
MOST_PLANS = 10


class TimedPlan(Struct, frozen=True):
    """A plan with its step time, and the memory of its fullest stage, None if unknown."""

    plan: TrainingPlan
    step_time_s: float
    memory_gb: float | None


class SearchResult(Struct, frozen=True):
    """The best plans, best first, none if nothing fits. `bound_s`: nothing is faster. `replayed`: how many plans."""

    plans: list[TimedPlan]
    bound_s: float | None
    replayed: int


class _Best:
    """The best plans so far, until that time."""

    def __init__(self, until: float) -> None:
        self._until = until
        self.entries: list[tuple[float, int, tuple[int, ...]]] = []
        self.replayed = 0

    @property
    def step_s(self) -> float:
        """The shortest step so far, seconds."""
        return self.entries[0][0] if self.entries else np.inf

    def replay(self, kinds: list[Bounds], of_kind: Ints, splits: Ints, bound_s: Floats) -> float:
        """Replay splits in the order of their bounds, while these are below the best step time. Returns the least bound
        of those left when time is up.
        """
        order, size = np.argsort(bound_s, kind="stable"), _FIRST_REPLAYED
        while len(order) and bound_s[order[0]] < self.step_s * (1 - ROUNDING):
            if monotonic() >= self._until:
                return float(bound_s[order[0]])
            batch, order = order[:size], order[size:]
            batch, size = batch[bound_s[batch] < self.step_s], size * 2
            for kind in np.unique(of_kind[batch]).tolist():
                self.take(kinds[kind], kind, splits[batch[of_kind[batch] == kind]])
        return np.inf

    def take(self, bounds: Bounds, kind: int, splits: Ints) -> None:
        """Replay splits of one kind."""
        self.replayed += len(splits)
        times = step_times(bounds.cells, splits)
        best = np.argsort(times, kind="stable")[:MOST_PLANS]
        new = {(float(times[at]), kind, tuple(splits[at].tolist())) for at in best}
        self.entries = sorted(new.union(self.entries))[:MOST_PLANS]


def space_size(model: PlanModel) -> int:
    """The number of plans: split x schedule x microbatches x recomputation, whatever their memory."""
    splits = comb(len(model.layers) - 1, model.stages - 1) if model.space.split == "free" else 1
    again = 1 << model.stages if model.space.recompute == "stages" else 1
    return splits * again * len(model.schedules) * len(model.microbatches)


def kinds_of(model: PlanModel, memory_gb: float | None) -> list[Bounds]:
    """The schedules and numbers of microbatches of which a plan fits into memory, those with the least bound first."""
    kinds = [
        Bounds(Stages(model, schedule, microbatches, memory_gb))
        for schedule in model.schedules
        for microbatches in model.microbatches
    ]
    return sorted((kind for kind in kinds if np.isfinite(kind.least_s)), key=lambda kind: kind.least_s)


def search(
    model: PlanModel, memory_gb: float | None, *, most_parts: int = MOST_PARTS, until: float = np.inf
) -> SearchResult:
    """Find the best plan that fits into so much memory, None for no limit. `most_parts`, `until`: see `Bounds.leaves`.

    The most promising plans of every kind are replayed first, so that kinds can be compared.
    """
    kinds, best, optimizer_s = kinds_of(model, memory_gb), _Best(until), model.optimizer_s
    if not kinds:
        return SearchResult([], None, 0)
    promising: list[tuple[int, Ints]] = []
    for number, kind in enumerate(kinds):
        leaves = kind.leaves(np.finfo(float).max, _PROMISING)
        promising.append((number, leaves.splits[np.argsort(leaves.bound_s)[:_OF_KIND]]))
        best.take(kind, *promising[-1])
    least_s, dropped_s = kinds[0].least_s + optimizer_s, np.inf
    proven_s, limit_s, rise = least_s, least_s * (1 + ROUNDING), FIRST_RISE
    replayed_s = -np.inf  # splits with a lower bound have been replayed
    while limit_s > replayed_s and proven_s < min(best.step_s * (1 - ROUNDING), dropped_s) and monotonic() < until:
        leaves_of = [
            kind.leaves(limit_s - optimizer_s, most_parts, until)
            for kind in kinds
            if kind.least_s + optimizer_s <= limit_s
        ]
        of_kind = np.repeat(np.arange(len(leaves_of)), [len(each.splits) for each in leaves_of])
        splits = np.concatenate([each.splits for each in leaves_of])
        bound_s = np.concatenate([each.bound_s for each in leaves_of]) + optimizer_s
        new = bound_s > replayed_s
        for number, these in promising:
            new &= (of_kind != number) | ~(splits[:, None] == these).all(axis=2).any(axis=1)
        left_s = best.replay(kinds, of_kind[new], splits[new], bound_s[new])
        dropped_s = min(dropped_s, left_s, *(max(each.dropped_s + optimizer_s, proven_s) for each in leaves_of))
        proven_s = replayed_s = limit_s
        limit_s, rise = min(best.step_s, limit_s + rise * least_s), 2 * rise
    if proven_s >= best.step_s * (1 - ROUNDING):
        proven_s = best.step_s
    plans = [_timed(kinds[kind].cells, split, time_s) for time_s, kind, split in best.entries]
    return SearchResult(plans, min(best.step_s, proven_s, dropped_s), best.replayed)


def _timed(cells: Stages, split: tuple[int, ...], step_time_s: float) -> TimedPlan:
    ends = np.cumsum(split)
    places = [(stage, int(end) - count, int(end)) for stage, (count, end) in enumerate(zip(split, ends, strict=True))]
    recompute = tuple(bool(cells.recompute[place]) for place in places)
    buckets = tuple(cells.best_buckets(*place, again) for place, again in zip(places, recompute, strict=True))
    if cells.model.space.buckets == "fixed":
        buckets = cells.model.now.buckets
    plan = TrainingPlan(split, cells.schedule, cells.microbatches, recompute, buckets)
    return TimedPlan(plan, step_time_s, memory_of(cells, plan))


def memory_of(cells: Stages, plan: TrainingPlan) -> float | None:
    """The memory of the fullest stage of a plan, GB; None if unknown."""
    if not cells.model.knows_memory:
        return None
    stage, ends = np.arange(len(plan.split)), np.cumsum(plan.split)
    again = np.array(plan.recompute).astype(np.int64)
    return float(cells.memory[again, stage, ends - np.array(plan.split), ends].max())


def cells_of(model: PlanModel, plan: TrainingPlan) -> Stages:
    """The cells of one plan as it is."""
    as_it_is = replace(model, now=plan, space=Space())
    return Stages(as_it_is, plan.schedule, plan.microbatches, None)


def timed(model: PlanModel, plan: TrainingPlan) -> TimedPlan:
    """Any plan of a job, whatever its space and memory."""
    cells = cells_of(model, plan)
    return TimedPlan(plan, float(step_times(cells, np.array([plan.split]))[0]), memory_of(cells, plan))
