"""DistributedDataParallel on two ranks, of which rank 1 collects garbage or sleeps in each step; the other waits.

PAUSE: gc or sleep. WHERE: before (the forward), middle (between forward and backward), after (the backward), between
(steps); without it the steps pause at these in turn, and every fifth nowhere. MEET: ranks then meet in a broadcast.
CLOSURE: the whole step is the optimizer's closure; Lightning does both. A piece of garbage takes 30 ms of processor
time to finalize, so that a collection that finalizes it lasts at least as long on any machine.
"""

import gc
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PLACES = [os.environ["WHERE"]] if "WHERE" in os.environ else ["before", "middle", "after", "between", None]
STEPS = 11 if len(PLACES) > 1 else 5
PAUSE = os.environ["PAUSE"]
PAUSE_S = 0.03
CLOSURE = "CLOSURE" in os.environ


class Garbage:
    """A cycle of one."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        began = time.thread_time()
        while time.thread_time() - began < PAUSE_S:
            pass


def pause(where, step):
    if where != PLACES[step % len(PLACES)] or dist.get_rank() == 0:
        return
    if PAUSE == "gc":
        Garbage()
        gc.collect()
    else:
        time.sleep(PAUSE_S)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gc.disable()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        pause("before", step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        pause("middle", step)
        loss.backward()
        pause("after", step)
        return loss

    gc.collect()
    gc.freeze()
    for step in range(STEPS):
        x = torch.randn(8, 32)
        if CLOSURE:
            optimizer.step(train)
        else:
            train()
            optimizer.step()
        pause("between", step)
        if "MEET" in os.environ:
            dist.broadcast(torch.zeros(1), src=0)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
