"""A run over the whole fleet, a run with nothing to do, the truth measured back, and a thousand cores simulated."""

import heapq
import random
import shutil

import polars as pl

from benchmarks.fleet.common import JOBS, KEPT, described, fleet_run, simulated, truth, watched
from benchmarks.measure import measure, table
from tracekit.fleet.figures import counted_jobs
from tracekit.fleet.study import Study

STUDY, TIMINGS = KEPT / "study", KEPT / "timings.csv"
MANY, CORES = 100_000, 1000
#: Until a process of an executor can work, seconds of a core.
_START_S = 2.0


def section() -> str:
    """The run, with what becomes of its study."""
    jobs = simulated()
    shutil.rmtree(STUDY, ignore_errors=True)
    run = watched(fleet_run(jobs, STUDY, "--timings", str(TIMINGS)))
    again = measure(*fleet_run(jobs, STUDY), runs=3, warm_up=1)
    tasks = pl.read_csv(TIMINGS)
    analysis = tasks["analyse_cpu_s"].sum() / run.cpu_s
    rows = [
        [f"{JOBS:,} jobs", f"{run.wall_s:,.0f}", f"{run.cpu_s:,.0f}", f"{run.peak_mb:,.0f}", f"{analysis:.0%}",
         f"{run.load:.1f}"],
        ["nothing to do", f"{again.wall_s:.1f}", f"{again.cpu_s:.1f}", f"{again.peak_mb:,.0f}", "-", "-"],
    ]  # fmt: skip
    heads = ["fleet run, 2 processes", "s", "CPU s", "MB in all", "analysis, of CPU", "load of the 2 cores"]
    size = sum(path.stat().st_size for path in STUDY.glob("*/*.parquet")) / JOBS / 1000
    spent = tasks.select(pl.col("read_s", "analyse_s", "write_s").sum()).row(0)
    words = (
        f"Of the wall-clock time of the tasks {spent[1] / sum(spent):.0%} is analysis. {_alone(tasks, run.cpu_s)} MB in"
        " all: the largest sum of proportional set sizes of all processes."
        f" The study takes {size:.1f} kB a job."
    )
    return "\n\n".join(
        ["## Fleets: a run", described(truth()), table(heads, rows), words, _measured_back(), _cores(tasks)]
    )


def _alone(tasks: pl.DataFrame, cpu_s: float) -> str:
    """What the processor time of a run comes to on a machine where nothing else runs."""
    seconds = tasks["cpu_s"].to_list()
    one, two = (makespan(seconds, processes, 0.0) + max(cpu_s - sum(seconds), 0.0) for processes in (1, 2))
    return (
        f"By processor time, all but the tasks one after the other: {two:,.0f} s with two processes, {one:,.0f} s with"
        f" one, {one / two:.2f} times as long."
    )


def _measured_back() -> str:
    """Shares and sums of the study beside those of the truth."""
    known = truth()
    jobs = counted_jobs(Study(STUDY)).join(known, on="name", suffix="_true")
    hours = float(known["gpu_hours"].sum())
    rows = []
    for name, found, true in (
        ("all", jobs, known),
        *((f"team {team}", jobs.filter(team=team), known.filter(team=team)) for team in sorted(set(known["team"]))),
        *((f"{gpus:,} GPUs", jobs.filter(gpus=gpus), known.filter(gpus=gpus)) for gpus in sorted(set(known["gpus"]))),
    ):
        lost, lost_true = float(found["lost_gpu_hours"].sum()), float(true["lost_gpu_hours"].sum())
        share, share_true = found["straggling"].sum() / JOBS, true["straggling"].sum() / JOBS
        rows.append([name, f"{true.height:,}", f"{found.height:,}", f"{share_true:.2%}", f"{share:.2%}",
                     f"{lost_true:,.0f}", f"{lost / lost_true - 1:+.3%}"])  # fmt: skip
    heads = ["jobs", "in truth", "counted", "straggling, of all: in truth", "measured", "GPU-hours lost in truth",
             "measured"]  # fmt: skip
    apart = float((jobs["slowdown"] - jobs["slowdown_true"]).abs().max())
    words = f"S of no job differs from the truth by more than {apart:.1e}; {hours:,.0f} GPU-hours in all."
    return f"{table(heads, rows)}\n\n{words}"


def _cores(tasks: pl.DataFrame) -> str:
    """What a thousand cores would make of a hundred thousand jobs, from measured times of tasks."""
    chosen = random.Random(0)
    seconds = chosen.choices(tasks["cpu_s"].to_list(), k=MANY)
    last = makespan(seconds, CORES, _START_S)
    return (
        f"Simulated: {MANY:,} jobs with the CPU seconds of these ({sum(seconds) / MANY:.2f} s in the mean, at most"
        f" {max(seconds):.0f} s), largest first, on {CORES:,} cores that need {_START_S:.0f} s to start: {last:.0f} s,"
        f" at {sum(seconds) / (CORES * last):.0%} efficiency. It leaves out what a shared storage and the driver, who"
        " writes the tables at the end on one core, add."
    )


def makespan(seconds: list[float], cores: int, start_s: float) -> float:
    """When the last task ends, where each core that is free takes the longest task that is left."""
    free = [start_s] * cores
    for one in sorted(seconds, reverse=True):
        heapq.heappushpop(free, free[0] + one)
    return max(free)
