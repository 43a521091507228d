"""Ops at the pace of their peers, worked out by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.handmade import HEALTHY_STEP_S, SLOW_STEP_S, slow_trace
from tracekit.analysis.whatif.interventions import Restructure, SetOps, step_times
from tracekit.analysis.whatif.peers import usual_of_peers
from tracekit.base.errors import SelectionError
from tracekit.trace.op import OpTrace


def op_job(axes: tuple[str, ...] = (), **columns: object) -> tracekit.OpJob:
    frame = pl.DataFrame({"start": 0.0, "kind": "x", **columns})
    return tracekit.job_of(OpTrace(frame, "job", axes=axes))


def test_the_usual_time_is_the_median_of_the_peers_and_unknown_without_any() -> None:
    totals = np.array([[1.0, 2.0, 9.0, 4.0], [1.0, 2.0, 9.0, 4.0], [5.0, 5.0, 5.0, 5.0]])
    peers = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], np.bool_)
    assert usual_of_peers(totals, peers).tolist() == pytest.approx([2.0, 1.5, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    "selection",
    ["worker=1,0", "worker=1,0 and compute", "dp_rank=1", "stage=0", "compute", "all"],
)
def test_every_selection_that_holds_the_slow_computes_repairs_them(selection: str) -> None:
    """Stage 0 of DP rank 1 takes twice as long: compared with its peers, its stage with the other, or its kind."""
    job = tracekit.job_of(slow_trace())
    assert job.answer(selection).step_time_s == pytest.approx(HEALTHY_STEP_S)


def test_who_is_as_fast_as_its_peers_saves_nothing() -> None:
    job = tracekit.job_of(slow_trace())
    for selection in ("worker=0,0", "dp_rank=0", "stage=1", "communication", "kind=optimizer"):
        assert job.answer(selection).saved_s == pytest.approx(0.0, abs=1e-9), selection


def test_an_edit_scales_some_ops_and_repairs_others() -> None:
    """All computes of the slow job twice as fast save as much as the step has on its longest path."""
    job = tracekit.job_of(slow_trace())
    assert job.answer("all * 2").step_time_s == pytest.approx(2 * SLOW_STEP_S)
    assert job.answer("worker=1,0 + all * 2").step_time_s == pytest.approx(2 * HEALTHY_STEP_S)
    assert job.answer("all * 1").saved_s == 0.0


@pytest.mark.parametrize(
    "edit", ["all * ", "all * fast", "all * -1", "all * 101", "all +", "* 2", "all * 2 and kind=gc"]
)
def test_an_edit_that_makes_no_sense_is_one_clear_error(edit: str) -> None:
    with pytest.raises(SelectionError, match="expected"):
        tracekit.job_of(slow_trace()).answer(edit)


def test_what_no_peer_has_takes_no_time() -> None:
    """Rank 2 alone collects garbage, 3 s."""
    job = op_job(rank=[0, 1, 2, 2], kind=["x", "x", "x", "gc"], duration=[1.0, 1.0, 1.0, 3.0])
    assert job.answer("kind=gc").saved_s == job.answer("rank=2").saved_s == 2.0  # they run side by side


def test_work_of_a_stage_is_compared_along_the_stage() -> None:
    """Ranks 2 and 3 are the second stage, which alone computes the loss: no rank of the first stage is their peer."""
    job = op_job(
        ("stage",), rank=[0, 1, 2, 3], kind=["first", "first", "loss", "loss"], duration=[1.0, 1.0, 5.0, 2.0],
        stage=[0, 0, 1, 1],
    )  # fmt: skip
    assert job.answer("rank=2").step_time_s == 2.0


def test_where_all_ranks_are_selected_other_steps_are_the_peers() -> None:
    """Step 2 takes 9 s on both ranks, the other steps 1 and 2 s: as fast as those, 1.5 s."""
    job = op_job(step=[0, 0, 1, 1, 2, 2], rank=[0, 1] * 3, duration=[1.0, 1.0, 2.0, 2.0, 9.0, 9.0])
    assert job.answer("step=2").step_time_s == pytest.approx((1 + 2 + 1.5) / 3)


def test_all_but_a_selection_is_as_fast_as_the_mean() -> None:
    """Ops of 1, 1 and 4 s, side by side: without rank 2 as recorded, the longest takes the mean, 2 s."""
    job = op_job(rank=[0, 1, 2], duration=[1.0, 1.0, 4.0])
    assert job.answer("rank=2", keep=True).step_time_s == 4.0
    assert job.answer("rank=0", keep=True).step_time_s == 2.0
    assert repr(job) == "<Job job: 3 ops>"
    with pytest.raises(SelectionError, match="only pipeline traces have layers; select ops instead"):
        job.answer("layers=1,2>2,1")
    with pytest.raises(SelectionError, match=r"--redact is for pipeline traces and .*; job is an op trace"):
        job.redacted()


def test_a_restructured_job_waits_for_other_ops() -> None:
    """Two ops of 1 s, the second after the first; without that edge they run side by side."""
    job = op_job(rank=[0, 1], duration=[1.0, 1.0], waits_for=[[], [0]], start=[0.0, 1.0])
    free = op_job(rank=[0, 1], duration=[1.0, 1.0], start=[0.0, 0.0])
    assert step_times(job.replay, ()).tolist() == [2.0]
    assert step_times(job.replay, (Restructure(free.replay),)).tolist() == [1.0]
    assert step_times(job.replay, (Restructure(free.replay), SetOps(np.array([3.0, 4.0])))).tolist() == [4.0]
