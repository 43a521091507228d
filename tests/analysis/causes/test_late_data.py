"""Data that is late: by milliseconds where steps take seconds, by a share of the step where they take milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import polars as pl
import pytest

import tracekit
from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.report.finding import Place
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

STEPS = 10


def job(loads_s: Sequence[Sequence[float]], computes_s: float):
    """What is found in a job of which each DP rank loads data for so long in each step."""

    def lane(mine_s: float, longest_s: float):
        done = mine_s + computes_s
        return (
            (0, "data-load", 0, None, 0.0, mine_s),
            (0, "forward-compute", 0, 0, mine_s, mine_s + computes_s / 3),
            (0, "backward-compute", 0, 0, mine_s + computes_s / 3, done),
            (0, "all-reduce", 0, None, done, longest_s + computes_s + 0.001),
        )

    parts = [
        frame({rank: lane(mine_s, max(of_step)) for rank, mine_s in enumerate(of_step)}, [step])
        for step, of_step in enumerate(zip(*loads_s, strict=True))
    ]
    ranks = len(loads_s)
    return found_in(Trace.from_frame(pl.concat(parts), Layout(dp=ranks, pp=1, world_size=ranks), name="by hand"))


def loading(usual_s: float, late_s: float, computes_s: float):
    """What is found in a job of two DP ranks, the second of which loads data for longer."""
    return job([[usual_s] * STEPS, [late_s] * STEPS], computes_s)


def late_in(late: Mapping[int, Collection[int]], ranks: int, usual_s: float = 0.001):
    """The cause found where these ranks load data for 0.5 s in these steps, all others for `usual_s`."""
    loads_s = [[0.5 if step in late.get(rank, ()) else usual_s for step in range(STEPS)] for rank in range(ranks)]
    (cause,) = job(loads_s, 1.5)
    assert cause.kind == "late-data-loading"
    return cause


@pytest.mark.parametrize(
    ("late_s", "computes_s", "found"),
    [(0.004, 0.020, True), (0.001, 0.030, False), (0.012, 0.300, True), (0.004, 0.500, False)],
)
def test_recorded_loading_is_late_from_5_ms_or_a_twentieth_of_the_step_on(late_s, computes_s, found):
    """Of steps of 25, 32, 313 and 505 ms; where it is late, going without it saves it all."""
    late = [one for one in loading(0.0003, late_s, computes_s) if one.kind == "late-data-loading"]
    assert [one.where for one in late] == [Place(dp_ranks=(1,))] * found
    assert [one.saved_s for one in late] == [pytest.approx(late_s - 0.0003)] * found


@pytest.mark.parametrize("usual_s", [0.001, 0.02])
@pytest.mark.parametrize(
    ("late", "ranks"),
    [
        ({1: (2, 3, 8)}, 2),
        ({3: (1, 5, 8)}, 8),
        ({0: range(STEPS), 2: range(STEPS)}, 4),
        ({1: range(9), 0: (9,)}, 2),
    ],
)
def test_ranks_that_are_late_more_often_than_chance_makes_them_are_named(late, ranks, usual_s):
    """However few steps they are late in, and however long all ranks load data anyway, which no price includes."""
    most = tuple(rank for rank, steps in sorted(late.items()) if len(steps) > 1)
    cause = late_in(late, ranks, usual_s)
    assert cause.where == Place(dp_ranks=most)
    steps = {step for rank in most for step in late[rank]}
    assert cause.saved_s == pytest.approx((0.5 - usual_s) * len(steps) / STEPS)


@pytest.mark.parametrize(
    ("late", "ranks"), [({0: range(6), 1: range(6, 10)}, 2), ({0: (0, 5), 1: (1, 7, 8), 2: (2, 6), 3: (3, 4, 9)}, 4)]
)
def test_data_that_is_late_on_changing_ranks_is_late_on_all(late, ranks):
    """Half a second in each of ten steps, on one rank or another: nobody's loader is worse than the others'."""
    cause = late_in(late, ranks)
    assert cause.where == Place()
    assert cause.saved_s == pytest.approx(0.5 - 0.001)


@pytest.mark.parametrize("busy", [range(STEPS), (3, 6, 9)])
def test_ranks_that_seem_to_wait_for_data_as_long_as_one_works_may_wait_for_that_rank(busy):
    """Rank 0 works for 0.3 s, and nobody computes before; neither loading nor a barrier was recorded."""

    def lane(rank: int, work_s: float):
        work = ((0, "host-delay", 0, None, 0.0, work_s),) if work_s and rank == 0 else ()
        return (
            *work,
            (0, "forward-compute", 0, 0, work_s, work_s + 0.2),
            (0, "backward-compute", 0, 0, work_s + 0.2, work_s + 0.6),
            (0, "all-reduce", 0, None, work_s + 0.6, work_s + 0.61),
        )

    parts = [frame({rank: lane(rank, 0.3 * (step in busy)) for rank in range(4)}, [step]) for step in range(STEPS)]
    trace = Trace.from_frame(pl.concat(parts), Layout(dp=4, pp=1, world_size=4), name="by hand")
    assert not tracekit.job_of(trace).whatif().trust.trustworthy
