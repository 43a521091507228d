"""The training job of `tracekit doctor`: DistributedDataParallel on two ranks of this machine, a few short steps.

Runs in the interpreter of the training, which need not have tracekit: nothing is imported but torch. The second rank is
a fork of the first, because importing torch takes longer than the training.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6


def train(rank: int) -> None:
    """Train the model of the trial as `rank`. The ranks meet in a file in the current folder."""
    dist.init_process_group("gloo", init_method=f"file://{Path('ranks').absolute()}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.randn(STEPS * 8, 64)), batch_size=8):
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    second = os.fork()
    train(0 if second else 1)
    if second:
        sys.exit(os.waitpid(second, 0)[1] != 0)
