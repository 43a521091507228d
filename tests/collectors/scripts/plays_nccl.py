"""Data parallelism by hand over gloo; each rank plays NCCL's part towards the plugin beside every reduction.

The GPU whose times it tells is the host's clock, far ahead and on each rank differently. Prints its kernels as JSON.
"""

import json
import os
import time

import torch
import torch.distributed as dist

from tests.collectors.nccl.harness import Nccl

STEPS, BUCKETS = 8, 3
LENGTH_NS = 700_000


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    nccl = Nccl(os.environ["NCCL_PROFILER_PLUGIN"], 5)
    context = nccl.init(0xABCDEF, size, rank)
    ahead_ns = 10**18 * (rank + 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(BUCKETS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kernels = []
    sequence = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        for layer in model:
            dist.all_reduce(layer.weight.grad)
            if nccl.mask.value:
                handle = nccl.collective(context, sequence, count=layer.weight.numel())
                begin = time.monotonic_ns()
                time.sleep(LENGTH_NS / 1e9)
                nccl.channel(context, handle, 0, begin + ahead_ns, begin + ahead_ns + LENGTH_NS)
                kernels.append((step, begin))
            sequence += 1
        optimizer.step()
    print(json.dumps({"rank": rank, "kernels": kernels}), flush=True)
    nccl.finalize(context)
    dist.barrier()
    dist.destroy_process_group()


main()
