"""What S consists of: causes, the noise of the run, and what nothing explains, in the answer of every kind of job."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from judges.kinetosim import Job as RecordedJob
from judges.kinetosim import Trouble
from tests.analysis.small_jobs import of_steps
from tracekit.analysis.attribution.attribution import Parts
from tracekit.analysis.diagnosis.diagnosis import NamedLoss
from tracekit.analysis.job.graph import GraphJob
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.finding import LossKind
from tracekit.sources.load import load
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.model import Layout
from tracekit.trace.op import OpTrace

RANKS, STEPS = 8, 40


def somebody_is_slow(longer: float, noise: float = 0.0, constant: float = 0.0) -> NamedLoss:
    """Each step, another one of eight ranks at random takes `longer`; rank 0 always `constant`. All vary by `noise`."""
    draw = np.random.default_rng(0)
    steps = []
    for _ in range(STEPS):
        slow = draw.integers(RANKS)
        factors = [(1 + longer * (rank == slow)) * (1 + constant * (rank == 0)) for rank in range(RANKS)]
        steps.append(
            [
                [
                    ("forward-compute", 0.1 * factor * np.exp(draw.normal(0, noise))),
                    ("backward-compute", 0.2 * factor * np.exp(draw.normal(0, noise))),
                ]
                for factor in factors
            ]
        )
    return PipelineJob(of_steps(steps)).analysis.diagnosis.headline


@pytest.mark.parametrize("noise", [0.0, 0.005])
@pytest.mark.parametrize("longer", [0.05, 0.08, 0.1, 0.11, 0.12])
def test_what_nothing_explains_is_told_whether_S_is_below_1_1_or_above(longer, noise):  # noqa: N802 (S is its name)
    """The computes of a step last 0.3 (1 + x) s, its mean ones 0.3 (1 + x / 8) s: S is 1.04 to 1.1. From 0.13 on, they
    vary as sequences of unequal length do.
    """
    headline, share = somebody_is_slow(longer, noise), 0.3 * longer * 7 / 8 / (0.3 * (1 + longer) + 0.01)
    assert f"stragglers cost {share:.0%} of each step, for a reason tracekit does not know" in headline.sentence
    assert headline.parts.unexplained_s / headline.parts.step_s == pytest.approx(share, abs=0.006)
    assert (headline.kind is LossKind.STRAGGLER) == headline.parts.headline == (longer > 0.06)


def test_a_small_cause_does_not_hide_what_nothing_explains():
    """Rank 0 is 5 % slower in every step, and somebody is 12 % slower in each, who hides it most of the time."""
    headline = somebody_is_slow(0.12, noise=0.003, constant=0.05)
    assert headline.sentence.startswith("rank 0 costs 1% of each step: computes 6% slower than its peers; ")
    assert headline.sentence.endswith("; stragglers cost 9% of each step in all, 7% for reasons tracekit does not know")


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("layout", [Layout(dp=8, pp=2), Layout(dp=2, pp=4), Layout(dp=8, pp=1)], ids=str)
def test_the_noise_of_a_healthy_job_explains_its_slowdown(layout, noise):
    trace = synthesize(SynthSpec(layout, microbatches=6, steps=20, noise=noise, seed=1))
    headline = PipelineJob(trace).analysis.diagnosis.headline
    assert headline.kind is LossKind.BALANCED
    assert not headline.parts.to_tell
    assert headline.parts.noise_s == pytest.approx(headline.parts.lost_s, abs=max(headline.parts.error_s, 0.002))


def test_the_parts_add_up():
    """Steps of 1.1, 1.2 and 1.3 s, ideally 1 s, of which noise makes 0.05 s; three standard errors are 0.1 sqrt 3 s."""
    parts = Parts.of(np.array([1.1, 1.2, 1.3]), np.ones(3), np.full(3, 1.05))
    assert (parts.lost_s, parts.explained_s, parts.noise_s, parts.unexplained_s, parts.error_s) == pytest.approx(
        (0.2, 0.0, 0.05, 0.15, 0.1 * 3**0.5)
    )
    assert not parts.to_tell


def test_a_cause_that_acts_in_some_steps_leaves_no_error_behind():
    """It makes steps differ by a second; without it they do not, so the 0.1 s that is left is certain."""
    acts = np.array([1.0, 0.0, 1.0, 0.0])
    parts = Parts.of(1.1 + acts, np.ones(4), np.ones(4), acts)
    assert (parts.explained_s, parts.error_s) == pytest.approx((0.5, 0.0))
    assert parts.unexplained_s == pytest.approx(0.1)
    assert parts.to_tell
    assert not Parts.of(1.1 + acts, np.ones(4), np.ones(4)).to_tell


@pytest.mark.parametrize(
    ("longer", "kind"), [(0.01, LossKind.BALANCED), (0.05, LossKind.BALANCED), (0.1, LossKind.STRAGGLER)]
)
def test_an_op_trace_tells_it_too(longer, kind):
    """Each step, another one of eight ranks takes `longer`: the step lasts 1 + x, its mean op 1 + x / 8."""
    slow = np.random.default_rng(0).integers(RANKS, size=STEPS)
    durations = [1.0 + longer * (slow[step] == rank) for step in range(STEPS) for rank in range(RANKS)]
    steps, ranks = np.repeat(np.arange(STEPS), RANKS), np.tile(np.arange(RANKS), STEPS)
    ops = pl.DataFrame({"step": steps, "rank": ranks, "start": 0.0, "duration": durations, "kind": "work"})
    analysis = GraphJob(OpTrace(ops, "in turn", rules=("streams",))).analysis
    report, parts = analysis.report, analysis.diagnosis.headline.parts
    assert report.verdict.kind is kind
    assert parts.unexplained_s == pytest.approx(0.875 * longer, rel=0.01)
    lost = f"stragglers cost {0.875 * longer / (1 + longer):.0%}"
    assert parts.to_tell == (longer > 0.02)
    assert (lost in report.answer.headline) == parts.to_tell


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "kind"), [(1.1, LossKind.COMMUNICATION), (1.2, LossKind.STRAGGLER)])
def test_a_recording_in_which_nobody_stands_out_alone_tells_what_is_lost(tmp_path, factor, kind):
    """Two of eight ranks are slow, so that no single one is to blame."""
    troubles = (Trouble(1, gpu=factor), Trouble(5, gpu=factor))
    RecordedJob(ranks=8, troubles=troubles).run().write(tmp_path)
    report = load(tmp_path).whatif()
    content = report.to_dict()
    assert (report.verdict.kind, report.verdict.culprit) == (kind, None)
    parts = content["verdict"]["parts"]
    assert parts["unexplained_s"] == pytest.approx(parts["lost_s"], rel=0.05)
    lost = parts["lost_s"] / report.step_time_s.recorded
    assert f"stragglers cost {lost:.0%} of the recording, for a reason tracekit does not know" in report.answer.headline
