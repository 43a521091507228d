"""A DistributedDataParallel job on gloo that measures itself: a rank's main.

`python ddp_job.py OUT CAPS` times reductions, forwards and backwards of a small model, then steps with each size of
buckets, in turn; rank 0 writes the figures as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, BATCH = 8, 512, 64
MIB = 1 << 20
SIZES_MB = (0.25, 1.0, 4.0)
ROUNDS, REPEATS = 4, 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _reduction_s(size_mb: float) -> float:
    tensor, times = torch.zeros(int(size_mb * MIB / 4)), []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - begin)
    return median(times)


def _compute_s() -> tuple[float, float]:
    model, forwards, backwards = _model(), [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        middle = time.perf_counter()
        loss.backward()
        forwards.append(middle - begin)
        backwards.append(time.perf_counter() - middle)
    return median(forwards), median(backwards)


def _steps_s(wrapped: nn.Module) -> list[float]:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        wrapped(torch.randn(BATCH, WIDTH)).square().mean().backward()
        times.append(time.perf_counter() - begin)
    return times


def main(out: Path, caps_mb: list[float]) -> None:
    """Measure, and write."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = {
        "layers_mb": [sum(one.nbytes for one in layer.parameters()) / MIB for layer in _model()],
        "reductions": [(size, _reduction_s(size)) for size in SIZES_MB],
        "compute_s": _compute_s(),
    }
    models = {cap: nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=cap) for cap in caps_mb}
    times: dict[float, list[float]] = {cap: [] for cap in caps_mb}
    for wrapped in models.values():  # buckets are made anew after the first step
        _steps_s(wrapped)
    for _ in range(ROUNDS):
        for cap, wrapped in models.items():
            times[cap] += _steps_s(wrapped)
    buckets = {cap: wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"] for cap, wrapped in models.items()}
    figures["steps"] = [{"cap_mb": cap, "seconds": times[cap], "bucket_bytes": buckets[cap]} for cap in caps_mb]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    # A reducer that is the last to hold the group waits for gloo's threads, which wait for the interpreter's lock.
    del models, wrapped
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(cap) for cap in sys.argv[2].split(",")])
