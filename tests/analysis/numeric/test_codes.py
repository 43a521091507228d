"""Codes of values."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracekit.analysis.numeric.arrays import _LARGEST_SPAN, combinations, numbered


def test_combinations_are_in_ascending_order_and_every_row_knows_its_own() -> None:
    stage, dp_rank = np.array([1, 0, 1, 0, 1]), np.array([-1, 7, 3, 7, -1])
    found, number = combinations([stage, dp_rank])
    assert found.tolist() == [[0, 7], [1, -1], [1, 3]]
    assert number.tolist() == [1, 0, 2, 0, 1]


def test_numbers_far_apart_are_combined_without_a_table_of_all_between() -> None:
    far = np.array([1 << 60, 0, 1 << 60])
    found, number = combinations([far, far, far])
    assert found.tolist() == [[0, 0, 0], [1 << 60] * 3]
    assert number.tolist() == [1, 0, 1]


@pytest.mark.parametrize("apart", [1, _LARGEST_SPAN, 1 << 60])
def test_equal_rows_have_one_number_however_far_apart_the_values_are(apart: int) -> None:
    far, other = pl.Series([-5, 0, apart, None, -5]), pl.Series(["a", "a", "a", "a", "b"])
    assert len(set(numbered(far, other).tolist())) == 5
    again = numbered(pl.concat([far, far]), pl.concat([other, other]))
    assert again[:5].tolist() == again[5:].tolist()


def test_nothing_has_no_combinations() -> None:
    nothing = np.empty(0, np.int64)
    found, number = combinations([nothing, nothing])
    assert found.shape == (0, 2)
    assert number.shape == (0,)
