"""FSDP2 and interleaved 1F1B with two chunks on two stages, two data-parallel ranks."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STEPS = int(os.environ.get("STEPS", "6"))
WIDTH, BATCH, MICROBATCHES, STAGES = 32, 8, 4, 4


class Chunk(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.block(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp_rank = mesh["pp"].get_local_rank()
    stages, chunks = [], []
    for index in (pp_rank, pp_rank + 2):
        chunk = Chunk(index)
        fully_shard(chunk, mesh=mesh["dp"])
        chunks.append(chunk)
        stages.append(PipelineStage(chunk, index, STAGES, torch.device("cpu"), group=mesh["pp"].get_group()))
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()
        if pp_rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
    digest = hashlib.sha256()
    for chunk in chunks:
        for value in chunk.state_dict().values():
            digest.update(value.to_local().numpy().tobytes())
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
