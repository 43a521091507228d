"""Runs scripts one after the other, each in a fork of this process, which has imported torch: one start for all.

Each argument is one run: `NAME=value ... script.py argument ...`; where ranks meet, with a MASTER_PORT of its own. Each
run is an attempt, as an elastic restart is, with a trace of its own. What it prints is in `<run>-<rank>.out` and
`.err`, its exit code in `.exit`.
"""

import atexit
import gc
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.utils.data  # noqa: F401

HERE = Path(__file__).parent
RANK = os.environ.get("RANK", "0")


def become(number, words):
    """Make this fork run number `number`; returns the script it is to run."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the run's own, on the port it was given
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        os.environ[name] = value
    for descriptor, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{number}-{RANK}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
    path = str(HERE / words[0])
    sys.argv[:] = [path, *words[1:]]
    return path


gc.freeze()
for number, run in enumerate(sys.argv[1:]):
    process = os.fork()
    if process == 0:
        code = 1
        try:
            runpy.run_path(become(number, run.split()), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)  # to tear down what was imported takes longer than the run
    _, status = os.waitpid(process, 0)
    Path(f"{number}-{RANK}.exit").write_text(str(os.waitstatus_to_exitcode(status)))
