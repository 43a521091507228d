"""The trace: one job's recorded ops as validated, read-only columns.

In: a polars frame (from a canonical Parquet file, an importer, the store or `synth`) with layout and metadata. Out:
`Trace`, which all other code may trust. A trace is validated once, when it is made, by `schema`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import numpy as np
import polars as pl

from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.base.errors import FormatError, LayoutError, SelectionError, TraceError, TracekitError, extra
from tracekit.base.paths import unreadable
from tracekit.base.text import encodable, quoted, short
from tracekit.trace.facts import (
    COLLECT,
    COLLECT_CPU,
    COLLECTED,
    INSPECTOR,
    STEP_VALUES,
    TABLE,
    SourceKind,
    TraceCoverage,
    step_values,
)
from tracekit.trace.model import Layout, TimeUnit, TraceKind, Worker, numbered_hosts, unit_of_time
from tracekit.trace.schema import (
    NULLABLE,
    OPTIONAL,
    SENT,
    WAITED,
    Origin,
    StepGrid,
    checked_columns,
    distinct_steps,
    in_order,
    numbers_of,
)
from tracekit.trace.units import check_bounds, check_magnitudes, in_seconds, judged_steps

if TYPE_CHECKING:
    import pandas

#: Key of tracekit's JSON in the key-value metadata of a Parquet file.
METADATA_KEY = "tracekit"
#: Beyond the first values, a file with more of them per byte than this contains no real ops: each op has two times of
#: its own. A row counts as at least the usual number of columns.
USUAL_COLUMNS, MOST_COLUMNS, MOST_VALUES_PER_BYTE, FEWEST_VALUES = 32, 10_000, 64, 32_000_000
#: Read files with more rows than this one column at a time.
MOST_ROWS_AT_ONCE = 250_000
#: Gives the columns of a file their canonical names.
Renamed = Callable[[pl.DataFrame], pl.DataFrame]


def read_header(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON that tracekit keeps inside a Parquet file, None if there is none. Raises FormatError for other files."""
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


def is_op_trace(path: Path) -> bool:
    """Whether a file is an op trace; False if it cannot be read."""
    try:
        return path.suffix == ".parquet" and (read_header(path) or {}).get("schema_version") == OP_TRACE_VERSION
    except FormatError:
        return False


def read_columns(path: str | os.PathLike[str]) -> pl.DataFrame:
    """All columns of a Parquet file. Raises FormatError if it is empty, truncated or something else."""
    ops: pl.DataFrame = _parquet(path, lambda file: _columns_of(path, pl.scan_parquet(file)))
    return ops


def _columns_of(path: str | os.PathLike[str], file: pl.LazyFrame) -> pl.DataFrame:
    """See `read_columns`. `file` keeps the footer, which takes seconds to read if a file has 10^5 row groups."""
    names, rows = file.collect_schema().names(), int(file.select(pl.len()).collect().item())
    if len(names) > USUAL_COLUMNS or rows > MOST_ROWS_AT_ONCE:
        check_size(path, rows, len(names))
    if rows <= MOST_ROWS_AT_ONCE:
        return file.collect().rechunk()
    # Two columns at a time: joining the chunks of all columns at once would hold a large trace twice.
    pairs = (file.select(names[first : first + 2]).collect().rechunk() for first in range(0, len(names), 2))
    return pl.concat(pairs, how="horizontal")


def read_steps(path: str | os.PathLike[str], steps: Sequence[int]) -> pl.DataFrame:
    """All columns of these steps. Raises FormatError as `read_columns` does."""
    step = pl.col("step")
    wanted = step.is_between(min(steps), max(steps)) & step.is_in(list(steps))  # statistics of row groups know ranges
    ops: pl.DataFrame = _parquet(path, lambda file: pl.scan_parquet(file).filter(wanted).collect())
    return ops.rechunk()


def columns_of_file(path: str | os.PathLike[str]) -> list[str]:
    """The names of the columns of a Parquet file. Raises FormatError as `read_columns` does."""
    return list(_parquet(path, pl.read_parquet_schema))


def rows_of_file(path: str | os.PathLike[str]) -> int:
    """The number of rows of a Parquet file, as its footer says. Raises FormatError as `read_columns` does."""
    return int(_parquet(path, lambda file: pl.scan_parquet(file).select(pl.len()).collect().item()))


def rows_of_steps(path: str | os.PathLike[str]) -> dict[int, int]:
    """The number of rows of each step of a Parquet file, ascending. Raises FormatError as `read_columns` does."""
    by_step = _parquet(path, lambda file: pl.scan_parquet(file).group_by("step").len().collect(engine="streaming"))
    return dict(by_step.sort("step").iter_rows())


def check_size(path: str | os.PathLike[str], rows: int, columns: int) -> None:
    """Raise FormatError if the file claims more values than its bytes can hold, or more columns than any trace has."""
    size = Path(path).stat().st_size
    values = rows * max(columns, USUAL_COLUMNS)
    if columns > MOST_COLUMNS or values > max(MOST_VALUES_PER_BYTE * size, FEWEST_VALUES):
        raise FormatError(
            f"{path}: {rows} rows of {columns} columns in {size} bytes, too few for the times of real ops; expected at"
            f" most {MOST_COLUMNS} columns: record it again, or keep the columns of a trace"
        )


def _parquet(path: str | os.PathLike[str], read: Any) -> Any:
    try:
        status = Path(path).stat()
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode):
            raise FormatError(f"{path}: a pipe or device; Parquet can only be read from a file, save it as one first")
        if status.st_size == 0:
            raise FormatError(f"{path}: the file is empty; expected a Parquet trace")
        # A file object: polars expands glob characters and rejects non-UTF-8 bytes in a path.
        with open(path, "rb") as file:
            return read(file)
    except OSError as error:
        raise unreadable(path, error) from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # damage inside makes polars panic
        reason = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: not a readable Parquet file ({reason}); it may be truncated, record or copy it again"
        ) from None


#: Versions of the file formats: pipeline traces, and op traces (`op_trace`).
SCHEMA_VERSION, OP_TRACE_VERSION = 1, 2
#: The kind of file that `write_parquet` replaces.
TRACE_FILE = Kind("a trace that tracekit wrote", parquet_with(METADATA_KEY))
#: Key of the free metadata for the original unit of the times, if it was stated.
UNIT_KEY = "time_unit"
#: Rank -> seconds of the mean step in which its training thread was ready to run but had no processor.
RUN_QUEUE = "run_queue_s"
#: How the clocks of GPUs that timed ops relate to their hosts', in the free metadata.
DEVICE_CLOCK = "device_clock"
#: Metadata without names that the analysis reads, and figures without names about each GPU.
_WITHOUT_NAMES = (UNIT_KEY, "layers", "ranks_of_workers")
_GPU_FIGURES = ("throttled", "reasons", "sm_mhz")
#: A file with more rows is read without a table of them, which takes more memory if they are few.
MOST_ROWS_AS_TABLE = 2_000_000
#: No clock shows this many seconds since 1970.
LARGEST_CLOCK_S = 1e11
#: No model has more layers on a stage, and the search for a split would take too long.
MOST_LAYERS = 1000


@dataclass(frozen=True)
class Trace:
    """One job as recorded, a pipeline (`kind`). Frames are never changed.

    `ops`: a polars frame with a row per op and the canonical columns (step, rank, dp_rank, pp_rank, kind, seq,
    microbatch, chunk, start, duration; times in seconds, from the start of the step), in the order of the file, or in
    order (see `ordered`) if the file is large. `layout`: the parallel sizes.
    `name`: of the job. `step_starts` maps a step to its absolute start, if known: seconds since the epoch, or of
    another clock that runs across steps. `metadata` is plain JSON data (framework, GPU model, hosts, the labels of a
    synthetic trace ...). Build a trace with `Trace.from_frame`, which validates; the constructor does not.
    """

    kind: ClassVar[Literal[TraceKind.PIPELINE]] = TraceKind.PIPELINE
    ops: pl.DataFrame
    layout: Layout
    name: str
    step_starts: Mapping[int, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_frame(
        cls,
        ops: pl.DataFrame | pandas.DataFrame,
        layout: Layout,
        *,
        name: str,
        step_starts: Mapping[int, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        source: str = "trace",
        columns: Mapping[str, str] | None = None,
        unit: TimeUnit | str | None = None,
    ) -> Trace:
        """Validate `ops` and freeze it. `source` (for example a file name) opens every error message.

        In a frame of pandas, missing integers may be nan.

        `columns`: the original names of canonical columns, if they differ; used in messages. `unit`: of `start` and
        `duration`, by default seconds, which must then be plausible; a stated unit is believed, and kept in the
        metadata as `time_unit`. Starts that are clock times, such as seconds since 1970, are converted to be relative
        to the start of their step.

        Raises TraceError for a violation of the data model, LayoutError if the layout contradicts the ops.
        """
        origin, free_metadata = Origin(source, columns or {}), dict(metadata or {})
        stated = None if unit is None else unit_of_time(unit)
        frame = ops if isinstance(ops, pl.DataFrame) else _of_pandas(ops, origin)
        timed, starts = in_seconds(frame, stated, finite_starts(step_starts or {}, origin), origin)
        checked = checked_columns(timed, layout, origin)
        if stated is not None:
            free_metadata[UNIT_KEY] = str(stated)
        check_magnitudes(
            checked,
            judged_steps(distinct_steps(checked["step"].to_numpy()), checked.height),
            step_starts or {},
            origin,
            stated=stated_unit(free_metadata),
            unit=stated,
            integers=all(timed[name].dtype.is_integer() for name in ("start", "duration")),
        )
        check_bounds(checked, origin)
        return cls(
            ops=checked,
            layout=layout,
            name=encodable(name),
            step_starts=MappingProxyType(dict(starts)),
            metadata=MappingProxyType(free_metadata),
        )

    @property
    def rows(self) -> int:
        """The number of ops."""
        return self.ops.height

    @property
    def optional(self) -> frozenset[str]:
        """The optional columns of `ops`."""
        return frozenset(OPTIONAL).intersection(self._outline.ops.columns)

    @cached_property
    def workers(self) -> StepGrid:
        """The ops of each worker in each step."""
        return self._placed[0]

    @cached_property
    def _placed(self) -> tuple[StepGrid, np.ndarray]:
        """`workers`, and where each op belongs in their order."""
        workers = StepGrid(self.steps, self.dp_ranks, np.arange(self.layout.pp, dtype=np.int32))
        place = workers.place(self.ops, workers.cells(self.ops))
        assert place is not None, "a valid trace"
        return workers, place

    def ordered(self, *names: str) -> Iterator[np.ndarray]:
        """These columns in the order of step, DP rank, stage, kind and seq, one after the other, see `numbers_of`."""
        for name in names:
            yield in_order(numbers_of(self.ops[name]), self._placed[1])

    def of_stages(self, stages: Iterable[int]) -> pl.DataFrame:
        """The ops of these stages."""
        return self.ops.filter(pl.col("pp_rank").is_in(list(stages)))

    @property
    def dp_ranks(self) -> np.ndarray:
        """The traced DP ranks, ascending, int32 [dp_ranks]."""
        return distinct_steps(self._outline.ops["dp_rank"].to_numpy())

    @property
    def steps(self) -> np.ndarray:
        """The traced step numbers, ascending, int32 [steps]."""
        return distinct_steps(self._outline.ops["step"].to_numpy())

    def overview(self) -> dict[str, str]:
        """What it holds, for people: a line each, by its heading."""
        coverage = self.coverage()
        return {
            "Layout": ", ".join(f"{name} {size}" for name, size in self.layout.to_dict().items()),
            "Steps": f"{len(self.steps)}, from {self.steps[0]} to {self.steps[-1]}",
            "Workers": f"{coverage.workers_traced} of {coverage.workers_expected} traced,"
            f" {coverage.worker_steps_traced} of {coverage.worker_steps_expected} worker-steps",
        }

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes by name."""
        return self.layout.to_dict()

    def worker_ranks(self) -> dict[Worker, int]:
        """The recorded global rank of each traced worker."""
        return self._worker_ranks

    @cached_property
    def _worker_ranks(self) -> dict[Worker, int]:
        ops = self._outline.ops
        dp_rank, pp_rank, rank = (ops[name].to_numpy() for name in ("dp_rank", "pp_rank", "rank"))
        rank_of = np.full((int(dp_rank.max()) + 1, self.layout.pp), -1, np.int64)
        rank_of[dp_rank, pp_rank] = rank
        traced = rank_of >= 0
        workers = np.argwhere(traced).tolist()
        return {Worker(*worker): rank for worker, rank in zip(workers, rank_of[traced].tolist(), strict=True)}

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Rank -> host from the free metadata, as far as it is valid."""
        hosts = self.metadata.get("hosts")
        entries = hosts.items() if isinstance(hosts, dict) else ()
        return {int(rank): encodable(str(host)) for rank, host in entries if _is_rank(str(rank))}

    def layers(self, requested: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The layers of each stage: `requested`, or those of the metadata, if it gives them for each stage."""
        if requested is not None:
            return requested
        layers = self.metadata.get("layers")
        if not isinstance(layers, list | tuple) or len(layers) != self.layout.pp:
            return None
        return tuple(layers) if all(type(count) is int and 1 <= count <= MOST_LAYERS for count in layers) else None

    def check_layers(self, requested: tuple[int, ...] | None) -> None:
        """Raise SelectionError if `requested` does not fit the job, TraceError if the layers in its metadata cannot be.

        Call it before the analysis, which finds out only at its end whether it needs the layers.
        """
        stages = self.layout.pp
        if requested is not None and len(requested) != stages:
            raise SelectionError(f"layers {_shown(requested)}: expected {stages} counts, one per stage")
        if requested is not None and not all(1 <= count <= MOST_LAYERS for count in requested):
            raise SelectionError(f"layers {_shown(requested)}: expected 1 to {MOST_LAYERS} on each stage")
        recorded = self.metadata.get("layers")
        if isinstance(recorded, list | tuple) and any(type(count) is int and count > MOST_LAYERS for count in recorded):
            raise TraceError(
                f"{short(self.name)}: its metadata says layers {_shown(recorded)}; expected 1 to {MOST_LAYERS} on each"
                " stage: correct the metadata"
            )

    @property
    def one_clock(self) -> bool:
        """Whether all ranks used the same clock: that of the only host of a `tracekit collect` run, and no GPU's."""
        return self.one_host and DEVICE_CLOCK not in self.metadata

    @property
    def source_kind(self) -> SourceKind:
        """The kind of its source, with the facts that this lacks."""
        match self.metadata.get("format"):
            case "collected":
                return COLLECT if self.timed_on_gpus or self.metadata.get("gpus") else COLLECT_CPU
            case "nccl-inspector":
                return INSPECTOR
        return TABLE

    @property
    def timed_on_gpus(self) -> bool:
        """Whether GPUs timed its ops: a gap between two of them is time of the host."""
        return DEVICE_CLOCK in self.metadata

    @property
    def one_host(self) -> bool:
        """Whether `tracekit collect` recorded all ranks on one host."""
        hosts = self.hosts
        ranks = set(self.worker_ranks().values())
        return self.metadata.get("format") == COLLECTED and ranks <= hosts.keys() and len(set(hosts.values())) == 1

    def redacted(self) -> Trace:
        """The trace without names: hosts are numbered in order of their ranks, and the metadata keeps only figures."""
        figures = {name: self.metadata[name] for name in _WITHOUT_NAMES if name in self.metadata}
        if isinstance(gpus := self.metadata.get("gpus"), dict):
            figures["gpus"] = {
                rank: {figure: gpu[figure] for figure in _GPU_FIGURES if figure in gpu}
                for rank, gpu in gpus.items()
                if isinstance(gpu, dict)
            }
        if values := step_values(self.metadata):
            figures[STEP_VALUES] = values
        if self.metadata.get("format") == COLLECTED:
            figures["format"] = COLLECTED
        if DEVICE_CLOCK in self.metadata:
            figures[DEVICE_CLOCK] = {}
        if isinstance(queued := self.metadata.get(RUN_QUEUE), dict):
            figures[RUN_QUEUE] = {
                rank: queue_s for rank, queue_s in queued.items() if _is_rank(rank) and isinstance(queue_s, float)
            }
        if isinstance(collected := self.metadata.get("collect"), dict):
            figures["collect"] = {"nested": collected.get("nested")}
        hosts = {str(rank): host for rank, host in numbered_hosts(self.hosts).items()}
        return replace(self, name="job", metadata=MappingProxyType({**figures, "hosts": hosts}))

    def without_steps(self, steps: Sequence[int]) -> Trace:
        """The trace without these step numbers. Raises SelectionError if none is left, or none of them was there."""
        remaining = self.ops.filter(~pl.col("step").is_in(list(steps)))
        if remaining.height in (0, self.ops.height):
            which = "every step is left out" if remaining.height == 0 else "none of the steps to leave out exists"
            raise SelectionError(f"{which}; the trace has steps {self.steps[0]} to {self.steps[-1]}")
        return replace(self, ops=remaining.rechunk())

    def coverage(self) -> TraceCoverage:
        """Which workers and worker-steps of the layout the trace holds."""
        ops = self._outline.ops
        dp_rank, pp_rank = ops["dp_rank"].to_numpy(), ops["pp_rank"].to_numpy()
        return TraceCoverage.of(self.layout, dp_rank, pp_rank, len(self.steps), ops.height)

    def outline(self) -> Trace:
        """The trace with one op of each worker and step: enough for `coverage` and `worker_ranks`.

        Keeps all ops if they record waits inside workers (WAITED) or the rows of all-to-alls (SENT), which the analysis
        reads.
        """
        return self if {WAITED, SENT} & self.optional else self._outline

    @cached_property
    def _outline(self) -> Trace:
        """The first op of each worker and step."""
        ops = self.ops.unique(["step", "dp_rank", "pp_rank"], keep="first", maintain_order=True)
        return replace(self, ops=ops)

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the canonical Parquet file; replaces only another one.

        Raises OutputError; never leaves half a file.
        """
        with replacing(path, TRACE_FILE) as temporary, open(temporary, "wb") as file:
            self.write_to(file)

    def write_to(self, file: BinaryIO) -> None:
        """Write the content of the Parquet file."""
        header = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "layout": self.layout.to_dict(),
            "step_starts": {str(step): start for step, start in self.step_starts.items()},
            "metadata": dict(self.metadata),
        }
        self.ops.write_parquet(file, compression="zstd", metadata={METADATA_KEY: json.dumps(header)})


def _of_pandas(frame: pandas.DataFrame, source: Origin) -> pl.DataFrame:
    """The columns of a pandas frame. Raises TraceError for anything else."""
    try:
        with extra("pandas", "a frame of pandas"):
            ops = pl.from_pandas(frame)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise TraceError(f"{source}: not a frame of polars or pandas ({error})") from None
    if not isinstance(ops, pl.DataFrame):
        raise TraceError(f"{source}: a column, not a frame of polars or pandas")
    # A column of integers with missing values is one of floats in pandas.
    with_gaps = [name for name in NULLABLE if name in ops.columns and ops[name].dtype == pl.Float64]
    integral = [name for name in with_gaps if (ops[name] == ops[name].round()).all()]
    return ops.with_columns(pl.col(integral).cast(pl.Int64)) if integral else ops


def read_parquet(
    path: str | os.PathLike[str], *, unit: TimeUnit | None = None, steps: Sequence[int] | None = None
) -> Trace:
    """Read a canonical Parquet file, whose times may be in another `unit` than seconds. `steps`: only these.

    Raises FormatError if it is not one, TraceError if its content is invalid.
    """
    source = str(path)
    header = read_header(path)
    if header is None:
        raise FormatError(
            f"{source}: no tracekit metadata inside; for a published trace pass --layout meta.yaml,"
            " write one of your own with `tracekit.Trace.from_frame(...).write_parquet(...)`"
        )
    version = header.get("schema_version")
    if "passport_version" in header:
        raise FormatError(
            f"{source}: a passport of a GPU, not a trace; add `--gpu {source}` to `tracekit whatif TRACE`"
        )
    if version == OP_TRACE_VERSION:
        raise FormatError(f"{source}: an op trace, not a pipeline trace: `tracekit whatif` and `tracekit.load` read it")
    if version != SCHEMA_VERSION:
        raise FormatError(
            f"{source}: schema version {quoted(version)}; this tracekit reads {SCHEMA_VERSION} (pipeline traces) and"
            f" {OP_TRACE_VERSION} (op traces): upgrade tracekit"
        )
    try:
        layout = Layout.from_dict(header["layout"])
        name = str(header["name"])
        step_starts = {int(step): float(start) for step, start in header.get("step_starts", {}).items()}
        metadata = dict(header.get("metadata", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{source}: damaged tracekit metadata ({quoted(error)}); write the trace again") from None
    except LayoutError as error:
        raise LayoutError(f"{source}: {error}") from None
    return trace_of_file(path, layout, unit=unit, steps=steps, name=name, step_starts=step_starts, metadata=metadata)


def trace_of_file(
    path: str | os.PathLike[str],
    layout: Layout,
    *,
    unit: TimeUnit | None,
    steps: Sequence[int] | None,
    columns: Mapping[str, str] | None = None,
    renamed: Renamed = lambda ops: ops,
    **fields: Any,
) -> Trace:
    """The trace in a Parquet file: without a table of its rows if it is large and nothing is wrong with it.

    `renamed`: gives columns their canonical names, which `columns` has. `fields`: more arguments of `Trace.from_frame`.
    Raises FormatError, TraceError or LayoutError.
    """
    if steps is None and rows_of_file(path) > MOST_ROWS_AS_TABLE:
        from tracekit.trace.ordered import ordered_trace

        with contextlib.suppress(TracekitError, pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
            ordered = ordered_trace(path, layout, Origin(str(path), columns or {}), renamed, unit=unit, **fields)
            if ordered is not None:
                return ordered
    ops = renamed(read_columns(path) if steps is None else read_steps(path, steps))
    return Trace.from_frame(ops, layout, source=str(path), columns=columns, unit=unit, **fields)


def finite_starts(step_starts: Mapping[int, float], source: Origin) -> Mapping[int, float]:
    """`step_starts`, checked to be clock times. Raises TraceError."""
    for step, start in step_starts.items():
        if not abs(start) <= LARGEST_CLOCK_S:
            raise TraceError(
                f"{source}: the start of step {step} is {start!r:.40}; expected seconds since 1970, such as 1.7e9"
            )
    return step_starts


def stated_unit(metadata: Mapping[str, Any]) -> TimeUnit | None:
    """The original unit of the times, if it was stated."""
    stated = metadata.get(UNIT_KEY)
    return TimeUnit(stated) if stated in tuple(TimeUnit) else None


def _shown(layers: Sequence[Any]) -> str:
    return f"{','.join(f'{count!s:.20}' for count in layers[:8])}{',...' if len(layers) > 8 else ''}"


def _is_rank(text: str) -> bool:
    return len(text) <= 9 and text.isascii() and text.isdecimal()


def share_of_samples(value: object) -> float | None:
    """A share from free metadata: a number from 0 to 1; None for anything else."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None
