"""A few steps of training that use all that is hooked in a process of its own group; prints a digest of the weights.

STEPS: how many. `sys.midway`, where a test has put it, is called before step 3: what a test breaks while the job runs.
"""

import contextlib
import gc
import hashlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "6"))


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def child(model, x):
    """Another process of the script, which uses the model, too."""
    process = os.fork()
    if process == 0:
        model.module(x)
        os._exit(0)
    os.waitpid(process, 0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(4 * STEPS, 16)), batch_size=4)
    for step, (x,) in enumerate(loader):
        if step == 3:
            getattr(sys, "midway", lambda: None)()
            evaluate(model, x)
            child(model, x)
            gc.collect()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            nn.functional.mse_loss(model(x), x).backward()
        nn.functional.mse_loss(model(x), x).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        work = dist.all_reduce(norm, async_op=True)
        work.wait()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with tempfile.TemporaryFile() as file:
                torch.save(model.state_dict(), file)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"rank 0 weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    del model, optimizer, work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
