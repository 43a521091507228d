"""A pipeline of two uneven stages, GPipe, without data loader, device mesh or data parallelism."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STEPS = int(os.environ.get("STEPS", "6"))
WIDTH, BATCH, MICROBATCHES = 16, 6, 3


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(1 + rank)])
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.state_dict().values()))
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
