"""Hooks for collectives that Python starts through a process group, and for waits inside computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .collectives import SessionCollectives
from .compiling import is_compiling
from .device import Instant
from .hooks_reducer import REDUCERS, BelowAutograd, ReducerHooks
from .wire_format import NONE, Category

#: Bound methods of `ProcessGroup` that start a collective; old and new names of one collective are grouped.
COLLECTIVES = (
    ("allreduce",),
    ("allreduce_coalesced",),
    ("allgather",),
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("allgather_coalesced",),
    ("reduce_scatter",),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("alltoall",),
    ("all_to_all_single", "alltoall_base"),
    ("broadcast",),
    ("reduce",),
    ("gather",),
    ("scatter",),
    ("barrier",),
)
#: Point-to-point calls outside a pipeline schedule, recorded under their own names.
POINT_TO_POINT = ("send", "recv", "recv_anysource")


class CollectiveHooks:
    """Hooks of `torch.distributed`; one instance per session."""

    def __init__(self, collectives: SessionCollectives, reducer: ReducerHooks) -> None:
        self.session = collectives.session
        self.collectives, self._reducer = collectives, reducer

    def install(self) -> None:
        """Hook the methods of process groups and works."""
        for names in COLLECTIVES:
            wraps = {name: functools.partial(self.collective, name) for name in names}
            self.session.patch_any(dist.ProcessGroup, wraps, lacks=f"the collective {names[0]}")
        for name in POINT_TO_POINT:
            wrap = functools.partial(self._point_to_point, name)
            self.session.patch(dist.ProcessGroup, name, wrap, lacks=f"calls of {name} outside a pipeline")
        self.session.patch(dist.Work, "wait", self.wait, lacks="the waits inside computes")

    def collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook a method of process groups that starts a collective."""
        session, recorded = self.session, self._recorded(name, original)
        reducer = self._reducer if name == REDUCERS else None

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or is_compiling():
                return original(*args, **kwargs)
            if reducer is not None and reducer.hooked:
                with BelowAutograd():  # bypass the reducer's kernel: this call is recorded here, at half the cost
                    return recorded(*args, **kwargs)
            return recorded(*args, **kwargs)

        return collective

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        attempt, begins, started = self.session.attempt_hook, self.collectives.begins, self._started

        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            start = attempt(name, begins, args)
            work = original(group, *args, **kwargs)
            if start is not None:
                attempt(name, started, name, group, args, start, work)
            return work

        return recorded

    def _started(self, name: str, group: Any, args: tuple[Any, ...], start: Instant, work: Any) -> None:
        number, rows = self.collectives.started(name, group, args, start, work)
        if work is not None and (self.session.busy or self.session.optimizing):
            self.collectives.inside[id(work)] = (name, number, rows)  # by id: keeping the work would keep its tensors

    def _point_to_point(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record when the call was made; its end is recorded where its caller waits."""
        session = self.session

        @functools.wraps(original)
        def point_to_point(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.recording or session.busy:
                return original(group, *args, **kwargs)
            start = session.attempt_hook(name, self.collectives.begins, args)
            work = original(group, *args, **kwargs)
            if start is not None:
                session.attempt_hook(name, self._posted, name, group, start)
            return work

        return point_to_point

    def _posted(self, name: str, group: Any, start: Instant) -> None:
        end = self.session.instant_like(start)
        self.session.record(Category.COLLECTIVE, f"p2p-{name}", start, end, peer=self.collectives.group_number(group))

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook the method of works that waits for a collective."""
        session, waited = self.session, self.collectives.waited
        waited_for, inside, ended = self.collectives.waited_for, self.collectives.inside, self.session.ended

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            nested = inside.pop(id(work), None) if inside else None
            start = None
            if nested is not None and (session.busy or session.optimizing) and session.in_main_thread():
                start = session.attempt_hook("wait", session.instant)
            result = original(work, *args, **kwargs)
            try:
                if nested is not None and start is not None:
                    waited(*nested, start)
                if waited_for:
                    pending = waited_for.pop(id(work), None)
                    if pending is not None:
                        ended(pending[1])
            except Exception as error:
                session.failed("wait", error)
            return result

        return wait

    # ---- FSDP2 ---------------------------------------------------------------------------------------------------

    def install_fsdp(self, module: Any) -> None:
        """Hook the place where FSDP2 waits for parameters: on a GPU, a stream waits for an event, not for a work."""
        lacks = "the waits of GPU computes for FSDP2's parameters"
        self.session.patch(module, "FSDPParamGroup.wait_for_unshard", self._wait_for_unshard, lacks=lacks)

    def _wait_for_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def wait_for_unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            device = session.device
            if device is None or not session.busy or not session.recording or device.capturing():
                return original(group, *args, **kwargs)
            start = session.attempt_hook("fsdp", session.instant)
            result = original(group, *args, **kwargs)
            if start is not None:
                session.attempt_hook("fsdp", self._unsharded, group, start)
            return result

        return wait_for_unshard

    def _unsharded(self, group: Any, start: Instant) -> None:
        number = self.collectives.group_number(group._all_gather_process_group)  # noqa: SLF001
        self.collectives.waited("wait_for_unshard", number, NONE, start)
