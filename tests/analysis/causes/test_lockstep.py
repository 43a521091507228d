"""A slow rank inside a worker: who waited for whom tells, on jobs written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from judges.eventsim.causes import ALWAYS, SlowRank, SlowWorkers, When
from judges.eventsim.model import FIRST_STEP, Shape
from judges.eventsim.truth import mean_step_s
from tests.analysis.causes import simulated
from tests.handmade import LAYOUT, SLOW_LANE, WAITING_LANE, frame, healthy_frame, slow_frame
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import TraceError
from tracekit.report.report import Report
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

STEPS = 12
COMPUTES = ("forward-compute", "backward-compute")
#: The ranks of each worker, by the rank that stands for it; rank 1 stands for worker (1,0).
RANKS = {"0": [0, 4], "1": [1, 5], "2": [2, 6], "3": [3, 7]}
#: Seconds that (the rank that stands for the worker, the other one) waited inside an op.
Waits = Callable[[dict[str, float]], tuple[float, float]]


def trace(ops: pl.DataFrame, waits: Waits, **metadata: object) -> Trace:
    waited = [list(waits(op)) if op["kind"] in COMPUTES else None for op in ops.iter_rows(named=True)]
    metadata = {"ranks_of_workers": RANKS, "hosts": {str(rank): f"node-{rank // 4}" for rank in range(8)}, **metadata}
    layout = replace(LAYOUT, tp=2, world_size=8)
    return Trace.from_frame(ops.with_columns(waited=pl.Series(waited)), layout, name="lockstep", metadata=metadata)


def report(ops: pl.DataFrame, waits: Waits, **metadata: object) -> Report:
    return PipelineJob(trace(ops, waits, **metadata)).whatif()


def halves(op: dict[str, float]) -> tuple[float, float]:
    """The other rank of worker (1,0) computes twice as long as the one that stands for it."""
    return (op["duration"] / 2, 0.0) if (op["dp_rank"], op["pp_rank"]) == (1, 0) else (0.0, 0.0)


def in_turn() -> Waits:
    """Half of the computes wait 20 % for the one rank, half for the other."""
    random = np.random.default_rng(1)

    def waits(op: dict[str, float]) -> tuple[float, float]:
        wait = 0.2 * op["duration"]
        return (wait, 0.0) if random.integers(2) else (0.0, wait)

    return waits


def of_one_worker(rows: list[tuple[object, ...]]) -> Report:
    """The report on a worker of two ranks. A row: step, kind, start, duration and, by rank, waited, lasted, off_cpu."""
    names = ("step", "kind", "start", "duration", "waited", "lasted", "off_cpu")[: len(rows[0])]
    ops = pl.DataFrame(rows, names, orient="row").with_columns(rank=0, dp_rank=0, pp_rank=0, seq=0)
    metadata = {"ranks_of_workers": {"0": [0, 1]}}
    return PipelineJob(Trace.from_frame(ops, Layout(dp=1, pp=1, tp=2), name="two", metadata=metadata)).whatif()


def stopped(steps: tuple[int, ...] = (1, 2, 5, 8)) -> Report:
    """In these steps a forward of 10 ms takes 16: rank 1 does not run for 6 of them, and rank 0 waits for it."""
    rows = []
    for step in range(STEPS):
        stop_s = 0.006 * (step in steps)
        forward, backward = [0.010 + stop_s] * 2, [0.020] * 2
        rows += [
            (step, "forward-compute", 0.0, forward[0], [stop_s, 0.0], forward, [0.0, stop_s]),
            (step, "backward-compute", forward[0], backward[0], [0.0, 0.0], backward, None),
        ]
    return of_one_worker(rows)


def test_the_rank_that_the_others_wait_for_is_named_and_priced() -> None:
    """At its peer's speed worker (1,0) is as fast as (0,0): the step takes 11.25 s instead of 15.5 s."""
    found = report(slow_frame(range(STEPS)), halves)
    cause = found.findings[0]
    assert (cause.kind, cause.where.ranks) == ("slow-rank-of-worker", (5,))
    assert cause.saved_s == pytest.approx(4.25)
    assert not [other for other in found.findings[1:] if other.priced]
    (culprit,) = found.answer.culprits
    assert (culprit.rank, culprit.dp_rank, culprit.pp_rank, culprit.host) == (5, 1, 0, "node-1")
    fix = next(fix for fix in found.fixes if fix.cause == "slow-rank-of-worker")
    assert fix.saved_s == pytest.approx(4.25)


def test_a_worker_all_of_whose_ranks_are_slow_is_one_slow_worker() -> None:
    """Named by the rank that was recorded: who waited for whom says that it is no other."""
    found = report(frame({0: SLOW_LANE, 1: WAITING_LANE}, range(STEPS)), lambda _: (0.0, 0.0))
    assert [cause.kind for cause in found.findings] == ["bad-worker"]
    assert [(culprit.rank, culprit.host) for culprit in found.answer.culprits] == [(0, "node-0")]


def test_a_slow_rank_in_every_worker_shows_though_no_worker_is_slower_than_another() -> None:
    """All workers wait half of their computes for one rank each, so that they look alike from outside."""
    found = report(healthy_frame(range(STEPS)), lambda op: (op["duration"] / 2, 0.0))
    causes = [cause for cause in found.findings if cause.priced]
    assert {cause.kind for cause in causes} == {"slow-rank-of-worker"}
    assert sorted(rank for cause in causes for rank in cause.where.ranks) == [4, 5, 6, 7]


def test_a_rank_slow_from_a_step_on_is_named_with_that_step() -> None:
    found = report(slow_frame(range(STEPS)), lambda op: halves(op) if op["step"] >= 5 else (0.0, 0.0))
    cause = next(cause for cause in found.findings if cause.kind == "slow-rank-of-worker")
    assert (cause.where.ranks, cause.since_step) == ((5,), 5)


@pytest.mark.parametrize("when", [ALWAYS, When(since=5)], ids=["always", "since"])
def test_a_slow_rank_that_the_independent_simulator_makes(when: When) -> None:
    """Eight ranks a worker that meet eight times in each compute, with noise of their own; truth is the job without."""
    slow = SlowRank((1, 2), position=3, factor=1.5, when=when)
    shape = Shape(dp=2, pp=4, tp=8, microbatches=8, steps=10)
    of = simulated.job(slow, shape=shape, noise=replace(simulated.QUIET, rank=0.01))
    (cause,) = simulated.named(of)
    assert (cause.kind, cause.where.ranks) == ("slow-rank-of-worker", (slow.rank(of),))
    assert cause.since_step == (None if when is ALWAYS else FIRST_STEP + 5)
    assert cause.saved_s == pytest.approx(simulated.costs(of, slow), rel=0.02)


def test_a_slow_rank_on_one_stage_and_a_slow_worker_on_the_other_are_not_a_dp_rank_with_more_data() -> None:
    """Both stages of DP rank 3 compute slower by one factor, one because of one of its ranks."""
    rank, worker = SlowRank((3, 0), position=2, factor=1.5), SlowWorkers(frozenset({(3, 1)}), 1.46)
    shape = Shape(dp=4, pp=2, tp=8, microbatches=16, steps=8)
    of = simulated.job(rank, worker, shape=shape, noise=replace(simulated.QUIET, rank=0.01))
    found = {cause.kind: cause for cause in simulated.named(of)}
    assert set(found) == {"slow-rank-of-worker", "bad-worker"}
    assert found["slow-rank-of-worker"].where.ranks == (rank.rank(of),)
    assert [(cell.dp_rank, cell.pp_rank) for cell in found["bad-worker"].where.workers] == [(3, 1)]
    for cause, kind in ((rank, "slow-rank-of-worker"), (worker, "bad-worker")):
        assert found[kind].saved_s == pytest.approx(simulated.costs(of, cause), abs=0.005 * mean_step_s(of))


@pytest.mark.parametrize("second", [1.0, 1e-3])
def test_ranks_that_are_last_in_turn_are_blamed_for_nothing_but_their_waiting_counts(second: float) -> None:
    """Half of the computes wait 20 % for the one rank, half for the other: alike, each would take 10 % less."""
    found = report(healthy_frame(range(STEPS)).with_columns(pl.col("start", "duration") * second), in_turn())
    (cause,) = found.findings
    assert cause.kind == "lockstep-jitter"
    assert not cause.where.ranks
    assert not found.answer.culprits
    # The critical path of a step: both computes of stage 0, and what of stage 1 nothing hides.
    computes_s = sum(row.recorded_s for row in found.critical_path if row.kind in COMPUTES)
    assert cause.saved_s == pytest.approx(0.1 * computes_s)


def test_nothing_is_said_of_ranks_that_nobody_compared_but_that() -> None:
    ops = healthy_frame(range(STEPS))
    layout = replace(LAYOUT, tp=2, world_size=8)
    found = PipelineJob(Trace.from_frame(ops, layout, name="one rank each")).whatif()
    assert [cause.kind for cause in found.findings] == ["healthy"]
    assert "one rank in 2 recorded, standing for its worker" in found.answer.trust
    compared = report(ops, lambda _: (0.0, 0.0))
    assert "ranks of a worker" not in compared.answer.trust


def test_ranks_without_a_number_are_named_by_their_place() -> None:
    found = report(slow_frame(range(STEPS)), halves, ranks_of_workers={"1": "five"})
    cause = found.findings[0]
    assert (cause.kind, [str(worker) for worker in cause.where.workers]) == ("slow-rank-of-worker", ["(1,0)"])


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("optimizer", "slow-optimizer"),
        ("host-delay", "slow-host-code"),
        ("data-load", "late-data-loading"),
        ("gc", "python-gc"),
    ],
)
def test_a_rank_that_is_late_for_the_others_is_named_with_the_part_that_is_slow(kind: str, cause: str) -> None:
    """Rank 1 takes 5 ms for a part that takes rank 0 3 ms (2 instead of none to collect garbage). Rank 0 then
    waits for it, for 2 ms of its forward's 10.
    """
    parts = ((kind, 0, 3, None), ("forward-compute", 3, 10, [0.002, 0.0]), ("backward-compute", 13, 20, None))
    if kind == "optimizer":  # at the end of the step
        parts = (
            ("optimizer", 30, 3, None),
            ("forward-compute", 0, 10, [0.002, 0.0]),
            ("backward-compute", 10, 20, None),
        )
    lasted = ([0.003, 0.005], [0.010, 0.008], [0.020, 0.020])
    if kind == "gc":  # rank 0 collects nothing
        parts, lasted = ((kind, 3, 0, None), *parts[1:]), ([0.0, 0.002], *lasted[1:])
    found = of_one_worker(
        [
            (step, name, start / 1e3, took / 1e3, waited, of_ranks)
            for step in range(STEPS)
            for (name, start, took, waited), of_ranks in zip(parts, lasted, strict=True)
        ]
    )
    (named,) = [one for one in found.findings if one.priced and one.where.ranks]
    assert (named.kind, named.where.ranks) == (cause, (1,))
    assert named.saved_s == pytest.approx(0.002)
    plans = [fix for fix in found.fixes if fix.cause == "python-gc"]
    assert [fix.details["pause_s"] for fix in plans] == ([pytest.approx(0.002)] if kind == "gc" else [])


def test_a_rank_slow_in_forwards_is_named_however_its_backwards_vary() -> None:
    """Rank 1 computes 6 ms more in a forward of 20 ms. In backwards of 40 ms the ranks wait for each other in turn, for
    8 ms on average.
    """
    drawn, rows = np.random.default_rng(5), []
    for step in range(24):
        forward, backward = 0.02 + drawn.normal(0, 0.001), 0.04
        late = float(np.clip(drawn.normal(0, 0.01), -0.03, 0.03))
        waits = [max(late, 0.0), max(-late, 0.0)]
        rows += [
            (step, "forward-compute", 0.0, forward, [0.006, 0.0], [forward] * 2),
            (step, "backward-compute", forward, backward, waits, [backward] * 2),
        ]
    (named,) = [one for one in of_one_worker(rows).findings if one.where.ranks]
    assert (named.kind, named.where.ranks) == ("slow-rank-of-worker", (1,))


def test_a_rank_that_is_stopped_is_named_with_what_the_others_wait_for_it() -> None:
    (named,) = [one for one in stopped().findings if one.priced]
    assert (named.kind, named.where.ranks) == ("process-pauses", (1,))
    assert named.saved_s == pytest.approx(0.006 * 4 / STEPS)


@pytest.mark.parametrize(
    ("waited", "says"),
    [
        ([0.1], "expected one number for each of the 2 ranks of a worker (tp 2 x cp 1), or null"),
        ([0.1, -0.1], "expected finite seconds >= 0"),
        ([0.1, float("nan")], "expected finite seconds >= 0"),
        ([0.1, None], "expected finite seconds >= 0"),
        ("long", "expected lists of numbers"),
    ],
)
def test_waits_that_cannot_be(waited: object, says: str) -> None:
    ops = slow_frame([0]).with_columns(
        waited=pl.lit(waited, allow_object=False) if waited == "long" else pl.lit(waited)
    )
    with pytest.raises(TraceError) as caught:
        Trace.from_frame(ops, replace(LAYOUT, tp=2, world_size=8), name="odd")
    assert says in str(caught.value)


def test_waits_are_in_the_unit_of_the_durations() -> None:
    ops = slow_frame(range(3))
    times = [(pl.col(name) * 1e3).alias(name) for name in ("start", "duration")]
    waited = pl.concat_list(pl.col("duration") * 500, pl.lit(0.0)).alias("waited")
    read = Trace.from_frame(ops.with_columns(waited, *times), replace(LAYOUT, tp=2, world_size=8), name="ms", unit="ms")
    assert read.ops["waited"].list.get(0).to_numpy() == pytest.approx(ops["duration"].to_numpy() / 2)
