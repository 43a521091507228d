"""For the Trainer of Lightning: `Trainer(..., callbacks=[StepTrace()])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from tracekit.collectors import set_step


class StepTrace(Callback):  # type: ignore[misc]  # Lightning may not be installed
    """Records steps under the trainer's numbers (`global_step`), also after a resume."""

    _step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start with the number of the first step."""
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Start the next step, unless the optimizer waits for more batches."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            set_step(self._step)
