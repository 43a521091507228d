"""Hooks for functional collectives, on the Python side: these calls bypass the methods of process groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .collectives import SessionCollectives
from .compiling import is_compiling
from .device import Instant
from .wire_format import Category

#: Functional collectives of one tensor, new and old names: `wait_tensor` waits for their results.
FUNCTIONAL = (
    ("all_reduce",),
    ("all_gather_single", "all_gather_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
    ("all_to_all_single",),
    ("broadcast",),
)
_COLLECTIVE = int(Category.COLLECTIVE)


class FunctionalHooks:
    """Hooks of `torch.distributed._functional_collectives`; one instance per session."""

    def __init__(self, collectives: SessionCollectives) -> None:
        self.session, self.collectives = collectives.session, collectives
        self._groups: dict[Hashable, int] = {}

    def install(self, module: Any) -> None:
        """Hook the functions that scripts call.

        Dispatcher kernels would not do: they would come before the registered autograd formulas.
        """
        for names in FUNCTIONAL:
            name = next((name for name in names if hasattr(module, name)), names[0])  # an old name calls the new one
            wrap = functools.partial(self.functional, names[0], module)
            self.session.patch(module, name, wrap, lacks=f"the functional collective {names[0]}")
        self.session.patch(module, "wait_tensor", self.wait_tensor, lacks="the ends of functional collectives")

    def functional(self, name: str, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook a function of `module` that starts a collective of one tensor."""
        session, begins, started = self.session, self.collectives.begins, self._started
        group_at = list(inspect.signature(original).parameters).index("group")

        @functools.wraps(original)
        def functional(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or is_compiling():
                return original(*args, **kwargs)
            start = session.attempt_hook(name, begins, args)
            result = original(*args, **kwargs)
            if start is not None:
                session.attempt_hook(name, started, name, module, args[group_at:], kwargs, start, result)
            return result

        return functional

    def _started(
        self, name: str, module: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any], start: Instant, result: Any
    ) -> None:
        """`rest`: arguments from the group on, unless `kwargs` have it."""
        group = kwargs["group"] if "group" in kwargs else rest[0]
        try:
            number = self._groups[group]
        except (KeyError, TypeError):  # TypeError: a list of ranks
            number = self.collectives.functional_group(module, group)
            if isinstance(group, Hashable):
                self._groups[group] = number
        waiting = getattr(result, "elem", None)
        size = (result if waiting is None else waiting).nbytes
        op = self.session.under_way(_COLLECTIVE, name, start, number, size, 0)
        if waiting is None:
            self.session.ended(op)
        else:  # by its data: the script may wait for a view of it
            self.collectives.waited_for[waiting.data_ptr()] = (waiting, op)

    def wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook the function that waits for the result of a functional collective."""
        session, waited_for, ended = self.session, self.collectives.waited_for, self.session.ended

        @functools.wraps(original)
        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            if waited_for:
                try:
                    tensor = args[0] if args else kwargs["tensor"]
                    pending = waited_for.pop(tensor.data_ptr(), None)
                    if pending is not None:
                        ended(pending[1])
                except Exception as error:
                    session.failed("wait_tensor", error)
            return result

        return wait_tensor
