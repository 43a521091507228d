"""Replay of op graphs: equal to a plain simulation, folded or not, one scenario or many at once."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given

from tests.analysis.op_graphs import frames, simulated_ends
from tests.properties import examples
from tracekit.analysis.attribution import by_label
from tracekit.analysis.attribution.by_label import attribute_by
from tracekit.analysis.graph.op_graph import FoldedGraph, Mesh, OpGraph, fold
from tracekit.analysis.replay.graph_replay import FEW_LANES, GraphReplay, fill_an_axis, measure_op_durations
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    RECORDED,
    SetCost,
    addition,
    mean_step_time,
    removal,
    step_times,
    step_times_each,
    timelines,
)
from tracekit.analysis.whatif.selection import communication, everything, labelled
from tracekit.base.errors import SelectionError

Frames = tuple[pl.DataFrame, pl.DataFrame]
PATIENT = examples(15)


def replay_of(ops: pl.DataFrame, edges: pl.DataFrame, axes: tuple[str, ...] = ()) -> GraphReplay:
    graph = fold(OpGraph.from_frames(ops, edges, axes=axes))
    return GraphReplay(graph, measure_op_durations(graph))


def of_ops(graph: FoldedGraph, matrices: tuple[np.ndarray, ...]) -> np.ndarray:
    """Values of the cells of each block, by op."""
    values = np.empty(len(graph.ops.start))
    for block, matrix in zip(graph.blocks, matrices, strict=True):
        values[block.op] = matrix
    return values


@PATIENT
@given(frames(steps=3))
def test_every_op_ends_when_an_event_simulation_ends_it(drawn: Frames) -> None:
    replay = replay_of(*drawn)
    graph = replay.graph
    assert isinstance(graph, FoldedGraph)
    expected = simulated_ends(graph.ops, of_ops(graph, replay.durations.cost))
    ends = of_ops(graph, tuple(timeline.end for timeline in timelines(replay, ORIGINAL)))
    np.testing.assert_allclose(ends, expected, rtol=1e-12)
    of_steps = [expected[graph.ops.step == step].max() for step in graph.steps]
    np.testing.assert_allclose(step_times(replay, ORIGINAL), of_steps, rtol=1e-12)


@PATIENT
@given(frames(steps=3))
def test_equal_steps_fold_into_one_template(drawn: Frames) -> None:
    replay = replay_of(*drawn)
    assert len(replay.graph.blocks) == 1
    assert replay.graph.blocks[0].start.shape == (drawn[0].height // 3, 3)


def test_steps_of_different_structure_do_not_fold() -> None:
    ops = pl.DataFrame({"step": [0, 0, 1, 1], "rank": 0, "kind": "a", "start": 0.0, "duration": [1.0, 2.0, 4.0, 8.0]})
    replay = replay_of(ops, pl.DataFrame({"before": [2], "after": [3]}))
    assert len(replay.graph.blocks) == 2
    assert step_times(replay, ORIGINAL).tolist() == [2.0, 12.0]


@PATIENT
@given(frames(steps=2))
def test_many_questions_at_once_give_what_each_gives_alone(drawn: Frames) -> None:
    replay = replay_of(*drawn)
    questions = [
        ORIGINAL,
        IDEAL,
        addition(labelled("host", "n0") | labelled("kind", "a", "b", "c", "sync") & labelled("rank", 3)),
        removal(labelled("rank", 0, 1)),
        (*ORIGINAL, SetCost(~communication(), 0.5)),
        RECORDED,
    ][: 2 if drawn[0]["host"].n_unique() < 2 or drawn[0]["kind"].n_unique() < 4 else 6]
    one_by_one = [step_times(replay, question) for question in questions]
    np.testing.assert_array_equal(step_times_each(replay, questions), one_by_one)


@PATIENT
@given(frames(steps=2))
def test_attribution_by_label_is_one_question_for_each_value(drawn: Frames) -> None:
    replay = replay_of(*drawn)
    ideal, original = mean_step_time(replay, IDEAL), mean_step_time(replay, ORIGINAL)
    shares = attribute_by(replay, ["host", "rank"])
    assert {share.values for share in shares} == set(drawn[0].select("host", "rank").iter_rows())
    for share in shares:
        chosen = labelled("host", str(share.values[0])) & labelled("rank", share.values[1])
        added = mean_step_time(replay, addition(chosen))
        assert share.added_s == pytest.approx(added - ideal)
        assert share.slowdown == (pytest.approx(added / ideal) if ideal else pytest.approx(np.nan, nan_ok=True))
        assert share.removed_s == pytest.approx(original - mean_step_time(replay, removal(chosen)))
        assert share.ops == drawn[0].filter(host=share.values[0], rank=share.values[1]).height


@PATIENT
@given(frames(steps=9))
def test_attribution_is_the_same_for_few_lanes_and_for_many(drawn: Frames) -> None:
    """Few lanes replay all values side by side, many replay one value after the other; the host differs by step."""
    ops, edges = drawn
    ops = ops.with_columns(host=pl.concat_str("host", pl.col("step") // 10 % 2))
    few = ops.filter(pl.col("step") < 10 * (FEW_LANES - 1))
    for some in (few, ops):
        replay = replay_of(some, edges.filter(pl.max_horizontal("before", "after") < some.height))
        assert replay.has_few_lanes is (some is few)
        for labels in (["step"], ["host"], ["host", "step"]):
            shares = attribute_by(replay, labels)
            assert {share.values for share in shares} == set(some.select(labels).iter_rows())
            for share in shares:
                chosen = everything()
                for label, value in zip(labels, share.values, strict=True):
                    chosen &= labelled(label, value)
                added, removed = (mean_step_time(replay, of(chosen)) for of in (addition, removal))
                assert share.added_s == added - mean_step_time(replay, IDEAL)
                assert share.removed_s == mean_step_time(replay, ORIGINAL) - removed


def test_a_label_with_too_many_values_for_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_label, "COSTLIEST_OP_REPLAYS", 1_000_000)
    size = 1000
    ops = pl.DataFrame({"rank": pl.int_range(size, eager=True), "kind": "a", "start": 0.0, "duration": 1.0})
    replay = replay_of(ops, pl.DataFrame({"before": [0], "after": [1]}))
    with pytest.raises(SelectionError, match="rank has 1000 values, and each takes two replays of 1000 ops"):
        attribute_by(replay, ["rank"])


class TestIdealOfPeers:
    """Four ranks, dp 2 x pp 2; ranks 0 and 2 are the first stage."""

    PLACES = pl.DataFrame({"rank": [0, 1, 2, 3], "dp_rank": [0, 0, 1, 1], "pp_rank": [0, 1, 0, 1]})

    def ideals(self, *ops: tuple[int, str, float]) -> dict[tuple[int, str], float]:
        """The ideal of ops given as (rank, kind, duration)."""
        frame = pl.DataFrame(ops, schema=["rank", "kind", "duration"], orient="row").with_columns(start=pl.lit(0.0))
        frame = frame.join(self.PLACES, on="rank", how="left", maintain_order="left")
        no_edges = pl.DataFrame(schema={"before": pl.Int64, "after": pl.Int64})
        replay = replay_of(frame, no_edges, ("dp_rank", "pp_rank"))
        graph = replay.graph
        assert isinstance(graph, FoldedGraph)
        ideal = of_ops(graph, tuple(rows[:, None] for rows in replay.durations.ideal))
        return {(rank, kind): value for (rank, kind, _), value in zip(ops, ideal.tolist(), strict=True)}

    def test_work_of_all_ranks_takes_the_mean(self) -> None:
        work = [(rank, "work", float(rank)) for rank in range(4)]
        assert set(self.ideals(*work).values()) == {1.5}

    def test_what_one_rank_does_alone_is_excess(self) -> None:
        work = [(rank, "work", 1.0) for rank in range(4)]
        assert self.ideals(*work, (3, "gc", 5.0))[3, "gc"] == 0.0

    def test_what_all_replicas_of_a_stage_do_is_its_work(self) -> None:
        work = [(rank, "work", 1.0) for rank in range(4)]
        assert self.ideals(*work, (0, "embedding", 2.0), (2, "embedding", 4.0))[0, "embedding"] == 3.0

    def test_a_rank_that_does_more_of_it_than_others_has_their_total(self) -> None:
        """Two loads of 3 s on rank 3 where the others have one of 1 s: each should take half a second."""
        loads = [*((rank, "load", 1.0) for rank in range(3)), (3, "load", 3.0), (3, "load", 3.0)]
        assert self.ideals(*loads)[3, "load"] == 0.5
        assert self.ideals(*loads)[0, "load"] == 1.0


def test_ranks_fill_an_axis_if_all_beside_them_along_it_are_among_them():
    """Two by two ranks; and two along the second axis alone, where the first has nobody beside."""
    places = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.int32)
    square = Mesh(np.arange(4, dtype=np.int32), {"dp": 2, "pp": 2}, places)
    line = Mesh(np.arange(2, dtype=np.int32), {"dp": 1, "pp": 2}, np.array([[0, 0], [0, 1]], np.int32))
    for mesh, holders, fills in (
        (square, [0, 1], True), (square, [1, 3], True), (square, [0, 3], False), (square, [0, 1, 2], False),
        (line, [0], False), (line, [0, 1], True),
    ):  # fmt: skip
        assert fill_an_axis(mesh, np.array(holders)) is fills, holders
