"""Whether a tracker that hangs slows a training job: `python -m benchmarks tracker-live ROUNDS FOLDER`.

The job is `tests/collectors/scripts/dp2_pp2.py` on 4 ranks with `tracekit collect --live`, without a tracker and with
MLflow at an address that accepts connections and never answers, alternated. Prints the step times of the windows.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import tracekit
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import margins
from tracekit.sources.load import load_from_store
from tracekit.store import Store

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "collectors" / "scripts" / "dp2_pp2.py"
STEPS, FORWARD_MS, WINDOW = 500, 5.0, 50


def recorded(folder: Path, name: str, *log: str) -> Floats:
    """Run the job, and return its recorded steps, seconds."""
    store = folder / f"{name}.store"
    command = tracekit("collect", "--live", "--store", str(store), "--name", name, "--window-steps", str(WINDOW), *log)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "4", str(SCRIPT)]
    environment = os.environ | {"STEPS": str(STEPS), "DEVICE_MS": str(FORWARD_MS), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run([*command, "--", *torchrun], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "--log" in line]
    print(f"{name}: exit code {done.returncode}, {time.monotonic() - began:.0f} s", *lines, sep="; ", flush=True)
    return recorded_steps(store, name)


def recorded_steps(store: Path, name: str) -> Floats:
    """The recorded steps of all windows of a job, seconds."""
    windows = [window.number for window in Store(store).windows(name)]
    jobs = (load_from_store(name, store=store, window=number) for number in windows)
    return np.concatenate([job.replay.recorded_step_times() for job in jobs])


def main(arguments: list[str]) -> None:
    """Print the mean step of each run, and the difference over all rounds with its interval."""
    means = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = ("--log", f"mlflow:http://127.0.0.1:{silent.getsockname()[1]}")
        for number in range(int(arguments[0])):
            pair = []
            for log in ((), tracker) if number % 2 else (tracker, ()):
                steps_s = recorded(Path(arguments[1]), f"{number}-{'hanging' if log else 'none'}", *log)
                pair.append((bool(log), float(np.median(steps_s))))
                print(f"  {len(steps_s)} steps, median {1e3 * pair[-1][1]:.1f} ms", flush=True)
            means.append([median for _, median in sorted(pair)])
    without, hanging = np.array(means).T
    margin = float(margins((hanging - without)[:, None], 1)[0])
    print(f"hanging - without: {1e3 * (hanging - without).mean():+.1f} ms ± {1e3 * margin:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
