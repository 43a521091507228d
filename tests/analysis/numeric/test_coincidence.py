"""What begins behind the end of something else too often for chance waited for it."""

import numpy as np
import pytest

from tracekit.analysis.numeric.arrays import _erlang_tail, waits_beyond_chance


def test_one_gap_proves_nothing_what_three_have_in_common_does():
    """The last of two ends is within 1 % of a gap with probability 2 %; three times over, in 6 of 10,000 jobs."""
    gap, ends = np.full(4, 1e-3), np.full(4, 2)
    found = waits_beyond_chance(gap, np.full(4, 1e-5), ends, np.array([0, 1, 1, 1]))
    assert found.tolist() == [False, True, True, True]


def test_a_gap_in_which_nothing_ended_was_no_wait():
    found = waits_beyond_chance(np.full(3, 1e-3), np.full(3, 1e-7), np.array([1, 1, 0]), np.zeros(3, int))
    assert found.tolist() == [True, True, False]


def test_ends_that_fall_anywhere_are_taken_for_waits_once_in_a_thousand_groups():
    rng = np.random.default_rng(0)
    groups = 20_000
    gap, ends = rng.uniform(1e-4, 1e-2, 3 * groups), rng.integers(1, 20, 3 * groups)
    late = gap * (1 - rng.uniform(0, 1, 3 * groups) ** (1 / ends))
    found = waits_beyond_chance(gap, late, ends, np.repeat(np.arange(groups), 3))
    assert 5 <= found.sum() / 3 <= 40


def test_the_chance_of_a_group_is_the_tail_of_a_gamma_distribution():
    """Of three gaps it is e^-x (1 + x + x^2 / 2), which is 1/1000 at x = 11.2289: each end this close with e^-x/3."""
    from scipy.special import gammaincc

    for x, waits in ((11.2, False), (11.3, True)):
        late = np.full(3, np.exp(-x / 3))
        assert waits_beyond_chance(np.ones(3), late, np.ones(3, int), np.zeros(3, int)).all() == waits
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 4000, 300)
    sums = counts * rng.uniform(0.5, 1.5, 300)
    assert _erlang_tail(counts, sums) == pytest.approx(gammaincc(counts, sums), rel=1e-8, abs=1e-300)
    assert waits_beyond_chance(*(np.empty(0),) * 2, *(np.empty(0, int),) * 2).tolist() == []
