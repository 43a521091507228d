"""Ops of a GPU, by hand."""

from __future__ import annotations

import polars as pl


def gpu_ops(*kernels: tuple[str, str, str | None, str | None]) -> pl.DataFrame:
    """Kernels by kind, name, operator and inputs."""
    schema = {"kind": pl.String, "name": pl.String, "operator": pl.String, "inputs": pl.String}
    return pl.DataFrame(kernels, schema, orient="row").with_columns(role=pl.lit("gpu"))
