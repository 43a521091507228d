"""The best plans of a recorded job.

In: a `Job`. Out: an `Optimum`, with the fixes that move work, priced by the replay of the job itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes.known_layers import layers_of
from tracekit.analysis.fixes.layers import split_again
from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.plans.best_plans import timed
from tracekit.analysis.plans.from_recording import recorded_model
from tracekit.analysis.plans.optimize import TIME_LIMIT_S, optimize
from tracekit.base.errors import TraceError
from tracekit.base.text import short
from tracekit.report.conclusions import Fix
from tracekit.report.plans import Optimum
from tracekit.report.report import Report

#: Fixes that change the plan of a job, not its machines. Those with layers are plans themselves where layers are known.
MOVES = ("repartition-stages", "shift-work-from-slow-worker", "balance-sequences")


def optimize_job(
    job: Job,
    report: Report,
    *,
    memory_gb: float | None = None,
    keep: Sequence[str] = (),
    layers: tuple[int, ...] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Optimum:
    """Find the best plans of a job. `report`: its own; `keep`: what stays as it is; `layers`: of each stage, None: as
    recorded; `time_limit_s`: see `optimize`.

    Raises TraceError for a job that is no pipeline of microbatches, or whose replay is not trusted.
    """
    if not isinstance(job, PipelineJob):
        raise TraceError(f"{short(job.trace.name)}: no pipeline of microbatches; plans need a pipeline trace")
    trust = report.trust
    if trust is not None and not trust.trustworthy:
        raise TraceError(
            f"{short(job.trace.name)}: its replay is not trusted, so no plan is: {'; '.join(trust.reasons)}"
        )
    subject = PipelineSubject.of(job.trace, job.replay)
    if subject.profile is None:
        raise TraceError(f"{short(job.trace.name)}: no computes; plans need a training job")
    recorded = recorded_model(subject, layers_of(job.trace, layers))
    model = recorded.model
    fixed = replace(model.space, **dict.fromkeys(keep, "fixed"))
    asked = replace(model, space=fixed, memory_gb=memory_gb)

    def beyond_s(split: tuple[int, ...]) -> float:
        changes = () if split == model.now.split else (split_again(subject, model.now.split, split),)
        saving_s = float((subject.unchanged - subject.step_times(changes)).mean())
        return subject.recorded_s - saving_s - timed(model, recorded.plan_with(split)).step_time_s

    optimum = optimize(asked, error=recorded.error, notes=recorded.notes, time_limit_s=time_limit_s, beyond_s=beyond_s)
    moves = [fix for fix in report.fixes if fix.kind in MOVES and fix.saved_s and not _moves_layers(fix)]
    return replace(optimum, moves=moves)


def _moves_layers(fix: Fix) -> bool:
    return (fix.edit or "").startswith("layers=")
