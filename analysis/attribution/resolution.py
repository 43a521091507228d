"""The resolution of the recorded starts.

In: a `DependencyGraph`. Out: the spacing of the grid that starts lie on, if it is too coarse for the ops. Times that
were stored as float32 (or rounded) lose digits of the starts, which are large, but not of the durations.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.numeric.arrays import Floats

#: A grid coarser than this share of the usual compute spoils launch delays and transfer durations.
LARGEST_SHARE = 0.1
#: Starts closer than this, seconds, are equal: no recorder resolves them.
SAME_S = 1e-6
#: Starts lie on a grid if their gaps are whole multiples of its spacing, within this share of the spacing. Durations do
#: not lie on it if they are usually further off.
ON_GRID = 0.02
#: Look at the ops of this many lanes; decide nothing from fewer gaps.
LANES, FEWEST_GAPS = 8, 10


def coarse_starts_s(graph: DependencyGraph) -> float | None:
    """The spacing of the grid that starts lie on, seconds; None if there is no grid, or one that is fine enough for the
    ops.

    If durations lie on the same grid, the recorder's clock is that coarse or the trace was made by hand, and nothing
    was lost.
    """
    gaps, durations = _samples(graph)
    if len(gaps) < FEWEST_GAPS:
        return None
    step = float(gaps.min())
    # The mean over multiples of the smallest gap is more accurate than that gap alone.
    step = float(np.median(gaps[gaps < 1.5 * step]))
    if np.quantile(_off_grid(gaps, step), 0.95) > ON_GRID or np.median(_off_grid(durations, step)) <= ON_GRID:
        return None
    return step if step > LARGEST_SHARE * float(np.median(durations)) else None


def _samples(graph: DependencyGraph) -> tuple[Floats, Floats]:
    """Gaps between the starts of one worker's ops in a step, and durations of its computes, seconds."""
    gaps, durations = [], []
    for block in graph.blocks:
        template = block.template
        of_stage = template.pp_rank == template.pp_rank[0]
        work = of_stage & ~template.is_communication
        start, duration = block.start[:, :LANES], block.duration[work, :LANES]
        if block.present is not None:
            start = np.where(block.present[:, :LANES], start, np.nan)
        gaps.append(np.diff(np.sort(start[of_stage], axis=0), axis=0).ravel())
        durations.append(duration.ravel())
    between, lasting = np.concatenate(gaps), np.concatenate(durations)
    return between[between > SAME_S], lasting[lasting > SAME_S]


def _off_grid(values: Floats, step: float) -> Floats:
    """Distance of values from the nearest multiple of `step`, as a share of it."""
    return np.abs(values / step - np.round(values / step))
