"""Robust statistics."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.numeric.statistics import median

#: Two rows of four values, with medians 2.5 and 6, and one column of each.
VALUES = np.array([[4.0, 1.0, 2.0, 3.0], [9.0, 5.0, 7.0, 0.0]])


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert median(VALUES, (1,)).tolist() == [2.5, 6.0]
    assert median(VALUES, (0,)).tolist() == [6.5, 3.0, 4.5, 1.5]
    assert median(VALUES, (0, 1)).tolist() == 3.5


def test_the_median_of_an_odd_number_is_the_middle_one() -> None:
    assert median(VALUES[:, :3], (1,)).tolist() == [2.0, 7.0]


def test_nan_does_not_count() -> None:
    values = np.where(VALUES == 9.0, np.nan, VALUES)
    assert median(values, (1,)).tolist() == [2.5, 5.0]
    assert np.isnan(median(np.full((2, 3), np.nan), (1,))).all()


@pytest.mark.parametrize(("shape", "axes"), [((2, 0), (1,)), ((0, 2, 3), (1,)), ((2, 0, 3), (1, 2))])
def test_of_nothing_there_is_no_median(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    found = median(np.zeros(shape), axes)
    assert found.shape == tuple(size for axis, size in enumerate(shape) if axis not in axes)
    assert np.isnan(found).all()
