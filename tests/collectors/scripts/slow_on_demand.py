"""Data-parallel training whose last rank is slow while the file SLOW exists, until the file STOP does.

A pause in each block stands for the time that an accelerator would be busy, so that step times do not depend on how
many cores the machine has.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from quick import Descent
from torch import nn

DEVICE_MS = float(os.environ.get("DEVICE_MS", "15"))
SLOW, STOP = Path(os.environ["SLOW"]), Path(os.environ["STOP"])


class DeviceTime(torch.autograd.Function):
    """Takes as long in forward and twice as long in backward as a device would."""

    @staticmethod
    def forward(ctx, x, busy_s):
        ctx.busy_s = busy_s
        time.sleep(busy_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.busy_s)
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.slow = False

    def forward(self, x):
        return DeviceTime.apply(self.layer(x), DEVICE_MS * (2 if self.slow else 1) / 1e3)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, last = Model(), dist.get_rank() == dist.get_world_size() - 1
    optimizer = Descent(model.parameters())
    running = torch.ones(1)
    if last:
        print("training", flush=True)
    while running.item():
        model.slow = last and SLOW.exists()
        x = torch.randn(8, 16)
        nn.functional.mse_loss(model(x), x).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        running.fill_(float(not STOP.exists()))
        dist.all_reduce(running, op=dist.ReduceOp.MIN)  # all ranks end together
    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
