"""Rows of `frameworks_train.py` for libraries other than torch. Does not import tracekit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from frameworks_parts import BATCH, STEPS, Batches, Garbage, batches, optimizer_of, seen, slow, stack
from torch import nn
from torch.utils.data import DataLoader


def accelerate() -> nn.Module:
    from accelerate import Accelerator

    accelerator, model, garbage = Accelerator(cpu=True), stack(), Garbage()
    model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))
    for x in batches():
        accelerator.backward(seen(model(x).square().mean()))
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
            return {"loss": seen(self.stack(x).square().mean())}

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
            return seen(self.stack(x).square().mean())

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


def fabric() -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, garbage = stack(), Garbage()
    model, optimizer = fabric.setup(model, optimizer_of(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Batches(), batch_size=BATCH), use_distributed_sampler=False)
    for x in loader:
        fabric.backward(seen(model(x).square().mean()))
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def _deepspeed(stage: int) -> nn.Module:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo")
    model, garbage = stack(), Garbage()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model.parameters()), config=config)
    for x in batches():
        engine.backward(seen(engine(x).square().mean()))
        engine.step()
        slow("host")
        garbage.collect()
    return engine.module


def deepspeed_zero1() -> nn.Module:
    return _deepspeed(1)


def deepspeed_zero2() -> nn.Module:
    return _deepspeed(2)


def deepspeed_zero3() -> nn.Module:
    return _deepspeed(3)


ROWS: tuple[Callable[[], nn.Module], ...] = (
    *(accelerate, hf_trainer, lightning, fabric, deepspeed_zero1, deepspeed_zero2, deepspeed_zero3),
)
