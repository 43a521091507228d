"""Cut a running recording of post-training into windows, analyse them and store them.

In: what `tracekit.rl` records, or a log, read again once it has grown. Out: windows of one job in a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

from tracekit.analysis.rl.loop import WARM_UP
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import short
from tracekit.collectors.importers.rl.reader import read_rl
from tracekit.job.rl import RlJob
from tracekit.live.run import QUIET_S, LiveOptions, LiveRun
from tracekit.live.windows import RanksState, ReadyWindow, WindowCutter
from tracekit.trace.op import OpTrace
from tracekit.trace.rl import part_of, trace_of

#: A recording is read again once this many times the time has passed that reading it took.
REST = 20
#: A run has ended if nothing was written for this many of its mean steps, and for `QUIET_S`.
QUIET_STEPS = 10


class LivePostTraining(LiveRun):
    """The windows of a run of post-training. `options.directory`: the folder of its records, or its log."""

    def __init__(self, options: LiveOptions, tell: Callable[[str], None]) -> None:
        if options.consume or options.size.steps in range(WARM_UP + 1):
            raise SelectionError(f"post-training: windows have more than {WARM_UP} steps; nothing can be consumed")
        super().__init__(options, tell)
        self._cutter = WindowCutter(options.size, late_after_s=0.0)
        self._sizes, self._grown, self._read_at, self._problem = dict[Path, int](), False, 0.0, ""
        self._trace: OpTrace | None = None
        self._steps, self._last, self._quiet_s = list[int](), -1, QUIET_S
        self._over = -1  # not all processes write at once: a step is over once a later one has ended

    def ended(self) -> bool:
        """Return whether nothing was written for so long that the run must have ended: nobody announces it."""
        if self._trace is None or self._grown or time.monotonic() - self._heard_s < self._quiet_s:
            return False
        self._tell(f"{self.options.directory}: nothing was written for {self._quiet_s:.0f} s: the run has ended")
        self._over = len(self._steps)
        return True

    def _poll(self) -> None:
        """Read the whole recording again if it has grown."""
        path, now_s = self.options.directory, time.monotonic()
        files = path.glob("*.jsonl") if path.is_dir() else [path]
        sizes = {file: size for file in sorted(files) if (size := file.stat().st_size)}
        if sizes != self._sizes:
            self._sizes, self._heard_s, self._grown = sizes, now_s, bool(sizes)
        if not self._grown or now_s < self._read_at:
            return
        self._grown = False
        try:
            self._take(trace_of(read_rl(list(sizes)), self.options.name))
        except FormatError as error:
            if str(error) != self._problem:
                self._tell(f"{error}; it is read again once it has grown")
            self._problem = str(error)
        self._read_at = time.monotonic() + REST * (time.monotonic() - now_s)
        if self._trace is not None and self._source is None and (stored := self._begin_watch(str(path))) is not None:
            self._last, job = stored[1], short(self.options.name)
            self._tell(f"windows of {job!r} go on after step {self._last}; give another run another --name")

    def _take(self, trace: OpTrace) -> None:
        """Keep what was read, and the steps that have recorded the phase with which a step ends."""
        self._trace, self._problem, ops = trace, "", trace.ops
        trained = ops.filter(pl.col("rank") == 0, ~pl.col("kind").is_in(("generate", "reward")))
        synced = trained.filter(pl.col("kind") == "sync")
        newest = max((trained if synced.is_empty() else synced)["step"], default=-1)
        self._steps = [step for step in ops["step"].unique().sort().to_list() if step <= newest]
        took = ops.select("step", at=pl.col("start") + pl.col("duration")).group_by("step").max()["at"]
        self._quiet_s = max(QUIET_S, QUIET_STEPS * float(took.to_numpy().mean()))

    def _state(self) -> RanksState:
        over = [step for step in self._steps[: self._over] if step > self._last]
        return RanksState({0: over}, {0: max(over, default=-1)}, [0])

    def _window(self, window: ReadyWindow) -> None:
        assert self._trace is not None
        job = RlJob(part_of(self._trace, self._last + 1, window.last))
        steps, self._last = job.trace.steps, window.last
        if len(steps) > WARM_UP:  # fewer may be left at the end
            self._add(job, f"steps {steps[0]} to {steps[-1]}")
