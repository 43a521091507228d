"""The diagnosis of a job: causes, fixes, verdict, answer, and whether to believe them.

In: an `Assessment` of the job. Out: a `Diagnosis`; evidence that causes and fixes share is gathered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from tracekit.analysis.detectors.all_detectors import PlugInError, detectors, is_plug_in, left_out, own_detectors
from tracekit.analysis.detectors.detector import Detector
from tracekit.analysis.diagnosis.answer import answer_of
from tracekit.analysis.diagnosis.assessment import Assessment
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.price import fixes_of
from tracekit.analysis.diagnosis.verdict import verdict_of
from tracekit.analysis.evidence.cause import Cause
from tracekit.base.plug_ins import in_words, tell
from tracekit.report.conclusions import Finding
from tracekit.report.plain_data import encoded
from tracekit.trace.canonical import SAMPLED

if TYPE_CHECKING:
    from tracekit.analysis.metrics.samples import MetricSource
    from tracekit.report.metrics import MetricsInReport


def diagnose(assessed: Assessment, metrics: MetricSource | None = None) -> Diagnosis:
    """Return what a job loses, why, and what each fix would save; without the plug-ins that fail.

    `metrics`: what to ask about the machines of culprits.
    """
    used, problems = detectors(assessed.job.kind, assessed.job), left_out()
    failed: tuple[str, ...] = ()
    while True:
        plugged = [detector.kind for detector in used if is_plug_in(detector.kind)]
        try:
            diagnosis = _diagnosed(assessed, used, metrics)
            if plugged:
                _check(cause for cause in diagnosis.causes if cause.kind in plugged)
        except PlugInError as failure:
            plugged, problem = [failure.kind], str(failure)
        except Exception as failure:
            if not plugged:
                raise
            # Raises, too, unless a plug-in is to blame.
            _ = _diagnosed(assessed, own_detectors(assessed.job.kind, assessed.job), metrics)
            problem = f"a finding of detector {' or '.join(map(repr, plugged))} cannot be used ({in_words(failure)})"
        else:
            tell(problems)
            return structs.replace(diagnosis, problems=problems, failed=failed)
        used = tuple(detector for detector in used if detector.kind not in plugged)
        problems, failed = (*problems, f"{problem}; this report leaves it out"), (*failed, *plugged)


def _check(causes: Iterable[Cause]) -> None:
    """Raise an exception for a cause that no output can show."""
    for cause in causes:
        msgspec.json.decode(encoded(cause.finding), type=Finding)


def _reviewed(
    assessed: Assessment, findings: tuple[Cause, ...], metrics: MetricSource | None
) -> tuple[tuple[Cause, ...], MetricsInReport | None]:
    """See `testimony.reviewed`, which is imported only if there is somebody to ask."""
    if metrics is None and not {SAMPLED, "gpus"} & assessed.job.metadata.keys():
        return findings, None
    from tracekit.analysis.diagnosis.testimony import reviewed

    return reviewed(assessed.job, findings, metrics)


def _diagnosed(assessed: Assessment, detectors: Sequence[Detector], metrics: MetricSource | None) -> Diagnosis:
    job = assessed.job
    _ = job.noise  # takes most memory, so it comes before the grids that detectors keep
    findings = assessed.reported(causes_of(assessed, detectors))
    findings, heard = _reviewed(assessed, findings, metrics)
    fixes = fixes_of(assessed, findings)
    causes = assessed.ordered(findings, fixes)
    trust, headline = assessed.trust(causes), assessed.headline(causes)
    answer = answer_of(assessed, headline, causes, fixes, trust)
    return Diagnosis(
        trust=trust,
        answer=answer,
        headline=headline,
        stalls=assessed.stalls,
        verdict=verdict_of(job, headline, causes, fixes, answer),
        time=assessed.time,
        space=assessed.space,
        causes=causes,
        fixes=fixes,
        lacks=job.lacks,
        metrics=heard,
    )
