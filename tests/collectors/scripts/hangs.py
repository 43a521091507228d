"""A data-parallel loop in which one rank breaks: hangs.py FAULT RANK [STEP].

stop, lock, gil, loader, exit, _exit, skip, size, checkpoint (busy for a while, no hang), checkpoint-gil (one after the
other), slow (four times as slow, no hang), none
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
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT, RANK = sys.argv[1], int(sys.argv[2])
STEP = int(sys.argv[3]) if len(sys.argv) > 3 else 3
STEPS, BATCH = int(os.environ.get("STEPS", "8")), 4


class Data(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        while FAULT == "loader" and dist.get_rank() == RANK and index >= STEP * BATCH:
            time.sleep(0.01)
        return torch.full((16,), float(index))


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


def breaks(step):
    """What befalls the rank between two steps."""
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif FAULT == "gil" or (FAULT == "checkpoint-gil" and step > STEP):
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # PyDLL keeps the interpreter's lock
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif FAULT == "exit":
        dist.destroy_process_group = lambda *_: None
        sys.exit(0)
    elif FAULT == "_exit":
        os._exit(0)
    elif FAULT.startswith("checkpoint"):
        torch.save(SlowToSave(), os.devnull)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Data(), batch_size=BATCH)):
        broken = rank == RANK and step in ({STEP, STEP + 2} if FAULT == "checkpoint-gil" else {STEP})
        if broken:
            breaks(step)
        if FAULT == "slow" and rank == RANK:
            time.sleep(0.4)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (broken and FAULT == "skip"):
            count = 272 if FAULT == "skip" else 3  # as many as the gradients: gloo would notice a difference
            dist.all_reduce(torch.zeros(7 if broken and FAULT == "size" else count))
    dist.barrier()
    dist.destroy_process_group()


main()
