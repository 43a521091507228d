"""The rows of queries as polars frames.

In: a query. Out: its rows. Nothing here leads to DuckDB as started: `possible.py` keeps its functions until the end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    import duckdb


def frame(query: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    """The rows of a query, through Arrow's interface alone: polars looks for more in a relation, and DuckDB then keeps
    types until the end.
    """
    return pl.DataFrame(SimpleNamespace(__arrow_c_stream__=query.__arrow_c_stream__))
