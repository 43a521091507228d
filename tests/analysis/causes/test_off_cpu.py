"""Processes that are stopped, as the kernel counted it. Two DP ranks; the second is longer in four of twenty steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.report.finding import Place
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker
from tracekit.trace.schema import OFF_CPU

STEPS, STOPPED = 20, (3, 8, 9, 15)
FORWARD_S, BACKWARD_S, HOST_S, STOP_S = 0.1, 0.2, 0.001, 0.06
RANK_0, RANK_1 = (Place(workers=(Worker(rank, 0),)) for rank in range(2))


def lane(
    host_s: float, forward_s: float, backward_s: float, last_s: float, reduces_s: float = 0.01, late_s: float = 0.0
):
    done = host_s + forward_s + backward_s
    return (
        (0, "host-delay", 0, None, 0.0, host_s),
        (0, "forward-compute", 0, 0, host_s, host_s + forward_s),
        (0, "backward-compute", 0, 0, host_s + forward_s, done),
        (0, "all-reduce", 0, None, done, last_s + reduces_s),
        (0, "optimizer", 0, None, last_s + reduces_s + late_s, last_s + reduces_s + late_s + 0.01),
    )


def causes(*args, **kwargs):
    """What is found in `stopped_now_and_then`."""
    return found_in(stopped_now_and_then(*args, **kwargs))


def stopped_now_and_then(
    in_host=0.0,
    in_forward=0.0,
    *,
    off_cpu=(0.0, STOP_S),
    steps=STOPPED,
    in_backward=(),
    host_only=(),
    always_s=0.0,
    in_reduction=0.0,
    late_s=0.0,
    of_rank_0=0.0,
):
    """Rank 1 takes so much longer in some steps, and the kernel says that of each rank for them.

    `in_backward`: those of them in which it is the backward that takes longer, and not the forward. `host_only`: steps
    in which that is the host code instead. `in_reduction`: by how much the reduction of both lasts longer in steps 5
    and 11. `late_s`: how much later rank 1's optimizer begins in step 12. `of_rank_0`: how long rank 0 is off the CPU
    in the forwards of steps 1, 6, 12 and 17.
    """
    parts, every = [], (in_host, in_forward)
    for step in range(STEPS):
        hit = step in steps
        in_host, in_forward = every[::-1] if step in host_only else every
        noise_s = of_rank_0 * (step in (1, 6, 12, 17))
        last_s = HOST_S + FORWARD_S + BACKWARD_S + max(hit * (in_host + in_forward), noise_s)
        reduces_s = 0.01 + (step in (5, 11)) * in_reduction
        lanes = {
            0: lane(HOST_S, FORWARD_S + noise_s, BACKWARD_S, last_s, reduces_s),
            1: lane(
                HOST_S + hit * in_host,
                FORWARD_S + (hit and step not in in_backward) * in_forward,
                BACKWARD_S + (hit and step in in_backward) * in_forward,
                last_s,
                reduces_s,
                (step == 12) * late_s,
            ),
        }
        off_s = always_s + noise_s + hit * off_cpu[0], always_s + hit * off_cpu[1]
        counted = pl.DataFrame({"dp_rank": [0, 1], OFF_CPU: [[seconds] for seconds in off_s]})
        ops = frame(lanes, [step]).join(counted, on="dp_rank", how="left", maintain_order="left")
        first = pl.int_range(pl.len()).over("dp_rank") == 0
        parts.append(ops.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU)))
    return Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="by hand")


def cost_of_stops(steps):
    """Of a mean step, in seconds, if STOP_S are lost in so many. Which ops were hit is unknown: its optimizer, which
    comes after the reduction, has a share.
    """
    before_s = HOST_S + FORWARD_S + STOP_S + BACKWARD_S
    return STOP_S * steps / STEPS * before_s / (before_s + 0.01)


def test_a_worker_whose_computes_last_longer_while_it_is_off_the_cpu_is_stopped():
    """60 ms in four of twenty steps: 12 ms of each."""
    (cause,) = causes(in_forward=STOP_S)
    assert (cause.kind, cause.where) == ("process-pauses", RANK_1)
    assert cause.saved_s == pytest.approx(cost_of_stops(4))


def test_a_slow_worker_is_named_beside_stops_that_do_not_explain_it():
    """Its forwards take twice as long in every step; in four of twenty, it is stopped for 60 ms as well."""
    trace = stopped_now_and_then(in_forward=STOP_S)
    slow = (pl.col("kind").cast(pl.String) == "forward-compute") & (pl.col("dp_rank") == 1)
    ops = trace.ops.with_columns(duration=pl.col("duration") + pl.when(slow).then(FORWARD_S).otherwise(0.0))
    kinds = {cause.kind for cause in found_in(replace(trace, ops=ops)) if cause.where == RANK_1}
    assert kinds == {"bad-worker", "process-pauses"}


def test_what_keeps_all_ranks_off_the_cpu_in_one_step_stops_none():
    """Rank 1 is off the CPU in three steps; in one of them, so is rank 0, as where both load libraries."""
    trace = stopped_now_and_then(in_forward=0.1, off_cpu=(0.0, 0.1), steps=(0, 8, 15))
    both = pl.when(pl.col("step") == 0, pl.col(OFF_CPU).is_not_null()).then(pl.lit([0.1])).otherwise(OFF_CPU)
    assert "process-pauses" in {cause.kind for cause in found_in(trace)}
    found = found_in(replace(trace, ops=trace.ops.with_columns(both.alias(OFF_CPU))))
    assert "process-pauses" not in {cause.kind for cause in found}


@pytest.mark.parametrize(("longest_s", "named"), [(0.1, False), (0.05, True)])
def test_short_stops_beside_much_longer_ones_of_another_are_noise(longest_s, named):
    """Rank 0 is off the CPU for 40 ms in four steps, rank 1 twice for 100 ms, or for 50 ms."""
    found = causes(in_forward=longest_s, off_cpu=(0.0, longest_s), steps=(8, 15), of_rank_0=0.04)
    assert [cause.where for cause in found if cause.kind == "process-pauses"] == [RANK_0] * named


def test_what_a_thread_waits_for_between_its_computes_is_host_code():
    (cause,) = causes(in_host=STOP_S)
    assert (cause.kind, cause.where) == ("slow-host-code", RANK_1)


def test_waits_in_host_code_are_no_stops_where_computes_happen_to_be_a_little_longer():
    """60 ms in every other step, in which the forward takes 16 ms longer, too."""
    found = causes(in_host=STOP_S, in_forward=0.016, steps=range(0, STEPS, 2))
    assert "process-pauses" not in {cause.kind for cause in found}


def test_computes_that_last_longer_on_the_cpu_are_no_stops():
    found = causes(in_forward=STOP_S, off_cpu=(0.0, 0.0))
    assert "process-pauses" not in {cause.kind for cause in found}


def test_what_others_are_off_the_cpu_now_and_then_is_no_stop():
    found = causes(in_forward=STOP_S, off_cpu=(STOP_S, STOP_S))
    assert "process-pauses" not in {cause.kind for cause in found}


@pytest.mark.parametrize("steps", [range(STEPS), range(8, STEPS), range(6, 13)])
def test_code_that_sleeps_in_every_step_of_a_stretch_is_no_stop(steps):
    found = causes(in_forward=STOP_S, steps=steps)
    assert [cause.where for cause in found if cause.kind == "bad-worker"] == [RANK_1]
    assert "process-pauses" not in {cause.kind for cause in found}


def test_stops_of_a_stretch_are_now_in_forwards_and_now_in_backwards():
    """As where they come as often as the steps do; code that sleeps does so at one place."""
    (cause,) = causes(in_forward=STOP_S, steps=range(6, 13), in_backward=(7, 10, 12))
    assert (cause.kind, cause.where) == ("process-pauses", RANK_1)
    assert cause.saved_s == pytest.approx(cost_of_stops(7))


def test_threads_that_wait_for_a_device_are_not_stopped():
    """Both are off the CPU for a third of their computes in every step, rank 1 for 200 ms more in four."""
    found = causes(in_forward=0.2, off_cpu=(0.0, 0.2), always_s=FORWARD_S)
    assert "process-pauses" not in {cause.kind for cause in found}


def test_being_off_the_cpu_costs_nothing_where_computes_are_no_longer():
    assert not any(cause.change for cause in causes())


def sleeps_and_stops(sleeps, stops, *, steps=200, sleep_s=0.02, stop_s=0.07):
    """A job of short steps: rank 1's code sleeps before its loss in `sleeps`, its process is stopped in a forward in
    `stops`. After a sleep, its forward is half a millisecond longer: caches are cold.
    """
    parts = []
    for step in range(steps):
        sleep, stop = (step in sleeps) * sleep_s, (step in stops) * stop_s
        forwards = (0.001, 0.001 + stop + (step in sleeps) * 0.0005)
        last_s = forwards[1] + sleep + 0.002
        lanes = {
            dp_rank: (
                (0, "forward-compute", 0, 0, 0.0, forward_s),
                (0, "loss", 0, None, forward_s, forward_s + late_s),
                (0, "backward-compute", 0, 0, forward_s + late_s, forward_s + late_s + 0.002),
                (0, "all-reduce", 0, None, forward_s + late_s + 0.002, last_s + 0.0002),
                (0, "optimizer", 0, None, last_s + 0.0002, last_s + 0.0004),
            )
            for dp_rank, (forward_s, late_s) in enumerate(zip(forwards, (1e-5, 1e-5 + sleep), strict=True))
        }
        counted = pl.DataFrame({"dp_rank": [0, 1], OFF_CPU: [[1e-5], [1e-5 + sleep + stop]]})
        ops = frame(lanes, [step]).join(counted, on="dp_rank", how="left", maintain_order="left")
        first = pl.int_range(pl.len()).over("dp_rank") == 0
        parts.append(ops.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU)))
    return Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="by hand")


@pytest.mark.parametrize("every", [(range(56, 200),), (range(100), range(156, 200))], ids=["one-stretch", "two"])
@pytest.mark.parametrize("long_s", [0.07, 0.1])
def test_stops_beside_host_code_that_sleeps_cost_no_more_than_they_last(every, long_s):
    """20 ms in 72 % of 200 steps are 14.4 ms of each; four stops of 70 ms are 1.4 ms, whatever else is off the CPU."""
    sleeps = {step for stretch in every for step in stretch}
    found = found_in(sleeps_and_stops(sleeps, (20, 91, 143, 178), stop_s=long_s))
    costs = {cause.kind: cause.saved_s for cause in found}
    assert costs.pop("slow-host-code") == pytest.approx(0.0144, rel=0.05)
    assert costs.pop("process-pauses", 0.0) <= 4 * (long_s + 0.0005) / 200
    assert not costs


def test_host_code_that_sleeps_in_any_of_the_steps_costs_all_of_its_sleep():
    """20 ms in 150 of 200 steps, drawn at random; a little more goes, because forwards after a sleep are longer."""
    sleeps = set(np.random.default_rng(0).permutation(200)[:150].tolist())
    (cause,) = (one for one in found_in(sleeps_and_stops(sleeps, ())) if one.kind == "slow-host-code")
    assert cause.saved_s == pytest.approx(0.015, rel=0.03)
