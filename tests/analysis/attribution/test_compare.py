"""Did the change help? Sides, verdicts and causes, by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.handmade import LAYOUT, slow_trace
from tests.reports import report_with
from tests.sides import cause, side
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.numeric.statistics import FEWEST_STEPS
from tracekit.report.compare import (
    ChangeEffect,
    causes_of_jobs,
    causes_of_parts,
    cost_changes,
    parts,
    verdict,
    whole,
)
from tracekit.report.findings import WorkerSlowdowns


def test_what_the_steps_contribute_to_the_share_that_is_lost_averages_to_it() -> None:
    """Of 3 s and 5 s, 1 s and 3 s are lost: half of the time, of which the second step contributes three quarters."""
    made = side([3, 5], ideal=[2, 2])
    assert (made.slowdown, made.lost_share) == (2, 0.5)
    assert made.lost_share_by_step() == pytest.approx([0.25, 0.75])


def test_a_job_loses_what_its_report_says_and_parts_of_it_what_their_steps_do() -> None:
    """Of ten seconds each, 1 s and 3 s are lost; the verdict counts them as 20 % and 19.2 GPU-hours a day of 96."""
    steps = [
        {"step": 1 + at, "recorded_s": 10.0, "original_s": 9.0, "ideal_s": 8.0, "slowdown": 1.1, "lost_s": lost_s}
        for at, lost_s in enumerate((1.0, 3.0))
    ]
    verdict_of_all = {"lost_s": 2.0, "share": 0.2, "lost_gpu_hours_per_day": 19.2}
    report = report_with(by_step=steps, verdict=verdict_of_all, step_time_s={"recorded": 10.0})
    everything = whole("made", report)
    assert (everything.lost_share, everything.lost_gpu_hours_per_day) == (0.2, 19.2)
    workers = WorkerSlowdowns(np.array([1, 2]), np.array([0]), np.ones((2, 1, 1), np.float32))
    shares = [(part.lost_share, part.lost_gpu_hours_per_day) for part in parts("made", report, workers, 2)]
    assert shares == [pytest.approx((0.1, 9.6)), pytest.approx((0.3, 28.8))]


def test_a_recording_is_compared_by_the_steps_that_the_profiler_marked() -> None:
    """Of 1 s, three steps are marked, of 0.3 s each: the rest is before the first and after the last."""
    row = {"step": 0, "recorded_s": 1.0, "original_s": 1.0, "ideal_s": 1.0, "slowdown": 1.0, "lost_s": 0.3}
    marked = [{"step": 7 + at, "recorded_s": 0.3} for at in range(3)]
    job = {"source": "recording", "whole": "recording", "steps": 3}
    report = report_with(by_step=[row], job=job, marked_steps=marked, verdict={"share": 0.3}, step_time_s={})
    found = whole("made", report)
    assert (found.steps.tolist(), found.steps_each) == ([7, 8, 9], 1)
    assert found.recorded_s.tolist() == [0.3] * 3
    assert (found.lost_s.tolist(), found.lost_share) == ([pytest.approx(0.1)] * 3, 0.3)


def test_a_change_that_helps_is_told_with_its_size_and_interval() -> None:
    outcome = verdict(side([2.0, 2.01, 1.99, 2.0, 2.0]), side([1.0, 1.01, 0.99, 1.0, 1.0]))
    assert outcome.outcome is ChangeEffect.BETTER
    assert outcome.sentence.startswith(
        "Yes, it helped: a recorded step takes 1.00 s instead of 2.00 s, 1.00 s (50.0%) less (95% interval of the"
    )
    assert "bootstrap over 5 and 5 steps" in outcome.sentence
    assert outcome.notes == ()


def test_a_change_for_the_worse_and_one_within_the_scatter_are_told_apart() -> None:
    steady = side([1.0, 1.01, 0.99, 1.0, 1.0])
    assert verdict(steady, side([2.0, 2.01, 1.99, 2.0, 2.0])).outcome is ChangeEffect.WORSE


def test_fewer_steps_than_a_gate_asks_for_cannot_tell() -> None:
    """Four steps of 2 s after twelve of 1 s: `gate` refuses to judge them, too."""
    few = verdict(side([1.0, 1.01] * 6), side([2.0, 2.01, 1.99, 2.0]))
    assert few.sentence == (
        "Cannot tell: a recorded step takes 2.00 s instead of 1.00 s, 995.0 ms (99.0%) more, but too few steps show how"
        f" much they differ by chance; record at least {FEWEST_STEPS} of both."
    )


def test_what_a_report_says_of_its_recording_is_no_cause() -> None:
    """Of two steps, the report says that too little was traced."""
    two, six = (PipelineJob(slow_trace(range(steps))).whatif() for steps in (2, 6))
    assert "too-little-trace" in [one.kind for one in two.findings]
    assert causes_of_jobs(two, six).gone == ()


def test_no_difference_excludes_a_large_one_and_wide_steps_cannot_tell() -> None:
    """The same steps on both sides, which scatter by 1 % and by 50 %."""
    scatter = [-1, 1, 1, -1, 0, 0, -1, 1]
    steady, loose = (side([1 + size * one for one in scatter]) for size in (0.01, 0.5))
    narrow = verdict(steady, steady)
    assert narrow.outcome is ChangeEffect.NO_DIFFERENCE
    words = r"a recorded step takes 1.00 s on both sides; a difference larger than (.*)% is unlikely"
    share = float(re.fullmatch(words, narrow.change)[1])
    assert share == pytest.approx(0.99, abs=0.2)  # two errors of 0.87 % / sqrt(7), and a t of 14 degrees, 2.14
    wide = verdict(loose, loose)
    assert (wide.outcome, wide.change) == (ChangeEffect.UNKNOWN, "a recorded step takes 1.00 s on both sides")
    assert wide.certainty is not None
    assert wide.certainty.startswith("it may be chance: 95% interval of the change -")
    assert wide.certainty.endswith("bootstrap over 8 and 8 steps; record more steps")


def test_what_reads_the_same_on_both_sides_is_not_told_as_a_change() -> None:
    tiny = verdict(side([1.0] * 5), side([1.0005] * 5))
    assert (tiny.outcome, tiny.change.partition("; ")[2]) == (
        ChangeEffect.NO_DIFFERENCE, "a difference larger than 0.1% is unlikely")  # fmt: skip
    small = verdict(side([2.0] * 5), side([1.996] * 5))
    assert (small.outcome, small.change) == (
        ChangeEffect.BETTER, "a recorded step takes 4.0 ms (0.2%) less, about 2.00 s")  # fmt: skip


def test_other_layouts_are_compared_by_what_is_lost_and_that_is_said() -> None:
    before = side([3.0, 3.1, 2.9, 3.0, 3.0], ideal=[2] * 5)
    after = side([2.4, 2.42, 2.38, 2.4, 2.4], ideal=[2] * 5, layout={**LAYOUT.to_dict(), "dp": 4, "world_size": 8})
    found = verdict(before, after)
    assert found.sentence.startswith(
        "The layouts differ, so step times do not compare. By what is lost: Yes, it helped: a step loses 16.7% instead"
        " of 33.3%, 16.7 points less (95% interval of the change -"
    )
    assert found.notes == ("Layouts: dp 2 x pp 2 on 4 GPUs before, dp 4 x pp 2 on 8 GPUs after.",)


def test_of_other_layouts_nothing_is_told_if_a_side_is_not_trusted() -> None:
    wide = {**LAYOUT.to_dict(), "dp": 4, "world_size": 8}
    for sides, which in (((False, True), "before"), ((True, False), "after"), ((False, False), "before and after")):
        before, after = side([1.0] * 5, trustworthy=sides[0]), side([2.0] * 5, layout=wide, trustworthy=sides[1])
        found = verdict(before, after)
        assert found.outcome is ChangeEffect.UNKNOWN
        assert found.sentence == (
            "Cannot tell: the layouts differ, so only what is lost compares, and what is lost is not to be trusted on"
            f" the side {which}."
        )


def test_other_work_and_distrusted_sides_are_said() -> None:
    found = verdict(side([1.0, 1.1]), side([1.0, 1.1], ops_per_step=96.0, trustworthy=False))
    assert "A step has 48 ops before and 96 after" in found.notes[0]
    assert "not to be trusted on the side after" in found.notes[1]


def test_causes_are_the_same_where_kind_and_place_are() -> None:
    healthy = report_with(causes=[cause("healthy", "whole job")])
    old = report_with(causes=[cause("bad-worker", "worker (1,2)"), cause("python-gc", "whole job")])
    new = report_with(causes=[cause("python-gc", "whole job"), cause("bad-worker", "worker (0,0)")])
    change = causes_of_jobs(old, new)
    assert [each.where_text for each in change.gone] == ["worker (1,2)"]
    assert [each.where_text for each in change.new] == ["worker (0,0)"]
    assert [was.kind for was, _ in change.staying] == ["python-gc"]
    assert len(causes_of_jobs(old, healthy).gone) == 2
    assert causes_of_jobs(healthy, old).staying == ()


def test_causes_of_one_job_are_parted_by_when_they_held() -> None:
    report = report_with(
        causes=[
            cause("slow-steps", "early", since=3, steps=(3, 4)),
            cause("slow-steps", "late", since=12, steps=(12,)),
            cause("slow-steps", "both", since=3, steps=(3, 12)),
            cause("bad-worker", "changed", since=10),
            cause("python-gc", "whole job"),
        ]
    )
    slower = causes_of_parts(report, side([1.0]), side([2.0]), 10)
    assert [each.where_text for each in slower.gone] == ["early"]
    assert [each.where_text for each in slower.new] == ["late", "changed"]
    assert [was.where_text for was, _ in slower.staying] == ["both", "whole job"]
    faster = causes_of_parts(report, side([2.0]), side([1.0]), 10)
    assert [each.where_text for each in faster.gone] == ["early", "changed"]


def test_what_kinds_and_stages_cost_alone_is_their_s_above_1_times_the_ideal_step() -> None:
    before = report_with(
        step_time_s={"ideal": 2.0},
        by_kind=[{"kind": "gc", "slowdown": 1.5}, {"kind": "optimizer", "slowdown": 1.0}],
        by_pp_rank=[{"pp_rank": 0, "slowdown": 1.25}],
    )
    after = report_with(
        step_time_s={"ideal": 4.0},
        by_kind=[{"kind": "optimizer", "slowdown": 1.125}],
        by_pp_rank=[{"pp_rank": 0, "slowdown": 1.0}, {"pp_rank": 1, "slowdown": 1.5}],
    )
    kinds = [(each.name, each.before_s, each.after_s) for each in cost_changes(before, after, "by_kind", "kind")]
    assert kinds == [("gc", 1.0, None), ("optimizer", 0.0, 0.5)]
    stages = cost_changes(before, after, "by_pp_rank", "pp_rank")
    assert [(each.name, each.difference_s) for each in stages] == [("0", -0.5), ("1", 2.0)]
