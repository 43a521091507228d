"""Straggler attribution: the cost of stragglers by op kind, stage, DP rank, worker and step.

In: a `JobReplay`. Out: an `Attribution`, the step times of every scenario. Equations: "Understanding Stragglers in
Large Model Training Using What-if Analysis" (OSDI'25).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from tracekit.analysis.attribution.attribution import Attribution, Contribution, CriticalTimes
from tracekit.analysis.attribution.correlation import forward_backward_correlation
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.attribution.exact_attribution import add_back_lanes, representative_lanes
from tracekit.analysis.attribution.one_changed import step_times_each_changed
from tracekit.analysis.attribution.resolution import coarse_starts_s
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL, RECORDED, Action, Base, Edit, Scenario
from tracekit.analysis.whatif.selection import Selection, kind, labelled, stage, worker
from tracekit.base.errors import TraceError
from tracekit.trace.canonical import traced_dp_ranks
from tracekit.trace.model import DP_COLLECTIVES, OpKind, Worker, kind_groups

#: M_W idealises this share of the workers, at least one of them.
SLOWEST_WORKERS_SHARE = 0.03
#: Upper limit, in op evaluations, for questions about one DP rank at a time (its launch delays, idealising it).
COSTLIEST_BY_DP_RANK = 200_000_000

Progress = Callable[[str], None]


def attribute(replay: JobReplay, *, progress: Progress | None = None) -> Attribution:
    """Answer every what-if question about `replay`. `progress` is called with the name of each stage of the work."""
    tell = progress or (lambda _: None)
    graph, durations = replay.graph, replay.durations
    stages = graph.layout.pp
    tell("step times")
    recorded = replay.recorded_step_times()
    ideal, original = replay.step_times(IDEAL), replay.step_times(ORIGINAL)
    _check_step_times(graph.steps, {"recorded": recorded, "original": original, "ideal": ideal})
    tell("op kinds")
    groups = kind_groups(graph.kinds)
    chosen_kinds = {name: kind(*kinds) for name, kinds in groups.items()}
    by_kind = {name: replay.step_times(Scenario.addition(chosen)) for name, chosen in chosen_kinds.items()}
    removed_by_kind = {name: replay.step_times(Scenario.removal(chosen)) for name, chosen in chosen_kinds.items()}
    tell("stages")
    by_stage = np.stack([replay.step_times(Scenario.addition(stage(at))) for at in range(stages)], axis=1)
    removed_by_stage = np.stack([replay.step_times(Scenario.removal(stage(at))) for at in range(stages)], axis=1)
    tell("DP ranks and workers")
    represented = representative_lanes(replay)
    by_dp_rank = add_back_lanes(replay, represented)
    each = [by_dp_rank] if stages == 1 else [add_back_lanes(replay, represented, at) for at in range(stages)]
    by_worker = np.stack(each, axis=2)
    tell("launch delays")
    with_delays = replay.step_times(RECORDED)
    delayed_by_kind = {name: replay.step_times(_delayed(chosen)) for name, chosen in chosen_kinds.items()}
    delayed_by_stage = np.stack([replay.step_times(_delayed(stage(at))) for at in range(stages)], axis=1)
    delayed_by_dp_rank = step_times_each_changed(replay, _delayed, COSTLIEST_BY_DP_RANK)
    tell("DP ranks fixed")
    removed_by_dp_rank = step_times_each_changed(replay, Scenario.removal, COSTLIEST_BY_DP_RANK)
    tell("critical path")
    critical = {
        name: _critical_times(replay, scenario)
        for name, scenario in (("recorded", RECORDED), ("original", ORIGINAL), ("ideal", IDEAL))
    }
    tell("slowest workers and last stage")
    approx = np.minimum(by_dp_rank.mean(axis=0)[:, None], by_stage.mean(axis=0)[None, :])
    slowest, mean_s = _slowest_workers(approx, graph.dp_ranks), (float(original.mean()), float(ideal.mean()))
    return Attribution(
        steps=graph.steps,
        dp_ranks=graph.dp_ranks,
        stages=stages,
        world_size=graph.layout.world_size,
        recorded=recorded,
        original=original,
        ideal=ideal,
        with_delays=with_delays,
        by_kind=by_kind,
        by_stage=by_stage,
        by_dp_rank=by_dp_rank,
        by_worker=by_worker,
        removed_by_kind=removed_by_kind,
        removed_by_stage=removed_by_stage,
        removed_by_dp_rank=removed_by_dp_rank,
        delayed_by_kind=delayed_by_kind,
        delayed_by_stage=delayed_by_stage,
        delayed_by_dp_rank=delayed_by_dp_rank,
        critical=critical,
        m_w=Contribution(
            *mean_s,
            added_s=replay.mean_step_time(Scenario.addition(worker(*slowest))),
            removed_s=replay.mean_step_time(Scenario.removal(worker(*slowest))),
        ),
        m_s=Contribution(
            *mean_s, added_s=float(by_stage[:, -1].mean()), removed_s=float(removed_by_stage[:, -1].mean())
        ),
        slowest_workers=slowest,
        correlation=forward_backward_correlation(replay),
        clamped_transfers=durations.clamped_transfers,
        clamped_delays=durations.clamped_delays,
        ops=graph.ops,
        gaps=graph.gaps,
        slowdown_as_recorded=None if replay.as_recorded is None else slowdown_of(replay.as_recorded),
        hidden_slowdown=_hidden_slowdown(replay, mean_s[0]),
        incomplete_steps=len(_incomplete_steps(replay)),
        clock_doubts=replay.clocks.doubts,
        coarse_starts_s=coarse_starts_s(graph),
        one_clock=graph.trace is not None and graph.trace.one_clock,
    )


def _critical_times(replay: JobReplay, scenario: Scenario) -> CriticalTimes:
    path = critical_path(replay, scenario)
    of_kind = path.seconds_by(["kind"])
    groups = kind_groups(replay.graph.kinds)
    return CriticalTimes(
        by_kind={name: sum(of_kind.get((str(kind),), 0.0) for kind in kinds) for name, kinds in groups.items()},
        by_worker={
            Worker(int(dp_rank), int(at)): seconds
            for (dp_rank, at), seconds in path.seconds_by(["dp_rank", "stage"]).items()
            if dp_rank is not None and at is not None
        },
        delay_s=path.mean_delay_s,
    )


def _check_step_times(steps: Int32s, times: Mapping[str, Floats]) -> None:
    """Raise TraceError for a step time of zero or less: every ratio divides by a step time."""
    for name, values in times.items():
        if (values <= 0).any():
            at = int(values.argmin())
            raise TraceError(
                f"step {steps[at]} takes {values[at]:g} s ({name}); expected ops that take time after the step's start:"
                " repair start and duration, or leave the step out with --ignore-steps"
            )


def slowdown_of(replay: JobReplay) -> float:
    """S = T(original) / T(ideal)."""
    return replay.mean_step_time(ORIGINAL) / replay.mean_step_time(IDEAL)


def _hidden_slowdown(replay: JobReplay, original_s: float) -> float | None:
    """S if the collectives that lack DP ranks of the layout did nothing but wait for them; None if no DP rank is
    missing.

    If DP ranks are missing from some steps only, only those steps count.
    """
    graph, incomplete = replay.graph, _incomplete_steps(replay)
    waiting = DP_COLLECTIVES | {OpKind.OPTIMIZER_CLIP_MAIN_GRAD}
    if not len(incomplete) or not waiting & set(graph.kinds):
        return None
    selection = kind(*waiting)
    if len(incomplete) < len(graph.steps):
        selection = selection & labelled("step", *incomplete.tolist())
    ideal_s = replay.mean_step_time(Scenario(Base.IDEAL, (Edit(selection, Action.SET, 0.0),)))
    return original_s / ideal_s if ideal_s > 0 else math.inf


def _incomplete_steps(replay: JobReplay) -> Int32s:
    """The numbers of the steps from which DP ranks of the layout are missing."""
    graph = replay.graph
    lanes = np.zeros(len(graph.steps), np.int64)
    for block in graph.blocks:
        lanes += np.bincount(block.step, minlength=len(graph.steps))
    return graph.steps[lanes < traced_dp_ranks(graph.layout, np.array(graph.dp_ranks))]


def _delayed(selection: Selection) -> Scenario:
    return Scenario(Base.ORIGINAL, launch_delays=selection)


def _slowest_workers(times: Floats, dp_ranks: tuple[int, ...]) -> tuple[Worker, ...]:
    """The slowest 3 % (at least one) by `times`, [dp_ranks, stages], slowest first."""
    count = max(1, math.ceil(SLOWEST_WORKERS_SHARE * times.size))
    cells = np.argsort(-times.ravel(), kind="stable")[:count]
    return tuple(Worker(dp_ranks[cell // times.shape[1]], int(cell % times.shape[1])) for cell in cells)
