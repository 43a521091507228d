"""Operators that compute on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, on_each, plain, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import computes_on_host, host_time
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

_MOST_NAMES = 8


class HostOperators(Detector):
    """An operator that launches nothing takes long on the host each time: it computes there, or compiles.

    Paper: not seen. tracekit replays the recording without its own time.
    """

    kind = "host-operator"
    title = "An operator works on the host while the GPU waits"
    signature = "an operator that takes a millisecond or more of the host each time, and launches nothing"
    refuted_by = "it is faster in later steps: then it was warm-up"
    next_check = "where its tensors live, and whether it compiles"
    suggested_fix = "run it on the GPU, or once before the loop"
    loss = LossKind.HOST
    repair = Repair("no-host-operator", "Take the operator off the launching thread")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        work, long = host_time(job), computes_on_host(job)
        taken_s = float(work.steady_s[long].sum())
        if share_of(job, taken_s) < SMALLEST_SHARE:
            return
        named = list(work.by_name(IdleReason.OPERATOR, among=long))
        names = tuple(part.name for part in named[:_MOST_NAMES])
        more = f" and {len(named) - 1} more work" if len(named) > 1 else " works"
        at_most_s = float(np.max(work.steady_s[long] / work.pieces[long]))
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.OPERATOR, names[0], named[0].where, names, int(work.pieces[long].sum()), taken_s),
            f"{code_name(names[0])}{more} {on_each(job, taken_s)} on the host, up to {seconds(at_most_s)} at a time",
            work.less_s(np.where(long, work.steady_s, 0.0)),
            suggested_fix=plain(f"run {code_name(names[0])} on the GPU, or once before the loop"),
        )
