"""What the parts share: the simulated jobs, the command, and a command watched with all its processes."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from benchmarks.measure import tracekit

JOBS = 3000
SEED, MEMORY = 7, "2500M"
#: What is dear to make stays here.
KEPT = Path(__file__).parents[2] / "build" / "fleet"
#: From one look at the processes of a command to the next.
_LOOK_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def simulated() -> Path:
    """The folder of the simulated fleet, made if it is not there."""
    folder = KEPT / f"jobs-{JOBS}"
    if not (folder / "truth.csv").exists():
        command = tracekit("synth-fleet", "--out", str(folder), "--jobs", str(JOBS), "--seed", str(SEED))
        subprocess.run([*command, "--processes", str(len(os.sched_getaffinity(0)))], check=True, capture_output=True)
    return folder


def first_jobs(count: int) -> Path:
    """A folder with links to so many of the jobs, the same mix of sizes: roles are dealt out in random order."""
    folder = KEPT / f"jobs-{count}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(simulated().glob("*.parquet"))[:count]:
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path)
    return folder


def truth() -> pl.DataFrame:
    """What is true of each simulated job."""
    return pl.read_csv(simulated() / "truth.csv")


def described(jobs: pl.DataFrame) -> str:
    """Which jobs these rows of `truth` are."""
    return (
        f"{jobs.height:,} jobs of `tracekit synth-fleet --jobs {JOBS} --seed {SEED}`: {jobs['workers'].min()} to"
        f" {jobs['workers'].max():,} workers, {(jobs['workers'] > 1024).mean():.1%} of them above 1,024."
    )


def fleet_run(jobs: Path, out: Path, *more: str, processes: int = 2) -> tuple[str, ...]:
    """The command that makes a study."""
    options = ("--out", str(out), "--processes", str(processes), "--memory", MEMORY, *more)
    return tracekit("fleet", "run", str(jobs), *options)


@dataclass(frozen=True, slots=True)
class Watched:
    """Seconds of wall-clock time, of processor time and the largest sum of proportional set sizes of a command and all
    that descends from it. `load`: of the machine meanwhile, its mean number of processes that are ready to run.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    load: float


def watched(command: tuple[str, ...]) -> Watched:
    """Run a command to its end. Raises CalledProcessError."""
    began, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_kb, spent, loads = 0, dict[int, float](), list[float]()
    while process.poll() is None:
        found = descendants(process.pid)
        peak_kb = max(peak_kb, sum(map(_proportional_kb, found)))
        spent |= {pid: seconds for pid in found if (seconds := _cpu_s(pid)) is not None}
        loads.append(os.getloadavg()[0])
        time.sleep(_LOOK_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    after = os.times()
    waited_for = after.children_user + after.children_system - before.children_user - before.children_system
    # Processes that nobody waits for, such as those of Ray, are in what was seen of them alone.
    cpu_s = max(waited_for, sum(spent.values()))
    return Watched(time.monotonic() - began, cpu_s, peak_kb / 1024, sum(loads) / max(len(loads), 1))


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += descendants(int(child))
    return found


def _proportional_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tables(study: Path) -> dict[str, bytes]:
    """Every file of a study's tables."""
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in sorted(study.glob("*/*.parquet"))}


def said(words: str) -> None:
    """Tell whoever waits how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)
