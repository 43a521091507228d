"""The fastest plan that fits: bounds of all plans, replays of the best, in the order of their bounds."""

from __future__ import annotations

from collections import deque
from functools import cached_property, lru_cache
from itertools import product
from math import comb
from time import monotonic

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from tracekit.analysis.graph.dependency_graph import Template
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.plans.model import PlanModel, Reduction, Space, TrainingPlan, layers_of
from tracekit.analysis.plans.stages import Stages, TimeIsUp
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs, replay_lanes
from tracekit.trace.compute_order import Schedule, compute_order
from tracekit.trace.model import Layout, OpKind

#: First stages that are extended together, and those that a search keeps at most: with more, it is not complete.
_TOGETHER, MOST_PARTS = 1 << 13, 1 << 17
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
#: Extra cost of an end stage below this share of the stage is noise.
SMALLEST_EXTRA = 0.02
#: First stages of plans that a search for a split keeps at most: a report must not wait for the last percent.
_PARTS = 1 << 12
#: Plans of one pass over the schedule: their times fit into the cache.
_AT_ONCE = 4096


class FirstStages(Struct, frozen=True, eq=False):
    """First stages of plans, [parts]. `ends`: where each stage ends, [parts, stages so far]. `finish_s`: from the start
    of the last backward of the last of these stages to the end of them all. `bound_s`: of all plans that begin so.
    """

    ends: Ints
    finish_s: Floats
    longest_forward_s: Floats
    bound_s: Floats

    @property
    def splits(self) -> Ints:
        """Layers of each stage, [parts, stages so far]."""
        return np.diff(self.ends, axis=1, prepend=0)

    def only(self, chosen: Ints) -> FirstStages:
        """Some of the parts."""
        return FirstStages(*(each[chosen] for each in astuple(self)))


class Bounds(Struct, frozen=True, eq=False, dict=True):
    """Bounds of the plans of one schedule and number of microbatches; without the optimizer.

    Every bound is the length of a path through the computes of a step, so that it holds for every plan. To the start of
    the last backward of a stage: the forwards of the stages before, then all its own computes; or the first microbatch
    to the last stage and back, then what the stage has left; or, as 1F1B lets a stage hold so many microbatches, one
    round trip after the other. From there to the end: backwards down to an earlier stage and its reductions, or the
    stage's own reductions.
    """

    cells: Stages

    @cached_property
    def last_backward_s(self) -> Floats:
        """The earliest start of the last backward of each cell, seconds, [stages, layers + 1, layers + 1]."""
        cells, count = self.cells, self.cells.model.stages
        stage, rounds = np.arange(count)[:, None, None], self.cells.microbatches
        until_f, until_b = cells.forwards_until, cells.backwards_until
        forward, backward, transfer = cells.forward_s, cells.backward_s, cells.transfer_s
        reached = until_f[None, :, None] + stage * transfer
        own = reached + rounds * forward + (rounds - 1) * backward
        behind = 2 * transfer * (count - 1 - stage)
        ahead = (until_f[-1] - until_f) + (until_b[-1] - until_b)
        both_until = until_f + until_b  # what the stage takes beyond its layers on the fastest stage: slow, recomputed
        beyond = forward + backward - (both_until[None, :] - both_until[:, None])
        trip = ahead[None, :, None] + behind + beyond
        if cells.schedule is Schedule.GPIPE:
            after = (until_b[-1] - until_b)[None, None, :] + transfer * (count - 1 - stage)
            passed = until_f[-1] + transfer * (count - 1) + (rounds - 1) * (forward + backward)
            return np.asarray(passed + after)
        held = np.minimum(count - stage, rounds)
        first_back = reached + trip + (rounds - 2) * backward + (rounds - held) * forward
        trips = (rounds - 1) // held
        others = rounds - 1 - trips * held  # microbatches that the stage alone sees through before these trips
        cycles = reached + (trips + 1) * trip + others * (forward + backward) - backward
        cycles = np.where(trips > 0, cycles, first_back)
        return np.asarray(np.maximum(own, np.maximum(first_back, cycles)))

    @cached_property
    def _completions(self) -> tuple[Floats, Floats]:
        """The least over all ways to fill the stages from each one on, by its first layer, [stages + 1, layers + 1].

        First of the longest path through the last backward of the stage before the rest, counted from layer 0, then of
        the longest one through their own reductions.
        """
        cells = self.cells
        count, size = cells.model.stages, len(cells.model.layers) + 1
        passed, stayed = np.full((2, count + 1, size), np.inf)
        passed[count, -1] = stayed[count, -1] = -np.inf
        for stage in range(count - 1, -1, -1):
            if monotonic() >= cells.until:
                raise TimeIsUp
            start = np.where(cells.possible[stage], self.last_backward_s[stage], np.inf)
            down = cells.backwards_until[:, None] + stage * cells.transfer_s
            passed[stage] = np.maximum(start + cells.backward_s[stage] + down, passed[stage + 1]).min(axis=1)
            stayed[stage] = np.maximum(start + cells.tail_s[stage], stayed[stage + 1]).min(axis=1)
        return passed, stayed

    @cached_property
    def least_s(self) -> float:
        """No plan takes less; infinite if none fits. Raises TimeIsUp."""
        return float(self._extended(self._nothing, 0, np.inf).bound_s.min(initial=np.inf))

    @property
    def _nothing(self) -> FirstStages:
        return FirstStages(np.zeros((1, 0), np.int64), np.full(1, -np.inf), np.zeros(1), np.full(1, -np.inf))

    def leaves(self, limit_s: float, most_parts: int, until: float = np.inf) -> tuple[FirstStages, float]:
        """All splits with a bound of at most `limit_s`; beyond `most_parts` first stages, those of the least bounds;
        none if it lasts until that `time.monotonic`. And the least bound of those left out, seconds.
        """
        parts, dropped_s = self._nothing, np.inf
        for stage in range(self.cells.model.stages):
            pieces: list[FirstStages] = []
            for begin in range(0, len(parts.bound_s), _TOGETHER):
                if monotonic() >= until:
                    dropped_s = min(dropped_s, float(parts.bound_s.min()))
                    pieces.clear()
                    break
                these = np.arange(begin, min(begin + _TOGETHER, len(parts.bound_s)))
                pieces.append(self._extended(parts.only(these), stage, limit_s))
            if not pieces:
                none = np.empty(0)
                return FirstStages(np.zeros((0, self.cells.model.stages), np.int64), none, none, none), dropped_s
            parts = FirstStages(*map(np.concatenate, zip(*map(astuple, pieces), strict=True)))
            if len(parts.bound_s) > most_parts:
                best = np.argpartition(parts.bound_s, most_parts)
                dropped_s = min(dropped_s, float(parts.bound_s[best[most_parts:]].min()))
                parts = parts.only(best[:most_parts])
        return parts, dropped_s

    def _extended(self, parts: FirstStages, stage: int, limit_s: float) -> FirstStages:
        """The parts with one more stage, in all ways whose bound is within the limit."""
        cells = self.cells
        first = parts.ends[:, -1] if stage else np.zeros(len(parts.bound_s), np.int64)
        part, end = np.nonzero(cells.possible[stage][first])
        first = first[part]
        backward, start = cells.backward_s[stage, first, end], self.last_backward_s[stage, first, end]
        longest = np.maximum(parts.longest_forward_s[part], cells.forward_s[stage, first, end])
        if cells.schedule is Schedule.GPIPE:  # the longest forward may be another stage's than the longest backward
            start = start + (cells.microbatches - 1) * (longest - cells.forward_s[stage, first, end])
        finish = np.maximum(parts.finish_s[part] + cells.transfer_s + backward, cells.tail_s[stage, first, end])
        passed, stayed = self._completions
        through = passed[stage + 1, end] - (cells.backwards_until[end] + stage * cells.transfer_s) + finish
        bound = np.maximum(np.maximum(parts.bound_s[part], start + finish), np.maximum(through, stayed[stage + 1, end]))
        chosen = np.flatnonzero(bound <= limit_s)
        ends = np.concatenate([parts.ends[part[chosen]], end[chosen, None]], axis=1)
        return FirstStages(ends, finish[chosen], longest[chosen], bound[chosen])


class TimedPlan(Struct, frozen=True):
    """A plan with its step time, and the memory of its fullest stage, None if unknown."""

    plan: TrainingPlan
    step_time_s: float
    memory_gb: float | None


class SearchResult(Struct, frozen=True):
    """The best plans, best first; none if nothing fits, or time was up before any. `bound_s`: nothing is faster; None
    if nothing fits. `replayed`: how many plans.
    """

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


def _kinds_of(model: PlanModel, memory_gb: float | None, until: float) -> tuple[list[Bounds], float]:
    """The schedules and numbers of microbatches of which a plan fits into memory, those with the least bound first; and
    what no plan of those that time did not suffice for can undercut, seconds.
    """
    kinds, unseen_s = [], np.inf
    for schedule, microbatches in product(model.schedules, model.microbatches):
        kind = Bounds(Stages(model, schedule, microbatches, memory_gb, until))
        try:
            if np.isfinite(kind.least_s):
                kinds.append(kind)
        except TimeIsUp:
            unseen_s = min(unseen_s, kind.cells.mean_work_s)
    return sorted(kinds, key=lambda kind: kind.least_s), unseen_s


def search(
    model: PlanModel, memory_gb: float | None, *, most_parts: int = MOST_PARTS, until: float = np.inf
) -> SearchResult:
    """Find the best plan that fits into so much memory, None for no limit. `most_parts`, `until`: see `Bounds.leaves`.

    The most promising plans of every kind are replayed first, so that kinds can be compared. Kinds that half of the
    time does not suffice to look at count with what no plan of them can undercut.

    Schedules and numbers of microbatches are searched side by side. Only splits whose bound is within a limit are made,
    and the limit rises until the best replayed plan is within it.
    """
    begun, best, optimizer_s = monotonic(), _Best(until), model.optimizer_s
    kinds, unseen_s = _kinds_of(model, memory_gb, begun + (until - begun) / 2)
    if not kinds:
        return SearchResult([], unseen_s + optimizer_s if unseen_s < np.inf else None, 0)
    promising: list[tuple[int, Ints]] = []
    for number, kind in enumerate(kinds):
        leaves, _ = kind.leaves(np.finfo(float).max, _PROMISING, until)
        promising.append((number, leaves.splits[np.argsort(leaves.bound_s)[:_OF_KIND]]))
        best.take(kind, *promising[-1])
    least_s, dropped_s = kinds[0].least_s + optimizer_s, unseen_s + optimizer_s
    proven_s, limit_s, rise = least_s, least_s * (1 + ROUNDING), FIRST_RISE
    replayed_s = -np.inf  # splits with a lower bound have been replayed
    while limit_s > replayed_s and proven_s < min(best.step_s * (1 - ROUNDING), dropped_s) and monotonic() < until:
        leaves_of = [
            kind.leaves(limit_s - optimizer_s, most_parts, until)
            for kind in kinds
            if kind.least_s + optimizer_s <= limit_s
        ]
        of_kind = np.repeat(np.arange(len(leaves_of)), [len(leaves.bound_s) for leaves, _ in leaves_of])
        splits = np.concatenate([leaves.splits for leaves, _ in leaves_of])
        bound_s = np.concatenate([leaves.bound_s for leaves, _ in leaves_of]) + optimizer_s
        new = bound_s > replayed_s
        for number, these in promising:
            new &= (of_kind != number) | ~(splits[:, None] == these).all(axis=2).any(axis=1)
        left_s = best.replay(kinds, of_kind[new], splits[new], bound_s[new])
        dropped_s = min(dropped_s, left_s, *(max(each_s + optimizer_s, proven_s) for _, each_s in leaves_of))
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


class StageModel(Struct, frozen=True, eq=False):
    """Cost of stages, seconds per microbatch.

    `layer_s`: forward and backward of one layer, [kinds]. `extra_s`: cost of a stage's last chunk (of the first stage:
    of its first chunk) beyond its layers, [kinds, stages]. `layers`: current layers per stage. `slowness`: how much
    slower the slowest worker of each stage is than its peers, [stages].
    """

    layers: tuple[int, ...]
    layer_s: Floats
    extra_s: Floats
    chunks: int
    slowness: Floats

    def chunk_s(self, layers: tuple[int, ...]) -> Floats:
        """Cost of each chunk with the split `layers`, seconds, [kinds, stages, chunks]."""
        share = np.array(layers) / self.chunks
        cost = np.repeat((self.layer_s[:, None] * share)[:, :, None], self.chunks, axis=2)
        cost[:, 0, 0] += self.extra_s[:, 0]
        if len(layers) > 1:
            cost[:, -1, -1] += self.extra_s[:, -1]
        return cost

    @property
    def of_layers_s(self) -> Floats:
        """Seconds of each layer of the model, with embedding and loss on the first and the last, [kinds, layers]."""
        seconds: Floats = np.repeat(self.layer_s[:, None], sum(self.layers), axis=1)
        seconds[:, 0] += self.extra_s[:, 0]
        if len(self.layers) > 1:
            seconds[:, -1] += self.extra_s[:, -1]
        return seconds

    def plan_model(self, microbatches: int, schedule: Schedule) -> PlanModel:
        """A search for the best split, all else as it is. A sample is a microbatch."""
        stages, takes_s = len(self.layers), self.of_layers_s[[0, -1]]
        whole = tuple((count,) for count in self.layers)
        return PlanModel(
            layers=layers_of(takes_s, np.zeros(2), np.zeros(takes_s.shape[1])),
            stages=stages,
            replicas=1,
            samples=microbatches,
            transfer_s=(0.0, 0.0),
            reduce=Reduction(0.0, 0.0),
            optimizer_s=0.0,
            slowness=tuple(self.slowness.tolist()),
            now=TrainingPlan(self.layers, schedule, microbatches, (False,) * stages, whole),
            space=Space(split="free", buckets="one"),
        )

    def factor(self, layers: tuple[int, ...]) -> Floats:
        """Cost with the split `layers` over current cost, [kinds, stages, chunks]."""
        return self.chunk_s(layers) / self.chunk_s(self.layers)


def stage_model(base_s: Floats, layers: tuple[int, ...]) -> StageModel:
    """Fit the model to `base_s`, seconds per chunk [kinds, stages, chunks].

    The cost of a layer is the median over the inner stages (with fewer than three stages: over all but the last). What
    the end stages cost beyond it is embedding and loss.
    """
    total = base_s.sum(axis=2)
    per_layer = total / np.array(layers)
    inner = per_layer[:, 1:-1] if len(layers) >= 3 else per_layer[:, :1]
    layer_s = np.median(inner, axis=1)
    extra = total - layer_s[:, None] * np.array(layers)
    extra[:, 1:-1] = 0.0
    extra[np.abs(extra) < SMALLEST_EXTRA * total] = 0.0
    return StageModel(layers, layer_s, np.maximum(extra, 0.0), base_s.shape[2], np.ones(len(layers)))


class OneLane(Struct, frozen=True, eq=False, dict=True):
    """Replays a step of one DP rank with one cost per (kind, stage, chunk), 1000 times faster than the whole job."""

    template: Template
    rows: Floats

    @classmethod
    def of(cls, replay: JobReplay) -> OneLane:
        """The structure that most lanes of the job share, with every op at its ideal cost."""
        blocks = replay.graph.blocks
        number = max(range(len(blocks)), key=lambda number: blocks[number].start.size)
        ideal = replay.durations.ideal[number]
        return cls(blocks[number].template, ideal if ideal.ndim == 1 else ideal[:, 0])

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        _, kind, stage, chunk = self._cells
        return max(int(((kind == 0) & (stage == 0) & (chunk == 0)).sum()), 1)

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        kinds = [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code]
        rows = np.flatnonzero(np.isin(self.template.kind, kinds))
        kind = (self.template.kind[rows] == kinds[1]).astype(np.int64)
        return rows, kind, self.template.pp_rank[rows].astype(np.int64), np.maximum(self.template.chunk[rows], 0)

    def step_s(self, chunk_s: Floats) -> float:
        """Step time, seconds, with forwards and backwards of `chunk_s` [kinds, stages, chunks] seconds."""
        rows, kind, stage, chunk = self._cells
        costs = self.rows.copy()
        costs[rows] = chunk_s[kind, stage, np.minimum(chunk, chunk_s.shape[2] - 1)]
        return float(replay_lanes(self.template, np.array([0, 1]), Costs.of_constant(costs))[0])


def best_split(model: StageModel, lane: OneLane) -> tuple[int, ...]:
    """The integer split with the shortest step, each stage with at least one layer.

    Of the best splits of a plain pipeline, the one with the shortest replayed step: the job itself may be interleaved,
    and exchanges more than activations.
    """
    plain = model.plan_model(lane.microbatches, Schedule.ONE_F_ONE_B)
    candidates = [] if plain.problem else search(plain, None, most_parts=_PARTS).plans
    splits = [model.layers, *(each.plan.split for each in candidates)]
    return min(splits, key=lambda layers: lane.step_s(model.chunk_s(layers) * model.slowness[None, :, None]))


def step_times(stages: Stages, splits: Ints) -> Floats:
    """Step times of the plans with these splits, seconds, [plans]; `splits`: layers of each stage, [plans, stages]."""
    ends = np.cumsum(splits, axis=1)
    tail_s = stages.tail_s[np.arange(splits.shape[1]), ends - splits, ends].T
    return np.asarray((last_backwards(stages, splits) + tail_s).max(axis=0) + stages.model.optimizer_s)


def last_backwards(stages: Stages, splits: Ints) -> Floats:
    """When the last backward of each stage of these plans starts, seconds, [stages, plans].

    Microbatches of a stage take equally long, so an array of plans passes through every compute once.
    """
    ends, stage = np.cumsum(splits, axis=1), np.arange(splits.shape[1])
    forward_s, backward_s = (takes[stage, ends - splits, ends].T for takes in (stages.forward_s, stages.backward_s))
    start_s: Floats = np.empty(forward_s.shape)
    for begin in range(0, len(splits), _AT_ONCE):
        chunk = slice(begin, begin + _AT_ONCE)
        start_s[:, chunk] = _last_backwards(stages, forward_s[:, chunk], backward_s[:, chunk])
    return start_s


def _last_backwards(stages: Stages, forward_s: Floats, backward_s: Floats) -> Floats:
    """`last_backwards`, by what a forward and a backward of each stage take, seconds, [stages, plans]."""
    count, transfer_s = len(forward_s), stages.transfer_s
    free, start = np.zeros_like(forward_s), np.zeros_like(forward_s)
    arrives: dict[tuple[int, bool, int], Floats] = {}
    for stage, is_forward, microbatch in _computes(stages.schedule, count, stages.microbatches):
        begin, end = start[stage], free[stage]
        needed = arrives.pop((stage, is_forward, microbatch), None)
        np.copyto(begin, end) if needed is None else np.maximum(end, needed, out=begin)
        np.add(begin, (forward_s if is_forward else backward_s)[stage], out=end)
        follower = stage + 1 if is_forward else stage - 1
        if 0 <= follower < count:
            arrives[follower, is_forward, microbatch] = end + transfer_s
    return start


@lru_cache(64)
def _computes(schedule: Schedule, stages: int, microbatches: int) -> tuple[tuple[int, bool, int], ...]:
    """The computes (stage, forward or backward, microbatch) of a schedule, each after what it needs."""
    layout = Layout(dp=1, pp=stages, tp=1)
    waiting = [deque(compute_order(schedule, layout, microbatches, stage)) for stage in range(stages)]
    done: dict[tuple[int, bool, int], None] = {}
    while any(waiting):
        for stage, computes in enumerate(waiting):
            while computes:
                forward, microbatch = computes[0].forward, computes[0].microbatch
                before = stage - 1 if forward else stage + 1
                if 0 <= before < stages and (before, forward, microbatch) not in done:
                    break
                computes.popleft()
                done[stage, forward, microbatch] = None
    return tuple(done)
