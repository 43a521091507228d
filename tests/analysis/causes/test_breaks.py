"""What stands still before some steps without being recorded: a job whose every time was worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.report.finding import Place
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

#: Seconds: a step of 5.25 and the time a rank stands still before some of them.
GATHER_S, FORWARD_S, BACKWARD_S, REDUCE_S = 0.25, 1.5, 3.0, 0.5
STEP_S = GATHER_S + FORWARD_S + BACKWARD_S + REDUCE_S
STOP_S = 2.0


def lane(late_s: float, others_s: float, *, gathered: bool):
    """A rank's step. `others_s`: how late the last rank is; `gathered`: parameters are gathered meanwhile."""
    begin = 0.0 if gathered else late_s
    gathered_s = GATHER_S if gathered else others_s + GATHER_S
    computes_s = max(late_s, gathered_s) if gathered else gathered_s
    done = computes_s + FORWARD_S + BACKWARD_S
    last_s = max(others_s, gathered_s) + FORWARD_S + BACKWARD_S
    return (
        (0, "params-all-gather", 0, None, begin, gathered_s),
        (0, "forward-compute", 0, 0, computes_s, computes_s + FORWARD_S),
        (0, "backward-compute", 0, 0, computes_s + FORWARD_S, done),
        (0, "grads-reduce-scatter", 0, None, done, last_s + REDUCE_S),
    )


def named(late: dict[int, tuple[int, ...]], steps: int = 12, *, gathered: bool = False):
    """What is found where these ranks of two stand still before these steps."""
    parts = []
    for step in range(steps):
        late_s = [STOP_S * (step in late.get(rank, ())) for rank in range(2)]
        lanes = {rank: lane(late_s[rank], max(late_s), gathered=gathered) for rank in range(2)}
        parts.append(frame(lanes, [step]))
    (cause,) = found_in(Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="by hand"))
    return cause


def test_a_first_rank_that_stands_still_every_few_steps_writes_for_all():
    """Two seconds in every third of twelve steps."""
    cause = named({0: (1, 4, 7, 10)})
    assert (cause.kind, cause.where) == ("checkpoint-stalls", Place())
    assert cause.saved_s == pytest.approx(STOP_S / 3)
    assert cause.when == "every 3 steps"


@pytest.mark.parametrize("late", [{1: (1, 4, 7, 10)}, {0: (1, 4, 6, 11)}])
def test_another_rank_or_irregular_steps_are_late_data(late):
    cause = named(late)
    assert (cause.kind, cause.where) == ("late-data-loading", Place(dp_ranks=tuple(late)))
    assert cause.saved_s == pytest.approx(STOP_S / 3)


@pytest.mark.parametrize("steps", [(2, 5, 8, 11), (4,)])
def test_a_checkpoint_while_parameters_are_gathered_stops_all_ranks(steps):
    """Their first forwards come 2 s after the step has begun, not 0.25 s: 1.75 s in each third step, or in one."""
    cause = named({0: steps, 1: steps}, gathered=True)
    assert (cause.kind, cause.where) == ("checkpoint-stalls", Place())
    assert cause.saved_s == pytest.approx((STOP_S - GATHER_S) * len(steps) / 12)


@pytest.mark.parametrize("steps", [12, 13])
def test_a_checkpoint_before_every_other_step_is_no_usual_step(steps):
    """Six of twelve steps, or seven of thirteen."""
    late = tuple(range(0, steps, 2))
    cause = named({0: late, 1: late}, steps)
    assert (cause.kind, cause.where) == ("checkpoint-stalls", Place())
    assert cause.saved_s == pytest.approx(STOP_S * len(late) / steps)


def test_host_code_of_a_rank_is_priced_without_the_breaks_of_another():
    """Rank 1 needs 0.4 s more before each backward; rank 0 stands still every third step."""
    late, slow_s = {0: (1, 4, 7, 10)}, 0.4
    parts = []
    for step in range(12):
        late_s = STOP_S * (step in late[0])
        lanes = {0: lane(late_s, late_s, gathered=False), 1: lane(0.0, late_s, gathered=False)}
        done = late_s + GATHER_S + FORWARD_S + BACKWARD_S
        gather, forward, (*_, start, end), reduce = lanes[1]
        lanes[1] = (gather, forward, (0, "backward-compute", 0, 0, start + slow_s, end + slow_s), reduce)
        lanes[1] = (*lanes[1][:3], (0, "grads-reduce-scatter", 0, None, done + slow_s, done + slow_s + REDUCE_S))
        lanes[0] = (*lanes[0][:3], (0, "grads-reduce-scatter", 0, None, done, done + slow_s + REDUCE_S))
        parts.append(frame(lanes, [step]))
    found = found_in(Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="by hand"))
    by_kind = {cause.kind: cause for cause in found}
    assert set(by_kind) == {"checkpoint-stalls", "slow-host-code"}
    assert by_kind["checkpoint-stalls"].saved_s == pytest.approx(STOP_S / 3)
    assert by_kind["slow-host-code"].saved_s == pytest.approx(slow_s)
    assert by_kind["slow-host-code"].where == Place(workers=(Worker(1, 0),))
