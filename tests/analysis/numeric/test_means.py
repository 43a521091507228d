"""Means over the steps and how sure their difference is, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.numeric.means import difference_of_means, independent_steps


def test_the_interval_of_a_difference_is_welchs() -> None:
    """Variances of 1 over 3 steps each: standard error sqrt(2/3), (2/3)^2 / ((1/9 + 1/9) / 2) = 4 degrees of freedom,
    whose t is 2.776445 in the tables.
    """
    change = difference_of_means(np.array([1.0, 2, 3]), np.array([3.0, 4, 5]))
    reach = 2.776445 * (2 / 3) ** 0.5
    assert (change.before, change.after, change.difference) == (2, 4, 2)
    assert change.low == pytest.approx(2 - reach, rel=1e-5)
    assert change.high == pytest.approx(2 + reach, rel=1e-5)
    assert change.share == 1.0
    assert not change.clear  # 2 +- 2.3


def test_steps_that_do_not_vary_leave_no_doubt() -> None:
    change = difference_of_means(np.full(4, 2.0), np.full(3, 1.5))
    assert (change.low, change.high) == (-0.5, -0.5)
    assert change.clear
    assert not difference_of_means(np.full(4, 2.0), np.full(4, 2.0)).clear


def test_one_step_has_no_interval() -> None:
    change = difference_of_means(np.array([1.0]), np.array([1.0, 2.0]))
    assert change.low is None
    assert not change.clear


def test_steps_that_resemble_their_neighbours_count_for_less() -> None:
    # deviations -1, -1, 1, 1: the correlation with the next is (1 - 1 + 1) / 4 = 1/4; 4 x 0.75 / 1.25 = 2.4
    assert independent_steps(np.array([1.0, 1, 3, 3])) == pytest.approx(2.4)
    assert independent_steps(np.array([1.0, 3, 1, 3])) == 4  # turning back each time is no reason to count more
    assert independent_steps(np.array([7.0, 7, 7])) == 3
    assert independent_steps(np.repeat([1.0, 2.0], 50)) < 10


@examples(25)
@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=30), st.lists(st.floats(0.5, 2), min_size=2, max_size=30))
def test_swapping_the_sides_turns_the_interval_round(before: list[float], after: list[float]) -> None:
    there, back = (difference_of_means(np.array(one), np.array(two)) for one, two in ((before, after), (after, before)))
    assert there.low is not None
    assert back.high is not None
    assert there.low == pytest.approx(-back.high)
    assert there.low <= there.difference + 1e-12
