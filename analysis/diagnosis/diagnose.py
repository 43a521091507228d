"""Patterns, causes and fixes of a job in one pass.

In: a `Trace`, its `JobReplay` and `Attribution`. Out: a `Diagnosis`; evidence that causes and fixes share is computed
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.patterns import space_pattern, time_pattern
from tracekit.analysis.attribution.stalls import stalls_of
from tracekit.analysis.detectors.registry import detector_of
from tracekit.analysis.diagnosis.answer import answer_of
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.first_fix import paying_first
from tracekit.analysis.diagnosis.price import fixes_of
from tracekit.analysis.diagnosis.verdict import verdict_of
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.finding import Finding
from tracekit.trace.canonical import Trace


def diagnose(
    trace: Trace,
    replay: JobReplay,
    attribution: Attribution,
    *,
    layers: tuple[int, ...] | None = None,
    method: Method = Method.TRACEKIT,
) -> Diagnosis:
    """Patterns, causes and fixes. `layers` as in `fixes.price_fixes`. With the published method, no cause explains
    launch delays.
    """
    evidence = Evidence.of(trace, replay, attribution)
    found = causes_of(evidence)
    fixes = fixes_of(evidence, found, layers=layers)
    causes = paying_first(found, fixes)
    verdict = verdict_of(evidence, causes)
    stalls = stalls_of(replay, evidence.attribution)
    trust = attribution.trust
    if method is Method.TRACEKIT:
        trust = attribution.trust_given(evidence.delay_share_without(_explanations(causes)))
    return Diagnosis(
        trust=trust,
        answer=answer_of(evidence, verdict, causes, fixes, stalls, trust),
        stalls=stalls,
        verdict=verdict,
        time=time_pattern(evidence.attribution),
        space=space_pattern(evidence.attribution, evidence.hosts),
        causes=causes,
        fixes=fixes,
    )


def _explanations(causes: Sequence[Finding]) -> list[Intervention]:
    """Return the changes that remove launch delays for a visible reason."""
    return [cause.change for cause in causes if cause.change is not None and detector_of(cause.kind).explains_delays]
