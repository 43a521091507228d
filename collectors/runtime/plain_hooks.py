"""Record calls that start collectives, and calls that wait for them.

`PlainHooks` does it in Python, for hosts and GPUs. `native/collectives.c` does the same for hosts: a training thread
that wakes from a wait finds little of Python in its caches, and would pay three times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tracekit.collectors.runtime.collectives import Collectives
from tracekit.collectors.runtime.device import Instant
from tracekit.collectors.runtime.wire_format import Category

try:
    from tracekit.collectors.runtime._native import Hooks
except ImportError:  # as in ring.py
    COMPILED = False
else:
    COMPILED = True

_COLLECTIVE = int(Category.COLLECTIVE)
#: Calls a hooked function, and records the call.
Hook = Callable[..., Any]


class PlainHooks:
    """The hooks of one session. The callers of hooks have made sure that the session records and nothing compiles."""

    def __init__(self, collectives: Collectives) -> None:
        self.session, self.collectives = collectives.session, collectives
        self._groups: dict[Hashable, int] = {}

    def collective(self, name: str, original: Callable[..., Any]) -> Hook:
        """Hook a method of process groups that starts a collective."""
        session, begins, started = self.session, self.collectives.begins, self.collectives.started
        off, inside = session.off, self.collectives.inside

        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            start = None
            try:
                if name in off:
                    session.skip(name)
                else:
                    start = begins(args)
            except Exception as error:
                session.failed(name, error)
            work = original(group, *args, **kwargs)
            if start is not None:
                try:
                    number = started(name, group, args, start, work)
                    if work is not None and (session.busy or session.optimizing):
                        inside[id(work)] = (name, number)  # by id: keeping the work would keep its tensors
                except Exception as error:
                    session.failed(name, error)
            return work

        return collective

    def wait(self, name: str, original: Callable[..., Any]) -> Hook:
        """Hook the method of works that waits for a collective."""
        waited_for, inside, session = self.collectives.waited_for, self.collectives.inside, self.session
        ended, waited = session.ended, self.collectives.waited

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            nested = inside.pop(id(work), None) if inside else None
            start = None
            if nested is not None and (session.busy or session.optimizing) and session.in_main_thread():
                start = session.attempt_hook(name, session.instant)
            result = original(work, *args, **kwargs)
            try:
                if nested is not None and start is not None:
                    waited(*nested, start)
                if waited_for:
                    pending = waited_for.pop(id(work), None)
                    if pending is not None:
                        ended(pending[1])
            except Exception as error:
                session.failed(name, error)
            return result

        return wait

    def functional(self, name: str, original: Callable[..., Any], module: Any, group_at: int) -> Hook:
        """Hook a function of `module` that starts a collective of one tensor; its argument `group_at` is the group."""
        session, begins, started, off = self.session, self.collectives.begins, self._started, self.session.off

        def functional(*args: Any, **kwargs: Any) -> Any:
            start = None
            try:
                if name in off:
                    session.skip(name)
                else:
                    start = begins(args)
            except Exception as error:
                session.failed(name, error)
            result = original(*args, **kwargs)
            if start is not None:
                try:
                    started(name, module, kwargs["group"] if "group" in kwargs else args[group_at], start, result)
                except Exception as error:
                    session.failed(name, error)
            return result

        return functional

    def _started(self, name: str, module: Any, group: Any, start: Instant, result: Any) -> None:
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

    def wait_tensor(self, name: str, original: Callable[..., Any]) -> Hook:
        """Hook the function that waits for the result of a functional collective."""
        session, waited_for, ended = self.session, self.collectives.waited_for, self.session.ended

        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if waited_for:
                try:
                    tensor = args[0] if args else kwargs["tensor"]
                    pending = waited_for.pop(tensor.data_ptr(), None)
                    if pending is not None:
                        ended(pending[1])
                except Exception as error:
                    session.failed(name, error)
            return result

        return wait_tensor


def hooks_of(collectives: Collectives) -> PlainHooks | Hooks:
    """The hooks of a session: compiled ones if there are any, and no GPU."""
    session, waited_for, inside = collectives.session, collectives.waited_for, collectives.inside
    if not COMPILED or session.device is not None:
        return PlainHooks(collectives)
    return Hooks(session, session.recorder.ring, collectives, torch.Tensor, session.off, waited_for, inside)
