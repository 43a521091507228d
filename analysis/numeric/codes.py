"""Integer codes for values, so that the code that follows works on integer arrays.

In: columns and arrays. Out: codes from 0. Most sets of values are dense: a lookup table then numbers them ten times
faster than sorting millions of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Int32s, Ints

#: Above this many table entries per value, a table is slower than sorting.
_PLACES_PER_VALUE = 8
_LARGEST_NUMBER, _LARGEST_SPAN = 1 << 62, 1 << 31


def dense(values: Ints | Int32s) -> Ints:
    """A code for each value, in the order of the values and without gaps; equal values get equal codes."""
    lowest = int(values.min(initial=0))
    places = int(values.max(initial=0)) - lowest + 1
    if places > _PLACES_PER_VALUE * (len(values) + 1024):
        return np.asarray(np.unique(values, return_inverse=True)[1], np.int64)
    occurs = np.zeros(places, np.bool_)
    place = values - lowest if lowest else values
    occurs[place] = True
    code = np.cumsum(occurs, dtype=np.int64)
    code -= 1
    return code.take(place)


def combinations(codes: Sequence[Ints] | Sequence[Int32s]) -> tuple[Ints, Ints]:
    """The combinations of codes that occur, in ascending order, [combinations, codes], and the index of each row's
    combination, [rows].
    """
    number = np.zeros(len(codes[0]), np.int64)
    for code in codes:
        least = int(code.min(initial=0))
        number = dense(number * (int(code.max(initial=0)) - least + 1) + code - least)
    row = np.empty(int(number.max(initial=-1)) + 1, np.int64)  # one that has the combination
    row[number] = np.arange(len(number))
    return np.stack([code[row] for code in codes], axis=1), number


def codes_of(column: pl.Series) -> tuple[Ints, int]:
    """A code for each value of a column, and the number of possible codes; null is a value, the last one."""
    whole = column.cast(pl.Categorical).to_physical() if column.dtype in (pl.String, pl.Categorical) else column
    code = whole.cast(pl.Int64).fill_null(0).to_numpy()
    lowest, values = int(code.min(initial=0)), int(code.max(initial=0)) - int(code.min(initial=0)) + 2
    if values - 2 >= _LARGEST_SPAN:
        code = dense(code)
        lowest, values = 0, int(code.max(initial=0)) + 2
    code = code - lowest if lowest else code
    return (np.where(whole.is_null().to_numpy(), values - 1, code) if whole.null_count() else code), values


def numbered(*columns: pl.Series) -> Ints:
    """A code for each combination of values, without gaps, [rows]; null is a value."""
    codes, size = codes_of(columns[0])
    for column in columns[1:]:
        code, values = codes_of(column)
        if size * values >= _LARGEST_NUMBER:
            codes = dense(codes)
            size = int(codes.max(initial=0)) + 1
        codes = codes * values + code
        size *= values
    return dense(codes)


def of_each(function: Callable[..., float], *columns: pl.Series) -> np.ndarray:
    """A function of the values of each row, called once for each combination of them, [rows]."""
    number = numbered(*columns)
    row = np.zeros(int(number.max(initial=-1)) + 1, np.int64)  # one that has the combination
    row[number] = np.arange(len(number))
    values = zip(*(column.gather(row) for column in columns), strict=True)
    return np.array([function(*one) for one in values])[number]
