"""Two ranks that say with `tracekit.log` what each of their steps trained on and came to, and then what is no value.

The tensor on `meta` stands for one on a GPU: neither has its number in the memory of the host.
"""

import math

import torch
import torch.distributed as dist
from quick import STEPS, Descent
from torch import nn

import tracekit

NO_TOKENS = [math.nan, math.inf, "7", 10**400, -1, torch.ones(3), torch.empty((), device="meta"), [], object()]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = Descent(model.parameters())
    for step in range(STEPS):
        x = torch.randn(8, 16)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        tracekit.log(tokens=1)  # the last value counts
        tracekit.log(tokens=1000 * (dist.get_rank() + 1) + step, loss=loss)
        for value in NO_TOKENS:
            tracekit.log(tokens=value, loss=math.nan)
        print(f"step {step} loss {float(loss.detach()).hex()}", flush=True)
    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
