"""Studies of many jobs: time, memory, processes that are killed, reports on 100,000 jobs, a thousand cores."""

import heapq
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import polars as pl

from benchmarks.measure import measure, table, tracekit
from tracekit.fleet.study import Study
from tracekit.fleet.tables import BY_JOB, STUDY_VERSION, TABLES

JOBS, REPORTED, CORES = 200, 100_000, 1000
WORKER_KILLS, DRIVER_KILLS = 20, 5
MEMORY = "2500M"
#: Until a process of an executor can work, seconds of a core.
_START_S = 2.0
#: From one look at memory to the next.
_LOOK_S = 0.2


def section() -> str:
    """Everything, on a simulated fleet of JOBS jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(tracekit("synth-fleet", "--out", str(folder / "jobs"), "--jobs", str(JOBS), "--seed", "7"),
                       check=True, capture_output=True)  # fmt: skip
        truth = pl.read_csv(folder / "jobs" / "truth.csv")
        size = (
            f"{JOBS} jobs of `tracekit synth-fleet --seed 7`: {truth['workers'].min()} to {truth['workers'].max():,}"
            f" workers, {(truth['workers'] > 1024).mean():.0%} above 1,024.\n\n"
        )
        parts = [size, _runs(folder), _truth(folder, truth), _faults(folder), _reports(folder), _cores(folder)]
    return "## Fleets\n\n" + "\n\n".join(part.strip() for part in parts)


def _command(folder: Path, out: str, processes: int, *more: str) -> tuple[str, ...]:
    return tracekit("fleet", "run", str(folder / "jobs"), "--out", str(folder / out), "--processes", str(processes),
                    "--memory", MEMORY, *more)  # fmt: skip


def _runs(folder: Path) -> str:
    """Time and memory with one process and two, and of a run with nothing to do."""
    rows = []
    for processes in (1, 2):
        timings = folder / f"timings{processes}.csv"
        wall, cpu, peak = _watched(_command(folder, f"study{processes}", processes, "--timings", str(timings)))
        spent = pl.read_csv(timings).select(pl.col("read_s", "analyse_s", "write_s").sum()).row(0)
        share = spent[1] / sum(spent)
        rows.append([f"{processes} processes", f"{wall:.0f}", f"{cpu:.0f}", f"{peak:,.0f}", f"{share:.0%}"])
    assert _tables(folder / "study1") == _tables(folder / "study2")
    again = measure(*_command(folder, "study2", 2), runs=3, warm_up=1)
    rows.append(["nothing to do", f"{again.wall_s:.1f}", f"{again.cpu_s:.1f}", f"{again.peak_mb:,.0f}", "-"])
    size = sum(path.stat().st_size for path in (folder / "study2").glob("*/*.parquet"))
    words = f"The study takes {size / JOBS / 1000:.1f} kB a job; both runs made the same bytes."
    heads = ["fleet run", "s", "CPU s", "MB in all", "analysis, of the time of tasks"]
    return f"{table(heads, rows)}\n\n{words} MB in all: the largest sum of proportional set sizes."


def _watched(command: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall-clock time, processor time and the largest memory of a command and all its descendants."""
    began, before = time.monotonic(), os.times()
    process, peak = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), 0
    while process.poll() is None:
        peak = max(peak, sum(map(_proportional_kb, _descendants(process.pid))))
        time.sleep(_LOOK_S)
    assert process.returncode == 0, command
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, cpu, peak / 1024


def _descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += _descendants(int(child))
    except OSError:  # ended meanwhile
        pass
    return found


def _proportional_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _truth(folder: Path, truth: pl.DataFrame) -> str:
    """The study against what is true."""
    jobs = Study(folder / "study2").read("jobs").join(truth, on="name", suffix="_true")
    assert jobs.height == JOBS
    apart = (jobs["slowdown"] - jobs["slowdown_true"]).abs().max()
    lost = jobs["lost_gpu_hours"].sum() / jobs["lost_gpu_hours_true"].sum() - 1
    return (
        f"Measured back: {jobs['straggling'].mean():.1%} of jobs straggle ({truth['straggling'].mean():.1%} were set);"
        f" GPU-hours lost differ by {lost:+.3%} from the truth, S of no job by more than {apart:.1e}."
    )


def _faults(folder: Path) -> str:
    """Kill workers and drivers at random moments; the study must come out the same."""
    seed = random.SystemRandom().randrange(2**32)
    chosen = random.Random(seed)  # noqa: S311 - moments, no secrets
    workers = drivers = 0
    whole_s = measure(*_command(folder, "study1", 2), runs=1, warm_up=0).wall_s + 20
    while workers < WORKER_KILLS or drivers < DRIVER_KILLS:
        process = subprocess.Popen(_command(folder, "hit", 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + chosen.uniform(4, whole_s)
        while time.monotonic() < until and process.poll() is None:
            time.sleep(chosen.uniform(0, 2))
            below = _descendants(process.pid)[1:]
            if below and process.poll() is None:
                os.kill(chosen.choice(below), signal.SIGKILL)
                workers += 1
        if process.poll() is None:
            process.kill()
            drivers += 1
        if process.wait() == 0 and drivers < DRIVER_KILLS:  # it got to its end: begin anew
            _again(folder / "hit")
    for _ in range(2):  # what was killed twice is tried again
        subprocess.run(_command(folder, "hit", 2), check=True, capture_output=True)
    assert _tables(folder / "hit") == _tables(folder / "study2")
    return (
        f"{workers} times a worker and {drivers} times the driver were killed (SIGKILL, seed {seed}); then the study"
        " was the same, byte for byte."
    )


def _again(study: Path) -> None:
    """Forget half of the results, so that there is something to do."""
    for path in sorted(study.glob("*/part-[0-7].parquet")):
        path.unlink()


def _tables(study: Path) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in sorted(study.glob("*/*.parquet"))}


def _reports(folder: Path) -> str:
    """The report on many jobs: those of the study, many times under other digests."""
    large = folder / "large"
    copies = REPORTED // JOBS
    for name, schema in TABLES.items():
        (large / name).mkdir(parents=True)
        rows = Study(folder / "study2").read(name)
        for part, digit in enumerate("0123456789abcdef"):
            numbers = range(part, copies, 16)
            if name not in BY_JOB and name != "sources":
                continue
            key = pl.col("job")
            many = [rows.with_columns(pl.format("{}{}", pl.lit(f"{digit}{number:03x}"), key.str.slice(4)).alias("job"))
                    for number in numbers]  # fmt: skip
            if name == "sources":
                many = [one.with_columns(source=pl.col("source") + pl.lit(f"#{number}")) for one, number in
                        zip(many, numbers, strict=True)]  # fmt: skip
            pl.concat(many).cast(schema).write_parquet(large / name / f"part-{digit}.parquet")
    (large / "tracekit-study").write_text(json.dumps({"study_version": STUDY_VERSION}))
    rows = []
    for words, more in (("terminal", ()), ("page", ("--html", str(folder / "fleet.html")))):
        run = measure(*tracekit("fleet", "report", str(large), *more), runs=3)
        rows.append([words, f"{run.wall_s:.1f}", f"{run.cpu_s:.1f}", f"{run.peak_mb:,.0f}"])
    return table([f"fleet report on {copies * JOBS:,} jobs", "s", "CPU s", "MB"], rows)


def _cores(folder: Path) -> str:
    """What a thousand cores would make of a hundred thousand jobs, from measured times of tasks: largest first."""
    taken = pl.read_csv(folder / "timings1.csv").select(pl.sum_horizontal("read_s", "analyse_s", "write_s")).to_series()
    chosen = random.Random(0)  # noqa: S311 - a simulation
    times = sorted(chosen.choices(taken.to_list(), k=REPORTED), reverse=True)
    free = [_START_S] * CORES
    for seconds in times:
        heapq.heappushpop(free, free[0] + seconds)
    last = max(free)
    return (
        f"Simulated: {REPORTED:,} jobs with these times, largest first, on {CORES:,} cores take {last:.0f} s, at"
        f" {sum(times) / (CORES * last):.0%} efficiency. It leaves out what a shared storage and the driver,"
        " who writes the tables at the end on one core, add."
    )
