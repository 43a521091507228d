"""Whoever selects what is slow gets the price of its fix; whoever selects something else gets next to nothing."""

from __future__ import annotations

import pytest

import tracekit
from judges.eventsim.cases import draw_job
from judges.eventsim.run import simulate
from tracekit.synth import InjectedCause, SlowWorker, SynthSpec, synthesize
from tracekit.trace.model import Layout


def job_with(*causes: InjectedCause, **layout: int) -> tracekit.Job:
    layout = {"dp": 4, "pp": 4, "tp": 4} | layout
    return tracekit.job_of(synthesize(SynthSpec(Layout(**layout), steps=8, seed=21, causes=causes)))


def saved_by(job: tracekit.Job, kind: str) -> float:
    return next(fix.saved_s for fix in job.report.fixes if fix.kind == kind)


@pytest.mark.parametrize("layout", [{}, {"dp": 1}, {"pp": 1}, {"dp": 2, "pp": 2}])
def test_a_slow_worker(layout: dict[str, int]) -> None:
    """All of it, or only its computes; another worker saves next to nothing."""
    job = job_with(SlowWorker(dp_rank=0, pp_rank=0, factor=1.5), **layout)
    slow = saved_by(job, "replace-workers")
    assert slow > 0.1 * job.evidence.recorded_s
    assert job.answer("worker=0,0").saved_s == job.answer("worker=0,0 and compute").saved_s == slow
    other = "worker=1,0" if job.evidence.dp_ranks[1:] else "worker=0,1"
    assert abs(job.answer(other).saved_s) < 0.01 * slow


def test_a_slow_worker_in_some_steps() -> None:
    """What the worker costs in half of the steps, step by step, is half of what its fix saves."""
    job = job_with(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))
    steps = job.evidence.replay.graph.steps
    parts = [job.answer(f"worker=1,2 and step={half[0]}-{half[-1]}").saved_s for half in (steps[:4], steps[4:])]
    assert sum(parts) == pytest.approx(job.answer("worker=1,2").saved_s)
    assert min(parts) > 0.4 * sum(parts)


def test_a_slow_network_card() -> None:
    """A card belongs to all workers of its host, and so does what passes it; their computes are fine."""
    job = tracekit.job_of(simulate(draw_job(20_000_018, "P2-nic")).trace)
    (cause,) = [cause for cause in job.report.findings if cause.kind == "slow-nic"]
    assert job.answer(f"host={cause.where.host}").saved_s == pytest.approx(saved_by(job, "repair-nic"))
    assert job.answer(f"host={cause.where.host} and compute").saved_s == pytest.approx(0.0, abs=1e-9)
