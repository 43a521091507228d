"""The training job of `tracekit doctor`: DistributedDataParallel on two ranks of this machine, a few short steps.

Runs in the interpreter of the training, which need not have tracekit: nothing is imported but torch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6


def main() -> None:
    """Train the model of the trial."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.randn(STEPS * 8, 64)), batch_size=8):
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
