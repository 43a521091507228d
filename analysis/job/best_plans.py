"""The best plans of a recorded job, and the words for them that every surface shares.

In: a `Job`. Out: an `Optimum`, with the fixes that move work, priced by the replay of the job itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tracekit.analysis.fixes import split_again
from tracekit.analysis.job.job import Job
from tracekit.analysis.plans.best_plans import timed
from tracekit.analysis.plans.from_recording import recorded_model
from tracekit.analysis.plans.optimize import TIME_LIMIT_S, optimize
from tracekit.base.errors import TraceError
from tracekit.base.text import seconds, short
from tracekit.report.questions import OptimizedPlan, Optimum
from tracekit.report.report import Report

#: Fixes that change the plan of a job, not its machines. Those with layers are plans themselves where layers are known.
_MOVES = ("repartition-stages", "shift-work-from-slow-worker", "balance-sequences")
_TOO_LARGE = "the space was too large to be searched to the end"
PLAN_HEADS = ("split", "step", "saves", "memory", "schedule", "microbatches", "recompute")


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
    subject, trust = job.pipeline_evidence(), report.trust
    if not trust.trustworthy:
        raise TraceError(
            f"{short(job.trace.name)}: its replay is not trusted, so no plan is: {'; '.join(trust.reasons)}"
        )
    if subject.profile is None:
        raise TraceError(f"{short(job.trace.name)}: no computes; plans need a training job")
    recorded = recorded_model(subject, subject.trace.layers(layers))
    model = recorded.model
    fixed = replace(model.space, **dict.fromkeys(keep, "fixed"))
    asked = replace(model, space=fixed, memory_gb=memory_gb)

    def beyond_s(split: tuple[int, ...]) -> float:
        changes = () if split == model.now.split else (split_again(subject, model.now.split, split),)
        saving_s = float((subject.unchanged - subject.step_times(changes)).mean())
        return subject.recorded_s - saving_s - timed(model, recorded.plan_with(split)).step_time_s

    optimum = optimize(asked, error=recorded.error, notes=recorded.notes, time_limit_s=time_limit_s, beyond_s=beyond_s)
    worth = (fix for fix in report.fixes if fix.kind in _MOVES and fix.saved_s)
    moves = [fix for fix in worth if not (fix.edit or "").startswith("layers=")]
    return replace(optimum, moves=moves)


def sentence(optimum: Optimum) -> str:
    """The answer in one sentence."""
    now = seconds(optimum.step_time_s.now)
    if not optimum.plans:
        return f"{optimum.reason}; a step takes {now} now"
    best, beyond = optimum.plans[0], _beyond(optimum)
    if optimum.nothing_to_gain:
        return f"Nothing to gain: a step takes {now}, and no plan takes less than {seconds(best.bound_s)}{beyond}"
    proof = "no plan of those searched is faster"
    if optimum.gap > 0:
        proof = f"no plan takes less than {seconds(best.bound_s)} (a gap of {optimum.gap:.2%}: {_TOO_LARGE})"
    tied = sum(plan.tied for plan in optimum.plans)
    if tied > 1 and optimum.error:
        proof += f"; {tied} plans are within the error of the replay, {optimum.error:.1%}"
    return f"The best plan takes {seconds(best.step_time_s)} a step instead of {now}; {proof}{beyond}"


def _beyond(optimum: Optimum) -> str:
    """What the sentence adds where moving work, which no plan of the space does, saves more than the best plan."""
    most_s = max((move.saved_s or 0.0 for move in optimum.moves), default=0.0)
    if most_s <= max(optimum.plans[0].saved_s, 0.0):
        return ""
    return f"; moving work, which none of them does, saves more: {seconds(most_s)}"


def in_gb(memory_gb: float | None) -> str:
    """Memory in words."""
    return "-" if memory_gb is None else f"{memory_gb:.4g} GB"


def plan_row(plan: OptimizedPlan) -> tuple[str, ...]:
    """A row of the table of plans."""
    recomputed = ",".join(str(stage) for stage, recomputes in enumerate(plan.recompute) if recomputes)
    return (
        ",".join(map(str, plan.split)),
        seconds(plan.step_time_s),
        seconds(plan.saved_s),
        in_gb(plan.memory_gb),
        plan.schedule,
        str(plan.microbatches),
        f"stages {recomputed}" if recomputed else "-",
    )


def moves_words(optimum: Optimum) -> list[str]:
    """What else can move, by the same replay, a sentence a fix."""
    return [f"{move.title}: saves {seconds(move.saved_s or 0.0)} a step" for move in optimum.moves]


def settings_words(optimum: Optimum) -> list[str]:
    """The settings of the best plan, a line a framework."""
    return [f"{name}: {words}" for plan in optimum.plans[:1] for name, words in plan.settings.paste.items()]
