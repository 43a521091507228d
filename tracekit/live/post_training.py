"""Cut a running recording of post-training into windows, analyse them and store them.

In: what `tracekit.rl` records, or a log, read again once it has grown. Out: windows of one job in a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import polars as pl

from tracekit.analysis.job.rl_job import RlJob
from tracekit.analysis.rl.rl_run import WARM_UP
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import ranks_text, short, steps_text
from tracekit.collectors.importers.rl_logs import read_rl
from tracekit.live.run import QUIET_S, LiveOptions, LiveRun
from tracekit.live.windows import RanksState, ReadyWindow, WindowCutter, WindowSize
from tracekit.trace.op import OpTrace
from tracekit.trace.post_training import POST_TRAINING, part_of, trace_of

#: A recording is read again once this many times the time has passed that reading it took.
REST = 20
#: A run has ended if nothing was written for this many of its mean steps, and for `QUIET_S`.
QUIET_STEPS = 10


class LivePostTraining(LiveRun):
    """The windows of a run of post-training. `options.directory`: the folder of its records, or its log."""

    def __init__(self, options: LiveOptions, log: Callable[[str], None]) -> None:
        if options.consume or options.size.steps in range(WARM_UP + 1):
            raise SelectionError(f"post-training: windows have more than {WARM_UP} steps; nothing can be consumed")
        super().__init__(options, log)
        self._sizes, self._grown, self._read_at, self._problem = dict[Path, int](), False, 0.0, ""
        self._trace: OpTrace | None = None
        self._took_s, self._last, self._quiet_s = dict[int, float](), -1, QUIET_S
        self._ended, self._left_out = False, set[int]()
        self._begin_attempt(0)

    def ended(self) -> bool:
        """Whether nothing was written for so long that the run must have ended, which no process announces."""
        if self._trace is None or self._grown or time.monotonic() - self._heard_s < self._quiet_s:
            return False
        self._log(f"{self.options.directory}: nothing was written for {self._quiet_s:.0f} s: the run has ended")
        self._ended = True
        return True

    def _poll(self) -> None:
        path, now_s = self.options.directory, time.monotonic()
        files = path.glob("*.jsonl") if path.is_dir() else [path]
        sizes = {file: size for file in sorted(files) if (size := file.stat().st_size)}
        if sizes != self._sizes:
            self._sizes, self._heard_s, self._grown = sizes, now_s, bool(sizes)
        if not self._grown or now_s < self._read_at:
            return
        self._grown = False
        try:
            self._add_trace(trace_of(read_rl(list(sizes)), self.options.name))
        except FormatError as error:
            if str(error) != self._problem:
                self._log(f"{error}; it is read again once it has grown")
            self._problem = str(error)
        self._read_at = time.monotonic() + REST * (time.monotonic() - now_s)
        if self._trace is not None and not self.queue.has_begun and (stored := self.queue.begin(str(path))) is not None:
            (self._attempt, self._last), job = stored, short(self.options.name)
            self._log(f"windows of {job!r} go on after step {self._last}; give another run another --name")
        restarts = [] if self._trace is None else self._trace.metadata[POST_TRAINING].get("restarts", [])
        if (first := min(restarts[self._attempt :], default=self._last + 1)) <= self._last:
            self._log(f"step {first} is logged again: windows of the new attempt begin there")
            self._last = first - 1
        if len(restarts) > self._attempt:
            self._begin_attempt(len(restarts))

    def _begin_attempt(self, number: int) -> None:
        self._attempt = number
        self._cutter = WindowCutter(WindowSize(steps=1), late_after_s=0.0)  # `_state` has the steps of a window alone

    def _add_trace(self, trace: OpTrace) -> None:
        """Store what was read, and the steps that have recorded the last phase of a step."""
        self._trace, self._problem, ops = trace, "", trace.ops
        trained = ops.filter(pl.col("rank") == 0, ~pl.col("kind").is_in(("generate", "reward")))
        synced = trained.filter(pl.col("kind") == "sync")
        newest = max((trained if synced.is_empty() else synced)["step"], default=-1)
        took = ops.select("step", at=pl.col("start") + pl.col("duration")).group_by("step").max().sort("step")
        self._took_s = {step: took_s for step, took_s in took.iter_rows() if step <= newest}
        self._quiet_s = max(QUIET_S, QUIET_STEPS * float(took["at"].to_numpy().mean()))
        left_out = {step for step in trace.metadata[POST_TRAINING].get("left_out", ()) if self._last < step < newest}
        if new := left_out - self._left_out:
            self._log(f"{ranks_text(new, name='step')} without a whole record: left out")
        self._left_out |= new

    def _state(self) -> RanksState:
        """The steps of the next window, once they are over. Not all processes write at once: a step is over once a
        later one has ended, or the run. The seconds of a window are those that its steps took.
        """
        steps, size = [step for step in self._took_s if step > self._last], self.options.size
        finished = steps if self._ended else steps[:-1]
        passed_s = accumulate(self._took_s[step] for step in finished)
        enough = (
            number >= size.steps if size.steps else number >= size.fewest and at_s >= (size.seconds or 0.0)
            for number, at_s in enumerate(passed_s, 1)
        )
        window = finished[: next((n for n, it_is in enumerate(enough, 1) if it_is), len(finished) * self._ended)]
        return RanksState({0: window}, {0: max(window, default=-1)}, [0])

    def _finish_attempt(self) -> None:
        while self._state().finished:
            super()._finish_attempt()

    def _window(self, window: ReadyWindow) -> None:
        assert self._trace is not None
        job = RlJob(part_of(self._trace, self._last + 1, window.last))
        steps, self._last = job.trace.steps, window.last
        if len(steps) > WARM_UP:  # fewer may be left at the end
            self._add(job, steps_text(steps[0], steps[-1]))
