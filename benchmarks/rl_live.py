"""What `tracekit.rl` costs, and whether the prices that `tracekit rl` states come true in real loops."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import table, tracekit
from benchmarks.rl_loop import SLOTS

#: Calls per measurement, fewer than the queue holds.
CALLS = 50_000
STEPS = 10
SEEDS = (1, 2)
QUICK = {"CALLS": 1_000, "STEPS": 5, "SEEDS": (1,)}
#: What is priced from the synchronous loop, and the options of the loop that does it.
SCENARIOS = {"staleness=1": ("--staleness", "1"), "partial=0.9": ("--share", "0.9")}


def section() -> str:
    """The Markdown of this section."""
    loads, costs, loops = [os.getloadavg()[0]], _costs(), _loops()
    loads.append(os.getloadavg()[0])
    return f"""## Real loops of RL post-training

CPU time of a call of `tracekit.rl`: in the thread that calls, and in all threads, with the one that writes.

{costs}

Loops whose engines are processes that sleep for each decoding step (`benchmarks/rl_loop.py`): {STEPS} steps of 24
requests on 2 engines of {SLOTS} slots, recorded with `tracekit.rl`. The first figure is the price that `tracekit rl`
states from the recording of the synchronous loop, the second what the other loop takes. Load average {loads[0]:.1f}
before and {loads[1]:.1f} after, on {os.cpu_count()} cores.

{loops}"""


def _costs() -> str:
    rows = []
    for state, folder in (("not recording", ""), ("recording", "folder")):
        for call in (
            "with rl.phase('train', step=i): pass",
            "rl.trajectory('a', step=i, engine='e', submit=1.5, tokens=i)",
        ):
            with tempfile.TemporaryDirectory() as temporary:
                environment = {**os.environ, "TRACEKIT_RL": folder and temporary}
                command = [sys.executable, "-c", _TIMED.format(call=call, calls=CALLS)]
                ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            own, everything = map(float, ran.stdout.split())
            rows.append([call.split("(")[0].removeprefix("with "), state, f"{own:.2f} us", f"{everything:.2f} us"])
    return table(["call", "", "calling thread", "all threads"], rows)


#: The process flushes before it has ended, so all threads have done their work when its time is read.
_TIMED = """
import time
from tracekit import rl
from multiprocessing import util
began, all_began = time.thread_time(), time.process_time()
for i in range({calls}):
    {call}
own = time.thread_time() - began
util._run_finalizers(0)
print(own / {calls} * 1e6, (time.process_time() - all_began) / {calls} * 1e6)
"""


def _loops() -> str:
    rows = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            loops = {name: Path(folder) / name for name in ("sync", *SCENARIOS)}
            # Side by side, because the load of the machine delays them all.
            running = [_start(loops[name], seed, *SCENARIOS.get(name, ())) for name in loops]
            if any(loop.wait() for loop in running):
                raise RuntimeError("a loop has failed")
            asked = [word for scenario in SCENARIOS for word in ("--what-if", scenario)]
            report = _report(loops["sync"], "--slots", str(SLOTS), *asked)
            for row in report["what_if"]:
                price, measured = row["step_s"], _report(loops[row["scenario"]])["step_s"]
                seconds = [f"{value:.3f} s" for value in (report["step_s"], price, measured)]
                rows.append([str(seed), row["scenario"], *seconds, f"{price / measured - 1:+.1%}"])
    return table(["seed", "what if", "synchronous step", "price", "measured", "error"], rows)


def _start(folder: Path, seed: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.rl_loop", str(folder), "--steps", str(STEPS), "--seed", str(seed)]
    return subprocess.Popen([*command, *options])


def _report(folder: Path, *options: str) -> dict[str, Any]:
    ran = subprocess.run(tracekit("rl", str(folder), *options, "--json"), capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)
