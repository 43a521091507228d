"""For the Trainer of Lightning: `Trainer(..., callbacks=[StepTrace()])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from tracekit.collectors import log, set_step


class StepTrace(Callback):  # type: ignore[misc]  # Lightning may not be installed
    """Records steps under the trainer's numbers (`global_step`), also after a resume.

    `loss`: the name under which the module logs its loss. It is recorded on CPUs alone, because Lightning leaves it in
    the memory of a GPU; there, call `tracekit.log` with numbers that you have.
    """

    def __init__(self, loss: str = "train_loss") -> None:
        self._loss, self._step = loss, -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start with the number of the first step."""
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Start the next step, unless the optimizer waits for more batches."""
        if trainer.global_step != self._step:
            loss = trainer.callback_metrics.get(self._loss)
            if getattr(loss, "is_cpu", False):
                log(loss=loss)
            self._step = trainer.global_step
            set_step(self._step)
