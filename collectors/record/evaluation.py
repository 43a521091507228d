"""Record evaluation between training steps.

In: `eval()` of a module that trains, or a call of a trained module in evaluation mode. Out: an op from that call until
training resumes: the module is put back into training mode, computes with gradients or is saved, an optimizer steps, or
the training loader is asked for data. Everything in between belongs to the evaluation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .compiling import is_compiling
from .device import Instant
from .patches import Patch
from .wire_format import Category

if TYPE_CHECKING:
    from .session import Session

EVALUATION = "evaluation"


def in_training_mode(module: Any) -> bool:
    """True if any part of a module is in training mode: Lightning leaves the wrapper of a model in evaluation mode."""
    return any(one.training for one in module.modules())


class Evaluation:
    """Begin and end of evaluations, as reported by hooks. `under_way`: one is running."""

    def __init__(self, session: Session) -> None:
        self.under_way = False
        self._session = session
        self._module: Any = None
        self._start: Instant = 0
        self._back = Patch(torch.nn.Module, "train", self._train)  # called for each inner module: on only when needed
        self._training_loader: Callable[[], Any] = lambda: None
        session.step_listeners.append(self.ends)

    def install(self) -> None:
        """Hook `eval`, which puts a whole model into evaluation mode at once."""
        self._session.patch(torch.nn.Module, "eval", self._eval, lacks="evaluation ops")

    def begins(self, module: Any) -> None:
        """Begin an evaluation of `module`, unless the call is part of another op."""
        session = self._session
        if session.recording and session.busy == 0 and session.in_main_thread():
            self._start = session.begin_op()
            self.under_way, self._module = True, module
            session.busy += 1
            self._back.install()

    def ends(self) -> None:
        """End a running evaluation: training continues."""
        if not self.under_way:
            return
        session = self._session
        self.under_way, self._module = False, None
        session.busy -= 1
        self._back.remove()
        session.record(Category.EVALUATION, EVALUATION, self._start, session.instant_like(self._start))

    def loads(self, iterator: Any) -> None:
        """Called when a loader must provide data: the training loader ends an evaluation; others belong to it."""
        feeds_training = self._training_loader() is iterator
        if not self.under_way and not feeds_training:
            self._training_loader = weakref.ref(iterator)
        elif feeds_training:
            self.ends()

    def _eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def evaluate(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:  # a module of the user's can have its own `parameters`
                trains = in_training_mode(module) and any(one.requires_grad for one in module.parameters())
            except Exception as error:
                trains = False
                session.failed(EVALUATION, error)
            if trains and not is_compiling():
                session.attempt_hook(EVALUATION, self.begins, module)
            return original(module, *args, **kwargs)

        return evaluate

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def train(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if module is self._module and module.training:
                session.attempt_hook(EVALUATION, self.ends)
            return result

        return train
