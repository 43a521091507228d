"""The fastest plan that fits: bounds of all plans, replays of the best, in the order of their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from math import comb

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from tracekit.analysis.bubbles.schedules import AskedSchedule, compiled
from tracekit.analysis.graph.compiled import CompiledGraph
from tracekit.analysis.graph.dependency_graph import Template
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.plans.model import PlanModel, Reduction, Space, TrainingPlan, layers_of
from tracekit.analysis.plans.stages import Stages
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, replay_lanes
from tracekit.base.errors import TimeLimitError
from tracekit.base.limits import check_time, time_limit
from tracekit.trace.compute_order import Schedule
from tracekit.trace.model import OpKind

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
#: Extra cost of an end stage below this share of the stage is noise. Chosen.
SMALLEST_EXTRA = 0.02
#: First stages of plans that a search for a split keeps at most: a report must not wait for the last percent.
_PARTS = 1 << 12


class FirstStages(Struct, frozen=True, eq=False):
    """First stages of plans, [parts]. `ends`: 0, then where each stage ends, [parts, 1 + stages so far]. `finish_s`:
    from the start of the last backward of the last of these stages to the end of them all. `bound_s`: of all plans that
    begin so.
    """

    ends: Ints
    finish_s: Floats
    longest_forward_s: Floats
    bound_s: Floats

    @property
    def splits(self) -> Ints:
        """Layers of each stage, [parts, stages so far]."""
        return np.diff(self.ends, axis=1)

    def only(self, chosen: Ints | slice) -> FirstStages:
        """Some of the parts."""
        return FirstStages(*(column[chosen] for column in astuple(self)))


def _joined(pieces: Sequence[FirstStages]) -> FirstStages:
    return FirstStages(*map(np.concatenate, zip(*map(astuple, pieces), strict=True)))


class Bounds(Stages, frozen=True, eq=False, dict=True):
    """Bounds of the plans of one schedule and number of microbatches; without the optimizer.

    Every bound is the length of a path through the computes of a step, so that it holds for every plan. To the start of
    the last backward of a stage: the forwards of the stages before, then all its own computes; or the first microbatch
    to the last stage and back, then what the stage has left; or, as 1F1B lets a stage hold so many microbatches, one
    round trip after the other. From there to the end: backwards down to an earlier stage and its reductions, or the
    stage's own reductions.
    """

    @cached_property
    def last_backward_s(self) -> Floats:
        """The earliest start of the last backward of each cell, seconds, [stages, layers + 1, layers + 1]."""
        count, rounds = self.model.stages, self.microbatches
        stage = np.arange(count)[:, None, None]
        until_f, until_b = self.forwards_until, self.backwards_until
        forward, backward, transfer = self.forward_s, self.backward_s, self.transfer_s
        reached = until_f[None, :, None] + stage * transfer
        own = reached + rounds * forward + (rounds - 1) * backward
        behind = 2 * transfer * (count - 1 - stage)
        ahead = (until_f[-1] - until_f) + (until_b[-1] - until_b)
        both_until = until_f + until_b  # what the stage takes beyond its layers on the fastest stage: slow, recomputed
        beyond = forward + backward - (both_until[None, :] - both_until[:, None])
        trip = ahead[None, :, None] + behind + beyond
        if self.schedule is Schedule.GPIPE:
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
        count, size = self.model.stages, len(self.model.layers) + 1
        passed, stayed = np.full((2, count + 1, size), np.inf)
        passed[count, -1] = stayed[count, -1] = -np.inf
        for stage in range(count - 1, -1, -1):
            check_time()
            start = np.where(self.possible[stage], self.last_backward_s[stage], np.inf)
            down = self.backwards_until[:, None] + stage * self.transfer_s
            passed[stage] = np.maximum(start + self.backward_s[stage] + down, passed[stage + 1]).min(axis=1)
            stayed[stage] = np.maximum(start + self.tail_s[stage], stayed[stage + 1]).min(axis=1)
        return passed, stayed

    @cached_property
    def least_s(self) -> float:
        """No plan takes less; infinite if none fits."""
        return float(self._extended(self._nothing, 0, np.inf).bound_s.min(initial=np.inf))

    @property
    def _nothing(self) -> FirstStages:
        return FirstStages(np.zeros((1, 1), np.int64), np.full(1, -np.inf), np.zeros(1), np.full(1, -np.inf))

    def leaves(self, limit_s: float, most_parts: int) -> tuple[FirstStages, float]:
        """All splits with a bound of at most `limit_s`; beyond `most_parts` first stages, those of the least bounds.
        And the least bound of those left out, seconds.
        """
        parts, dropped_s = self._nothing, np.inf
        for stage in range(self.model.stages):
            pieces = []
            for begin in range(0, max(len(parts.bound_s), 1), _TOGETHER):
                check_time()
                pieces.append(self._extended(parts.only(slice(begin, begin + _TOGETHER)), stage, limit_s))
            parts = _joined(pieces)
            if len(parts.bound_s) > most_parts:
                best = np.argpartition(parts.bound_s, most_parts)
                dropped_s = min(dropped_s, float(parts.bound_s[best[most_parts:]].min()))
                parts = parts.only(best[:most_parts])
        return parts, dropped_s

    def _extended(self, parts: FirstStages, stage: int, limit_s: float) -> FirstStages:
        """The parts with one more stage, in all ways whose bound is within the limit."""
        part, end = np.nonzero(self.possible[stage][parts.ends[:, -1]])
        first = parts.ends[part, -1]
        backward, start = self.backward_s[stage, first, end], self.last_backward_s[stage, first, end]
        longest = np.maximum(parts.longest_forward_s[part], self.forward_s[stage, first, end])
        if self.schedule is Schedule.GPIPE:  # the longest forward may be another stage's than the longest backward
            start = start + (self.microbatches - 1) * (longest - self.forward_s[stage, first, end])
        finish = np.maximum(parts.finish_s[part] + self.transfer_s + backward, self.tail_s[stage, first, end])
        passed, stayed = self._completions
        through = passed[stage + 1, end] - (self.backwards_until[end] + stage * self.transfer_s) + finish
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


def space_size(model: PlanModel) -> int:
    """The number of plans: split x schedule x microbatches x recomputation, whatever their memory."""
    splits = comb(len(model.layers) - 1, model.stages - 1) if model.space.split == "free" else 1
    recompute_choices = 1 << model.stages if model.space.recompute == "stages" else 1
    return splits * recompute_choices * len(model.kinds)


def kinds_of(model: PlanModel, memory_gb: float | None) -> list[Bounds]:
    """The bounds of every schedule with every number of microbatches of the space."""
    return [Bounds(model, *kind, memory_gb) for kind in model.kinds]


def search(
    model: PlanModel, memory_gb: float | None, *, most_parts: int = MOST_PARTS, time_limit_s: float = np.inf
) -> SearchResult:
    """Find the best plan that fits into so much memory, None for no limit. `most_parts`: see `Bounds.leaves`.
    After `time_limit_s`, it is the best so far.

    The most promising plans of every kind are replayed first, so that kinds can be compared. Kinds that half of the
    time does not suffice to look at count with what no plan of them can undercut.

    Schedules and numbers of microbatches are searched side by side. Only splits whose bound is within a limit are made,
    and the limit rises until the best replayed plan is within it.
    """
    optimizer_s, dropped_s, kinds = model.optimizer_s, np.inf, list[Bounds]()
    entries, best_s, replayed = list[tuple[float, int, tuple[int, ...]]](), np.inf, 0

    def replay(number: int, splits: Ints) -> None:
        nonlocal entries, best_s, replayed
        times, replayed = step_times(kinds[number], splits), replayed + len(splits)
        fastest = np.argsort(times, kind="stable")[:MOST_PLANS].tolist()
        new = {(float(times[plan]), number, tuple(splits[plan].tolist())) for plan in fastest}
        entries = sorted(new.union(entries))[:MOST_PLANS]
        best_s = entries[0][0]

    with suppress(TimeLimitError), time_limit(time_limit_s):
        with time_limit(time_limit_s / 2):
            for kind in kinds_of(model, memory_gb):
                try:
                    if kind.least_s < np.inf:
                        kinds.append(kind)
                except TimeLimitError:
                    dropped_s = min(dropped_s, kind.mean_work_s + optimizer_s)
        if not kinds:
            return SearchResult([], dropped_s if dropped_s < np.inf else None, 0)
        kinds.sort(key=lambda kind: kind.least_s)
        proven_s = least_s = kinds[0].least_s + optimizer_s
        promising: list[Ints] = []
        for number, kind in enumerate(kinds):
            leaves, _ = kind.leaves(np.finfo(float).max, _PROMISING)
            promising.append(leaves.splits[np.argsort(leaves.bound_s)[:_OF_KIND]])
            replay(number, promising[-1])
        # Splits with a bound of at most `replayed_s` have been replayed, those within the limit are next.
        replayed_s, limit_s, rise = -np.inf, least_s * (1 + ROUNDING), FIRST_RISE
        while limit_s > replayed_s and proven_s < min(best_s * (1 - ROUNDING), dropped_s):
            within_limit = [kind for kind in kinds if kind.least_s + optimizer_s <= limit_s]
            pieces, left_s = zip(
                *(kind.leaves(limit_s - optimizer_s, most_parts) for kind in within_limit), strict=True
            )
            dropped_s = min(dropped_s, max(min(left_s) + optimizer_s, proven_s))
            leaves = _joined(pieces)
            of_kind = np.repeat(np.arange(len(pieces)), [len(piece.bound_s) for piece in pieces])
            bound_s = leaves.bound_s + optimizer_s
            new = bound_s > replayed_s
            for number, these in enumerate(promising):
                new &= (of_kind != number) | ~(leaves.splits[:, None] == these).all(axis=2).any(axis=1)
            order, size = np.argsort(np.where(new, bound_s, np.inf), kind="stable")[: new.sum()], _FIRST_REPLAYED
            while len(order) and bound_s[order[0]] < best_s * (1 - ROUNDING):
                proven_s = max(proven_s, float(bound_s[order[0]]))
                check_time()
                batch, order, size = order[:size], order[size:], 2 * size
                batch = batch[bound_s[batch] < best_s]
                for number in np.unique(of_kind[batch]).tolist():
                    replay(number, leaves.splits[batch[of_kind[batch] == number]])
            proven_s = replayed_s = limit_s
            limit_s, rise = min(best_s, limit_s + rise * least_s), 2 * rise
    if proven_s >= best_s * (1 - ROUNDING):
        proven_s = best_s
    plans = [_timed(kinds[number], split, time_s) for time_s, number, split in entries]
    return SearchResult(plans, min(best_s, proven_s, dropped_s), replayed)


def _timed(cells: Stages, split: tuple[int, ...], step_time_s: float) -> TimedPlan:
    """The plan of these cells with that split."""
    ends = np.cumsum(split).tolist()
    places = [(stage, end - count, end) for stage, (count, end) in enumerate(zip(split, ends, strict=True))]
    recompute = tuple(bool(cells.recompute[place]) for place in places)
    cell_of_stage = list(zip(places, recompute, strict=True))
    buckets = tuple(cells.best_buckets(*place, recomputes) for place, recomputes in cell_of_stage)
    held_gb = [float(cells.memory[int(recomputes), *place]) for place, recomputes in cell_of_stage]
    plan = TrainingPlan(split, cells.schedule, cells.microbatches, recompute, buckets)
    return TimedPlan(plan, step_time_s, max(held_gb) if cells.model.knows_memory else None)


def cells_of(model: PlanModel, plan: TrainingPlan) -> Stages:
    """The cells of one plan as it is."""
    as_it_is = replace(model, now=plan, space=Space())
    return Stages(as_it_is, plan.schedule, plan.microbatches, None)


def timed(model: PlanModel, plan: TrainingPlan) -> TimedPlan:
    """Any plan of a job, whatever its space and memory."""
    cells = cells_of(model, plan)
    return _timed(cells, plan.split, float(step_times(cells, np.array([plan.split]))[0]))


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
        of_stages = self.layer_s[:, None] * (np.array(layers) / self.chunks)
        chunks = self._with_ends(np.repeat(of_stages, self.chunks, axis=1))
        return chunks.reshape(*of_stages.shape, self.chunks)

    @property
    def of_layers_s(self) -> Floats:
        """Seconds of each layer of the model, with embedding and loss on the first and the last, [kinds, layers]."""
        return self._with_ends(np.repeat(self.layer_s[:, None], sum(self.layers), axis=1))

    def _with_ends(self, seconds: Floats) -> Floats:
        """The same with embedding and loss on the first and the last part, [kinds, parts]."""
        seconds[:, 0] += self.extra_s[:, 0]
        if len(self.layers) > 1:
            seconds[:, -1] += self.extra_s[:, -1]
        return seconds


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
    stages, takes_s = len(model.layers), model.of_layers_s[[0, -1]]
    plan = TrainingPlan(model.layers, Schedule.ONE_F_ONE_B, lane.microbatches, (False,) * stages,
                        tuple((count,) for count in model.layers))  # fmt: skip
    plain = PlanModel(
        layers=layers_of(takes_s, np.zeros(2), np.zeros(takes_s.shape[1])),
        stages=stages,
        replicas=1,
        samples=lane.microbatches,
        transfer_s=(0.0, 0.0),
        reduce=Reduction(0.0, 0.0),
        optimizer_s=0.0,
        slowness=tuple(model.slowness.tolist()),
        now=plan,
        space=Space(split="free", buckets="one"),
    )
    candidates = [] if plain.problem else search(plain, None, most_parts=_PARTS).plans
    splits = [model.layers, *(candidate.plan.split for candidate in candidates)]
    return min(splits, key=lambda layers: lane.step_s(model.chunk_s(layers) * model.slowness[None, :, None]))


def step_times(stages: Stages, splits: Ints, tail_s: Floats | None = None) -> Floats:
    """Step times of the plans with these splits, seconds, [plans]; `splits`: layers of each stage, [plans, stages].
    `tail_s`: of the stages of each plan, in place of those of the cells, [stages, plans].
    """
    ends, stage = np.cumsum(splits, axis=1), np.arange(splits.shape[1])
    takes = [cells[stage, ends - splits, ends].T for cells in (stages.forward_s, stages.backward_s)]
    takes.append(stages.tail_s[stage, ends - splits, ends].T if tail_s is None else tail_s)
    graph, cost_row = _replayed(stages.schedule, len(stage), stages.microbatches)
    transfers_s, no_delay = np.where(cost_row < 0, stages.transfer_s, 0.0), np.full(len(cost_row), -1)
    costs = Costs(np.concatenate(takes), cost_row, transfers_s, NO_MATRIX, no_delay)
    return replay_lanes(graph, np.arange(len(splits) + 1), costs) + stages.model.optimizer_s


@lru_cache(64)
def _replayed(schedule: Schedule, stages: int, microbatches: int) -> tuple[CompiledGraph, Ints]:
    """The computes of a schedule, its transfers, and the last backward of each stage once more with its reductions,
    which nothing waits for; and the forward, backward or tail [3 x stages] that each row takes, -1: a transfer.
    """
    order = AskedSchedule.parse(schedule).order(stages, microbatches)
    (before, after), last = order.edges, np.flatnonzero(np.diff(order.stage, append=stages))
    tails = len(order.kind) + len(order.received) + np.arange(stages)
    into_last = np.flatnonzero(np.isin(after, last))
    before = np.concatenate([before, before[into_last]])
    after = np.concatenate([after, tails[order.stage[after[into_last]]]])
    cost_row = np.full(len(order.kind) + len(order.received) + stages, -1)
    cost_row[: len(order.kind)] = order.kind * stages + order.stage
    cost_row[tails] = 2 * stages + np.arange(stages)
    return compiled(before, after, len(cost_row)), cost_row
