"""Shared by the rows of `frameworks_train.py`: a model, data, an optimizer, a loop, and the slowness of one rank.

Does not import tracekit.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = int(os.environ.get("STEPS", "30"))
SLOW_IN, SLOW_RANK = os.environ.get("SLOW_IN", ""), int(os.environ.get("SLOW_RANK", "1"))
SLOW_MS = float(os.environ.get("SLOW_MS", "12"))
BATCH, TOKENS, WIDTH, LAYERS = 8, 64, 128, 4
#: The loss of each step and microbatch, in order.
LOSSES: list[float] = []


def seen(loss: torch.Tensor) -> torch.Tensor:
    """Append `loss` to `LOSSES` and return it."""
    LOSSES.append(float(loss.detach()))
    return loss


def slow(part: str, share: float = 1.0) -> None:
    """Busy-wait if this rank is slow in that part, for a share of the delay of a step."""
    if part == SLOW_IN and int(os.environ.get("RANK", "0")) == SLOW_RANK:
        end = time.perf_counter() + share * SLOW_MS / 1e3
        while time.perf_counter() < end:
            pass


class Garbage:
    """A large heap that makes garbage collections slow on one rank; `collect` runs one."""

    def __init__(self) -> None:
        self.chosen = SLOW_IN == "gc" and int(os.environ.get("RANK", "0")) == SLOW_RANK
        self._heap = [[number, {}] for number in range(int(20_000 * SLOW_MS))] if self.chosen else []

    def collect(self) -> None:
        """Once a step."""
        if self.chosen:
            gc.collect()


class TransformerBlock(nn.Module):
    """A transformer block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.relu(self.rise(self.norm(x))))


def stack(*, in_graph: bool = True) -> nn.Sequential:
    """The model; a slow rank is slow in its second block.

    `in_graph`: the backward hook may be a node of autograd's graph, which zero-bubble schedules cannot split.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock() for _ in range(LAYERS)))
    slow_block(model[1], in_graph=in_graph)
    return model


def slow_block(block: nn.Module, share: float = 1.0, *, in_graph: bool = True) -> None:
    """Slow `block` in forward or backward on the slow rank, by a share of the delay of a step."""
    block.register_forward_pre_hook(lambda *_: slow("forward", share))
    if in_graph:
        block.register_full_backward_pre_hook(lambda *_: slow("backward", share))
    else:
        block.register_forward_hook(lambda *called: _on_gradient(called[2], lambda _: slow("backward", share)))


def _on_gradient(output: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    if output.requires_grad:
        output.register_hook(call)


class Batches(Dataset[torch.Tensor]):
    """Random samples, the same in every run; different on each rank, or `shared` by all."""

    def __init__(self, *, shared: bool = False) -> None:
        self._rank = 0 if shared else int(os.environ.get("RANK", "0"))

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        slow("data", 1 / BATCH)
        return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * index + self._rank))


def batches(*, shared: bool = False) -> Iterator[torch.Tensor]:
    """One batch per step."""
    return iter(DataLoader(Batches(shared=shared), batch_size=BATCH))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer, slow if it is the slow part."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: slow("optimizer"))
    return optimizer


def loop(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor] | None = None, *, shared: bool = False
) -> nn.Module:
    """A plain loop over `model`, called as `forward`."""
    call = model if forward is None else forward
    optimizer, garbage = optimizer_of(model.parameters()), Garbage()
    for x in batches(shared=shared):
        seen(call(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model
