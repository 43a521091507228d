"""What begins behind the end of something else too often for chance waited for it."""

import numpy as np

from tracekit.analysis.numeric.coincidence import waits_beyond_chance


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
