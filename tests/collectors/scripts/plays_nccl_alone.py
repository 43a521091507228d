"""A training loop of one process with a process group of its own; it tells the plugin of a collective in each step."""

import os

import torch

from tests.collectors.nccl.harness import Nccl

nccl = Nccl(os.environ["NCCL_PROFILER_PLUGIN"], 6)
context = nccl.init(7, 2, 0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    if nccl.mask.value:
        nccl.collective(context, step)
    optimizer.step()
nccl.finalize(context)
