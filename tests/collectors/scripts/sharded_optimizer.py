"""DistributedDataParallel with ZeroRedundancyOptimizer, and an argument torch warns about."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), broadcast_buffers=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
