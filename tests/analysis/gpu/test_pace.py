"""Which rank of an op trace the others wait for, when, and at what price."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest
from hypothesis import given

import tracekit
from tests.analysis.op_graphs import frames
from tests.properties import examples
from tracekit.analysis.gpu.pace import PaceOfPeers, saved_by_rank
from tracekit.analysis.graph.op_graph import OpGraph, fold
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations
from tracekit.report.finding import LossKind
from tracekit.report.report import Report
from tracekit.trace.op import OpTrace

KINDS = ("gemm", "attention")


def ops_of(took_s: Floats) -> pl.DataFrame:
    """Ops that took so long, [steps, layers, ranks], one after the other, and after each layer an all-reduce of 1 s."""
    rows = []
    for step, layers in enumerate(took_s):
        begin = 0.0
        for layer, took in enumerate(layers):
            kind, met = KINDS[layer % len(KINDS)], begin + took.max()
            for rank, mine in enumerate(took.tolist()):
                rows.append((step, rank, kind, begin, mine, None))
                rows.append((step, rank, "all-reduce", begin + mine, met + 1 - begin - mine, f"{step}.{layer}"))
            begin = met + 1
    columns = ["step", "rank", "kind", "start", "duration", "rendezvous"]
    return pl.DataFrame(rows, columns, orient="row", infer_schema_length=None).with_columns(stream=0)


def report_of(ops: pl.DataFrame, **more: tuple[tracekit.ProcessGroup, ...]) -> Report:
    return tracekit.job_of(OpTrace(ops, "job", rules=("streams",), **more)).whatif()


def of_one_slow_rank(slow_s: float = 1.5) -> pl.DataFrame:
    """Of four ranks, rank 2 takes 1.5 s for each of two ops, the others 1 s, in three steps of 5 s."""
    took = np.ones((3, 2, 4))
    took[:, :, 2] = slow_s
    return ops_of(took)


@pytest.mark.parametrize(
    ("written", "rank"),
    [
        (lambda ops: ops, 2),
        (lambda ops: ops.sample(fraction=1, shuffle=True, seed=1), 2),
        (lambda ops: ops.sort("step", descending=True, maintain_order=True), 2),
        (lambda ops: ops.with_columns(rank=1000 - pl.col("rank") * 300), 400),
        (lambda ops: ops.rename({"kind": "name"}), 2),
        (lambda ops: ops.with_columns(kind=pl.col("kind").rank("dense").cast(pl.Int64)), 2),
        (lambda ops: ops.with_columns(peer=pl.col("kind").rank("dense").cast(pl.Int64)), 2),
    ],
)
def test_the_slow_rank_is_named_at_the_pace_of_its_peers_however_the_trace_is_written(
    written: Callable[[pl.DataFrame], pl.DataFrame], rank: int
) -> None:
    report = report_of(written(of_one_slow_rank()))
    (found,) = report.findings
    assert (found.kind, found.where.ranks, found.when) == ("bad-worker", (rank,), "in every step")
    assert found.saved_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("steps", "when", "acting"),
    [((6,), "in step 6", 1), ((6, 7, 8, 9, 10, 11), "since step 6", 6), ((0, 3, 6, 9), "every 3 steps", None)],
)
def test_a_rank_that_is_slow_in_some_steps_is_named_with_them(
    steps: tuple[int, ...], when: str, acting: int | None
) -> None:
    """Twice as long in these of twelve steps: 2 s in each of them."""
    took = 1 + 0.01 * np.random.default_rng(1).random((12, 2, 4))
    took[list(steps), :, 2] += 1
    (found,) = report_of(ops_of(took)).findings
    assert (found.where.ranks, found.when) == ((2,), when)
    assert found.saved_s == pytest.approx(2 * len(steps) / 12, rel=0.05)
    assert found.saved_when_acting_s == (None if acting is None else pytest.approx(2, rel=0.02))


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_chance_makes_nobody_slow_but_a_slow_rank_shows_through_it(ranks: int) -> None:
    """Noise of 10 %: of eight healthy jobs none is named; a rank that takes a third longer is."""
    for seed in range(8):
        took = 1 + 0.1 * np.random.default_rng(seed).standard_normal((1 + seed, 6, ranks))
        assert report_of(ops_of(took)).verdict.culprit is None
    before_s = (took.max(axis=2) + 1).sum(axis=1).mean()
    took[:, :, 3] *= 4 / 3
    lost_s = (took.max(axis=2) + 1).sum(axis=1).mean() - before_s
    culprit = report_of(ops_of(took)).verdict.culprit
    assert culprit is not None
    assert culprit.rank == 3
    assert culprit.saved_s == pytest.approx(lost_s, rel=0.1)


def test_what_noise_costs_is_no_straggler() -> None:
    """It costs all that S counts."""
    took = 1 + 0.2 * np.random.default_rng(5).standard_normal((4, 8, 16))
    report = report_of(ops_of(took))
    lost = 1 - report.step_time_s.ideal / report.step_time_s.original
    assert report.answer.headline == f"no rank stands out; the noise of the ops costs {lost:.0%} of each step"
    assert (report.verdict.kind, report.verdict.lost_s) == (LossKind.BALANCED, 0.0)


def test_a_job_that_is_not_trusted_promises_no_saving() -> None:
    """Rank 4 of the group was not recorded."""
    ops = of_one_slow_rank().with_columns(group=pl.when(pl.col("rendezvous").is_not_null()).then(pl.lit("dp")))
    report = report_of(ops, groups=(tracekit.ProcessGroup("dp", range(5)),))
    assert not report.trust.trustworthy
    assert report.answer.saves is not None
    assert report.answer.saves.startswith("no saving promised, members were not recorded")
    assert all(fix.withheld is not None for fix in report.fixes)


@pytest.mark.parametrize(
    ("took", "usual_s"), [([0.5, 4.0, 4.5], 4.0), ([0.5, 4.0, 5.0, 5.2], 4.5)], ids=["of 3 peers", "of 4 peers"]
)
def test_the_pace_of_peers_is_their_median_for_each_op(took: list[float], usual_s: float) -> None:
    """Each peer is fast at another op: at the median of every op, the slow rank still comes last."""
    ops, rows = len(took), []
    for rank in range(ops + 1):
        turn = rank - (rank > 2)
        durations = [10.0] * ops if rank == 2 else took[turn % ops :] + took[: turn % ops]
        rows += [(0, rank, f"op {op}", sum(durations[:op]), durations[op], None) for op in range(ops)]
        rows.append((0, rank, "all-reduce", sum(durations), 10.0 * ops + 1 - sum(durations), "the end"))
    columns = ["step", "rank", "kind", "start", "duration", "rendezvous"]
    report = report_of(pl.DataFrame(rows, columns, orient="row", infer_schema_length=None).with_columns(stream=0))
    (finding,) = report.findings
    assert (finding.where.ranks, finding.saved_s) == ((2,), pytest.approx((10.0 - usual_s) * ops))


def test_a_rank_alone_is_nobodys_straggler() -> None:
    report = report_of(of_one_slow_rank().filter(rank=2).with_columns(rendezvous=None))
    assert (report.verdict.culprit, report.verdict.kind) == (None, LossKind.BALANCED)


@examples(60)
@given(frames(steps=2))
def test_no_rank_saves_more_than_the_critical_path_lets_it(drawn: tuple[pl.DataFrame, pl.DataFrame]) -> None:
    graph = fold(OpGraph.from_frames(*drawn))
    pace = PaceOfPeers(graph, GraphReplay(graph, measure_op_durations(graph)))
    ranks = graph.ops.mesh.ranks.tolist()
    if len(ranks) > 1:
        saved = saved_by_rank(pace, ranks)
        assert all(saved[rank] <= most + 1e-9 for rank, most in zip(ranks, pace.most_saved.tolist(), strict=True))
