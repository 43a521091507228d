"""For the Trainer of Hugging Face transformers: `Trainer(..., callbacks=[StepTrace()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tracekit.collectors import log, set_step, span


class StepTrace(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed
    """Records steps under the trainer's numbers, also after a resume, and each evaluation and checkpoint as one op.

    Tokens are recorded if the trainer counts them (`include_num_input_tokens_seen`), the loss whenever it logs one: the
    mean since it last did, under the number of the last step in it.
    """

    def __init__(self) -> None:
        self._phase: Any = None
        self._seen = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start with the number of the first step."""
        self._seen = getattr(state, "num_input_tokens_seen", 0)
        set_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the next step, and what the trainer does first in it."""
        before, self._seen = self._seen, getattr(state, "num_input_tokens_seen", 0)
        if self._seen > before:
            log(tokens=(self._seen - before) / args.world_size)  # the trainer counts those of all ranks
        set_step(state.global_step)
        self.on_epoch_end(args, state, control)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Record the loss, which the trainer has brought to the host, of the step that has ended."""
        log(loss=(logs or {}).get("loss"), ended=True)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Start the evaluation or checkpoint that follows."""
        if control.should_evaluate:
            self._begin_phase("evaluation")
        else:
            self.on_evaluate(_args, _state, control)

    def on_evaluate(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """End an evaluation. A checkpoint comes after it."""
        self._begin_phase("checkpoint" if control.should_save else None)

    def on_save(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """End a checkpoint."""
        self._begin_phase(None)

    def _begin_phase(self, name: str | None) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = None if name is None else span(name)
        if self._phase is not None:
            self._phase.__enter__()
