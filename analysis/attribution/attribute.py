"""Straggler attribution: the cost of stragglers by op kind, stage, DP rank, worker and step.

In: a `JobReplay`. Out: an `Attribution`, the step times of every scenario. Equations: "Understanding Stragglers in
Large Model Training Using What-if Analysis" (OSDI'25).

Each DP rank or worker alone takes no replay per rank. In "ideal except DP rank d", all other DP ranks are identical. So
two lanes replay the whole job: d and one stand-in for all others. All DP ranks together cost two passes over the trace,
all workers two passes per stage. Only if ideal lanes differ (for example, if most workers collect garbage, at different
places) does every DP rank take a replay. Changes of one DP rank of the original job follow from longest paths: between
collectives, a lane meets no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import Attribution, CriticalTimes
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.graph.dependency_graph import DependencyGraph, Template, build_coupled_template
from tracekit.analysis.graph.op_grid import compute_rows
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, path_lengths, replay_lanes, without_starts
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    RECORDED,
    Changes,
    SetCost,
    addition,
    changed,
    delayed,
    mean_step_time,
    removal,
    step_times,
)
from tracekit.analysis.whatif.selection import Everything, Selection, dp_rank, kind, labelled, stage, worker
from tracekit.base.errors import TraceError
from tracekit.base.text import short
from tracekit.trace.facts import traced_dp_ranks
from tracekit.trace.model import DP_COLLECTIVES, KINDS, OpKind, Worker, kind_groups

#: M_W idealises this share of the workers, at least one of them. Definition: the paper's.
SLOWEST_WORKERS_SHARE = 0.03
#: Upper limit, in op evaluations, for questions about one DP rank at a time (its launch delays, idealising it).
COSTLIEST_BY_DP_RANK = 200_000_000
#: Largest number of path lengths in memory at a time.
_LENGTHS_AT_ONCE = 1 << 20
#: A grid coarser than this share of the usual compute spoils launch delays and transfer durations. Chosen.
LARGEST_SHARE = 0.1
#: Starts closer than this, seconds, are equal: no recorder resolves them. Chosen.
SAME_S = 1e-6
#: Starts lie on a grid if their gaps are whole multiples of its spacing, within this share of the spacing. Durations
#: do not lie on it if they are usually further off. Chosen.
ON_GRID = 0.02
#: Look at the ops of this many lanes; decide nothing from fewer gaps. Chosen: fewer show no grid.
LANES, FEWEST_GAPS = 8, 10
Progress = Callable[[str], None]
#: Jobs whose critical path is reported.
_WITH_PATH = {"recorded": RECORDED, "original": ORIGINAL, "ideal": IDEAL}


class ReplayedSteps(Struct, frozen=True, eq=False):
    """The replays of some steps of a job, or of all: what its attribution is made of.

    `times`: fields of `Attribution`, arrays with the steps as first axis. `slowest_workers`: of the whole job;
    `without_slowest`: the original job with these idealised, [steps]. `hidden`:
    see `_hidden_times`. `paths`: of the recorded, the original and the ideal job, as in `CriticalTimes`, per step and
    kind of op. `as_recorded`: the original and the ideal job without reconstructed ops, [steps] each, None if there are
    none.
    """

    times: Mapping[str, Any]
    slowest_workers: tuple[Worker, ...]
    without_slowest: Floats
    hidden: Floats | None
    paths: Mapping[str, tuple[Mapping[Any, list[float]], Mapping[Any, list[float]], Floats]]
    as_recorded: tuple[Floats, ...] | None
    clamped_transfers: int
    clamped_delays: int
    ops: int
    incomplete_steps: int

    @classmethod
    def of(cls, replay: JobReplay, whole: Whole = UNDIVIDED, *, progress: Progress | None = None) -> ReplayedSteps:
        """Replay every what-if question about the steps of `replay`, of the job `whole`."""
        tell = progress or (lambda _: None)
        replay = replay.sampled_from(whole)
        plain = None if replay.as_recorded is None else replay.as_recorded.sampled_from(whole)
        graph, durations = replay.graph, replay.durations
        stages = graph.layout.pp
        tell("step times")
        recorded = replay.fit.recorded
        ideal, original = step_times(replay, IDEAL), step_times(replay, ORIGINAL)
        _check_step_times(graph, {"recorded": recorded, "original": original, "ideal": ideal})
        by_stage = np.stack([step_times(replay, addition(stage(pp_rank))) for pp_rank in range(stages)], axis=1)
        represented = representative_lanes(replay)
        by_dp_rank = add_back_lanes(replay, represented)
        # Asked as early as possible: a round of batches replays all that comes before.
        approx = whole.combined(lambda: (by_dp_rank, by_stage), _approximate)
        slowest = _slowest_workers(approx, graph.dp_ranks)
        tell("op kinds")
        chosen_kinds = {name: kind(*kinds) for name, kinds in kind_groups(graph.job.kinds).items()}
        by_kind = {name: step_times(replay, addition(chosen)) for name, chosen in chosen_kinds.items()}
        removed_by_kind = {name: step_times(replay, removal(chosen)) for name, chosen in chosen_kinds.items()}
        tell("stages")
        removed_by_stage = np.stack([step_times(replay, removal(stage(pp_rank))) for pp_rank in range(stages)], axis=1)
        tell("DP ranks and workers")
        lane_changes = [by_dp_rank]
        if stages > 1:
            lane_changes = [add_back_lanes(replay, represented, pp_rank) for pp_rank in range(stages)]
        tell("launch delays")
        delayed_by_stage = np.stack([step_times(replay, delayed(stage(pp_rank))) for pp_rank in range(stages)], axis=1)
        times = {
            "steps": graph.steps,
            "recorded": recorded,
            "original": original,
            "ideal": ideal,
            "with_delays": replay.fit.with_delays,
            "by_kind": by_kind,
            "by_stage": by_stage,
            "by_dp_rank": by_dp_rank,
            "by_worker": np.stack(lane_changes, axis=2),
            "removed_by_kind": removed_by_kind,
            "removed_by_stage": removed_by_stage,
            "delayed_by_kind": {name: step_times(replay, delayed(chosen)) for name, chosen in chosen_kinds.items()},
            "delayed_by_stage": delayed_by_stage,
            "delayed_by_dp_rank": step_times_each_changed(replay, delayed, COSTLIEST_BY_DP_RANK),
        }
        tell("DP ranks fixed")
        times["removed_by_dp_rank"] = step_times_each_changed(replay, removal, COSTLIEST_BY_DP_RANK)
        tell("critical path")
        paths = {name: critical_path(replay, changes) for name, changes in _WITH_PATH.items()}
        tell("slowest workers and last stage")
        return cls(
            times=times,
            slowest_workers=slowest,
            without_slowest=step_times(replay, removal(worker(*slowest))),
            hidden=_hidden_times(replay),
            paths={
                name: (path.step_seconds_by(["kind"]), path.step_seconds_by(["dp_rank", "stage"]), path.step_delays_s)
                for name, path in paths.items()
            },
            as_recorded=None if plain is None else (step_times(plain, ORIGINAL), step_times(plain, IDEAL)),
            clamped_transfers=durations.clamped_transfers,
            clamped_delays=durations.clamped_delays,
            ops=graph.ops,
            incomplete_steps=len(_incomplete_steps(replay)),
        )


def attribute(replay: JobReplay, *, progress: Progress | None = None) -> Attribution:
    """Answer every what-if question about `replay`. `progress` is called with the name of each stage of the work."""
    graph = replay.graph
    return Attribution(
        dp_ranks=graph.dp_ranks,
        stages=graph.layout.pp,
        correlation=forward_backward_correlation(replay),
        gaps=graph.gaps,
        clock_doubts=replay.clocks.doubts,
        coarse_starts_s=coarse_starts_s(graph),
        one_clock=graph.trace is not None and graph.trace.one_clock,
        **joined([ReplayedSteps.of(replay, progress=progress)]),
    )


def joined(parts: Sequence[ReplayedSteps]) -> dict[str, Any]:
    """The fields of `Attribution` that follow from replays, given those of each batch of steps, in order."""
    times = {name: _concatenated([part.times[name] for part in parts]) for name in parts[0].times}
    original_s, ideal_s = float(times["original"].mean()), float(times["ideal"].mean())

    def share_without(times_s: Floats) -> float:
        lost_s = original_s - ideal_s
        return (original_s - float(times_s.mean())) / lost_s if lost_s else math.nan

    hidden = _concatenated([part.hidden for part in parts])
    plain = [part.as_recorded for part in parts if part.as_recorded is not None]
    plain_s = [float(_concatenated(of_batches).mean()) for of_batches in zip(*plain, strict=True)]
    return times | {
        "critical": {
            name: _critical_times([part.paths[name] for part in parts], times["by_kind"]) for name in _WITH_PATH
        },
        "m_w": share_without(_concatenated([part.without_slowest for part in parts])),
        "m_s": share_without(times["removed_by_stage"][:, -1]),
        "slowest_workers": parts[0].slowest_workers,
        "slowdown_as_recorded": plain_s[0] / plain_s[1] if plain_s else None,
        "hidden_slowdown": None if hidden is None else _slowdown(original_s, float(hidden.mean())),
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("clamped_transfers", "clamped_delays", "ops", "incomplete_steps")
        },
    }


def _slowdown(original_s: float, ideal_s: float) -> float:
    return original_s / ideal_s if ideal_s > 0 else math.inf


def _concatenated(values: Sequence[Any]) -> Any:
    """Arrays, one after the other; the same for each value of mappings; None if there are none."""
    if len(values) == 1 or values[0] is None:
        return values[0]
    if isinstance(values[0], dict):
        return {name: _concatenated([value[name] for value in values]) for name in values[0]}
    return np.concatenate(values)


def _critical_times(
    parts: Sequence[tuple[Mapping[Any, list[float]], Mapping[Any, list[float]], Floats]], reported: Collection[str]
) -> CriticalTimes:
    """Means over the steps of all parts. `reported`: the reported kinds of the job."""
    of_kinds, of_workers, delays = zip(*parts, strict=True)
    steps = sum(map(len, delays))
    of_kind, of_worker = (
        {key: math.fsum(chain.from_iterable(of_blocks)) / steps for key, of_blocks in by_name(totals).items()}
        for totals in (of_kinds, of_workers)
    )
    groups = kind_groups(KINDS)
    return CriticalTimes(
        by_kind={name: sum(of_kind.get((str(kind),), 0.0) for kind in groups[name]) for name in reported},
        by_worker={
            Worker(int(dp_rank), int(pp_rank)): seconds
            for (dp_rank, pp_rank), seconds in sorted(of_worker.items(), key=lambda item: (-item[1], item[0]))
            if dp_rank is not None and pp_rank is not None
        },
        delay_s=math.fsum(chain.from_iterable(delays)) / steps,
    )


def _check_step_times(graph: DependencyGraph, times: Mapping[str, Floats]) -> None:
    """Raise TraceError for a step time of zero or less: every ratio divides by a step time."""
    name_of_job = "" if graph.trace is None else f"{short(graph.trace.name)}: "
    for name, values in times.items():
        if (values <= 0).any():
            shortest = int(values.argmin())
            raise TraceError(
                f"{name_of_job}step {graph.steps[shortest]} takes {values[shortest]:g} s ({name}); expected ops that"
                " take time after the step's start: repair start and duration, or leave the step out with"
                " --ignore-steps"
            )


def slowdown_of(replay: JobReplay) -> float:
    """S = T(original) / T(ideal)."""
    return mean_step_time(replay, ORIGINAL) / mean_step_time(replay, IDEAL)


def _hidden_times(replay: JobReplay) -> Floats | None:
    """Step times, seconds, [steps], if the collectives that lack DP ranks of the layout did nothing but wait for them;
    None if no DP rank is missing.

    If DP ranks are missing from some steps only, only those steps count.
    """
    graph, incomplete = replay.graph, _incomplete_steps(replay)
    waiting = DP_COLLECTIVES | {OpKind.OPTIMIZER_CLIP_MAIN_GRAD}
    if not len(incomplete) or not waiting & set(graph.job.kinds):
        return None
    selection = kind(*waiting)
    if len(incomplete) < len(graph.steps):
        selection = selection & labelled("step", *incomplete.tolist())
    return step_times(replay, (*IDEAL, SetCost(selection, 0.0)))


def _incomplete_steps(replay: JobReplay) -> Int32s:
    """The numbers of the steps from which DP ranks of the layout are missing."""
    graph = replay.graph
    lanes = np.zeros(len(graph.steps), np.int64)
    for block in graph.blocks:
        lanes += np.bincount(block.step, minlength=len(graph.steps))
    return graph.steps[lanes < traced_dp_ranks(graph.layout, np.array(graph.dp_ranks))]


def _approximate(parts: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Mean step times, seconds, by the paper's approximation of each worker, [dp_ranks, stages]. In: `by_dp_rank` and
    `by_stage` of batches of steps.
    """
    by_dp_rank, by_stage = (np.concatenate(arrays).mean(axis=0) for arrays in zip(*parts, strict=True))
    return np.asarray(np.minimum(by_dp_rank[:, None], by_stage[None, :]))


def _slowest_workers(times: Floats, dp_ranks: tuple[int, ...]) -> tuple[Worker, ...]:
    """The slowest 3 % (at least one) by `times`, [dp_ranks, stages], slowest first."""
    count = max(1, math.ceil(SLOWEST_WORKERS_SHARE * times.size))
    cells = np.argsort(-times.ravel(), kind="stable")[:count]
    return tuple(Worker(dp_ranks[cell // times.shape[1]], int(cell % times.shape[1])) for cell in cells)


def forward_backward_correlation(replay: JobReplay) -> dict[int, float | None]:
    """Stage -> r; None if a stage has no forwards or no backwards, or if one of them does not vary.

    Long sequences slow down both, so r is close to 1 (at least 0.9 in the OSDI'25 paper). A single slow worker has the
    same effect, so a high correlation alone proves nothing.
    """
    return {stage: _correlation(*_pairs(replay, stage)) for stage in range(replay.graph.layout.pp)}


def _correlation(forward: Floats, backward: Floats) -> float | None:
    if len(forward) < 2 or np.ptp(forward) == 0 or np.ptp(backward) == 0:
        return None
    return float(np.corrcoef(forward, backward)[0, 1])


def _pairs(replay: JobReplay, stage: int) -> tuple[Floats, Floats]:
    """Durations of forwards, and of the backwards of the same microbatch and chunk, seconds, [pairs] each."""
    forward, backward = [np.empty(0)], [np.empty(0)]
    for block, cost in zip(replay.graph.blocks, replay.durations.cost, strict=True):
        pairs = [
            compute_rows(block, stage, kind).seconds(cost) for kind in (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE)
        ]
        if len(pairs[0]) == len(pairs[1]):
            forward.append(pairs[0].ravel())
            backward.append(pairs[1].ravel())
    return np.concatenate(forward), np.concatenate(backward)


def coarse_starts_s(graph: DependencyGraph) -> float | None:
    """The spacing of the grid that starts lie on, seconds; None if there is no grid, or one that is fine enough for the
    ops.

    If durations lie on the same grid, the recorder's clock is that coarse or the trace was made by hand, and nothing
    was lost.

    Times stored as float32, or rounded, lose digits of the starts, which are large, but not of the durations.
    """
    gaps, durations = _samples(graph)
    if len(gaps) < FEWEST_GAPS:
        return None
    step = float(gaps.min())
    # The mean over multiples of the smallest gap is more accurate than that gap alone.
    step = float(np.median(gaps[gaps < 1.5 * step]))
    if np.quantile(_off_grid(gaps, step), 0.95) > ON_GRID or np.median(_off_grid(durations, step)) <= ON_GRID:
        return None
    return step if step > LARGEST_SHARE * float(np.median(durations)) else None


def _samples(graph: DependencyGraph) -> tuple[Floats, Floats]:
    """Gaps between the starts of one worker's ops in a step, and durations of its computes, seconds."""
    gaps, durations = [], []
    for block in graph.blocks:
        template = block.template
        of_stage = template.pp_rank == template.pp_rank[0]
        work = of_stage & ~template.is_communication
        start, duration = block.start[:, :LANES], block.duration[work, :LANES]
        if block.present is not None:
            start = np.where(block.present[:, :LANES], start, np.nan)
        gaps.append(np.diff(np.sort(start[of_stage], axis=0), axis=0).ravel())
        durations.append(duration.ravel())
    between, lasting = np.concatenate(gaps), np.concatenate(durations)
    return between[between > SAME_S], lasting[lasting > SAME_S]


def _off_grid(values: Floats, step: float) -> Floats:
    """Distance of values from the nearest multiple of `step`, as a share of it."""
    return np.abs(values / step - np.round(values / step))


class RepresentativeLanes(Struct, frozen=True, eq=False):
    """Lanes of one structure, each coupled with ideal stand-ins for the other lanes of its step.

    The first rows of `template` are the lane itself; `cost`: its costs, [its rows, lanes]. `ideal`: ideal costs of all
    members, [rows of the template]. `step`, `dp_index` (position in `graph.dp_ranks`): [lanes].
    """

    template: Template
    cost: Floats
    ideal: Floats
    step: Int32s
    dp_index: Ints


def representative_lanes(replay: JobReplay) -> tuple[RepresentativeLanes, ...]:
    """Every lane of the job with its stand-ins: one for each structure that the other lanes of its step have.

    Empty if the ideal lanes of a structure differ.
    """
    if any(ideal.ndim > 1 for ideal in replay.durations.ideal):
        return ()
    ideal = changed(replay, IDEAL)
    graph = replay.begun(ideal.costs() if ideal.sampled is None else ideal.sampled.costs()).graph
    lanes_here = np.zeros((len(graph.blocks), len(graph.steps)), np.int64)
    for number, block in enumerate(graph.blocks):
        lanes_here[number] = np.bincount(block.step, minlength=len(graph.steps))
    dp_ranks = np.array(graph.dp_ranks)
    represented = []
    for number, block in enumerate(graph.blocks):
        others = lanes_here[:, block.step].T > 0
        others[:, number] = lanes_here[number, block.step] > 1
        for company in np.unique(others, axis=0):
            lanes = np.flatnonzero((others == company).all(axis=1))
            members = [number, *np.flatnonzero(company).tolist()]
            coupled = build_coupled_template([graph.blocks[member].structure for member in members])
            begin = np.concatenate([graph.blocks[member].template.begin for member in members])
            cost = replay.durations.cost[number]
            represented.append(
                RepresentativeLanes(
                    template=replace(coupled, begin=begin),
                    ideal=np.concatenate([replay.durations.ideal[member] for member in members]),
                    cost=cost if len(lanes) == block.lanes else np.ascontiguousarray(cost[:, lanes]),
                    step=block.step[lanes],
                    dp_index=np.searchsorted(dp_ranks, block.dp_rank[lanes]),
                )
            )
    return tuple(represented)


def add_back_lanes(replay: JobReplay, represented: tuple[RepresentativeLanes, ...], stage: int | None = None) -> Floats:
    """Step times, seconds, [steps, dp_ranks], with everything ideal except that DP rank, or its worker on `stage`."""
    if not represented:
        return _one_by_one(replay, stage)
    graph = replay.graph
    times = np.repeat(step_times(replay, IDEAL)[:, None], len(graph.dp_ranks), axis=1)
    for part in represented:
        template = part.template
        rows = np.arange(template.rows)
        rows[len(part.cost) :] = -1
        if stage is not None:
            rows[template.pp_rank != stage] = -1
        missing = np.full(template.rows, -1)
        costs = Costs(part.cost, rows, part.ideal, NO_MATRIX, missing)
        times[part.step, part.dp_index] = replay_lanes(template, np.arange(len(part.step) + 1), costs)
    return times


def _one_by_one(replay: JobReplay, stage: int | None) -> Floats:
    """The result of `add_back_lanes`, from one replay per DP rank."""
    ranks = (dp_rank(rank) for rank in replay.graph.dp_ranks)
    chosen = ranks if stage is None else (rank & labelled("stage", stage) for rank in ranks)
    return np.stack([step_times(replay, addition(selection)) for selection in chosen], axis=1)


def step_times_each_changed(
    replay: JobReplay, change: Callable[[Selection], Changes], most_op_replays: int
) -> Floats | None:
    """Step times, seconds, [steps, dp_ranks]: the original job with `change` applied to all ops of one DP rank.

    None if that takes more than `most_op_replays` op evaluations.
    """
    graph = replay.graph
    passes = 2 * (graph.rendezvous_count + 1)
    if min(passes, len(graph.dp_ranks)) * graph.job.ops > most_op_replays:
        return None
    if len(graph.dp_ranks) <= passes:
        return np.stack([step_times(replay, change(dp_rank(rank))) for rank in graph.dp_ranks], axis=1)
    return step_times_by_paths(replay, change(Everything()))


def step_times_by_paths(replay: JobReplay, changes: Changes) -> Floats:
    """Step times, seconds, [steps, dp_ranks]: the original job with one DP rank after `changes`, by longest paths.

    Lanes of a step meet in collectives only. So a step is a small graph of its start, its collectives and its end,
    whose edges are the longest paths in between, maximised over lanes. Changing one DP rank replaces its part of each
    maximum: the longest and the second longest lane of each edge suffice for every rank. That takes one pass over the
    trace per collective; replays would take one per DP rank.
    """
    graph = replay.graph
    before, after = _Lanes.after(replay, ORIGINAL), _Lanes.after(replay, changes)
    order = _collectives_in_order(replay)
    batch_size = max(1, _LENGTHS_AT_ONCE // ((graph.rendezvous_count + 1) ** 2 * len(graph.dp_ranks)))
    times = np.empty((len(graph.steps), len(graph.dp_ranks)))
    for first in range(0, len(times), batch_size):
        last = min(first + batch_size, len(times))
        edges = np.maximum(_of_the_others(before.paths(first, last)), after.paths(first, last))
        times[first:last] = _longest(edges, order)
    return times


class _Lanes(Struct, frozen=True, eq=False):
    """All lanes of a job after changes: `costs` of each block, and the same without what precedes a collective."""

    replay: JobReplay
    costs: tuple[Costs, ...]
    behind_collective: tuple[Costs, ...]

    @classmethod
    def after(cls, replay: JobReplay, changes: Changes) -> _Lanes:
        blocks, costs = replay.graph.blocks, tuple(changed(replay, changes).costs())
        behind = (without_starts(block.template, cost, block.lanes) for block, cost in zip(blocks, costs, strict=True))
        return cls(replay, costs, tuple(behind))

    def paths(self, first: int, last: int) -> Floats:
        """The edges in steps `first` to `last` - 1, [rendezvous and start, rendezvous and end, steps, dp_ranks].

        The last source is the start of the step, the last target its end; -inf if a DP rank has no such path.
        """
        graph, count = self.replay.graph, self.replay.graph.rendezvous_count
        lengths = np.full((count + 1, count + 1, last - first, len(graph.dp_ranks)), -np.inf)
        for number, block in enumerate(graph.blocks):
            low, high = np.searchsorted(block.step, (first, last)).tolist()
            dp_index = np.searchsorted(graph.dp_ranks, block.dp_rank[low:high])
            for source in range(count + 1):
                costs = self.costs[number] if source == count else self.behind_collective[number]
                of_block = path_lengths(block.template, costs, count, source, (low, high))
                lengths[source][:, block.step[low:high] - first, dp_index] = of_block
        return lengths


def _collectives_in_order(replay: JobReplay) -> Ints:
    """The numbers of the collectives in topological order, [rendezvous]."""
    rounds = np.zeros(replay.graph.rendezvous_count, np.int64)
    for block in replay.graph.blocks:
        groups = np.flatnonzero(block.template.rendezvous >= 0)
        rounds[block.template.rendezvous[groups]] = np.searchsorted(block.template.first_of_round, groups, side="right")
    return np.argsort(rounds, kind="stable")


def _of_the_others(lengths: Floats) -> Floats:
    """For each entry along the last axis, the greatest of the other entries; -inf if there is none."""
    greatest = lengths.argmax(axis=-1)[..., None]
    top = np.take_along_axis(lengths, greatest, axis=-1)
    rest = lengths.copy()
    np.put_along_axis(rest, greatest, -np.inf, axis=-1)
    others = np.broadcast_to(top, lengths.shape).copy()
    np.put_along_axis(others, greatest, rest.max(axis=-1, keepdims=True), axis=-1)
    return others


def _longest(edges: Floats, order: Ints) -> Floats:
    """The longest path from start to end of each step, seconds, [steps, dp_ranks]. `edges`: as `_Lanes.paths`."""
    end = len(order)
    reached: Floats = edges[end].copy()  # longest path to each target that meets no collective
    for collective in order.tolist():
        np.maximum(reached, reached[collective] + edges[collective], out=reached)
    latest: Floats = np.maximum(reached[end], 0.0)
    return latest
