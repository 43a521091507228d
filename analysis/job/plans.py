"""The best plans of a recorded job.

In: a `Job`. Out: an `Optimum`, with the fixes that move work, priced by the replay of the job itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import worker_factor
from tracekit.analysis.fixes.known_layers import layers_of
from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.plans.from_recording import recorded_model
from tracekit.analysis.plans.optimize import optimize
from tracekit.base.errors import TraceError
from tracekit.base.text import short
from tracekit.report.plans import Optimum
from tracekit.report.report import Report

#: Fixes that change the plan of a job, not its machines.
MOVES = ("repartition-stages", "shift-work-from-slow-worker", "balance-sequences", "more-microbatches")


def optimize_job(
    job: Job,
    report: Report,
    *,
    memory_gb: float | None = None,
    keep: Sequence[str] = (),
    layers: tuple[int, ...] | None = None,
) -> Optimum:
    """Find the best plans of a job. `report`: its own; `keep`: what stays as it is; `layers`: of each stage, None: as
    recorded.

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
    slowness = np.maximum(worker_factor(subject).max(axis=1), 1.0)
    recorded = recorded_model(subject, layers_of(job.trace, layers), slowness)
    model = recorded.model
    fixed = replace(model.space, **dict.fromkeys(keep, "fixed"))
    optimum = optimize(replace(model, space=fixed, memory_gb=memory_gb), error=recorded.error, notes=recorded.notes)
    moves = [fix for fix in report.fixes if fix.kind in MOVES and fix.saved_s]
    return replace(optimum, moves=moves)
