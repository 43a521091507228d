"""The answer names the culprit, and what to check; its sentences are in tests/sentences.txt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.trace.canonical import DEVICE_CLOCK
from tracekit.trace.facts import COLLECTED

#: One of four ranks takes twice as long: a step of 0.61 s where its peers would take 0.31 s.
SLOW = data_parallel_job([[FORWARD, BACKWARD]] * 3 + [[("forward-compute", 0.2), ("backward-compute", 0.4)]], steps=8)
SLOW = replace(
    SLOW,
    metadata={"hosts": {str(rank): f"node-{rank // 2}" for rank in range(4)}, "gpus": {"3": {"uuid": "GPU-3"}}},
)


def test_a_slow_rank_is_named_with_its_host_and_what_it_costs() -> None:
    report = PipelineJob(SLOW).whatif()
    assert report.answer.check == report.findings[0].next_check
    (culprit,) = report.answer.culprits
    assert (culprit.rank, culprit.host, culprit.gpu_uuid, culprit.part) == (3, "node-1", "GPU-3", "compute")
    assert culprit.cost_s == pytest.approx(0.3)
    assert culprit.first_step is None


@pytest.mark.parametrize(
    ("metadata", "gpus"),
    [
        ({"format": COLLECTED}, False),
        ({"format": COLLECTED, "gpus": {"3": {"uuid": "GPU-3"}}}, True),
        ({"format": COLLECTED, DEVICE_CLOCK: {}}, True),
        ({}, True),
    ],
)
def test_nobody_looks_for_throttled_gpus_where_none_took_part(metadata: dict[str, Any], *, gpus: bool) -> None:
    answer = PipelineJob(replace(SLOW, metadata=metadata)).whatif().answer
    assert answer.action is not None
    assert ("nvidia-smi" in answer.action) == gpus


def test_a_balanced_job_has_no_culprit() -> None:
    answer = PipelineJob(data_parallel_job([[FORWARD, BACKWARD]] * 4)).whatif().answer
    assert (answer.cost, answer.who, answer.why, answer.check, answer.fix) == (None, None, None, None, None)
    assert answer.culprits == ()
