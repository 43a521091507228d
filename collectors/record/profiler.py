"""Runs torch.profiler for a few steps of this rank (`tracekit collect --profiler`).

In: the session's steps. Out: one trace per rank, `rank<N>_trace.json.gz`, which appears once it is whole. The profiler
starts one step before the first one that it keeps, because starting takes time that belongs to no step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from .session import Session
from .wire_format import attempt_directory

#: Suffix of an incomplete file, which no reader recognises as a trace.
_UNFINISHED = ".part.gz"


def record_steps(session: Session) -> None:
    """Record `profiler_steps` steps from `first_step` on, or fewer if the run ends earlier."""
    recording = _Recording(session)
    session.step_entered.append(recording.step_begins)
    session.before_the_end.append(recording.finish)


class _Recording:
    """The one recording of this rank: none yet, under way (`profiler`), or done."""

    def __init__(self, session: Session) -> None:
        self.session, self.done = session, False
        self.profiler: Any = None

    def step_begins(self) -> None:
        """Called when a step of the training loop begins."""
        first, step = self.session.options.first_step, self.session.step
        if self.profiler is not None:
            if step >= first + self.session.options.profiler_steps:
                self.finish()
            else:
                self.profiler.step()
        elif not self.done and step >= first - 1:
            self._start(step, first)

    def finish(self) -> None:
        """Stop and write what was recorded; once."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        self.done = True
        profiler.stop()
        options = self.session.options
        folder = attempt_directory(Path(options.profiler_folder), self.session.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.session.rank}_trace.json.gz"
        unfinished = path.with_name(path.name + _UNFINISHED)
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)

    def _start(self, step: int, first: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)

        def action(number: int) -> ProfilerAction:
            return ProfilerAction.RECORD if number >= first else ProfilerAction.WARMUP

        profiler = profile(activities=activities, schedule=action, **_switches())
        # Give steps the numbers of the training loop.
        profiler.step_num, profiler.current_action = step, action(step)
        profiler.start()
        self.profiler = profiler


def _switches() -> dict[str, Any]:
    """Torch records which stream waits for which only on request; older versions cannot."""
    try:
        return {"experimental_config": torch.profiler._ExperimentalConfig(enable_cuda_sync_events=True)}  # noqa: SLF001  documented under this name
    except (AttributeError, TypeError):
        return {}
