"""DistributedDataParallel on all ranks, two microbatches per step with no_sync on the first; several buckets."""

import contextlib
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "8"))
ACCUMULATE = 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if (
            step == int(os.environ.get("CRASH_STEP", "-1"))
            and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
        ):
            raise RuntimeError(f"rank {rank} fails in step {step}")
        optimizer.zero_grad()
        for microbatch in range(ACCUMULATE):
            last = microbatch == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x = torch.randn(8, 32, generator=generator)
                nn.functional.mse_loss(model(x), x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
