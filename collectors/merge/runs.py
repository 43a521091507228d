"""Number rows of a sorted table within the runs of equal rows, all runs in one pass.

In: a table sorted by some columns. Out: expressions over it. `over` calls a function for each run, which costs more
than the sort if a job has many ranks and steps.
"""

from __future__ import annotations

import polars as pl


def place_in_run(*columns: str) -> pl.Expr:
    """The position of each row, from 0, among the adjacent rows that are equal in `columns`."""
    row = pl.int_range(pl.len())
    begins = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in columns) | (row == 0)
    return row - pl.when(begins).then(row).forward_fill()
