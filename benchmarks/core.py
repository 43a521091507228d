"""Whole processes on a real and on large synthetic traces, and the replay kernel alone."""

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import measure, table, tracekit

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
PP, MICROBATCHES, STEPS = 16, 32, 10
WORKERS = (512, 2048, 8192)
#: The least that anything does with a trace: read it, sort it once.
BARE = "import polars, sys; polars.read_parquet(sys.argv[1]).sort('step', 'dp_rank', 'pp_rank', 'start')"


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {workers: simulate(Path(folder), workers) for workers in WORKERS}
        parts = [
            "## Core: from a step trace to exact attribution",
            _whole_processes(traces),
            _kernel(traces[WORKERS[-1]][0]),
        ]
    return "\n\n".join(parts)


def simulate(folder: Path, workers: int) -> tuple[Path, float]:
    """A trace of that many workers, and how long `tracekit synth` took (s)."""
    path = folder / f"{workers}.parquet"
    command = tracekit(
        "synth", "-o", str(path), "--dp", str(workers // PP), "--pp", str(PP), "--microbatches", str(MICROBATCHES),
        "--steps", str(STEPS), "--cause", "slow-worker:dp=5,pp=2,factor=1.5",
    )  # fmt: skip
    return path, measure(*command, runs=1, warm_up=0).wall_s


def _whole_processes(traces: dict[int, tuple[Path, float]]) -> str:
    rows = []
    run = measure(*tracekit("--help"), runs=11)
    rows.append(["`tracekit --help`", "", f"{run.wall_s:.3f}", f"{run.cpu_s:.3f}", f"{run.peak_mb:.0f}"])
    if REFERENCE.is_dir():
        layout = str(REFERENCE / "meta-AR.yaml")
        command = tracekit("whatif", str(REFERENCE / "trace-AR.parquet"), "--layout", layout, "--json")
        run = measure(*command, runs=11)
        rows.append(["published trace AR", "117,216", f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", f"{run.peak_mb:.0f}"])
    for workers, (path, synth_s) in traces.items():
        ops = _ops(path)
        run = measure(*tracekit("whatif", str(path), "--json"), runs=3)
        rows.append([f"{workers:,} workers", f"{ops:,}", f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", f"{run.peak_mb:.0f}"])
        run = measure(sys.executable, "-c", BARE, str(path), runs=3)
        bare = f"polars reads and sorts these {workers:,}"
        rows.append([bare, f"{ops:,}", f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", f"{run.peak_mb:.0f}"])
        rows.append([f"simulating these {workers:,}", f"{ops:,}", f"{synth_s:.2f}", "", ""])
    intro = (
        "Whole processes, warm, with exact S_w of every worker. The published analyser\n"
        "takes 1.3 s and 180 MB on AR, and 684 s and 7.4 GB on the 8,192 workers with approximate S_w, on such a\n"
        f"machine. Synthetic jobs: pp {PP}, {MICROBATCHES} microbatches, {STEPS} steps."
    )
    return f"{intro}\n\n{table(['process', 'ops', 'wall s', 'cpu s', 'peak MB'], rows)}"


def _ops(path: Path) -> int:
    import polars as pl

    return int(pl.scan_parquet(path).select(pl.len()).collect().item())


def _kernel(path: Path) -> str:
    """Op-replays per second of the kernel alone."""
    import tracekit as library
    from tracekit.analysis.whatif.scenario import ORIGINAL, RECORDED

    replay = library.load(path).replay
    rows = []
    for threads in (1, 2):
        for name, scenario in (("original", ORIGINAL), ("with launch delays", RECORDED)):
            replay.step_times(scenario, threads=threads)
            best = []
            for _ in range(9):
                began = time.perf_counter()
                replay.step_times(scenario, threads=threads)
                best.append(time.perf_counter() - began)
            best.sort()
            rate = replay.graph.ops / best[len(best) // 2]
            rows.append([name, str(threads), f"{best[len(best) // 2] * 1e3:.1f}", f"{rate / 1e9:.2f}"])
    return "Replay of the 8,192-worker job alone, step times only.\n\n" + table(
        ["scenario", "threads", "ms", "1e9 op-replays/s"], rows
    )
