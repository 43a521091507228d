"""Trains on two ranks for each line of stdin, and prints what a step costs. Does not import tracekit.

In: lines of width, layers, batch, steps of warm-up, steps. Out: lines of JSON with the mean wall time of a step of rank
0 and the CPU time per step of both ranks together, all of their threads, seconds. The ranks are forks of this process,
which has imported torch.
"""

import json
import os
import sys
import time

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

RANKS = 2


def train(rank: int, number: int, width: int, layers: int, batch: int, warm_up: int, steps: int) -> tuple[float, float]:
    """Mean wall time and CPU time of a step of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(f"{number}.store", RANKS))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(batch * (warm_up + steps), width))
    wall_s = cpu_s = 0.0
    for step, (x,) in enumerate(DataLoader(data, batch_size=batch)):
        if step == warm_up:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    del model, optimizer  # torch can hang or abort where they outlive the process group
    dist.destroy_process_group()
    return wall_s / steps, cpu_s / steps


def fork(rank: int, number: int, sizes: list[int], output: int) -> int:
    """Start one rank, which writes its result to `output`; returns its process id."""
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "TORCHELASTIC_RESTART_COUNT": str(number)}
    os.write(output, json.dumps([rank, *train(rank, number, *sizes)]).encode() + b"\n")
    sys.exit()


for number, line in enumerate(sys.stdin):
    result, output = os.pipe()
    for process in [fork(rank, number, list(map(int, line.split())), output) for rank in range(RANKS)]:
        os.waitpid(process, 0)
    os.close(output)
    with os.fdopen(result) as lines:
        ranks = sorted(map(json.loads, lines))
    print(json.dumps([ranks[0][1], sum(cpu_s for _, _, cpu_s in ranks)]), flush=True)
