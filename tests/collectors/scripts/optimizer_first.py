"""Ranks that know each other by the variables of an MPI or Slurm alone, and make their optimizer before they meet."""

import os

import torch
import torch.distributed as dist
from quick import STEPS, Descent
from torch import nn

rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
os.environ |= {os.environ["RANK_IN"]: rank, os.environ["SIZE_IN"]: size}
torch.manual_seed(0)
model = nn.Linear(16, 16)
optimizer = Descent(model.parameters())
dist.init_process_group("gloo", rank=int(rank), world_size=int(size))
for _ in range(STEPS):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
del model, optimizer
dist.destroy_process_group()
