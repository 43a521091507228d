"""What an address says about a timeline, followed where it can be and answered in one sentence where not."""

from __future__ import annotations

import numpy as np
import polars as pl

from tests.handmade import slow_trace
from tracekit.analysis.replay.engine import JobReplay
from tracekit.dashboards.browser.data.view_state import DrawnReplays, OpName, Order, Streams, read_state
from tracekit.dashboards.figures.spans import Line, Replay, Window, step_ops
from tracekit.trace.model import OpKind, Worker

STEPS = pl.DataFrame({"step": [3, 4, 9], "recorded_s": [1.0, 1.2, 1.1], "slowdown": [1.0, 1.2, 1.1]})
WORKERS = pl.DataFrame(
    {"dp_rank": [1, 0, 0, 1], "pp_rank": [1, 0, 1, 0], "slowdown": [1.5, 1.3, 1.0, 1.0]},
)


def many_workers(dp: int, pp: int) -> pl.DataFrame:
    cells = [(rank, stage, 1.0) for rank in range(dp) for stage in range(pp)]
    return pl.DataFrame(cells, ["dp_rank", "pp_rank", "slowdown"], orient="row")


def test_without_a_word_the_slowest_step_is_shown_recorded_and_ideal() -> None:
    read = read_state({}, STEPS, WORKERS)
    assert read.remarks == ()
    assert (read.state.step, read.state.view, read.state.order) == (4, DrawnReplays.BOTH, Order.SLOWEST)
    assert read.state.window(100) is None


def test_few_workers_show_all_streams_and_many_only_computes() -> None:
    assert read_state({}, STEPS, WORKERS).state.streams is Streams.ALL
    many = many_workers(8, 4)
    assert read_state({}, STEPS, many).state.streams is Streams.COMPUTE
    assert read_state({"worker": "7,3"}, STEPS, many).state.streams is Streams.ALL
    assert read_state({"streams": "all"}, STEPS, many).state.streams is Streams.ALL


def test_everything_an_address_can_say_is_read() -> None:
    texts = {
        "step": "9",
        "view": "ideal",
        "streams": "compute",
        "order": "rank",
        "worker": "0,1 1,1",
        "stage": "1-3",
        "dp_rank": "0, 1",
        "from": "-2.5",
        "to": "1e3",
        "at": "1,0",
        "op": "1,0,gc,2",
    }
    read = read_state(texts, STEPS, WORKERS)
    state = read.state
    assert read.remarks == ()
    assert (state.step, state.view, state.streams, state.order) == (9, DrawnReplays.IDEAL, Streams.COMPUTE, Order.RANK)
    assert state.window(7) == Window(-0.0025, 1.0, 7)
    assert state.top == Worker(1, 0)
    assert state.op == OpName(Worker(1, 0), OpKind.GC, 2)
    assert str(state.op) == texts["op"]
    assert state.matching(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])).tolist() == [1, 3]


def test_what_cannot_be_followed_is_one_sentence() -> None:
    for texts, said in (
        ({"step": "5"}, "step 5 is not in this job, which has 3 to 9; the nearest is 4"),
        ({"step": "99999999999999999999"}, "is not a number"),
        ({"step": "٤"}, "is not a number"),
        ({"view": "Both"}, "is not one of recorded, original, ideal, both"),
        ({"worker": "1"}, "is not DP,PP"),
        ({"worker": "1,1;2,2"}, "is not DP,PP"),
        ({"stage": "٣"}, "is not numbers or ranges"),
        ({"dp_rank": "9-5"}, "no worker matches the filter; the job has DP ranks 0-1 and stages 0-1"),
        ({"dp_rank": "1 " * 4000}, "is not numbers or ranges"),
        ({"from": "1"}, "needs both from= and to="),
        ({"from": "1", "to": "1.0001"}, "ends before it begins, or is below 1 us"),
        ({"from": "inf", "to": "1"}, "is not milliseconds"),
        ({"op": "0,0,../../etc,0"}, "is not DP,PP,KIND,SEQ"),
        ({"pin": "0,1 9,9"}, "pin=9,9 is no worker of this job; it is left out"),
        ({"range": "-"}, "is not milliseconds such as 200-400"),
        ({"at": "<b>"}, "is not DP,PP"),
    ):
        read = read_state(texts, STEPS, WORKERS)
        assert said in read.remarks[0]
        assert all(len(remark) < 200 for remark in read.remarks)
    assert read_state({"view": "both "}, STEPS, WORKERS).remarks == ()
    assert read_state({"pin": "0,1 9,9"}, STEPS, WORKERS).state.pinned == "0,1"


def test_the_slowest_worker_comes_first_and_equally_slow_ones_by_rank() -> None:
    ops = step_ops(JobReplay.from_trace(slow_trace()).only_steps([0]))
    ordered = read_state({}, STEPS, WORKERS).state.ordered(ops, WORKERS)
    assert list(zip(ops.dp_rank[ordered], ops.pp_rank[ordered], strict=True)) == [(1, 1), (0, 0), (0, 1), (1, 0)]
    by_rank = read_state({"order": "rank"}, STEPS, WORKERS).state.ordered(ops, WORKERS)
    assert by_rank.tolist() == [0, 1, 2, 3]


def test_rows_are_pinned_workers_then_groups_with_the_workers_of_open_ones() -> None:
    ops = step_ops(JobReplay.from_trace(slow_trace()).only_steps([0]))
    workers = np.array([3, 0, 1, 2])  # (1, 1), (0, 0), (0, 1), (1, 0)
    hosts = ["b", "a", "", "b"]
    plain = read_state({"pin": "0,1 0,0"}, STEPS, WORKERS).state.rows(ops, workers, hosts)
    assert (plain.pinned, plain.worker.tolist(), plain.row.tolist()) == (2, [1, 0, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5])
    assert plain.of_workers(4).tolist() == [3, 4, 5, 2]
    by_host = read_state({"group": "host", "open": "1,0"}, STEPS, WORKERS).state.rows(ops, workers, hosts)
    assert by_host.group == ["b", "", "", "a", "host unknown"]
    assert (by_host.worker.tolist(), by_host.row.tolist()) == ([3, 2, 3, 2, 0, 1], [0, 0, 1, 2, 3, 4])
    assert by_host.leaders().tolist() == [3, 3, 2, 0, 1]
    assert by_host.of_workers(4).tolist() == [3, 4, 2, 1]
    assert [part.tolist() for part in by_host.part(2, 4)] == [[2, 0], [0, 1]]
    by_stage = read_state({"group": "stage", "pin": "0,1"}, STEPS, WORKERS).state.rows(ops, workers, hosts)
    assert by_stage.group == ["", "stage 1", "stage 0"]
    assert [part.tolist() for part in by_stage.part(2, 3)] == [[1, 0, 2], [0, 1, 1]]


def test_the_lines_of_a_worker_put_each_stream_above_its_ideal() -> None:
    ops = step_ops(JobReplay.from_trace(slow_trace()).only_steps([0]))
    lines = read_state({}, STEPS, WORKERS).state.lines(ops)
    assert lines[:3] == (
        Line(Replay.RECORDED, "compute"),
        Line(Replay.IDEAL, "compute"),
        Line(Replay.RECORDED, "forward-send"),
    )
    alone = read_state({"streams": "compute", "view": "original"}, STEPS, WORKERS).state.lines(ops)
    assert alone == (Line(Replay.ORIGINAL, "compute"),)
