"""Times that `tracekit collect` records on a real GPU, against torch's profiler, and the cost of recording them.

One GPU, one process: a loop of large matrix products, so that the sum of its kernels is the time of its ops. Prints one
line if torch finds no CUDA device.
"""

import json
import subprocess
import sys
import tempfile
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import per_call_us, table

SCRIPT = Path(__file__).with_name("gpu_train.py")
STEPS, FIRST, LAST = 40, 20, 29
OVERHEAD_STEPS = 400
QUICK = {"STEPS": 12, "FIRST": 4, "LAST": 6, "OVERHEAD_STEPS": 40}
#: Ops between two drains of the device clock.
OPS_PER_STEP = 100
TIMEOUT_S = 900
#: Calls that make the host wait for the device.
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
COMPUTES = ("forward-compute", "backward-compute", "optimizer")


@dataclass(frozen=True)
class Profiled:
    """Some steps in torch's profiler: milliseconds of kernels and copies, and counts of waiting calls."""

    kernels_ms: float
    waits: dict[str, int]


def section() -> str | None:
    """The Markdown of this section; None if there is no CUDA device."""
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
        op_us, reading_us = _costs_us(Path(folder))
    rows += [
        ["one op with its two events, drained", f"{op_us:.2f} us", "", ""],
        ["reading the clock, once in 10 s", f"{reading_us:.0f} us", "", ""],
    ]
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    intro = f"{versions}. Steps {FIRST} to {LAST} of a loop of matrix products under `tracekit collect`."
    return f"## One GPU\n\n{intro}\n\n{table(['what', 'measured', 'expected', 'holds'], rows)}"


def _costs_us(folder: Path) -> tuple[float, float]:
    """Microseconds of the training thread for one op on the device clock, and for one reading of that clock."""
    import torch

    from tracekit.collectors.record.device import DeviceClock
    from tracekit.collectors.record.recorder import Recorder
    from tracekit.collectors.record.session import Session
    from tracekit.collectors.record.wire_format import RuntimeOptions

    options = RuntimeOptions(ring_capacity=1 << 22)
    recorder = Recorder(folder, 0, 0, options)
    session = Session(recorder, options, rank=0, world_size=1, attempt=0)
    session.start()
    clock = DeviceClock(
        torch.cuda, recorder.add, lambda _: None, opened=session.device_opened, failed=session.device_failed
    )
    session.use_device(clock, lambda _: types.SimpleNamespace(begin=lambda: None, close=lambda: None))
    clock.tick()

    def step() -> None:
        for _ in range(OPS_PER_STEP):
            start = session.begin_op()
            session.record_compute("forward-compute", start, session.instant(), 0, 0)
        clock.tick()

    op_us = per_call_us(step, calls=200, rounds=5) / OPS_PER_STEP
    reading_us = per_call_us(clock._read_clock, calls=2000, rounds=5)
    session.close()
    return op_us, reading_us


def measured(folder: Path) -> list[list[str]]:
    """Rows of name, measured, expected and holds, from four runs of the script."""
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
            "recording, share of a step",
            f"{cost['share']:+.2%} (error {cost['error']:.2%})",
            "at most 1 % beyond the noise",
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
    under = [sys.executable, "-m", "tracekit", "collect", "--out", str(out), "--no-store", "--json", *options, "--"]
    printed = _run([*under, sys.executable, str(SCRIPT), *arguments])
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"exit_code"')))


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def _holds(yes: bool) -> str:
    return "yes" if yes else "**no**"
