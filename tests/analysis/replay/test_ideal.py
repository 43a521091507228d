"""The ideal of what only some workers or steps do counts those that do not do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job, of_steps
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.graph import Posting, dependency_graph
from tracekit.analysis.job.job import ReportOptions
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.engine import JobReplay
from tracekit.dashboards.words import published_difference
from tracekit.trace.canonical import Trace, read_parquet

SAMPLES = Path(__file__).parents[3] / "sample_traces"


def slowdown(trace: Trace, method: Method = Method.TRACEKIT) -> float:
    return attribute(JobReplay.from_trace(trace, method)).slowdown


@pytest.mark.parametrize("kind", ["gc", "checkpoint", "evaluation", "host-delay", "data-load"])
def test_what_one_rank_alone_does_is_lost_in_whole(kind):
    """0.3 s of compute and 0.4 s on one of two ranks: 0.71 s with the reduction, 0.31 s without."""
    trace = data_parallel_job([[FORWARD, BACKWARD], [FORWARD, (kind, 0.4), BACKWARD]])
    assert slowdown(trace) == pytest.approx(0.71 / 0.31)
    assert slowdown(trace, Method.PUBLISHED) == pytest.approx(1.0)


def test_what_all_ranks_do_alike_in_every_step_is_no_straggler():
    trace = data_parallel_job([[FORWARD, ("gc", 0.4), BACKWARD]] * 2)
    assert slowdown(trace) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["checkpoint", "evaluation"])
def test_what_all_ranks_do_every_few_steps_is_no_straggler(kind):
    """Steps without it are no measure of those with it; a rank that takes 0.5 s instead of 0.3 s loses the rest."""
    plain, does, slow = [FORWARD, BACKWARD], [(kind, 0.3), FORWARD, BACKWARD], [(kind, 0.5), FORWARD, BACKWARD]
    assert slowdown(of_steps(([[plain] * 3] * 3 + [[does] * 3]) * 2)) == pytest.approx(1.0)
    with_a_slow_one = of_steps(([[plain] * 3] * 3 + [[does, does, slow]]) * 2)
    assert slowdown(with_a_slow_one) == pytest.approx((0.31 + 0.5 / 4) / (0.31 + 0.3 / 4))


def test_a_slow_loader_is_compared_with_the_others():
    """0.05 s of loading is usual; the rank that takes 0.25 s loses 0.2 s."""
    usual, slow = [("data-load", 0.05), FORWARD, BACKWARD], [("data-load", 0.25), FORWARD, BACKWARD]
    assert slowdown(data_parallel_job([usual, usual, slow])) == pytest.approx(0.56 / 0.36)


def test_collections_in_some_steps_are_lost_there():
    """Every fourth step takes 0.4 s more, on another rank each time."""
    plain, collects = [FORWARD, BACKWARD], [FORWARD, ("gc", 0.4), BACKWARD]
    steps = [[collects, plain], [plain, plain], [plain, plain], [plain, plain]] * 2
    trace = of_steps([*steps, *[step[::-1] for step in steps]])
    assert slowdown(trace) == pytest.approx((0.31 + 0.1) / 0.31)


def test_the_total_of_a_step_counts_not_the_number_of_ops():
    """0.2 s of host work in one piece or in four is the same."""
    one, four = [("host-delay", 0.2), FORWARD, BACKWARD], [*[("host-delay", 0.05)] * 4, FORWARD, BACKWARD]
    assert slowdown(data_parallel_job([one, four])) == pytest.approx(1.0)


def test_collected_garbage_is_named_with_its_rank_and_price():
    report = PipelineJob(data_parallel_job([[FORWARD, BACKWARD], [FORWARD, ("gc", 0.4), BACKWARD]], steps=8)).whatif()
    cause, *others = report.findings
    assert (str(cause.kind), str(cause.where)) == ("python-gc", "worker (1,0)")
    assert cause.saved_s == pytest.approx(0.4)
    assert not others
    assert str(report.verdict.kind) == "straggler"
    assert published_difference(report)


def test_a_checkpoint_that_stops_everybody_is_a_stall():
    """1 s every fourth step on both ranks: 0.25 s of the mean step."""
    plain, saves = [FORWARD, BACKWARD], [FORWARD, BACKWARD, ("checkpoint", 1.0)]
    report = PipelineJob(
        of_steps([[plain, plain]] * 3 + [[saves, saves]] + [[plain, plain]] * 3 + [[saves, saves]])
    ).whatif()
    cause = report.findings[0]
    assert (str(cause.kind), str(cause.where)) == ("checkpoint-stalls", "whole job")
    assert cause.saved_s == pytest.approx(0.25)
    assert str(report.verdict.kind) == "stalls"
    assert report.verdict.headline_s == pytest.approx(0.25)


def evaluating(on_rank_0: float, on_rank_1: float) -> Trace:
    """Every fourth step begins with an evaluation; 0 s is none."""
    programs = [[*([("evaluation", lasts)] if lasts else []), FORWARD, BACKWARD] for lasts in (on_rank_0, on_rank_1)]
    return of_steps(([[[FORWARD, BACKWARD]] * 2] * 3 + [programs]) * 3)


@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1", "where", "verdict", "saved_s"),
    [
        (0.4, 0.4, "whole job", "evaluation", 0.1),
        (0.4, 0.0, "whole job", "evaluation", 0.1),
        (0.4, 1.2, "worker (1,0)", "straggler", 0.2),
    ],
    ids=["all", "rank 0 for all", "slow on rank 1"],
)
def test_an_evaluation_every_few_steps_is_named_as_such(on_rank_0, on_rank_1, where, verdict, saved_s):
    """A quarter of its time is of the mean step; nobody is slow who does it for all."""
    report = PipelineJob(evaluating(on_rank_0, on_rank_1)).whatif()
    (cause,) = report.findings
    assert (str(cause.kind), str(cause.where), cause.when) == ("evaluation", where, "every 4 steps")
    assert cause.saved_s == pytest.approx(saved_s)
    assert str(report.verdict.kind) == verdict
    if not on_rank_1:
        assert not report.answer.culprits


@pytest.mark.parametrize("method", Method)
def test_ideals_of_another_method_are_those_of_a_replay_made_with_it(method):
    trace = data_parallel_job([[FORWARD, BACKWARD], [FORWARD, ("gc", 0.4), BACKWARD]])
    made_with_it = attribute(JobReplay.from_trace(trace, method)).slowdown
    assert attribute(JobReplay.from_trace(trace).with_ideals(method)).slowdown == pytest.approx(made_with_it, rel=1e-12)


def test_the_published_method_reuses_the_placed_ops_and_finds_what_it_finds_alone(monkeypatch):
    trace = read_parquet(SAMPLES / "collected.parquet")
    job = PipelineJob(trace).lean()
    assert job.replay.graph.posting.rule is not Posting.SAME_DIRECTION
    alone = slowdown(trace, Method.PUBLISHED)
    monkeypatch.delattr(dependency_graph, "place_lanes")
    assert job.analyse(ReportOptions()).report.method.published_slowdown == alone
