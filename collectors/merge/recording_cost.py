"""Measure what recording costs: compare steps with hooks to steps without, if the run has both.

In: the ends of steps in an `AttemptRecording`. Out: a `RecordingCost`, or the reason why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import AttemptRecording

#: Comparisons needed between steps that all ran without hooks; fewer do not show how much such comparisons vary.
FEWEST_PLACEBOS = 5
#: Do not compare longer blocks of steps: the job may drift within them.
LONGEST_BLOCK = 50
#: The standard deviation of a normal distribution in median absolute deviations, and the standard error of a median in
#: standard errors of a mean.
_SIGMA_PER_MAD, _MEDIAN_ERROR = 1.4826, 1.2533

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """Extra time of steps with recording, as a share of a step, and its standard error.

    The error is the scatter of comparisons between steps that all ran without recording.
    """

    share: float
    error: float
    off_s: float
    on_steps: int
    off_steps: int

    def sentence(self) -> str:
        """The message for the user."""
        return (
            f"recording costs {self.share:.1%} +- {self.error:.1%} of a step of {self.off_s * 1e3:.2f} ms"
            f" ({self.on_steps} recorded step{'s' * (self.on_steps != 1)} against those before and after, of"
            f" {self.off_steps} without)"
        )


def recording_cost(recording: AttemptRecording) -> RecordingCost | str:
    """The cost, or a sentence with the reason why it is unknown.

    Each run of recorded steps is compared with as many steps without recording on both sides of it. The first step
    after each switch is left out.
    """
    steps, seconds, on = _step_times(recording)
    switched = np.diff(on, prepend=~on[:1]) | (np.diff(steps, prepend=-2) != 1)
    usable = ~switched & (steps > 0)
    on_at, off_at = np.flatnonzero(usable & on), np.flatnonzero(usable & ~on)
    starts = np.flatnonzero(np.diff(on_at, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(on_at))
    if not len(on_at):
        return (
            "the cost of recording is unknown: no two steps in a row were recorded (with `--every N`, use"
            " `--for 2` or more)"
        )
    size = min(int(np.median(lengths)), len(off_at) // (FEWEST_PLACEBOS + 2), LONGEST_BLOCK)
    if size < 1:
        return (
            f"the cost of recording is unknown: {len(off_at)} steps ran without it, {FEWEST_PLACEBOS + 2} are needed"
            " (use `--overhead`, `--every N --for 2` or `--idle`)"
        )
    off = np.log(seconds[off_at])
    blocks = [on_at[start : start + size] for start, length in zip(starts, lengths, strict=True) if length >= size]
    effects = np.array(
        [_effect(np.log(seconds[block]), off, int(np.searchsorted(off_at, block[0]))) for block in blocks]
    )
    placebos = _placebos(off, size)
    error = _SIGMA_PER_MAD * float(np.median(np.abs(placebos))) * (_MEDIAN_ERROR / len(effects) ** 0.5)
    return RecordingCost(
        share=float(np.expm1(np.median(effects))),
        error=error,
        off_s=float(np.median(seconds[off_at])),
        on_steps=len(on_at),
        off_steps=len(off_at),
    )


def _step_times(recording: AttemptRecording) -> tuple[npt.NDArray[np.int64], _Floats, npt.NDArray[np.bool_]]:
    """Steps in order, the duration of each (median over the ranks, seconds), and whether it was recorded."""
    ends = np.concatenate([one.records[one.records["category"] == Category.STEP] for one in recording.ranks.values()])
    ends = ends[np.argsort(ends["step"], kind="stable")]
    steps, first = np.unique(ends["step"], return_index=True)
    took = (ends["end_ns"] - ends["start_ns"]) / 1e9
    seconds = np.array([np.median(times) for times in np.split(took, first[1:])])
    recorded = (ends["flags"] & Flag.RECORDING) != 0
    return steps.astype(np.int64), np.maximum(seconds, 1e-9), np.logical_or.reduceat(recorded, first)


def _effect(block: _Floats, off: _Floats, position: int) -> float:
    """Extra time of a block's steps over the steps without recording around `position`, as a logarithm."""
    beside = np.concatenate([off[max(0, position - len(block)) : position], off[position : position + len(block)]])
    return float(np.median(block) - np.median(beside))


def _placebos(off: _Floats, size: int) -> _Floats:
    """The same comparison for blocks that were not recorded."""
    blocks = off[: len(off) // size * size].reshape(-1, size)
    beside = np.concatenate([blocks[:-2], blocks[2:]], axis=1)
    return np.asarray(np.median(blocks[1:-1], axis=1) - np.median(beside, axis=1), np.float64)
