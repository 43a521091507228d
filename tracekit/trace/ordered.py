"""A large trace whose ops are in the order of their steps, workers and kinds.

In: a Parquet file, read some rows at a time. Out: a `Trace` that keeps four numbers of an op; the rest follows from its
place. Only a file that `Trace.from_frame` accepts as it is becomes one: to say what is wrong takes all of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import polars as pl

from tracekit.base.text import encodable
from tracekit.trace.canonical import Renamed, Trace, finite_starts, stated_unit
from tracekit.trace.magnitudes import check_bounds, check_magnitudes, judged_steps
from tracekit.trace.model import Layout
from tracekit.trace.parquet_file import check_size
from tracekit.trace.schema import (
    KIND_TYPE,
    NONE,
    NULLABLE,
    OPTIONAL,
    SCHEMA,
    Origin,
    canonical_columns,
    check_complete,
    check_ranges,
    numbers_of,
)
from tracekit.trace.step_grid import StepGrid, distinct_steps
from tracekit.trace.units import in_seconds

#: Rows of a piece, unless that makes more pieces than this: rows before a piece have to be skipped.
PIECE_ROWS, MOST_PIECES = 1_000_000, 32
#: What is kept of an op, and which columns tell where it belongs.
_KEPT = {"start": np.float64, "duration": np.float64, "chunk": np.int32, "microbatch": np.int32}
_PLACE = tuple(name for name in SCHEMA if name not in _KEPT)


class OrderedTrace(Trace):
    """A trace that makes the table `ops` when somebody asks for it."""

    _kept: dict[str, np.ndarray]

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        """A trace with a table: what `dataclasses.replace` makes of this one."""
        return Trace(*fields, **named)  # type: ignore[return-value]

    @classmethod
    def of(cls, outline: Trace, workers: StepGrid, columns: Mapping[str, np.ndarray]) -> Self:
        """`columns`: some columns, in order. `outline`: all else."""
        trace = object.__new__(cls)
        vars(trace).update(vars(outline), _outline=outline, workers=workers, _kept=dict(columns))
        del vars(trace)["ops"]
        return trace

    @cached_property
    def ops(self) -> pl.DataFrame:
        """All ops, in order; nothing is kept twice."""
        table = self._table(np.ones(self.workers.rank_of.shape, np.bool_))
        self._kept.clear()
        return table

    @property
    def rows(self) -> int:
        """The number of ops."""
        return int(self.workers.counts.sum())

    def outline(self) -> Trace:
        """The trace with what is known of each worker and step."""
        return self._outline

    def ordered(self, *names: str) -> Iterator[np.ndarray]:
        """As of other traces."""
        yield from (self._kept[name] for name in names) if self._kept else super().ordered(*names)

    def of_stages(self, stages: Iterable[int]) -> pl.DataFrame:
        """The ops of these stages."""
        if not self._kept:
            return super().of_stages(stages)
        chosen = np.zeros(self.workers.rank_of.shape, np.bool_)
        chosen[:, :, list(stages)] = True
        return self._table(chosen)

    def sample(self, steps: Sequence[int]) -> pl.DataFrame:
        """The ops of these steps, and all of the worker that has the first op."""
        chosen = np.zeros(self.workers.rank_of.shape, np.bool_)
        chosen[np.isin(self.steps, steps)] = True
        chosen[:, *np.argwhere(self.workers.rank_of[0] >= 0)[0]] = True
        return self._table(chosen)

    def _table(self, chosen: np.ndarray) -> pl.DataFrame:
        """The ops of some workers in some steps, `chosen` [steps, dp_ranks, stages], in order."""
        counts = np.where(chosen.reshape(-1, 1), self.workers.counts, np.int32(0))
        cell, kind, seq, place = self.workers.places_of(counts)
        columns = [pl.Series("kind", kind).cat.to(KIND_TYPE), pl.Series("seq", seq)]
        columns += [pl.Series(name, values[place]) for name, values in self._kept.items()]
        ops = self.workers.frame(cell).with_columns(columns)
        absent = (pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in NULLABLE)
        return ops.with_columns(absent).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))


def ordered_trace(
    path: str | os.PathLike[str],
    layout: Layout,
    source: Origin,
    renamed: Renamed,
    *,
    name: str,
    metadata: Mapping[str, Any],
    step_starts: Mapping[int, float] = MappingProxyType({}),
) -> Trace | None:
    """The trace in a Parquet file, None if only a table of it can be judged, or used.

    `renamed`: gives columns their canonical names. Raises TracekitError or an error of polars if something is wrong.
    """
    with open(path, "rb") as file:
        table = pl.scan_parquet(file)
        types, rows = table.collect_schema(), int(table.select(pl.len()).collect().item())
        check_size(path, rows, len(types))
        if not types.keys() >= {source.columns.get(one, one) for one in SCHEMA} or OPTIONAL & types.keys():
            return None

        def checked(*names: str) -> Iterator[pl.DataFrame]:
            size = max(PIECE_ROWS, rows // MOST_PIECES)
            columns = [source.columns.get(one, one) for one in names]
            for first in range(0, rows, size):
                read = table.select(columns).slice(first, size).collect()
                piece = canonical_columns(renamed(read), source, names)
                check_ranges(piece, layout, source)
                yield piece

        parts = list(checked(*_PLACE))
        steps, dp_ranks = (
            distinct_steps(np.concatenate([distinct_steps(part[one].to_numpy()) for part in parts]))
            for one in ("step", "dp_rank")
        )
        workers, filled = StepGrid(steps, dp_ranks, np.arange(layout.pp, dtype=np.int32)), np.zeros(rows, np.bool_)
        if not workers.fit(rows):
            return None
        for part in parts:
            workers.add(part)
        places = [workers.places(part, filled) for part in parts]
        if not (workers.have_one_rank and filled.all()):
            return None
        del parts, filled
        arrays = {one: np.empty(rows, dtype) for one, dtype in _KEPT.items()}
        for place, piece in zip(places, checked(*_KEPT), strict=True):
            check_bounds(piece, source)
            for column, values in arrays.items():
                values[place] = numbers_of(piece[column])
    outline = workers.frame(np.flatnonzero(workers.rank_of >= 0))
    check_complete(distinct_steps(outline["pp_rank"].to_numpy()), int(arrays["chunk"].max()), layout, source)
    frozen = MappingProxyType(dict(finite_starts(step_starts, source))), MappingProxyType(dict(metadata))
    trace = OrderedTrace.of(Trace(outline, layout, encodable(name), *frozen), workers, arrays)
    judged = judged_steps(steps, rows)
    sample = trace.sample(judged)
    if in_seconds(sample, None, step_starts, source)[0] is not sample:
        return None
    whole = all(types[source.columns.get(one, one)].is_integer() for one in ("start", "duration"))
    check_magnitudes(sample, judged, step_starts, source, stated=stated_unit(metadata), integers=whole)
    return trace
