"""Hooks for DeepSpeed: make its engine's work around the backward and the optimizer part of these ops.

In: calls of `DeepSpeedEngine`. Out: backward and optimizer ops. The engine prepares and reduces gradients after
autograd's backward, and scales, clips and gathers around the optimizer that ZeRO wraps. Without these hooks, that time
belongs to no op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .hooks_compute import LoopHooks
from .hooks_host import HostHooks
from .session import Session

_HOOK = "deepspeed"


class DeepSpeedHooks:
    """Hooks of `deepspeed.runtime.engine`; one instance per session."""

    def __init__(self, session: Session, loop: LoopHooks, host: HostHooks) -> None:
        self.session = session
        self._loop, self._host = loop, host

    def install(self, engine: ModuleType) -> None:
        """Hook the engine; called when it is imported."""
        patch = self.session.patch
        patch(engine, "DeepSpeedEngine.backward", self._loop.around_backward, lacks="what DeepSpeed adds to backwards")
        patch(engine, "DeepSpeedEngine.step", self._step, lacks="what DeepSpeed does around its optimizer")

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, host = self.session, self._host

        def begins(engine: Any) -> bool:
            """Between two microbatches of one step, the engine only counts."""
            if not engine.is_gradient_accumulation_boundary():
                return False
            host.optimizer_begins(engine)
            return True

        @functools.wraps(original)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            begun = session.recording and session.in_main_thread() and session.attempt_hook(_HOOK, begins, engine)
            try:
                return original(engine, *args, **kwargs)
            finally:
                if begun:
                    session.attempt_hook(_HOOK, host.optimizer_ended, engine)

        return step
