"""What the page What-if asks of a recording of GPUs before anybody does: idleness, op classes and ranks, each priced.

In: a report. Out: questions under headings. Their answers are replays, so they have the prices of fixes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from msgspec import Struct

from tracekit.dashboards.browser.data.whatif_query import QueryAction, WhatifQuery, query_of
from tracekit.report.conclusions import Fix
from tracekit.report.gpu import GpuInReport
from tracekit.report.report import Report
from tracekit.trace.gpu_activity import IdleReason

IDLE, RANKS, CLASSES = "Why a GPU is idle", "Rank", "Op class, twice as fast"
#: Questions of each heading; what takes less of the recording is none.
MOST_ROWS, SMALLEST_SHARE = 5, 0.005
#: Larger recordings are replayed only where somebody asks.
MOST_OPS = 500_000
#: Which ops of a rank make its GPU idle, by reason. Others are no ops: nothing changes them.
_KINDS = {
    IdleReason.LOADER: "input",
    IdleReason.GC: "gc",
    IdleReason.CHECKPOINT: "checkpoint",
    IdleReason.SYNCHRONISE: "synchronise",
    IdleReason.OPERATOR: "host",
    IdleReason.PYTHON: "host",
    IdleReason.LAUNCH_CALL: "host",
}


class GpuQuestion(Struct, frozen=True):
    """A question under a heading, about `subject`: an `IdleReason`, a rank or a class of ops.

    `takes_s`: how long it takes or, of a rank, how long others wait for it, seconds. `rank`: where a GPU is idle, if
    there are several.
    """

    heading: str
    subject: str
    takes_s: float
    query: WhatifQuery
    rank: int | None = None


def gpu_questions(report: Report) -> tuple[GpuQuestion, ...]:
    """The questions about a recording of GPUs, none about other jobs."""
    gpus = report.gpu_of_ranks
    if not gpus or (report.job.gpu_ops or report.job.ops or 0) > MOST_OPS:
        return ()
    least_s = SMALLEST_SHARE * gpus[0].recording_s
    if len(gpus) == 1:
        asked = [*_of_causes(report, gpus[0])]
    else:
        asked = [*_idle_beyond_peers(report, gpus), *_of_ranks(report)]
    return tuple(question for question in (*asked, *_of_classes(report, gpus)) if question.takes_s >= least_s)


def _of_causes(report: Report, gpu: GpuInReport) -> Iterator[GpuQuestion]:
    """One GPU has no peers: its idleness without the causes that were found, all of a kind together."""
    reasons = {cause.kind: cause.spent.reason for cause in report.findings if cause.spent}
    fixes: dict[str | None, list[Fix]] = {kind: [] for kind in reasons}
    for fix in report.fixes:
        if fix.cause in fixes and fix.withheld is None:
            fixes[fix.cause].append(fix)
    for kind, reason in reasons.items():
        taken_s = sum(finding.seconds for finding in gpu.findings if finding.reason == reason)
        edits = [query.selection for query in map(query_of, fixes[kind]) if query is not None]
        if edits:
            yield GpuQuestion(IDLE, reason, taken_s, WhatifQuery(" + ".join(edits)))


def _idle_beyond_peers(report: Report, gpus: Sequence[GpuInReport]) -> Iterator[GpuQuestion]:
    """The reasons for which a GPU is idle longer than its peers: the ops behind them at the pace of the peers."""
    idle = {gpu.rank: defaultdict[str, float](float) for gpu in gpus}
    reasons: dict[tuple[int, str], str] = {}
    for gpu in gpus:
        for row in sorted(gpu.idle_by_reason, key=lambda row: -row.seconds):
            if kind := _KINDS.get(IdleReason(row.reason)):
                idle[gpu.rank][kind] += row.seconds
                reasons.setdefault((gpu.rank, kind), row.reason)
    beyond = []
    for kind in {str(row.kind) for row in report.by_kind} & set(_KINDS.values()):
        usual_s = median(of_rank[kind] for of_rank in idle.values())
        beyond += [(of_rank[kind] - usual_s, kind, rank) for rank, of_rank in idle.items()]
    for more_s, kind, rank in sorted(beyond, reverse=True)[:MOST_ROWS]:
        if more_s >= SMALLEST_SHARE * gpus[0].recording_s:
            query = WhatifQuery(f"kind={kind} and rank={rank}")
            yield GpuQuestion(IDLE, reasons[rank, kind], idle[rank][kind], query, rank)


def _of_ranks(report: Report) -> Iterator[GpuQuestion]:
    """The ranks that others wait for."""
    for row in sorted(report.by_rank or (), key=lambda row: -(row.sole_delay_s or 0.0))[:MOST_ROWS]:
        yield GpuQuestion(RANKS, f"rank {row.rank}", row.sole_delay_s or 0.0, WhatifQuery(f"rank={row.rank}"))


def _of_classes(report: Report, gpus: Sequence[GpuInReport]) -> Iterator[GpuQuestion]:
    """The classes of kernels that take longest, the mean of all ranks."""
    kinds, taken_s = {str(row.kind) for row in report.by_kind}, dict[str, float]()
    for kernel in (kernel for gpu in gpus for kernel in gpu.kernels if kernel.of_class in kinds):
        taken_s[kernel.of_class] = taken_s.get(kernel.of_class, 0.0) + kernel.seconds / len(gpus)
    for name in sorted(taken_s, key=lambda name: -taken_s[name])[:MOST_ROWS]:
        yield GpuQuestion(CLASSES, name, taken_s[name], WhatifQuery(f"kind={name}", QueryAction.SCALE, 0.5))
