"""Data-parallel training whose rank 1 sleeps in `decode_shard`, until the file STOP exists."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from quick import Descent
from torch import nn


def decode_shard(rank):
    if rank == 1:
        time.sleep(0.06)  # here
    return torch.ones(8, 16)


def main():
    dist.init_process_group("gloo")
    rank, model, running = dist.get_rank(), nn.Linear(16, 16), torch.ones(1)
    optimizer = Descent(model.parameters())
    while running.item():
        x = decode_shard(rank)
        nn.functional.mse_loss(model(x), x).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        running.fill_(float(not Path(os.environ["STOP"]).exists()))
        dist.all_reduce(running, op=dist.ReduceOp.MIN)  # all ranks end together
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
