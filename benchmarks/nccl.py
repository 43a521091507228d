"""What NCCL's events cost the job: each call into the plugin, and the one call per step from Python."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.measure import table

THREADS = (1, 2)
CALLS = 20_000


def section() -> str:
    """Cost per call of the C side by number of threads, and of the step's switch."""
    from tracekit.collectors.nccl import build

    title = "## NCCL profiler plugin\n\n"
    compiler = shutil.which("cc")
    if compiler is None:
        return f"{title}Not measured: no C compiler."
    sources = Path(build.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "calls"
        flags = [flag for flag in build.FLAGS if flag not in {"-shared", "-fPIC"}]
        source = Path(__file__).with_name("nccl_calls.c")
        subprocess.run([compiler, *flags, "-fPIC", "-I", sources, "-o", program, source, "-pthread"], check=True)
        costs = {threads: _calls(program, Path(folder) / str(threads), threads) for threads in THREADS}
        library = build.build_plugin(Path(folder))
        step_ns = _step_ns(library)
    rows = [[name, *(f"{costs[threads][name]:.0f}" for threads in THREADS)] for name in costs[THREADS[0]]]
    rows.append(["Python's switch of step and mask, once a step", f"{step_ns:.0f}", ""])
    header = ["call", *(f"ns, {threads} thread{'s' * (threads > 1)}" for threads in THREADS)]
    return (
        f"{title}Called as NCCL calls it, without a GPU: each writes one slot of 64 bytes into the thread's own lane,"
        " without a lock. A collective costs a start, a stop, and for every channel a start and a stop.\n\n"
        + table(header, rows)
    )


def _calls(program: Path, folder: Path, threads: int) -> dict[str, float]:
    """Call -> nanoseconds."""
    folder.mkdir()
    environment = {**os.environ, "TRACEKIT_COLLECT_DIR": str(folder), "TRACEKIT_NCCL_MASK": "0x46"}
    ran = subprocess.run([program, str(threads)], env=environment, check=True, capture_output=True, text=True)
    lines = (line.split("\t") for line in ran.stdout.splitlines())
    return {name: float(cost) for name, cost in lines}


def _step_ns(library: Path) -> float:
    """Nanoseconds of the call from Python, the best of some rounds."""
    set_step = ctypes.CDLL(str(library)).tracekit_nccl_set_step
    set_step.argtypes, set_step.restype = (ctypes.c_int32, ctypes.c_uint32), None
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter_ns()
        for step in range(CALLS):
            set_step(step, 0x46)
        best = min(best, (time.perf_counter_ns() - began) / CALLS)
    return best
