"""Student's t distribution, by hand and as in scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.numeric.statistics import student_beyond, student_tail

FREEDOM = st.floats(0.1, 1e4)


def test_with_one_and_two_degrees_of_freedom_it_has_a_closed_form() -> None:
    """With one, 1/2 - atan(t) / pi; with two, (1 - t / sqrt(2 + t^2)) / 2. A t of 12.7062 leaves 2.5 %, one of 4.3027
    with two.
    """
    for t in (-50.0, -1.0, -0.01, 0.0, 0.5, 1.0, 3.0, 200.0):
        assert student_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-12)
        assert student_tail(t, 2) == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2, rel=1e-10)
    assert student_beyond(0.025, 1) == pytest.approx(12.7062, abs=1e-4)
    assert student_beyond(0.025, 2) == pytest.approx(4.3027, abs=1e-4)
    assert (student_tail(math.inf, 3), student_tail(-math.inf, 3), student_beyond(0.5, 3)) == (0, 1, 0)


@examples(200)
@given(st.floats(-40, 40), FREEDOM)
def test_the_tail_is_that_of_scipy(t: float, freedom: float) -> None:
    from scipy.special import stdtr

    assert student_tail(t, freedom) == pytest.approx(stdtr(freedom, -t), rel=1e-8, abs=1e-300)


@examples(100)
@given(st.floats(1e-9, 0.5), FREEDOM)
def test_so_much_is_exceeded_with_that_chance(chance: float, freedom: float) -> None:
    assert student_tail(student_beyond(chance, freedom), freedom) == pytest.approx(chance, rel=1e-9)
