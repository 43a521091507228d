"""When a recording's ops were launched, and how long they took to begin after that.

In: a job of any graph; `host_time` says which call launched an op. Out: seconds of each op, and the job without waits.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.whatif.interventions import Intervention, LessTime, QueuedAhead, Together

#: A launched op that nothing else keeps waiting begins within this time, seconds.
LATEST_ARRIVAL_S = 100e-6


@evidence(GraphSubject)
def arrives_s(job: GraphSubject) -> Floats:
    """How long after its launch each op began, seconds, [ops]; nan if it was not launched, or waited for something.

    Beyond `LATEST_ARRIVAL_S`, an op waited for something else.
    """
    ops = job.graph.ops
    since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[host_time(job).launched_by]
    return np.where(since_s <= LATEST_ARRIVAL_S, since_s, np.nan)


@evidence(GraphSubject)
def launch_latency_s(job: GraphSubject) -> Floats:
    """How much of its launch delay each op owes to a launch of its own, seconds, [ops].

    Ops of a CUDA graph have one launch for all, and follow each other as those do that were launched long before.
    """
    delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
    own = np.isfinite(arrives_s(job))
    in_queue = delay_s[~own & (host_time(job).launched_by >= 0)]
    usual_s = float(np.median(in_queue)) if len(in_queue) else 0.0
    return np.where(own, np.maximum(delay_s - usual_s, 0.0), 0.0)


@evidence(GraphSubject)
def in_queue_s(job: GraphSubject) -> float:
    """How long a GPU takes between an op and the next, if that was launched long before; seconds, 0 if none was."""
    ops, launched_by = job.graph.ops, host_time(job).launched_by
    since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[launched_by]
    delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
    queued = (launched_by >= 0) & np.isnan(arrives_s(job)) & (2 * delay_s < since_s)
    return float(np.median(delay_s[queued])) if queued.any() else 0.0


def without_waits(job: GraphSubject, calls: Bools, kept_s: Floats | float = 0.0) -> Intervention:
    """Return the job in which these calls do not wait for the GPU, and take only `kept_s`, seconds, [ops]."""
    ops = job.graph.ops
    on_gpu = job.ops["role"].eq("gpu").to_numpy()
    less = LessTime(np.where(calls, np.maximum(job.pace.cost - kept_s, 0.0), 0.0))
    gone = calls[ops.after] & on_gpu[ops.before]
    ahead = QueuedAhead(arrives_s(job), host_time(job).launched_by)
    return Together((job.pace.without_edges(gone), less, ahead)) if gone.any() else less
