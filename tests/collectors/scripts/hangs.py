"""A training loop in which one rank breaks: hangs.py FAULT RANK [LAYOUT].

FAULT: stop, lock, gil, loader, exit, _exit, skip, size; checkpoint (busy for a while, no hang), checkpoint-gil (one
after the other), slow (four times as slow, no hang), none. LAYOUT: ddp, fsdp2, or pipeline (2 data-parallel ranks,
2 stages).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from quick import Descent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT, RANK, LAYOUT = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["ddp"])[0]
BREAKS_AT, STEPS, BATCH, WIDTH = 3, 8, 4, 16
COMPUTE_S = float(os.environ.get("COMPUTE_S", "0.05"))


class Data(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        while FAULT == "loader" and dist.get_rank() == RANK and index >= BREAKS_AT * BATCH:
            pass
        return torch.full((WIDTH,), float(index))


class SlowToSave:
    def __reduce__(self):
        """Takes SAVING_S seconds, or, without it, until the launcher has looked at it and has said so."""
        if "SAVING_S" in os.environ:
            time.sleep(float(os.environ["SAVING_S"]))
            return (int, (0,))
        folder = Path(os.environ["TRACEKIT_COLLECT_DIR"])
        before = len(list(folder.glob("hang-*")))
        while len(list(folder.glob("hang-*"))) < before + 2:  # it looks again when it has said what it saw
            time.sleep(0.1)
        return (int, (0,))


class Compute(nn.Linear):
    """What the rank computes, `slow` four times as long on one."""

    def forward(self, x):
        time.sleep(COMPUTE_S * (4 if FAULT == "slow" and dist.get_rank() == RANK else 1))
        return super().forward(x)


def breaks(step):
    """What befalls the rank between two steps."""
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif FAULT == "gil" or (FAULT == "checkpoint-gil" and step > BREAKS_AT):
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # PyDLL keeps the interpreter's lock
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif FAULT == "exit":
        sys.exit(0)
    elif FAULT == "_exit":
        os._exit(0)
    elif FAULT.startswith("checkpoint"):
        torch.save(SlowToSave(), os.devnull)


def data_parallel():
    model = DistributedDataParallel(Compute(WIDTH, WIDTH))
    return model, lambda batch: model(batch).square().mean().backward()


def sharded():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Compute(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in (*model, model):
        fully_shard(layer)
    return model, lambda batch: model(batch).square().mean().backward()


def pipeline():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage_index = mesh["pp"].get_local_rank()
    model = DistributedDataParallel(Compute(WIDTH, WIDTH), process_group=mesh["dp"].get_group())
    stage = PipelineStage(model, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, BATCH, loss_fn=nn.functional.mse_loss)
    return model, lambda batch: schedule.step(batch) if stage_index == 0 else schedule.step(target=batch)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, train = {"ddp": data_parallel, "fsdp2": sharded, "pipeline": pipeline}[LAYOUT]()
    optimizer = Descent(model.parameters())
    for step, batch in enumerate(DataLoader(Data(), batch_size=BATCH)):
        broken = rank == RANK and step in ({BREAKS_AT, BREAKS_AT + 2} if FAULT == "checkpoint-gil" else {BREAKS_AT})
        if broken:
            breaks(step)
        train(batch)
        optimizer.step()
        optimizer.zero_grad()
        if not (broken and FAULT == "skip"):
            # Skipped, its place is taken by DDP's gradients: as many, or gloo would abort. Gloo hangs with 3 and 7.
            count = WIDTH * WIDTH + WIDTH if FAULT == "skip" else 3
            dist.all_reduce(torch.zeros(7 if broken and FAULT == "size" else count))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind the model: torch can hang or abort where one outlives its group
