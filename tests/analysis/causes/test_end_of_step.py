"""Host work at the end of a step, and checkpoints of all ranks, in jobs whose every time was worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from tests.handmade import Lane, frame
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.finding import Place
from tracekit.trace.canonical import RUN_QUEUE, Trace
from tracekit.trace.model import Layout, Worker

STEPS = 12
#: In every third step.
WORKS = (2, 5, 8, 11)
RANK_1 = Place(workers=(Worker(1, 0),))


def lane(
    kind: str = "gc", *, begin_s: float = 0.0, wait_s: float = 0.0, before_s: float = 0.0, after_s: float = 0.0
) -> Lane:
    """One rank's step: checkpoint of `begin_s`, forward 1 s, backward 2 s, reduction 0.25 s, optimizer 0.25 s.
    `wait_s`: in the reduction, for the other rank; `before_s`, `after_s`: of host work of that kind before and after
    the optimizer. Seconds.
    """
    reduced_s = begin_s + wait_s + 3.25
    optimized_s = reduced_s + before_s + 0.25
    return (
        *([(0, "checkpoint", 0, None, 0.0, begin_s)] * (begin_s > 0)),
        (0, "forward-compute", 0, 0, begin_s, begin_s + 1),
        (0, "backward-compute", 0, 0, begin_s + 1, begin_s + 3),
        (0, "all-reduce", 0, None, begin_s + 3, reduced_s),
        *([(0, kind, 0, None, reduced_s, reduced_s + before_s)] * (before_s > 0)),
        (0, "optimizer", 0, None, optimized_s - 0.25, optimized_s),
        *([(0, kind, 0, None, optimized_s, optimized_s + after_s)] * (after_s > 0)),
    )


def diagnosis(works: dict[int, Lane], queued_s: float = 0.0) -> Diagnosis:
    """Of two ranks on a host. `works`: the steps of both ranks in `WORKS`; in all others, they do no host work.
    `queued_s`: how long rank 1 had no processor in each of these.
    """
    parts = [frame(works if step in WORKS else {0: lane(), 1: lane()}, [step]) for step in range(STEPS)]
    ops = pl.concat(parts)
    waits = pl.when(pl.col("dp_rank") == 1, pl.col("step").is_in(WORKS)).then(queued_s).otherwise(0.0)
    first = pl.col("kind").cast(pl.String) == "forward-compute"
    ops = ops.with_columns(queued=pl.when(first).then(pl.concat_list(waits)))
    facts = {"hosts": {"0": "node", "1": "node"}, RUN_QUEUE: {"0": 0.0, "1": queued_s * len(WORKS) / STEPS}}
    trace = Trace.from_frame(ops, Layout(dp=2, pp=1), name="by hand", metadata=facts)
    return PipelineJob(trace).analysis.diagnosis


@pytest.mark.parametrize(
    ("kind", "cause_kind", "where"),
    [
        ("checkpoint", "checkpoint-stalls", Place()),
        ("evaluation", "evaluation", Place()),
        ("gc", "python-gc", RANK_1),
        ("data-load", "late-data-loading", Place(dp_ranks=(1,))),
        ("host-delay", "slow-host-code", RANK_1),
    ],
)
@pytest.mark.parametrize("place", ["before_s", "after_s"])
def test_host_work_after_the_reduction_of_gradients_costs_its_time(kind, cause_kind, where, place):
    """Rank 1 works 1.5 s before or after its optimizer in every third step: 0.5 s a step, and nothing overlaps."""
    found = diagnosis({0: lane(), 1: lane(kind, **{place: 1.5})})
    (cause,) = found.causes
    assert (cause.kind, cause.where) == (cause_kind, where)
    assert cause.saved_s == pytest.approx(0.5)
    assert found.trust.trustworthy


def test_a_rank_that_takes_longer_at_the_checkpoint_of_all_costs_what_it_takes_longer():
    """Rank 0 writes 1.5 s, rank 1 6 s, in every third step: 2 s a step without any checkpoint, 1.5 s at its pace."""
    found = diagnosis({0: lane(begin_s=1.5, wait_s=4.5), 1: lane(begin_s=6.0)})
    assert [(cause.kind, cause.where) for cause in found.causes] == [
        ("checkpoint-stalls", Place()),
        ("checkpoint-stalls", RANK_1),
    ]
    assert [cause.saved_s for cause in found.causes] == pytest.approx([2.0, 1.5])
    prices = {fix.kind: fix.saved_s for fix in found.fixes}
    assert (prices["async-checkpoint"], prices["even-checkpoints"]) == pytest.approx((2.0, 1.5))


def test_recorded_collections_are_their_rank_s_however_long_its_thread_waits_in_them():
    """Of 1.5 s of collections in every third step, rank 1 had no processor for 1.4 s: they cost 0.5 s a step."""
    cause = diagnosis({0: lane(), 1: lane(after_s=1.5)}, queued_s=1.4).causes[0]
    assert (cause.kind, cause.where) == ("python-gc", RANK_1)
    assert cause.saved_s == pytest.approx(0.5)
    assert cause.confidence < 0.1  # the waits explain fourteen fifteenths of it


def test_busy_cores_are_those_of_the_rank_and_the_steps_that_wait():
    (cause,) = diagnosis({0: lane(), 1: lane("host-delay", after_s=1.5)}, queued_s=1.4).causes
    assert (cause.kind, cause.where, cause.when) == ("busy-cores", RANK_1, "every 3 steps")
    assert cause.effect == "training threads wait 466.7 ms of each step for a processor"
