"""Dependencies that follow from streams: a stream of a rank runs one op after the other.

In: the ops of an op trace. Out: edges from each op of a stream to the next one, in order of start.
"""

from __future__ import annotations

import polars as pl

from tracekit.analysis.graph.rules.explicit import NO_EDGES


def stream_edges(ops: pl.DataFrame) -> pl.DataFrame:
    """An edge between neighbours on a stream; none for ops whose stream is null, or if there is no such column."""
    if "stream" not in ops.columns:
        return NO_EDGES
    stream = [name for name in ("step", "rank", "stream") if name in ops.columns]
    rows = ops.select(*stream, "start").with_row_index("after").filter(pl.col("stream").is_not_null())
    ordered = rows.sort("start", maintain_order=True)
    edges = ordered.select(pl.col("after").cast(pl.Int64), before=pl.col("after").shift(1).over(stream).cast(pl.Int64))
    return edges.drop_nulls().select("before", "after", why=pl.lit("stream", pl.Categorical))
