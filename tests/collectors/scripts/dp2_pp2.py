"""DP 2 x PP 2 training: DeviceMesh, DistributedDataParallel, Schedule1F1B, AdamW, DataLoader with workers.

The arithmetic is small; a pause in each block stands for the time an accelerator would be busy, so that step times do
not depend on how many cores the machine has. SLOW_RANK and SLOW_MS slow one rank's forward.
"""

import gc
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "9"))
DEVICE_MS = float(os.environ.get("DEVICE_MS", "1"))
SLOW_MS = float(os.environ.get("SLOW_MS", "0"))
SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))
BACKWARD_MS = float(os.environ.get("BACKWARD_MS", str(2 * DEVICE_MS)))
CRASH_STEP = int(os.environ.get("CRASH_STEP", "-1"))
CRASH_RANK = int(os.environ.get("CRASH_RANK", "0"))
CRASH = os.environ.get("CRASH", "raise")
WIDTH, SEQUENCE, BATCH, MICROBATCHES = 64, 16, 8, 4


class DeviceTime(torch.autograd.Function):
    """Takes as long in forward and twice as long in backward as a device would."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Stage(nn.Module):
    def __init__(self, index, last, slow_s):
        super().__init__()
        torch.manual_seed(index)
        self.forward_s = DEVICE_MS / 1e3 + slow_s
        self.backward_s = BACKWARD_MS / 1e3
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH) if last else nn.Identity()

    def forward(self, x):
        return self.head(DeviceTime.apply(self.block(x), self.forward_s, self.backward_s))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp_rank = mesh["pp"].get_local_rank()
    module = Stage(pp_rank, pp_rank == 1, SLOW_MS / 1e3 if rank == SLOW_RANK else 0.0)
    model = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    stage = PipelineStage(model, pp_rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + mesh["dp"].get_local_rank())
    data = TensorDataset(torch.randn(BATCH * STEPS, SEQUENCE, WIDTH), torch.randn(BATCH * STEPS, SEQUENCE, WIDTH))
    gc.collect()
    gc.freeze()  # a collection then costs what the steps left behind
    for step, (x, y) in enumerate(DataLoader(data, batch_size=BATCH, num_workers=1)):
        if step % 5 == 0:
            gc.collect()
        optimizer.zero_grad()
        if pp_rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        if step == CRASH_STEP and rank == CRASH_RANK:
            if CRASH == "raise":
                raise RuntimeError(f"rank {rank} fails in step {step}")
            os.kill(os.getpid(), 9)
        optimizer.step()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(f"rank {rank} weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
