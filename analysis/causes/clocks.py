"""Which worker's clock is off, and the job with its clocks set right.

In: a `JobReplay`. Out: clock offsets per worker from when a collective over all workers ends (it ends for all at
once), and a `JobReplay` without them. A wrong clock looks like long transfers on one rank and must not be blamed on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tracekit.analysis.causes.compute_profile import MAD_TO_SIGMA, median
from tracekit.analysis.causes.op_grid import op_grid
from tracekit.analysis.durations import measure_durations
from tracekit.analysis.graph import Block
from tracekit.analysis.job_replay import JobReplay
from tracekit.analysis.structure import Floats
from tracekit.model import OpKind

#: Offsets below this are left alone: network time protocols keep clocks this close.
SMALLEST_OFFSET_S = 1.5e-3
#: An offset must be this many standard errors large, and show in this share of the steps.
OFFSET_ERRORS = 8.0
STEADY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ClockOffsets:
    """Seconds each worker's clock is ahead, 0 where no offset stands out; `error_s` its standard error. [stages,
    dp_ranks] each.
    """

    offset_s: Floats
    error_s: Floats

    @property
    def any(self) -> bool:
        """True where a clock is off."""
        return bool((self.offset_s != 0).any())


def clock_offsets(replay: JobReplay) -> ClockOffsets:
    """Offsets from the ends of gradient clipping, which all workers leave together."""
    shape = (replay.graph.layout.pp, len(replay.graph.dp_ranks))
    clips = op_grid(replay, (OpKind.OPTIMIZER_CLIP_MAIN_GRAD,), first_only=True)
    if clips.empty or shape[0] * shape[1] < 3:
        return ClockOffsets(np.zeros(shape), np.zeros(shape))
    blocks = replay.graph.blocks
    ends = (clips.gather([block.start for block in blocks]) + clips.gather([block.duration for block in blocks]))[:, 0]
    apart = ends - median(ends, (0, 2))[None, :, None]
    offset = median(apart, (1,))
    steady = (np.sign(apart) == np.sign(offset)[:, None]).mean(axis=1) >= STEADY_SHARE
    scatter = MAD_TO_SIGMA * median(np.abs(apart - offset[:, None]), (1,))
    error = np.maximum(scatter, MAD_TO_SIGMA * float(np.nanmedian(np.abs(offset)))) / np.sqrt(apart.shape[1])
    stands_out = (np.abs(offset) > np.maximum(SMALLEST_OFFSET_S, OFFSET_ERRORS * error)) & steady
    return ClockOffsets(np.where(stands_out, offset, 0.0), error)


def with_clocks_set(replay: JobReplay, offset_s: Floats) -> JobReplay:
    """The job with `offset_s` [stages, dp_ranks] taken off every recorded start, its durations measured anew."""
    dp_ranks = np.array(replay.graph.dp_ranks)

    def shifted(block: Block) -> Block:
        dp_index = np.searchsorted(dp_ranks, block.dp_rank)
        stage = block.template.pp_rank[:, None]
        return replace(block, start=block.start - offset_s[stage, dp_index])

    graph = replace(replay.graph, blocks=tuple(shifted(block) for block in replay.graph.blocks))
    return JobReplay(graph, measure_durations(graph))
