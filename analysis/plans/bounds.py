"""Lower bounds of plans: what no plan with these first stages can undercut, however its other stages are chosen.

In: `Stages`. Out: `Bounds`, which enumerates the splits whose bound is within a limit, stage by stage. Every bound is
the length of a path through the computes of a step, so that it holds for every plan:

- to the start of the last backward of a stage: the forwards of the stages before, then all its own computes; or the
  first microbatch to the last stage and back, then what the stage has left; or, as 1F1B lets a stage hold so many
  microbatches, one round trip after the other;
- from there to the end: backwards down to an earlier stage and its reductions, or the stage's own reductions.
"""

from __future__ import annotations

from functools import cached_property
from time import monotonic

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.plans.stages import Stages
from tracekit.trace.compute_order import Schedule

#: First stages that are extended together, and those that a search keeps at most: with more, it is not complete.
_TOGETHER, MOST_PARTS = 1 << 13, 1 << 17


class Leaves(Struct, frozen=True, eq=False):
    """Whole splits with their bounds, seconds. `dropped_s`: the least bound of those left out, for lack of memory or
    time.
    """

    splits: Ints
    bound_s: Floats
    dropped_s: float


class FirstStages(Struct, frozen=True, eq=False):
    """First stages of plans, [parts]. `ends`: where each stage ends, [parts, stages so far]. `finish_s`: from the start
    of the last backward of the last of these stages to the end of them all. `bound_s`: of all plans that begin so.
    """

    ends: Ints
    finish_s: Floats
    longest_forward_s: Floats
    bound_s: Floats

    def only(self, chosen: npt.NDArray[np.bool_] | Ints) -> FirstStages:
        """Some of the parts."""
        ends, finish_s, longest_s = self.ends[chosen], self.finish_s[chosen], self.longest_forward_s[chosen]
        return FirstStages(ends, finish_s, longest_s, self.bound_s[chosen])


class Bounds(Struct, frozen=True, eq=False, dict=True):
    """Bounds of the plans of one schedule and number of microbatches; without the optimizer."""

    cells: Stages

    @cached_property
    def last_backward_s(self) -> Floats:
        """The earliest start of the last backward of each cell, seconds, [stages, layers + 1, layers + 1]."""
        cells, count = self.cells, self.cells.model.stages
        stage, rounds = np.arange(count)[:, None, None], self.cells.microbatches
        until_f, until_b = cells.forwards_until, cells.backwards_until
        forward, backward, transfer = cells.forward_s, cells.backward_s, cells.transfer_s
        reached = until_f[None, :, None] + stage * transfer
        own = reached + rounds * forward + (rounds - 1) * backward
        behind = 2 * transfer * (count - 1 - stage)
        ahead = (until_f[-1] - until_f) + (until_b[-1] - until_b)
        both_until = until_f + until_b  # what the stage takes beyond its layers on the fastest stage: slow, recomputed
        beyond = forward + backward - (both_until[None, :] - both_until[:, None])
        trip = ahead[None, :, None] + behind + beyond
        if cells.schedule is Schedule.GPIPE:
            after = (until_b[-1] - until_b)[None, None, :] + transfer * (count - 1 - stage)
            passed = until_f[-1] + transfer * (count - 1) + (rounds - 1) * (forward + backward)
            return np.asarray(passed + after)
        held = np.minimum(count - stage, rounds)
        first_back = reached + trip + (rounds - 2) * backward + (rounds - held) * forward
        trips = (rounds - 1) // held
        others = rounds - 1 - trips * held  # microbatches that the stage alone sees through before these trips
        cycles = reached + (trips + 1) * trip + others * (forward + backward) - backward
        cycles = np.where(trips > 0, cycles, first_back)
        return np.asarray(np.maximum(own, np.maximum(first_back, cycles)))

    @cached_property
    def _completions(self) -> tuple[Floats, Floats]:
        """The least over all ways to fill the stages from each one on, by its first layer, [stages + 1, layers + 1].

        First of the longest path through the last backward of the stage before the rest, counted from layer 0, then of
        the longest one through their own reductions.
        """
        cells = self.cells
        count, size = cells.model.stages, len(cells.model.layers) + 1
        passed, stayed = np.full((2, count + 1, size), np.inf)
        passed[count, -1] = stayed[count, -1] = -np.inf
        for stage in range(count - 1, -1, -1):
            start = np.where(cells.possible[stage], self.last_backward_s[stage], np.inf)
            down = cells.backwards_until[:, None] + stage * cells.transfer_s
            passed[stage] = np.maximum(start + cells.backward_s[stage] + down, passed[stage + 1]).min(axis=1)
            stayed[stage] = np.maximum(start + cells.tail_s[stage], stayed[stage + 1]).min(axis=1)
        return passed, stayed

    @cached_property
    def least_s(self) -> float:
        """No plan takes less; infinite if none fits."""
        return float(self._extended(self._nothing, 0, np.inf).bound_s.min(initial=np.inf))

    @property
    def _nothing(self) -> FirstStages:
        return FirstStages(np.zeros((1, 0), np.int64), np.full(1, -np.inf), np.zeros(1), np.full(1, -np.inf))

    def leaves(self, limit_s: float, most_parts: int, until: float = np.inf) -> Leaves:
        """All splits with a bound of at most `limit_s`; beyond `most_parts` first stages, those of the least bounds;
        none if it lasts until that `time.monotonic`.
        """
        parts, dropped_s = self._nothing, np.inf
        for stage in range(self.cells.model.stages):
            pieces: list[FirstStages] = []
            for begin in range(0, len(parts.bound_s), _TOGETHER):
                if monotonic() >= until:
                    dropped_s = min(dropped_s, float(parts.bound_s.min()))
                    pieces.clear()
                    break
                these = np.arange(begin, min(begin + _TOGETHER, len(parts.bound_s)))
                pieces.append(self._extended(parts.only(these), stage, limit_s))
            if not pieces:
                return Leaves(np.zeros((0, self.cells.model.stages), np.int64), np.empty(0), dropped_s)
            names = ("ends", "finish_s", "longest_forward_s", "bound_s")
            parts = FirstStages(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))
            if len(parts.bound_s) > most_parts:
                best = np.argpartition(parts.bound_s, most_parts)
                dropped_s = min(dropped_s, float(parts.bound_s[best[most_parts:]].min()))
                parts = parts.only(best[:most_parts])
        return Leaves(np.diff(parts.ends, axis=1, prepend=0), parts.bound_s, dropped_s)

    def _extended(self, parts: FirstStages, stage: int, limit_s: float) -> FirstStages:
        """The parts with one more stage, in all ways whose bound is within the limit."""
        cells = self.cells
        first = parts.ends[:, -1] if stage else np.zeros(len(parts.bound_s), np.int64)
        part, end = np.nonzero(cells.possible[stage][first])
        first = first[part]
        backward, start = cells.backward_s[stage, first, end], self.last_backward_s[stage, first, end]
        longest = np.maximum(parts.longest_forward_s[part], cells.forward_s[stage, first, end])
        if cells.schedule is Schedule.GPIPE:  # the longest forward may be another stage's than the longest backward
            start = start + (cells.microbatches - 1) * (longest - cells.forward_s[stage, first, end])
        finish = np.maximum(parts.finish_s[part] + cells.transfer_s + backward, cells.tail_s[stage, first, end])
        passed, stayed = self._completions
        through = passed[stage + 1, end] - (cells.backwards_until[end] + stage * cells.transfer_s) + finish
        bound = np.maximum(np.maximum(parts.bound_s[part], start + finish), np.maximum(through, stayed[stage + 1, end]))
        chosen = np.flatnonzero(bound <= limit_s)
        ends = np.concatenate([parts.ends[part[chosen]], end[chosen, None]], axis=1)
        return FirstStages(ends, finish[chosen], longest[chosen], bound[chosen])
