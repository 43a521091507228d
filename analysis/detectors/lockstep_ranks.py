"""Ranks of a worker that are late for the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tracekit.analysis.detectors.slow_host_code import SMALLEST_HOST_SHARE
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.numeric.arrays import Bools
from tracekit.trace.model import OpKind

#: What makes a rank late besides computing: the kinds of op, and what they are in words.
PARTS_OF_RANKS: Mapping[str, tuple[tuple[OpKind, ...], str]] = {
    "slow-host-code": ((OpKind.HOST_DELAY, OpKind.LOSS), "host code"),
    "slow-optimizer": ((OpKind.OPTIMIZER,), "the optimizer"),
    "late-data-loading": ((OpKind.DATA_LOAD,), "data loading"),
    "python-gc": ((OpKind.GC,), "garbage collection"),
}


def late_ranks(job: PipelineSubject) -> dict[str, Bools]:
    """Ranks that hold up their worker by something other than computing, and when, [workers, ranks, steps] each; only
    the kinds that the trace records for each rank.
    """
    lockstep = job.lockstep
    if lockstep is None or lockstep.work_s is None:
        return {}
    found = {"process-pauses": lockstep.stopped(job.unchanged_s)[0]}
    for kind, (ops, _) in PARTS_OF_RANKS.items():
        episodes = lockstep.late_by(ops, job.unchanged_s, len(PARTS_OF_RANKS))
        hit = episodes.on & episodes.significant(SMALLEST_HOST_SHARE)[:, None]
        found[kind] = np.asarray(hit.reshape(lockstep.beyond_s(ops).shape))
    return {kind: late for kind, late in found.items() if late.any()}
