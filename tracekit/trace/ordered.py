"""A large trace whose ops are in the order of their steps, workers and kinds.

In: a Parquet file, read a few columns at a time. Out: a `Trace` that keeps four numbers of an op and its optional
columns; the rest follows from its place. Only a file that `Trace.from_frame` accepts becomes one: to say what is wrong
takes a table of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.text import encodable
from tracekit.trace.canonical import UNIT_KEY, Renamed, Trace, finite_starts, stated_unit
from tracekit.trace.magnitudes import check_bounds, check_magnitudes, judged_steps
from tracekit.trace.model import Layout, TimeUnit
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
    optional_columns,
)
from tracekit.trace.step_grid import StepGrid, distinct_steps
from tracekit.trace.units import in_seconds


class OrderedTrace(Trace):
    """A trace that makes the table `ops` when somebody asks for it."""

    _kept: dict[str, np.ndarray | pl.Series]

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        """A trace with a table: what `dataclasses.replace` makes of this one."""
        return Trace(*fields, **named)  # type: ignore[return-value]

    @classmethod
    def of(cls, outline: Trace, workers: StepGrid, columns: Mapping[str, np.ndarray | pl.Series]) -> Self:
        """`columns`: what does not follow from the place of an op, in order. `outline`: all else."""
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

    def ordered(self, *names: str) -> Iterator[np.ndarray]:
        """As of other traces."""
        if not self._kept:
            yield from super().ordered(*names)
        for column in [self._kept[name] for name in names if self._kept]:
            yield numbers_of(column) if isinstance(column, pl.Series) else column

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
        names = [*SCHEMA, *(name for name in self._kept if name not in SCHEMA)]
        return ops.with_columns(absent).select(names).cast(pl.Schema(SCHEMA))


class _File:
    """The columns of a file, some at a time, with canonical names."""

    def __init__(self, table: pl.LazyFrame, layout: Layout, source: Origin, renamed: Renamed) -> None:
        self.table, self.layout, self.source, self.renamed = table, layout, source, renamed
        self.types, self.rows = table.collect_schema(), int(table.select(pl.len()).collect().item())

    def recorded(self, *names: str) -> pl.DataFrame:
        """Those of these columns that the file has, as they are."""
        columns = (self.source.columns.get(name, name) for name in names)
        return self.renamed(self.table.select(column for column in columns if column in self.types).collect())

    def canonical(self, *names: str, ops: pl.DataFrame | None = None) -> pl.DataFrame:
        """These columns, of `ops` or of the file, in canonical types. Raises TraceError or LayoutError."""
        columns = canonical_columns(self.recorded(*names) if ops is None else ops, self.source, names)
        check_ranges(columns, self.layout, self.source)
        return columns


class _Places(NamedTuple):
    """Where the ops of a file belong. `seen`: the cells of `workers` that have ops. In the order of the file: the step
    and rank of each op, its cell, and its place in the order in which ops are kept.
    """

    workers: StepGrid
    seen: npt.NDArray[np.int64]
    ops: pl.DataFrame
    cell: npt.NDArray[np.int32]
    place: npt.NDArray[np.int64]

    @classmethod
    def of(cls, file: _File) -> Self | None:
        """None if a table takes less memory, or if ops contradict each other. Raises TraceError or LayoutError."""
        where = file.canonical("step", "dp_rank", "pp_rank")
        steps, dp_ranks = (distinct_steps(where[each].to_numpy()) for each in ("step", "dp_rank"))
        workers = StepGrid(steps, dp_ranks, np.arange(file.layout.pp, dtype=np.int32))
        if not workers.fit(file.rows):
            return None
        cell, step = workers.cells(where), where["step"]
        del where
        ops = file.canonical("rank", "kind", "seq").with_columns(step)
        place = workers.place(ops, cell)
        seen = np.flatnonzero(workers.rank_of >= 0)
        return None if place is None else cls(workers, seen, ops.select("step", "rank"), cell, place)

    def spans(self, raw: pl.DataFrame) -> pl.DataFrame:
        """As `spans_of`, of all ops."""
        start = raw["start"].to_numpy()
        first, end = np.empty(self.workers.rank_of.size, start.dtype), np.full(self.workers.rank_of.size, -np.inf)
        first[self.cell] = start
        np.minimum.at(first, self.cell, start)
        np.maximum.at(end, self.cell, start.astype(np.float64) + raw["duration"].to_numpy())
        spans = self.workers.frame(self.seen).with_columns(first=first[self.seen], end=end[self.seen])
        return spans.group_by("step", "rank").agg(pl.col("first").min(), pl.col("end").max())

    def outline(self, optional: pl.DataFrame) -> pl.DataFrame:
        """Each worker in each step, with the `optional` columns of its first op in the file."""
        op = np.empty(self.workers.rank_of.size, np.int64)
        op[self.cell[::-1]] = np.arange(len(self.cell))[::-1]  # the one written last stays
        return self.workers.frame(self.seen).with_columns(column[op[self.seen]] for column in optional)

    def in_order(self, column: pl.Series) -> npt.NDArray[Any] | pl.Series:
        """A column in the order in which ops are kept."""
        values = np.arange(len(column)) if column.name in OPTIONAL else numbers_of(column)
        ordered = np.empty_like(values)
        ordered[self.place] = values
        return column.gather(ordered) if column.name in OPTIONAL else ordered


def ordered_trace(
    path: str | os.PathLike[str],
    layout: Layout,
    source: Origin,
    renamed: Renamed,
    *,
    unit: TimeUnit | None,
    name: str,
    metadata: Mapping[str, Any],
    step_starts: Mapping[int, float] = MappingProxyType({}),
) -> Trace | None:
    """The trace in a Parquet file, None if only a table of it can be judged. Arguments as of `trace_of_file`.

    Raises TracekitError or an error of polars if something is wrong.
    """
    with open(path, "rb") as opened:
        file = _File(pl.scan_parquet(opened), layout, source, renamed)
        check_size(path, file.rows, len(file.types))
        places = _Places.of(file)
        if places is None:
            return None
        ops = places.ops.hstack(file.recorded("start", "duration", *OPTIONAL))
        whole = ops["start"].dtype.is_integer() and ops["duration"].dtype.is_integer()
        ops, starts = in_seconds(ops, unit, finite_starts(step_starts, source), source, places.spans)
        optional = pl.DataFrame(optional_columns(ops, layout, source))
        times = file.canonical("start", "duration", ops=ops)
        del ops
        check_bounds(times, source)
        columns = {time: places.in_order(times.drop_in_place(time)) for time in ("start", "duration")}
        labels = file.canonical(*NULLABLE, ops=places.ops.hstack(file.recorded(*NULLABLE)))
    columns |= {column.name: places.in_order(column) for column in [*labels, *optional]}
    workers, outline = places.workers, places.outline(optional)
    del places, labels, optional
    largest_chunk = int(np.max(columns["chunk"]))
    check_complete(distinct_steps(outline["pp_rank"].to_numpy()), largest_chunk, layout, source)
    free_metadata = {**metadata, UNIT_KEY: str(unit)} if unit else {**metadata}
    frozen = MappingProxyType({**starts}), MappingProxyType(free_metadata)
    trace = OrderedTrace.of(Trace(outline, layout, encodable(name), *frozen), workers, columns)
    judged, stated = judged_steps(trace.steps, trace.rows), stated_unit(trace.metadata)
    check_magnitudes(trace.sample(judged), judged, step_starts, source, stated=stated, integers=whole)
    return trace
