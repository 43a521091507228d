"""The steps of a run with recorded times: which are whole, and when what each consists of was.

In: a `RlTimeline`. Out: `Steps`, and from it the `Loop` that the replay changes.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.rl.loop import WARM_UP, Loop
from tracekit.base.errors import FormatError
from tracekit.base.text import counted
from tracekit.trace.post_training import RlTimeline

#: What is recorded less than this apart happens at one time, seconds.
_AT_ONCE_S = 1e-3


class Steps:
    """The recorded steps that are whole: when their generation, reward, training and sync were, [steps], seconds."""

    def __init__(self, timeline: RlTimeline) -> None:
        phases, trajectories = timeline.phases, timeline.trajectories
        self.trajectories = trajectories
        numbers = np.unique(np.concatenate((phases.step, [] if trajectories is None else trajectories.step)))
        numbers = numbers.astype(np.int64)
        self.spans = {
            name: _span(numbers, phases.step[named], phases.start[named], phases.end[named])
            for name in dict.fromkeys(phases.name.tolist())
            for named in [phases.name == name]
        }
        nothing = np.full(len(numbers), np.nan)
        generate = self.spans.get("generate", (nothing, nothing, nothing))
        if trajectories is not None and "generate" not in self.spans:
            generate = (*_extent(numbers, trajectories.step, trajectories.submit, trajectories.end), nothing)
        reward = self.spans.get("reward", (nothing, nothing, nothing))
        trainer = [span for name, span in self.spans.items() if name not in ("generate", "reward", "sync")]
        self.trains = bool(trainer)
        # What begins before the generation has ended, such as an evaluation, is no training on it.
        started = _least([np.where(start >= generate[1] - _AT_ONCE_S, start, np.nan) for start, *_ in trainer], nothing)
        finished = -_least([-end for _, end, _ in trainer], nothing)
        sync = self.spans.get("sync", (finished, finished, np.zeros(len(numbers))))
        started = np.where(np.isnan(started), sync[0], started)
        whole = np.flatnonzero(~np.isnan(generate[0] + started + sync[1]))
        if len(whole) < WARM_UP + 1:
            raise FormatError(
                f"{counted(len(whole), 'whole step')}; needs {WARM_UP + 1}, as the first {WARM_UP} are left out. A step"
                " needs a generation, a training and, if others have one, a sync"
            )
        if len(whole) <= whole[-1] - whole[0]:
            missing = np.setdiff1d(np.arange(whole[0], whole[-1]), whole)[0]
            raise FormatError(
                f"step {numbers[missing]} lacks its generation, training or sync, and later steps have it"
            )
        self.numbers, self.left_out = numbers[whole], np.delete(numbers, whole).tolist()
        spans = {name: tuple(one[whole] for one in span) for name, span in self.spans.items()}
        self.spans = {name: span for name, span in spans.items() if not np.isnan(span[0]).all()}
        self.generate_start, self.generate_end = generate[0][whole], generate[1][whole]
        self.reward_end = np.fmax(reward[1][whole], self.generate_end)
        self.reward_s = np.nan_to_num(reward[2][whole])
        self.train_start, self.sync_start, self.sync_end = started[whole], sync[0][whole], sync[1][whole]
        early = np.flatnonzero(self.sync_start[1:] < self.sync_end[:-1] - _AT_ONCE_S)
        if len(early):
            first, then = self.numbers[early[0] : early[0] + 2].tolist()
            raise FormatError(
                f"step {then} ends before step {first} has ended: two attempts, or two runs; give the records of one"
            )

    @property
    def after_generation(self) -> list[str]:
        """Phases that begin once the generation of their step has ended."""
        early = {name: np.nanmedian(start - self.generate_end) for name, (start, _, _) in self.spans.items()}
        return [name for name, by in early.items() if by >= -_AT_ONCE_S]

    @property
    def step_times(self) -> Floats:
        """From the end of a sync to that of the next, after the warm-up."""
        return np.diff(self.sync_end)[WARM_UP - 1 :]

    def staleness(self) -> int:
        """Updates that the weights of a generation lacked: by the recorded versions, else by the times."""
        trajectories = self.trajectories
        if trajectories is not None:
            has_version = (trajectories.version >= 0) & (trajectories.step >= self.numbers[WARM_UP])
            if has_version.any():
                return max(0, int(np.median(trajectories.step[has_version] - trajectories.version[has_version])))
        synced = np.searchsorted(self.sync_end, self.generate_start + _AT_ONCE_S, side="right")
        return max(0, int(np.median((np.arange(len(self.numbers)) - synced)[WARM_UP:])))

    def loop(self) -> Loop:
        """The steps as a loop."""
        staleness = self.staleness()
        none = np.full(len(self.numbers), -np.inf)
        generated, synced, weights = none.copy(), none.copy(), none.copy()
        generated[1:], synced[1:] = self.generate_end[:-1], self.sync_end[:-1]
        weights[1 + staleness :] = self.sync_end[: max(0, len(none) - 1 - staleness)]
        could_generate = np.maximum(generated, weights)
        could_generate[0] = self.generate_start[0]
        return Loop(
            self.generate_end - self.generate_start,
            self.reward_end - self.generate_end,
            self.sync_start - self.train_start,
            self.sync_end - self.sync_start,
            np.maximum(self.generate_start - could_generate, 0.0),
            np.maximum(self.train_start - np.maximum(self.reward_end, synced), 0.0),
            staleness,
        )

    def unaccounted_s(self) -> float:
        """Seconds of the mean step in which no phase was."""
        first, last = self.sync_end[WARM_UP - 1], self.sync_end[-1]
        starts, ends = (
            np.clip(np.concatenate([span[side] for span in self.spans.values()]), first, last) for side in (0, 1)
        )
        present = np.flatnonzero(~np.isnan(starts))
        order = present[np.argsort(starts[present])]
        reached = np.concatenate(([first], np.maximum.accumulate(ends[order])))
        gaps = np.maximum(np.append(starts[order], last) - np.maximum(reached, first), 0.0)
        return float(gaps.sum()) / len(self.step_times)


def _span(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, ...]:
    """Start and end of a phase in each step, and for how long it was in it, nan in steps without it."""
    first, last = _extent(numbers, step, start, end)
    step_index, reached, total = np.searchsorted(numbers, step), first.copy(), last - last
    for row in np.lexsort((start, step_index)).tolist():  # several ranks may record a phase, each its own part
        total[step_index[row]] += max(0.0, end[row] - max(start[row], reached[step_index[row]]))
        reached[step_index[row]] = max(reached[step_index[row]], end[row])
    return first, last, total


def _extent(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The first start and the last end in each step, nan in steps without any."""
    first, last = np.full(len(numbers), np.nan), np.full(len(numbers), np.nan)
    step_index = np.searchsorted(numbers, step)
    np.fmin.at(first, step_index, start)
    np.fmax.at(last, step_index, end)
    return first, last


def _least(columns: list[Floats], nothing: Floats) -> Floats:
    """The least of several columns, where any has a value."""
    return np.asarray(np.fmin.reduce([nothing, *columns]))
