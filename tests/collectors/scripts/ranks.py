"""Runs a script on several ranks, as torchrun does; asked to end, kills all at once: ranks.py RANKS SCRIPT ...

The ranks are forks of this process, which has imported torch: that takes longer than to train a few steps.
"""

import atexit
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch

count, words = int(sys.argv[1]), sys.argv[2:]
if "DistributedDataParallel" in Path(words[0]).read_text():
    import torch._dynamo  # noqa: F401  which that one imports, too
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]


def fork(rank):
    """Start one rank; returns its process id."""
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv[:] = words
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as the interpreter does
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


processes = [fork(rank) for rank in range(count)]


def end(*_):
    for process in processes:
        os.kill(process, signal.SIGKILL)


signal.signal(signal.SIGTERM, end)
sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])) for process in processes))
