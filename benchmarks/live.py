"""What traces of live jobs are good for on this machine: figures that depend on how busy it is, so no test asks.

Real jobs on gloo under `tracekit collect`: how far the replay misses the recording, what launch delays add, whether the
slowed rank is named, and how far S is from what the same job without the slow rank measures. And how DDP jobs end, with
and without `collect`.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import table

SCRIPTS = Path(__file__).parents[1] / "tests" / "collectors" / "scripts"
PIPELINE = {"STEPS": "25", "DEVICE_MS": "8"}
JOBS = {
    "DP 2 x PP 2, 1F1B": ("dp2_pp2.py", 4, PIPELINE),
    "the same, rank 3 slowed by 6 ms a forward": ("dp2_pp2.py", 4, {**PIPELINE, "SLOW_RANK": "3", "SLOW_MS": "6"}),
    "FSDP2 x interleaved pipeline": ("fsdp_interleaved.py", 4, {"STEPS": "12"}),
    "FSDP2, rank 1 slowed by 40 ms a layer": (
        "fsdp_alone.py", 2, {"STEPS": "12", "DEVICE_MS": "10", "SLOW_RANK": "1", "SLOW_MS": "40"},
    ),
    "DistributedDataParallel, 2 microbatches": ("ddp_accumulation.py", 4, {"STEPS": "20"}),
}  # fmt: skip
#: How often each job runs, and how often a job is started to see how it ends.
RUNS = 3
ENDS = 20
TIMEOUT_S = 300


def section() -> str:
    """Figures of live jobs, a row each, and how jobs ended."""
    if find_spec("torch") is None:
        return "## Live jobs\n\nNot measured: torch is not installed (extra `torch`)."
    rows, steps = [], {}
    for name, job in JOBS.items():
        verdicts = [_verdict(*job) for _ in range(RUNS)]
        steps[name] = statistics.median(verdict.recorded_s for verdict in verdicts)
        rows.append(
            [
                name,
                ", ".join(f"{verdict.trust.replay_error:.3f}" for verdict in verdicts),
                ", ".join(f"{verdict.trust.discrepancy:.3f}" for verdict in verdicts),
                ", ".join(f"{verdict.slowdown:.3f}" for verdict in verdicts),
                ", ".join(str(verdict.slowest_workers[0]) for verdict in verdicts),
            ]
        )
    healthy, slowed, *_ = steps.values()
    header = ["job", "replay error", "launch delays add", "S", "slowest worker"]
    return (
        f"## Live jobs\n\n{RUNS} runs of each on gloo, figures of every run.\n\n{table(header, rows)}\n\n"
        f"The slowed pipeline takes {slowed / healthy:.3f} times the step of the other, both as recorded.\n\n{_ends()}"
    )


def _verdict(script: str, ranks: int, variables: dict[str, str]):
    from tracekit.analysis.attribution.attribute import attribute
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.trace.canonical import read_parquet

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "job.parquet"
        under = [sys.executable, "-m", "tracekit.collectors", "--no-store", "--out", str(out), "--"]
        subprocess.run([*under, *_torchrun(script, ranks)], check=True, **_quiet(variables))
        return attribute(JobReplay.from_trace(read_parquet(out)))


def _ends() -> str:
    """How a short job ends, with and without `collect`: an exit code, or a hang."""
    command = _torchrun("ddp_accumulation.py", 2)
    under = [sys.executable, "-m", "tracekit.collectors", "--no-store", "--"]
    rows = []
    for name, prefix in (("alone", []), ("under `collect`", under)):
        ends: Counter[str] = Counter()
        for _ in range(ENDS):
            try:
                process = subprocess.run([*prefix, *command], check=False, **_quiet({"STEPS": "3"}))
                ends[f"exit code {process.returncode}"] += 1
            except subprocess.TimeoutExpired:
                ends["hang"] += 1
        rows.append([name, ", ".join(f"{count} x {end}" for end, count in ends.items())])
    return table(["two ranks of DistributedDataParallel", f"{ENDS} starts"], rows)


def _torchrun(script: str, ranks: int) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, str(SCRIPTS / script)]


def _quiet(variables: dict[str, str]) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": TIMEOUT_S}
