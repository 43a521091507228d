"""DP ranks with unequal numbers of microbatches: named where they are, at the price of equal ones; a cut trace is not.

A forward takes 0.1 s, a backward 0.2 s, so a microbatch 0.3 s; an all-reduce 0.01 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl
import pytest

import tracekit
from tests.analysis.bubbles.simulated import one_f_one_b
from tests.analysis.bubbles.simulated import trace as trace_of_lanes
from tests.analysis.bubbles.test_bubbles import uniform
from tests.analysis.small_jobs import BACKWARD, FORWARD, Program, of_steps
from tests.cases import case
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.finding import LossKind
from tracekit.report.report import Report
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout
from tracekit.trace.op import OpTrace

MICROBATCH_S = 0.3
#: Numbers that change from rank to rank and step to step.
DRAWN = [(2, 6, 4, 4), (6, 2, 4, 4), (4, 4, 6, 2)] * 3


def program(microbatches: int, *, slow: float = 1.0) -> Program:
    return [(kind, slow * lasts) for _ in range(microbatches) for kind, lasts in (FORWARD, BACKWARD)]


def counted(*steps: Sequence[int]) -> Trace:
    """A trace whose DP ranks run these numbers of microbatches, in each of the steps."""
    return of_steps([[program(count) for count in counts] for counts in steps])


def report(trace: Trace) -> Report:
    return PipelineJob(trace).whatif()


def priced(trace: Trace) -> list[tuple[str, tuple[int, ...], float]]:
    return [(each.kind, each.where.dp_ranks, round(each.saved_s, 6)) for each in report(trace).findings if each.priced]


def test_it_is_uneven_work_that_costs_what_equal_numbers_save() -> None:
    """Four ranks in step with 18 microbatches run 4.5 each, so that a step is 1.5 microbatches shorter."""
    analysed = report(counted(*[(6, 4, 4, 4)] * 8))
    (finding,) = analysed.findings
    assert (finding.kind, finding.where.dp_ranks, finding.confidence) == ("unequal-microbatches", (0,), 0.99)
    assert finding.saved_s == pytest.approx(1.5 * MICROBATCH_S)
    assert (analysed.verdict.kind, analysed.verdict.lost_s) == (LossKind.STRAGGLER, pytest.approx(finding.saved_s))
    assert analysed.slowdown == pytest.approx(1.0)  # of the paper: no op takes longer than its ideal
    assert [fix.saved_s for fix in analysed.fixes if fix.kind == "equal-microbatches"] == [finding.saved_s]


def test_ranks_that_have_more_in_every_uneven_step_are_named_and_else_the_whole_job() -> None:
    cases: dict[str, tuple[Sequence[Sequence[int]], tuple[int, ...], float]] = {
        "half of them": ([(8, 8, 4, 4)] * 6, (0, 1), 2.0),
        "more, but not equally many": ([(8, 7, 3, 2)] * 6, (0, 1), 3.0),
        "one has fewer": ([(2, 6, 6, 6)] * 6, (), 1.0),
        "drawn": (DRAWN, (), 2.0),
        "always more, but another one most": ([(5, 6, 2, 3), (5, 2, 6, 3), (5, 3, 2, 6)] * 3, (), 2.0),
        "in every other step": ([(6, 2, 2, 2), (3, 3, 3, 3)] * 4, (0,), 1.5),
    }
    for name, (steps, ranks, microbatches) in cases.items():
        with case(name):
            assert priced(counted(*steps)) == [
                ("unequal-microbatches", ranks, pytest.approx(microbatches * MICROBATCH_S))
            ]


def test_from_a_step_on_it_costs_in_those_steps() -> None:
    analysed = report(counted(*[(4, 4, 4, 4)] * 6, *[(8, 4, 4, 4)] * 6))
    (finding,) = analysed.findings
    assert (finding.since_step, finding.saved_when_acting_s) == (6, pytest.approx(3 * MICROBATCH_S))


def test_a_slow_rank_is_named_next_to_it_and_one_that_has_fewer_for_it_is_not_worse() -> None:
    with_slow = of_steps([[program(4, slow=1.5), program(6), program(4), program(4)]] * 8)
    assert {kind for kind, _, _ in priced(with_slow)} == {"bad-worker", "unequal-microbatches"}
    spared = priced(of_steps([[program(4, slow=1.5), *[program(6)] * 3]] * 8))
    assert all(saved_s <= 0.02 for _, _, saved_s in spared)


def test_pipelines_are_priced_by_the_replay_of_their_stages() -> None:
    """The fill and the drain of two stages are as long as one microbatch: from 6 + 1 to 5 + 1 of 0.3 s."""
    lanes = {
        (step, dp_rank): uniform(one_f_one_b(2, count), forward=0.1, backward=0.2)
        for step in range(6)
        for dp_rank, count in enumerate((6, 4))
    }
    (finding,) = [each for each in report(trace_of_lanes(lanes)).findings if each.priced]
    assert (finding.kind, finding.where.dp_ranks) == ("unequal-microbatches", (0,))
    assert finding.saved_s == pytest.approx(MICROBATCH_S)


def without(ops: pl.DataFrame, step: int, rank: int, *, since: float = 0.0, until: float = 9.0) -> pl.DataFrame:
    """The ops without those of a rank in a step that begin in this time."""
    at = pl.col("step").eq(step) & pl.col("rank").eq(rank) & pl.col("start").is_between(since, until)
    rest = ops.filter(~at).drop("seq").sort("step", "rank", "kind", "start")
    return rest.with_columns(seq=pl.int_range(pl.len()).over("step", "rank", "kind"))


@pytest.mark.parametrize(
    "cut",
    [
        lambda ops: without(ops, 7, 2, since=0.55),
        lambda ops: without(ops, 0, 1, until=0.55),
        lambda ops: without(without(ops, 0, 1, until=0.55), 7, 2, since=0.55),
        lambda ops: without(ops, 4, 2, since=0.55),
        lambda ops: without(ops, 4, 2, since=0.25, until=0.35),
        lambda ops: ops.filter(~(pl.col("step").eq(3) & pl.col("rank").eq(1))),
    ],
    ids=["at its end", "at its begin", "at both", "within", "one forward is missing", "a step is missing"],
)
def test_a_recording_that_was_cut_does_not_make_numbers_unequal(cut: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    whole = counted(*[(4, 4, 4, 4)] * 8)
    trace = Trace.from_frame(
        cut(whole.ops.select(pl.exclude("kind"), pl.col("kind").cast(pl.String))), Layout(dp=4), name="cut"
    )
    assert "unequal-microbatches" not in {each.kind for each in report(trace).findings}


def test_records_that_a_recorder_dropped_may_be_those_of_microbatches() -> None:
    trace = counted(*[(6, 4, 4, 4)] * 6)
    dropped = Trace(trace.ops, trace.layout, trace.name, trace.step_starts, {"dropped_records": 40})
    assert "unequal-microbatches" not in {each.kind for each in report(dropped).findings}


def test_computes_in_parts_are_one_microbatch() -> None:
    """Rank 0 records each forward in two parts of half its length, with the microbatch of both."""
    rows = []
    for step, rank in ((step, rank) for step in range(4) for rank in range(2)):
        for number in range(3):
            at, parts = number * MICROBATCH_S, (2 if rank == 0 else 1)
            for part in range(parts):
                length = 0.1 / parts
                rows.append((step, rank, "forward-compute", number * parts + part, number, at + part * length, length))
            rows.append((step, rank, "backward-compute", number, number, at + 0.1, 0.2))
        rows.append((step, rank, "all-reduce", 0, None, 3 * MICROBATCH_S, 0.01))
    columns = ["step", "rank", "kind", "seq", "microbatch", "start", "duration"]
    ops = pl.DataFrame(rows, columns, orient="row").with_columns(dp_rank="rank", pp_rank=pl.lit(0))
    assert priced(Trace.from_frame(ops, Layout(dp=2), name="parts")) == []


def of_ops() -> Report:
    """Six steps of an op trace: rank 0 runs 12 ops in a step, each of its peers 8 of the same lengths."""
    rows = []
    for step in range(6):
        for rank, count in enumerate((6, 4, 4, 4)):
            computes = [kind for _ in range(count) for kind in ("forward", "backward")]
            lengths = [0.1 if kind == "forward" else 0.2 for kind in computes]
            begins = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
            rows += [(step, rank, *op, None) for op in zip(computes, begins[:-1], lengths, strict=True)]
            rows.append((step, rank, "all-reduce", begins[-1], 6 * MICROBATCH_S + 0.05 - begins[-1], step))
    columns = ["step", "rank", "kind", "start", "duration", "rendezvous"]
    ops = pl.DataFrame(rows, columns, orient="row", infer_schema_length=None).with_columns(stream=0)
    return tracekit.job_of(OpTrace(ops, "ops", rules=("streams",))).whatif()


def test_in_an_op_trace_the_reason_is_more_ops_and_not_slow_ones() -> None:
    (finding,) = [each for each in of_ops().findings if each.priced]
    assert (finding.kind, finding.where.ranks) == ("data-skew", (0,))
    assert finding.saved_s == pytest.approx(2 * MICROBATCH_S)
    assert "microbatches" in finding.next_check
    assert "throttled" not in finding.suggested_fix
