"""Record a few steps of a running job: ask its ranks, wait for them, and read the recording.

In: a run directory, a number of steps. Out: an `AttemptRecording` of these steps and of those before, which ran without
recording and so show its cost. Afterwards the ranks return to their previous schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracekit.base.errors import SelectionError, TraceError
from tracekit.collectors.record.wire_format import Category, Flag, RecordingSchedule, attempt_directory
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.launchers import attempts, running_launchers
from tracekit.collectors.run_directory.segments import AttemptRecording
from tracekit.collectors.run_directory.steering import current_schedule, first_common_step, pace, write_schedule

#: How often the ranks are checked, seconds.
PERIOD_S = 0.2
#: Number of steps before the recorded ones to read for comparison.
STEPS_BEFORE = 300
#: A rank that is this many steps past the last one without having recorded it never will.
STEPS_BEYOND = 5


@dataclass(frozen=True, slots=True)
class Attached:
    """Steps of a running job: the first recorded one, and all ranks' records of them and of the steps before."""

    first_step: int
    recording: AttemptRecording


def record_steps(directory: Path, count: int, timeout_s: float, tell: Callable[[str], None]) -> Attached:
    """Record `count` steps on all ranks. `tell` receives progress messages.

    Raises SelectionError if steps are already being recorded, TraceError if the steps are not recorded in time.
    """
    before = current_schedule(directory)
    deadline = time.monotonic() + timeout_s
    tell("waiting for the first step")
    while (now := pace(directory)) is None:
        _go_on(directory, deadline, "no rank finished a step")
    number = attempts(directory)[-1]
    ongoing = before.last_step is None and before.every <= before.length
    if before.every == 1 and before.goes_on_after(now.step):
        raise SelectionError(f"steps up to {(before.last_step or 0) - 1} are already being recorded; try again then")
    first = now.step + 2 if ongoing else first_common_step(directory)
    try:
        while True:
            if not ongoing:
                write_schedule(directory, RecordingSchedule(first, first + count))
            tell(f"recording steps {first} to {first + count - 1}")
            follower = AttemptFollower(number, attempt_directory(directory, number), max(0, first - STEPS_BEFORE))
            _await_steps(follower, directory, first + count - 1, deadline)
            recording = follower.take(first + count - 1)
            if ongoing or _all_recorded(recording, follower.world_size, first, count):
                return Attached(first, recording)
            # Ranks had passed these steps before they read the file: later steps can be much faster than the first.
            first = first_common_step(directory)
    finally:
        if not ongoing:
            write_schedule(directory, before)


def _all_recorded(recording: AttemptRecording, ranks: int, first: int, count: int) -> bool:
    """True if `ranks` ranks have each recorded `count` steps from step `first` on."""
    recorded: list[int] = []
    for rank in recording.ranks.values():
        ends = rank.records[(rank.records["category"] == Category.STEP) & (rank.records["step"] >= first)]
        recorded.append(int(np.count_nonzero(ends["flags"] & Flag.RECORDING)))
    return len(recorded) == ranks and min(recorded) >= count


def _await_steps(follower: AttemptFollower, directory: Path, last: int, deadline: float) -> None:
    """Return once all ranks have recorded step `last`, or have passed it. Raises TraceError if they do neither."""
    while True:
        follower.update(time.monotonic())
        ranks = follower.good.values()
        done = all(rank.whole >= last or rank.reached > last + STEPS_BEYOND for rank in ranks)
        if len(ranks) == follower.world_size > 0 and done:
            return
        behind = sum(rank.whole < last for rank in ranks) + follower.world_size - len(ranks)
        _go_on(directory, deadline, f"{behind} of {follower.world_size} ranks did not record step {last}")


def _go_on(directory: Path, deadline: float, lacking: str) -> None:
    """Wait a moment. Raises TraceError with what is `lacking` if waiting is useless."""
    if not running_launchers(directory):
        raise TraceError(f"{directory}: {lacking} before the job ended")
    if time.monotonic() > deadline:
        raise TraceError(f"{directory}: {lacking} in time; wait longer with --timeout")
    time.sleep(PERIOD_S)
