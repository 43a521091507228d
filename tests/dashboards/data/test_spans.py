"""Spans of a step: right by hand on a tiny job, and whatever is slow survives on any."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handmade import (
    HEALTHY_STEP_S,
    IDEAL_STEP_S,
    LAYOUT,
    OPS_PER_STEP,
    SLOW_STEP_S,
    slow_frame,
    slow_trace,
)
from tests.properties import examples
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.browser.ui.context import EXTENSION
from tracekit.dashboards.browser.web.app import make_app
from tracekit.dashboards.figures.spans import (
    OVERVIEW_STEPS,
    Line,
    Replay,
    StepOps,
    Window,
    count,
    overview,
    path_spans,
    slowest,
    spans,
    step_ops,
    sums,
)
from tracekit.store import Store
from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS, OpKind

COMPUTE = (Line(Replay.RECORDED, "compute"),)
SEND = (Line(Replay.RECORDED, "backward-send"),)
ALL = np.arange(4)


@pytest.fixture(scope="module")
def ops() -> StepOps:
    return step_ops(JobReplay.from_trace(slow_trace()).only_steps([1]))


def test_the_critical_path_is_the_step_worked_out_by_hand(ops: StepOps) -> None:
    """Down to stage 1 and back, twice through the slow stage 0 of DP rank 1; what the step takes is all on it."""
    path = path_spans(JobReplay.from_trace(slow_trace()), ops, Replay.RECORDED)
    np.testing.assert_allclose(path.duration, [0.5, 2, 0.25, 1, 2, 0.25, 4, 0.25, 4, 0.5, 0.25, 0.5])
    np.testing.assert_allclose(path.start, np.cumsum([0, *path.duration[:-1]]))
    computes = np.isin(ops.kind[path.op], [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code])
    on = path.worker[computes]
    assert list(zip(ops.dp_rank[on], ops.pp_rank[on], strict=True)) == [(1, 0), (1, 1), (1, 1), (1, 0), (1, 0)]
    for which, step_s in ((Replay.ORIGINAL, SLOW_STEP_S), (Replay.IDEAL, IDEAL_STEP_S)):
        found = path_spans(JobReplay.from_trace(slow_trace()), ops, which)
        assert found.duration.sum() == pytest.approx(step_s)


def test_a_step_is_ordered_by_worker_and_ends_when_its_replays_do(ops: StepOps) -> None:
    assert ops.step == 1
    assert list(zip(ops.dp_rank, ops.pp_rank, strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ops.first[-1] == OPS_PER_STEP
    assert ops.end(Replay.RECORDED) == SLOW_STEP_S
    assert ops.end(Replay.IDEAL) == pytest.approx(IDEAL_STEP_S)
    assert ops.end(Replay.IDEAL) > HEALTHY_STEP_S


def early(seconds: float) -> Trace:
    """The slow job, in which the first op of worker (0,0) begins so long before the common start of the step."""
    first = (pl.col("dp_rank") == 0) & (pl.col("pp_rank") == 0) & (pl.col("kind") == "params-all-gather")
    late = pl.when(first).then(seconds).otherwise(0.0)
    shifted = slow_frame().with_columns(pl.col("start") - late, pl.col("duration") + late)
    return Trace.from_frame(shifted, LAYOUT, name="early")


def test_the_view_of_a_step_begins_with_its_earliest_op(ops: StepOps) -> None:
    assert ops.begin() == 0.0
    before = step_ops(JobReplay.from_trace(early(0.0123)))
    assert before.begin() == -0.013
    columns = 1000
    picture = overview(before, ALL, Replay.RECORDED, 4, columns)
    first = int((0.5 + 0.013) / ((SLOW_STEP_S + 0.013) / columns))
    assert np.flatnonzero(picture[0])[0] == first  # the first forward of worker (0,0) begins at 0.5 s


def test_an_op_is_compared_with_the_median_of_its_kind(ops: StepOps) -> None:
    found = spans(ops, np.array([2]), COMPUTE, None)
    assert found.first.tolist() == [0, 5]
    assert [str(KINDS[code]) for code in found.kind] == [
        *["forward-compute"] * 2,
        *["backward-compute"] * 2,
        "optimizer",
    ]
    assert found.start.tolist() == [0.5, 2.5, 6.0, 10.25, 15.0]
    assert found.duration.tolist() == [2.0, 2.0, 4.0, 4.0, 0.5]
    assert found.ratio.tolist() == [2.0, 2.0, 2.0, 2.0, 1.0]  # the others take 1 s and 2 s
    assert found.microbatch.tolist() == [0, 1, 0, 1, -1]
    assert found.wait.tolist() == [0.0] * 5


def test_waiting_for_a_peer_is_told_from_the_transfer(ops: StepOps) -> None:
    found = spans(ops, np.array([3]), SEND, None)
    assert found.duration.tolist() == [0.25, 1.5]
    assert found.wait.tolist() == [0.0, 1.25]  # the recv on stage 0 was posted at 10.0
    assert found.ratio.tolist() == [1.0, 1.0]


def test_tracks_follow_workers_and_lines_and_a_replay_has_its_own_times(ops: StepOps) -> None:
    lines = (*COMPUTE, Line(Replay.IDEAL, "compute"))
    found = spans(ops, np.array([2, 0]), lines, None)
    assert found.first.tolist() == [0, 5, 10, 15, 20]
    assert count(ops, np.array([2, 0]), lines) == 20
    ideal_of_slow = slice(found.first[1], found.first[2])
    assert found.duration[ideal_of_slow].tolist() == [1.25, 1.25, 2.5, 2.5, 0.5]
    assert found.ratio[ideal_of_slow].tolist() == [1.0] * 5  # all peers are ideal too


def test_a_window_leaves_out_what_does_not_touch_it(ops: StepOps) -> None:
    found = spans(ops, np.array([2]), COMPUTE, Window(4.6, 6.5, 100))
    assert found.start.tolist() == [6.0]


def test_the_slowest_ops_are_those_that_take_longest_beyond_their_peers(ops: StepOps) -> None:
    table = slowest(ops, ALL, COMPUTE, None, 3)
    assert table["kind"].to_list() == ["backward-compute", "backward-compute", "forward-compute"]
    assert table["beyond_peers_s"].to_list() == [2.0, 2.0, 1.0]
    assert table["peer_median_s"].to_list() == [2.0, 2.0, 1.0]
    assert set(zip(table["dp_rank"], table["pp_rank"], strict=True)) == {(1, 0)}


def test_in_the_ideal_replay_nothing_takes_longer_than_its_peers(ops: StepOps) -> None:
    table = slowest(ops, ALL, (Line(Replay.IDEAL, "compute"),), None, 100)
    assert table.height == 20
    assert set(table["beyond_peers_s"]) == {0.0}
    assert set(table["ratio"]) == {1.0}


def test_sums_by_kind_count_what_is_inside_a_window(ops: StepOps) -> None:
    # Worker (1, 0) runs forwards from 0.5 s to 4.5 s and backwards from 6.0 s.
    table = sums(ops, np.array([2]), COMPUTE, Window(2.0, 7.0, 1))
    assert table.rows() == [("forward-compute", 2, 2.5), ("backward-compute", 1, 1.0)]
    assert sums(ops, np.array([2]), COMPUTE, Window(2.0, 7.0, 1), "1 FORW").rows() == [("forward-compute", 1, 2.0)]
    assert sums(ops, np.array([2]), COMPUTE, Window(2.0, 7.0, 1), "nothing").is_empty()


def test_arrows_lead_from_the_sends_of_a_microbatch_to_their_receives(ops: StepOps) -> None:
    for name, kind, times in (
        ((1, 0, OpKind.FORWARD_COMPUTE, 1), "forward", (4.5, 4.75)),
        ((1, 1, OpKind.BACKWARD_COMPUTE, 1), "backward", (8.75, 10.25)),
    ):
        found = ops.find(*name)
        assert found is not None
        ends, when = ops.arrows(found, Replay.RECORDED)
        ((send, receive),) = ends
        assert (KINDS[ops.kind[send]], KINDS[ops.kind[receive]]) == (f"{kind}-send", f"{kind}-recv")
        assert ops.microbatch[ends].tolist() == [[1, 1]]
        assert when.tolist() == [list(times)]
    optimizer = ops.find(1, 0, OpKind.OPTIMIZER, 0)
    assert optimizer is not None
    assert ops.arrows(optimizer, Replay.RECORDED)[0].shape == (0, 2)


def test_workers_of_one_row_share_its_tracks(ops: StepOps) -> None:
    found = spans(ops, ALL, COMPUTE, None, np.array([0, 0, 1, 1]))
    assert found.first.tolist() == [0, 10, 20]
    assert np.all(np.diff(found.start[:10]) >= 0)


def test_an_op_is_found_by_its_name(ops: StepOps) -> None:
    found = ops.find(1, 0, OpKind.BACKWARD_COMPUTE, 1)
    assert found is not None
    assert ops.start[Replay.RECORDED][found] == 10.25
    assert ops.find(1, 0, OpKind.GC, 0) is None
    assert ops.find(7, 0, OpKind.GC, 0) is None


def test_what_most_workers_of_a_stage_do_without_has_no_peers() -> None:
    trace = slow_trace()
    odd = trace.ops.filter(pl.col("kind") == "optimizer", pl.col("dp_rank") == 0, pl.col("pp_rank") == 0)
    pause = odd.with_columns(pl.lit("gc").cast(odd.schema["kind"]).alias("kind"), pl.col("start") - 5.0)
    lonely = type(trace).from_frame(pl.concat([trace.ops, pause]), trace.layout, name="pause")
    ops = step_ops(JobReplay.from_trace(lonely).only_steps([0]))
    found = ops.find(0, 0, OpKind.GC, 0)
    assert found is not None
    # One of the two workers of the stage is not fewer than half.
    assert ops.ratios(np.array([found]), Replay.RECORDED).tolist() == [1.0]
    three = _made([(worker, 0.0, 1.0, int(worker == 0)) for worker in range(3)])
    assert three.ratios(np.array([0]), Replay.RECORDED).tolist() == [np.inf]
    assert three.ratios(np.array([1, 2]), Replay.RECORDED).tolist() == [1.0, 1.0]


def _made(rows: list[tuple[int, float, float, int]]) -> StepOps:
    """Ops (worker, start, duration, 1 for gc) of a job of one stage, all computes."""
    rows = sorted(rows)
    worker = np.array([row[0] for row in rows])
    workers = np.arange(worker.max() + 1)
    kind = np.array([OpKind.GC.code if row[3] else OpKind.FORWARD_COMPUTE.code for row in rows], np.uint8)
    start, duration = np.array([row[1] for row in rows]), np.array([row[2] for row in rows], np.float32)
    ran = np.array([[np.any((worker == one) & (kind == code)) for one in workers] for code in range(len(KINDS))])
    median = [np.median(duration[kind == code]) if (kind == code).any() else np.nan for code in range(len(KINDS))]
    return StepOps(
        step=0,
        dp_rank=workers,
        pp_rank=np.zeros(len(workers), np.int64),
        first=np.searchsorted(worker, np.arange(len(workers) + 1)),
        kind=kind,
        seq=np.arange(len(rows), dtype=np.int32),
        microbatch=np.full(len(rows), -1, np.int32),
        chunk=np.full(len(rows), -1, np.int16),
        start=dict.fromkeys(Replay, start),
        duration=dict.fromkeys(Replay, duration),
        cost=dict.fromkeys(Replay, duration),
        launch_delay=np.zeros(len(rows), np.float32),
        median=np.array(median),
        alone=((ran.sum(axis=1) > 0) & (2 * ran.sum(axis=1) < len(workers)))[:, None],
        meeting=np.full(len(rows), -1),
    )


jobs = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0, 10, allow_subnormal=False),
        st.floats(2**-10, 3, width=32),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=60,
)


@examples(25)
@given(rows=jobs, columns=st.integers(1, 40), begin=st.floats(0, 8), wide=st.floats(0.5, 8))
def test_the_longest_and_the_slowest_span_of_every_pixel_column_survive(
    rows: list[tuple[int, float, float, int]], columns: int, begin: float, wide: float
) -> None:
    ops = _made(rows)
    window = Window(begin, begin + wide, columns)
    everything = np.arange(ops.workers)
    found = spans(ops, everything, COMPUTE, window)
    kept = set(found.seq.tolist())
    pixel = (window.end_s - window.start_s) / columns
    ratio = ops.ratios(np.arange(len(ops.seq)), Replay.RECORDED)
    cells: dict[tuple[int, int], list[int]] = {}
    for op, start in enumerate(ops.start[Replay.RECORDED]):
        duration = ops.duration[Replay.RECORDED][op]
        if start > window.end_s or start + duration < window.start_s:
            assert op not in kept
        elif duration >= pixel:
            assert op in kept
        else:
            column = min(max(int(np.floor((start - window.start_s) / pixel)), -1), columns)
            cells.setdefault((int(ops.worker_of(np.array([op]))[0]), column), []).append(op)
    for members in cells.values():
        assert max(ops.duration[Replay.RECORDED][op] for op in members) == max(
            ops.duration[Replay.RECORDED][op] for op in members if op in kept
        )
        assert max(ratio[op] for op in members) == max(ratio[op] for op in members if op in kept)
        assert len(kept.intersection(members)) <= 2
    # What was dropped is covered by what stands for it.
    touching = sum(ops.duration[Replay.RECORDED][op] for cell in cells.values() for op in cell)
    assert found.covers.sum() >= touching * (1 - 1e-5)


@examples(25)
@given(rows=jobs, height=st.integers(1, 3), columns=st.integers(1, 12))
def test_a_cell_of_the_overview_holds_the_slowest_compute_that_touches_it(
    rows: list[tuple[int, float, float, int]], height: int, columns: int
) -> None:
    ops = _made(rows)
    picture = overview(ops, np.arange(ops.workers), Replay.RECORDED, height, columns)
    expected = np.zeros((height, columns), np.uint8)
    width = ops.end(Replay.RECORDED) / columns
    ratio = ops.ratios(np.arange(len(ops.seq)), Replay.RECORDED)
    for op, start in enumerate(ops.start[Replay.RECORDED]):
        row = int(ops.worker_of(np.array([op]))[0]) * height // ops.workers
        first = min(int(start / width), columns - 1)
        last = min(int((start + ops.duration[Replay.RECORDED][op]) / width), columns - 1)
        value = np.uint8(np.clip(ratio[op] * OVERVIEW_STEPS, 1, 255))
        expected[row, first : last + 1] = np.maximum(expected[row, first : last + 1], value)
    assert picture.tolist() == expected.tolist()


def test_what_was_read_ahead_is_in_memory_and_what_cannot_be_read_ends_quietly(sample_store: Path) -> None:
    results = Results(sample_store)
    for thread in results.ahead(
        partial(results.step, "healthy", 100),
        partial(results.stored, "nobody"),
        partial(results.step, "healthy", 10**6),
    ):
        thread.join()
    prepared = results.step("healthy", 100)
    assert results.step("healthy", 100) is prepared
    with pytest.raises(SelectionError, match="none of these steps is in the job"):
        results.step("healthy", 10**6)


def test_what_several_ask_for_at_once_is_read_once(sample_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, reads, together = Results(sample_store), [], Barrier(4)
    load = Store.load

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return load(*arguments)

    def ask() -> object:
        together.wait(30)
        return results.step("healthy", 100)

    monkeypatch.setattr(Store, "load", counted)
    with ThreadPoolExecutor(4) as pool:
        found = [asked.result() for asked in [pool.submit(ask) for _ in range(4)]]
    assert len(reads) == 1
    assert all(one is found[0] for one in found)


def test_a_page_is_read_ahead_when_its_document_is_asked_for(
    sample_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Callable[[], object]] = []
    monkeypatch.setattr(Results, "ahead", lambda _, *reads: begun.extend(reads))
    app = make_app(sample_store)
    for address in ("/timeline?job=slow-worker&step=103", "/compare?job=slow-worker&with=healthy", "/", "/healthz"):
        app.server.test_client().get(address)
    for read in begun:
        read()
    monkeypatch.setattr(Store, "reading", None)  # from here on nothing can be read
    found = app.server.extensions[EXTENSION].results
    assert found.step("slow-worker", 103).step == 103
    for job in ("slow-worker", "healthy"):
        assert found.stored(job).name == job
        assert len(found.worker_steps(job).steps)
    assert found.jobs().height == 8
