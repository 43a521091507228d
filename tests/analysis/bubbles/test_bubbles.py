"""Bubbles against closed forms worked out by hand, and against a simulator and an oracle that share no code."""

from __future__ import annotations

from itertools import product
from statistics import mean

import polars as pl
import pytest

from tests.analysis.bubbles.simulated import (
    Compute,
    Pipeline,
    causes,
    gpipe,
    one_f_one_b,
    random_lanes,
    trace,
    v_shaped,
    zb_h1,
)
from tracekit.analysis.bubbles.bubbles import find_bubbles
from tracekit.analysis.bubbles.picture import bubbles_sentence
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import step_times
from tracekit.base.errors import SelectionError
from tracekit.report.questions import Bubbles
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout
from tracekit.trace.schema import SCHEMA

RATIOS = ((1.0, 2.0), (1.0, 1.0), (1.0, 3.0), (0.7, 1.3))
ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}


def found(job: Trace, *schedules: str) -> Bubbles:
    return find_bubbles(JobReplay.from_trace(job), schedules)


def uniform(orders: list[list[Compute]], forward: float, backward: float, weight: float = 0.0) -> Pipeline:
    cost = {"F": forward, "B": backward, "W": weight}
    return Pipeline(orders, {c: cost[c[0]] for order in orders for c in order}, lambda _: 0.0).run()


@pytest.mark.parametrize(("forward", "backward"), RATIOS)
@pytest.mark.parametrize(("p", "groups"), [(2, 1), (2, 4), (3, 2), (4, 2), (8, 1), (8, 3)])
def test_the_bubble_of_uniform_costs_is_that_of_the_formulas(
    p: int, groups: int, forward: float, backward: float
) -> None:
    m, share = groups * p, 0.3  # the formula holds while W is at most F
    work, once = m * (forward + backward), (p - 1) * (forward + backward)
    schedules = ("gpipe", "1f1b", "interleaved:chunks=2", "interleaved:chunks=4", f"zb-h1,weight={share}")
    for recorded in (gpipe, one_f_one_b):
        bubbles = found(trace({(0, 0): uniform(recorded(p, m), forward, backward)}), *schedules)
        assert bubbles.idle_s == pytest.approx(once, abs=1e-9)
        assert bubbles.causes[0].cause == "dependency"
        assert bubbles.causes[0].lost_s == pytest.approx(once, abs=1e-9)
        windows = [row.window_s for row in bubbles.schedules]
        zero_bubble = (p - 1) * (forward + backward - 2 * share * backward)
        expected = [once, once, once / 2, once / 4, zero_bubble]
        assert windows == pytest.approx([work + each for each in expected], abs=1e-9)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_zero_bubble_recording_has_its_own_formula(p: int) -> None:
    m, forward, backward, weight = 2 * p, 1.0, 1.1, 0.9
    bubbles = found(trace({(0, 0): uniform(zb_h1(p, m), forward, backward, weight)}), "zb-h1", "1f1b")
    assert bubbles.idle_s == pytest.approx((p - 1) * (forward + backward - weight), abs=1e-9)
    assert [row.window_s for row in bubbles.schedules] == pytest.approx(
        [bubbles.window_s, (m + p - 1) * (forward + backward + weight)], abs=1e-9
    )
    assert [stage.peak_microbatches for stage in bubbles.by_stage] == [p] * p


def test_the_peak_of_microbatches_is_that_of_the_schedule() -> None:
    p, m = 4, 8
    job = trace({(0, 0): uniform(one_f_one_b(p, m), 1.0, 2.0)})
    bubbles = found(job, "gpipe", "1f1b", "interleaved:chunks=2")
    assert [stage.peak_microbatches for stage in bubbles.by_stage] == [4, 3, 2, 1]
    assert [row.peak_microbatches for row in bubbles.schedules] == [[8] * 4, [4, 3, 2, 1], [5.5, 4.5, 3.5, 2.5]]


@pytest.mark.parametrize(("seed", "name"), list(product(range(4), ORDERS)))
def test_random_pipelines_are_taken_apart_as_by_brute_force(seed: int, name: str) -> None:
    p, m = ((2, 4), (3, 3), (4, 6), (3, 5))[seed]
    lanes = random_lanes(seed, ORDERS[name](p, m))
    bubbles = found(trace(lanes))
    assert bubbles.unknown is None
    for key in ("window", "work"):
        assert getattr(bubbles, f"{key}_s") == pytest.approx(
            mean(getattr(one, key) for one in lanes.values()), rel=1e-9
        )
    assert bubbles.window_s is not None
    assert bubbles.idle_s is not None
    cells = [lane.places() for lane in lanes.values()]
    expected = {key: sum(one.get(key, 0.0) for one in cells) / len(cells) for one in cells for key in one}
    assert {(row.place, row.reason): row.idle_s for row in bubbles.places} == pytest.approx(expected, abs=1e-9)
    assert {row.cause: row.lost_s for row in bubbles.causes} == pytest.approx(causes(lanes), abs=1e-9)
    tolerance = 1e-9 * bubbles.window_s
    assert sum(row.idle_s for row in bubbles.places) == pytest.approx(bubbles.idle_s, abs=tolerance)
    assert sum(row.lost_s for row in bubbles.causes) == pytest.approx(bubbles.idle_s, abs=tolerance)
    for stage in bubbles.by_stage:
        assert sum(row.idle_s for row in stage.places) == pytest.approx(stage.idle_s, abs=tolerance)
        assert stage.work_s + stage.idle_s == pytest.approx(bubbles.window_s, abs=tolerance)


@pytest.mark.parametrize(("seed", "recorded", "asked"), list(product(range(3), ORDERS, ORDERS)))
def test_prices_are_the_windows_of_the_simulated_schedules(seed: int, recorded: str, asked: str) -> None:
    p, m = ((2, 4), (4, 4), (3, 5))[seed]
    lanes = random_lanes(seed, ORDERS[recorded](p, m))
    share = 0.3 if asked == "zb-h1" and recorded != "zb-h1" else None
    row = found(trace(lanes), asked if share is None else f"{asked},weight={share}").schedules[0]
    windows = []
    for lane in lanes.values():
        orders, cost, late = ORDERS[asked](p, m), dict(lane.cost), dict(lane.late)
        for kind, v, k in lane.cost:
            if kind != "B":
                continue
            b, w = ("B", v, k), ("W", v, k)
            if share is not None:
                cost[b], cost[w] = cost[b] * (1 - share), cost[b] * share
                late[w] = late.get(b, 0.0)
            elif asked != "zb-h1" and w in cost:
                cost[b] += cost.pop(w)
                late[b] = (late.get(b, 0.0) + late.pop(w, 0.0)) / 2
        windows.append(Pipeline(orders, cost, lane.wire, late).run().window)
    assert row.window_s == pytest.approx(mean(windows), abs=1e-9)
    assert row.low_s == row.high_s == row.window_s


def test_what_the_last_stage_has_beyond_the_others_stays_at_the_end_of_the_model() -> None:
    """Split in two, stages of 2 s have halves of 1 s, the last one of 3 s has 1 s and 2 s; likewise backwards."""
    orders = one_f_one_b(3, 3)
    cost = {c: (3.0 if c[1] == 2 else 2.0) for order in orders for c in order}
    job = trace({(0, 0): Pipeline(orders, cost, lambda _: 0.0).run()})
    halves = dict.fromkeys(range(6), 1.0) | {5: 2.0}
    row = found(job, "interleaved:chunks=2").schedules[0]
    # Megatron's order: 2 (p - 1 - s) + p forwards first, then one forward and one backward in turn.
    warm = [6, 5, 3]
    forwards = [[("F", v, k) for v in (s, s + 3) for k in range(3)] for s in range(3)]
    backwards = [[("B", v, k) for v in (s + 3, s) for k in range(3)] for s in range(3)]
    orders = []
    for s in range(3):
        stage = forwards[s][: warm[s]]
        for at in range(6):
            stage += [*forwards[s][warm[s] + at : warm[s] + at + 1], backwards[s][at]]
        orders.append(stage)
    assert row.window_s == Pipeline(orders, {c: halves[c[1]] for o in orders for c in o}, lambda _: 0.0).run().window


def test_a_slow_worker_is_blamed_and_a_slow_stage_too() -> None:
    p, m = 4, 8
    orders = one_f_one_b(p, m)

    def lanes(slow: set[tuple[int, int]]) -> dict[tuple[int, int], Pipeline]:
        return {
            (0, d): Pipeline(
                orders, {c: 1.5 if (d, c[1]) in slow else 1.0 for o in orders for c in o}, lambda _: 0.0
            ).run()
            for d in range(4)
        }

    for slow, cause in (({(2, 1)}, "workers"), ({(d, 3) for d in range(4)}, "stages")):
        ranked = [row for row in found(trace(lanes(slow))).causes if row.cause != "dependency"]
        assert ranked[0].cause == cause
        assert ranked[0].lost_s > 0.1
        assert all(abs(row.lost_s) < 1e-9 for row in ranked[1:])


def test_a_gathering_of_parameters_that_ends_last_is_a_collective() -> None:
    """Stage 1 waits 2 s for stage 0, and one more for its parameters: all 3 s are the collective's."""
    lane = uniform(one_f_one_b(2, 2), 2.0, 4.0)
    lane.late = {("F", 1, 0): 1.0}
    rows = lane.run().rows(0, 0, 1)
    rows += [(0, s, 0, s, "params-all-gather", 0, None, 0, 0.0, 3.0 * s) for s in range(2)]
    bubbles = found(_frame(rows, Layout(dp=2, pp=2)))
    first = [row for row in bubbles.by_stage[1].places if row.place == "warm-up"]
    assert [(row.reason, row.waits_for, row.idle_s) for row in first] == [("collective", None, pytest.approx(3.0))]


def test_schedules_that_cannot_run_are_refused_and_the_rest_stands() -> None:
    bubbles = found(trace({(0, 0): uniform(one_f_one_b(4, 6), 1.0, 2.0)}), "interleaved:chunks=2", "gpipe")
    refused, priced = bubbles.schedules
    assert refused.refused is not None
    assert "6 is not a multiple of pp 4" in refused.refused
    assert (refused.window_s, refused.low_s, refused.peak_microbatches) == (None, None, None)
    assert priced.refused is None
    assert priced.window_s == pytest.approx(9 * 3.0)


@pytest.mark.parametrize(
    "text", ["", "dualpipe", "interleaved", "interleaved:chunks=1", "gpipe:chunks=2", "zb-h1,weight=1"]
)
def test_a_schedule_that_does_not_exist_is_named(text: str) -> None:
    with pytest.raises(SelectionError, match="not a schedule; write gpipe, 1f1b, interleaved:chunks=V or zb-h1"):
        found(trace({(0, 0): uniform(one_f_one_b(2, 2), 1.0, 2.0)}), text)


def test_a_backward_that_was_recorded_whole_gives_bounds() -> None:
    row = found(trace({(0, 0): uniform(one_f_one_b(4, 8), 1.0, 2.0)}), "zb-h1").schedules[0]
    assert (row.window_s, row.step_time_s, row.saved_s) == (None, None, None)
    assert row.low_s == pytest.approx(8 * 3 + 3 * (3 - 2 * 1.0))
    assert row.high_s == pytest.approx(8 * 3 + 3 * (3 - 2 * 2 / 3))


def test_steps_of_different_schedules_are_averaged() -> None:
    lanes = {(0, 0): uniform(gpipe(4, 8), 1.0, 2.0), (1, 0): uniform(zb_h1(4, 8), 1.0, 1.0, 1.0)}
    bubbles = found(trace(lanes), "1f1b")
    assert bubbles.idle_s == pytest.approx((3 * 3 + 3 * 1) / 2)
    assert {row.cause: row.lost_s for row in bubbles.causes}["dependency"] == pytest.approx(bubbles.idle_s)
    assert bubbles.schedules[0].window_s == pytest.approx(11 * 3)


#: A V of two stages and one microbatch, forwards of 1 s, backwards of 2 s, transfers of 0.25 s. Stage 0 computes from
#: 0, 3.5, 4.5 and 11 s on, stage 1 from 1.25, 2.25, 6.75 and 8.75 s on, until 13 and 10.75 s.
V = [
    [("F", 0, 0), ("F", 3, 0), ("B", 3, 0), ("B", 0, 0)],
    [("F", 1, 0), ("F", 2, 0), ("B", 2, 0), ("B", 1, 0)],
]


def test_places_of_a_v_shaped_schedule_are_those_worked_out_by_hand() -> None:
    lane = Pipeline(V, {c: 1.0 if c[0] == "F" else 2.0 for order in V for c in order}, lambda _: 0.25).run()
    bubbles = found(trace({(0, 0): lane}, chunks=2), "1f1b", "interleaved:chunks=2")
    assert (bubbles.window_s, bubbles.work_s, bubbles.idle_s, bubbles.unknown) == (13.0, 6.0, 7.0, None)
    places = [{(row.place, row.reason, row.waits_for): row.idle_s for row in one.places} for one in bubbles.by_stage]
    assert places == [
        {("between", "peer", 1): 2.25 + 4.25, ("between", "transfer", 1): 0.5},
        {
            ("warm-up", "peer", 0): 1.0,
            ("warm-up", "transfer", 0): 0.25,
            ("between", "peer", 0): 3.25,
            ("between", "transfer", 0): 0.25,
            ("drain", "peer", 0): 2.25,
        },
    ]
    assert bubbles.causes == []
    assert "V-shaped" in str(bubbles.causes_unknown)
    assert [row.refused for row in bubbles.schedules] == [bubbles.causes_unknown] * 2


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 3), (4, 8)])
def test_random_v_shaped_pipelines_are_replayed_and_their_places_are_those_of_brute_force(p: int, m: int) -> None:
    lanes = random_lanes(p, v_shaped(p, m))
    ops = trace(lanes, chunks=2).ops
    for off_s in (0.0, 5.0):
        clocks = ops.with_columns(start=pl.col("start") + off_s * pl.col("pp_rank"))
        replay = JobReplay.from_trace(Trace.from_frame(clocks, Layout(dp=3, pp=p, vpp=2), name="sim"))
        assert step_times(replay, ()) == pytest.approx(replay.recorded_step_times(), rel=1e-12)
        bubbles = find_bubbles(replay)
        cells = [lane.places() for lane in lanes.values()]
        expected = {key: sum(one.get(key, 0.0) for one in cells) / len(cells) for one in cells for key in one}
        assert {(row.place, row.reason): row.idle_s for row in bubbles.places} == pytest.approx(expected, abs=1e-9)
        assert sum(row.idle_s for row in bubbles.places) == pytest.approx(bubbles.idle_s, abs=1e-12)


def test_computes_that_overlap_have_no_idle_time() -> None:
    lane = uniform(one_f_one_b(2, 4), 1.0, 2.0)
    lane.end["B", 0, 1] += 0.5
    bubbles = found(trace({(0, 0): lane}))
    assert bubbles.unknown is not None
    assert "overlap" in bubbles.unknown
    assert (bubbles.window_s, bubbles.places, bubbles.causes) == (None, [], [])


def test_weight_gradients_that_take_no_time_overlap_nothing() -> None:
    bubbles = found(trace({(0, 0): uniform(zb_h1(4, 8), 1.0, 2.0, 0.0)}), "1f1b")
    assert bubbles.idle_s == pytest.approx(3 * 3)
    assert [stage.peak_microbatches for stage in bubbles.by_stage] == [4, 4, 4, 4]
    assert bubbles.schedules[0].window_s == pytest.approx(11 * 3)


def test_a_step_that_was_cut_is_left_out() -> None:
    lane = uniform(one_f_one_b(3, 4), 1.0, 2.0)
    rows = [row for step in range(3) for row in lane.rows(step, 0, 1) if step < 2 or row[8] < lane.window / 2]
    bubbles = found(_frame(rows, Layout(pp=3)))
    assert [(one.step, one.dp_rank) for one in bubbles.left_out] == [(2, 0)]
    assert bubbles.idle_s == pytest.approx(2 * 3)


def test_steps_without_some_weight_gradients_are_left_out() -> None:
    """One of each stage, or of the second alone."""
    lane = uniform(zb_h1(3, 4), 1.0, 2.0, 1.0)
    rows = [row for step in range(3) for row in lane.rows(step, 0, 1)]
    without = [row for row in rows if row[4] != "backward-weight" or row[6] != 3]
    bubbles = found(_frame(without, Layout(pp=3)))
    assert bubbles.unknown == "no step has all computes of every microbatch on all stages"
    assert bubbles_sentence(bubbles) == f"unknown: {bubbles.unknown}"
    assert [one.step for one in bubbles.left_out] == [0, 1, 2]
    one_stage = [row for row in rows if row[4] != "backward-weight" or row[6] != 3 or row[3] != 1]
    assert [one.step for one in found(_frame(one_stage, Layout(pp=3))).left_out] == [0, 1, 2]


def test_one_stage_is_no_pipeline_to_interleave() -> None:
    bubbles = found(trace({(0, 0): uniform(one_f_one_b(1, 4), 1.0, 2.0)}), "interleaved:chunks=2", "gpipe")
    assert bubbles.idle_s == pytest.approx(0.0, abs=1e-12)
    assert bubbles.schedules[0].refused is not None
    assert bubbles.schedules[1].window_s == pytest.approx(12.0)


def _frame(rows: list[tuple[object, ...]], layout: Layout) -> Trace:
    return Trace.from_frame(pl.DataFrame(rows, list(SCHEMA), orient="row"), layout, name="sim")
