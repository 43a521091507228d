"""The diagnosis of a job: when, where and why it is slow, and what each fix would save.

In: what the analysis found. Out: `Diagnosis`, from which a report is built; also what a report cannot hold.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.analysis.attribution.attribution import ReplayTrust
from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.analysis.attribution.stalls import Stall
from tracekit.analysis.diagnosis.assessment import NamedLoss
from tracekit.analysis.diagnosis.priced_fix import PricedFix
from tracekit.analysis.evidence.cause import Cause
from tracekit.report.answer import Answer
from tracekit.report.conclusions import Verdict
from tracekit.report.metrics import MetricsInReport
from tracekit.trace.facts import Lack


class Diagnosis(Struct, frozen=True, eq=False):
    """When, where and why a job is slow, what each fix would save, and whether to believe it.

    `headline`: what the verdict follows from. `answer`: all of it in a few sentences. `stalls`: isolated slow steps.
    `trust`: as that of the attribution, except that launch delays that a named cause explains do not count against the
    replay. `problems`: why plug-ins were left out; `failed`: the kinds of those that failed on this job. `lacks`: what
    its source cannot show.
    """

    trust: ReplayTrust
    answer: Answer
    headline: NamedLoss
    verdict: Verdict
    causes: tuple[Cause, ...]
    fixes: tuple[PricedFix, ...]
    time: TimePattern | None = None
    space: SpacePattern | None = None
    stalls: tuple[Stall, ...] = ()
    problems: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()
    metrics: MetricsInReport | None = None
