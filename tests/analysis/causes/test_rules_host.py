"""Causes on the host, on a job of two DP ranks whose every time was worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.conclusions import Finding
from tracekit.report.finding import LossKind, Place
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

STEPS = range(10)
USUAL_S, LONG_S = 0.001, 0.3
#: Forward 1 s, backward 2 s, all-reduce 0.25 s, optimizer 0.25 s.
COMPUTES_S = 3.0


def lane(before: str | None, before_s: float, delay_s: float, last_s: float):
    """One rank's step: something before the forward, a launch delay, computes; it waits until the last rank is there.

    `before`: kind of the op before the forward, None for none. `last_s`: when the last rank has computed.
    """
    start = before_s + delay_s
    done = start + COMPUTES_S
    ops = [] if before is None else [(0, before, 0, None, 0.0, before_s)]
    return (
        *ops,
        (0, "forward-compute", 0, 0, start, start + 1),
        (0, "backward-compute", 0, 0, start + 1, done),
        (0, "all-reduce", 0, None, done, last_s + 0.25),
        (0, "optimizer", 0, None, last_s + 0.25, last_s + 0.5),
    )


def job(before: str | None, *, before_s=(USUAL_S, USUAL_S), delay_s=(0.0, 0.0)) -> Trace:
    """A job whose ranks take so long, by rank."""
    last_s = max(map(sum, zip(before_s, delay_s, strict=True))) + COMPUTES_S
    lanes = {at: lane(before, before_s[at], delay_s[at], last_s) for at in range(2)}
    return Trace.from_frame(frame(lanes, STEPS), Layout(dp=2, pp=1), name="by hand")


def causes(before: str | None, **seconds):
    """What is found where the ranks take so long, by rank."""
    return found_in(job(before, **seconds))


@pytest.mark.parametrize(
    ("before", "where", "kind"),
    [
        ("data-load", Place(dp_ranks=(1,)), "late-data-loading"),
        ("host-delay", Place(workers=(Worker(1, 0),)), "slow-host-code"),
    ],
)
def test_a_long_op_of_the_host_names_what_it_is_and_who(before, where, kind):
    (cause,) = causes(before, before_s=(USUAL_S, LONG_S))
    assert (cause.kind, cause.where) == (kind, where)
    # Of data loading nothing is left but what the other has; of host work, as much as that of the other.
    left_s = USUAL_S
    assert cause.saved_s == pytest.approx(LONG_S - left_s)


@pytest.mark.parametrize(("before", "kind"), [("data-load", "late-data-loading"), ("host-delay", "host-bound-launch")])
def test_where_all_ranks_take_as_long_nobody_is_named(before, kind):
    """Replay against the mean of all ranks finds no straggler there; the time is lost all the same."""
    (cause,) = causes(before, before_s=(LONG_S, LONG_S))
    assert (cause.kind, cause.where) == (kind, Place())
    assert cause.saved_s == pytest.approx(LONG_S)


def test_a_delay_before_the_first_forward_is_data_only_where_loading_was_not_recorded():
    (unknown,) = causes(None, before_s=(0, 0), delay_s=(0.0, LONG_S))
    (known,) = causes("data-load", delay_s=(0.0, LONG_S))
    assert (unknown.kind, unknown.where) == ("late-data-loading", Place(dp_ranks=(1,)))
    assert (known.kind, known.where) == ("slow-host-code", Place(workers=(Worker(1, 0),)))


def test_what_one_rank_is_late_is_lost_to_it_though_s_leaves_launch_delays_out():
    diagnosis = PipelineJob(job("data-load", delay_s=(0.0, 1.0))).analysis.diagnosis
    assert diagnosis.verdict.kind is LossKind.STRAGGLER
    assert diagnosis.verdict.lost_s == pytest.approx(1.0)
    assert diagnosis.fixes[0].saved_s == pytest.approx(1.0)
    assert diagnosis.fixes[0].kind == "speed-up-host-code"  # whose machine nothing speaks against


def test_usual_host_work_is_no_cause():
    (cause,) = causes("host-delay")
    assert cause.kind == "healthy"


def with_loss(forward_s: float, loss_s: float, last_s: float):
    """One rank's step with a loss: backwards take twice as long as forwards."""
    loss, backward = forward_s, forward_s + loss_s
    done = backward + 2 * forward_s
    return (
        (0, "forward-compute", 0, 0, 0.0, forward_s),
        (0, "loss", 0, 0, loss, backward),
        (0, "backward-compute", 0, 0, backward, done),
        (0, "all-reduce", 0, None, done, last_s + 0.25),
        (0, "optimizer", 0, None, last_s + 0.25, last_s + 0.5),
    )


def causes_with_losses(forward_s: tuple[float, ...], loss_s: tuple[float, ...], **metadata: object):
    """What is found where forwards and losses take so long, by rank."""
    last_s = max(3 * forward + loss for forward, loss in zip(forward_s, loss_s, strict=True))
    lanes = {at: with_loss(forward_s[at], loss_s[at], last_s) for at in range(len(loss_s))}
    trace = Trace.from_frame(frame(lanes, STEPS), Layout(dp=len(loss_s), pp=1), name="by hand")
    return found_in(replace(trace, metadata=trace.metadata | metadata))


def test_what_one_rank_does_before_the_others_meet_it_between_computes_is_host_code():
    """Rank 1 loads data as fast as rank 0, then works 0.5 s; the other waits in a collective."""
    lanes = {}
    for rank, works_s in enumerate((0.0, 0.5)):
        lanes[rank] = (
            (0, "data-load", 0, None, 0.0, 0.05),
            (0, "forward-collectives", 0, None, 0.05 + works_s, 0.6),
            (0, "forward-compute", 0, 0, 0.6, 1.6),
            (0, "backward-compute", 0, 0, 1.6, 3.6),
            (0, "all-reduce", 0, None, 3.6, 3.85),
            (0, "optimizer", 0, None, 3.85, 4.1),
        )
    (cause,) = found_in(Trace.from_frame(frame(lanes, STEPS), Layout(dp=2, pp=1), name="by hand"))
    assert (cause.kind, cause.where) == ("slow-host-code", Place(workers=(Worker(1, 0),)))
    assert cause.saved_s == pytest.approx(0.5)
    assert "before collectives between computes" in cause.effect


def before_reduction(works_s: tuple[float, ...], *, gathers: bool) -> Trace:
    """Ranks that work so long between the backward, which ends at 3.1 s, and a reduction of 0.25 s, by rank. `gathers`:
    parameters are gathered at the beginning, and gradients scattered.
    """
    begin_s, reduction = (0.1, "grads-reduce-scatter") if gathers else (0.0, "all-reduce")
    reduced_s = 3.1 + max(works_s) + 0.25
    lanes = {
        rank: (
            *([(0, "params-all-gather", 0, None, 0.0, 0.1)] * gathers),
            (0, "forward-compute", 0, 0, begin_s, 1.1),
            (0, "backward-compute", 0, 0, 1.1, 3.1),
            (0, reduction, 0, None, 3.1 + works, reduced_s),
            (0, "optimizer", 0, None, reduced_s, reduced_s + 0.25),
        )
        for rank, works in enumerate(works_s)
    }
    return Trace.from_frame(frame(lanes, STEPS), Layout(dp=len(works_s), pp=1), name="by hand")


@pytest.mark.parametrize("gathers", [False, True])
def test_what_one_rank_does_between_backward_and_the_reduction_of_gradients_is_host_code(gathers):
    """Rank 1 works 0.5 s there; the others wait for it in the reduction."""
    diagnosis = PipelineJob(before_reduction((0.0, 0.5, 0.0), gathers=gathers)).analysis.diagnosis
    (cause,) = diagnosis.causes
    assert (cause.kind, cause.where) == ("slow-host-code", Place(workers=(Worker(1, 0),)))
    assert cause.saved_s == pytest.approx(0.5)
    assert "before gradients are reduced" in cause.effect
    assert diagnosis.trust.trustworthy


def test_where_all_ranks_are_late_to_the_reduction_the_graph_may_lack_what_they_wait_for():
    diagnosis = PipelineJob(before_reduction((0.5, 0.5, 0.5), gathers=False)).analysis.diagnosis
    (cause,) = diagnosis.causes
    assert (cause.kind, cause.where) == ("host-bound-launch", Place())
    assert cause.saved_s == pytest.approx(0.5)
    assert not diagnosis.trust.trustworthy


def test_what_one_rank_does_between_forward_and_backward_is_no_slow_machine():
    """Beside peers of 0.1 s it takes 0.4 s: the step is 0.3 s longer, at that place."""
    (cause,) = causes_with_losses((1.0, 1.0, 1.0), (0.1, 0.4, 0.1))
    assert (cause.kind, cause.where) == ("slow-host-code", Place(workers=(Worker(1, 0),)))
    assert cause.saved_s == pytest.approx(0.3)


def test_the_loss_of_a_worker_that_computes_slower_takes_longer_too():
    (cause,) = causes_with_losses((1.0, 1.5, 1.0), (0.4, 0.6, 0.4))
    assert (cause.kind, cause.where) == ("bad-worker", Place(workers=(Worker(1, 0),)))


def test_losses_that_take_as_long_everywhere_are_work():
    (cause,) = causes_with_losses((1.0, 1.0), (0.8, 0.8))
    assert cause.kind == "healthy"


@pytest.mark.parametrize(
    ("waits_s", "slow"), [((0.0, 1.6, 0.0), False), ((1.6, 1.6, 1.6), True), ((0.0, 0.5, 0.0), True)]
)
def test_computes_that_wait_for_a_core_are_no_slow_worker(waits_s, slow):
    """Rank 1 computes 1.5 s longer than its peers; without a core it is for 1.6 s, as its peers are, or for 0.5 s."""
    waits = {str(rank): seconds for rank, seconds in enumerate(waits_s)}
    found = causes_with_losses((1.0, 1.5, 1.0), (0.4, 0.6, 0.4), run_queue_s=waits)
    assert ("bad-worker" in {cause.kind for cause in found}) == slow


def without_cores(
    waits_s: tuple[float, float], hosts: tuple[str, str] = ("node-1", "node-1"), trace: Trace | None = None
):
    """What is found where the two ranks, on these hosts, were ready and had no core for so long in each step."""
    trace = trace or job("host-delay")
    by_rank = {"hosts": dict(zip("01", hosts, strict=True)), "run_queue_s": dict(zip("01", waits_s, strict=True))}
    return found_in(replace(trace, metadata=trace.metadata | by_rank))


@pytest.mark.parametrize(("waits_s", "found"), [((1.5, 1.5), True), ((0.1, 0.1), False)])
def test_cores_that_are_busy_are_the_host_s(waits_s, found):
    """Of 3.251 s that each rank does something itself, the kernel says, it was ready and had no core for 1.5 s."""
    (cause,) = without_cores(waits_s)
    assert (cause.kind == "busy-cores") == found
    if found:
        assert cause.where == Place(host="node-1")
        assert cause.saved_s == pytest.approx(1.5)


def test_busy_cores_of_several_hosts_are_one_cause():
    """One rank each on two hosts, 1.5 s and 1.2 s without a core: the step takes 1.2 s less with one."""
    (cause,) = without_cores((1.5, 1.2), hosts=("node-1", "node-2"))
    assert (cause.kind, cause.where) == ("busy-cores", Place())
    assert cause.saved_s == pytest.approx(1.2)


def with_slow_optimizer(waits_s: tuple[float, float]) -> dict[str, Finding]:
    """What is found where rank 1's optimizer takes 0.6 s, rank 0's 0.25 s, and the ranks had no core for so long."""
    trace = job(None)
    longer = (pl.col("kind").cast(pl.String) == "optimizer") & (pl.col("dp_rank") == 1)
    ops = trace.ops.with_columns(duration=pl.when(longer).then(0.6).otherwise("duration"))
    return {cause.kind: cause for cause in without_cores(waits_s, trace=replace(trace, ops=ops))}


def test_a_cause_is_less_sure_by_what_waits_for_a_core_explain_of_it():
    """Without 1.2 s of waiting, rank 1's ops take two thirds of their time: its optimizer loses 0.233 s, not 0.35 s."""
    alone = with_slow_optimizer((0.0, 0.0))["slow-optimizer"]
    beside = with_slow_optimizer((1.2, 1.2))
    assert "busy-cores" in beside
    assert alone.confidence == pytest.approx(1 - 0.5 ** (2.4 / 1.5), abs=0.005)
    assert beside["slow-optimizer"].confidence == pytest.approx(alone.confidence * 2 / 3, abs=0.005)
    assert beside["slow-optimizer"].saved_s == pytest.approx(alone.saved_s) == pytest.approx(0.35)
    assert beside["slow-optimizer"].evidence[-1].words == "explained by waits for a processor: 33%"


def test_a_cause_that_waits_for_a_core_explain_gives_way_to_busy_cores():
    """Rank 1 alone had no core, for 2.4 s: without that, its optimizer is as fast as the other one."""
    (cause,) = with_slow_optimizer((0.0, 2.4)).values()
    assert (cause.kind, cause.where) == ("busy-cores", Place(workers=(Worker(1, 0),)))


@pytest.mark.parametrize(("before", "kind"), [("data-load", "late-data-loading"), ("host-delay", "slow-host-code")])
def test_any_cause_on_a_rank_is_less_sure_while_cores_are_busy(before, kind):
    def sure(wait_s: float) -> float:
        trace = job(before, before_s=(USUAL_S, LONG_S))
        waits = {"run_queue_s": {"0": wait_s, "1": wait_s}}
        (cause,) = found_in(replace(trace, metadata=trace.metadata | waits))
        assert cause.kind == kind
        return cause.confidence

    assert sure(0.0) > sure(0.3) > sure(1.0)
