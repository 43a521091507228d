"""Hooks for collectives: those Python starts, the buckets DistributedDataParallel starts, functional ones.

In: calls of torch. Out: collective records, with the process group by number. The end of a collective is when its
future completes; nobody waits for it here. NCCL's futures call back at once, on a stream that waits for the collective:
a mark placed there is passed when the collective ends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from tracekit.collectors.runtime.callbacks import Callbacks
from tracekit.collectors.runtime.compiling import is_compiling
from tracekit.collectors.runtime.device import Instant
from tracekit.collectors.runtime.session import Session
from tracekit.collectors.runtime.wire_format import Category, Flag

_COLLECTIVE, _BLOCKING = Category.COLLECTIVE, int(Flag.BLOCKING)
#: The collective that DistributedDataParallel's reducer starts from C++.
_REDUCERS = "allreduce"
_BUCKETS = "the all-reduce ops of DistributedDataParallel"
#: A guard under which operators pass by kernels registered for autograd.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001

#: Bound methods of `ProcessGroup` that start a collective; names of one collective, old and new, stand together.
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
#: P2p a pipeline schedule did not tag: recorded under its own name.
POINT_TO_POINT = ("send", "recv", "recv_anysource")
#: Functional collectives with one tensor, by their names, new and old: their result is waited for by `wait_tensor`.
FUNCTIONAL = (
    ("all_reduce",),
    ("all_gather_single", "all_gather_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
    ("all_to_all_single",),
    ("broadcast",),
)


#: `c10d::OpType::COALESCED`. NCCL's works of that type hold no future, and asking for it crashes.
_COALESCED = 17


class CollectiveHooks:
    """Hooks of `torch.distributed`; one instance per session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._groups: dict[str, int] = {}
        self._functional_groups: dict[Hashable, int] = {}
        self._reducer_hooked = False
        self._without_future: set[str] = set()
        self._waited_for: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._inside_computes: dict[int, tuple[str, int]] = {}
        self._callbacks = Callbacks()
        session.step_listeners.append(self._forget_unfinished)
        session.before_the_end.append(self._callbacks.wait_for_all)

    def install(self) -> None:
        """Hook the process group's methods, and, once DDP is used, its reducer's bucket reductions."""
        for names in COLLECTIVES:
            wraps = {name: functools.partial(self._collective, name) for name in names}
            self.session.patch_any(dist.ProcessGroup, wraps, lacks=f"the collective {names[0]}")
        for name in POINT_TO_POINT:
            wrap = functools.partial(self._point_to_point, name)
            self.session.patch(dist.ProcessGroup, name, wrap, lacks=f"calls of {name} outside a pipeline")
        self.session.patch(dist.Work, "wait", self._wait, lacks="what computes wait for inside")
        # Not `__init__`: the warnings it gives would name this file instead of the user's.
        ddp = torch.nn.parallel.DistributedDataParallel
        self.session.patch(ddp, "_ddp_init_helper", self._ddp_init, lacks=_BUCKETS)

    def group_number(self, group: Any) -> int:
        """The number that stands for a process group in records."""
        number = self._groups.get(group.group_name)
        if number is None:
            number = self._groups[group.group_name] = len(self._groups)
            self.session.recorder.fact(
                "group",
                {
                    "number": number,
                    "name": group.group_name,
                    "description": getattr(group, "group_desc", ""),  # from torch 2.3 on
                    "ranks": dist.get_process_group_ranks(group),
                },
            )
        return number

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.recording or is_compiling():
                return original(group, *args, **kwargs)
            start = session.attempt_hook(name, self._begins, args)
            if name == _REDUCERS and self._reducer_hooked:
                with _BelowAutograd():  # past the kernel for the reducer: this call is recorded here, at half the cost
                    work = original(group, *args, **kwargs)
            else:
                work = original(group, *args, **kwargs)
            if start is not None:
                session.attempt_hook(name, self._started, name, group, args, start, work)
                if work is not None and (session.busy or session.optimizing):
                    session.attempt_hook(name, self._note_inside, name, group, work)
            return work

        return collective

    def _note_inside(self, name: str, group: Any, work: Any) -> None:
        """Remember whose wait this work's is. By number: to keep the work would keep its tensors."""
        self._inside_computes[id(work)] = (name, self.group_number(group))

    def _point_to_point(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record when the call was made; when it ended is the waiter's business, and nobody waits twice."""
        session = self.session

        @functools.wraps(original)
        def point_to_point(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.recording or session.busy:
                return original(group, *args, **kwargs)
            start = session.attempt_hook(name, self._begins, args)
            work = original(group, *args, **kwargs)
            if start is not None:
                session.attempt_hook(name, self._posted, name, group, start)
            return work

        return point_to_point

    def _posted(self, name: str, group: Any, start: Instant) -> None:
        end = self.session.instant_like(start)
        self.session.record(Category.COLLECTIVE, f"p2p-{name}", start, end, peer=self.group_number(group))

    def _launched(self, args: tuple[Any, ...]) -> Instant | None:
        """When it is, on the clock of the first tensor; None while a graph is captured.

        A callback of a captured collective would draw its stream into the graph, and the capture would fail.
        """
        session = self.session
        if session.device is None:
            return session.instant()
        return None if session.device.capturing() else session.instant_for(_first_tensor(args))

    def _begins(self, args: tuple[Any, ...]) -> Instant | None:
        session = self.session
        if session.device is not None and session.device.capturing():
            return None
        if session.busy == 0 and session.in_main_thread():
            on_host = session.device is not None and not session.device.owns(_first_tensor(args))
            return session.begin_host_op() if on_host else session.begin_op()
        return self._launched(args)

    def _started(self, name: str, group: Any, args: tuple[Any, ...], start: Instant, work: Any) -> None:
        """Record the collective when its caller has waited for it or its future completes, at once without either."""
        number = self.group_number(group)
        flags = _flags(args) if self.session.in_main_thread() else 0
        ended = functools.partial(self._ended, name, start, number, self.session.step, _bytes(args), flags)
        if work is None:  # it runs on the current stream
            ended()
            return
        # A caller that waits at once goes on when it is over; the thread that completes futures may come late.
        waited_for_here = flags and isinstance(start, int)
        if not waited_for_here and name not in self._without_future and not self._is_coalesced(work):
            try:
                future = work.get_future()
            except RuntimeError:  # gloo has none for some collectives: then the end is when their waiter goes on
                self._without_future.add(name)
            else:
                if isinstance(start, int):
                    self._callbacks.hold(number, work)
                self._callbacks.add(future, functools.partial(self.session.attempt_hook, name, ended))
                return
        self._waited_for[id(work)] = (work, ended)

    def _is_coalesced(self, work: Any) -> bool:
        op_type = getattr(work, "_get_op_type", None)
        return self.session.device is not None and op_type is not None and op_type() == _COALESCED

    def _ended(self, name: str, start: Instant, group: int, step: int, size: int, flags: int) -> None:
        end = self.session.instant_like(start)
        self.session.record(_COLLECTIVE, name, start, end, peer=group, extra=size, step=step, flags=flags)

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waited_for, inside, session = self._waited_for, self._inside_computes, self.session

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            nested = inside.pop(id(work), None) if inside else None
            start = None
            if nested is not None and (session.busy or session.optimizing) and session.in_main_thread():
                start = session.attempt_hook("wait", session.instant)
            result = original(work, *args, **kwargs)
            if nested is not None and start is not None:
                session.attempt_hook("wait", self._waited, *nested, start)
            if waited_for:
                pending = waited_for.pop(id(work), None)
                if pending is not None:
                    session.attempt_hook("wait", pending[1])
            return result

        return wait

    def _waited(self, name: str, group: int, start: Instant) -> None:
        self.session.record(Category.WAIT, name, start, self.session.instant(), peer=group)

    def _forget_unfinished(self) -> None:
        self.session.unfinished += len(self._waited_for)
        self._waited_for.clear()
        self._inside_computes.clear()

    # ---- FSDP2 ---------------------------------------------------------------------------------------------------

    def install_fsdp(self, module: Any) -> None:
        """Hook where FSDP2 waits for parameters: on a GPU a stream waits for an event, and no work is asked."""
        lacks = "what computes on a GPU wait for FSDP2's parameters"
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
        self._waited("wait_for_unshard", self.group_number(group._all_gather_process_group), start)  # noqa: SLF001

    # ---- functional collectives ----------------------------------------------------------------------------------

    def install_functional(self, module: Any) -> None:
        """Hook the Python side of functional collectives, which process groups never see.

        Not with dispatcher kernels: those would stand in front of the registered autograd formulas.
        """
        for names in FUNCTIONAL:
            name = next((name for name in names if hasattr(module, name)), names[0])  # an old name calls the new one
            wrap = functools.partial(self._functional, names[0], module)
            self.session.patch(module, name, wrap, lacks=f"the functional collective {names[0]}")
        self.session.patch(module, "wait_tensor", self._wait_tensor, lacks="the ends of functional collectives")

    def _functional(self, name: str, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session
        group_at = list(inspect.signature(original).parameters).index("group")

        @functools.wraps(original)
        def functional(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or is_compiling():
                return original(*args, **kwargs)
            start = session.attempt_hook(name, self._begins, args)
            result = original(*args, **kwargs)
            if start is not None:
                group = kwargs["group"] if "group" in kwargs else args[group_at]
                session.attempt_hook(name, self._functional_started, name, module, group, start, result)
            return result

        return functional

    def _functional_started(self, name: str, module: Any, group: Any, start: Instant, result: Any) -> None:
        try:
            number = self._functional_groups[group]
        except (KeyError, TypeError):  # TypeError: a list of ranks
            name_of_group = module._resolve_group_name(group)  # noqa: SLF001
            number = self.group_number(torch.distributed.distributed_c10d._resolve_process_group(name_of_group))  # noqa: SLF001
            if isinstance(group, Hashable):
                self._functional_groups[group] = number
        waiting = getattr(result, "elem", None)
        size = (result if waiting is None else waiting).nbytes
        ended = functools.partial(self._ended, name, start, number, self.session.step, size, 0)
        if waiting is None:
            ended()
        else:
            self._waited_for[waiting.data_ptr()] = (waiting, ended)  # a view of it may be what is waited for

    def _wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, waited_for = self.session, self._waited_for

        def tensor_waited_for(tensor: Any) -> None:
            pending = waited_for.pop(tensor.data_ptr(), None)
            if pending is not None:
                pending[1]()

        @functools.wraps(original)
        def wait_tensor(tensor: Any) -> Any:
            result = original(tensor)
            if waited_for and not is_compiling():
                session.attempt_hook("wait_tensor", tensor_waited_for, tensor)
            return result

        return wait_tensor

    # ---- DistributedDataParallel -------------------------------------------------------------------------------

    def _ddp_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            session.install("c10d::allreduce_", self._hook_reducer, lacks=_BUCKETS)

        return init

    def _hook_reducer(self) -> None:
        """The reducer calls `c10d::allreduce_` from C++: a dispatcher kernel above the backend's sees it."""
        if self._reducer_hooked:
            return
        session = self.session
        reduce = _below_autograd(torch.ops.c10d.allreduce_.default)

        def kernel(keyset: Any, tensors: Any, group: Any, *args: Any) -> Any:
            if not session.recording:
                return reduce(keyset, tensors, group, *args)
            start = session.attempt_hook("ddp-buckets", self._launched, (tensors,))
            result = reduce(keyset, tensors, group, *args)
            if start is not None:
                session.attempt_hook("ddp-buckets", self._bucket_started, group, tensors, start, result[1])
            return result

        session.patches.add_patch(_Kernel("allreduce_", kernel))
        self._reducer_hooked = True

    def _bucket_started(self, group: Any, tensors: Any, start: Instant, work: Any) -> None:
        self._started(_REDUCERS, dist.ProcessGroup.unbox(group), (tensors,), start, dist.Work.unbox(work))


def _below_autograd(operator: Any) -> Callable[..., Any]:
    """`operator` without the kernels registered for autograd, ours among them; takes the keys of the call first."""
    below = getattr(torch._C, "_after_autograd_keyset", None)  # noqa: SLF001  torch tells it nowhere else
    if below is not None:
        return lambda keyset, *args: operator.redispatch(keyset & below, *args)

    def call(_keyset: Any, *args: Any) -> Any:
        with _BelowAutograd():
            return operator(*args)

    return call


class _Kernel:
    """A dispatcher kernel in front of an operator of `c10d`; no autograd formula stands there."""

    def __init__(self, operator: str, kernel: Callable[..., Any]) -> None:
        self.installed = False
        self._operator, self._kernel = operator, kernel
        self._library: Any = None

    def install(self) -> None:
        """Register it."""
        self._library = torch.library.Library("c10d", "IMPL")
        with_keyset = "with_keyset" in inspect.signature(self._library.impl).parameters
        kernel = self._kernel if with_keyset else functools.partial(self._kernel, None)
        for key in ("AutogradCPU", "AutogradCUDA"):
            self._library.impl(self._operator, kernel, key, **({"with_keyset": True} if with_keyset else {}))
        self.installed = True

    def remove(self) -> None:
        """Take it out of the dispatcher."""
        self._library._destroy()  # noqa: SLF001  the only way to unregister before the end of the process
        self._library = None
        self.installed = False


def _first_tensor(args: Any) -> torch.Tensor | None:
    """The first tensor among arguments, looking into lists."""
    for one in args:
        if isinstance(one, torch.Tensor):
            return one
        if isinstance(one, (list, tuple)):
            found = _first_tensor(one)
            if found is not None:
                return found
    return None


def _flags(args: tuple[Any, ...]) -> int:
    """Whether the caller of `torch.distributed` waits itself: the options, the last argument, say so."""
    return 0 if not args or getattr(args[-1], "asyncOp", True) else _BLOCKING


def _bytes(args: tuple[Any, ...]) -> int:
    """Size of the first tensor argument(s), bytes."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and len(first) == 1:  # nearly always
        first = first[0]
    if isinstance(first, torch.Tensor):
        return int(first.nbytes)
    if isinstance(first, (list, tuple)):
        return sum(_bytes((item,)) for item in first)
    return 0
