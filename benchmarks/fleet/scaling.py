"""One process, two, and a Ray cluster of two on this machine, in turns; the same bytes from all."""

import shutil
from importlib.util import find_spec
from statistics import median

import polars as pl

from benchmarks.fleet.common import KEPT, Watched, described, first_jobs, fleet_run, said, tables, truth, watched
from benchmarks.fleet.runs import makespan
from benchmarks.measure import table

JOBS, ROUNDS = 300, 3
WAYS = {"1 process": (1, ()), "2 processes": (2, ()), "Ray, 2 processors": (2, ("--ray",))}


def section() -> str | None:
    """None without Ray."""
    if find_spec("ray") is None:
        said("fleet_scaling needs Ray: make test-fleet installs it")
        return None
    jobs = first_jobs(JOBS)
    names = [path.stem for path in jobs.iterdir()]
    runs: dict[str, list[tuple[Watched, float]]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        for way, (processes, more) in WAYS.items():
            out, timings = KEPT / f"by-{processes}{'-ray' * bool(more)}", KEPT / "timings-scaling.csv"
            shutil.rmtree(out, ignore_errors=True)
            run = watched(fleet_run(jobs, out, "--timings", str(timings), *more, processes=processes))
            runs[way].append((run, _alone_s(run, pl.read_csv(timings), processes)))
            said(f"round {number}: {way}, {run.wall_s:.0f} s")
    studies = [tables(KEPT / name) for name in ("by-1", "by-2", "by-2-ray")]
    assert all(study == studies[0] for study in studies), "the studies differ"
    rows = [_row(way, found) for way, found in runs.items()]
    words = (
        f"Medians of {ROUNDS} rounds in turns; all made the same bytes. Alone: what the CPU seconds that were counted"
        " come to on a machine where nothing else runs: those of the tasks, largest first on so many processes, then"
        " all others (starting, finding sources, writing tables) as if nothing of them ran side by side. Ray also waits"
        " while it starts and stops, which takes no processor time: see its s."
    )
    return "\n\n".join(
        [
            "## Fleets: processes and Ray",
            described(truth().filter(pl.col("name").is_in(names))),
            table(_HEADS, rows),
            words,
        ]
    )


_HEADS = ["fleet run", "s", "CPU s", "alone, s", "MB in all", "load of the 2 cores"]


def _alone_s(run: Watched, tasks: pl.DataFrame, processes: int) -> float:
    seconds = tasks["cpu_s"].to_list()
    return makespan(seconds, processes, 0.0) + max(run.cpu_s - sum(seconds), 0.0)


def _row(way: str, found: list[tuple[Watched, float]]) -> list[str]:
    runs, alone = [run for run, _ in found], [seconds for _, seconds in found]
    return [
        way,
        f"{median(run.wall_s for run in runs):.0f}",
        f"{median(run.cpu_s for run in runs):.0f}",
        f"{median(alone):.0f}",
        f"{max(run.peak_mb for run in runs):,.0f}",
        f"{median(run.load for run in runs):.1f}",
    ]
