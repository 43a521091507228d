"""What looks like a checkpoint in a recording without stacks: many tensors are copied to the host, then it works on.

In: `GraphSubject` of a recording. Out: the parts of `host_time` that such a run of copies begins.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.numeric.arrays import Bools

#: A run of copies of so many tensors and bytes at least: values to log are smaller, results to keep are fewer.
_FEWEST_COPIES, _FEWEST_BYTES = 8, 1 << 20


def unnamed_saves(job: GraphSubject) -> Bools:
    """Return which parts of `host_time` are from such a run of copies to the next launch, [parts]; none
    if stacks were recorded, which tell.
    """
    ops, graph, work = job.ops, job.graph.ops, host_time(job)
    found = np.zeros(len(work.op), np.bool_)
    if job.gpu is None or job.gpu.stacks or "bytes" not in ops.columns:
        return found
    launched = np.flatnonzero(work.launched_by >= 0)
    by = work.launched_by[launched]
    order = np.lexsort((launched, graph.start[by], work.lane[by]))
    launched, by = launched[order], by[order]
    copies = ops["name"].gather(launched).cast(pl.String).str.contains("DtoH", literal=True).to_numpy()
    moved = ops["bytes"].gather(launched).fill_null(0).to_numpy()
    first = np.flatnonzero(np.diff(copies, prepend=False) & copies)
    last = np.flatnonzero(np.diff(copies, append=False) & copies)
    begin_s, lane = graph.start[work.op], work.lane[work.op]
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        following = high + 1
        if high - low + 1 < _FEWEST_COPIES or moved[low : high + 1].sum() < _FEWEST_BYTES or following >= len(by):
            continue
        if (work.lane[by[low : following + 1]] == work.lane[by[low]]).all():
            since_s, until_s = graph.start[by[low]], graph.start[by[following]]
            found |= (lane == work.lane[by[low]]) & (begin_s > since_s) & (begin_s <= until_s)
    return found
