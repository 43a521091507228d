"""The critical path of one step, as spans of its timeline: the chain of ops that determines the step time.

In: one step of a `JobReplay` and its `StepOps`. Out: `PathSpans`. Pure functions, as in `spans.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.attribution.critical_path import critical_ops
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.paper import IDEAL, ORIGINAL, RECORDED
from tracekit.dashboards.figures.step_ops import Replay, StepOps

_SCENARIOS = {Replay.RECORDED: RECORDED, Replay.ORIGINAL: ORIGINAL, Replay.IDEAL: IDEAL}
_NAME = ["dp_rank", "pp_rank", "kind", "seq"]


@dataclass(frozen=True, slots=True)
class PathSpans:
    """The ops on the path from first to last, [ops] each. `op`, `worker`: indices in the `StepOps`.

    `start`, `duration`: the part of the op that is on the path, without waiting, seconds. Between two ops nothing on
    the path ran: these are launch delays.
    """

    op: Ints
    worker: Ints
    start: Floats
    duration: Floats


def path_spans(replay: JobReplay, ops: StepOps, which: Replay) -> PathSpans:
    """The critical path of the step of `ops` in one of its replays."""
    path = critical_ops(replay.only_steps([ops.step]), _SCENARIOS[which])
    worker = ops.worker_of(np.arange(len(ops.kind)))
    places = pl.DataFrame(
        {
            "dp_rank": ops.dp_rank[worker],
            "pp_rank": ops.pp_rank[worker],
            "kind": ops.kind.astype(np.int64),
            "seq": ops.seq.astype(np.int64),
            "op": np.arange(len(ops.kind)),
        }
    )
    named = path.select(pl.col("dp_rank", "pp_rank", "seq").cast(pl.Int64), pl.col("kind").to_physical().cast(pl.Int64))
    op = named.join(places, on=_NAME, how="left", maintain_order="left")["op"].to_numpy()
    own = np.maximum(ops.cost[which][op].astype(np.float64), 0.0)
    end = ops.start[which][op] + ops.duration[which][op]
    return PathSpans(op, worker[op], end - own, own)
