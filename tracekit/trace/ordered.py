"""A large trace whose ops are in the order of their steps, workers and kinds.

In: a Parquet file, read a few columns at a time. Out: a `Trace` that keeps four numbers of an op and its optional
columns; the rest follows from its place. Only a file that `Trace.from_frame` accepts becomes one: to say what is wrong
takes a table of its rows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import TraceError
from tracekit.base.text import encodable
from tracekit.trace.canonical import UNIT_KEY, Renamed, Trace, check_size, finite_starts, stated_unit
from tracekit.trace.model import LONGEST_S, Layout, TimeUnit
from tracekit.trace.schema import (
    KIND_TYPE,
    NONE,
    NULLABLE,
    OPTIONAL,
    SCHEMA,
    Origin,
    StepGrid,
    canonical_columns,
    check_complete,
    check_ranges,
    distinct_steps,
    in_order,
    numbers_of,
    optional_columns,
)
from tracekit.trace.units import (
    check_magnitudes,
    judged_steps,
    on_clock,
    optional_in_seconds,
    raw_times,
    zeros_of_steps,
)

#: In this order, `ordered_trace` uses the columns of a file.
_WHERE, _WHICH, _TIMES = ("step", "dp_rank", "pp_rank"), ("rank", "kind", "seq"), ("start", "duration")
_IN_TURN = (*_WHERE, *_WHICH, *_TIMES, *OPTIONAL, *NULLABLE)


class OrderedTrace(Trace):
    """A trace that builds the table `ops` on first use."""

    _columns: dict[str, np.ndarray | pl.Series]

    def __new__(cls, *fields: Any, **keywords: Any) -> Self:
        """A trace with a table: what `dataclasses.replace` makes of this one."""
        return Trace(*fields, **keywords)  # type: ignore[return-value]

    @classmethod
    def of(cls, outline: Trace, workers: StepGrid, columns: Mapping[str, np.ndarray | pl.Series]) -> Self:
        """`columns`: what does not follow from the place of an op, in order. `outline`: all else."""
        trace = object.__new__(cls)
        vars(trace).update(vars(outline), _outline=outline, workers=workers, _columns=dict(columns))
        del vars(trace)["ops"]
        return trace

    @cached_property
    def ops(self) -> pl.DataFrame:
        """All ops, in order; nothing is kept twice."""
        table = self._table(np.ones(self.workers.rank_of.shape, np.bool_))
        self._columns.clear()
        return table

    @property
    def rows(self) -> int:
        """The number of ops."""
        return int(self.workers.counts.sum())

    def ordered(self, *names: str) -> Iterator[np.ndarray]:
        """As of other traces."""
        if not self._columns:
            yield from super().ordered(*names)
        for column in [self._columns[name] for name in names if self._columns]:
            yield numbers_of(column) if isinstance(column, pl.Series) else column

    def of_stages(self, stages: Iterable[int]) -> pl.DataFrame:
        """The ops of these stages."""
        if not self._columns:
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
        columns += [pl.Series(name, values[place]) for name, values in self._columns.items()]
        ops = self.workers.frame(cell).with_columns(columns)
        absent = (pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in NULLABLE)
        names = [*SCHEMA, *(name for name in self._columns if name not in SCHEMA)]
        return ops.with_columns(absent).select(names).cast(pl.Schema(SCHEMA))


class _File:
    """The columns of a file, checked, with canonical names, in the order of `_IN_TURN`."""

    def __init__(self, table: pl.LazyFrame, layout: Layout, source: Origin, renamed: Renamed, unit: TimeUnit) -> None:
        def read(name: str) -> pl.Series:
            return _checked(renamed(table.select(columns[name]).collect()), layout, source, unit)

        self.types, self.rows = table.collect_schema(), int(table.select(pl.len()).collect().item())
        columns = {name: column for name in _IN_TURN if (column := source.columns.get(name, name)) in self.types}
        self.layout, self.names, self._columns = layout, [*columns], _read_ahead(read, [*columns])

    def columns(self, *names: str) -> Iterator[pl.Series]:
        """Those of these columns that the file has: `start` and `duration` as recorded, others in canonical types.

        Raises TraceError or LayoutError.
        """
        return (next(self._columns) for name in names if name in self.names)


def _checked(frame: pl.DataFrame, layout: Layout, source: Origin, unit: TimeUnit) -> pl.Series:
    """See `_File.columns`. `frame`: of one column."""
    (name,) = frame.columns
    if name in OPTIONAL:
        return optional_columns(optional_in_seconds(frame, unit.per_second), layout, source)[0]
    if name in _TIMES:
        times = raw_times(frame, name)
        if times is None:
            raise TraceError(f"{source}: {source.column(name)} holds other things than finite numbers")
        frame = pl.DataFrame([times.rechunk()])
    else:
        frame = canonical_columns(frame, source, [name])
    check_ranges(frame, layout, source)
    return frame.to_series()


def _read_ahead(read: Callable[[str], pl.Series], names: Sequence[str]) -> Iterator[pl.Series]:
    """`read` of each name. While one is used, a thread reads the next."""
    with ThreadPoolExecutor(1) as pool:
        reading = deque([pool.submit(read, names[0])])
        for name in names[1:]:
            reading.append(pool.submit(read, name))
            yield reading.popleft().result()  # and keep no reference to it
    yield reading.popleft().result()


class _Places:
    """Where the ops of a file belong.

    `place`: of each op in the order in which ops are kept, [ops]. `seen`: the cells of `workers` that have ops,
    `first`: the place of the first op of each. `first_rank`: that of the first op of the file.
    """

    def __init__(self, workers: StepGrid, place: npt.NDArray[np.int32], first_rank: int) -> None:
        self.workers, self.place, self.first_rank = workers, place, first_rank
        self.seen = np.flatnonzero(workers.rank_of >= 0)
        self.first = workers.first[self.seen, 0]

    @classmethod
    def of(cls, file: _File) -> Self | None:
        """None if a table takes less memory, or if ops contradict each other. Raises TraceError or LayoutError."""
        where = pl.DataFrame([*file.columns(*_WHERE)])
        steps, dp_ranks = (distinct_steps(where[name].to_numpy()) for name in ("step", "dp_rank"))
        workers = StepGrid(steps, dp_ranks, np.arange(file.layout.pp, dtype=np.int32))
        if not workers.fit(file.rows):
            return None
        cell = workers.cells(where)
        del where
        ops = pl.DataFrame([*file.columns(*_WHICH)])
        place = workers.place(ops, cell)
        return None if place is None else cls(workers, place, ops["rank"][0])

    @cached_property
    def row(self) -> npt.NDArray[np.int32]:
        """The row of the file that each op has, in the order in which ops are kept."""
        return in_order(np.arange(len(self.place), dtype=np.int32), self.place)

    def spans(self, start: npt.NDArray[Any], duration: npt.NDArray[Any]) -> pl.DataFrame:
        """As `spans_of`, of all ops in order."""
        end = np.maximum.reduceat(np.add(start, duration, dtype=np.float64), self.first)
        spans = self.workers.frame(self.seen).with_columns(first=np.minimum.reduceat(start, self.first), end=end)
        return spans.group_by("step", "rank").agg(pl.col("first").min(), pl.col("end").max())

    def count_from(self, zeros: npt.NDArray[Any], start: npt.NDArray[Any]) -> None:
        """Subtract from the starts of each step, in order, its zero; in place."""
        bounds = [*self.workers.first.reshape(len(zeros), -1)[:, 0].tolist(), len(start)]
        for (first, last), zero in zip(pairwise(bounds), zeros, strict=True):
            start[first:last] -= zero


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
    per_second, starts = (unit or TimeUnit.S).per_second, finite_starts(step_starts, source)
    with open(path, "rb") as raw_file:
        file = _File(pl.scan_parquet(raw_file), layout, source, renamed, unit or TimeUnit.S)
        check_size(path, file.rows, len(file.types))
        places = _Places.of(file)
        if places is None:
            return None
        start, duration = (in_order(column.to_numpy(), places.place) for column in file.columns(*_TIMES))
        integers, spans = start.dtype == duration.dtype == np.int64, places.spans(start, duration)
        if on_clock(float(start.max()), spans.filter(rank=places.first_rank), per_second):
            zeros, starts = zeros_of_steps(spans, unit, starts, source, start)
            places.count_from(zeros, start)
        if per_second != 1 or start.dtype == np.int64:
            start = start * (1 / per_second)
        if per_second != 1 or duration.dtype == np.int64:
            duration = duration * (1 / per_second)
        if max(-start.min(), start.max(), duration.max()) > LONGEST_S:
            return None
        columns: dict[str, npt.NDArray[Any] | pl.Series] = {"start": start, "duration": duration}
        worker_frame = places.workers.frame(places.seen)
        for column in file.columns(*OPTIONAL):
            columns[column.name] = column.gather(places.row)
            first = column.gather(np.minimum.reduceat(places.row, places.first))
            worker_frame = worker_frame.with_columns(first)
        columns |= {name: np.full(file.rows, NONE, np.int32) for name in NULLABLE if name not in file.names}
        columns |= {label.name: in_order(numbers_of(label), places.place) for label in file.columns(*NULLABLE)}
    workers = places.workers
    del places
    largest_chunk = int(np.max(columns["chunk"]))
    check_complete(distinct_steps(worker_frame["pp_rank"].to_numpy()), largest_chunk, layout, source)
    free_metadata = {**metadata, UNIT_KEY: str(unit)} if unit else {**metadata}
    frozen = MappingProxyType({**starts}), MappingProxyType(free_metadata)
    trace = OrderedTrace.of(Trace(worker_frame, layout, encodable(name), *frozen), workers, columns)
    judged, stated = judged_steps(trace.steps, trace.rows), stated_unit(trace.metadata)
    check_magnitudes(trace.sample(judged), judged, step_starts, source, stated=stated, unit=unit, integers=integers)
    return trace
