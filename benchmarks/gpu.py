"""Whether what `tracekit collect` says of a real GPU is true: against torch's profiler, and what it costs.

One GPU, one process: a loop of large matrix products, so that the sum of its kernels is the time of its ops. Runs where
torch finds a CUDA device and says so where it does not.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.device import costs_us
from benchmarks.measure import table

SCRIPT = Path(__file__).with_name("gpu_train.py")
STEPS, FIRST, LAST = 40, 20, 29
OVERHEAD_STEPS = 400
TIMEOUT_S = 900
#: Calls that make the host wait for the device.
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
COMPUTES = ("forward-compute", "backward-compute", "optimizer")


@dataclass(frozen=True)
class Profiled:
    """What torch's profiler saw in a few steps: milliseconds of kernels and of copies, and waiting calls."""

    kernels_ms: float
    waits: dict[str, int]


def section() -> str | None:
    """The Markdown of this section; None, with one line, where there is no CUDA device."""
    try:
        import torch
    except ImportError:
        print("gpu: not measured, torch is not installed (extra `torch`)")
        return None
    if not torch.cuda.is_available():
        print(
            "gpu: not measured, torch finds no CUDA device here; run `python -m benchmarks gpu` on a machine with one"
        )
        return None
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
        costs = costs_us(Path(folder), torch.cuda)
    rows += [
        ["one op with its two events, drained", f"{costs[1]:.2f} us", "", ""],
        ["reading the clock, once in 10 s", f"{costs[2]:.0f} us", "", ""],
    ]
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    intro = f"{versions}. Steps {FIRST} to {LAST} of a loop of matrix products under `tracekit collect`."
    return f"## One GPU\n\n{intro}\n\n{table(['what', 'measured', 'expected', 'holds'], rows)}"


def measured(folder: Path) -> list[list[str]]:
    """Rows of what, measured, expected and whether it holds, from four runs of the script."""
    profile = [str(STEPS), str(FIRST), str(LAST)]
    _run([sys.executable, str(SCRIPT), *profile, str(folder / "plain.json")])
    _collect(folder / "profiled.parquet", [*profile, str(folder / "collected.json")])
    plain, collected = read_profile(folder / "plain.json"), read_profile(folder / "collected.json")
    ops_ms = _ops_ms(folder / "profiled.parquet")
    off = sum(ops_ms.values()) / collected.kernels_ms - 1
    added = {name: count - plain.waits.get(name, 0) for name, count in collected.waits.items()}
    summary = _collect(folder / "overhead.parquet", [str(OVERHEAD_STEPS)], "--overhead")
    cost = summary["attempts"][-1]["cost"]
    clock = _metadata(folder / "overhead.parquet")["device_clock"]["ranks"]["0"]
    allowed = 0.01 + cost["error"]
    rows = [[f"{kind}, {LAST - FIRST + 1} steps", f"{ms:.2f} ms", "", ""] for kind, ms in ops_ms.items()]
    return [
        *rows,
        ["kernels by torch.profiler", f"{collected.kernels_ms:.2f} ms", "", ""],
        ["ops over kernels", f"{off:+.2%}", "within 2 %", _holds(abs(off) <= 0.02)],
        ["waiting calls added", str(sum(added.values())), "0", _holds(sum(added.values()) <= 0)],
        [
            "step time, recording over not",
            f"{cost['share']:.4f} (error {cost['error']:.4f})",
            "at most 1.01 beyond the noise",
            _holds(cost["share"] <= allowed),
        ],
        ["clock: uncertainty", f"{clock['uncertainty_ns'] / 1e3:.1f} us", "", ""],
        ["clock: drift", f"{clock['drift'] * 1e6:+.2f} ppm, {clock['readings']} readings", "", ""],
    ]


def read_profile(path: Path) -> Profiled:
    """Sum up a Chrome trace of torch's profiler."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels_us = sum(one["dur"] for one in events if one.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"))
    waits = Counter(one["name"] for one in events if one.get("cat") == "cuda_runtime" and one["name"] in WAITING)
    return Profiled(kernels_us / 1e3, dict(waits))


def _ops_ms(path: Path) -> dict[str, float]:
    """Milliseconds of each kind of compute in the profiled steps."""
    import polars as pl

    ops = pl.read_parquet(path).filter(pl.col("step").is_between(FIRST, LAST))
    return {kind: ops.filter(pl.col("kind") == kind)["duration"].sum() * 1e3 for kind in COMPUTES}


def _metadata(path: Path) -> dict:
    from tracekit.trace.canonical import read_parquet

    return dict(read_parquet(path).metadata)


def _collect(out: Path, arguments: list[str], *options: str) -> dict:
    """Run the script under `tracekit collect`; its summary."""
    under = [sys.executable, "-m", "tracekit.collectors", "--out", str(out), "--no-store", "--json", *options, "--"]
    printed = _run([*under, sys.executable, str(SCRIPT), *arguments])
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"exit_code"')))


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def _holds(yes: bool) -> str:
    return "yes" if yes else "**no**"
