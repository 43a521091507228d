"""The answer says who, how much, why, and what to do, in sentences that stand by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tests.handmade import LAYOUT, healthy_frame, slow_frame
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.trace.canonical import DEVICE_CLOCK, Trace
from tracekit.trace.facts import COLLECTED

#: One of four ranks takes twice as long: a step of 0.61 s where its peers would take 0.31 s.
SLOW = data_parallel_job([[FORWARD, BACKWARD]] * 3 + [[("forward-compute", 0.2), ("backward-compute", 0.4)]], steps=8)
SLOW = replace(
    SLOW,
    metadata={"hosts": {str(rank): f"node-{rank // 2}" for rank in range(4)}, "gpus": {"3": {"uuid": "GPU-3"}}},
)


def test_a_slow_rank_is_named_with_what_it_costs_and_what_to_do() -> None:
    report = PipelineJob(SLOW).whatif()
    answer, verdict = report.answer, report.verdict
    share = verdict.lost_s / 0.61
    assert answer.headline == f"rank 3 on node-1 costs {share:.0%} of each step: computes 100% slower than its peers"
    assert answer.cost is not None
    assert answer.cost.startswith(f"{verdict.lost_s * 1e3:.1f} ms of every 610.0 ms step, ")
    assert answer.who is not None
    assert answer.who.startswith("rank 3 on node-1 (dp 3, stage 0), in every step, ")
    assert answer.fix is not None
    assert answer.action is not None
    assert answer.action.startswith(
        "Check rank 3 on node-1 for throttled GPUs (nvidia-smi -q -d PERFORMANCE): if throttled, "
    )
    assert answer.fix.startswith(f"{answer.action}; saves 300.0 ms")
    assert "(610.0 ms to 310.0 ms, 49%)" in answer.fix
    assert answer.check == report.findings[0].next_check
    (culprit,) = answer.culprits
    assert (culprit.rank, culprit.host, culprit.gpu_uuid, culprit.part) == (3, "node-1", "GPU-3", "compute")
    assert culprit.cost_s == pytest.approx(0.3)
    assert culprit.first_step is None


@pytest.mark.parametrize(
    ("slow", "when", "who"),
    [
        (range(12, 20), "each step since step 12", "since step 12"),  # the fault begins
        (range(8), "steps 0 to 7", "in steps 0 to 7"),  # it ends
        (range(5, 11), "steps 5 to 10", "in steps 5 to 10"),  # both
    ],
)
def test_a_fault_that_begins_or_ends_costs_its_own_steps(slow: range, when: str, who: str) -> None:
    """Stage 0 of DP rank 1 loses 4.25 s of each slow step of 15.5 s, of 20 steps."""
    healthy = healthy_frame([step for step in range(20) if step not in slow])
    ops = pl.concat([slow_frame(slow), healthy]).sort("step", maintain_order=True)
    answer = PipelineJob(Trace.from_frame(ops, LAYOUT, name="job")).whatif().answer
    assert answer.headline == f"rank 1 costs 27% of {when}: computes 100% slower than its peers"
    assert answer.who is not None
    assert answer.who.startswith(f"rank 1 (dp 1, stage 0), {who}, ")


@pytest.mark.parametrize(
    ("metadata", "does"),
    [
        ({"format": COLLECTED}, "Check the cores of rank 3 on its node for other processes"),
        ({"format": COLLECTED, "gpus": {"3": {"uuid": "GPU-3"}}}, "Check rank 3 on its node for throttled GPUs"),
        ({"format": COLLECTED, DEVICE_CLOCK: {}}, "Check rank 3 on its node for throttled GPUs"),
        ({}, "Check rank 3 on its node for throttled GPUs"),
    ],
)
def test_nobody_looks_for_throttled_gpus_where_none_took_part(metadata: dict[str, Any], does: str) -> None:
    answer = PipelineJob(replace(SLOW, metadata=metadata)).whatif().answer
    assert answer.action is not None
    assert answer.action.startswith(does)


def test_a_rank_that_collects_in_every_step_does_so_on_request() -> None:
    """Python collects by itself every so many objects; gc.disable() does not stop a call of gc.collect()."""
    programs = [[FORWARD, BACKWARD]] * 3 + [[FORWARD, BACKWARD, ("gc", 0.2)]]
    answer = PipelineJob(data_parallel_job(programs, steps=8)).whatif().answer
    assert answer.action is not None
    assert answer.action.startswith("Take out what collects garbage in every step on rank 3 (gc.collect() ")
    assert answer.who is not None
    assert answer.who.startswith("rank 3 (dp 3, stage 0), in every step, ")


def test_a_balanced_job_has_no_culprit() -> None:
    answer = PipelineJob(data_parallel_job([[FORWARD, BACKWARD]] * 4)).whatif().answer
    assert (answer.cost, answer.who, answer.why, answer.check, answer.fix) == (None, None, None, None, None)
    assert answer.culprits == ()
    assert answer.headline.startswith("no straggler")


def test_causes_beyond_the_first_are_named_in_a_line_each() -> None:
    load, slow = ("data-load", 0.3), [("forward-compute", 0.15), ("backward-compute", 0.25)]
    programs = [[load, FORWARD, BACKWARD]] * 3 + [[load, *slow]]
    answer = PipelineJob(data_parallel_job(programs, steps=8)).whatif().answer
    assert answer.headline.startswith("300.0 ms of every 710.0 ms step are spent waiting for data: data comes 300.0 ms")
    assert answer.others == ("rank 3: computes 33% slower than its peers (costs 100.0 ms a step)",)
