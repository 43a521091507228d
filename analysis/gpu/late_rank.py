"""The rank that the others wait for, whatever keeps it: what collectives show without any other event.

In: a recording and its matches. Out: `LateRanks`. A report that does not name this rank leaves something
unexplained. No price follows from it: a rank that is late once is late at every collective of the step. Transfers
between two ranks do not count, because a receiver waits for its sender by schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.gpu.clock_offsets import ClockOffsets, measure_offsets
from tracekit.analysis.gpu.comparable import Comparable, mismatched, ranks_with_overlaps
from tracekit.analysis.gpu.matching import CONVINCING, Matches, match_collectives
from tracekit.analysis.gpu.noise import is_behind
from tracekit.analysis.gpu.steps import with_steps
from tracekit.analysis.gpu.waits import Waits
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.codes import dense
from tracekit.base.text import seconds
from tracekit.trace.gpu_recording import GpuRecording


@dataclass(frozen=True, slots=True)
class Lateness:
    """`late_s`: how much later than all others it comes, in the collective of each step in which that is most, seconds
    over all steps.
    """

    rank: int
    late_s: float


@dataclass(frozen=True, slots=True)
class LateRanks:
    """`compared`: the late rank among those that are compared. `left_out`: among those that are not.

    `accounted`: ranks that are left out of the comparison, but whose collectives show whether they are late.
    """

    compared: Lateness | None
    left_out: Lateness | None = None
    accounted: frozenset[int] = frozenset()


def late_ranks(recording: GpuRecording, part: Comparable, recorded_s: float) -> LateRanks:
    """Who is late in a recording, and in the part of it that is compared, which takes `recorded_s`."""
    least_s = SMALLEST_HEADLINE_SHARE * recorded_s
    compared = late_rank(part.recording, part.matches, part.clocks, least_s)
    left_out = [rank for rank in part.left_out if rank in recording.ranks]
    if not left_out:
        return LateRanks(compared)
    matches = match_collectives(recording)
    clocks = measure_offsets(matches, recording.ranks)
    if mismatched(matches, clocks):
        return LateRanks(compared)
    late = late_rank(with_steps(recording, matches), matches, clocks, least_s)
    of_rank = np.unique(part.matches.rank, return_counts=True)[1]
    usual = float(np.median(of_rank)) if len(of_rank) else 0.0  # of one rank, nothing is matched
    contradict = {rank for rank, _ in ranks_with_overlaps(recording)}
    seen = [rank for rank in left_out if (matches.rank == rank).sum() >= CONVINCING * usual > 0]
    hidden = late if late is not None and late.rank in left_out else None
    return LateRanks(compared, hidden, frozenset(seen) - contradict)


def unexplained_waits(late: LateRanks, waits: Waits, named: int | None, recorded_s: float) -> list[str]:
    """What collectives show and a report that blames rank `named` does not explain; `waits`: of what is compared."""
    sentences, straggler = [], late.compared
    if straggler is not None and straggler.rank != named:
        waited = waits.waited_for[:, waits.ranks.index(straggler.rank)]
        ranks = int((waited > 0).sum())
        sentences.append(
            f"{ranks} rank{'s wait' if ranks > 1 else ' waits'} up to {seconds(float(waited.max()))} of the"
            f" {seconds(recorded_s)} recorded for rank {straggler.rank}, and nothing recorded says for what"
        )
    straggler = late.left_out
    if straggler is not None:
        sentences.append(f"the others wait {seconds(straggler.late_s)} for rank {straggler.rank}, which is left out")
    return sentences


def late_rank(recording: GpuRecording, matches: Matches, clocks: ClockOffsets, least_s: float = 0.0) -> Lateness | None:
    """The rank that is later than all others by `least_s` and by more than chance. `recording`: with steps."""
    collective = np.array([not group.transfers for group in matches.groups], np.bool_)[matches.group_of]
    chosen = np.flatnonzero(matches.synchronising & collective)
    if len(clocks.ranks) < 2 or not len(chosen):
        return None
    late, steps = _behind_the_others(matches, clocks)[:, chosen], _steps(recording, matches)[chosen]
    by_step = np.zeros((len(late), int(steps.max()) + 1))
    for step in range(by_step.shape[1]):
        by_step[:, step] = late[:, steps == step].max(axis=1)
    late_s = np.maximum(by_step, 0.0).sum(axis=1)
    latest = int(late_s.argmax())
    if not late_s[latest] > 0 or late_s[latest] < least_s:
        return None
    # Without steps, each collective is a sample.
    behind = is_behind(by_step if by_step.shape[1] > 1 else late, latest)
    return Lateness(clocks.ranks[latest], float(late_s[latest])) if behind else None


def _behind_the_others(matches: Matches, clocks: ClockOffsets) -> Floats:
    """How much later each rank begins collectives than the last of the others, seconds, [ranks, instances].

    0 for ranks that are not in a collective's group.
    """
    start = np.full((len(clocks.ranks), matches.matched), -np.inf)
    start[np.searchsorted(clocks.ranks, matches.rank), matches.instance] = matches.start - clocks.of(matches.rank)
    second, last = np.partition(start, -2, axis=0)[-2:]
    others = np.where(start == last, second, last)
    return np.where(np.isfinite(start) & np.isfinite(others), start - others, 0.0)


def _steps(recording: GpuRecording, matches: Matches) -> Ints:
    """The number of the step that launched each collective on the rank where it is known, [instances]."""
    step = np.full(matches.matched, -1, np.int64)
    np.maximum.at(step, matches.instance, recording.gpu_ops["step"].fill_null(-1).to_numpy()[matches.row])
    return dense(step)
