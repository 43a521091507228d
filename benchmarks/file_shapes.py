"""One job in every shape that files of users have: time and memory of each, and how it compares with the best.

A file of another order, clock, unit or type holds the same job, so it should cost the same. `core` has the table.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.measure import MeasuredRun, measure, table, tracekit
from tests.fleet.buckets import serving, upload
from tracekit.collectors.importers.kineto.event_columns import FUSED_PID

if TYPE_CHECKING:
    import polars as pl

#: Column of a canonical trace -> of a published one.
PUBLISHED = {
    "pp_rank": "stage", "kind": "optype", "start": "start_ts", "seq": "seq_id", "chunk": "mc", "microbatch": "mb_id",
}  # fmt: skip
IN_ORDER = ("step", "dp_rank", "pp_rank", "kind", "seq")
#: Starts of a clock that runs across steps: none, that of the first step in seconds, and that of a day in 2023.
PER_STEP, ACROSS_STEPS, SINCE_1970 = None, 0.0, 1.7e9


@dataclass(frozen=True)
class FileShape:
    """How a file holds a job. `order`: its rows are sorted by these columns; none: shuffled. `clock`: see `PER_STEP`;
    steps follow each other. `unit`: of integers; None: seconds. `floats`: the bits of those. `changed`: columns left
    out or added. `row_groups`: None for those that polars makes.
    """

    name: str
    order: Sequence[str] = IN_ORDER
    clock: float | None = PER_STEP
    unit: str | None = None
    floats: int = 64
    changed: str = ""
    row_groups: int | None = None
    compression: str = "zstd"
    published: bool = False

    def write(self, ops: pl.DataFrame, header: str, path: Path) -> None:
        """Write the canonical `ops` in this shape. `header`: the metadata of a canonical file."""
        import polars as pl

        shaped = self._columns(self._times(ops))
        shaped = shaped.sort(self.order) if self.order else shaped.sample(fraction=1.0, shuffle=True, seed=1)
        if self.published:
            filled = pl.col("chunk", "microbatch").fill_null(-1).cast(pl.Int64)
            shaped = shaped.with_columns(filled, pl.col("kind").cast(pl.String), gmc=pl.lit(0)).rename(PUBLISHED)
        rows = None if self.row_groups is None else max(1, ops.height // self.row_groups)
        metadata = None if self.published else {"tracekit": header}
        shaped.write_parquet(path, compression=self.compression, row_group_size=rows, metadata=metadata)  # type: ignore[arg-type]

    def _times(self, ops: pl.DataFrame) -> pl.DataFrame:
        import polars as pl

        times, per_second = pl.col("start", "duration"), {None: 1, "us": 10**6, "ns": 10**9}[self.unit]
        length_s = 1.01 * float((ops["start"] + ops["duration"]).max())  # type: ignore[arg-type]
        dtype = pl.Int64 if self.unit else pl.Float64
        shaped = ops.with_columns((times * per_second).round().cast(dtype) if self.unit else times)
        if self.clock is not None:
            zero, length = (pl.lit(seconds * per_second).cast(dtype) for seconds in (self.clock, length_s))
            shaped = shaped.with_columns(start=pl.col("start") + zero + pl.col("step").cast(dtype) * length)
        return shaped.with_columns(times.cast(pl.Float32)) if self.floats == 32 else shaped

    def _columns(self, ops: pl.DataFrame) -> pl.DataFrame:
        import polars as pl

        receives = pl.when(pl.col("kind").cast(pl.String).str.contains("recv"))
        match self.changed:
            case "no chunks":
                return ops.drop("chunk")
            case "labels":
                return ops.with_columns(host=pl.format("node-{}", pl.col("rank") // 8), iteration=pl.col("step") + 1000)
            case "times of the host":
                per_second = {None: 1, "us": 10**6, "ns": 10**9}[self.unit]
                return ops.with_columns(
                    posted=receives.then(1e-4 * per_second), resumed=receives.then(pl.col("duration"))
                )
        return ops


SHAPES = (
    FileShape("by step, worker, kind"),
    FileShape("by step and time", ("step", "start")),
    FileShape("by rank and time", ("rank", "step", "start")),
    FileShape("shuffled", ()),
    FileShape("one clock across steps", clock=ACROSS_STEPS),
    FileShape("seconds since 1970", clock=SINCE_1970),
    FileShape("32-bit seconds", floats=32),
    FileShape("integer us", unit="us"),
    FileShape("integer ns since 1970", clock=SINCE_1970, unit="ns"),
    FileShape("no chunks", changed="no chunks"),
    FileShape("two columns of labels", changed="labels"),
    FileShape("times of the host", changed="times of the host"),
    FileShape("1 row group", row_groups=1),
    FileShape("10,000 row groups", row_groups=10_000),
    FileShape("uncompressed", compression="uncompressed"),
    FileShape("snappy", compression="snappy"),
    FileShape("gzip", compression="gzip"),
    FileShape("published", ("step", "kind", "seq", "dp_rank", "pp_rank"), published=True),
    FileShape("published, one clock across steps", ("step", "start"), clock=ACROSS_STEPS, published=True),
    FileShape(
        "published, shuffled, integer ns since 1970, 1 row group, gzip",
        (), clock=SINCE_1970, unit="ns", row_groups=1, compression="gzip", published=True,
    ),
)  # fmt: skip


def pipelines(jobs: Sequence[Path], folder: Path) -> str:
    """A table of every shape of some canonical files, which differ in their causes."""
    measured = [_of_job(job, folder) for job in jobs]
    rows = [[shape.name] for shape in SHAPES]
    for of_job in measured:
        best = min(run.cpu_s for run in of_job), min(run.peak_mb for run in of_job)
        for row, run in zip(rows, of_job, strict=True):
            row.extend(_cells(run, best))
    heads = [[f"{job.stem}: CPU s", "to the best", "peak MB", "to the best"] for job in jobs]
    return table(["shape", *(head for of_job in heads for head in of_job)], rows)


def _of_job(job: Path, folder: Path) -> list[MeasuredRun]:
    import polars as pl

    header = json.loads(pl.read_parquet_metadata(job)["tracekit"]) | {"step_starts": {}}
    ops, layout, path = pl.read_parquet(job), folder / "layout.yaml", folder / "shape.parquet"
    sizes = [f"{name}_size: {header['layout'][name]}" for name in ("dp", "pp", "tp")]
    layout.write_text("\n".join([*sizes, f"world_size: {header['layout']['world_size']}"]))
    measured = []
    for shape in SHAPES:
        shape.write(ops, json.dumps(header), path)
        arguments = ["--layout", str(layout)] if shape.published else []
        arguments += ["--unit", shape.unit] if shape.unit else []
        measured.append(measure(*tracekit("whatif", str(path), *arguments, "--json"), runs=1, warm_up=0))
    return measured


def _cells(run: MeasuredRun, best: tuple[float, float]) -> list[str]:
    """CPU time and peak, each with its ratio to the best."""
    cpu_s, peak_mb = best
    return [f"{run.cpu_s:.2f}", f"{run.cpu_s / cpu_s:.2f}", f"{run.peak_mb:.0f}", f"{run.peak_mb / peak_mb:.2f}"]


def others(job: Path, op_trace: Path, profiles: Sequence[Path], folder: Path) -> str:
    """A table of a pipeline `job` in a store, of the shapes of an op trace, and of files of torch.profiler."""
    of_stores, of_ops = list(_stores(job, folder)), list(_op_traces(op_trace, folder))
    zipped = folder / "zipped"
    zipped.mkdir()
    for path in profiles:
        (zipped / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 6))
    fused = folder / "fused"
    fused.mkdir()
    _fuse(profiles, fused / "all.json")
    of_profiles = [
        (f"torch.profiler, {name}", measure(*tracekit("whatif", str(place), "--json"), runs=1, warm_up=0))
        for name, place in (("plain", profiles[0].parent), ("gzip", zipped), ("one file of all ranks", fused))
    ]
    rows = []
    for group in (of_stores, of_ops, of_profiles):
        best = min(run.cpu_s for _, run in group), min(run.peak_mb for _, run in group)
        rows += [[name, *_cells(run, best)] for name, run in group]
    return table(["files", "CPU s", "to the best", "peak MB", "to the best"], rows)


def _stores(job: Path, folder: Path) -> Iterator[tuple[str, MeasuredRun]]:
    """The job as a file, in a store on disk, and in one on S3, which this process serves."""
    once = partial(measure, runs=1, warm_up=0)
    yield "pipeline, a file", once(*tracekit("whatif", str(job), "--json"))
    store, address = folder / "jobs.store", "s3://bucket/jobs.store"
    once(*tracekit("import", "--store", str(store), "--no-analysis", str(job)))
    yield "pipeline, a store on disk", once(*tracekit("whatif", "--store", str(store), "--json"))
    with serving("s3") as environment, patch.dict(os.environ, environment):
        upload(store, address)
        yield "pipeline, a store on S3", once(*tracekit("whatif", "--store", address, "--json"))


def _fuse(profiles: Sequence[Path], path: Path) -> None:
    """Write the events of all ranks to one file, as tools that merge timelines do: with processes numbered by rank."""
    with path.open("w") as file:
        for rank, profile in enumerate(profiles):
            head, events = profile.read_text().split('"traceEvents": [')
            events, tail = events.rsplit("]", 1)
            file.write(",\n" if rank else f'{head}"traceEvents": [')
            file.write(_of_rank(events, rank))
        file.write(f"]{tail}")


def _of_rank(events: str, rank: int) -> str:
    return re.sub(r'"pid": (\d+)', lambda match: f'"pid": {rank * FUSED_PID + int(match[1])}', events)


def _op_traces(op_trace: Path, folder: Path) -> Iterator[tuple[str, MeasuredRun]]:
    """The op trace as it is, in one row group, in many, and otherwise compressed; its order is that of its edges."""
    import polars as pl

    ops, metadata = pl.read_parquet(op_trace), pl.read_parquet_metadata(op_trace)
    path = folder / "ops-shape.parquet"
    for name, compression, groups in (
        ("as written", "zstd", None), ("1 row group", "zstd", 1), ("1,000 row groups", "zstd", 1_000),
        ("uncompressed", "uncompressed", None), ("gzip", "gzip", None),
    ):  # fmt: skip
        rows = None if groups is None else max(1, ops.height // groups)
        header = {"tracekit": metadata["tracekit"]}
        ops.write_parquet(path, compression=compression, row_group_size=rows, metadata=header)  # type: ignore[arg-type]
        yield f"op trace, {name}", measure(*tracekit("whatif", str(path), "--json"), runs=1, warm_up=0)
