"""Studies of many jobs: a run over a simulated fleet against the truth, and reports on 100,000 jobs.

The simulated jobs and their study stay in build/fleet, since they take an hour.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from benchmarks.measure import cpu_s, descendants, measure, table, tracekit
from benchmarks.population import Population, write_fleet
from tracekit.fleet.figures import counted_jobs
from tracekit.fleet.study import PARTS, Study
from tracekit.fleet.study_tables import BY_JOB, STUDY_VERSION, TABLES

JOBS, SEED, MEMORY = 3000, 7, "2500M"
#: Jobs of the study that reports are made on: a smaller study, many times over.
REPORTED = 100_000
#: A cluster to extrapolate to, and seconds until a process of it can work.
MANY, CORES, START_S = 100_000, 1000, 2.0
QUICK = {"JOBS": 20, "REPORTED": 200, "MANY": 100}
KEPT = Path(__file__).parents[1] / "build" / "fleet"
#: Seconds between two looks at the processes of a command.
_LOOK_S = 0.5


def section() -> str:
    """The Markdown of this section."""
    jobs, study, timings = simulated(), KEPT / f"study-{JOBS}", KEPT / "timings.csv"
    shutil.rmtree(study, ignore_errors=True)
    run = watched(_fleet_run(jobs, study, "--timings", str(timings)))
    again = measure(*_fleet_run(jobs, study), runs=3, warm_up=1)
    tasks, truth = pl.read_csv(timings), pl.read_csv(jobs / "truth.csv")
    share = tasks["analyse_cpu_s"].sum() / run.cpu_s
    rows = [
        [f"{JOBS:,} jobs", f"{run.wall_s:,.0f}", f"{run.cpu_s:,.0f}", f"{run.peak_mb:,.0f}", f"{share:.0%}"],
        ["nothing new", *again.cells, "-"],
    ]
    intro = (
        f"{JOBS:,} jobs of benchmarks/population.py with seed {SEED}: {truth['workers'].min()} to"
        f" {truth['workers'].max():,} workers, {(truth['workers'] > 1024).mean():.1%} of them above 1,024. MB: the"
        " largest sum of proportional set sizes of all processes."
    )
    size = sum(path.stat().st_size for path in study.glob("*/*.parquet")) / JOBS / 1000
    header = ["fleet run, 2 processes", "s", "CPU s", "MB", "analysis, of CPU"]
    return "\n\n".join(
        [
            "## Fleets",
            intro,
            table(header, rows),
            f"The study takes {size:.1f} kB a job. {_on_a_cluster(tasks)}",
            _against_truth(Study(study), truth),
            _reports(Study(study)),
        ]
    )


def simulated() -> Path:
    """The folder of the simulated fleet; simulates it if it is not there."""
    folder = KEPT / f"jobs-{JOBS}"
    if not (folder / "truth.csv").exists():
        write_fleet(Population(JOBS, SEED), folder, len(os.sched_getaffinity(0)))
    return folder


def _fleet_run(jobs: Path, out: Path, *more: str) -> tuple[str, ...]:
    return tracekit("fleet", "run", str(jobs), "--out", str(out), "--processes", "2", "--memory", MEMORY, *more)


@dataclass(frozen=True, slots=True)
class Watched:
    """A command with all its processes: wall time and CPU time (s), largest sum of proportional set sizes (MB)."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def watched(command: tuple[str, ...]) -> Watched:
    """Run a command to its end. Raises CalledProcessError."""
    began, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_kb, spent = 0, dict[int, float]()
    while process.poll() is None:
        processes = descendants(process.pid)
        peak_kb = max(peak_kb, sum(map(_proportional_kb, processes)))
        spent |= {pid: seconds for pid in processes if (seconds := cpu_s(pid))}
        time.sleep(_LOOK_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    after = os.times()
    waited_for = after.children_user + after.children_system - before.children_user - before.children_system
    # Detached processes count only as far as they were looked at.
    return Watched(time.monotonic() - began, max(waited_for, sum(spent.values())), peak_kb / 1024)


def _proportional_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _against_truth(study: Study, truth: pl.DataFrame) -> str:
    jobs = counted_jobs(study).join(truth, on="name", suffix="_true")
    rows = []
    for name, measured, true in (
        ("all", jobs, truth),
        *((f"team {team}", jobs.filter(team=team), truth.filter(team=team)) for team in sorted(set(truth["team"]))),
        *((f"{gpus:,} GPUs", jobs.filter(gpus=gpus), truth.filter(gpus=gpus)) for gpus in sorted(set(truth["gpus"]))),
    ):
        lost, lost_true = float(measured["lost_gpu_hours"].sum()), float(true["lost_gpu_hours"].sum())
        share, share_true = measured["straggling"].sum() / JOBS, true["straggling"].sum() / JOBS
        rows.append([name, f"{true.height:,}", f"{measured.height:,}", f"{share_true:.2%}", f"{share:.2%}",
                     f"{lost_true:,.0f}", f"{lost / lost_true - 1 if lost_true else lost:+.3%}"])  # fmt: skip
    heads = ["jobs", "simulated", "counted", "straggling, of all jobs", "measured", "GPU-hours lost", "error"]
    apart = float((jobs["slowdown"] - jobs["slowdown_true"]).abs().max())
    return f"Against the truth; S of no job is off by more than {apart:.1e}:\n\n{table(heads, rows)}"


def _on_a_cluster(tasks: pl.DataFrame) -> str:
    seconds = random.Random(0).choices(tasks["cpu_s"].to_list(), k=MANY)
    last = makespan(seconds, CORES, START_S)
    return (
        f"By the CPU times of these tasks ({sum(seconds) / MANY:.2f} s on average, {max(seconds):.0f} s at most),"
        f" {MANY:,} jobs take {last:.0f} s on {CORES:,} cores, with {START_S:.0f} s to start and without the time of"
        " shared storage and of the driver's tables."
    )


def makespan(seconds: list[float], cores: int, start_s: float) -> float:
    """The end of the last task if each free core takes the longest task that is left."""
    free = [start_s] * cores
    for task_s in sorted(seconds, reverse=True):
        heapq.heappushpop(free, free[0] + task_s)
    return max(free)


def _reports(small: Study) -> str:
    large = KEPT / f"study-of-{REPORTED}"
    jobs = enlarge(small, large, REPORTED)
    rows = []
    for words, more in (("terminal", ()), ("HTML page", ("--html", str(KEPT / "fleet.html")))):
        rows.append([words, *measure(*tracekit("fleet", "report", str(large), *more), runs=3).cells])
    machines = Study(large).table("machines").select(pl.len()).collect().item()
    intro = f"A report on {jobs:,} jobs with {machines:,} rows of machines, the study above many times over:"
    return f"{intro}\n\n{table(['fleet report', 's', 'CPU s', 'MB'], rows)}"


def enlarge(small: Study, large: Path, wanted: int) -> int:
    """Write a study of at most `wanted` jobs, those of `small` under many digests; returns how many it has."""
    shutil.rmtree(large, ignore_errors=True)
    jobs = small.read("jobs").height
    copies = wanted // jobs
    for name in (*BY_JOB, "sources", "exclusions"):
        (large / name).mkdir(parents=True)
        rows = small.read(name)
        for part, digit in enumerate(PARTS):
            many = [_copy(rows, f"{digit}{number:03x}") for number in range(part, copies, len(PARTS))]
            pl.concat([rows.clear(), *many]).cast(TABLES[name]).sort("job").write_parquet(
                large / name / f"part-{digit}.parquet"
            )
    (large / "tracekit-study").write_text(json.dumps({"study_version": STUDY_VERSION}))
    return copies * jobs


def _copy(rows: pl.DataFrame, beginning: str) -> pl.DataFrame:
    """The same rows with other digests and sources."""
    copied = rows.with_columns(job=pl.lit(beginning) + pl.col("job").str.slice(len(beginning)))
    return copied.with_columns(source=pl.col("source") + f"#{beginning}") if "source" in rows.columns else copied
