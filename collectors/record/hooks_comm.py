"""Hooks for collectives: those that Python starts through a process group or as functions, those that the reducer of
DistributedDataParallel runs in C++, and waits inside computes.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import unserializable_hook

from .collectives import SessionCollectives
from .device import Instant
from .session import is_compiling, now_ns
from .wire_format import NONE, Category, Flag

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
            # Some callers name what they pass: `torch.distributed.barrier` its options.
            passed = (*args, *kwargs.values()) if kwargs else args
            start = attempt(name, begins, passed)
            work = original(group, *args, **kwargs)
            if start is not None:
                attempt(name, started, name, group, passed, start, work)
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
    """Hooks of `torch.distributed._functional_collectives`, whose calls bypass the methods of process groups."""

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


#: The collective that DistributedDataParallel's reducer starts from C++.
REDUCERS = "allreduce"
BUCKETS = "the all-reduce ops of DistributedDataParallel"
_HOOK = "ddp-buckets"
#: What DistributedDataParallel puts into a bucket by default, bytes, and into the first one, MiB.
DEFAULT_BUCKET, DEFAULT_FIRST_MB = 25 << 20, 1.0
#: The name of a parameter up to the number of its layer, as in "model.layers.3.mlp.weight".
_NUMBERED = re.compile(r"(?:[^.\d][^.]*\.)*\d+(?=\.)")
#: A guard under which operators bypass kernels registered for autograd.
BelowAutograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001


class ReducerHooks:
    """Hooks for jobs that use DistributedDataParallel; one instance per session.

    On the host, the reducer's buckets are one collective: it begins when the backward has computed all gradients, and
    ends when the reducer has waited for the last bucket. A gloo thread that reported each would compete with the
    training for the GIL. Buckets on a GPU are recorded one by one: nothing waits for them.

    `hooked`: a dispatcher kernel sees each bucket.
    """

    def __init__(self, collectives: SessionCollectives) -> None:
        self.session, self.collectives = collectives.session, collectives
        self.hooked = False
        self._on_host: dict[int, HostReduction] = {}

    def install(self) -> None:
        """Wait for the first DistributedDataParallel."""
        # Not `__init__`: its warnings would name this file instead of the user's.
        ddp = torch.nn.parallel.DistributedDataParallel
        self.session.patch(ddp, "_ddp_init_helper", self._ddp_init, lacks=BUCKETS)

    def _ddp_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            session.install("the reducer", self._watch, ddp, lacks=BUCKETS)

        return init

    def _watch(self, ddp: Any) -> None:
        named = [(name, parameter) for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named]
        of_layers = list(bytes_of_layers((name, parameter.nbytes) for name, parameter in named).values())
        cap_mb = getattr(ddp, "bucket_bytes_cap", DEFAULT_BUCKET) / (1 << 20)
        first_mb = DEFAULT_FIRST_MB if getattr(ddp, "bucket_bytes_cap_default", True) else cap_mb
        figures = {"bytes": of_layers, "bucket_cap_mb": cap_mb, "first_bucket_mb": first_mb}
        self.session.recorder.fact("gradients", figures)
        device = self.session.device
        if self.hooked or self.session.options.buckets or (device is not None and any(map(device.owns, parameters))):
            self.hook()
            return
        if not self._on_host:
            self.session.patch(dist.Reducer, "prepare_for_backward", self._prepared, lacks=BUCKETS)
        self._on_host[id(ddp.reducer)] = HostReduction(self.collectives, ddp.process_group, parameters)

    def _prepared(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook the call that prepares the reducer if the next backward reduces."""
        session, on_host = self.session, self._on_host

        @functools.wraps(original)
        def prepare_for_backward(reducer: Any, *args: Any, **kwargs: Any) -> None:
            original(reducer, *args, **kwargs)
            if session.recording and not self.hooked and id(reducer) in on_host:
                session.attempt_hook(_HOOK, self._expect, on_host[id(reducer)])

        return prepare_for_backward

    def _expect(self, reduction: HostReduction) -> None:
        if reduction.expected:  # none came: the first parameter got no gradient, or another forward came first
            self.session.install("c10d::allreduce_", self.hook, lacks=BUCKETS)
        reduction.expected = not self.hooked

    def hook(self) -> None:
        """Add a dispatcher kernel above the backend's: it sees the reducer's calls of `c10d::allreduce_` from C++."""
        if self.hooked:
            return
        session = self.session
        reduce = below_autograd(torch.ops.c10d.allreduce_.default)

        def kernel(keyset: Any, tensors: Any, group: Any, *args: Any) -> Any:
            if not session.recording:
                return reduce(keyset, tensors, group, *args)
            start = session.attempt_hook(_HOOK, self.collectives.launched, (tensors,))
            result = reduce(keyset, tensors, group, *args)
            if start is not None:
                session.attempt_hook(_HOOK, self._bucket_started, group, tensors, start, result[1])
            return result

        session.patches.add_patch(DispatcherKernel("allreduce_", kernel))
        self.hooked = True
        for reduction in self._on_host.values():
            reduction.expected = False

    def _bucket_started(self, group: Any, tensors: Any, start: Instant, work: Any) -> None:
        queued_us = self.session.queued_us() if type(start) is int else NONE
        group, work = dist.ProcessGroup.unbox(group), dist.Work.unbox(work)
        self.collectives.started(REDUCERS, group, (tensors,), start, work, flags=int(Flag.BUCKET), queued_us=queued_us)


def bytes_of_layers(parameters: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The bytes of each layer, in order: parameters whose names agree up to their first number, or their first part."""
    sizes: dict[str, int] = {}
    for name, size in parameters:
        numbered = _NUMBERED.match(name)
        layer = name.partition(".")[0] if numbered is None else numbered.group()
        sizes[layer] = sizes.get(layer, 0) + size
    return sizes


def bytes_of_stage(module: Any) -> list[int]:
    """The bytes of the gradients of each numbered layer of a pipeline stage; without any, of each part.

    What has no number, such as an embedding or a head, belongs to the layer before it, or to the first one.
    """
    inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
    trained = ((name, weight.nbytes) for name, weight in inner.named_parameters() if weight.requires_grad)
    sizes = bytes_of_layers(trained)
    numbered = {name: 0 for name in sizes if _NUMBERED.match(f"{name}.")} or dict.fromkeys(sizes, 0)
    layer = next(iter(numbered), None)
    for name, size in sizes.items():
        layer = name if name in numbered else layer
        if layer is not None:
            numbered[layer] += size
    return list(numbered.values())


class HostReduction:
    """All buckets of one reducer on the host. `expected`: the next backward reduces."""

    def __init__(self, collectives: SessionCollectives, group: Any, parameters: list[Any]) -> None:
        self.session, self._collectives, self._group = collectives.session, collectives, group
        self._bytes = sum(parameter.nbytes for parameter in parameters)
        self.expected = False
        # The gradient of the first parameter is usually the last one. The reducer therefore waits at the end of the
        # backward that computes it, even if that backward runs inside another, as in a reentrant checkpoint.
        parameters[0].register_hook(self._has_gradient)

    @unserializable_hook  # type: ignore[untyped-decorator]  # torch gives it no types
    def _has_gradient(self, _gradient: Any) -> None:
        if self.expected and not is_compiling():
            self.expected = False
            self.session.attempt_hook(_HOOK, self._at_the_end_of_the_backward, self._computed)

    def _at_the_end_of_the_backward(self, body: Callable[..., None], *args: Any) -> None:
        """Have autograd call `body` once all gradients are computed, after the callbacks queued so far."""
        call = functools.partial(self.session.attempt_hook, _HOOK, body, *args)
        torch.autograd.Variable._execution_engine.queue_callback(call)  # noqa: SLF001  torch offers it nowhere else

    def _computed(self) -> None:
        """Called when all gradients are computed. The reducer waits next; a callback queued now runs after that."""
        self._at_the_end_of_the_backward(self._reduced, now_ns())

    def _reduced(self, start: int) -> None:
        number = self._collectives.group_number(self._group)
        self.session.ended(self.session.under_way(Category.COLLECTIVE, REDUCERS, start, number, self._bytes, 0))


def below_autograd(operator: Any) -> Callable[..., Any]:
    """`operator` without the kernels registered for autograd, including ours; the first argument is the call's keys."""
    below = getattr(torch._C, "_after_autograd_keyset", None)  # noqa: SLF001  torch exposes it nowhere else
    if below is not None:
        return lambda keyset, *args: operator.redispatch(keyset & below, *args)

    def call(_keyset: Any, *args: Any) -> Any:
        with BelowAutograd():
            return operator(*args)

    return call


class DispatcherKernel:
    """A dispatcher kernel in front of an operator of `c10d` that has no autograd formula."""

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
        """Remove it from the dispatcher."""
        self._library._destroy()  # noqa: SLF001  the only way to unregister before the end of the process
        self._library = None
        self.installed = False
