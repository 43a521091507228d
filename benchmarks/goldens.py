"""Reports of a fixed set of jobs, to show that a change to the code changed no number.

python -m benchmarks goldens draw JOBS                       simulates the jobs into a new folder JOBS
python -m benchmarks goldens report JOBS REPORTS TRACEKIT    writes the JSON reports of a tracekit command into REPORTS
python -m benchmarks goldens diff REPORTS REPORTS            prints the differences of two versions

JOBS has the sample traces, one job of each case of the event-driven simulator, and folders of torch.profiler.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from judges import kinetosim
from judges.eventsim import CASES, draw_job, simulate
from judges.kinetosim import Trouble

SEED = 20_000_000
SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"
TROUBLES: dict[str, tuple[Trouble, ...]] = {
    "healthy": (),
    "slow-gpu": (Trouble(1, gpu=1.4),),
    "slow-host": (Trouble(2, host=1.8),),
    "late-input": (Trouble(1, input_us=1500.0),),
    "more-work": (Trouble(3, extra_kernels=40),),
    "gc": (Trouble(0, gc_us=1200.0),),
    "syncs": (Trouble(2, syncs=8),),
    "slow-link": (Trouble(3, link_us=900.0),),
    "one-step": (Trouble(1, pause_us=4000.0, only_step=1),),
    "two": (Trouble(1, gpu=1.2), Trouble(3, input_us=1000.0)),
}


def main(arguments: list[str]) -> None:
    """Run the verb with its folders."""
    verbs: dict[str, Callable[..., None]] = {"draw": draw, "report": report, "diff": diff}
    verb, *folders = arguments or [""]
    if verb not in verbs or len(folders) != {"draw": 1, "report": 3, "diff": 2}[verb]:
        sys.exit(__doc__)
    verbs[verb](*map(Path, folders))


def draw(jobs: Path) -> None:
    """Write every job into `jobs`."""
    jobs.mkdir(parents=True)
    for path in sorted(SAMPLES.glob("*.parquet")):
        shutil.copy(path, jobs / f"sample-{path.name}")
    shutil.copytree(SAMPLES / "gpu_slow_input", jobs / "sample-gpu_slow_input")
    for number, case in enumerate(CASES):
        simulate(draw_job(SEED + number, case)).trace.write_parquet(jobs / f"event-{case}.parquet")
    for number, (name, troubles) in enumerate(TROUBLES.items()):
        folder = jobs / f"gpu-{name}"
        folder.mkdir()
        kinetosim.Job(ranks=4, steps=3, layers=6, troubles=troubles, seed=SEED + number).run().write(folder)


def report(jobs: Path, reports: Path, tracekit: Path) -> None:
    """Write the report of the command `tracekit` on each job into `reports`."""
    reports.mkdir(parents=True)
    for path in sorted(jobs.iterdir()):
        done = subprocess.run([tracekit, "whatif", path, "--json"], capture_output=True, text=True, check=False)
        (reports / f"{path.stem}.json").write_text(done.stdout or json.dumps({"error": done.stderr}))


def diff(before: Path, after: Path) -> None:
    """Print each job whose report differs, and its first keys that do; exits with 1 if there is any."""
    changed = 0
    for name in sorted({path.name for folder in (before, after) for path in folder.iterdir()}):
        old, new = (_values(folder / name) for folder in (before, after))
        keys = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
        changed += bool(keys)
        if keys:
            print(f"{name}: {len(keys)} of {len(new)} values differ")
            for key in keys[:12]:
                print(f"    {key}: {str(old.get(key))[:100]} -> {str(new.get(key))[:100]}")
    print(f"{changed} reports differ")
    sys.exit(changed > 0)


def _values(path: Path) -> dict[str, object]:
    """Every value of a JSON file by its path; empty where there is no such file."""

    def leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
        if not isinstance(value, dict | list):
            yield place, value
            return
        nested = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in nested:
            yield from leaves(inner, f"{place}.{key}" if place else str(key))

    return dict(leaves(json.loads(path.read_text()), "")) if path.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1:])
