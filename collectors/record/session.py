"""The recording session of one rank: the current step, whether it is recorded, evaluation between steps, and state
that hooks share.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...trace.model import OpKind
from .device import DeviceClock, Instant, host_ns
from .inject._tracekit_recorder import warn
from .machine_state import Sampler
from .patches import Guard, Patch
from .process_facts import RunQueue, process_facts
from .recorder import Recorder
from .spans import bits_of
from .wire_format import NONE, Category, Flag, RuntimeOptions

now_ns = time.monotonic_ns
_COMPUTE, _OPTIMIZER = Category.COMPUTE, Category.OPTIMIZER
#: An op under way: its record without the end.
UnderWay = tuple[int, int, int, int, int, int, int, Instant, int]
#: Limit on names, so that a script with a new name for each span does not fill the memory; the rest share one.
MOST_NAMES = 4096
MORE_NAMES = "(more names)"
#: The largest value of the field.
MOST_US = 2**31 - 1

#: Ops inside spans of these kinds are part of them.
_WHOLE = frozenset({OpKind.CHECKPOINT, OpKind.EVALUATION})
#: Spans of these kinds are work of the GPU, if there is one; all others are work of the host.
_DEVICE_KINDS = frozenset(OpKind) - {OpKind.GC, OpKind.DATA_LOAD, OpKind.CHECKPOINT, OpKind.HOST_DELAY}


class Session(Guard):
    """One rank in one attempt.

    `recording`: ops of the current step are kept. `busy`: inside a compute or a data fetch, where nested hooks record
    nothing. `optimizing`: inside an optimizer's step, including its closure, or while gradients are clipped for it.
    `step_over`: the optimizer has run, and the next op begins another step. `held`: a forward, until its loss is known
    to follow or not. `microbatch`: in loops without a pipeline, the backwards of the step so far. `instant`: returns
    the current time of the host or, while a device clock runs, a mark on the current stream.
    """

    def __init__(
        self, recorder: Recorder, options: RuntimeOptions, *, rank: int, world_size: int, attempt: int
    ) -> None:
        super().__init__(recorder, rank)
        self.options = options
        self.world_size, self.attempt = world_size, attempt
        self.process_id = os.getpid()
        self.thread_id = threading.get_ident()
        self.step = 0
        self.schedule = options.schedule
        self.recording = True  # step 0 shows the structure of the job
        self.busy = 0
        self.optimizing = False
        self.unfinished = 0
        self.microbatch = 0
        self.step_listeners: list[Callable[[], None]] = []
        self.evaluation = Evaluation(self)
        self.instant: Callable[[], Instant] = now_ns
        self.device: DeviceClock | None = None
        self._sampler_of: Callable[[int], Sampler] | None = None
        self._samplers: list[Sampler] = []
        self.step_entered: list[Callable[[], None]] = []
        self.before_the_end: list[Callable[[], None]] = []
        self._names: dict[str, int] = {}
        self._refused_value = False
        self._step_start: Instant = now_ns()
        self._compute_ns = 0
        self.step_over = False
        self._manual_steps = False
        self._last_end: Instant = self._step_start
        self._stepped: set[int] = set()
        self._optimizers_per_step = 1
        self._clipping: tuple[int, Instant] | None = None
        self.held: tuple[str, Instant, Instant, int, int, int] | None = None
        self._run_queue = RunQueue()
        self._waited_ns = self._run_queue.waited_ns() or 0
        self._ran_ns = time.thread_time_ns()

    def start(self) -> None:
        """Write the facts about this process and start the writer."""
        self.recorder.fact("process", process_facts(self.rank, self.world_size, self.attempt))
        self.recorder.start()

    def close(self) -> None:
        """Write pending records and the counters at the end of the process."""
        if os.getpid() != self.process_id:
            return
        self.attempt_hook("finish", self._finish)
        self.recording = False
        self.attempt_hook("close", self._close)

    def _close(self) -> None:
        for sampler in self._samplers:
            sampler.close()
        self.recorder.close(
            {
                "steps": self.step,
                "dropped": self.recorder.dropped + (self.device.dropped if self.device is not None else 0),
                "unfinished": self.unfinished,
                "failures": dict(self.failures),
                "off": self.recorder.off,
                "gpu_used": self.device is not None and self.device.used,
            }
        )

    def give_up(self) -> None:
        """End a session that could not be started completely: no hook stays, and later ones are not installed."""
        self.attempt_hook("give-up", self.patches.remove)
        self.close()

    def process_group_ends(self) -> None:
        """Called before process groups are destroyed, and before the process ends."""
        for listener in self.before_the_end:
            self.attempt_hook("process-group-ends", listener)

    def _finish(self) -> None:
        self.process_group_ends()
        self.flush_held()
        if self.step_over:
            self._record_step(self._last_end)
        if self.device is not None:
            self.unfinished += self.device.close()

    def in_main_thread(self) -> bool:
        """True in the training thread; other threads must not advance the step."""
        return threading.get_ident() == self.thread_id

    def sample(self, sampler: Sampler) -> None:
        """Begin to sample, until the end of the process."""
        sampler.begin()
        self._samplers.append(sampler)

    # ---- the device ----------------------------------------------------------------------------------------------

    def use_device(self, device: DeviceClock, sampler_of: Callable[[int], Sampler]) -> None:
        """Time ops on a GPU as soon as the process uses one. `sampler_of`: the sampler of a GPU, by its index."""
        self.device, self._sampler_of = device, sampler_of
        self.step_listeners.append(device.tick)

    def device_opened(self, index: int) -> None:
        """Called when the clock of GPU `index` runs."""
        if self.device is not None and self._sampler_of is not None:
            self.instant = self.device.instant
            self.attempt_hook("gpu-state", lambda sampler_of: self.sample(sampler_of(index)), self._sampler_of)

    def device_failed(self, error: BaseException) -> None:
        """Continue with host times because the device cannot be timed, and report it once."""
        self.instant = now_ns
        self.failures["device-clock"] += 1
        if self.recorder.first_of_all_ranks("device-clock-failed"):
            warn(
                f"rank {self.rank}: CUDA events failed ({type(error).__name__}: {error!s:.200}); from now on its ops"
                " are timed on the host, and those steps are left out of the trace; training continues"
            )

    def instant_for(self, tensor: Any) -> Instant:
        """The current time on the clock of `tensor`'s device."""
        return now_ns() if self.device is not None and not self.device.owns(tensor) else self.instant()

    def instant_like(self, start: Instant) -> Instant:
        """The current time on the clock of `start`."""
        return now_ns() if isinstance(start, int) else self.instant()

    # ---- names and records -------------------------------------------------------------------------------------

    def name(self, name: str) -> int:
        """The number of `name` in records."""
        number = self._names.get(name)
        if number is None:
            if len(self._names) >= MOST_NAMES and name != MORE_NAMES:
                return self.name(MORE_NAMES)
            number = self._names[name] = len(self._names)
            self.recorder.fact("name", [number, name])
        return number

    def record(
        self,
        category: Category,
        name: str,
        start: Instant,
        end: Instant,
        *,
        microbatch: int = NONE,
        chunk: int = NONE,
        peer: int = NONE,
        extra: Instant = 0,
        flags: int = 0,
        step: int | None = None,
    ) -> None:
        """Keep one op of the current step."""
        step_number = self.step if step is None else step
        head = (category, flags, self.name(name), step_number, microbatch, chunk, peer)
        if self.device is None:
            self.recorder.add((*head, start, end, extra))
        else:
            self.device.keep(head, start, end, extra)

    def record_compute(
        self,
        name: str,
        start: Instant,
        end: Instant,
        microbatch: int,
        chunk: int,
        *,
        flags: int = 0,
        step: int | None = None,
    ) -> None:
        """Keep one forward or backward."""
        self._compute_ns += host_ns(end) - host_ns(start)
        self.record(_COMPUTE, name, start, end, microbatch=microbatch, chunk=chunk, flags=flags, step=step)

    def under_way(
        self, category: int, name: str, start: Instant, group: int, size: int, flags: int, rows: int = NONE
    ) -> UnderWay:
        """A collective of `size` bytes over the process group with that number, or a wait for one; see `ended`.

        `rows`: the number of the fact with the rows that it sends and receives.
        """
        return (category, flags, self.name(name), self.step, NONE, rows, group, start, size)

    def ended(self, op: UnderWay) -> None:
        """Keep an op that was under way; it ends now."""
        if self.device is None:
            self.recorder.add((*op[:8], now_ns(), op[8]))
        else:
            start = op[7]
            self.device.keep(op[:7], start, now_ns() if type(start) is int else self.instant(), op[8])

    def hold(self, name: str, start: Instant, end: Instant, microbatch: int, chunk: int) -> None:
        """Hold back a forward until its loss is known to follow directly or not."""
        self.flush_held()
        self.held = (name, start, end, microbatch, chunk, self.step)

    def flush_held(self, until: Instant | None = None) -> None:
        """Record the forward that was held back; up to `until` if its loss ended then."""
        held = self.held
        if held is None:
            return
        self.held = None
        name, start, end, microbatch, chunk, step = held
        self.record_compute(name, start, end if until is None else until, microbatch, chunk, step=step)

    def record_rest(self, name: str, until: Instant) -> None:
        """Record the forward that was held back, and what the script did between its end and `until` as `name`."""
        if self.held is not None:
            _, _, end, microbatch, chunk, step = self.held
            self.flush_held()
            self.record_compute(name, end, until, microbatch, chunk, step=step)

    # ---- steps -------------------------------------------------------------------------------------------------

    def begin_op(self) -> Instant:
        """The start of an op on the main thread; begins a new step if an optimizer has ended the last one."""
        self._settle()
        return self.instant()

    def begin_host_op(self) -> int:
        """As `begin_op`, on the host's clock: for host work while a device may still be busy."""
        self._settle()
        return now_ns()

    def begin_op_on(self, tensor: Any) -> Instant:
        """As `begin_op`, on the clock of `tensor`'s device."""
        self._settle()
        return now_ns() if self.device is None else self.instant_for(tensor)

    def _settle(self) -> None:
        """Finish what the next op ends: a step whose optimizer has run, or a forward that was held back."""
        if self.step_over:
            self._next_step()
        if self.held is not None:
            self.flush_held()

    def clipping_begins(self) -> None:
        """Called before gradients are clipped: the optimizer begins here, unless something computes in between."""
        if self._clipping is None or self._clipping[0] != self._compute_ns:
            self._clipping = self._compute_ns, self.instant()

    def optimizer_begins(self, optimizer: int) -> Instant:
        """Called before an optimizer's step; returns when it began. The same optimizer again means a new step."""
        clipping, self._clipping = self._clipping, None
        if clipping is not None and clipping[0] != self._compute_ns:
            clipping = None
        if self.step_over and optimizer in self._stepped:
            self._next_step()
        if self.held is not None:
            self.flush_held()
        self._stepped.add(optimizer)
        if clipping is not None and self.recording:
            return clipping[1]
        return self.instant() if self.recording else now_ns()

    def optimizer_ended(self, start: Instant) -> None:
        """Record the optimizer. The step is over with the next op that is no optimizer, unless the user numbers it.

        While hooks are removed, that op is not seen: the step is then over after as many optimizer steps as in step 0.
        """
        end = self.instant_like(start)
        if self.recording:
            self.record(_OPTIMIZER, "optimizer", start, end)
        if self._manual_steps:
            return
        self.step_over = True
        self._last_end = end if self.recording else self.instant()
        if not self.recording and len(self._stepped) >= self._optimizers_per_step:
            self._next_step()

    def set_step(self, step: int) -> None:
        """Set the user's own step number. Ends the current step; from now on, only this call ends steps."""
        self.attempt_hook("set-step", self._set_step, step)

    def _set_step(self, step: int) -> None:
        step = operator.index(step)  # raises if it is not an integer, before anything has changed
        if self._manual_steps or self.step_over or self._compute_ns:
            self._record_step(self.instant())
        self._manual_steps = True
        self._enter(step)

    def begin_step(self) -> None:
        """Start the user's own next step, numbered here: the same as `set_step` with the next number."""
        begun = self._manual_steps or self.step_over or self._compute_ns > 0
        self.set_step(self.step + begun)

    def _next_step(self) -> None:
        self.step_over = False
        self._optimizers_per_step = max(self._optimizers_per_step, len(self._stepped))
        self._record_step(self._last_end)
        self.busy = 0  # a forward that raised, and was caught by the user, never ended
        self.optimizing = False
        self._enter(self.step + 1)

    def _record_step(self, end: Instant) -> None:
        """Record the step that ends at `end`: on the GPU's clock, if it has one, since its host may run steps ahead."""
        flags = Flag.COMPLETE | (Flag.RECORDING if self.recording else 0)
        on_device = self.device is not None and self.device.active
        compute_ns = self.device.take_compute_ns() if self.device is not None and on_device else self._compute_ns
        waited_us, ran_us = self._waited_us(), self._ran_us()
        self.record(
            *(Category.STEP, "step", self._step_start, end),
            chunk=NONE if on_device else ran_us,
            peer=waited_us,
            extra=compute_ns,
            flags=flags,
        )
        self._step_start = end

    def _waited_us(self) -> int:
        """Time that the training thread has waited for a processor since the last call, us; NONE if unknown."""
        waited_ns = self._run_queue.waited_ns()
        if waited_ns is None:
            return NONE
        since_ns, self._waited_ns = waited_ns - self._waited_ns, waited_ns
        return min(max(since_ns // 1000, 0), MOST_US)

    def queued_us(self) -> int:
        """Time that the training thread has waited for a processor so far, us, from 0 again after `MOST_US`; NONE if
        unknown.
        """
        waited_ns = self._run_queue.waited_ns() if self.in_main_thread() else None
        return NONE if waited_ns is None else waited_ns // 1000 % MOST_US

    def _ran_us(self) -> int:
        """Time that the calling thread has run since the last call, us; NONE if another thread called it before."""
        ran_ns = time.thread_time_ns()
        since_ns, self._ran_ns = ran_ns - self._ran_ns, ran_ns
        return min(since_ns // 1000, MOST_US) if since_ns >= 0 else NONE

    def _enter(self, step: int) -> None:
        for listener in self.step_listeners:
            self.attempt_hook("step", listener)
        self.flush_held()
        self.step = step
        self._compute_ns = 0
        self._stepped.clear()
        self.microbatch = 0
        self._switch((step == 0 or self.schedule.records(step)) and self.recorder.off is None)
        for entered in self.step_entered:
            self.attempt_hook("step-entered", entered)

    def _switch(self, recording: bool) -> None:
        """Install or remove the hooks, so that a step that is not recorded costs nothing."""
        if recording == self.recording:
            return
        self.recording = recording
        if recording:
            self.patches.install()
        else:
            self.patches.remove()

    # ---- spans -------------------------------------------------------------------------------------------------

    def begin_span(self, name: str) -> Instant:
        """Start of a user's span; 0 if it is not recorded. What an evaluation or a checkpoint consists of is not."""
        if not self.recording:
            return 0
        if not self.in_main_thread():
            return now_ns()
        if name in _WHOLE:
            self.attempt_hook("span", self.evaluation.ends)
        start = self.attempt_hook("span", self.begin_op) or 0
        self.busy += bool(start) and name in _WHOLE
        return start

    def end_span(self, name: str, start: Instant) -> None:
        """End of a user's span: on the device only for a kind of op that runs there."""
        if name in _WHOLE and self.busy and self.in_main_thread():
            self.busy -= 1
        if self.recording:
            end = self.instant_like(start) if name in _DEVICE_KINDS else now_ns()
            self.attempt_hook("span", self.record, Category.SPAN, name, start, end)

    # ---- values ------------------------------------------------------------------------------------------------

    def log(self, values: dict[str, Any], ended: bool = False) -> None:
        """Keep values of the current step, or of the one before; what is no number of the host is left out, and
        reported once.
        """
        if self.recording:
            self.attempt_hook("log", self._log, values, self.step - bool(ended and self.step))

    def _log(self, values: dict[str, Any], step: int) -> None:
        now = now_ns()
        for name, value in values.items():
            if value is None:
                continue
            try:
                bits = bits_of(value, is_count=name == "tokens")
            except Exception as error:  # whatever the user's object raises
                if not self._refused_value and self.recorder.first_of_all_ranks("value-refused"):
                    warn(
                        f"rank {self.rank}: tracekit.log({name}=...) in step {step}: {type(error).__name__}:"
                        f" {error!s:.200}; such values are left out; training continues"
                    )
                self._refused_value = True
                continue
            self.recorder.add((Category.VALUE, 0, self.name(name), step, NONE, NONE, NONE, now, now, bits))


EVALUATION = "evaluation"


def in_training_mode(module: Any) -> bool:
    """True if any part of a module is in training mode: Lightning leaves the wrapper of a model in evaluation mode."""
    return any(submodule.training for submodule in module.modules())


class Evaluation:
    """Begin and end of evaluations, as reported by hooks. `under_way`: one is running.

    One lasts until training resumes: the module is put back into training mode, computes with gradients or is saved, an
    optimizer steps, or the training loader is asked for data.
    """

    def __init__(self, session: Session) -> None:
        self.under_way = False
        self._session = session
        self._module: Any = None
        self._start: Instant = 0
        self._back = Patch(torch.nn.Module, "train", self._train)  # called for each inner module: on only when needed
        self._training_loader: Callable[[], Any] = lambda: None
        session.step_listeners.append(self.ends)

    def install(self) -> None:
        """Hook `eval`, which puts a whole model into evaluation mode at once."""
        self._session.patch(torch.nn.Module, "eval", self._eval, lacks="evaluation ops")

    def begins(self, module: Any) -> None:
        """Begin an evaluation of `module`, unless the call is part of another op."""
        session = self._session
        if session.recording and session.busy == 0 and session.in_main_thread():
            self._start = session.begin_op()
            self.under_way, self._module = True, module
            session.busy += 1
            self._back.install()

    def ends(self) -> None:
        """End a running evaluation: training continues."""
        if not self.under_way:
            return
        session = self._session
        self.under_way, self._module = False, None
        session.busy -= 1
        self._back.remove()
        session.record(Category.EVALUATION, EVALUATION, self._start, session.instant_like(self._start))

    def loads(self, iterator: Any) -> None:
        """Called when a loader must provide data: the training loader ends an evaluation; others belong to it."""
        feeds_training = self._training_loader() is iterator
        if not self.under_way and not feeds_training:
            self._training_loader = weakref.ref(iterator)
        elif feeds_training:
            self.ends()

    def _eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def evaluate(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:  # a module of the user's can have its own `parameters`
                trains = in_training_mode(module) and any(parameter.requires_grad for parameter in module.parameters())
            except Exception as error:
                trains = False
                session.failed(EVALUATION, error)
            if trains and not is_compiling():
                session.attempt_hook(EVALUATION, self.begins, module)
            return original(module, *args, **kwargs)

        return evaluate

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def train(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if module is self._module and module.training:
                session.attempt_hook(EVALUATION, self.ends)
            return result

        return train


#: Whether torch.compile is tracing the calling code: a constant to the compiler, so compiled code contains no hooks.
#: torch 2.2 has it under another name only.
is_compiling: Any = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # noqa: SLF001  its only other name
