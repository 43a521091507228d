"""Speed and memory of `tracekit whatif`, of the replay kernel, and of op graphs of any shape."""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.file_shapes import others, pipelines
from benchmarks.measure import measure, median_s, table, tracekit
from judges.kinetosim import Job as SimulatedJob

#: The order of a published trace by worker and time.
PUBLISHED_ORDER = ("step", "dp_rank", "stage", "start_ts")
SAMPLE = Path(__file__).parents[1] / "sample_traces" / "healthy.parquet"
#: Published traces of other projects, which are not part of this repository.
REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
PP, MICROBATCHES, STEPS = 16, 32, 10
WORKERS = (512, 2048, 8192)
#: The job of which all shapes of files are measured, without and with these causes.
SHAPED_WORKERS, PROFILE_BYTES = 2048, 20_000_000
CAUSES = ("slow-worker:dp=5,pp=2,factor=1.4", "slow-last-stage:factor=1.1",
          "sequence-length-imbalance:quadratic_share=0.1")  # fmt: skip
#: How time grows: steps of a small job, microbatches of a job of 32 workers, stages of a job of two DP ranks.
LONGER, DEEPER, STAGES = (2_000, 8_000), (256, 1024), (32, 128)
#: Steps of the long recording, and how many rounds `whatif` and kernel runs get.
LONG_STEPS, RUNS, KERNEL_RUNS = 20_000, 3, 9
#: The op graph: ranks, ops per rank, scenarios replayed side by side.
RANKS, OPS_OF_RANK, SCENARIOS = 64, 15_625, 16
#: Share of computes followed by a garbage collection in the irregular job.
COLLECTIONS = 0.01
QUICK = {"WORKERS": (32,), "LONG_STEPS": 100, "RUNS": 1, "KERNEL_RUNS": 1, "RANKS": 4, "OPS_OF_RANK": 150,
         "LONGER": (100, 200), "DEEPER": (8, 16), "STAGES": (2, 4), "SHAPED_WORKERS": 96,
         "PROFILE_BYTES": 200_000}  # fmt: skip
#: The least that any analysis does with a trace: read and sort it.
BARE = "import polars, sys; polars.read_parquet(sys.argv[1]).sort(sys.argv[2:])"


@dataclass(frozen=True)
class Measured:
    """A trace to measure, the arguments that `whatif` needs for it, and the columns by which it is sorted.

    `grows`: in what it is larger than others, "" if none is compared with it.
    """

    name: str
    path: Path
    arguments: tuple[str, ...] = ()
    order: tuple[str, ...] = ("step", "dp_rank", "pp_rank", "start")
    grows: str = ""

    @property
    def whatif(self) -> tuple[str, ...]:
        """Arguments of `tracekit`."""
        return ("whatif", str(self.path), *self.arguments, "--json")


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as folder:
        traces = [*_growing(Path(folder)), *write_traces(Path(folder), LONG_STEPS, WORKERS)]
        parts = [
            "## Speed: from a step trace to exact attribution",
            _whole_processes(traces),
            _kernel(traces[-1]),
            _op_graph(),
            _file_shapes(Path(folder)),
        ]
    return "\n\n".join(parts)


def write_traces(folder: Path, long_steps: int, sizes: Sequence[int]) -> list[Measured]:
    """The sample, the published trace if it is there, synthetic jobs with the largest last."""
    traces = [Measured("`sample_traces/healthy.parquet`", SAMPLE)]
    if REFERENCE.is_dir():
        layout = ("--layout", str(REFERENCE / "meta-AR.yaml"))
        traces.append(Measured("published trace AR", REFERENCE / "trace-AR.parquet", layout, PUBLISHED_ORDER))
    traces.append(_write_op_trace(folder / "ops.parquet"))
    traces.append(_synth(folder / "long.parquet", f"{long_steps:,} steps, dp 2 x pp 2", 2, 2, 4, long_steps))
    _write_irregular(folder)
    traces.append(Measured("dp 32 x pp 4, garbage collected in random places", folder / "irregular.parquet"))
    for workers in sizes:
        slow = ("--cause", "slow-worker:dp=0,pp=2,factor=1.5")
        path = folder / f"{workers}.parquet"
        of_size = _synth(path, f"{workers:,} workers", workers // PP, PP, MICROBATCHES, STEPS, *slow)
        traces.append(replace(of_size, grows="workers"))
    return traces


def _growing(folder: Path) -> list[Measured]:
    """The same jobs with more steps, with more microbatches, and with more stages."""
    steps = [_synth(folder / f"s{count}.parquet", f"{count:,} steps, dp 2 x pp 2", 2, 2, 4, count) for count in LONGER]
    deep = [
        _synth(folder / f"m{count}.parquet", f"{count:,} microbatches, dp 2 x pp {PP}", 2, PP, count, STEPS)
        for count in DEEPER
    ]
    staged = [
        _synth(folder / f"p{count}.parquet", f"{count:,} stages, dp 2", 2, count, 4 * PP, STEPS) for count in STAGES
    ]
    kinds = (("steps", steps), ("microbatches", deep), ("stages", staged))
    return [replace(one, grows=grows) for grows, found in kinds for one in found]


def _file_shapes(folder: Path) -> str:
    """A job in every shape of a file, without causes and with several; stores, an op trace, files of torch.profiler."""
    jobs = []
    for name, causes in (("no cause", ()), ("three causes", CAUSES)):
        chosen = (word for cause in causes for word in ("--cause", cause))
        path = folder / f"{name}.parquet"
        _synth(path, name, SHAPED_WORKERS // PP, PP, MICROBATCHES, STEPS, *chosen)
        jobs.append(path)
    profiles = folder / "profiles"
    profiles.mkdir()
    files = list(SimulatedJob(ranks=4, layers=8, host_us=25.0).run().write_repeated(profiles, PROFILE_BYTES))
    return (
        f"The same job of {SHAPED_WORKERS:,} workers in every shape of a file, whole processes:\n\n"
        f"{pipelines(jobs, folder)}\n\n{others(jobs[-1], folder / 'ops.parquet', files, folder)}"
    )


def _synth(path: Path, name: str, dp: int, pp: int, microbatches: int, steps: int, *more: str) -> Measured:
    sizes = ("--dp", str(dp), "--pp", str(pp), "--microbatches", str(microbatches), "--steps", str(steps))
    measure(*tracekit("synth", "-o", str(path), *sizes, *more), runs=1, warm_up=0)
    return Measured(name, path)


def _write_irregular(folder: Path) -> None:
    """A trace with garbage collections in random places, so that hardly two lanes have the same ops."""
    import polars as pl

    from tracekit.trace.canonical import Trace, read_parquet

    trace = read_parquet(_synth(folder / "regular.parquet", "regular", 32, 4, 16, 20).path)
    ops = trace.ops.filter(pl.col("kind") != "gc")
    computes = ops.filter(pl.col("kind").is_in(["forward-compute", "backward-compute"]))
    collections = (
        computes.sample(fraction=COLLECTIONS, seed=1)
        .with_columns(
            kind=pl.lit("gc").cast(ops["kind"].dtype),
            start=pl.col("start") + pl.col("duration"),
            duration=pl.lit(1e-4),
            microbatch=pl.lit(None, pl.Int32),
            chunk=pl.lit(None, pl.Int16),
        )
        .sort("step", "dp_rank", "pp_rank", "start")
        .with_columns(seq=pl.int_range(pl.len()).over("step", "dp_rank", "pp_rank").cast(pl.Int32))
    )
    frame = pl.concat([ops, collections.select(ops.columns)])
    Trace.from_frame(frame, trace.layout, name="irregular").write_parquet(folder / "irregular.parquet")


def _whole_processes(traces: list[Measured]) -> str:
    rows = [["`tracekit --help`", "", *measure(*tracekit("--help"), runs=3 * RUNS).cells, "", "", ""]]
    grown: dict[str, list[tuple[int, float]]] = {}
    for trace in traces:
        run = measure(*tracekit(*trace.whatif), runs=RUNS)
        bare = measure(sys.executable, "-c", BARE, str(trace.path), *trace.order, runs=RUNS)
        ops = _ops(trace.path)
        per_op = f"{run.cpu_s / bare.cpu_s:.1f}", f"{run.peak_mb * 1e6 / ops:,.0f}"
        rows.append([trace.name, f"{ops:,}", *run.cells, f"{bare.cpu_s:.2f}", *per_op])
        grown.setdefault(trace.grows, []).append((ops, run.cpu_s))
    intro = (
        "`tracekit whatif FILE --json` as a whole process, warm, with the exact slowdown of every worker; next to it,"
        " polars that only reads and sorts the file, and the ratio of the two. Synthetic jobs: pp"
        f" {PP}, {MICROBATCHES} microbatches, {STEPS} steps, one slow worker. The published analyser takes 1.3 s and"
        " 180 MB on AR, and 684 s and 7.4 GB on the"
        " 8,192 workers with approximate slowdowns, on a similar machine."
    )
    header = ["trace", "ops", "wall s", "CPU s", "peak MB", "read and sort, CPU s", "ratio", "peak, bytes an op"]
    return f"{intro}\n\n{table(header, rows)}\n\n{_exponents(grown)}"


def _exponents(grown: dict[str, list[tuple[int, float]]]) -> str:
    """How CPU time grows with ops: (ops, CPU seconds) of the smallest and the largest job of each kind."""
    words = []
    for what, sizes in grown.items():
        (few, short_s), (many, long_s) = min(sizes), max(sizes)
        if what and many > few:
            words.append(f"with {what} {math.log(long_s / short_s) / math.log(many / few):.2f}")
    return f"CPU time, start-up included, grows with this power of the ops: {', '.join(words)}."


def _ops(path: Path) -> int:
    import polars as pl

    return int(pl.scan_parquet(path).select(pl.len()).collect().item())


def _kernel(trace: Measured) -> str:
    """Op-replays per second of the kernel alone."""
    import tracekit as library
    from tracekit.analysis.whatif.interventions import ORIGINAL, RECORDED, changed

    replay = library.load(trace.path).replay
    rows = []
    for threads in (1, 2):
        for name, changes in (("original", ORIGINAL), ("with launch delays", RECORDED)):
            costs = changed(replay, changes).costs()
            replay.step_times(costs, threads=threads)
            took_s = median_s(partial(replay.step_times, costs, threads=threads), KERNEL_RUNS)
            rows.append([name, str(threads), f"{took_s * 1e3:.1f}", f"{replay.graph.ops / took_s / 1e9:.2f}"])
    header = ["question", "threads", "ms", "1e9 op-replays/s"]
    return f"Replay of {trace.name} alone, step times only:\n\n{table(header, rows)}"


def _op_graph() -> str:
    """One step: two streams a rank, a launch for every other op, a collective every 50 ops."""
    from tracekit.analysis.attribution.by_label import attribute_by
    from tracekit.analysis.graph.op_graph import OpGraph, fold
    from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations
    from tracekit.analysis.replay.kernel import Costs, replay_lanes

    ops, edges = _large_op_graph()
    graph, built = _timed(lambda: OpGraph.from_frames(ops, edges))
    folded, folding = _timed(lambda: fold(graph))
    durations, split = _timed(lambda: measure_op_durations(folded))
    block, lanes = folded.blocks[0], np.arange(SCENARIOS + 1)
    costs = Costs.of_matrix(durations.cost[0].repeat(SCENARIOS, axis=1))
    once = median_s(lambda: replay_lanes(block.template, lanes, costs, threads=1), KERNEL_RUNS)
    _, attributed = _timed(lambda: attribute_by(GraphReplay(folded, durations), ["rank"]))
    rate = len(graph.start) * SCENARIOS / once
    rows = [
        ["checking the frames", f"{built:.2f}"],
        ["laying it out", f"{folding:.2f}"],
        ["durations and ideals", f"{split:.2f}"],
        [f"{SCENARIOS} scenarios, one core ({rate / 1e8:.1f}e8 op-replays/s)", f"{once:.3f}"],
        [f"exact S_x of {RANKS} ranks, kept alone and removed alone", f"{attributed:.2f}"],
    ]
    intro = f"An op graph of {len(graph.start):,} ops on {RANKS} ranks with {len(graph.before):,} edges:"
    return f"{intro}\n\n{table(['work', 'CPU s'], rows)}"


def _write_op_trace(path: Path) -> Measured:
    """The op graph that is measured, as a file."""
    import polars as pl

    from tracekit.trace.op import OpTrace

    ops, edges = _large_op_graph()
    waits = edges.group_by("after").agg(waits_for="before").rename({"after": "row"})
    rows = ops.with_columns(row=pl.int_range(pl.len())).join(waits, on="row", how="left", maintain_order="left")
    OpTrace(rows.drop("row"), name="ops").write_parquet(path)
    return Measured(f"op trace of {RANKS} ranks", path, (), ("rank", "start"))


def _large_op_graph() -> Any:
    """The ops and the edges of the op graph that is measured."""
    import polars as pl

    rng = np.random.default_rng(0)
    size = RANKS * OPS_OF_RANK
    number = np.tile(np.arange(OPS_OF_RANK), RANKS)
    rank, stream = np.repeat(np.arange(RANKS), OPS_OF_RANK), number % 3 == 2
    duration = rng.gamma(4, 1e-4, size)
    op = np.arange(size).reshape(RANKS, OPS_OF_RANK)
    on_second = np.arange(OPS_OF_RANK) % 3 == 2
    before = [op[:, ~on_second][:, :-1], op[:, on_second][:, :-1], op[:, 1:-1:2]]
    after = [op[:, ~on_second][:, 1:], op[:, on_second][:, 1:], op[:, 2::2]]
    ops = pl.DataFrame(
        {
            "rank": rank,
            "stream": stream.astype(int),
            "kind": np.char.add("kernel-", (number % 40).astype(str)),
            "start": (np.cumsum(duration.reshape(RANKS, -1), axis=1) - duration.reshape(RANKS, -1)).ravel(),
            "duration": duration,
            "rendezvous": np.where(number % 50 == 49, number, -1),
        }
    ).with_columns(pl.col("rendezvous").replace(-1, None))
    ends = {"before": np.concatenate([part.ravel() for part in before])}
    return ops, pl.DataFrame(ends | {"after": np.concatenate([part.ravel() for part in after])})


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the CPU seconds it took."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began
