"""Work that is done once, at the beginning: contexts, modules, algorithms, the first memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, share_of
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.whatif.interventions import Together
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

#: So many names are told.
_MOST_NAMES, _MOST_NAMES_IN_ALL = 3, 8


class WarmUp(Detector):
    """The recording contains work that happens once: a later step does not have it.

    Paper: not seen. tracekit replays the recording with the first of each kind of host work as long as the median of
    the others, calls that launch a kernel for the first time included.
    """

    kind = "warm-up"
    title = "The recording contains warm-up"
    signature = "the first of a kind of host work takes longer than all others of it"
    refuted_by = "a recording that begins some steps later has it too"
    next_check = "a recording of later steps: torch.profiler.schedule(wait=1, warmup=3, active=3)"
    suggested_fix = (
        "record later steps (torch.profiler.schedule(wait=1, warmup=3, active=3)), and see what is left; in the job,"
        " run a few steps with the real shapes before anything that counts"
    )
    loss = LossKind.HOST
    repair = Repair("warm-up-before", "Do once-only work before what counts")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        work = host_time(job)
        excess_s, called_s = work.first_excess_s, work.first_call_excess_s(first_launches(job))
        total_s = float(excess_s.sum() + called_s.sum())
        if share_of(job, total_s) < SMALLEST_SHARE:
            return
        by_name: dict[tuple[str, str, str], float] = {}
        for part in np.flatnonzero(excess_s).tolist():
            what = work.whats[work.what[part]]
            key = (what.reason, what.name, what.where)
            by_name[key] = by_name.get(key, 0.0) + float(excess_s[part])
        inside = job.columns("operator")["operator"]
        for row in np.flatnonzero(called_s).tolist():
            key = (str(IdleReason.LAUNCH_CALL), f"{job.ops['name'][row]} in {inside[row] or 'Python'}", "")
            by_name[key] = by_name.get(key, 0.0) + float(called_s[row])
        order = sorted(by_name, key=lambda key: -by_name[key])
        reason, name, where = order[0]
        names = tuple(dict.fromkeys(key[1] for key in order))
        change = Together((work.less_s(excess_s), work.faster_calls(called_s)))
        single = by_name[order[0]] > 0 and work.happens_once(name)
        spent = Spent(
            reason, name, where, names[:_MOST_NAMES_IN_ALL], int((excess_s > 0).sum() + (called_s > 0).sum()), total_s,
            f"{name} occurs once: a later recording would tell whether it comes back" if single else None,
        )  # fmt: skip
        what = ", ".join(code_name(name) for name in names[:_MOST_NAMES])
        effect = f"{share_of(job, total_s):.0%} of the recording is warm-up: {seconds(total_s)} in the first {what}"
        yield candidate(self.kind, job, spent, effect, change)


@evidence(RecordingSubject)
def first_launches(job: RecordingSubject) -> Ints:
    """A number for the kernel that the call at the end of each op launches first, -1 for none, [ops]."""
    launched_by = host_time(job).launched_by
    number, gpu = np.full(len(launched_by), -1, np.int64), np.flatnonzero(launched_by >= 0)[::-1]
    number[launched_by[gpu]] = numbered(*(job.ops[name].gather(gpu) for name in ("rank", "name")))
    return number
