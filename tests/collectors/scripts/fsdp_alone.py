"""FSDP2 without a pipeline.

A pause in each layer stands for the time of an accelerator; SLOW_RANK and SLOW_MS make one rank's longer.
"""

import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ.get("STEPS", "6"))
DEVICE_MS = float(os.environ.get("DEVICE_MS", "0"))
SLOW_MS = float(os.environ.get("SLOW_MS", "0"))
SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))
WIDTH, BATCH = 32, 8


class Layer(nn.Linear):
    def forward(self, x):
        time.sleep((DEVICE_MS + (SLOW_MS if dist.get_rank() == SLOW_RANK else 0)) / 1e3)
        return super().forward(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(WIDTH, WIDTH), nn.ReLU(), Layer(WIDTH, WIDTH))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(v.to_local().numpy().tobytes() for v in model.state_dict().values()))
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
