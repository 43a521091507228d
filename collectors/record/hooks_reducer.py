"""Hooks for the gradient reductions that the reducer of DistributedDataParallel runs in C++.

On the host, the reducer's buckets are one collective: it begins when the backward has computed all gradients, and ends
when the reducer, on the training thread, has waited for the last bucket. A gloo thread that reported the end of each
bucket would compete with the training for the GIL, and be late by up to the interpreter's switch interval. Buckets on a
GPU are recorded one by one, because nothing waits for them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import unserializable_hook

from .collectives import SessionCollectives
from .compiling import is_compiling
from .device import Instant
from .session import now_ns
from .wire_format import NONE, Category, Flag

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
        named = [(name, one) for name, one in ddp.module.named_parameters() if one.requires_grad]
        parameters = [one for _, one in named]
        of_layers = list(bytes_of_layers((name, one.nbytes) for name, one in named).values())
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
    sizes = bytes_of_layers((name, one.nbytes) for name, one in inner.named_parameters() if one.requires_grad)
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
        self._bytes = sum(one.nbytes for one in parameters)
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
