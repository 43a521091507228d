"""Dependencies that the trace states itself.

In: the ops of an op trace, each with a list of the ops that it waits for. Out: edges.
"""

from __future__ import annotations

import polars as pl

from tracekit.base.errors import TraceError

NO_EDGES = pl.DataFrame(schema={"before": pl.Int64, "after": pl.Int64, "why": pl.Categorical()})


def explicit_edges(ops: pl.DataFrame) -> pl.DataFrame:
    """An edge for each entry of `waits_for`, with its entry of `why`. Raises TraceError if their lengths differ."""
    if "waits_for" not in ops.columns:
        return NO_EDGES
    lists = [name for name in ("waits_for", "why") if name in ops.columns]
    for name in lists:
        if not isinstance(ops[name].dtype, pl.List):
            raise TraceError(f"ops: column {name!r} has type {ops[name].dtype}; expected a list for each op")
    if "why" in lists:
        words, waits = (ops[name].list.len().fill_null(0) for name in ("why", "waits_for"))
        differs = words != waits
        if differs.any():
            row = int(differs.arg_max() or 0)
            raise TraceError(
                f"ops: column 'why', row {row}: {words[row]} words for {waits[row]} ops in 'waits_for'; expected one"
                " for each"
            )
    edges = ops.select(pl.col(lists)).with_row_index("after").filter(pl.col("waits_for").list.len() > 0)
    edges = edges.explode(lists).rename({"waits_for": "before"})
    before = edges["before"]
    if not before.dtype.is_integer() and before.dtype != pl.Null:
        raise TraceError(f"ops: column 'waits_for' has lists of {before.dtype}; expected row numbers of the ops")
    if before.dtype != pl.Null and (strange := (before < 0) | (before >= ops.height)).fill_null(value=False).any():
        first = int(strange.arg_max() or 0)
        raise TraceError(
            f"ops: column 'waits_for', row {edges['after'][first]}: {before[first]}; the ops have rows 0 to"
            f" {ops.height - 1}"
        )
    why = pl.col("why").cast(pl.String).cast(pl.Categorical) if "why" in lists else pl.lit("rule", pl.Categorical)
    try:
        return edges.select(pl.col("before").cast(pl.Int64), pl.col("after").cast(pl.Int64), why=why)
    except pl.exceptions.PolarsError:
        raise TraceError(f"ops: column 'why' has lists of {edges['why'].dtype}; expected words") from None
