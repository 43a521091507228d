"""Effects of process pauses outside of computes: ops start late, and optimizers take longer.

In: a `JobReplay` and the `Pauses` of its computes. Out: `PausedStarts`, and a `JobReplay` that keeps these delays.

A process can be paused at any point. A pause that begins while it waits for a transfer, or between two ops, lengthens
no compute: it delays the next op by the rest of the pause. The replay drops the launch delays of communication, because
most of them are waits. These delays are not waits: they stay until the pauses go.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.off_cpu import LONGEST_OF_SEEN
from tracekit.analysis.evidence.pauses import PAUSE_SPREADS, SMALLEST_PAUSE_SHARE, Pauses
from tracekit.analysis.graph.op_grid import OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, median
from tracekit.analysis.replay.costs import keeps_delay
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together, scaled
from tracekit.trace.model import OpKind


class PausedStarts(Struct, frozen=True, eq=False):
    """`ops`: every op of the job; `delay_share`: the share of their launch delays due to pauses, in the shape of its
    grid.

    `optimizers` and `optimizer_share`: the same for the durations of optimizers. `delays_left`: launch delays without
    the pauses, seconds, one [rows, lanes] matrix per block.
    """

    ops: OpGrid
    delay_share: Floats
    optimizers: OpGrid
    optimizer_share: Floats
    delays_left: tuple[Floats, ...]

    def change(self, workers: Bools) -> Intervention:
        """The job without the paused starts of `workers`, [stages, dp_ranks]."""
        cells = workers[:, None, None, :]
        changes: list[Intervention] = [ScaleDelays(self.ops, 1 - self.delay_share * cells)]
        if not self.optimizers.empty:
            changes.append(Scale(self.optimizers, 1 - self.optimizer_share * cells))
        return Together(tuple(changes))


def find_paused_starts(replay: JobReplay, pauses: Pauses | None) -> PausedStarts | None:
    """Find the effects of the pauses seen in computes on other ops; None if no computes of the job pause."""
    if pauses is None or not (pauses.of_processes or pauses.stopped.any()):
        return None
    ops, optimizers = op_grid(replay.graph, tuple(OpKind)), op_grid(replay.graph, (OpKind.OPTIMIZER,))
    delays = replay.durations.launch_delay
    share = paused_share(ops.gather(delays), pauses)
    return PausedStarts(
        ops,
        share,
        optimizers,
        paused_share(optimizers.gather(replay.durations.cost), pauses),
        scaled(delays, ops.parts(1 - share)),
    )


def with_paused_starts(replay: JobReplay, paused: PausedStarts | None) -> JobReplay:
    """The job whose replay keeps the launch delays due to pauses, including those of communication."""
    if paused is None:
        return replay
    delays = []
    for block, delay, without in zip(
        replay.graph.blocks, replay.durations.launch_delay, paused.delays_left, strict=True
    ):
        delays.append(np.where(keeps_delay(block.template)[:, None] | (without < delay), delay, 0.0))
    return replace(replay, kept_delay=tuple(delays))


def paused_share(seconds: Floats, pauses: Pauses) -> Floats:
    """The share of the time (or late start) of each op of a grid that is due to a pause or a stop; 0 for none.

    Only what lasts about as long as pauses of computes do counts: a worker that is late with an op in most steps is
    late for another reason, even if it is stopped too. `seconds`: [stages, ops, steps, dp_ranks].
    """
    share = np.zeros(seconds.shape)
    single_s = pauses.seconds[pauses.seconds > 0] if pauses.of_processes else np.zeros(0)
    for workers, lengths in ((pauses.stopped, pauses.stops_s), (~pauses.stopped, single_s)):
        if seconds.size and len(lengths):
            usual_s, longest_s = float(np.median(lengths)), LONGEST_OF_SEEN * float(lengths.max())
            for stage in np.flatnonzero(workers.any(axis=1)):  # one at a time, to keep temporary arrays small
                _add_pauses(share[stage], seconds[stage], workers[stage], usual_s, longest_s)
    return share


def _add_pauses(share: Floats, took: Floats, workers: Bools, usual_s: float, longest_s: float) -> None:
    """Fill in `share` of one stage, [ops, steps, dp_ranks], where one of `workers` pauses in an op or before it."""
    beyond = took - median(took, (1,))[:, None]
    off = np.abs(beyond)
    spread = MAD_TO_SIGMA * np.fmax(median(off, (1, 2))[:, None, None], median(off, (1,))[:, None])
    least = np.maximum(PAUSE_SPREADS * spread, SMALLEST_PAUSE_SHARE * usual_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        paused = (took > 0) & (beyond > least) & (beyond < longest_s) & workers
        share[...] = np.where(paused, np.minimum(beyond / took, 1.0), share)
