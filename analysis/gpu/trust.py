"""What the op graph of a recording leaves unexplained.

In: a folded graph and its durations. Out: `UnexplainedTime`: how long GPU ops were ready before they started, which
edges were inferred rather than recorded, and where recorded times contradict an edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.analysis.graph.fold import FoldedGraph
from tracekit.analysis.graph.op_graph import Why
from tracekit.analysis.replay.costs import Durations
from tracekit.trace.gpu_activity import KernelClass

#: The times at the ends of an edge may contradict it by this much because of rounding and clock noise, seconds.
NOISE_S = 5e-6


@dataclass(frozen=True, slots=True)
class UnexplainedTime:
    """`communication_gap_s`, `compute_gap_s`: 99th percentile of the unexplained gap before GPU ops, seconds.

    `inferred`: number of edges inferred from the order of calls; `edges`: of all edges. `violations`: of edges that the
    recorded times contradict by more than NOISE_S.
    """

    communication_gap_s: float
    compute_gap_s: float
    edges: int
    inferred: int
    violations: int


def unexplained(graph: FoldedGraph, durations: Durations) -> UnexplainedTime:
    """Measure what the edges of `graph` leave unexplained."""
    ops = graph.ops
    delay = graph.of_ops(durations.launch_delay)
    kind = ops.labels["kind"]
    communicates = kind.where({str(KernelClass.COMMUNICATION)})
    computes = ~communicates & kind.where({str(one) for one in KernelClass})
    end = ops.start + ops.duration
    return UnexplainedTime(
        communication_gap_s=_percentile(delay[communicates]),
        compute_gap_s=_percentile(delay[computes]),
        edges=len(ops.before),
        inferred=int((ops.why == Why.INFERRED).sum()),
        violations=int((end[ops.before] > ops.start[ops.after] + NOISE_S).sum()),
    )


def _percentile(values: np.ndarray) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0
