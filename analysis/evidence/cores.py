"""Cores of a host that ranks share: how long each waited for one, and how fast it was.

In: the column `QUEUED` of a trace, and what each worker does itself. Out: seconds by worker and step,
the job without them, and the pace of each worker's core. Other work on a host delays and slows down whatever a thread
does at that moment, so ranks that compute on its cores are compared without that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.analysis.evidence.off_cpu import QUIET_SHARE, replayed_ops
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_quantile, median, nan_mean, of_peers, safe
from tracekit.analysis.whatif.interventions import Intervention, Scale
from tracekit.trace.canonical import Trace
from tracekit.trace.schema import QUEUED

#: A kind of work stands out from the others of a core by this many of their spreads: by chance in one of twenty
#: (Student's t of five kinds).
KIND_SPREADS = 2.3
#: At most this share of an op can be waiting for a processor.
LARGEST_WAITING_SHARE = 0.95


def queued_s(trace: Trace, graph: DependencyGraph) -> Floats | None:
    """Seconds that the training thread of each worker waited for a processor, [stages, steps, dp_ranks].

    Of several ranks of a worker, the first one's. None if the kernel did not count it.
    """
    if QUEUED not in trace.ops.columns:
        return None
    waits = np.zeros((graph.layout.pp, len(graph.steps), len(graph.dp_ranks)))
    ops, step, dp_index = replayed_ops(trace, graph, pl.col(QUEUED).list.len() > 0)
    waits[ops["pp_rank"].to_numpy(), step, dp_index] = ops[QUEUED].list.first().to_numpy()
    return waits


def without_core_waits(ops: OpGrid, cost: Sequence[Floats], waits_s: Floats) -> Intervention:
    """The job in which threads never waited for a processor. `ops`: everything that threads do; `waits_s`: [stages,
    steps, dp_ranks].

    The kernel counts over the whole step. A wait is where an op is longer than in quiet steps of its worker; what a
    worker waits in quiet steps, too, and its peers do not, is where it is longer than theirs; the rest is spread over
    all ops in proportion.
    """
    recorded_s = np.nan_to_num(ops.gather(cost))
    quiet_s = lower_quantile(recorded_s, 2, QUIET_SHARE)[:, :, None]
    seconds, rest_s = _shortened(recorded_s, quiet_s, waits_s)
    always_s = rest_s.mean(axis=1, keepdims=True)
    more_s = np.minimum(np.maximum(always_s - of_peers(always_s, 2), 0.0), rest_s)
    seconds, left_s = _shortened(seconds, np.minimum(quiet_s, of_peers(quiet_s, 3)), more_s)
    rest_s += left_s - more_s
    seconds = seconds * (1 - np.minimum(rest_s / safe(seconds.sum(axis=1)), 1.0))[:, None]
    return Scale(ops, np.where(recorded_s > 0, np.maximum(seconds / safe(recorded_s), 1 - LARGEST_WAITING_SHARE), 1.0))


def _shortened(seconds: Floats, least_s: Floats, waits_s: Floats) -> tuple[Floats, Floats]:
    """Ops shortened by waits of their worker in the step, in proportion to what exceeds `least_s`; the waits left."""
    beyond_s = np.maximum(seconds - least_s, 0.0)
    total_s = beyond_s.sum(axis=1)
    shortened: Floats = seconds - beyond_s * np.minimum(waits_s / safe(total_s), 1.0)[:, None]
    return shortened, np.maximum(waits_s - total_s, 0.0)


def on_shared_cores(trace: Trace) -> bool:
    """True if all ranks compute on the cores of one host."""
    return QUEUED in trace.ops.columns and len(set(trace.hosts.values())) == 1


def core_pace(beside: Floats) -> Floats:
    """How slow the core of each worker is while it does each kind of work, logarithms, same shape.

    `beside`: work of each kind beside that of peers, logarithms, [kinds, stages, steps, dp_ranks]; nan where it was not
    recorded. A slow core slows down everything. The median of the other kinds leaves out one that is slow for a reason
    of its own. A core that is fast on average does not make its worker's share look slow: peers may have been delayed
    in the other kinds.
    """
    others = [np.delete(beside, kind, axis=0) for kind in range(len(beside))]
    pace = np.stack([np.nan_to_num(median(each, (0,))) for each in others])
    return np.asarray(pace - np.minimum(pace.mean(axis=2, keepdims=True), 0.0))


def stands_out(beside: Floats, on: Bools) -> Bools:
    """Workers in whose work each kind is slower than the others by more than these differ, [kinds, stages, dp_ranks].

    `beside`: as in `core_pace`. `on`: the steps in question, [stages, steps, dp_ranks].
    """
    level = nan_mean(np.where(on, beside, np.nan), (2,))
    out = np.zeros(level.shape, np.bool_)
    for kind in range(len(level)):
        others = np.delete(level, kind, axis=0)
        middle = median(others, (0,))
        apart = MAD_TO_SIGMA * median(np.abs(others - middle), (0,))
        out[kind] = level[kind] - middle >= KIND_SPREADS * apart
    return out
