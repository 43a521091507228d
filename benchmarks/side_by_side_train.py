"""A DDP loop in which one rank can be slow, under the instrumentation of TOOL: empty, `traceml` or `nvrx`.

    torchrun --nproc-per-node 2 benchmarks/side_by_side_train.py WIDTH LAYERS BATCH WARM_UP STEPS

Rank 0 prints the mean step after WARM_UP steps, ms, and whom nvidia-resiliency-ext names. Without a GPU that needs a
stand-in for its CUPTI module, which counts no kernels: only the sections that the loop marks are compared. Does not
import tracekit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))

import frameworks_parts as parts

TOOL = os.environ.get("TOOL", "")


class _NoKernels:
    """Stands in for the CUPTI module of nvidia-resiliency-ext where there is no GPU."""

    def __init__(self, **_: int) -> None: ...

    def get_stats(self) -> dict[str, Any]:
        return {}

    def initialize(self) -> None: ...

    start = stop = shutdown = reset = initialize


def main(width: int, layers: int, batch: int, warm_up: int, steps: int) -> None:
    """Train, and print the mean step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    parts.slow_block(blocks[1])
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
    optimizer, garbage = parts.optimizer_of(model.parameters()), parts.Garbage()
    traced, section = _instrumented(model)
    data = iter(DataLoader(_SlowRows(width, batch, warm_up + steps), batch_size=batch))
    began = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            began = time.perf_counter()
        with section("data"):
            x = next(data)
        with traced():
            with section("forward"):
                loss = nn.functional.mse_loss(model(x), x)
            with section("backward"):
                loss.backward()
            with section("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        with section("host"):
            parts.slow("host")
            garbage.collect()
    step_ms = (time.perf_counter() - began) / steps * 1e3
    named = _nvrx_names() if TOOL == "nvrx" else None
    if dist.get_rank() == 0:
        print(json.dumps({"step_ms": step_ms, "named": named}), flush=True)
    del model
    dist.destroy_process_group()


class _SlowRows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, width: int, batch: int, steps: int) -> None:
        self._width, self._batch, self._count = width, batch, batch * steps

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        parts.slow("data", 1 / self._batch)
        return torch.ones(self._width)


def _instrumented(model: nn.Module) -> tuple[Any, Any]:
    """What wraps a step, and a section of it."""
    if TOOL == "traceml":
        import traceml_ai

        traceml_ai.init(mode="auto")
        return lambda: traceml_ai.trace_step(model), _nothing
    if TOOL == "nvrx":
        module = ModuleType("nvrx_cupti_module")
        module.CuptiProfiler = _NoKernels  # type: ignore[attr-defined]
        sys.modules["nvrx_cupti_module"] = module
        torch.cuda.synchronize = lambda *_: None  # type: ignore[method-assign]
        from nvidia_resiliency_ext.straggler import Detector

        Detector.initialize(gather_on_rank0=True)
        return nullcontext, lambda name: Detector.detection_section(name, profile_cuda=False)
    return nullcontext, _nothing


def _nothing(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _nvrx_names() -> list[str]:
    from nvidia_resiliency_ext.straggler import Detector

    report = Detector.generate_report()
    if report is None:
        return []
    sections = report.identify_stragglers()["straggler_sections_relative"]
    return [f"{name} of rank {one.rank}" for name, ranks in sections.items() for one in ranks]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
