"""DistributedDataParallel on two ranks, of which rank 1 shares its core with processes that never wait, from step
HOG_STEP on.

The kernel of any machine counts how long the thread of a rank waits for a core. Where it counts pressure for each
cgroup, that of a rank alone in its cgroup is the same time, so a folder with that count stands for such a cgroup. It
counts from HOG_STEP on, because what else waits on this machine is no part of the test.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from _tracekit_recorder.collectors.record import machine_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOG_STEP, STEPS, HOGS = 400, 700, 3
HOG = "while True: pass"
TICK_S = 0.02
rank = int(os.environ["RANK"])
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[rank % len(cores)]})
group, accounts = Path(f"cgroup-{rank}").absolute(), Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
hogs, began, over = [], threading.Event(), threading.Event()


def waited_us() -> int:
    return int(accounts.read_text().split()[1]) // 1000


def count() -> None:
    """Keep the file of the pressure up to date."""
    first_us = waited_us()
    while not over.wait(TICK_S):
        first_us = first_us if began.is_set() else waited_us()
        (group / "new").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us() - first_us}\n")
        (group / "new").replace(group / "cpu.pressure")


group.mkdir()
(group / "cpu.pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
machine_state.cgroup_folders = lambda: [group]
options = json.loads(os.environ["TRACEKIT_COLLECT_OPTIONS"])
os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({**options, "host_sample_s": 0.1})
counting = threading.Thread(target=count)
counting.start()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    if step == HOG_STEP and rank == 1:
        began.set()
        hogs += [subprocess.Popen([sys.executable, "-S", "-c", HOG]) for _ in range(HOGS)]
    x = torch.randn(128, 256)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
for hog in hogs:
    hog.kill()
    hog.wait()
over.set()
counting.join()
dist.destroy_process_group()
