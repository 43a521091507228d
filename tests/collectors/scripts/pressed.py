"""DistributedDataParallel on two ranks whose kernel counts how long their cgroup waits for a core, as this script says.

Before step n it has been n ms for rank 1, and never anything for rank 0. The job is over when the last count has been
sampled; rank 1 then says when it began and ended, seconds since 1970.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _tracekit_recorder.collectors.record import machine_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
PERIOD_S = 0.1
began_s = time.time()
rank = int(os.environ["RANK"])
group = Path(f"cgroup-{rank}").absolute()
group.mkdir()


def count(step):
    (group / "new").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={1000 * rank * step}\n")
    (group / "new").replace(group / "cpu.pressure")


def samples():
    try:
        lines = Path(os.environ["TRACEKIT_COLLECT_DIR"], "attempt-000", f"rank-{rank:06}.host").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line)[1] for line in lines.split("\n")[:-1]]


def await_sample(waited_us):
    while waited_us not in samples():
        time.sleep(PERIOD_S)


count(0)
machine_state.cgroup_folders = lambda: [group]
options = json.loads(os.environ["TRACEKIT_COLLECT_OPTIONS"])
os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({**options, "host_sample_s": PERIOD_S})
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
await_sample(0)
for step in range(STEPS):
    count(step)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
await_sample(1000 * rank * (STEPS - 1))
dist.destroy_process_group()
if rank == 1:
    print("from", began_s, "to", time.time(), flush=True)
