"""Patterns, causes and fixes of a job in one pass.

In: a `Trace`, its `JobReplay` and `Attribution`. Out: a `Diagnosis`; evidence that causes and fixes share is computed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.patterns import space_pattern, time_pattern
from tracekit.analysis.attribution.stalls import Stall, stalls_of
from tracekit.analysis.detectors.detector import Detector
from tracekit.analysis.detectors.registry import (
    PlugInError,
    detector_of,
    detectors,
    is_plug_in,
    left_out,
    own_detectors,
)
from tracekit.analysis.detectors.uneven_experts import doubts_of
from tracekit.analysis.diagnosis.answer import answer_of
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.first_fix import paying_first
from tracekit.analysis.diagnosis.price import fixes_of
from tracekit.analysis.diagnosis.verdict import verdict_of
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.base.plug_ins import in_words, tell
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.finding import Finding
from tracekit.report.fix import Fix
from tracekit.trace.canonical import Trace

if TYPE_CHECKING:
    from tracekit.analysis.experts.loads import Loads


def diagnose(
    trace: Trace,
    replay: JobReplay,
    attribution: Attribution,
    *,
    layers: tuple[int, ...] | None = None,
    method: Method = Method.TRACEKIT,
    expert_loads: Loads | None = None,
) -> Diagnosis:
    """Patterns, causes and fixes. `layers` as in `fixes_of`. With the published method, no cause explains
    launch delays. `expert_loads`: tokens of each expert, if the job logged them.
    """
    evidence = structs.replace(Evidence.of(trace, replay, attribution), expert_loads=expert_loads)
    stalls = stalls_of(replay, attribution)
    return with_plug_ins(lambda detectors: _diagnosed(evidence, stalls, detectors, layers, method))


def priced_fixes(evidence: Evidence) -> tuple[Fix, ...]:
    """Return the fixes of the diagnosis of a job."""
    return with_plug_ins(lambda detectors: _diagnosed(evidence, (), detectors, None, Method.TRACEKIT)).fixes


def with_plug_ins(make: Callable[[Sequence[Detector]], Diagnosis]) -> Diagnosis:
    """Return the diagnosis that `make` makes with all detectors, or without the plug-ins that fail."""
    used, problems = detectors(), left_out()
    failed: tuple[str, ...] = ()
    while True:
        plugged = [detector.kind for detector in used if is_plug_in(detector.kind)]
        try:
            made = make(used)
            if plugged:
                _check(cause for cause in made.causes if cause.kind in plugged)
        except PlugInError as failure:
            plugged, problem = [failure.kind], str(failure)
        except Exception as failure:
            if not plugged:
                raise
            _ = make(own_detectors())  # raises, too, unless a plug-in is to blame
            problem = f"a finding of detector {' or '.join(map(repr, plugged))} cannot be used ({in_words(failure)})"
        else:
            tell(problems)
            return structs.replace(made, problems=problems, failed=failed)
        used = tuple(detector for detector in used if detector.kind not in plugged)
        problems, failed = (*problems, f"{problem}; this report leaves it out"), (*failed, *plugged)


def _check(findings: Iterable[Finding]) -> None:
    """Raise an exception for a finding that no output can show."""
    from tracekit.report import conclusions
    from tracekit.report.plain_data import encoded, shaped

    for finding in findings:
        content = encoded(shaped(conclusions.Finding, finding))
        msgspec.json.decode(content, type=conclusions.Finding)


def _diagnosed(
    evidence: Evidence,
    stalls: tuple[Stall, ...],
    detectors: Sequence[Detector],
    layers: tuple[int, ...] | None,
    method: Method,
) -> Diagnosis:
    attribution = evidence.attribution
    _ = evidence.noisy  # takes most memory, so it comes before the grids that detectors keep
    found = causes_of(evidence, detectors)
    fixes = fixes_of(evidence, found, layers=layers)
    causes = paying_first(found, fixes)
    verdict = verdict_of(evidence, causes)
    trust = attribution.trust
    if method is Method.TRACEKIT:
        with_change = [cause for cause in causes if cause.change is not None]
        gaps_are_the_host = evidence.trace.timed_on_gpus
        explain = [
            cause.change for cause in with_change if gaps_are_the_host or detector_of(cause.kind).explains_delays
        ]
        trust = attribution.trust_given(evidence.delay_share_without(explain))
    if doubts := doubts_of(causes):
        trust = structs.replace(trust, trustworthy=False, reasons=(*trust.reasons, *doubts))
    return Diagnosis(
        trust=trust,
        answer=answer_of(evidence, verdict, causes, fixes, stalls, trust),
        stalls=stalls,
        verdict=verdict,
        time=time_pattern(evidence.attribution),
        space=space_pattern(evidence.attribution, evidence.hosts),
        causes=causes,
        fixes=fixes,
        lacks=evidence.lacks,
    )
