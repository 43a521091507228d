"""The best plans of a job, in words that every surface shares.

In: an `Optimum`. Out: a sentence, rows of a table, settings to copy.
"""

from __future__ import annotations

from tracekit.base.text import seconds
from tracekit.report.plans import OptimizedPlan, Optimum

TOO_LARGE = "the space was too large to be searched to the end"
PLAN_HEADS = ("split", "step", "saves", "memory", "schedule", "microbatches", "recompute")


def sentence(optimum: Optimum) -> str:
    """The answer in one sentence."""
    now = seconds(optimum.step_time_s.now)
    if not optimum.plans:
        return f"{optimum.reason}; a step takes {now} now"
    best = optimum.plans[0]
    if optimum.nothing_to_gain:
        return f"Nothing to gain: a step takes {now}, and no plan takes less than {seconds(best.bound_s)}"
    proof = "no plan is faster"
    if optimum.gap > 0:
        proof = f"no plan takes less than {seconds(best.bound_s)} (a gap of {optimum.gap:.2%}: {TOO_LARGE})"
    tied = sum(plan.tied for plan in optimum.plans)
    if tied > 1 and optimum.error:
        proof += f"; {tied} plans are within the error of the replay, {optimum.error:.1%}"
    return f"The best plan takes {seconds(best.step_time_s)} a step instead of {now}; {proof}"


def in_gb(memory_gb: float | None) -> str:
    """Memory in words."""
    return "-" if memory_gb is None else f"{memory_gb:.4g} GB"


def plan_row(plan: OptimizedPlan) -> tuple[str, ...]:
    """A row of the table of plans."""
    again = ",".join(str(stage) for stage, on in enumerate(plan.recompute) if on)
    return (
        ",".join(map(str, plan.split)),
        seconds(plan.step_time_s),
        seconds(plan.saved_s),
        in_gb(plan.memory_gb),
        plan.schedule,
        str(plan.microbatches),
        f"stages {again}" if again else "-",
    )


def moves_words(optimum: Optimum) -> list[str]:
    """What else can move, by the same replay, a sentence a fix."""
    return [f"{move.title}: saves {seconds(move.saved_s or 0.0)} a step" for move in optimum.moves]


def settings_words(optimum: Optimum) -> list[str]:
    """The settings of the best plan, a line a framework."""
    return [f"{name}: {words}" for plan in optimum.plans[:1] for name, words in plan.settings.paste.items()]
