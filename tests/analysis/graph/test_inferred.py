"""Pipelines of which only computes were recorded: each waits for what it needs, found by microbatch, chunk, stage."""

from __future__ import annotations

from itertools import product

import polars as pl
import pytest

from tests.analysis.bubbles.simulated import gpipe, one_f_one_b, random_lanes, trace, v_shaped, zb_h1
from tracekit.analysis.bubbles.bubbles import find_bubbles
from tracekit.analysis.graph.megatron import virtual_stages
from tracekit.analysis.graph.unrecorded import with_inferred_transfers
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import step_times
from tracekit.base.errors import GraphError
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout
from tracekit.trace.schema import SCHEMA

TRANSFERS = ["forward-send", "forward-recv", "backward-send", "backward-recv"]
#: (stage, kind, microbatch, start, end), seconds: 1F1B of two stages. Stage 1 waits 0.5 s for the first transfer and
#: is busy when the second microbatch arrives; stage 0 waits 0.25 s for both gradients.
LANE = (
    (0, "forward-compute", 0, 0.0, 1.0),
    (0, "forward-compute", 1, 1.0, 2.0),
    (1, "forward-compute", 0, 1.5, 2.5),
    (1, "backward-compute", 0, 2.5, 4.5),
    (0, "backward-compute", 0, 4.75, 6.75),
    (1, "forward-compute", 1, 4.75, 5.75),
    (1, "backward-compute", 1, 5.75, 7.75),
    (0, "backward-compute", 1, 8.0, 10.0),
)


def job(lane: tuple[tuple[int, str, int | None, float, float], ...], chunk: int | None = 0) -> Trace:
    rows, seen = [], {}
    for stage, kind, microbatch, start, end in sorted(lane, key=lambda op: op[3]):
        seq = seen[stage, kind] = seen.get((stage, kind), -1) + 1
        rows.append((0, stage, 0, stage, kind, seq, microbatch, chunk, start, end - start))
    return Trace.from_frame(pl.DataFrame(rows, list(SCHEMA), orient="row"), Layout(pp=2), name="two")


def computes_only(recorded: Trace) -> Trace:
    ops = recorded.ops.filter(~pl.col("kind").is_in(TRANSFERS))
    return Trace.from_frame(ops, recorded.layout, name=recorded.name)


def receives(recorded: Trace) -> list[tuple[int, str, int, float, float]]:
    ops = with_inferred_transfers(recorded, virtual_stages(recorded.layout)).ops.filter(
        pl.col("kind").cast(pl.String).str.ends_with("recv")
    )
    return sorted(ops.select("pp_rank", pl.col("kind").cast(pl.String), "seq", "start", "duration").rows())


def test_a_transfer_takes_as_long_as_a_stage_waited_for_it_and_else_as_usual() -> None:
    """The second activation arrives at 2.0, when stage 1 computes: it takes 0.5 s, the only time that one waited."""
    assert receives(job(LANE)) == [
        (0, "backward-recv", 0, 4.5, 0.25),
        (0, "backward-recv", 1, 7.75, 0.25),
        (1, "forward-recv", 0, 1.0, 0.5),
        (1, "forward-recv", 1, 2.0, 0.5),
    ]


def test_the_rest_is_launch_delay_and_the_replay_reproduces_the_recording() -> None:
    """Stage 1 begins its second forward at 4.75, 0.25 s after it could."""
    replay = JobReplay.from_trace(job(LANE))
    assert replay.graph.inferred_transfers
    assert replay.recorded_step_times().tolist() == [10.0]
    assert step_times(replay, ()).tolist() == [10.0]
    delays = replay.durations.launch_delay[0]
    assert delays[delays > 1e-12].tolist() == [pytest.approx(0.25)]
    assert replay.durations.clamped_delays == replay.durations.clamped_transfers == 0


def test_a_link_carries_one_transfer_after_the_other() -> None:
    """The second activation is sent at 1.5, but the first one arrives at 2.0: half a second is left for it."""
    lane = (
        (0, "forward-compute", 0, 0.0, 1.0),
        (0, "forward-compute", 1, 1.0, 1.5),
        (1, "forward-compute", 0, 2.0, 2.5),
        (1, "forward-compute", 1, 2.5, 3.0),
        (1, "backward-compute", 0, 3.0, 4.0),
        (0, "backward-compute", 0, 4.25, 5.0),
        (1, "backward-compute", 1, 4.0, 5.0),
        (0, "backward-compute", 1, 5.25, 6.0),
    )
    assert [row for row in receives(job(lane)) if row[1] == "forward-recv"] == [
        (1, "forward-recv", 0, 1.0, 1.0),
        (1, "forward-recv", 1, 1.5, 0.5),
    ]
    found = find_bubbles(JobReplay.from_trace(job(lane)))
    assert {row.cause: row.lost_s for row in found.causes}["host"] == pytest.approx(0.0)


def test_microbatches_that_were_not_recorded_are_counted_in_order() -> None:
    unknown = tuple((stage, kind, None, start, end) for stage, kind, _, start, end in LANE)
    for chunk in (0, None):
        assert receives(job(unknown, chunk)) == receives(job(LANE))


@pytest.mark.parametrize(("seed", "orders"), list(product(range(3), (gpipe, one_f_one_b, zb_h1, v_shaped))))
def test_a_recording_without_transfers_waits_for_the_same_stages(seed: int, orders) -> None:
    """What its bubbles wait for on other stages is exact; the transfer and the launch delay behind it become one."""
    p, m = ((2, 4), (4, 6), (3, 5))[seed]
    whole = trace(random_lanes(seed, orders(p, m)), chunks=2 if orders is v_shaped else 1)
    replay = JobReplay.from_trace(computes_only(whole))
    assert step_times(replay, ()) == pytest.approx(replay.recorded_step_times(), rel=1e-12)
    known, found = find_bubbles(JobReplay.from_trace(whole)), find_bubbles(replay)
    assert found.window_s == pytest.approx(known.window_s)
    assert found.idle_s == pytest.approx(known.idle_s)
    for stage, expected in zip(found.by_stage, known.by_stage, strict=True):
        waits = [
            {(row.place, row.waits_for): row.idle_s for row in one.places if row.reason == "peer"}
            for one in (stage, expected)
        ]
        assert waits[0] == pytest.approx(waits[1])


def test_the_order_of_microbatches_may_differ_between_stages_and_steps() -> None:
    """In step 1, stage 1 takes microbatch 1 first, which stage 0 computes last: everything else is 1 s later."""
    turned = tuple(
        (stage, kind, number, start, end) if (stage, kind) == (0, "forward-compute")
        else (stage, kind, 1 - number, start + 1, end + 1)
        for stage, kind, number, start, end in LANE
    )  # fmt: skip
    both = [job(LANE).ops, job(turned).ops.with_columns(step=pl.lit(1, pl.Int32))]
    recorded = Trace.from_frame(pl.concat(both), Layout(pp=2), name="two")
    replay = JobReplay.from_trace(recorded)
    assert step_times(replay, ()).tolist() == replay.recorded_step_times().tolist() == [10.0, 11.0]
    sent = with_inferred_transfers(recorded, virtual_stages(recorded.layout)).ops
    sent = sent.filter(pl.col("kind") == "forward-recv").sort("step", "seq")
    assert sent.select("step", "microbatch", "start", "duration").rows() == [
        (0, 0, 1.0, 0.5),
        (0, 1, 2.0, 0.5),
        (1, 1, 2.0, 0.5),
        (1, 0, 1.0, 0.5),
    ]


def test_what_contradicts_itself_is_one_error_that_names_the_place() -> None:
    repeated = tuple((*op[:2], 0, *op[3:]) if op[0] == 1 and op[2] == 1 else op for op in LANE)
    with pytest.raises(GraphError, match="two: step 0, dp_rank 0, stage 1: forward-compute 0 repeats microbatch 0"):
        JobReplay.from_trace(job(repeated))
    with pytest.raises(GraphError, match="1 forward-recv ops for 2 forward-compute ops"):
        JobReplay.from_trace(job(LANE[:1] + LANE[2:]))
    early = tuple(
        (*op[:3], 0.0, 0.5) if op[:2] == (1, "forward-compute") else (*op[:3], op[3] + 1, op[4] + 1) for op in LANE
    )
    with pytest.raises(GraphError, match="forward-compute 0 ends before the compute that it needs begins: the clocks"):
        JobReplay.from_trace(job(early))
