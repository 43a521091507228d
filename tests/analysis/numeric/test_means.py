"""Means over the steps and how sure their difference is, by hand and by counting every sample."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import (
    MeanDifferences,
    block_length,
    difference_of_means,
    differences_from_runs,
    differences_of_means,
    margins,
    poisson_most,
    ratio_margins,
)

#: Deviations -1, -1, -1, 1, 1, 1.
WAVE = np.array([[1.0], [1], [1], [3], [3], [3]])


def test_blocks_are_as_long_as_the_memory_of_the_steps() -> None:
    """WAVE has autocovariances 1 and 1/2, and none of them is beyond 2 sqrt(log10(6) / 6) = 0.72: lags up to 2 count,
    with weights 1 and 0. So the spectrum is 1 + 2 x 1/2 = 2, its curvature 2 x 1 x 1/2 = 1, and the length
    (1.5 (1/2)^2 6)^(1/3) = 1.31, rounded up. Of 1, 1, 3, 3, the same gives (1.5 (0.5 / 1.5)^2 4)^(1/3) = 0.87.
    """
    assert block_length(WAVE) == 2
    assert block_length(WAVE[1:5]) == 1
    assert block_length(np.concatenate([WAVE[1:5], WAVE[1:5]], axis=1)) == 1
    assert block_length(np.full((50, 1), 7.0)) == 1
    drawn = np.random.default_rng(0).normal(size=(400, 1))
    assert block_length(drawn) < block_length(np.cumsum(drawn, axis=0)) <= 60


def test_the_error_of_a_mean_counts_blocks_and_not_steps() -> None:
    """Circular blocks of 2 of WAVE deviate by -1, -1, 0, 1, 1, 0: a variance of 4/6 over 6 / 2 - 1 degrees of freedom.
    Three single steps have the usual error, s / sqrt(3).
    """
    found = differences_of_means(WAVE, np.array([[1.0], [2], [3]]), 0.95)
    assert found.errors[:, 0] == pytest.approx([math.sqrt(4 / 6 / 2), 1 / math.sqrt(3)])
    assert (found.before[0], found.after[0], found.steps, found.blocks) == (2, 2, (6, 3), (3, 3))


def test_the_margin_of_one_mean_counts_blocks_too() -> None:
    """1, 2, 3, 6 deviate from 3 by -2, -1, 0, 3: the error is sqrt(14 / 4 / 3), t of three degrees of freedom 3.1824.
    Circular blocks of two deviate by -1.5, -0.5, 1.5, 0.5: a variance of 1.25 over 4 / 2 - 1 = 1 degree of freedom, of
    which t is 12.706. Two steps have that t, too, and one step shows nothing.
    """
    series = np.array([[1.0, 5.0], [2, 5], [3, 5], [6, 5]])
    assert margins(series, 1) == pytest.approx([3.1824 * math.sqrt(14 / 12), 0], rel=1e-4)
    assert margins(series[:, :1], 2) == pytest.approx([12.706 * math.sqrt(1.25)], rel=1e-3)
    assert margins(np.array([[1.0], [3]])) == pytest.approx([12.706], rel=1e-3)
    assert np.isnan(margins(series[:1])).all()
    assert margins(WAVE) == pytest.approx([4.3027 * math.sqrt(4 / 6 / 2)], rel=1e-4)  # blocks of 2, as above


def test_a_ratio_of_means_does_not_vary_with_what_both_share() -> None:
    """1.2 times as long in every step is 1.2, however steps vary. Beside a constant 2 s, half the margin is left."""
    series = np.array([1.0, 2, 3, 6])
    assert ratio_margins(1.2 * series[:, None], series, series) == pytest.approx([0], abs=1e-12)
    assert ratio_margins(series[:, None], np.full(4, 2.0), series) == pytest.approx(margins(series[:, None]) / 2)
    assert np.isnan(ratio_margins(series[:, None], np.zeros(4), series)).all()


def test_95_of_100_intervals_contain_the_mean() -> None:
    """Of 2,000 runs of 12 independent steps, and of 500 of 200 steps that resemble the one before by 0.5, whose blocks
    are found; of the latter, intervals from single steps miss a quarter.
    """
    drawn = np.random.default_rng(0).normal(size=(12, 2000))
    assert np.mean(np.abs(drawn.mean(axis=0)) <= margins(drawn, 1)) == pytest.approx(0.95, abs=0.015)
    noise = np.random.default_rng(1).normal(size=(250, 500))
    for step in range(1, 250):
        noise[step] += 0.5 * noise[step - 1]
    means, found = np.abs(noise[50:].mean(axis=0)), np.concatenate([margins(one[:, None]) for one in noise[50:].T])
    assert 0.9 < np.mean(means <= found) < 0.97
    assert np.mean(means <= margins(noise[50:], 1)) < 0.8


def test_the_reach_is_that_of_all_samples_that_there_are() -> None:
    """Each side of three steps has 27 samples: of their 729 pairs, 5 % deviate by more."""
    before, after = np.array([1.0, 2, 4]), np.array([3.0, 4, 5])
    deviations = []
    for one, other in itertools.product(itertools.product(range(3), repeat=3), repeat=2):
        left, right = before[list(one)], after[list(other)]
        apart = abs((right.mean() - after.mean()) - (left.mean() - before.mean()))
        error = math.sqrt(left.var(ddof=1) / 3 + right.var(ddof=1) / 3)
        deviations.append(apart / error if error > 0 else (math.inf if apart > 1e-9 else 0.0))
    reach = differences_of_means(before[:, None], after[:, None], 0.95).reach
    assert np.mean(np.array(deviations) > reach) == pytest.approx(0.05, abs=0.015)
    assert np.mean(np.array(deviations) > reach * 0.8) > 0.05


def test_steps_that_do_not_vary_leave_no_doubt() -> None:
    change = difference_of_means(np.full(6, 2.0), np.full(5, 1.5))
    assert (change.low, change.high) == (-0.5, -0.5)
    assert change.clear
    assert not difference_of_means(np.full(5, 0.1), np.full(7, 0.1)).clear


def test_a_figure_that_varies_by_rounding_alone_leaves_no_doubt_about_another() -> None:
    """Sums of equal times differ in their last digit; so do ten steps of 0.1 s + 0.2 s here."""
    noise = np.random.default_rng(0).normal(1.0, 0.01, (2, 10, 1))
    still = np.where(np.arange(10) < 9, 0.1 + 0.2, 0.3)[:, None]
    alone = differences_of_means(*noise, 0.95)
    both = differences_of_means(*(np.concatenate([side, still], axis=1) for side in noise), 0.95)
    assert np.ptp(still) > 0
    assert both.margin == pytest.approx([alone.margin[0], 0.0])


def test_a_stall_has_an_interval_of_its_own_and_widens_no_other() -> None:
    """A stall of 2.5 s in one of 20 steps adds 125 ms. 95 % of identical runs have 0 to 5.572 of them, the mean of a
    Poisson distribution that gives at most one with a probability of 2.5 %: of two figures, 7.430 at 0.5 % for 98 %.
    """
    assert poisson_most(1, 0.025) == pytest.approx(5.5716, abs=1e-4)
    assert poisson_most(4, 0.005) == pytest.approx(12.594, abs=1e-3)
    for seed in range(20):
        before, after = np.random.default_rng(seed).normal([0.33, 0.1], 0.001, (2, 20, 2))
        healthy = differences_of_means(before, after, 0.98)
        after[7, 0] += 2.5
        stalled = differences_of_means(before, after, 0.98)
        assert stalled.after[0] - healthy.after[0] == pytest.approx(0.125)
        assert stalled.margin[0] == pytest.approx((7.430 - 1) * 0.125, rel=0.01)
        assert stalled.margin[1] == pytest.approx(healthy.margin[1], rel=0.5)
        alone = difference_of_means(after[:, 0], before[:, 0])
        assert alone.low == pytest.approx(-5.5716 * 0.125, rel=0.01)
        assert not alone.clear
        assert stalled.more_steps(0, 0.01) is None


def test_stalls_on_neighbouring_steps_are_one_event() -> None:
    """2 + 0.5 s are as one stall of 2.5 s; apart, they are two events of 1.4577 s as the root of their mean square."""
    still = np.full((20, 1), 0.3)
    together, apart = still.copy(), still.copy()
    together[[4, 5], 0] += (2.0, 0.5)
    apart[[4, 9], 0] += (2.0, 0.5)
    margins_s = [float(differences_of_means(still, side, 0.95).margin[0]) for side in (together, apart)]
    assert margins_s == pytest.approx([0.125 * 4.5716, math.sqrt(4.25 / 2) / 20 * (7.2247 - 2)], rel=1e-3)


def test_steps_that_recur_are_noise() -> None:
    """Of 20 steps, six are longer: no sample lacks them all."""
    sides = np.random.default_rng(0).normal(1, 0.01, (2, 20, 1))
    sides[:, ::3] += 0.3
    assert np.all(differences_of_means(*sides, 0.99).rare == 0)


def test_fewer_than_five_steps_have_no_interval() -> None:
    for steps in ([1.0], [1.0, 2.0, 1.0, 2.0]):
        change = difference_of_means(np.array(steps), np.array([1.0, 2.0] * 3))
        assert (change.low, change.high, change.clear) == (None, None, False)


def test_so_many_more_steps_narrow_the_interval() -> None:
    """To a third: nine times the steps, less what the intervals of few blocks are wider. The size of the noise is
    itself known to within a fifth or so only.
    """
    for seed in range(8):
        drawn = np.random.default_rng(seed).normal(10, 1, (2, 400, 1))
        found = differences_of_means(drawn[0, :20], drawn[1, :20], 0.99)
        wanted = float(found.margin[0]) / 3
        more = found.more_steps(0, wanted)
        assert more is not None
        assert more < 8 * 20
        then = differences_of_means(drawn[0, : 20 + more], drawn[1, : 20 + more], 0.99)
        assert then.margin[0] == pytest.approx(wanted, rel=0.35)
    assert found.more_steps(0, 0.0) is None
    assert found.more_steps(0, 2 * float(found.margin[0])) == 0


SERIES = st.lists(st.floats(0.5, 2), min_size=2, max_size=30)


@examples(25)
@given(SERIES, SERIES)
def test_swapping_the_sides_turns_the_interval_round_and_units_do_not_matter(
    before: list[float], after: list[float]
) -> None:
    one, two = np.array(before)[:, None], np.array(after)[:, None]
    there, back = differences_of_means(one, two, 0.95), differences_of_means(two, one, 0.95)
    assert there.difference == pytest.approx(-back.difference)
    assert there.reach == back.reach
    in_ms = differences_of_means(1024 * one, 1024 * two, 0.95)
    assert in_ms.margin == pytest.approx(1024 * there.margin)


def test_intervals_of_several_figures_hold_together() -> None:
    """20 figures of identical sides: of 100 pairs, 5 have a figure beyond its interval by chance; alone, it is 64."""
    together = alone = 0
    for seed in range(100):
        sides: Floats = np.random.default_rng(seed).normal(size=(2, 40, 20))
        found = differences_of_means(*sides, 0.95)
        together += bool((np.abs(found.difference) > found.margin).any())
        alone += bool((np.abs(found.difference) > 1.96 * np.hypot(*found.errors)).any())
    assert together <= 12
    assert alone >= 45


def test_runs_without_noise_within_show_the_noise_between_them() -> None:
    """Of means 1, 2 and 3, s is 1: 95 % of further runs are within 4.3027 x sqrt(1 + 1/3) of 2, where 4.3027 is t of 2
    degrees of freedom. Of two figures, each takes half of the 5 %: t is 6.2053. Ten times the limit between runs leaves
    room for runs only; a run alone says nothing of others.
    """
    runs = [np.full((4, 1), mean) for mean in (1.0, 2.0, 3.0)]
    further = np.full((4, 1), 9.0)
    found = differences_from_runs(runs, further, 0.95)
    assert (found.before[0], found.difference[0], found.runs) == (2, 7, 3)
    assert found.margin[0] == pytest.approx(4.3027 * math.sqrt(4 / 3), rel=1e-4)
    two = differences_from_runs([np.repeat(run, 2, axis=1) for run in runs], np.repeat(further, 2, axis=1), 0.95)
    assert two.margin == pytest.approx([6.2053 * math.sqrt(4 / 3)] * 2, rel=1e-4)
    assert found.more_steps(0, 4) is None
    # t sqrt(1 + 1/k): 4.97 for 3 runs, 3.56 for 4, 3.04 for 5; no number of runs is below 1.96
    assert [found.more_runs(0, margin) for margin in (4.97, 4, 3.05, 1.9)] == [0, 1, 2, None]
    alone = differences_from_runs(runs[:1], further, 0.95)
    assert (alone.margin[0], alone.more_runs(0, 4)) == (0, None)


def test_the_noise_within_runs_is_added_in_squares() -> None:
    """Two runs of 0 +- 1 and 2 +- 1: within them it is that of the eight deviations from their own means."""
    runs = [np.array([[-1.0], [1.0], [1.0], [-1.0]]) + mean for mean in (0, 2)]
    further = np.array([[0.0], [2.0], [1.0], [3.0]])
    within = differences_of_means(np.concatenate([runs[0], runs[1] - 2]) + 1, further, 0.95)
    found = differences_from_runs(runs, further, 0.95)
    between = 12.7062 * math.sqrt(2) * math.sqrt(3 / 2)  # t of 1 degree of freedom, s of 0 and 2
    assert found.margin[0] == pytest.approx(math.hypot(float(within.margin[0]), between), rel=1e-4)
    assert found.difference[0] == 0.5
    assert found.more_steps(0, between * 1.01) is not None
    assert found.more_steps(0, between * 0.99) is None


@pytest.mark.parametrize(("runs", "figures"), [(2, 1), (2, 5), (3, 5), (6, 1), (6, 5)])
def test_a_further_run_is_seldom_beyond_its_interval(runs: int, figures: int) -> None:
    """40,000 draws of the means of runs of one distribution, whose figures share half of their variance. One interval
    holds in 99 % of them exactly, those of several figures together in at least 99 %. Without t, two runs would fail
    far more often.
    """
    drawn = np.random.default_rng(runs * figures).normal(size=(40_000, runs + 1, figures + 1))
    means = 100 + drawn[..., :figures] + drawn[..., figures:]
    before, after = means[:, :runs], means[:, runs]
    found = MeanDifferences(
        before.mean(axis=1), after, np.zeros((2, figures)), 1.0, 0.99, (1, 1), (1, 1), runs, before.std(axis=1, ddof=1)
    )
    beyond = np.mean((np.abs(found.difference) > found.margin).any(axis=1))
    false_alarms = np.mean((found.difference > found.margin).any(axis=1))
    assert false_alarms <= 0.01
    assert beyond <= 0.0115  # 1 %, and three standard errors of a share of 40,000
    assert beyond >= (0.0085 if figures == 1 else 0.001)


@pytest.mark.slow
def test_steps_of_several_runs_fail_no_more_often_than_they_may() -> None:
    """Runs of 10 steps whose means scatter by twice as much as their steps, and a further one of 10 steps or of 5 that
    are noisier: judged by one run alone, most of 200 are beyond their interval, judged by four at most 1 %.
    """
    random = np.random.default_rng(5)
    beyond = {1: 0, 4: 0}
    for at in range(200):
        means = random.normal(100, 2, 5)
        earlier = [random.normal(mean, 1, (10, 1)) for mean in means[:4]]
        further = random.normal(means[4], 3, (5, 1)) if at % 2 else random.normal(means[4], 1, (10, 1))
        for runs in beyond:
            found = differences_from_runs(earlier[:runs], further, 0.99)
            beyond[runs] += abs(float(found.difference[0])) > found.margin[0]
    assert beyond[1] > 50
    assert beyond[4] <= 2
