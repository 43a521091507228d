"""Hooks for work other than computes: optimizer, data loading, garbage collection, checkpoints.

In: calls of torch and of the interpreter. Out: records of the session. Megatron-LM's parallel state and timers are
read if the job imported them.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from .device import Instant
from .session import Session, is_compiling, now_ns
from .wire_format import Category

#: Functions that scale or clip gradients for the optimizer. The inner ones cover scripts that imported
#: `clip_grad_norm_` before it was hooked; not every version of torch has them.
CLIPPING: dict[Any, tuple[str, ...]] = {
    torch.nn.utils: (
        "clip_grad_norm_",
        "clip_grad_value_",
        "get_total_norm",
        "clip_grads_with_norm_",
        "clip_grad._get_total_norm",
        "clip_grad._clip_grads_with_norm_",
    ),
    inspect.getmodule(torch.cuda.amp.GradScaler.unscale_): ("GradScaler.unscale_",),  # torch 2.3 moved it
}
#: Young collections shorter than this, ns, are not worth a record.
SHORT_COLLECTION_NS = 500_000
#: Names of sizes and ranks in `megatron.core.parallel_state` -> their names in tracekit.
MEGATRON_DIMENSIONS = {
    "data_parallel": "dp",
    "pipeline_model_parallel": "pp",
    "tensor_model_parallel": "tp",
    "context_parallel": "cp",
    "expert_model_parallel": "ep",
}


class HostHooks:
    """Optimizer, data loader, garbage collector, checkpoint; one instance per session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._optimizer: tuple[int, Instant] | None = None
        self._gc_start: int | None = None
        self._megatron_timers: dict[int, Instant] = {}

    def install(self) -> None:
        """Hook modules that torch imports."""
        session = self.session
        session.install("the optimizer's hooks", self._hook_optimizers, lacks="optimizer ops, and so the ends of steps")
        for owner, names in CLIPPING.items():
            session.patch_any(owner, dict.fromkeys(names, self._clipping), lacks="clipping in optimizer ops")
        load = functools.partial(self._timed, Category.DATA_LOAD, "data-load", session.evaluation.loads)
        # The one place that all loaders pass through.
        session.patch(torch.utils.data.dataloader, "_BaseDataLoaderIter.__next__", load, lacks="data-load ops")
        save = functools.partial(self._timed, Category.CHECKPOINT, "checkpoint", self._saves)
        session.patch(torch, "save", save, lacks="the checkpoint ops of torch.save")
        gc.callbacks.append(self._on_gc)

    def _hook_optimizers(self) -> None:
        torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer)
        torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer)

    def install_distributed_checkpoint(self, module: ModuleType) -> None:
        """Hook `torch.distributed.checkpoint.save`; called when it is imported."""
        for name in ("save", "async_save"):
            timed = functools.partial(self._timed, Category.CHECKPOINT, "checkpoint", self._saves)
            self.session.patch(module, name, timed, lacks="the checkpoint ops of torch.distributed.checkpoint")

    def _saves(self, _saved: Any) -> None:
        self.session.evaluation.ends()

    def _timed(
        self, category: Category, name: str, before: Callable[[Any], None], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Time calls of `original`. `before` gets the first argument and may end an evaluation."""
        session = self.session

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nested = session.busy > session.evaluation.under_way
            if not session.recording or nested or not session.in_main_thread():
                return original(*args, **kwargs)
            session.attempt_hook("evaluation", before, args[0] if args else None)
            if session.evaluation.under_way:
                return original(*args, **kwargs)
            start_ns = session.attempt_hook(name, session.begin_host_op)
            session.busy += 1
            try:
                return original(*args, **kwargs)
            finally:
                session.busy -= 1
                if start_ns is not None and session.recording:
                    session.attempt_hook(name, lambda: session.record(category, name, start_ns, now_ns()))

        return timed

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            quiet = is_compiling() or not session.recording or session.busy or session.optimizing
            if quiet or not session.in_main_thread():
                return original(*args, **kwargs)
            session.attempt_hook("optimizer", session.clipping_begins)
            session.optimizing = True
            try:
                return original(*args, **kwargs)
            finally:
                session.optimizing = False

        return clip

    def _before_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.session.attempt_hook("optimizer", self.optimizer_begins, optimizer)

    def optimizer_begins(self, optimizer: Any) -> None:
        """Called before `optimizer` steps. One that steps inside another's step is part of it, as are those that
        ZeroRedundancyOptimizer and DeepSpeed wrap.
        """
        inside = self._optimizer is not None and self._optimizer[0] != id(optimizer)
        if inside or is_compiling():
            return
        session = self.session
        if session.evaluation.under_way:
            session.attempt_hook("evaluation", session.evaluation.ends)
        start = session.attempt_hook("optimizer", session.optimizer_begins, id(optimizer))
        self._optimizer = None if start is None else (id(optimizer), start)
        session.optimizing = start is not None

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.session.attempt_hook("optimizer", self.optimizer_ended, optimizer)

    def optimizer_ended(self, optimizer: Any) -> None:
        """Called after `optimizer` has stepped."""
        begun = self._optimizer
        if begun is None or begun[0] != id(optimizer) or is_compiling():
            return
        self._optimizer = None
        self.session.optimizing = False
        self.session.attempt_hook("optimizer", self.session.optimizer_ended, begun[1])

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if not self.session.recording or "gc" in self.session.off:
            return
        try:
            if phase == "start":
                self._gc_start = now_ns()
            elif self._gc_start is not None:
                start_ns, self._gc_start = self._gc_start, None
                end_ns = now_ns()
                if info["generation"] < 2 and end_ns - start_ns <= SHORT_COLLECTION_NS:
                    return
                if self.session.busy == 0 and self.session.in_main_thread():
                    self.session.begin_host_op()
                self.session.record(Category.GC, "gc", start_ns, end_ns)
        except Exception as error:
            self.session.failed("gc", error)

    # ---- Megatron-LM -------------------------------------------------------------------------------------------

    def describe_megatron(self) -> None:
        """Write the ranks and sizes from Megatron's parallel state, once it is initialized."""
        state = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            return
        ranks, sizes = {}, {}
        for dimension, word in MEGATRON_DIMENSIONS.items():
            rank_of, size_of = (getattr(state, f"get_{dimension}_{what}", None) for what in ("rank", "world_size"))
            if rank_of is not None and size_of is not None:
                ranks[word], sizes[word] = int(rank_of()), int(size_of())
        chunks = getattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: None)()
        self.session.recorder.fact("megatron", {"ranks": ranks, "sizes": sizes, "vpp": int(chunks or 1)})

    def install_megatron_timers(self, module: ModuleType) -> None:
        """Record Megatron's timers as ops under their own names."""
        for name, wrap in (("start", self._megatron_start), ("stop", self._megatron_stop)):
            self.session.patch(module, f"Timer.{name}", wrap, lacks="what Megatron's timers time")

    def _megatron_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(timer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(timer, *args, **kwargs)
            if start_ns := self.session.begin_span(_timer_name(timer)):  # a timer can be the first record of a step
                self._megatron_timers[id(timer)] = start_ns
            return result

        return start

    def _megatron_stop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stop(timer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(timer, *args, **kwargs)
            start = self._megatron_timers.pop(id(timer), None)
            if start is not None:
                self.session.attempt_hook("megatron-timers", self.session.end_span, _timer_name(timer), start)
            return result

        return stop


def _timer_name(timer: Any) -> str:
    """The name of one of Megatron's timers, which a subclass may not have."""
    return str(getattr(timer, "name", type(timer).__name__))
