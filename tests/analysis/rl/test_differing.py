"""Steps that differ from the others, and trends, by hand-computed seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.properties import examples
from tracekit.analysis.rl.account import unlike
from tracekit.base.text import seconds
from tracekit.report.rl_step import Sides, ToolsBound, Unlike

#: Healthy scatter, which repeats: 100 s +- 3 %.
SCATTER = (0.0, 2.0, -1.0, 3.0, -2.0, 1.0, -3.0, 0.0, 2.0, -2.0)


def differing(generate: list[float], train: list[float] | None = None, first: int = 1) -> Unlike:
    """The run whose steps generate and train for so many seconds."""
    phases = {"generate": np.array(generate), "train": np.array(train or [20.0] * len(generate))}
    numbers = np.arange(first, first + len(generate))
    return unlike(numbers, phases["generate"] + phases["train"], phases)


def scattered(steps: int) -> list[float]:
    return [80.0 + SCATTER[step % len(SCATTER)] for step in range(steps)]


def test_one_slow_step_is_named_with_its_phase_and_its_share_of_the_run() -> None:
    """Step 4 of ten takes 300 instead of 100 s: 200 of the 1,200 s of the run."""
    generate = [80.0] * 10
    generate[3] = 280.0
    (group,) = differing(generate).steps
    assert (group.steps, group.phase, group.every, group.cold) == ([4], "generate", None, False)
    assert (group.extra_s, group.times, group.share) == pytest.approx((200.0, 3.0, 200 / 1200))
    assert differing(generate).usual_s == 100.0
    assert differing(generate).worst == "step 4 takes 3x the others (+200.00 s, 17% of the run): generate"


def test_steps_that_return_are_told_with_their_period() -> None:
    """Validation in every fifth step, 35 s."""
    phases = {"generate": np.full(20, 80.0), "validation": np.where(np.arange(1, 21) % 5, 0.0, 35.0)}
    run = unlike(np.arange(1, 21), phases["generate"] + phases["validation"] + 20.0, phases)
    (group,) = run.steps
    assert (group.steps, group.phase, group.every, group.extra_s) == ([5, 10, 15, 20], "validation", 5, 35.0)
    assert group.words.startswith("steps 5, 10, 15, 20, every 5 steps, take 1.4x the others (+35.00 s each")


def test_a_cold_first_step_is_told_apart_though_it_is_no_longer_than_the_others() -> None:
    """The first step trains for 90 s, and generates for 10 s: those of the others are 20 and 80 s."""
    (group,) = differing([10.0, *[80.0] * 5], [90.0, *[20.0] * 5]).steps
    assert (group.steps, group.cold, group.phase, group.phase_extra_s) == ([1], True, "train", 70.0)
    assert group.words == "step 1 (cold) spends 70.00 s more in train"
    (slow,) = differing([380.0, 80.0, 80.0]).steps
    assert (slow.cold, slow.times) == (True, 4.0)


def test_steady_growth_is_a_trend_with_its_phase() -> None:
    """From 60 to 78 s of generation in ten steps, 2 s a step; a mean step of 89 s."""
    run = differing([60.0 + 2 * step for step in range(10)])
    assert run.steps == []
    assert run.trend is not None
    assert (run.trend.since, run.trend.phase) == (None, "generate")
    assert (run.trend.before_s, run.trend.after_s, run.trend.per_step) == pytest.approx((80.0, 98.0, 2 / 89))
    assert run.worst == "the step grows 2.25% a step, from 80.00 s to 98.00 s: generate"


def test_a_change_is_told_with_the_step_since_when_it_lasts() -> None:
    run = differing([*scattered(10), *(value + 60 for value in scattered(8))])
    assert run.trend is not None
    assert (run.trend.since, run.trend.phase) == (11, "generate")
    change_s, before_s = run.trend.after_s - run.trend.before_s, run.trend.before_s
    told = f"since step 11, a step takes {seconds(change_s)} more ({seconds(before_s)} before): generate"
    assert run.trend.words == told
    assert replace(run.trend, before_s=200.0, after_s=150.0).words.startswith(
        "since step 11, a step takes 50.00 s less"
    )
    late = differing([*scattered(20), *[200.0] * 4]).trend  # few enough to look like steps that differ
    assert late is not None
    assert (late.since, late.after_s) == (21, 220.0)


def test_every_second_step_is_told_though_half_of_all_differ() -> None:
    (group,) = differing([80.0, 180.0] * 6).steps
    assert (group.steps, group.every, group.extra_s) == ([2, 4, 6, 8, 10, 12], 2, 100.0)


@examples(60)
@given(st.integers(3, 40), st.integers(0, 2**32 - 1))
def test_healthy_scatter_is_neither(steps: int, seed: int) -> None:
    """Steps of 100 s +- 3 %, equally distributed."""
    run = differing((80 + np.random.default_rng(seed).uniform(-3, 3, steps)).tolist())
    assert (run.steps, run.trend) == ([], None)


def test_few_or_equal_steps_are_alike() -> None:
    for generate in ([80.0], [80.0, 300.0], [80.0] * 30, [0.0] * 5):
        assert differing(generate).words == []


def test_the_side_that_idles_less_is_short_of_gpus() -> None:
    for trainer, rollout, short in (
        (0.3, 0.1, "the rollout side is short of GPUs"),
        (0.1, 0.3, "the trainer side is short of GPUs"),
        (0.3, None, "the rollout side is short of GPUs"),
        (0.3, 0.3, None),
    ):
        sides = Sides(trainer, rollout)
        assert sides.short_of_gpus == short
        assert sides.words.endswith(" of the time" if short is None else f" of the time: {short}")


def test_what_tools_cost_at_most() -> None:
    for bound, words in (
        (ToolsBound([], None, None, 2.0), "; whether they hold up the step needs the slowest one, or trajectories"),
        (ToolsBound([], 0.0, 0.0, 2.0), "; in no step was the slowest one longer in tools than sampled"),
        (ToolsBound([3], 1.5, 0.25, 2.0), "they cost at most 25% of the run (1.50 s a step)"),
    ):
        assert bound.words.startswith("the mean trajectory spends 2.00 s in tool calls; ")
        assert bound.words.endswith(words)
    assert ToolsBound([], 0.0, 0.0, None).words == "in no step was the slowest one longer in tools than sampled"
