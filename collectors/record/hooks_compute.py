"""Hooks for forward and backward: pipeline schedules, loops without a pipeline, and DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .device import Instant
from .hooks_comm import bytes_of_stage
from .hooks_host import HostHooks
from .patches import Patch, Wrap
from .session import Session, in_training_mode, is_compiling, now_ns
from .wire_format import NONE, Category, Flag

FORWARD, BACKWARD, BACKWARD_WEIGHT = "forward-compute", "backward-compute", "backward-weight"
LOSS = "loss"
#: Method of a pipeline stage that computes -> the kind of its op.
COMPUTE_SOURCES = {
    "forward_one_chunk": FORWARD,
    "backward_one_chunk": BACKWARD,
    "backward_weight_one_chunk": BACKWARD_WEIGHT,
}
#: Method of a pipeline stage that creates p2p ops -> their kind.
P2P_SOURCES = {
    "get_fwd_recv_ops": "forward-recv",
    "get_fwd_send_ops": "forward-send",
    "get_bwd_recv_ops": "backward-recv",
    "get_bwd_send_ops": "backward-send",
}
_TAG = "_tracekit_tag"
_LAST_BACKWARD = int(Flag.LAST_BACKWARD)


class UncopiedHook:
    """A hook of one module of the user's. Copies of the module (averaged weights, the best model so far) and files with
    it get a hook that does nothing, and that Python finds without tracekit.
    """

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __call__(self, *args: Any) -> None:
        """Call the body."""
        self._body(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class PipelineHooks:
    """Hooks of `torch.distributed.pipelining`; one instance per session.

    `pipelined` is called when the first stage has computed.
    """

    def __init__(self, session: Session, pipelined: Callable[[], None]) -> None:
        self.session = session
        self._pipelined = pipelined
        self._waiting: dict[int, tuple[Any, str, int, int, int, Instant]] = {}
        self._described: set[int] = set()
        session.step_listeners.append(self._forget_unfinished)

    def install(self, schedules: ModuleType) -> None:
        """Hook the stages and schedules; called when `torch.distributed.pipelining.schedules` is imported."""
        for method, kind in COMPUTE_SOURCES.items():
            self._patch(schedules, f"_PipelineStageBase.{method}", functools.partial(self._compute, kind), kind)
        for method, kind in P2P_SOURCES.items():
            self._patch(schedules, f"_PipelineStageBase.{method}", functools.partial(self._tag, kind), kind)
        self._patch(schedules, "_PipelineSchedule._maybe_compute_loss", self._loss, "loss (in forward-compute)")
        self._patch(schedules, "_batch_p2p", self._batch, "send and recv")
        self._patch(schedules, "_wait_batch_p2p", self._wait, "send and recv")

    def _patch(self, schedules: ModuleType, path: str, wrap: Wrap, kind: str) -> None:
        self.session.patch(schedules, path, wrap, lacks=f"the {kind} ops of pipeline stages")

    def _compute(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def compute(*args: Any, **kwargs: Any) -> Any:
            evaluated = session.evaluation.under_way and not torch.is_grad_enabled()
            if not session.recording or evaluated:
                return original(*args, **kwargs)
            start = session.attempt_hook(name, self._begins)
            session.busy += 1
            try:
                return original(*args, **kwargs)
            finally:
                session.busy -= 1
                if start is not None:
                    session.attempt_hook(name, self._computed, name, start, args, kwargs)

        return compute

    def _begins(self) -> Instant:
        if self.session.evaluation.under_way:
            self.session.evaluation.ends()
        return self.session.begin_op()

    def _computed(self, name: str, start: Instant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        end = self.session.instant()
        stage, chunk_id = args[0], args[1] if len(args) > 1 else _chunk(kwargs)
        index = stage.stage_index
        if index not in self._described:
            self._describe(stage)
        if name == FORWARD and stage.is_last:
            self.session.hold(name, start, end, chunk_id, index)
            return
        flags = _LAST_BACKWARD if kwargs and kwargs.get("last_backward") else 0
        self.session.record_compute(name, start, end, chunk_id, index, flags=flags)

    def _describe(self, stage: Any) -> None:
        self._described.add(stage.stage_index)
        self._pipelined()
        self.session.recorder.fact(
            "pipeline",
            {
                "stage_index": stage.stage_index,
                "num_stages": stage.num_stages,
                "ranks": torch.distributed.get_process_group_ranks(stage.group),
                "group_rank": stage.group_rank,
            },
        )
        self.session.attempt_hook("layers", self._measure, stage)

    def _measure(self, stage: Any) -> None:
        self.session.recorder.fact("layers", {"stage_index": stage.stage_index, "bytes": bytes_of_stage(stage.submod)})

    def _loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def ended(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (args[1] if len(args) > 1 else kwargs["stage"]).is_last:
                session.flush_held(session.instant())

        @functools.wraps(original)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if session.recording:
                session.attempt_hook(LOSS, ended, args, kwargs)
            return result

        return compute_loss

    def _tag(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def tag_all(ops: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tag = (kind, args[1] if len(args) > 1 else _chunk(kwargs), args[0].stage_index)
            for op in ops:
                setattr(op, _TAG, tag)

        @functools.wraps(original)
        def make_ops(*args: Any, **kwargs: Any) -> Any:
            ops = original(*args, **kwargs)
            if session.recording and not session.evaluation.under_way:
                session.attempt_hook(kind, tag_all, ops, args, kwargs)
            return ops

        return make_ops

    def _batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, posted = self.session, self._posted

        @functools.wraps(original)
        def batch_p2p(*args: Any, **kwargs: Any) -> Any:
            if not session.recording or not args or not args[0]:
                return original(*args, **kwargs)
            start = session.attempt_hook("p2p", lambda ops: session.begin_op_on(ops[0].tensor), args[0])
            session.busy += 1
            try:
                works = original(*args, **kwargs)
            finally:
                session.busy -= 1
            if start is not None:
                session.attempt_hook("p2p", posted, args[0], works, start)
            return works

        return batch_p2p

    def _posted(self, ops: list[Any], works: list[Any], start: Instant) -> None:
        """Remember the work of each op; a backend that coalesces returns one work for all."""
        waiting = self._waiting
        if len(works) == len(ops):
            for op, work in zip(ops, works):
                tag = getattr(op, _TAG, None)
                if tag is not None:
                    waiting[id(work)] = (work, *tag, op.peer, start)
            return
        for index, op in enumerate(ops):
            tag = getattr(op, _TAG, None)
            if tag is not None:
                waiting[id(works[-1]) * len(ops) + index] = (works[-1], *tag, op.peer, start)

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, waited = self.session, self._waited

        @functools.wraps(original)
        def wait_batch_p2p(*args: Any, **kwargs: Any) -> Any:
            waits = None
            if session.recording and len(args) == 1 and args[0] and not kwargs:
                waits = session.attempt_hook("p2p", session.instant)
            if waits is None:
                return original(*args, **kwargs)
            for work in args[0]:
                original([work])
                try:
                    waits = waited(work, waits)
                except Exception as error:
                    session.failed("p2p", error)
            return None

        return wait_batch_p2p

    def _waited(self, work: Any, waits: Instant) -> Instant:
        """Record the transfers of `work`, waited for since `waits`; returns their end: when the waiter resumes.

        On a GPU the waiter is the stream on which `wait` was called.
        """
        session = self.session
        end = now_ns() if type(waits) is int else session.instant()
        keys = [id(work)]
        if keys[0] not in self._waiting:  # one work for several ops
            keys = [key for key, entry in self._waiting.items() if entry[0] is work]
        for _, kind, microbatch, stage_index, peer, start in map(self._waiting.pop, keys):
            session.record(
                *(Category.P2P, kind, start, end), microbatch=microbatch, chunk=stage_index, peer=peer, extra=waits
            )
        return end

    def _forget_unfinished(self) -> None:
        self.session.unfinished += len(self._waiting)
        self._waiting.clear()


class LoopHooks:
    """Forward and backward of loops without a pipeline: trained modules the loop calls, `backward()` and `grad()`.

    The time between a forward and its backward is an op of its own: the loss, and anything else the script does there,
    which no hook can distinguish from it. In the first step that calls a trained module (a root; there can be several,
    as in a GAN), all calls of modules pass through here; from then on, only the roots have hooks.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._search: Patch | None = None
        self._roots: set[int] = set()
        self._open: tuple[Any, Instant] | None = None
        session.step_listeners.append(self._step_ends)

    def install(self) -> None:
        """Look for the root modules, and hook `torch.autograd.backward` and `grad` (which `torch.func` calls too)."""
        self._search = Patch(torch.nn.Module, "__call__", self._find_roots)
        self._search.install()
        for name in ("backward", "grad"):
            self.session.patch(
                torch.autograd, name, self.around_backward, lacks="the backward-compute ops of plain loops"
            )

    def stop_looking(self) -> None:
        """Stop looking for roots: pipeline stages do the forwards, or all roots are found."""
        self._look_away()
        self._search = None

    def _look(self) -> None:
        if self._search is not None and not self._search.installed:
            self._search.install()

    def _look_away(self) -> None:
        if self._search is not None and self._search.installed:
            self._search.remove()

    def _find_roots(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not session.in_main_thread():
                return original(module, *args, **kwargs)
            if session.evaluation.under_way:
                session.attempt_hook("evaluation", self._end_evaluation, module)
            if session.busy:
                return original(module, *args, **kwargs)
            session.attempt_hook("forward", self._consider, module)
            try:
                return original(module, *args, **kwargs)
            finally:
                session.attempt_hook("forward", self._look)

        # `torch.compile(module)` compiles the function it finds here. Let it skip this one, as it skips the original,
        # and compile the module's own code: all modules share this function, and a function is compiled only a few
        # times.
        _do_not_compile(call_module, what_it_calls=False)
        _do_not_compile(Session.attempt_hook, what_it_calls=True)
        return functools.wraps(original)(call_module)

    def _end_evaluation(self, module: Any) -> None:
        if _trains(module):
            self.session.evaluation.ends()

    def _consider(self, module: Any) -> None:
        self._look_away()  # modules called inside are not roots, and if compiled, they are compiled without this hook
        if id(module) not in self._roots and _trains(module):
            self._adopt(module)

    def _adopt(self, module: Any) -> None:
        """Hook a root. `module.compile()` compiles the call with its hooks: then hook around the compiled call."""
        self._roots.add(id(module))
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._wrap_compiled(module)
        else:
            module.register_forward_pre_hook(UncopiedHook(self._before_forward))
            module.register_forward_hook(UncopiedHook(self._after_forward))

    def _wrap_compiled(self, module: Any) -> None:
        compiled = module._compiled_call_impl  # noqa: SLF001  where torch keeps it

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before_forward(module, args)
            try:
                return compiled(*args, **kwargs)
            finally:
                self._after_forward(module, args, None)

        module._compiled_call_impl = call  # noqa: SLF001

    def _before_forward(self, module: Any, _inputs: Any) -> None:
        if is_compiling() or not self.session.recording:
            return
        try:  # a module of the user's can have its own `parameters`
            trains = _trains(module)
            evaluates = not trains and not torch.is_grad_enabled() and not in_training_mode(module)
        except Exception as error:
            self.session.failed("forward", error)
            return
        if trains:
            self.session.attempt_hook("forward", self._forward_begins, module)
        elif evaluates:
            self.session.attempt_hook("evaluation", self.session.evaluation.begins, module)

    def _forward_begins(self, module: Any) -> None:
        session = self.session
        if not session.in_main_thread():
            return
        if session.evaluation.under_way:
            session.evaluation.ends()
        if session.busy:
            return
        self._open = module, session.begin_op()
        session.busy += 1

    def _step_ends(self) -> None:
        self._open = None
        if self._roots:
            self.stop_looking()

    def _after_forward(self, module: Any, _inputs: Any, _output: Any) -> None:
        if not is_compiling() and self._open is not None and self._open[0] is module:
            self.session.attempt_hook("forward", self._forward_ends, self._open[1])

    def _forward_ends(self, start: Instant) -> None:
        session = self.session
        self._open = None
        session.busy -= 1
        session.hold(FORWARD, start, session.instant(), session.microbatch, NONE)

    def around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record every call of `original` as a backward, unless it is part of another op."""
        session = self.session

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not session.recording or not session.in_main_thread():
                return original(*args, **kwargs)
            if session.evaluation.under_way:
                session.attempt_hook("evaluation", session.evaluation.ends)
            if session.busy:
                return original(*args, **kwargs)
            start = session.attempt_hook("backward", self._backward_begins)
            session.busy += 1
            try:
                return original(*args, **kwargs)
            finally:
                session.busy -= 1
                if start is not None:
                    session.attempt_hook("backward", self._backward_ends, start)

        return backward

    def _backward_begins(self) -> Instant:
        self.session.record_rest(LOSS, self.session.instant())
        return self.session.begin_op()

    def _backward_ends(self, start: Instant) -> None:
        session = self.session
        session.record_compute(BACKWARD, start, session.instant(), session.microbatch, NONE)
        session.microbatch += 1


def _chunk(kwargs: dict[str, Any]) -> int:
    """The microbatch in a call of a stage that passes it by name, such as `fwd_chunk_id`."""
    return next(int(value) for name, value in kwargs.items() if name.endswith("chunk_id"))


def _do_not_compile(function: Any, *, what_it_calls: bool) -> None:
    """Keep the compiler from compiling `function` and, if `what_it_calls`, the functions it calls."""
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001  `torch.compiler.disable` would import the whole compiler
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction  # noqa: SLF001
        inside = action.SKIP if what_it_calls else action.DEFAULT
        strategy = frames._FrameExecStrategy(action.SKIP, inside)  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, strategy)


def _trains(module: Any) -> bool:
    """True if the call of the module is part of training: gradients are on, and it has trainable parameters."""
    return bool(
        torch.is_grad_enabled()
        and in_training_mode(module)
        and any(parameter.requires_grad for parameter in module.parameters())
    )


_HOOK = "deepspeed"


class DeepSpeedHooks:
    """Hooks of `deepspeed.runtime.engine`; one instance per session.

    The engine reduces gradients after autograd's backward, and scales, clips and gathers around the optimizer that ZeRO
    wraps: without these hooks, that time belongs to no op.
    """

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
            updates = session.recording and session.in_main_thread() and session.attempt_hook(_HOOK, begins, engine)
            try:
                return original(engine, *args, **kwargs)
            finally:
                if updates:
                    session.attempt_hook(_HOOK, host.optimizer_ended, engine)

        return step
