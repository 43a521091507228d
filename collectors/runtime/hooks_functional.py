"""Hooks for functional collectives, on the Python side: these calls bypass the methods of process groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tracekit.collectors.runtime.collectives import Collectives
from tracekit.collectors.runtime.compiling import COMPILES, compiler_says, is_traced
from tracekit.collectors.runtime.plain_hooks import hooks_of

#: Functional collectives of one tensor, new and old names: `wait_tensor` waits for their results.
FUNCTIONAL = (
    ("all_reduce",),
    ("all_gather_single", "all_gather_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
    ("all_to_all_single",),
    ("broadcast",),
)


class FunctionalHooks:
    """Hooks of `torch.distributed._functional_collectives`; one instance per session."""

    def __init__(self, collectives: Collectives) -> None:
        self.session = collectives.session
        self._hooks = hooks_of(collectives)

    def install(self, module: Any) -> None:
        """Hook the functions that scripts call.

        Dispatcher kernels would not do: they would come before the registered autograd formulas.
        """
        for names in FUNCTIONAL:
            name = next((name for name in names if hasattr(module, name)), names[0])  # an old name calls the new one
            wrap = functools.partial(self._hook, names[0], module)
            self.session.patch(module, name, wrap, lacks=f"the functional collective {names[0]}")
        self.session.patch(module, "wait_tensor", self._wait_tensor, lacks="the ends of functional collectives")

    def _hook(self, name: str, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session
        group_at = list(inspect.signature(original).parameters).index("group")
        recorded = self._hooks.functional(name, original, module, group_at)

        @functools.wraps(original)
        def functional(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or is_traced() or compiler_says(COMPILES):
                return original(*args, **kwargs)
            return recorded(*args, **kwargs)

        return functional

    def _wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waited = self._hooks.wait_tensor("wait_tensor", original)

        @functools.wraps(original)
        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or compiler_says(COMPILES):
                return original(*args, **kwargs)
            return waited(*args, **kwargs)

        return wait_tensor
