"""Runs of equal rows in a sorted table."""

from itertools import groupby

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.collectors.merge.record_times import place_in_run


@examples(30)
@given(st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from(["a", "b", None]))))
def test_rows_are_numbered_in_each_run_of_equal_ones(rows):
    """Missing values are equal to each other, and a run ends where either column changes."""
    table = pl.DataFrame(rows, {"step": pl.Int32, "kind": pl.String}, orient="row")
    expected = [at for _, run in groupby(rows) for at, _ in enumerate(run)]
    assert table.select(place_in_run("step", "kind")).to_series().to_list() == expected
