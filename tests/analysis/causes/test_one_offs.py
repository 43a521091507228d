"""What stands apart in one or two steps is a stall of its own, and no evidence for what returns.

Four ranks, ten steps of 0.62 s: two microbatches of 0.1 s and 0.2 s, data loading and host work of 5 ms each, an
all-reduce of 10 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, Program, of_steps
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.conclusions import Finding
from tracekit.report.finding import LossKind, Place
from tracekit.report.report import Report
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

RANKS, STEPS, STEP_S = 4, 10, 0.62
USUAL: Program = (("data-load", 0.005), FORWARD, BACKWARD, ("host-delay", 0.005), FORWARD, BACKWARD)
FIRST_FORWARD, DATA, HOST = 1, 0, 3
#: A rank's programs in the steps in which they differ from the usual one.
Changed = Mapping[int, Mapping[int, Program]]


def longer(place: int, extra_s: float) -> Program:
    """The usual program with one op that takes longer."""
    return tuple((kind, lasts + extra_s * (at == place)) for at, (kind, lasts) in enumerate(USUAL))


def slowed(factor: float, program: Program = USUAL) -> Program:
    """A program whose forwards and backwards take longer."""
    return tuple((kind, lasts * factor if "compute" in kind else lasts) for kind, lasts in program)


def trace_of(changed: Changed, usual: Sequence[Program] = (USUAL,) * RANKS) -> Trace:
    """`changed`: by step, the programs of ranks that differ from `usual`."""
    return of_steps(
        [[changed.get(step, {}).get(rank, usual[rank]) for rank in range(len(usual))] for step in range(STEPS)]
    )


def report_on(trace: Trace) -> Report:
    return PipelineJob(trace).whatif()


def named(report: Report) -> list[Finding]:
    return [cause for cause in report.findings if cause.priced]


@pytest.mark.parametrize(
    ("program", "kind", "steps", "extra_s"),
    [
        (longer(FIRST_FORWARD, 1.0), "process-pauses", (6,), 1.0),
        (slowed(3), "bad-worker", (3, 4), 1.2),
        (longer(DATA, 1.0), "late-data-loading", (9,), 1.0),
        (longer(HOST, 1.0), "slow-host-code", (2, 7), 1.0),
        ((*USUAL[:4], ("gc", 1.0), *USUAL[4:]), "python-gc", (0,), 1.0),
    ],
)
def test_a_stall_of_one_rank_is_told_with_rank_and_steps(
    program: Program, kind: str, steps: tuple[int, ...], extra_s: float
) -> None:
    """It costs what the recording loses, and no other cause is concluded from it."""
    report = report_on(trace_of({step: {2: program} for step in steps}))
    (cause,) = named(report)
    assert (cause.kind, cause.where) == (kind, Place(workers=(Worker(2, 0),), steps=steps))
    assert cause.saved_s == pytest.approx(extra_s * len(steps) / STEPS)
    assert cause.once is not None
    assert cause.once.steps == steps
    assert report.verdict.kind is LossKind.STALLS
    assert report.verdict.lost_s == pytest.approx(cause.saved_s)
    assert report.verdict.lost_gpu_hours_per_day == pytest.approx(0.0)
    assert report.answer.headline.startswith("rank 2 costs ")
    assert "in every step" not in str(report.answer.who)
    assert not [fix for fix in report.fixes if fix.cause]


def test_a_stall_in_two_kinds_of_work_says_both() -> None:
    """In one step, data comes 0.8 s later and host code takes 0.5 s longer."""
    both = tuple((kind, lasts + {DATA: 0.8, HOST: 0.5}.get(place, 0.0)) for place, (kind, lasts) in enumerate(USUAL))
    (cause,) = named(report_on(trace_of({6: {2: both}})))
    assert cause.effect == (
        "its data loading and host code between ops take 1.30 s longer in step 6 than in other steps"
    )


def test_a_stall_of_all_ranks_blames_none() -> None:
    report = report_on(trace_of({6: dict.fromkeys(range(RANKS), longer(FIRST_FORWARD, 1.0))}))
    (cause,) = named(report)
    assert (cause.kind, cause.where) == ("process-pauses", Place(steps=(6,)))
    assert cause.saved_s == pytest.approx(0.1)
    assert report.verdict.kind is LossKind.STALLS
    assert report.answer.headline == (
        "computes of all ranks take 1.00 s longer in step 6 than in other steps, 14% of the recording"
    )


def test_a_stall_that_most_ranks_share_is_that_of_all() -> None:
    """Data is 1.0, 0.5, 0.4 and 0.1 s late in one step, 0.2 s on one rank in another: only 1.0 s is four of these."""
    late = dict(enumerate(longer(DATA, late_s) for late_s in (1.0, 0.5, 0.4, 0.1)))
    report = report_on(trace_of({6: late, 3: {2: longer(DATA, 0.2)}}))
    cause = named(report)[0]
    assert (cause.kind, cause.where) == ("late-data-loading", Place(steps=(6,)))
    assert cause.saved_s == pytest.approx(0.09)  # the last rank keeps its 0.1 s


def test_two_ranks_that_stall_in_different_steps_are_two_stalls() -> None:
    report = report_on(trace_of({2: {0: longer(FIRST_FORWARD, 1.0)}, 8: {3: longer(FIRST_FORWARD, 0.8)}}))
    assert {(cause.where.workers, cause.where.steps): cause.saved_s for cause in named(report)} == {
        ((Worker(0, 0),), (2,)): pytest.approx(0.1),
        ((Worker(3, 0),), (8,)): pytest.approx(0.08),
    }


def test_stalls_that_hide_each_other_do_not_return() -> None:
    """Ending the stall of one rank saves nothing until that of the other has gone, too."""
    report = report_on(trace_of({5: {0: longer(DATA, 1.0), 3: longer(HOST, 1.0)}}))
    assert {cause.where.workers for cause in named(report)} == {(Worker(0, 0),), (Worker(3, 0),)}
    assert report.verdict.lost_s == pytest.approx(0.1)
    assert report.verdict.lost_gpu_hours_per_day == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("hosts", "where", "kind"),
    [
        (("node-0", "node-1"), Place(), LossKind.COMMUNICATION),  # as any other congestion
        (("node-0", "node-0"), Place(steps=(5,)), LossKind.STALLS),  # nothing passes a network
    ],
)
def test_a_long_collective_of_one_step_blames_no_rank(hosts: Sequence[str], where: Place, kind: LossKind) -> None:
    longest = pl.when((pl.col("kind") == "all-reduce") & (pl.col("step") == 5)).then(1.0).otherwise(0.0)
    trace = Trace.from_frame(
        trace_of({}).ops.with_columns(duration=pl.col("duration") + longest),
        Layout(dp=RANKS),
        name="long",
        metadata={"hosts": {str(rank): hosts[rank % 2] for rank in range(RANKS)}},
    )
    report = report_on(trace)
    (cause,) = named(report)
    assert (cause.kind, cause.where, cause.when) == ("congestion", where, "in step 5")
    assert cause.saved_s == pytest.approx(0.1)
    assert report.verdict.kind is kind


def test_what_returns_leads_and_costs_what_it_does_without_the_stall() -> None:
    """Rank 1 computes 1.5 times as long, 0.3 s; in one step, a forward of rank 1 takes 2 s more besides."""
    slow = slowed(1.5)
    usual = [USUAL, slow, USUAL, USUAL]
    frozen = tuple((kind, lasts + 2.0 * (at == FIRST_FORWARD)) for at, (kind, lasts) in enumerate(slow))
    report = report_on(trace_of({4: {1: frozen}}, usual))
    lasting, stall = named(report)
    assert (lasting.kind, lasting.where, lasting.once) == ("bad-worker", Place(workers=(Worker(1, 0),)), None)
    assert lasting.saved_s == pytest.approx(0.3)
    assert (stall.where, stall.saved_s) == (Place(workers=(Worker(1, 0),), steps=(4,)), pytest.approx(0.2))
    assert report.verdict.kind is LossKind.STRAGGLER
    assert report.verdict.lost_s == pytest.approx(0.5)


@pytest.mark.parametrize("steps", [(1, 4, 8), (0, 2, 4, 6, 8)])
def test_three_times_is_no_stall_of_its_own(steps: tuple[int, ...]) -> None:
    report = report_on(trace_of({step: {2: longer(DATA, 1.0)} for step in steps}))
    assert all(cause.once is None and not cause.where.steps for cause in named(report))
    assert report.verdict.kind is LossKind.INPUT


@pytest.mark.parametrize(
    "extra_s",
    [
        (0.0, 0.0, 1.0, 0.0, 0.0, 0.3, 0.0, 0.3, 0.0, 0.0),  # 1.0 s is not four times 0.3 s
        (0.03, 0.03, 1.0, 0.03, 0.03, 0.5, 0.03, 0.14, 0.03, 0.03),  # 0.5 s not four times 0.14 s, 1.0 s not 0.5 s
    ],
)
def test_a_step_like_others_is_no_stall(extra_s: Sequence[float]) -> None:
    """`extra_s`: by how much data is late in each step, on the ranks in turn."""
    report = report_on(trace_of({step: {step % RANKS: longer(DATA, late_s)} for step, late_s in enumerate(extra_s)}))
    assert not [cause for cause in named(report) if cause.where.steps]


def test_a_rank_that_ends_a_step_so_late_that_the_next_one_waits_costs_that_time() -> None:
    """Starts count from each step. Rank 1 is 1 s late with its optimizer, begins step 6 that late, and rank 0 waits."""
    rows = []
    for step in range(STEPS):
        ready = 1.3 if step == 6 else 0.3
        for rank in range(2):
            begins, optimizer_s = (ready - 0.3) * rank, 1.05 if (step, rank) == (5, 1) else 0.05
            ops = (
                ("forward-compute", begins, 0.3),
                ("all-reduce", begins + 0.3, ready - begins - 0.29),
                ("optimizer", ready + 0.01, optimizer_s),
            )
            rows += [
                {"step": step, "rank": rank, "dp_rank": rank, "pp_rank": 0, "kind": kind, "seq": 0}
                | {"start": start, "duration": lasts}
                for kind, start, lasts in ops
            ]
    report = report_on(Trace.from_frame(pl.DataFrame(rows), Layout(dp=2), name="late end"))
    (cause,) = named(report)
    assert (cause.kind, cause.where) == ("slow-optimizer", Place(workers=(Worker(1, 0),), steps=(5,)))
    assert cause.saved_s == pytest.approx(0.1)
