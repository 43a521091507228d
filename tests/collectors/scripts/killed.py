"""Two ranks record spans as fast as they can, each writing down how many in COUNTED-<rank>; then rank 1 kills itself.

Its launcher ends rank 0 with SIGTERM. HANDLER=1: rank 0 has its own handler, which says so and leaves with 9.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

from tracekit.collectors import span

dist.init_process_group("gloo")
rank = dist.get_rank()
parameter = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([parameter], lr=0.1)
if "HANDLER" in os.environ:

    def leave(number, frame):
        print("my own handler", flush=True)
        os._exit(9)

    signal.signal(signal.SIGTERM, leave)
else:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
counted = os.open(f"{os.environ['COUNTED']}-{rank}", os.O_CREAT | os.O_WRONLY)
os.pwrite(counted, b"0", 0)
number = 0
dist.barrier()
while True:
    optimizer.step()
    for _ in range(50):
        with span("work"):
            number += 1
        os.pwrite(counted, f"{number:9}".encode(), 0)
        if rank == 1 and number == 3_000:
            os.kill(os.getpid(), signal.SIGKILL)
    if number > 10_000_000:
        sys.exit("nobody ended this rank")
