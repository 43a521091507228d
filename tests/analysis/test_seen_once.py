"""A loss that was seen in one or two steps is told as that: no rate follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.kineto_files import document, event, kernel, launch, write
from tracekit.analysis.diagnosis.find import seen_once
from tracekit.report.finding import LossKind, SeenOnce
from tracekit.report.report import Report
from tracekit.synth import SlowSteps, SynthSpec, synthesize
from tracekit.trace.model import Layout


@pytest.mark.parametrize(
    ("lost_s", "once"),
    [
        ([0.0, 0.244, 0.0], SeenOnce((1,), (0.244,), 0.0, 3)),
        ([0.010, 0.250, 0.010, 0.010], SeenOnce((1,), (0.240,), 0.010, 4)),
        ([0.3, 0.0, 0.0, 0.2, 0.0], SeenOnce((0, 3), (0.3, 0.2), 0.0, 5)),
        ([0.3, 0.0, 0.0, 0.2], None),  # two of four steps are half of them
        ([0.3, 0.0], None),  # of two steps, nobody knows which one is usual
        ([0.3], None),
        ([0.1, 0.1, 0.1], None),
        ([0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.0], None),  # three times
        ([0.05, 0.05, 0.05, 0.05, 0.14], None),  # most of it returns
        ([0.0, 0.0, 0.0], None),
        ([-0.1, 0.0, -0.1], None),
    ],
)
def test_what_was_seen_once(lost_s: list[float], once: SeenOnce | None) -> None:
    result = seen_once(range(len(lost_s)), np.array(lost_s))
    if once is None or result is None:
        assert result is once
    else:
        assert (result.steps, result.of_steps) == (once.steps, once.of_steps)
        assert result.lost_s == pytest.approx(once.lost_s)
        assert result.others_s == pytest.approx(once.others_s)


@given(st.lists(st.floats(0, 10), max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_steps_does_not_matter(lost_s: list[float], random: Any) -> None:
    places = list(range(len(lost_s)))
    random.shuffle(places)
    straight = seen_once(range(len(lost_s)), np.array(lost_s))
    shuffled = seen_once(places, np.array(lost_s)[places])
    assert (straight is None) == (shuffled is None)
    if straight is not None and shuffled is not None and len({*lost_s}) == len(lost_s):
        assert set(straight.steps) == set(shuffled.steps)


def events(freed: set[int], frees_s: float = 0.2) -> Iterator[dict[str, Any]]:
    """Five steps of 10 ms of a busy GPU; some of them begin with a cudaFree, which takes `frees_s`."""
    begin = 0.0
    for step in range(5):
        stall = frees_s * 1e6 if step in freed else 0.0
        yield event("user_annotation", f"ProfilerStep#{step}", begin, 10_000 + stall - 10)
        if stall:
            yield event("cuda_runtime", "cudaFree", begin + 5, stall - 10, correlation=500 + step)
        for number in range(20):
            yield launch(begin + stall + 10 + 20 * number, 1 + 100 * step + number)
            yield kernel("gemm_kernel", begin + stall + 20 + 495 * number, 490, correlation=1 + 100 * step + number)
        begin += 10_000 + stall


def report_on(folder: Path, content: list[dict[str, Any]], ranks: int = 1) -> Report:
    for rank in range(ranks):
        write(folder / f"rank-{rank}.json", document(content, rank=rank, world=ranks))
    return tracekit.load(folder).whatif()


def test_a_stall_in_one_step_of_a_recording_is_told_as_that(tmp_path: Path) -> None:
    report = report_on(tmp_path, list(events({3})))
    stall = report.findings[0]
    assert stall.once is not None
    assert stall.once.steps == (3,)
    assert stall.once.lost_s[0] == pytest.approx(0.2, rel=0.05)
    assert report.verdict.kind is LossKind.STALLS
    assert report.verdict.lost_gpu_hours_per_day == pytest.approx(0.0, abs=0.01)
    assert report.answer.headline.startswith("step 3: +")
    assert "a day" not in f"{report.answer.cost} {report.answer.saves}"


def test_a_stall_in_every_step_is_a_rate(tmp_path: Path) -> None:
    report = report_on(tmp_path, list(events({0, 1, 2, 3, 4})))
    assert report.findings[0].once is None
    assert report.verdict.kind is LossKind.HOST
    assert report.verdict.lost_gpu_hours_per_day > 10
    assert report.answer.cost is not None
    assert "GPU-hours a day" in report.answer.cost


def test_what_returns_stands_before_a_longer_stall_that_was_seen_once(tmp_path: Path) -> None:
    """An item() in every step waits 3 of 13 ms; one cudaFree takes 200 ms."""
    content = list(events({3}))
    ends = [one["ts"] + one["dur"] for one in content if one["name"].startswith("ProfilerStep")]
    moved = []
    for one in content:
        late = 3_000.0 * sum(end <= one["ts"] for end in ends)
        moved.append(
            {**one, "ts": one["ts"] + late, **({"dur": one["dur"] + 3_000} if "Profiler" in one["name"] else {})}
        )
    for step, end in enumerate(ends):
        at = end + 3_000 * step
        moved.append(event("python_function", "train.py(10): log", at, 2_900))
    report = report_on(tmp_path, moved)
    assert report.findings[0].kind == "python-code"
    assert report.findings[0].once is None


def test_times_are_of_each_rank(tmp_path: Path) -> None:
    """All four ranks free memory for 1 s in all."""
    alone, together = (report_on(tmp_path / str(ranks), list(events({0, 1, 2, 3, 4})), ranks) for ranks in (1, 4))
    for report in (alone, together):
        spent = report.findings[0].spent
        assert spent is not None
        assert spent.seconds == pytest.approx(1.0, rel=0.01)
        assert spent.count == 5
    assert "takes 999.9 ms on each of 4 ranks" in together.answer.headline.replace("1.00 s", "999.9 ms")


def test_one_slow_step_of_a_pipeline_costs_nothing_a_day() -> None:
    spec = SynthSpec(Layout(dp=4, pp=2), steps=12, seed=5)
    once, often = (
        tracekit.job_of(synthesize(replace(spec, causes=(SlowSteps(position=5, count=count, factor=3),)))).whatif()
        for count in (1, 5)
    )
    assert once.findings[0].once is not None
    assert "seen once" in (once.answer.cost or "")
    assert once.verdict.lost_gpu_hours_per_day < 0.1 * often.verdict.lost_gpu_hours_per_day
    assert "GPU-hours a day" in (often.answer.cost or "")
