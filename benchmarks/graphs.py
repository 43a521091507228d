"""Graphs of any shape: replay of one that does not fold, attribution by rank, jobs whose lanes differ in structure."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.measure import measure, table, tracekit

RANKS, OPS_OF_RANK, SCENARIOS = 64, 15_625, 16
#: Share of computes after which garbage is collected, in the job whose lanes differ.
COLLECTIONS = 0.01


def section() -> str:
    """The Markdown of this section."""
    # Processes before what is computed here: memory of this process would count as theirs.
    return "\n\n".join(["## Graphs of any shape", _many_steps(), _irregular(), _unfolded()])


def _unfolded() -> str:
    """One step of a million ops: two streams a rank, a launch for every other op, a collective every 50 ops."""
    from tracekit.analysis.attribution.by_label import attribute_by
    from tracekit.analysis.graph.fold import fold
    from tracekit.analysis.replay.costs import measure_op_durations
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.analysis.replay.kernel import Costs, replay_lanes

    rows = []
    graph, built = _timed(_million_ops)
    rows.append(["checking the frames", f"{built:.2f}"])
    folded, folding = _timed(lambda: fold(graph))
    rows.append(["laying it out", f"{folding:.2f}"])
    durations, split = _timed(lambda: measure_op_durations(folded))
    rows.append(["durations and ideals", f"{split:.2f}"])
    # What the kernel alone does: all scenarios side by side.
    block, ops = folded.blocks[0], len(graph.start)
    costs = Costs.of_matrix(durations.cost[0].repeat(SCENARIOS, axis=1))
    lanes = np.arange(SCENARIOS + 1)
    seconds = [_timed(lambda: replay_lanes(block.template, lanes, costs, threads=1))[1] for _ in range(9)]
    once = statistics.median(seconds)
    rate = ops * SCENARIOS / once
    rows.append([f"{SCENARIOS} scenarios, one core ({rate / 1e8:.1f}e8 op-replays/s)", f"{once:.3f}"])
    replay = GraphReplay(folded, durations)
    _, attributed = _timed(lambda: attribute_by(replay, ["rank"]))
    rows.append([f"exact S_x of {RANKS} ranks, kept alone and removed alone", f"{attributed:.2f}"])
    intro = f"An op graph of {ops:,} ops on {RANKS} ranks with {len(graph.before):,} edges; CPU seconds."
    return f"{intro}\n\n{table(['work', 'cpu s'], rows)}"


def _million_ops() -> Any:
    """The op graph of `_unfolded`."""
    from tracekit.analysis.graph.op_graph import OpGraph

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
    return OpGraph.from_frames(ops, pl.DataFrame(ends | {"after": np.concatenate([part.ravel() for part in after])}))


def regular_and_irregular(folder: Path) -> tuple[Path, Path, list[int]]:
    """Two traces, the second with collections of garbage in random places, and how many ops they have."""
    from tracekit.trace.canonical import Trace, read_parquet

    regular, irregular = folder / "regular.parquet", folder / "irregular.parquet"
    sizes = ("--dp", "32", "--pp", "4", "--microbatches", "16", "--steps", "20")
    measure(*tracekit("synth", "-o", str(regular), *sizes), runs=1, warm_up=0)
    trace = read_parquet(regular)
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
    frames = {regular: ops, irregular: pl.concat([ops, collections.select(ops.columns)])}
    for path, frame in frames.items():
        Trace.from_frame(frame, trace.layout, name=path.stem).write_parquet(path)
    return regular, irregular, [frame.height for frame in frames.values()]


def _irregular() -> str:
    """A job beside the same one with collections of garbage in random places."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        *paths, ops = regular_and_irregular(Path(folder))
        for path, count in zip(paths, ops, strict=True):
            run = measure(*tracekit("whatif", str(path), "--json"), runs=3)
            rows.append([path.stem, f"{count:,}", f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", f"{run.peak_mb:.0f}"])
    intro = (
        f"Whole `whatif` of dp 32 x pp 4, 16 microbatches, 20 steps; in the irregular job a collection of garbage\n"
        f"follows {COLLECTIONS:.0%} of the computes, so that hardly two lanes have the same places for them."
    )
    return f"{intro}\n\n{table(['job', 'ops', 'wall s', 'cpu s', 'peak MB'], rows)}"


def _many_steps() -> str:
    """A long recording of a small job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.parquet"
        sizes = ("--dp", "2", "--pp", "2", "--microbatches", "4", "--steps", "20000")
        measure(*tracekit("synth", "-o", str(path), *sizes), runs=1, warm_up=0)
        ops = int(pl.scan_parquet(path).select(pl.len()).collect().item())
        run = measure(*tracekit("whatif", str(path), "--json"), runs=1)
    row = ["20,000", f"{ops:,}", f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", f"{run.peak_mb:.0f}"]
    header = ["steps", "ops", "wall s", "cpu s", "peak MB"]
    return f"Whole `whatif` of a long recording, dp 2 x pp 2.\n\n{table(header, [row])}"


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began
