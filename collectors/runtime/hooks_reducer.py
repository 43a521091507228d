"""Hooks for the buckets that the reducer of DistributedDataParallel reduces, in C++."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tracekit.collectors.runtime.collectives import Collectives
from tracekit.collectors.runtime.device import Instant

#: The collective that DistributedDataParallel's reducer starts from C++.
REDUCERS = "allreduce"
BUCKETS = "the all-reduce ops of DistributedDataParallel"
#: A guard under which operators pass by kernels registered for autograd.
BelowAutograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001


class ReducerHooks:
    """A dispatcher kernel for the buckets, in place once DistributedDataParallel is used; one instance per session."""

    def __init__(self, collectives: Collectives) -> None:
        self.session, self.collectives = collectives.session, collectives
        self.hooked = False

    def install(self) -> None:
        """Wait for the first DistributedDataParallel."""
        # Not `__init__`: the warnings it gives would name this file instead of the user's.
        ddp = torch.nn.parallel.DistributedDataParallel
        self.session.patch(ddp, "_ddp_init_helper", self._ddp_init, lacks=BUCKETS)

    def _ddp_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            session.install("c10d::allreduce_", self.hook, lacks=BUCKETS)

        return init

    def hook(self) -> None:
        """The reducer calls `c10d::allreduce_` from C++: a dispatcher kernel above the backend's sees it."""
        if self.hooked:
            return
        session = self.session
        reduce = below_autograd(torch.ops.c10d.allreduce_.default)

        def kernel(keyset: Any, tensors: Any, group: Any, *args: Any) -> Any:
            if not session.recording:
                return reduce(keyset, tensors, group, *args)
            start = session.attempt_hook("ddp-buckets", self.collectives.launched, (tensors,))
            result = reduce(keyset, tensors, group, *args)
            if start is not None:
                session.attempt_hook("ddp-buckets", self._bucket_started, group, tensors, start, result[1])
            return result

        session.patches.add_patch(Kernel("allreduce_", kernel))
        self.hooked = True

    def _bucket_started(self, group: Any, tensors: Any, start: Instant, work: Any) -> None:
        self.collectives.started(REDUCERS, dist.ProcessGroup.unbox(group), (tensors,), start, dist.Work.unbox(work))


def below_autograd(operator: Any) -> Callable[..., Any]:
    """`operator` without the kernels registered for autograd, ours among them; takes the keys of the call first."""
    below = getattr(torch._C, "_after_autograd_keyset", None)  # noqa: SLF001  torch tells it nowhere else
    if below is not None:
        return lambda keyset, *args: operator.redispatch(keyset & below, *args)

    def call(_keyset: Any, *args: Any) -> Any:
        with BelowAutograd():
            return operator(*args)

    return call


class Kernel:
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
