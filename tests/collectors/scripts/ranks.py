"""Starts a script once per rank, as torchrun does; asked to end, kills all at once: ranks.py RANKS SCRIPT ..."""

import os
import signal
import socket
import subprocess
import sys

ranks = int(sys.argv[1])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
processes = [
    subprocess.Popen(
        [sys.executable, *sys.argv[2:]],
        env=os.environ
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    for rank in range(ranks)
]


def end(*_):
    for process in processes:
        process.kill()


signal.signal(signal.SIGTERM, end)
sys.exit(max(abs(process.wait()) for process in processes))
