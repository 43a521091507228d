"""Runs scripts one after the other, each in forks of this process, which has imported torch: one start for all.

Each argument is one run: `NAME=value ... script.py argument ...`. With RANKS=2 it has two ranks that find each other as
torchrun's do, and where one fails the others are sent SIGTERM, as torchrun does. SABOTAGE=... breaks something first
(`sabotage/sitecustomize.py`). Each run is an attempt, as an elastic restart is, with a trace of its own. What a rank
prints is in `<run>-<rank>.out` and `.err`, its exit code in `.exit`.
"""

import atexit
import gc
import os
import runpy
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.utils.data  # noqa: F401

HERE = Path(__file__).parent
SABOTAGE = HERE.parent / "sabotage" / "sitecustomize.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become(number, rank, variables, words):
    """Make this fork rank `rank` of run number `number`; returns the script it is to run."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    os.environ.update(variables)
    if "WORLD_SIZE" in variables:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    for descriptor, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{number}-{rank}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
    if "WORLD_SIZE" not in variables:
        warnings.simplefilter("error", UserWarning)
    if "SABOTAGE" in variables:
        os.environ["SITECUSTOMIZE_SAYS"] = os.devnull
        runpy.run_path(str(SABOTAGE))
    path = str(HERE / words[0])
    sys.argv[:] = [path, *words[1:], f"run-{number}"]  # no restart of the run before
    return path


def fork(*run):
    """Start one rank; returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        runpy.run_path(become(*run), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to tear down what was imported takes longer than the run


def run(number, words):
    """Run number `number`, to the end of all its ranks."""
    variables = dict(word.split("=", 1) for word in words if "=" in word.split(".py")[0])
    words = words[len(variables) :]
    ranks = int(variables.pop("RANKS", "1"))
    if ranks > 1:
        variables |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = {fork(number, rank, variables, words): rank for rank in range(ranks)}
    while running:
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        Path(f"{number}-{running.pop(process)}.exit").write_text(str(code))
        if code:
            for other in running:
                os.kill(other, signal.SIGTERM)


gc.freeze()
for number, text in enumerate(sys.argv[1:]):
    run(number, text.split())
