"""The recording session of one rank: which step it is, whether it is recorded, and what the hooks share.

In: begins and ends from the hooks. Out: records and facts for the recorder. Nothing here raises into training: what
fails is counted, the hook that failed is switched off, and one warning per attempt says so.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tracekit.collectors.runtime.patches import PatchSet
from tracekit.collectors.runtime.recorder import Recorder
from tracekit.collectors.runtime.words import NONE, Category, Flag, RuntimeOptions

now_ns = time.monotonic_ns


class Session:
    """One rank in one attempt.

    `recording`: whether ops of the current step are kept. `busy`: inside a compute, an optimizer or a data fetch, where
    nested hooks keep quiet. `microbatch_forward`, `microbatch_backward`: counters of loops without a pipeline.
    """

    def __init__(
        self, recorder: Recorder, options: RuntimeOptions, *, rank: int, world_size: int, attempt: int
    ) -> None:
        self.recorder, self.options = recorder, options
        self.rank, self.world_size, self.attempt = rank, world_size, attempt
        self.process_id = os.getpid()
        self.thread_id = threading.get_ident()
        self.patches = PatchSet()
        self.step = 0
        self.recording = options.records_step(0)
        self.busy = 0
        self.failures: Counter[str] = Counter()
        self.unfinished = 0
        self.microbatch_forward = 0
        self.microbatch_backward = 0
        self.step_listeners: list[Callable[[], None]] = []
        self._names: dict[str, int] = {}
        self._step_start = now_ns()
        self._compute_ns = 0
        self._step_over = False
        self._manual_steps = False
        self._last_end = self._step_start
        self._stepped: set[int] = set()
        self._optimizers_per_step = 1
        self._held: tuple[int, int, int, int, int, int] | None = None
        self._disabled: set[str] = set()

    def start(self) -> None:
        """Tell who this rank is and start writing."""
        self.recorder.fact(
            "process",
            {
                "rank": self.rank,
                "world_size": self.world_size,
                "attempt": self.attempt,
                "host": socket.gethostname(),
                "process_id": self.process_id,
                "local_rank": os.environ.get("LOCAL_RANK"),
                "time_ns": time.time_ns(),
                "monotonic_ns": now_ns(),
            },
        )
        self.recorder.start()

    def close(self) -> None:
        """Finish at the end of the process: what is pending, then the counters."""
        if os.getpid() != self.process_id:
            return
        self.attempt_hook("close", self._finish)
        self.recording = False
        self.recorder.close(
            {
                "steps": self.step,
                "written": self.recorder.written,
                "dropped": self.recorder.dropped,
                "unfinished": self.unfinished,
                "failures": dict(self.failures),
                "off": self.recorder.off,
            }
        )

    def _finish(self) -> None:
        self.flush_held()
        if self._step_over:
            self._record_step(self._last_end)

    def in_main_thread(self) -> bool:
        """Whether the thread is the one that trains; others must not move the step."""
        return threading.get_ident() == self.thread_id

    def failed(self, hook: str, error: BaseException) -> None:
        """Count the failure of a hook, switch that hook off and warn once per attempt."""
        self.failures[hook] += 1
        self._disabled.add(hook)
        if self.failures.total() == 1 and self.recorder.first_of_all_ranks("hook-failed"):
            sys.stderr.write(
                f"tracekit: rank {self.rank}: the hook {hook} failed ({type(error).__name__}: {error}) and is off from"
                " here; the training goes on, `tracekit collect` counts further failures at the end\n"
            )

    def attempt_hook(self, hook: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's body; None where it failed or is off."""
        if hook in self._disabled:
            self.failures[hook] += 1
            return None
        try:
            return body(*args)
        except Exception as error:
            self.failed(hook, error)
            return None

    # ---- names and records -------------------------------------------------------------------------------------

    def name(self, name: str) -> int:
        """The number that stands for `name` in records."""
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            self.recorder.fact("name", [number, name])
        return number

    def record(
        self,
        category: Category,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        microbatch: int = NONE,
        chunk: int = NONE,
        peer: int = NONE,
        extra: int = 0,
        flags: int = 0,
        step: int | None = None,
    ) -> None:
        """Keep one op of the current step."""
        at = self.step if step is None else step
        self.recorder.add((category, flags, self.name(name), at, microbatch, chunk, peer, start_ns, end_ns, extra))

    def record_compute(
        self, name: str, start_ns: int, end_ns: int, microbatch: int, chunk: int, *, flags: int = 0
    ) -> None:
        """Keep one forward or backward."""
        self._compute_ns += end_ns - start_ns
        number = self._names.get(name)
        if number is None:
            number = self.name(name)
        self.recorder.add((Category.COMPUTE, flags, number, self.step, microbatch, chunk, NONE, start_ns, end_ns, 0))

    def hold(self, name: str, start_ns: int, end_ns: int, microbatch: int, chunk: int) -> None:
        """Keep a forward back: its loss, computed right behind it, still belongs to it."""
        self.flush_held()
        self._held = (self.name(name), start_ns, end_ns, microbatch, chunk, self.step)

    def flush_held(self, until_ns: int | None = None) -> None:
        """Record the forward held back; up to `until_ns` where its loss ended then."""
        held = self._held
        if held is None:
            return
        self._held = None
        name, start_ns, end_ns, microbatch, chunk, step = held
        end_ns = end_ns if until_ns is None else until_ns
        self._compute_ns += end_ns - start_ns
        self.recorder.add((Category.COMPUTE, 0, name, step, microbatch, chunk, NONE, start_ns, end_ns, 0))

    # ---- steps -------------------------------------------------------------------------------------------------

    def begin_op(self) -> int:
        """The time at which an op of the main thread begins; starts a new step when the optimizer ended the last."""
        if self._step_over:
            self._next_step()
        if self._held is not None:
            self.flush_held()
        return now_ns()

    def optimizer_begins(self, optimizer: int) -> int:
        """Called before an optimizer's step; returns the time. The same optimizer again means a new step."""
        if self._step_over and optimizer in self._stepped:
            self._next_step()
        self.flush_held()
        self._stepped.add(optimizer)
        return now_ns()

    def optimizer_ended(self, start_ns: int) -> None:
        """Record the optimizer. The step is over with the next op that is no optimizer, unless the user numbers it.

        Where hooks are out, that op goes unseen: then the step is over once as many optimizers stepped as in step 0.
        """
        end_ns = now_ns()
        if self.recording:
            self.record(Category.OPTIMIZER, "optimizer", start_ns, end_ns)
        if self._manual_steps:
            return
        self._step_over = True
        self._last_end = end_ns
        if not self.recording and len(self._stepped) >= self._optimizers_per_step:
            self._next_step()

    def set_step(self, step: int) -> None:
        """The user's own step number: ends the current step, and from now on only this call does."""
        if self._manual_steps or self._step_over or self._compute_ns:
            self._record_step(now_ns())
        self._manual_steps = True
        self._enter(step)

    def _next_step(self) -> None:
        self._step_over = False
        self._optimizers_per_step = max(self._optimizers_per_step, len(self._stepped))
        self._record_step(self._last_end)
        self.busy = 0  # a forward that raised, and was caught by the user, never ended
        self._enter(self.step + 1)

    def _record_step(self, end_ns: int) -> None:
        flags = Flag.COMPLETE | (Flag.RECORDING if self.recording else 0)
        self.record(Category.STEP, "step", self._step_start, end_ns, extra=self._compute_ns, flags=flags)
        self._step_start = end_ns

    def _enter(self, step: int) -> None:
        for listener in self.step_listeners:
            self.attempt_hook("step", listener)
        self.flush_held()
        self.step = step
        self._compute_ns = 0
        self._stepped.clear()
        self.microbatch_forward = self.microbatch_backward = 0
        self._switch(self.options.records_step(step))

    def _switch(self, recording: bool) -> None:
        """Put the hooks in or take them out, so that a step that is not recorded costs nothing."""
        if recording == self.recording:
            return
        self.recording = recording
        if recording:
            self.patches.install()
        else:
            self.patches.remove()

    # ---- spans -------------------------------------------------------------------------------------------------

    def begin_span(self) -> int:
        """Start of a user's span, ns; 0 where it is not recorded."""
        if not self.recording:
            return 0
        if not self.in_main_thread():
            return now_ns()
        return int(self.attempt_hook("span", self.begin_op) or 0)

    def end_span(self, name: str, start_ns: int) -> None:
        """End of a user's span."""
        if self.recording:
            self.attempt_hook("span", self.record, Category.SPAN, name, start_ns, now_ns())
