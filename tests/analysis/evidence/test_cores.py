"""Ranks that share the cores of a host: waits for a core and its pace are no one's slowness."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.test_find import found_in
from tracekit.analysis.evidence.off_cpu import core_pace
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

STEPS = 30
USUAL_S = {"host-delay": 0.001, "forward-compute": 0.02, "backward-compute": 0.03, "optimizer": 0.005}


def trace(factor=None, longer_s=None, *, hosts=("a", "a")):
    """Two ranks; `factor` and `longer_s`: by kind, [steps, ranks]; the latter is a wait for a core."""
    rng = np.random.default_rng(1)
    rows = []
    for step in range(STEPS):
        for rank in (0, 1):
            at = 0.0
            for kind, usual_s in USUAL_S.items():
                duration = usual_s * rng.normal(1, 0.01) * (factor or {}).get(kind, np.ones((STEPS, 2)))[step, rank]
                waited = (longer_s or {}).get(kind, np.zeros((STEPS, 2)))[step, rank]
                rows.append((step, rank, rank, 0, kind, 0, at, duration + waited, waited))
                at += duration + waited
    names = ("step", "rank", "dp_rank", "pp_rank", "kind", "seq", "start", "duration", "waited_s")
    ops = pl.DataFrame(rows, names, orient="row")
    first = pl.int_range(pl.len()).over("step", "rank") == 0
    queued = pl.when(first).then(pl.concat_list(pl.col("waited_s").sum().over("step", "rank")))
    microbatch = pl.when(pl.col("kind").str.ends_with("compute")).then(0)
    ops = ops.with_columns(queued.alias("queued"), microbatch.alias("microbatch")).drop("waited_s")
    made = Trace.from_frame(ops, Layout(dp=2, pp=1), name="job")
    return replace(made, metadata={"hosts": {"0": hosts[0], "1": hosts[1]}})


def blamed(job):
    return {cause.kind for cause in found_in(job) if cause.where.workers}


def on_rank_1(value, *, steps=slice(None)):
    factor = np.ones((STEPS, 2))
    factor[steps, 1] = value
    return factor


def test_a_core_that_is_slow_at_everything_is_no_slow_rank():
    everything = dict.fromkeys(USUAL_S, on_rank_1(1.3))
    assert blamed(trace(everything)) == set()
    assert blamed(trace(everything, hosts=("a", "b"))) == {"bad-worker"}


@pytest.mark.parametrize("kind", ["forward-compute", "backward-compute"])
def test_a_rank_that_is_slow_in_one_part_is_named_however_fast_its_core(kind):
    """Its core is fast in the first half of the run, which hides the slow part."""
    everything = {each: on_rank_1(0.8, steps=slice(15)) for each in USUAL_S}
    assert blamed(trace(everything | {kind: everything[kind] * on_rank_1(1.3)})) == {"bad-worker"}


def test_a_core_that_is_slower_at_some_kinds_of_work_than_at_others_is_no_slow_rank():
    kinds = dict(zip(USUAL_S, map(on_rank_1, (1.1, 1.2, 1.3, 1.15)), strict=True))
    assert blamed(trace(kinds)) == set()


def test_the_optimizer_of_a_slow_core_is_not_slow():
    assert blamed(trace(dict.fromkeys(USUAL_S, on_rank_1(1.4)) | {"optimizer": on_rank_1(1.7)})) == set()
    assert blamed(trace({"optimizer": on_rank_1(2.5)})) == {"slow-optimizer"}


def test_waits_for_a_core_are_no_slow_rank():
    waits = {"backward-compute": np.random.default_rng(2).uniform(0, 0.03, (STEPS, 2)) * [0, 1]}
    assert blamed(trace(None, waits)) == set()


def test_waits_for_a_core_do_not_hide_a_slow_rank():
    waits = {kind: np.random.default_rng(3).uniform(0, 0.03, (STEPS, 2)) for kind in USUAL_S}
    assert blamed(trace({"forward-compute": on_rank_1(1.3)}, waits)) == {"bad-worker"}


def test_cores_whose_speed_varies_from_step_to_step_are_no_sequences():
    speed = np.exp(np.random.default_rng(4).normal(0, 0.15, (STEPS, 2)))
    kinds = {cause.kind for cause in found_in(trace(dict.fromkeys(USUAL_S, speed)))}
    assert "sequence-length-imbalance" not in kinds


def test_one_kind_of_work_that_is_slow_is_not_the_pace_of_the_core():
    beside = np.array([0.5, 0.1, 0.2, np.nan]).reshape(4, 1, 1, 1)
    assert core_pace(beside).ravel() == pytest.approx([0.15, 0.35, 0.3, 0.2])


def test_a_core_that_is_faster_on_average_makes_nothing_look_slow():
    beside = np.array([[0.0, 0.0], [-0.3, -0.1], [-0.3, -0.1]]).reshape(3, 1, 2, 1)
    assert core_pace(beside)[0].ravel() == pytest.approx([-0.1, 0.1])
