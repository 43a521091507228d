"""The columns of a trace: whether a frame conforms to them, and where each op belongs in their order.

In: a polars frame, the layout, and the names of its columns for messages. Out: the canonical columns in canonical
types, or one error that names source, column, row, value, expectation and next step; `StepGrid`, the order of ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.base.errors import LayoutError, TraceError
from tracekit.base.text import LONGEST_NAME, cut, listed, printable, quoted
from tracekit.trace import _rows
from tracekit.trace.model import KINDS, Layout, Worker

KIND_TYPE = pl.Enum([str(kind) for kind in KINDS])
#: Canonical columns. `start` and `duration` are seconds, `start` from the start of the step.
SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "dp_rank": pl.Int32,
    "pp_rank": pl.Int16,
    "kind": KIND_TYPE,
    "seq": pl.Int32,
    "microbatch": pl.Int32,
    "chunk": pl.Int16,
    "start": pl.Float64,
    "duration": pl.Float64,
}
#: Columns that apply to some kinds only.
NULLABLE = frozenset({"microbatch", "chunk"})
#: An optional column: seconds that each rank of the worker waited for the others inside the op, ranks in the order of
#: their numbers; null or empty if not recorded.
WAITED, WAITED_TYPE = "waited", pl.List(pl.Float64)
#: An optional column: seconds that all ops of the kind in that step took on each rank of the worker, ranks as above, on
#: the first op of each kind of a worker's step; null elsewhere.
LASTED = "lasted"
#: Optional columns of sends and receives, seconds: how long before its start the host had asked for the transfer, and
#: how long after its start the host went on, having waited for it; null if not recorded.
POSTED, RESUMED = "posted", "resumed"
#: An optional column: seconds of a worker's step in which the training thread of each of its ranks should have worked,
#: and neither ran nor was ready to, ranks as above, on the first op of the worker's step; null elsewhere.
OFF_CPU = "off_cpu"
#: An optional column: seconds of a worker's step in which the training thread of each of its ranks was ready to run and
#: had no processor, in the same places.
QUEUED = "queued"
#: Optional columns of all-to-alls: the rows that the rank sends to and receives from each rank of the group; empty if
#: not recorded, null for other ops.
SENT, RECEIVED = "sent", "received"
ROWS_TYPE = pl.List(pl.Int64)
#: The optional columns of seconds for each rank of a worker.
OF_RANKS = (WAITED, LASTED, OFF_CPU, QUEUED)
#: "No chunk" and "no microbatch" among numbers.
NONE = -1
#: The optional columns, in the order in which a trace has them.
OPTIONAL = (POSTED, RESUMED, *OF_RANKS, SENT, RECEIVED)

Number = TypeVar("Number", bound=np.generic)


def numbers_of(column: pl.Series) -> npt.NDArray[Any]:
    """Times as float64, nan for null; other numbers as int32, NONE for null."""
    return (column if column.dtype.is_float() else column.cast(pl.Int32).fill_null(NONE)).to_numpy()


class Origin(Struct, frozen=True):
    """The origin of ops for messages: a name, and its names of canonical columns if they differ."""

    name: str
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return self.name

    def column(self, name: str) -> str:
        """The name of a column in messages."""
        return f"column {quoted(self.columns.get(name, name))}"

    def typed(self, column: pl.Series) -> str:
        """A column and its type in messages."""
        return f"{self.column(column.name)} has type {cut(printable(str(column.dtype)), LONGEST_NAME)}"


def checked_columns(ops: pl.DataFrame, layout: Layout, source: Origin) -> pl.DataFrame:
    """The canonical columns of `ops`, one contiguous chunk each, all values validated.

    Raises TraceError for a violation of the data model, LayoutError if the layout contradicts the ops.
    """
    checked = canonical_columns(ops, source)
    check_ranges(checked, layout, source)
    largest = int(numbers_of(checked["chunk"]).max())
    check_complete(distinct_steps(checked["pp_rank"].to_numpy()), largest, layout, source)
    _check_identity(checked, source)
    return checked.with_columns(optional_columns(ops, layout, source))


def optional_columns(ops: pl.DataFrame, layout: Layout, source: Origin) -> list[pl.Series]:
    """The optional columns that `ops` has, validated. Raises TraceError."""
    optional = [_host_time(ops[name], source) for name in (POSTED, RESUMED) if name in ops.columns]
    optional += [_of_ranks(ops[name], layout, source) for name in OF_RANKS if name in ops.columns]
    return optional + [_rows_of_peers(ops[name], source) for name in (SENT, RECEIVED) if name in ops.columns]


def canonical_columns(ops: pl.DataFrame, source: Origin, names: Iterable[str] = SCHEMA) -> pl.DataFrame:
    """These canonical columns of `ops` in canonical types, one contiguous chunk each. Raises TraceError."""
    optional = {name for name in NULLABLE if name not in ops.columns}
    if missing := [name for name in names if name not in ops.columns and name not in optional]:
        raise TraceError(
            f"{source}: {source.column(missing[0])} is missing; found {listed(ops.columns)}; expected"
            f" {', '.join(SCHEMA)}"
        )
    if ops.height == 0:
        raise TraceError(f"{source}: no ops (0 rows); record at least one step")
    columns = [
        pl.Series(name, [None], dtype=SCHEMA[name]).extend_constant(None, ops.height - 1)
        if name in optional
        else _canonical(ops[name], SCHEMA[name], source)
        for name in names
    ]
    return pl.DataFrame([column.rechunk() for column in columns])


def _of_ranks(column: pl.Series, layout: Layout, source: Origin) -> pl.Series:
    """A column of lists: for each op, one number from 0 for each rank of the worker, or none."""
    waited = _lists(column, WAITED_TYPE, "numbers", source)
    ranks, length = layout.tp * layout.cp, waited.list.len().fill_null(0)
    expected = f"one number for each of the {ranks} ranks of a worker (tp {layout.tp} x cp {layout.cp}), or null"
    _refuse((length != 0) & (length != ranks), waited, source, f"expected {expected}")
    odd = waited.list.eval(pl.element().is_null() | ~pl.element().is_finite() | (pl.element() < 0)).list.any()
    _refuse(odd, waited, source, "expected finite seconds >= 0")
    return waited


def _rows_of_peers(column: pl.Series, source: Origin) -> pl.Series:
    """A column of lists of integers from 0 on, or null."""
    rows = _lists(column, ROWS_TYPE, "integers", source)
    _refuse(rows.list.eval(pl.element().is_null() | (pl.element() < 0)).list.any(), rows, source, "expected rows >= 0")
    return rows


def _lists(column: pl.Series, dtype: pl.DataType, numbers: str, source: Origin) -> pl.Series:
    """`column` as lists, of `numbers` in words. Raises TraceError if it holds anything else."""
    try:
        return column.cast(dtype).rechunk()
    except pl.exceptions.PolarsError:
        message = f"{source}: {source.typed(column)}; expected lists of {numbers}; convert the column"
        raise TraceError(message) from None


def _host_time(column: pl.Series, source: Origin) -> pl.Series:
    """A column of optional seconds from 0 on."""
    if not (column.dtype.is_numeric() or column.dtype == pl.Null):
        raise TraceError(f"{source}: {source.typed(column)}; expected seconds; convert the column")
    seconds = column.cast(pl.Float64).rechunk()
    _refuse(~seconds.is_finite() | (seconds < 0), seconds, source, "expected finite seconds >= 0, or null")
    return seconds


def _canonical(column: pl.Series, dtype: pl.DataType | type[pl.DataType], source: Origin) -> pl.Series:
    """`column` as `dtype`. Raises TraceError, which names the first invalid value."""
    if dtype == KIND_TYPE:
        return _kinds(column, source)
    wanted = "a number" if dtype == pl.Float64 else "an integer"
    fits = column.dtype.is_numeric() if dtype == pl.Float64 else column.dtype.is_integer()
    if not fits and column.null_count() < len(column):
        raise TraceError(f"{source}: {source.typed(column)}; expected {wanted}; convert the column")
    try:
        converted = column.cast(dtype)
    except pl.exceptions.InvalidOperationError:
        row = int((column.cast(dtype, strict=False).is_null() & column.is_not_null()).arg_max() or 0)
        raise violation(source, column, row, f"expected {wanted} that fits {dtype}") from None
    if column.name not in NULLABLE:
        _refuse(converted.is_null(), converted, source, f"expected {wanted}; drop or repair the row")
    return converted


def _kinds(column: pl.Series, source: Origin) -> pl.Series:
    """The kind column as codes of `OpKind`."""
    if not (column.dtype == pl.String or isinstance(column.dtype, pl.Categorical | pl.Enum)):
        raise TraceError(f"{source}: {source.typed(column)}; expected a string such as {str(KINDS[0])!r}")
    _refuse(column.is_null(), column, source, "expected an op kind")
    if column.dtype == KIND_TYPE:
        return column
    if column.dtype == pl.String and not (kinds := column.cast(KIND_TYPE, strict=False)).null_count():
        return kinds
    codes, present = {str(kind): kind.code for kind in KINDS}, column.unique()
    names = present.cast(pl.String).to_list()
    if unknown := [name for name in names if name not in codes]:
        row = int((column == unknown[0]).arg_max() or 0)  # not as strings: a category can be long and in every row
        raise violation(source, column, row, f"known kinds: {', '.join(KINDS)}")
    category = present.to_physical().to_numpy()  # a cast of all ops takes ten times as long
    code = np.zeros(int(category.max()) + 1, np.uint8)
    code[category] = [codes[name] for name in names]
    return pl.Series(column.name, code[column.to_physical().to_numpy()]).cat.to(KIND_TYPE)


def check_ranges(ops: pl.DataFrame, layout: Layout, source: Origin) -> None:
    """Check that every value of some ops is in its range, and every rank inside the layout, in any canonical columns.

    Raises TraceError for the former, LayoutError for the latter.
    """
    present = {*ops.columns}
    for name in ("start", "duration"):
        if name in present:
            _refuse(~ops[name].is_finite(), ops[name], source, "expected a finite number of seconds")
    for name in ("duration", "step", "rank", "dp_rank", "pp_rank", "seq", "microbatch", "chunk"):
        smallest = ops[name].min() if name in present else None
        if smallest is not None and smallest < 0:  # type: ignore[operator]
            hint = "; null where it has no meaning" if name in NULLABLE else ""
            raise violation(source, ops[name], int(ops[name].arg_min() or 0), f"expected 0 or more{hint}")

    for name, size, parameter in (
        ("dp_rank", layout.dp_ranks, "dp"),
        ("pp_rank", layout.pp, "pp"),
        ("rank", layout.world_size, "world_size"),
        ("chunk", layout.vpp, "vpp"),
    ):
        largest = ops[name].max() if name in present else None
        if largest is not None and largest >= size:  # type: ignore[operator]
            error = violation(
                source,
                ops[name],
                int(ops[name].arg_max() or 0),
                f"the layout says {parameter} {size}, so at most {size - 1}; correct the layout or the trace",
            )
            raise LayoutError(str(error))


def check_complete(stages: npt.NDArray[np.int32], largest: int, layout: Layout, source: Origin) -> None:
    """Check that every stage and chunk of the layout occurs. `stages`: those that do; `largest`: chunk, -1 if none has.

    Raises LayoutError.
    """
    if layout.vpp > 1 and (layout.pp > 1 if largest < 0 else largest < layout.vpp - 1):
        largest_chunk = "no op has a chunk" if largest < 0 else f"the largest chunk in the trace is {largest}"
        raise LayoutError(
            f"{source}: the layout says vpp {layout.vpp}, but {largest_chunk}; correct the layout or the trace"
        )
    if len(stages) < layout.pp:
        absent = np.setdiff1d(np.arange(layout.pp), stages)
        listed = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
        raise LayoutError(
            f"{source}: the layout says pp {layout.pp}, but no op of pp_rank {listed} is in the trace; correct the"
            " layout, or record at least one DP rank with all its stages"
        )


def _check_identity(ops: pl.DataFrame, source: Origin) -> None:
    """Check that each worker has one rank, and that (step, worker, kind, seq) identifies an op, with seq from 0 without
    gaps.
    """
    if _are_identified(ops):
        return
    worker, stream = ("dp_rank", "pp_rank"), ("step", "dp_rank", "pp_rank", "kind")
    numbered = ops.with_row_index("row")
    differing = numbered.with_columns(last=pl.col("rank").last().over(worker)).filter(pl.col("rank") != pl.col("last"))
    if differing.height:
        op = differing.row(0, named=True)
        raise TraceError(
            f"{source}: worker {Worker(op['dp_rank'], op['pp_rank'])} is recorded by rank {op['rank']} (row"
            f" {op['row']}) and by rank {op['last']}; keep one rank per worker (tp and cp ranks run in lockstep)"
        )
    beyond = numbered.with_columns(count=pl.len().over(stream)).filter(pl.col("seq") >= pl.col("count"))
    if beyond.height:
        op = beyond.row(0, named=True)
        raise violation(
            source,
            ops["seq"],
            op["row"],
            f"{_described(op)}, but that worker has {op['count']} of them in that step; expected seq to run from 0"
            " without gaps or repeats",
        )
    second = pl.col("row").get(1, null_on_oob=True).over(*stream, "seq")
    repeated = numbered.with_columns(second=second).drop_nulls("second")
    if repeated.height:
        op = repeated.row(0, named=True)
        raise TraceError(
            f"{source}: rows {op['row']} and {op['second']} are the same op: {_described(op)}, seq {op['seq']};"
            " expected each op once, remove the duplicate"
        )


def _are_identified(ops: pl.DataFrame) -> bool:
    """Whether ops satisfy `_check_identity`; False if that is uncertain."""
    workers = StepGrid(*(distinct_steps(ops[name].to_numpy()) for name in ("step", "dp_rank", "pp_rank")))
    return workers.fit(ops.height) and workers.place(ops, workers.cells(ops)) is not None


def _described(op: Mapping[str, Any]) -> str:
    return f"{op['kind']} of worker ({op['dp_rank']},{op['pp_rank']}) in step {op['step']}"


def violation(source: Origin, column: pl.Series, row: int, expectation: str) -> TraceError:
    """The error for an invalid value in `row` of `column`."""
    return TraceError(f"{source}: {source.column(column.name)}, row {row}: {quoted(column[row])}; {expectation}")


def _refuse(wrong: pl.Series, column: pl.Series, source: Origin, expectation: str) -> None:
    """Raise TraceError for the first value of `column` that is `wrong`; null counts as right."""
    if wrong.any():
        raise violation(source, column, int(wrong.fill_null(value=False).arg_max() or 0), expectation)


def distinct_steps(step: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """The step numbers (or other numbers from 0) that occur, ascending."""
    first, last = int(step.min()), int(step.max())
    if last - first > 4 * len(step) + 1_000_000:
        return np.unique(step).astype(np.int32)
    seen = np.zeros(last - first + 1, np.bool_)
    seen[step - first] = True
    return (np.flatnonzero(seen) + first).astype(np.int32)


def step_positions(step: npt.NDArray[np.integer[Any]], steps: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Index of each of `step` in the ascending step numbers `steps`, int32; `step` itself if it counts from 0."""
    first, last = int(steps[0]), int(steps[-1])
    if first == 0 and last == len(steps) - 1:
        return np.ascontiguousarray(step, np.int32)
    if last - first > 4 * len(step) + 1_000_000:
        return np.searchsorted(steps, step).astype(np.int32)
    table = np.zeros(last - first + 1, np.int32)
    table[steps - first] = np.arange(len(steps), dtype=np.int32)
    return np.asarray(table[step - first])


def in_order(values: npt.NDArray[Number], place: npt.NDArray[np.int32]) -> npt.NDArray[Number]:
    """Each of the `values`, of 4 or 8 bytes, in its place."""
    ordered = np.empty_like(values)
    if values.itemsize == 4:
        _rows.put_4_bytes(values.view(np.int32), place, ordered.view(np.int32))
    else:
        _rows.put_8_bytes(values.view(np.int64), place, ordered.view(np.int64))
    return ordered


class StepGrid:
    """The ops of workers in each step. `steps`, `dp_ranks`, `stages`: all numbers that occur."""

    def __init__(
        self, steps: npt.NDArray[np.int32], dp_ranks: npt.NDArray[np.int32], stages: npt.NDArray[np.int32]
    ) -> None:
        self.numbers = {"step": steps, "dp_rank": dp_ranks, "pp_rank": stages}

    def fit(self, ops: int) -> bool:
        """Whether a table of all cells fits into the memory that is allowed for this number of ops."""
        cells, largest = math.prod(map(len, self.numbers.values())), np.iinfo(np.int32).max
        return cells <= min(4 * ops + 1_000_000, largest) and ops <= largest

    @cached_property
    def rank_of(self) -> npt.NDArray[np.int32]:
        """The rank of each worker in each step, -1 if it has no op, [steps, dp_ranks, stages]."""
        return np.full([len(values) for values in self.numbers.values()], -1, np.int32)

    @cached_property
    def counts(self) -> npt.NDArray[np.int32]:
        """Ops of each kind of each worker in each step, [steps x dp_ranks x stages, kinds]."""
        return np.zeros((self.rank_of.size, len(KINDS)), np.int32)

    def cells(self, ops: pl.DataFrame) -> npt.NDArray[np.int32]:
        """The worker and step of each op, an index into `rank_of`, [ops]."""
        cell = np.zeros(ops.height, np.int32)
        for name, values in self.numbers.items():
            cell *= np.int32(len(values))
            cell += step_positions(ops[name].to_numpy(), values)
        return cell

    def place(self, ops: pl.DataFrame, cell: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Count all ops, and return where each belongs in the order of step, DP rank, stage, kind and seq, [ops].

        `ops`: their ranks, kinds and seqs; `cell`: their `cells`. None if a worker has two ranks, two ops belong in one
        place, or one beyond the last of its kind.
        """
        rank, kind, seq = ops["rank"].to_numpy(), ops["kind"].cat.physical().to_numpy(), ops["seq"].to_numpy()
        one_rank = _rows.count(cell, rank, kind, len(KINDS), self.rank_of.reshape(-1), self.counts.reshape(-1))
        if not one_rank or not ((self.rank_of == self.rank_of.max(axis=0)) | (self.rank_of < 0)).all():
            return None
        first, filled = np.append(self.first, len(cell)).astype(np.int32), np.zeros(len(cell) // 8 + 1, np.uint8)
        place = np.empty(len(cell), np.int32)
        return place if _rows.find_places(cell, kind, seq, len(KINDS), first, filled, place) else None

    @cached_property
    def first(self) -> npt.NDArray[np.int64]:
        """Where the ops of each kind of each worker in each step begin, if they are in that order; as `counts`."""
        return (np.cumsum(self.counts, dtype=np.int64) - self.counts.reshape(-1)).reshape(self.counts.shape)

    def places_of(self, counts: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
        """Cell, kind, seq and place of the ops that `counts` has, all or none of a cell and kind, [ops] each."""
        cell, kind = np.nonzero(counts)
        often = counts[cell, kind]
        seq = np.arange(int(often.sum())) - np.repeat(np.cumsum(often, dtype=np.int64) - often, often)
        place = np.repeat(self.first[cell, kind], often) + seq
        return np.repeat(cell, often), np.repeat(kind.astype(np.uint8), often), seq.astype(np.int32), place

    def frame(self, cell: npt.NDArray[np.int64]) -> pl.DataFrame:
        """Step, DP rank, stage and rank of workers in steps, given as indices into `rank_of`."""
        indices = np.unravel_index(cell, self.rank_of.shape)
        columns = {name: values[index] for (name, values), index in zip(self.numbers.items(), indices, strict=True)}
        return pl.DataFrame(columns | {"rank": self.rank_of.reshape(-1)[cell]})
