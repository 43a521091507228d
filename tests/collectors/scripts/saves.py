"""Trains alone, saves after step 2, and is killed behind step 4 of its first attempt. TIMES: a file for what happened
when, on the monotonic clock.
"""

import gc
import os
import signal
import time

import torch
from quick import Descent
from torch import nn


def note(what):
    with open(os.environ["TIMES"], "a") as file:
        file.write(f"{what} {time.monotonic_ns()}\n")


class File:
    """Where a checkpoint goes. It notes when the first and the last bytes arrive."""

    def __init__(self):
        self.begun = False

    def write(self, data):
        if not self.begun:
            self.begun = True
            note("first-byte")
        self.last_ns = time.monotonic_ns()
        return len(data)

    def flush(self):
        pass


gc.disable()  # a collection behind the last note would be the last record
torch.distributed.init_process_group("gloo")
model = nn.Linear(512, 512)
optimizer = Descent(model.parameters())
for step in range(8):
    model(torch.randn(64, 512)).square().mean().backward()
    note(f"update-{step}")
    optimizer.step()
    note(f"step-{step}")
    if step == 2:
        file = File()
        note("save")
        torch.save([model.state_dict()] * 50, file)
        note("saved")
        with open(os.environ["TIMES"], "a") as times:
            times.write(f"last-byte {file.last_ns}\n")
    if step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.destroy_process_group()
