"""Tables of several ranks as one."""

from __future__ import annotations

import polars as pl

from tracekit.trace.op import joined


def test_joined_tables_have_one_chunk_and_nulls_where_a_table_lacks_a_column():
    frames = [pl.DataFrame({"rank": [0, 0], "name": ["a", "b"]}), pl.DataFrame({"rank": [1], "stream": [7]})]
    whole = joined(frames)
    assert whole.to_dict(as_series=False) == {
        "rank": [0, 0, 1],
        "name": ["a", "b", None],
        "stream": [None, None, 7],
    }
    assert [column.n_chunks() for column in whole] == [1, 1, 1]
    assert not frames, "the tables would be in memory twice"
