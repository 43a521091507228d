"""Ops that only some lanes have, in random places: one structure gives what a structure per lane gives."""

import numpy as np
import polars as pl
import pytest

from tests.analysis.brute_force import BruteForce
from tests.analysis.small_jobs import BACKWARD, FORWARD, of_steps
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.by_label import attribute_by
from tracekit.analysis.attribution.critical_path import critical_ops, critical_path
from tracekit.analysis.evidence.pipeline_subject import with_step_delays
from tracekit.analysis.graph import occasional
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.graph.op_grid import op_grid
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.clocks import Clocks
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.pipeline_costs import measure_durations
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    RECORDED,
    Idealise,
    SetCost,
    addition,
    delayed,
    removal,
    step_times,
)
from tracekit.analysis.whatif.selection import count_selected, dp_rank, everything, kind, slowest
from tracekit.analysis.whatif.timeline import compared_frame
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, OpKind

KINDS = ("gc", "checkpoint", "data-load", "host-delay")
OP = ["step", "dp_rank", "pp_rank", "kind", "seq"]


def irregular(seed: int, share: float, layout: Layout | None = None) -> Trace:
    """A job in which, before or after `share` of the computes, one to three occasional ops of random kinds run."""
    layout = layout or Layout(dp=3, pp=2)
    spec = SynthSpec(layout=layout, microbatches=4, steps=3, seed=seed, noise=0.1)
    trace, rng = synthesize(spec), np.random.default_rng(seed)
    ops = trace.ops.filter(~pl.col("kind").is_in(KINDS))
    computes = ops.filter(pl.col("kind").is_in(["forward-compute", "backward-compute"]))
    chosen = computes.filter(pl.Series(rng.random(len(computes)) < share))
    rows = []
    for op in chosen.iter_rows(named=True):
        at = op["start"] + (op["duration"] if rng.random() < 0.7 else -2e-2)
        for _ in range(rng.integers(1, 4)):
            rows.append(op | {"kind": str(rng.choice(KINDS)), "start": at, "duration": float(rng.gamma(2, 1e-3))})
            at += rows[-1]["duration"]
    extra = (
        pl.DataFrame(rows, schema=ops.schema)
        .with_columns(microbatch=pl.lit(None, pl.Int32), chunk=pl.lit(None, pl.Int16))
        .sort("step", "dp_rank", "pp_rank", "start")
        .with_columns(seq=pl.int_range(pl.len()).over("step", "dp_rank", "pp_rank", "kind").cast(pl.Int32))
    )
    return Trace.from_frame(pl.concat([ops, extra.select(ops.columns)]), layout, name="irregular")


def one_and_many(trace: Trace, monkeypatch: pytest.MonkeyPatch, method: Method) -> tuple[JobReplay, JobReplay]:
    """The job with one structure, and with a structure per kind of lane; its clocks are right."""
    one = replay_of(trace, method)
    monkeypatch.setattr(occasional, "MOST_CELLS_PER_OP", 0)
    many = replay_of(trace, method)
    monkeypatch.undo()
    assert len(one.graph.blocks) == 1
    assert len(many.graph.blocks) > 3
    return one, many


def replay_of(trace: Trace, method: Method) -> JobReplay:
    graph = DependencyGraph.from_trace(trace)
    return JobReplay(graph, measure_durations(graph, method), Clocks.right(graph))


def exactly(values, expected) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)


JOBS = [(seed, share) for seed, share in enumerate([0.02, 0.2, 0.9])]


@pytest.mark.parametrize(("seed", "share"), JOBS)
@pytest.mark.parametrize("method", Method)
def test_replays_and_attribution_are_those_of_a_structure_per_lane(seed, share, method, monkeypatch):
    one, many = one_and_many(irregular(seed, share), monkeypatch, method)
    assert one.graph.ops == many.graph.ops
    questions = [
        ORIGINAL,
        IDEAL,
        RECORDED,
        removal(kind(OpKind.GC, OpKind.CHECKPOINT)),
        addition(slowest(3)),
        (Idealise(everything()), *delayed(dp_rank(1))),
        *(
            question
            for selection in (kind(OpKind.DATA_LOAD), everything(), dp_rank(0))
            for question in (addition(selection), removal(selection))
        ),
        *(
            (*base, SetCost(selection, 0.003))
            for base in (ORIGINAL, IDEAL)
            for selection in (kind(OpKind.DATA_LOAD), everything(), dp_rank(0))
        ),
    ]
    for question in questions:
        exactly(step_times(one, question), step_times(many, question))
    exactly(one.recorded_step_times(), many.recorded_step_times())
    exactly(step_times(one, RECORDED), step_times(many, RECORDED))
    for selection in (everything(), slowest(3), kind(OpKind.GC)):
        counts = [count_selected(selection, replay.graph, replay.durations) for replay in (one, many)]
        assert counts[0] == counts[1]
    ours, theirs = attribute(one), attribute(many)
    exactly(ours.by_worker, theirs.by_worker)
    exactly(ours.by_dp_rank, theirs.by_dp_rank)
    shares = [{share.values: share for share in attribute_by(replay, ["kind", "dp_rank"])} for replay in (one, many)]
    assert shares[0].keys() == shares[1].keys()
    for values, share_of_values in shares[0].items():
        other = shares[1][values]
        assert share_of_values.ops == other.ops
        exactly([share_of_values.added_s, share_of_values.removed_s], [other.added_s, other.removed_s])


@pytest.mark.parametrize(("seed", "share"), JOBS)
def test_every_op_costs_and_runs_as_with_a_structure_per_lane(seed, share, monkeypatch):
    one, many = one_and_many(irregular(seed, share), monkeypatch, Method.TRACEKIT)
    ours, theirs = (compared_frame(replay).sort(OP) for replay in (one, many))
    assert ours.drop("microbatch", "chunk").select(OP).equals(theirs.select(OP))
    for column in ours.columns[len(OP) :]:
        if column == "transfer":  # its numbers may be others, as long as they join the same ops
            pairs = pl.DataFrame({"ours": ours[column], "theirs": theirs[column]}).unique()
            assert pairs.height == ours[column].n_unique() == theirs[column].n_unique()
        else:
            exactly(ours[column].fill_null(-1), theirs[column].fill_null(-1))
    assert critical_ops(one, ORIGINAL).equals(critical_ops(many, ORIGINAL))
    exactly(critical_path(one, RECORDED).mean_delay_s, critical_path(many, RECORDED).mean_delay_s)
    for step in one.graph.steps.tolist():
        a, b = one.graph.to_networkx(step), many.graph.to_networkx(step)
        assert set(a.edges) == set(b.edges)
        assert {node: data["start"] for node, data in a.nodes.items()} == {
            node: data["start"] for node, data in b.nodes.items()
        }
    for kinds in ((OpKind.GC,), (OpKind.FORWARD_COMPUTE, OpKind.HOST_DELAY)):
        grids = [op_grid(replay.graph, kinds).gather(replay.durations.cost) for replay in (one, many)]
        exactly(grids[0], grids[1])
    delays = [with_step_delays(replay, {0: 0.0, 1: 0.1, 2: 0.2}) for replay in (one, many)]
    exactly(step_times(delays[0], RECORDED), step_times(delays[1], RECORDED))


@pytest.mark.parametrize(("seed", "share"), JOBS)
def test_one_structure_replays_as_the_graph_walked_op_by_op(seed, share, monkeypatch):
    trace = irregular(seed, share)
    replay = JobReplay.from_trace(trace, Method.PUBLISHED)
    monkeypatch.setattr(occasional, "MOST_CELLS_PER_OP", 0)
    oracle = BruteForce(trace)
    for question, chosen in ((ORIGINAL, lambda _: True), (IDEAL, lambda _: False)):
        exactly(step_times(replay, question), [time for _, time in sorted(oracle.step_times(chosen).items())])


def test_a_first_op_that_others_lack_delays_nobody():
    """Two ranks start 5 ms late, one of them with loading data: what is late is the first op of each."""
    late = [[FORWARD, BACKWARD], [("data-load", 0.05), FORWARD, BACKWARD]]
    trace = of_steps([late, late[::-1]])
    shifted = Trace.from_frame(trace.ops.with_columns(start=pl.col("start") + 0.005), trace.layout, name="late")
    replay = JobReplay.from_trace(shifted)
    (block,) = replay.graph.blocks
    assert block.ops == len(trace.ops)
    frame = compared_frame(replay).sort(OP)
    firsts = frame.filter(pl.col("recorded_start") == 0.005)
    assert sorted(firsts["kind"].cast(pl.String)) == ["data-load", "data-load", "forward-compute", "forward-compute"]
    exactly(firsts["launch_delay"], [0.005] * 4)
    exactly(block.begins().sum(axis=0), [1] * 4)


def test_lanes_with_little_in_common_keep_structures_of_their_own():
    """A rank that runs a thousand evaluations in one step does not give every lane a thousand empty rows."""
    usual = [FORWARD, BACKWARD]
    steps = [[usual, usual]] * 3 + [[usual, [*usual, *[("host-delay", 0.001)] * 1000]]]
    graph = JobReplay.from_trace(of_steps(steps)).graph
    assert len(graph.blocks) == 2
    assert sum(block.start.size for block in graph.blocks) == graph.ops


def test_a_dp_rank_with_nothing_but_a_collection_is_a_lane() -> None:
    """A forward of 10 ms on one DP rank, a collection of 20 ms on the other, which usually collects nothing."""
    ops = pl.DataFrame(
        {"step": 0, "rank": [0, 1], "dp_rank": [0, 1], "pp_rank": 0, "kind": ["forward-compute", "gc"], "seq": 0}
        | {"start": 0.0, "duration": [0.01, 0.02]}
    )
    replay = replay_of(Trace.from_frame(ops, Layout(dp=2, pp=1), name="collects"), Method.TRACEKIT)
    exactly(step_times(replay, ORIGINAL), [0.02])
    exactly(step_times(replay, IDEAL), [0.01])


@pytest.mark.parametrize("alone", ["checkpoint", "data-load", "evaluation", "gc", "host-delay", "loss"])
@pytest.mark.parametrize("collective", ["forward-collectives", "backward-collectives"])
def test_ranks_meet_in_one_collective_whatever_one_of_them_does_before_it(alone, collective):
    """In every other step, a rank does 5 ms of its own, and the other waits as long in a collective of 1 ms."""
    busy = [FORWARD, (alone, 0.005), (collective, 0.001), BACKWARD]
    waiting = [FORWARD, (collective, 0.006), BACKWARD]
    replay = JobReplay.from_trace(of_steps([[[FORWARD, BACKWARD]] * 2, [busy, waiting]] * 2))
    meets = [block.template.kind == OpKind(collective).code for block in replay.graph.blocks]
    costs = [cost[rows] for cost, rows in zip(replay.durations.cost, meets, strict=True)]
    exactly(np.unique(np.concatenate([part[part != 0] for part in costs]).round(9)), [0.001])
    plain_s = step_times(replay, RECORDED)[0]
    without = step_times(replay, (SetCost(kind(OpKind(alone)), 0.0), *RECORDED))
    exactly(without, [plain_s, plain_s + 0.001] * 2)
