"""Small training jobs in the manner of several frameworks, one rank of which can be slow in one part.

    torchrun --nproc-per-node 2 benchmarks/frameworks_train.py ROW

SLOW_IN names the part (forward, backward, optimizer, data, host, gc, pause), SLOW_RANK the rank and SLOW_MS how much
longer it takes in each step; STEPS is how many there are. Prints a digest of each rank's weights. Knows no tracekit.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = int(os.environ.get("STEPS", "30"))
SLOW_IN, SLOW_RANK = os.environ.get("SLOW_IN", ""), int(os.environ.get("SLOW_RANK", "1"))
SLOW_MS = float(os.environ.get("SLOW_MS", "12"))
BATCH, TOKENS, WIDTH, LAYERS = 8, 64, 128, 4
#: Stops the rank's process for SLOW_MS four times in a second.
PAUSER = """
import os, signal, sys, time
process, pause_s = int(sys.argv[1]), float(sys.argv[2])
try:
    while True:
        time.sleep(0.25 - pause_s)
        os.kill(process, signal.SIGSTOP)
        time.sleep(pause_s)
        os.kill(process, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


def slow(part: str, share: float = 1.0) -> None:
    """Keep the processor busy where this rank is to be slow in that part, for a share of what a step has of it."""
    if part == SLOW_IN and int(os.environ.get("RANK", "0")) == SLOW_RANK:
        end = time.perf_counter() + share * SLOW_MS / 1e3
        while time.perf_counter() < end:
            pass


class Garbage:
    """What makes collections of garbage slow on one rank; `collect` runs one."""

    def __init__(self) -> None:
        self.chosen = SLOW_IN == "gc" and int(os.environ.get("RANK", "0")) == SLOW_RANK
        self._heap = [[number, {}] for number in range(int(20_000 * SLOW_MS))] if self.chosen else []

    def collect(self) -> None:
        """Once a step."""
        if self.chosen:
            gc.collect()


class Block(nn.Module):
    """A transformer's block without attention: what matters here is who computes how long."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.relu(self.rise(self.norm(x))))


def stack() -> nn.Sequential:
    """The model; its second block is where a slow rank is slow."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model[1].register_forward_pre_hook(lambda *_: slow("forward"))
    model[1].register_full_backward_pre_hook(lambda *_: slow("backward"))
    return model


class Batches(Dataset[torch.Tensor]):
    """Drawn samples, the same in every run; other ones on each rank, or `shared` by all."""

    def __init__(self, *, shared: bool = False) -> None:
        self._rank = 0 if shared else int(os.environ.get("RANK", "0"))

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, at: int) -> torch.Tensor:
        slow("data", 1 / BATCH)
        return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * at + self._rank))


def batches(*, shared: bool = False) -> Iterator[torch.Tensor]:
    """One for each step."""
    return iter(DataLoader(Batches(shared=shared), batch_size=BATCH))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer, slow where it is to be."""
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
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def ddp() -> nn.Module:
    return loop(nn.parallel.DistributedDataParallel(stack()))


def accumulation() -> nn.Module:
    """Two microbatches a step, the first without reducing, clipping, evaluation every tenth step."""
    model = nn.parallel.DistributedDataParallel(stack())
    optimizer, garbage = optimizer_of(model.parameters()), Garbage()
    for step, x in enumerate(batches()):
        if step % 10 == 5:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        with model.no_sync():
            model(x[::2]).square().mean().backward()
        model(x[1::2]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = stack()
    for block in model:
        fully_shard(block)
    return loop(fully_shard(model))


def tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = stack(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    return loop(model, shared=True)


def pipeline() -> nn.Module:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, stages = dist.get_rank(), dist.get_world_size()
    whole = stack()
    part = whole[rank * LAYERS // stages : (rank + 1) * LAYERS // stages]
    if rank == SLOW_RANK and rank:  # the second block is on the first stage
        part[0].register_forward_pre_hook(lambda *_: slow("forward", 1 / 4))
        part[0].register_full_backward_pre_hook(lambda *_: slow("backward", 1 / 4))
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer, garbage = optimizer_of(part.parameters()), Garbage()
    for x in batches(shared=True):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return part


def compiled() -> nn.Module:
    model = nn.parallel.DistributedDataParallel(stack())
    return loop(model, torch.compile(model, backend="aot_eager"))


def accelerate() -> nn.Module:
    from accelerate import Accelerator

    accelerator, model, garbage = Accelerator(cpu=True), stack(), Garbage()
    model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))
    for x in batches():
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def hf_trainer() -> nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.stack(x).square().mean()}

    class Between(TrainerCallback):
        garbage = Garbage()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            slow("host")
            self.garbage.collect()

    arguments = TrainingArguments(
        output_dir=os.environ.get("OUT", "out"), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
        ddp_backend="gloo", report_to=[], save_strategy="no", logging_steps=5, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=Regression(),
        args=arguments,
        train_dataset=Batches(),
        data_collator=lambda rows: {"x": torch.stack(rows)},
        callbacks=[Between()],
    )
    trainer.create_optimizer().register_step_pre_hook(lambda *_: slow("optimizer"))
    trainer.train()
    return trainer.model


def lightning() -> nn.Module:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.garbage = stack(), Garbage()

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return self.stack(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

        def on_train_batch_end(self, *_args: Any) -> None:
            slow("host")
            self.garbage.collect()

    model = Module()
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Batches(), batch_size=BATCH))
    return model


ROWS: dict[str, Callable[[], nn.Module]] = {
    row.__name__: row
    for row in (ddp, accumulation, fsdp2, tensor_parallel, pipeline, compiled, accelerate, hf_trainer, lightning)
}
#: They join the process group by themselves.
THEIR_OWN_GROUP = (accelerate, hf_trainer, lightning)


def main() -> None:
    """Train as the row named on the command line."""
    row = ROWS[sys.argv[1]]
    if SLOW_IN == "pause" and int(os.environ.get("RANK", "0")) == SLOW_RANK:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        subprocess.Popen([sys.executable, "-S", "-c", PAUSER, str(os.getpid()), str(SLOW_MS / 1e3)])
    if row not in THEIR_OWN_GROUP:
        dist.init_process_group("gloo")
    model = row()
    parts = [getattr(part, "_local_tensor", part).detach().numpy().tobytes() for part in model.state_dict().values()]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    print(f"rank {os.environ.get('RANK', '0')} weights {digest}", flush=True)
    del model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
