"""Virtual stages: the model chunks of all stages, numbered in the order of the model.

Usually the chunks of a model wrap around: after the last stage, the next chunk begins on the first one. In a V-shaped
pipeline (ZBV, DualPipeV), it stays on the last stage and runs back to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, OpKind


def virtual_stages(layout: Layout, *, v_shaped: bool = False) -> Ints:
    """The number of each virtual stage, [chunks, stages]. `v_shaped`: odd chunks run from the last stage on."""
    number = np.arange(layout.vpp * layout.pp).reshape(layout.vpp, layout.pp)
    if v_shaped:
        number[1::2] = number[1::2, ::-1].copy()
    return number


def is_v_shaped(trace: Trace, whole: Whole = UNDIVIDED) -> bool:
    """Whether most lanes compute in the order of a V-shaped pipeline.

    Between its forward and its backward, a microbatch passes all later parts of the model. So an odd chunk holds it
    longer on the first stage if chunks wrap around, and longer on the last stage in a V. Each stage measures that by
    its own clock.
    """
    layout = trace.layout
    return layout.pp > 1 and layout.vpp > 1 and whole.agreed(lambda: _v_shaped_lanes(trace), _most)


def _most(lanes: Sequence[tuple[int, int]]) -> bool:
    """Whether most lanes are V-shaped, given how many are, and how many there are, in each batch of steps."""
    v_shaped, total = np.sum(lanes, axis=0).tolist()
    return bool(2 * v_shaped > total)


def _v_shaped_lanes(trace: Trace) -> tuple[int, int]:
    """The number of lanes in that order, and of all that can tell."""
    layout = trace.layout
    first, forward = pl.col("pp_rank") == 0, pl.col("kind") == OpKind.FORWARD_COMPUTE
    lanes = (
        trace.of_stages((0, layout.pp - 1))
        .filter(
            pl.col("kind").is_in([str(OpKind.FORWARD_COMPUTE), str(OpKind.BACKWARD_COMPUTE)]),
            pl.col("chunk") % 2 == 1,
        )
        .group_by("step", "dp_rank", "pp_rank", "kind")
        .agg(pl.len().alias("count"), longer=pl.when(first != forward).then("start").otherwise(-pl.col("start")).sum())
        .group_by("step", "dp_rank")
        .agg(pl.len(), pl.col("count").n_unique(), pl.col("longer").sum())  # on the first stage than on the last
        .filter(len=4, count=1)  # the same microbatches on both
    )
    return int((lanes["longer"] < 0).sum()), lanes.height
