"""A tiny job whose every time was worked out by hand, and helpers to break it.

pp 2 x dp 2, 2 microbatches, 1F1B, gradient reduction not overlapped. Forward 1 s, backward 2 s, a send 0.25 s,
params-all-gather and grads-reduce-scatter 0.5 s each, clip 0.25 s, optimizer 0.5 s, no launch delays.
In the slow job stage 0 of DP rank 1 takes twice as long for every forward and backward.

    healthy step: 11.25 s          slow step: 15.5 s         ideal step of the slow job: 13.5 s
    S = 15.5 / 13.5                worker (1,0) idealised: 12 s     worker (1,0) alone as recorded: 16.25 s
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import click
import polars as pl
import pytest

from tracekit.cli import commands, main
from tracekit.report.findings import Findings, Unanalysed
from tracekit.sources.load import load_trace
from tracekit.sources.registry import job_of
from tracekit.trace.canonical import METADATA_KEY, Trace
from tracekit.trace.model import Layout, TimeUnit
from tracekit.trace.schema import SCHEMA

if TYPE_CHECKING:
    from tracekit.store.catalogue_rows import AnyTrace

T = TypeVar("T")

HEALTHY_STEP_S = 11.25
SLOW_STEP_S = 15.5
IDEAL_STEP_S = 13.5  # forward 1.25 s, backward 2.5 s: the means over the four workers
FIXED_STEP_S = 12.0
KEPT_STEP_S = 16.25


#: How often a server of a test looks whether it is to end: `shutdown` waits for that.
POLL_S = 0.01

#: Every command of the command line.
COMMANDS = {
    name: commands.get_command(click.Context(commands), name)
    for name in commands.list_commands(click.Context(commands))
}
LAYOUT = Layout(dp=2, pp=2, world_size=4)

#: (pp_rank, kind, seq, microbatch, start, end), seconds
Lane = Sequence[tuple[int, str, int, int | None, float, float]]

HEALTHY_LANE: Lane = (
    (0, "params-all-gather", 0, None, 0.0, 0.5),
    (0, "forward-compute", 0, 0, 0.5, 1.5),
    (0, "forward-compute", 1, 1, 1.5, 2.5),
    (0, "forward-send", 0, 0, 1.5, 1.75),
    (0, "forward-send", 1, 1, 2.5, 3.0),  # waits for its recv, posted at 2.75
    (0, "backward-recv", 0, 0, 1.5, 5.0),  # posted once the first forward has ended
    (0, "backward-compute", 0, 0, 5.0, 7.0),
    (0, "backward-recv", 1, 1, 7.0, 8.0),
    (0, "backward-compute", 1, 1, 8.0, 10.0),
    (0, "grads-reduce-scatter", 0, None, 10.0, 10.5),
    (0, "optimizer-clip-main-grad", 0, None, 10.5, 10.75),
    (0, "optimizer", 0, None, 10.75, 11.25),
    (1, "params-all-gather", 0, None, 0.0, 0.5),
    (1, "forward-recv", 0, 0, 0.0, 1.75),
    (1, "forward-compute", 0, 0, 1.75, 2.75),
    (1, "backward-compute", 0, 0, 2.75, 4.75),
    (1, "forward-recv", 1, 1, 2.75, 3.0),
    (1, "backward-send", 0, 0, 4.75, 5.0),
    (1, "forward-compute", 1, 1, 4.75, 5.75),
    (1, "backward-compute", 1, 1, 5.75, 7.75),
    (1, "backward-send", 1, 1, 7.75, 8.0),
    (1, "grads-reduce-scatter", 0, None, 7.75, 8.25),
)
HEALTHY_LANE = (
    *HEALTHY_LANE,
    (1, "optimizer-clip-main-grad", 0, None, 8.25, 10.75),  # waits for stage 0
    (1, "optimizer", 0, None, 10.75, 11.25),
)

#: DP rank 0 of the slow job: as healthy, but its collectives wait for DP rank 1.
WAITING_LANE: Lane = (
    *HEALTHY_LANE[:9],
    (0, "grads-reduce-scatter", 0, None, 10.0, 14.75),
    (0, "optimizer-clip-main-grad", 0, None, 14.75, 15.0),
    (0, "optimizer", 0, None, 15.0, 15.5),
    *HEALTHY_LANE[12:21],
    (1, "grads-reduce-scatter", 0, None, 7.75, 9.25),
    (1, "optimizer-clip-main-grad", 0, None, 9.25, 15.0),
    (1, "optimizer", 0, None, 15.0, 15.5),
)
#: DP rank 1 of the slow job: on stage 0 a forward takes 2 s and a backward 4 s.
SLOW_LANE: Lane = (
    (0, "params-all-gather", 0, None, 0.0, 0.5),
    (0, "forward-compute", 0, 0, 0.5, 2.5),
    (0, "forward-compute", 1, 1, 2.5, 4.5),
    (0, "forward-send", 0, 0, 2.5, 2.75),
    (0, "forward-send", 1, 1, 4.5, 4.75),
    (0, "backward-recv", 0, 0, 2.5, 6.0),
    (0, "backward-compute", 0, 0, 6.0, 10.0),
    (0, "backward-recv", 1, 1, 10.0, 10.25),
    (0, "backward-compute", 1, 1, 10.25, 14.25),
    (0, "grads-reduce-scatter", 0, None, 14.25, 14.75),
    (0, "optimizer-clip-main-grad", 0, None, 14.75, 15.0),
    (0, "optimizer", 0, None, 15.0, 15.5),
    (1, "params-all-gather", 0, None, 0.0, 0.5),
    (1, "forward-recv", 0, 0, 0.0, 2.75),
    (1, "forward-compute", 0, 0, 2.75, 3.75),
    (1, "backward-compute", 0, 0, 3.75, 5.75),
    (1, "forward-recv", 1, 1, 3.75, 4.75),
    (1, "backward-send", 0, 0, 5.75, 6.0),
    (1, "forward-compute", 1, 1, 5.75, 6.75),
    (1, "backward-compute", 1, 1, 6.75, 8.75),
    (1, "backward-send", 1, 1, 8.75, 10.25),  # waits for stage 0 to post its recv
    (1, "grads-reduce-scatter", 0, None, 8.75, 9.25),
    (1, "optimizer-clip-main-grad", 0, None, 9.25, 15.0),
    (1, "optimizer", 0, None, 15.0, 15.5),
)
OPS_PER_STEP = len(WAITING_LANE) + len(SLOW_LANE)


def frame(lanes: Mapping[int, Lane], steps: Iterable[int] = (0,)) -> pl.DataFrame:
    """Canonical columns of these lanes (by DP rank), the same in each of `steps`."""
    rows = [
        (step, pp_rank * len(lanes) + dp_rank, dp_rank, pp_rank, kind, seq, microbatch, start, end - start)
        for step in steps
        for dp_rank, lane in lanes.items()
        for pp_rank, kind, seq, microbatch, start, end in lane
    ]
    names = ("step", "rank", "dp_rank", "pp_rank", "kind", "seq", "microbatch", "start", "duration")
    chunk = pl.when(pl.col("microbatch").is_not_null()).then(0).alias("chunk")
    return pl.DataFrame(rows, names, orient="row").with_columns(chunk).select(list(SCHEMA))


def healthy_frame(steps: Iterable[int] = (0,)) -> pl.DataFrame:
    return frame({0: HEALTHY_LANE, 1: HEALTHY_LANE}, steps)


def slow_frame(steps: Iterable[int] = (0,)) -> pl.DataFrame:
    return frame({0: WAITING_LANE, 1: SLOW_LANE}, steps)


def slow_trace(steps: Iterable[int] = (0, 1), *, name: str = "slow job", **more: Any) -> Trace:
    return Trace.from_frame(slow_frame(steps), LAYOUT, name=name, **more)


def write_canonical(path: Path, ops: pl.DataFrame, layout: Mapping[str, Any] | None = None, **header: Any) -> Path:
    """A canonical Parquet file with unchecked content, as a broken recorder could write it."""
    content = {"schema_version": 1, "name": "broken", "layout": layout or LAYOUT.to_dict(), **header}
    with open(path, "wb") as file:
        ops.write_parquet(file, metadata={METADATA_KEY: json.dumps(content)})
    return path


def findings_of(trace: AnyTrace) -> Findings | Unanalysed:
    """What a store keeps of the analysis of a trace."""
    return job_of(trace).stored()


def published_columns(ops: pl.DataFrame) -> pl.DataFrame:
    """The same ops in the columns of a published trace."""
    names = {"pp_rank": "stage", "kind": "optype", "start": "start_ts", "seq": "seq_id", "chunk": "mc"}
    filled = ops.with_columns(pl.col("chunk", "microbatch").fill_null(-1)).rename({**names, "microbatch": "mb_id"})
    return filled.with_columns(gmc=pl.col("mc"))


@dataclass(frozen=True)
class Ran:
    """What a command did: exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one line of a failure, checked to be one and no traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


def command(*arguments: str | bytes | Path) -> list[str | bytes | Path]:
    return [sys.executable, "-P", "-m", "tracekit.cli", *arguments]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """80 columns and no store but the default one, unless the test says otherwise."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRACEKIT_STORE"}
    return inherited | {"COLUMNS": "80"} | dict(env)


def read_any(
    path: Path, *, name: str | None = None, layout: Path | None = None, unit: TimeUnit | None = None
) -> AnyTrace:
    """The trace that `load` reads at a path."""
    return load_trace(path, importer=name, layout=layout, unit=unit).trace


def run(*arguments: str | bytes | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ran:
    """Run tracekit's `main` in this process, which has imported everything: the same lines and exit code."""
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(raw, "utf-8", write_through=True) for raw in written)
    with (
        mock.patch.object(sys, "argv", ["tracekit", *map(os.fsdecode, arguments)]),
        mock.patch.dict(os.environ, _environment(env or {}), clear=True),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    code = left.value.code
    assert isinstance(code, int)
    return Ran(code, *(raw.getvalue().decode() for raw in written))


@contextlib.contextmanager
def little_space(most_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond that, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_process(*arguments: str | bytes | Path, env: Mapping[str, str] | None = None, **settings: Any) -> Ran:
    """Run tracekit as its own process, where the process is the point."""
    done = subprocess.run(
        command(*arguments), capture_output=True, timeout=300, check=False, env=_environment(env or {}), **settings
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def awaited(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns. It runs in a thread of its own: in this one, Playwright may keep an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
