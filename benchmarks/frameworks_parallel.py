"""Rows of `frameworks_train.py` that shard: parameters, tensors, sequences, experts, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from frameworks_parts import (
    LAYERS,
    SLOW_RANK,
    TOKENS,
    WIDTH,
    Garbage,
    TransformerBlock,
    batches,
    loop,
    optimizer_of,
    seen,
    slow,
    slow_block,
    stack,
)
from torch import nn


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return loop(
        FullyShardedDataParallel(
            stack(),
            auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    )


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = stack()
    for block in model:
        fully_shard(block)
    return loop(fully_shard(model))


def _mesh(name: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def tensor_parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = stack(), _mesh("tp")
    for block in model:
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    return loop(model, shared=True)


def sequence_parallel() -> nn.Module:
    """Tensor parallelism in which each rank holds part of the tokens in norms and residuals."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, mesh = stack(), _mesh("tp")
    for block in model:
        plan = {
            "norm": SequenceParallel(),
            "rise": ColwiseParallel(input_layouts=Shard(1)),
            "fall": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model[0],
        mesh,
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False),
    )
    parallelize_module(
        model[-1], mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )
    return loop(model, shared=True)


class _Exchange(torch.autograd.Function):
    """Exchange equal parts of the first dimension among all ranks, and the gradients back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradients[0], context.group), None


class _Attention(nn.Module):
    """Attention over a sequence that is split over ranks, by exchanging heads for tokens (Ulysses)."""

    def __init__(self, group: Any, heads: int = 4) -> None:
        super().__init__()
        self.group, self.heads = group, heads
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens of this rank, heads, width] -> [batch, heads of this rank, tokens, width]."""
        ranks = dist.get_world_size(self.group)
        batch, tokens, heads, width = x.shape
        x = x.view(batch, tokens, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4)
        x = _Exchange.apply(x, self.group)
        return x.permute(1, 3, 0, 2, 4).reshape(batch, heads // ranks, ranks * tokens, width)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse, with heads joined: [batch, tokens of this rank, WIDTH]."""
        ranks = dist.get_world_size(self.group)
        batch, heads, tokens, width = x.shape
        x = x.view(batch, heads, ranks, tokens // ranks, width).permute(2, 0, 1, 3, 4)
        x = _Exchange.apply(x, self.group)
        return x.permute(1, 3, 0, 2, 4).reshape(batch, tokens // ranks, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.inward(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (self._scattered(part) for part in split)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.outward(self._gathered(mixed))


def context_parallel() -> nn.Module:
    """Each rank holds part of every sequence; parameters are replicated, their gradients reduced."""
    mesh = _mesh("cp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(layer for block in stack() for layer in (_Attention(mesh.get_group()), block)))
    reduced = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    part = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    return loop(reduced, lambda x: reduced(x[:, part]), shared=True)


class _Experts(nn.Module):
    """One expert per rank: a fixed hash sends each token to an expert and back."""

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.group.WORLD
        self.expert = TransformerBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        came_back = _Exchange.apply(self.expert(_Exchange.apply(tokens, self.group)), self.group)
        return x + came_back.view_as(x)


def expert_parallel() -> nn.Module:
    """Data parallelism for everything but the experts, whose tokens come from all ranks."""
    dense = stack()
    torch.manual_seed(1 + dist.get_rank())
    model = nn.Sequential(dense[0], dense[1], _Experts(), dense[2], dense[3])
    names = [f"2.{name}" for name, _ in model[2].named_parameters()]
    ignore = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model  # noqa: SLF001
    ignore(model, names)
    return loop(nn.parallel.DistributedDataParallel(model))


def _pipelined(schedule_of: Callable[..., Any], chunks: int, *, in_graph: bool = True) -> nn.Module:
    """A loop over a schedule of four microbatches, with `chunks` stages on each rank. `in_graph`: as of `stack`."""
    from torch.distributed.pipelining import PipelineStage

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages, whole = chunks * ranks, stack(in_graph=in_graph)
    places = [chunk * ranks + rank for chunk in range(chunks)]
    parts = nn.ModuleList(whole[at * LAYERS // stages : (at + 1) * LAYERS // stages] for at in places)
    if rank == SLOW_RANK and rank:  # the block that is slow may be another rank's
        slow_block(parts[0][0], 1 / 4, in_graph=in_graph)
    device = torch.device("cpu")
    pipeline_stages = [PipelineStage(part, at, stages, device) for at, part in zip(places, parts, strict=True)]

    def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    schedule = schedule_of(pipeline_stages[0] if chunks == 1 else pipeline_stages, 4, loss_fn=loss_of)
    optimizer, garbage = optimizer_of(parts.parameters()), Garbage()
    has_loss = any(stage.is_last for stage in pipeline_stages)
    for x in batches(shared=True):
        losses: list[torch.Tensor] = []  # not in `loss_of`: shapes are inferred from what was never written
        schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": losses} if has_loss else {}))
        for loss in losses:
            seen(loss)
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return parts


def pipeline() -> nn.Module:
    from torch.distributed.pipelining import Schedule1F1B

    return _pipelined(Schedule1F1B, 1)


def gpipe() -> nn.Module:
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipelined(ScheduleGPipe, 1)


def interleaved() -> nn.Module:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    return _pipelined(ScheduleInterleaved1F1B, 2)


def zero_bubble() -> nn.Module:
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

    return _pipelined(ScheduleInterleavedZeroBubble, 2, in_graph=False)


ROWS: tuple[Callable[[], nn.Module], ...] = (
    *(fsdp1, fsdp2, tensor_parallel, sequence_parallel, context_parallel, expert_parallel),
    *(pipeline, gpipe, interleaved, zero_bubble),
)
