"""The trace: one job's recorded ops as validated, read-only columns.

In: a polars frame (from a canonical Parquet file, an importer, the store or `synth`) with layout and metadata.
Out: `Trace`, which everything behind this door may trust. A trace is checked here, once; each violation is one
error that names source, column, row, value, expectation and next step.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.errors import FormatError, LayoutError, SelectionError, TraceError
from tracekit.model import KINDS, Layout, Worker
from tracekit.text import encodable
from tracekit.writing import replacing

SCHEMA_VERSION = 1
#: No step takes that long, seconds; clock times and other units are larger.
LONGEST_S = 1e8
#: Key of tracekit's JSON in the key-value metadata of a Parquet file.
METADATA_KEY = "tracekit"

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
#: Columns with a meaning for some kinds only.
NULLABLE = frozenset({"microbatch", "chunk"})


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the job the trace holds. A worker-step is one worker in one step."""

    workers_expected: int
    workers_traced: int
    worker_steps_expected: int
    worker_steps_traced: int
    missing_workers: tuple[Worker, ...]

    @property
    def complete(self) -> bool:
        """True when every worker of the layout is there in every traced step."""
        return self.worker_steps_traced == self.worker_steps_expected


@dataclass(frozen=True, slots=True)
class Trace:
    """One job: ops (canonical columns), parallel layout, name and free metadata.

    `step_starts` maps a step to its absolute start in seconds since the epoch, where known. `metadata` is plain
    JSON data (framework, GPU model, hosts, the labels of a synthetic trace ...). Build one with `Trace.from_frame`,
    which validates; the constructor does not.
    """

    ops: pl.DataFrame
    layout: Layout
    name: str
    step_starts: Mapping[int, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_frame(
        cls,
        ops: pl.DataFrame,
        layout: Layout,
        *,
        name: str,
        step_starts: Mapping[int, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        source: str = "trace",
        columns: Mapping[str, str] | None = None,
    ) -> Trace:
        """Validate `ops` and freeze it. `source` (a file name, say) opens every error message.

        `columns`: what a canonical column is called there, where that is another name; messages use it.

        Raises TraceError for a violation of the data model, LayoutError where the layout contradicts the ops.
        """
        place = _Source(source, columns or {})
        checked = _canonical_columns(ops, place)
        _check_values(checked, place)
        _check_layout(checked, layout, place)
        _check_identity(checked, place)
        return cls(
            ops=checked,
            layout=layout,
            name=encodable(name),
            step_starts=MappingProxyType(dict(step_starts or {})),
            metadata=MappingProxyType(dict(metadata or {})),
        )

    @property
    def steps(self) -> np.ndarray:
        """The traced step numbers, ascending, int32 [steps]."""
        return distinct_steps(self.ops["step"].to_numpy())

    def kind_codes(self) -> np.ndarray:
        """`OpKind.code` of each op, uint8 [ops]."""
        return self.ops["kind"].cat.physical().to_numpy()

    def worker_ranks(self) -> dict[Worker, int]:
        """The recorded global rank of each traced worker."""
        dp_rank, pp_rank, rank = (self.ops[name].to_numpy() for name in ("dp_rank", "pp_rank", "rank"))
        rank_of = np.full((int(dp_rank.max()) + 1, self.layout.pp), -1, np.int64)
        rank_of[dp_rank, pp_rank] = rank
        return {Worker(*map(int, cell)): int(rank_of[tuple(cell)]) for cell in np.argwhere(rank_of >= 0)}

    def without_steps(self, steps: Sequence[int]) -> Trace:
        """The trace without these step numbers. Raises SelectionError where none is left, or none was there."""
        left = self.ops.filter(~pl.col("step").is_in(list(steps)))
        if left.height in (0, self.ops.height):
            which = "every step is" if left.height == 0 else "none of these steps is there to be"
            raise SelectionError(f"{which} left out; the trace has steps {self.steps[0]} to {self.steps[-1]}")
        return replace(self, ops=left.rechunk())

    def coverage(self) -> Coverage:
        """Which workers and worker-steps of the layout the trace holds."""
        steps = self.ops["step"].to_numpy()
        dp_rank, pp_rank = self.ops["dp_rank"].to_numpy(), self.ops["pp_rank"].to_numpy()
        workers = traced_dp_ranks(self.layout, dp_rank) * self.layout.pp
        numbers = self.steps
        present = np.zeros((len(numbers), (int(dp_rank.max()) + 1) * self.layout.pp), dtype=bool)
        present[step_positions(steps, numbers), dp_rank.astype(np.int64) * self.layout.pp + pp_rank] = True
        traced = present.any(axis=0)
        return Coverage(
            workers_expected=workers,
            workers_traced=int(traced.sum()),
            worker_steps_expected=len(self.steps) * workers,
            worker_steps_traced=int(present.sum()),
            missing_workers=tuple(
                Worker(*divmod(int(cell), self.layout.pp))
                for cell in np.setdiff1d(np.arange(workers), np.flatnonzero(traced), assume_unique=True)
            ),
        )

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the canonical Parquet file. Raises OutputError; never leaves half a file."""
        header = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "layout": self.layout.to_dict(),
            "step_starts": {str(step): start for step, start in self.step_starts.items()},
            "metadata": dict(self.metadata),
        }
        with replacing(path) as temporary, open(temporary, "wb") as file:
            self.ops.write_parquet(file, compression="zstd", metadata={METADATA_KEY: json.dumps(header)})


def read_parquet(path: str | os.PathLike[str]) -> Trace:
    """Read a canonical Parquet file. Raises FormatError where it is none, TraceError where its content is off."""
    source = str(path)
    header = read_header(path)
    if header is None:
        raise FormatError(
            f"{source}: no tracekit metadata inside; for a published trace pass --layout meta.yaml,"
            " otherwise bring it in with `tracekit import`"
        )
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise FormatError(
            f"{source}: schema version {version!r}; this tracekit reads version {SCHEMA_VERSION}, upgrade it"
        )
    try:
        layout = Layout.from_dict(header["layout"])
        name = str(header["name"])
        step_starts = {int(step): float(start) for step, start in header.get("step_starts", {}).items()}
        metadata = dict(header.get("metadata", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{source}: damaged tracekit metadata ({error!r}); write the trace again") from None
    except LayoutError as error:
        raise LayoutError(f"{source}: {error}") from None
    return Trace.from_frame(
        read_columns(path), layout, name=name, step_starts=step_starts, metadata=metadata, source=source
    )


def read_header(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON that tracekit keeps inside a Parquet file, None without. Raises FormatError for other files."""
    text = _parquet(path, pl.read_parquet_metadata).get(METADATA_KEY)
    if text is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: its tracekit metadata is not a JSON object; write the trace again")
    return header


def read_columns(path: str | os.PathLike[str]) -> pl.DataFrame:
    """All columns of a Parquet file. Raises FormatError where it is empty, truncated or something else."""
    names = list(_parquet(path, pl.read_parquet_schema))

    def column(name: str) -> pl.Series:
        """One column in one piece."""
        series: pl.Series = _parquet(path, lambda file: pl.read_parquet(file, columns=[name]))[name].rechunk()
        return series

    # One column at a time: joining the pieces of all at once would hold a big trace twice.
    return pl.DataFrame([column(name) for name in names])


def _parquet(path: str | os.PathLike[str], read: Any) -> Any:
    try:
        found = Path(path).stat()
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode) or stat.S_ISCHR(found.st_mode):
            raise FormatError(f"{path}: a pipe or device; Parquet is read from both ends, save it as a file first")
        if found.st_size == 0:
            raise FormatError(f"{path}: the file is empty; expected a Parquet trace")
        # A file object: polars expands glob characters and rejects non-UTF-8 bytes in a path.
        with open(path, "rb") as file:
            return read(file)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # damage inside makes polars panic
        reason = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: not a readable Parquet file ({reason}); it may be truncated, record or copy it again"
        ) from None


def traced_dp_ranks(layout: Layout, dp_rank: np.ndarray) -> int:
    """How many dp_rank values a complete trace has: with dsp > 1 some recorders number dp only, some dp x dsp."""
    return layout.dp if int(dp_rank.max()) < layout.dp else layout.dp_ranks


def distinct_steps(step: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The step numbers that occur, ascending."""
    first, last = int(step.min()), int(step.max())
    if last - first > 4 * len(step) + 1_000_000:
        return np.unique(step)
    seen = np.zeros(last - first + 1, np.bool_)
    seen[step - first] = True
    return (np.flatnonzero(seen) + first).astype(np.int32)


def step_positions(step: npt.NDArray[np.int32], steps: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Position of each of `step` among the ascending step numbers `steps`, int32."""
    first, last = int(steps[0]), int(steps[-1])
    if last - first > 4 * len(step) + 1_000_000:
        return np.searchsorted(steps, step).astype(np.int32)
    table = np.zeros(last - first + 1, np.int32)
    table[steps - first] = np.arange(len(steps), dtype=np.int32)
    positions: npt.NDArray[np.int32] = table[step - first]
    return positions


@dataclass(frozen=True, slots=True)
class _Source:
    """Where ops come from, as messages say it: a name, and its names of canonical columns where they differ."""

    name: str
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return self.name

    def column(self, name: str) -> str:
        return f"column {self.columns.get(name, name)!r}"


def _canonical_columns(ops: pl.DataFrame, source: _Source) -> pl.DataFrame:
    """The canonical columns of `ops` in canonical types, one contiguous chunk each."""
    optional = {name for name in NULLABLE if name not in ops.columns}
    if missing := [name for name in SCHEMA if name not in ops.columns and name not in optional]:
        raise TraceError(
            f"{source}: {source.column(missing[0])} is missing; it has {', '.join(ops.columns)}; expected"
            f" {', '.join(SCHEMA)}"
        )
    if ops.height == 0:
        raise TraceError(f"{source}: no ops (0 rows); record at least one step")
    columns = [
        pl.Series(name, [None], dtype=dtype).extend_constant(None, ops.height - 1)
        if name in optional
        else _canonical(ops[name], dtype, source)
        for name, dtype in SCHEMA.items()
    ]
    return pl.DataFrame([column.rechunk() for column in columns])


def _canonical(column: pl.Series, dtype: pl.DataType | type[pl.DataType], source: _Source) -> pl.Series:
    """`column` as `dtype`, or the error that names the first value which is none."""
    if dtype == KIND_TYPE:
        return _kinds(column, source)
    wanted = "a number" if dtype == pl.Float64 else "an integer"
    fits = column.dtype.is_numeric() if dtype == pl.Float64 else column.dtype.is_integer()
    if not fits and column.null_count() < len(column):
        raise TraceError(
            f"{source}: {source.column(column.name)} has type {column.dtype}; expected {wanted}; convert the column"
        )
    try:
        converted = column.cast(dtype)
    except pl.exceptions.InvalidOperationError:
        row = int((column.cast(dtype, strict=False).is_null() & column.is_not_null()).arg_max() or 0)
        raise _violation(source, column, row, f"expected {wanted} that fits {dtype}") from None
    if column.name not in NULLABLE and converted.null_count():
        row = int(converted.is_null().arg_max() or 0)
        raise _violation(source, converted, row, f"expected {wanted}; drop or repair the row")
    return converted


def _kinds(column: pl.Series, source: _Source) -> pl.Series:
    """The kind column as codes of `OpKind`."""
    if not (column.dtype == pl.String or isinstance(column.dtype, pl.Categorical | pl.Enum)):
        raise TraceError(
            f"{source}: {source.column('kind')} has type {column.dtype}; expected a string such as {str(KINDS[0])!r}"
        )
    if column.null_count():
        raise _violation(source, column, int(column.is_null().arg_max() or 0), "expected an op kind")
    if column.dtype == KIND_TYPE:
        return column
    known = set(KINDS)
    if unknown := [name for name in column.unique().cast(pl.String).to_list() if name not in known]:
        row = int((column.cast(pl.String) == unknown[0]).arg_max() or 0)
        raise _violation(source, column, row, f"known kinds: {', '.join(KINDS)}")
    return column.cast(KIND_TYPE) if column.dtype != pl.String else column.cast(pl.Categorical).cast(KIND_TYPE)


def _check_values(ops: pl.DataFrame, source: _Source) -> None:
    """Ranges that hold for every trace, whatever its layout."""
    for name in ("start", "duration"):
        finite = ops[name].is_finite()
        if not finite.all():
            raise _violation(source, ops[name], int((~finite).arg_max() or 0), "expected a finite number of seconds")
        size = ops[name].abs()
        if float(size.max()) > LONGEST_S:  # type: ignore[arg-type]
            expected = "expected seconds from the start of the step" if name == "start" else "expected seconds"
            raise _violation(source, ops[name], int(size.arg_max() or 0), f"{expected}; convert the column")
    for name in ("duration", "step", "rank", "dp_rank", "pp_rank", "seq", "microbatch", "chunk"):
        smallest = ops[name].min()
        if smallest is not None and smallest < 0:  # type: ignore[operator]
            hint = "; null where it has no meaning" if name in NULLABLE else ""
            raise _violation(source, ops[name], int(ops[name].arg_min() or 0), f"expected 0 or more{hint}")


def _check_layout(ops: pl.DataFrame, layout: Layout, source: _Source) -> None:
    """Every rank inside the layout, and no stage or chunk of the layout that never occurs."""
    for name, size, parameter in (
        ("dp_rank", layout.dp_ranks, "dp"),
        ("pp_rank", layout.pp, "pp"),
        ("rank", layout.world_size, "world_size"),
        ("chunk", layout.vpp, "vpp"),
    ):
        largest = ops[name].max()
        if largest is not None and largest >= size:  # type: ignore[operator]
            error = _violation(
                source,
                ops[name],
                int(ops[name].arg_max() or 0),
                f"the layout says {parameter} {size}, so at most {size - 1}; correct the layout or the trace",
            )
            raise LayoutError(str(error))
    largest = cast("int | None", ops["chunk"].max())
    if layout.vpp > 1 and (layout.pp > 1 if largest is None else largest < layout.vpp - 1):
        found = "no op has a chunk" if largest is None else f"the largest chunk in the trace is {largest}"
        raise LayoutError(f"{source}: the layout says vpp {layout.vpp}, but {found}; correct the layout or the trace")
    stages = ops["pp_rank"].n_unique()
    if stages < layout.pp:
        absent = np.setdiff1d(np.arange(layout.pp), ops["pp_rank"].to_numpy())
        shown = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
        raise LayoutError(
            f"{source}: the layout says pp {layout.pp}, but no op of pp_rank {shown} is in the trace; correct the"
            " layout, or record at least one DP rank with all its stages"
        )


def _check_identity(ops: pl.DataFrame, source: _Source) -> None:
    """One rank per worker, and (step, worker, kind, seq) names one op with seq running from 0 without a gap."""
    dp_rank, pp_rank, rank = (ops[name].to_numpy() for name in ("dp_rank", "pp_rank", "rank"))
    worker = dp_rank * np.int32(int(pp_rank.max()) + 1) + pp_rank
    rank_of = np.empty(int(worker.max()) + 1, dtype=rank.dtype)
    rank_of[worker] = rank
    if (differs := rank_of[worker] != rank).any():
        row = int(differs.argmax())
        raise TraceError(
            f"{source}: worker {Worker(int(dp_rank[row]), int(pp_rank[row]))} is recorded by rank {rank[row]} (row"
            f" {row}) and by rank {rank_of[worker[row]]}; keep one rank per worker (tp and cp ranks run in lockstep)"
        )
    step, seq, kind = ops["step"].to_numpy(), ops["seq"].to_numpy(), ops["kind"].cat.physical().to_numpy()
    step_index = step_positions(step, distinct_steps(step))
    stream = (step_index.astype(np.int64) * len(rank_of) + worker) * len(KINDS) + kind
    del worker, step_index
    streams = int(stream.max()) + 1
    if streams > 8 * len(seq) + 10_000_000:  # few ops spread thin: number the streams that exist
        _, stream = np.unique(stream, return_inverse=True)
        streams = int(stream.max()) + 1
    count = np.bincount(stream, minlength=streams)
    if (beyond := seq >= count[stream]).any():
        row = int(beyond.argmax())
        raise _violation(
            source,
            ops["seq"],
            row,
            f"{_describe(ops, row)}, but that worker has {count[stream[row]]} of them in that step; expected seq to"
            " run from 0 without gaps or repeats",
        )
    cell = (np.cumsum(count) - count)[stream]
    del stream
    cell += seq
    taken = np.zeros(len(seq), dtype=bool)
    taken[cell] = True
    if not taken.all():
        seen = np.bincount(cell, minlength=len(seq))
        row = int((seen[cell] > 1).argmax())
        second = int(np.flatnonzero(cell == cell[row])[1])
        raise TraceError(
            f"{source}: rows {row} and {second} are the same op: {_describe(ops, row)}, seq {seq[row]};"
            " expected each op once, remove the duplicate"
        )


def _describe(ops: pl.DataFrame, row: int) -> str:
    op = ops.row(row, named=True)
    return f"{op['kind']} of worker ({op['dp_rank']},{op['pp_rank']}) in step {op['step']}"


def _violation(source: _Source, column: pl.Series, row: int, expectation: str) -> TraceError:
    return TraceError(f"{source}: {source.column(column.name)}, row {row}: {column[row]!r}; {expectation}")
