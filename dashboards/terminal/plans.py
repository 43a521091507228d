"""The best plans of a job in a terminal.

In: an `Optimum`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tracekit.base.text import seconds
from tracekit.dashboards.terminal.tables import labelled, section_table
from tracekit.report.plans import OptimizedPlan, Optimum
from tracekit.report.section import Table

_HEADS = ("split", "step", "saves", "memory", "schedule", "microbatches", "recompute")


def sentence(found: Optimum) -> str:
    """The answer in one sentence."""
    now = seconds(found.step_time_s.now)
    if not found.plans:
        return f"{found.reason}; a step takes {now} now"
    best = found.plans[0]
    if found.nothing_to_gain:
        return f"Nothing to gain: a step takes {now}, and no plan takes less than {seconds(best.bound_s)}"
    proof = "no plan is faster"
    if best.bound_s < best.step_time_s:
        proof = f"no plan takes less than {seconds(best.bound_s)}"
    return f"The best plan takes {seconds(best.step_time_s)} a step instead of {now}; {proof}"


def plan_row(plan: OptimizedPlan) -> tuple[str, ...]:
    """A row of the table of plans."""
    again = ",".join(str(stage) for stage, on in enumerate(plan.recompute) if on)
    memory = "-" if plan.memory_gb is None else f"{plan.memory_gb:.4g} GB"
    return (",".join(map(str, plan.split)), seconds(plan.step_time_s), seconds(plan.saved_s), memory, plan.schedule,
            str(plan.microbatches), f"stages {again}" if again else "-")  # fmt: skip


def print_optimum(found: Optimum, console: Console) -> None:
    """Print the answer, the plans, the settings of the best one, and the front."""
    console.print(Text(sentence(found)))
    if found.plans:
        console.print()
        console.print(section_table(Table("Plans", _HEADS, tuple(map(plan_row, found.plans)))))
        buckets = "; ".join(",".join(map(str, stage)) for stage in found.plans[0].buckets)
        rows = [("Buckets", f"{buckets} (layers of each, last first, by stage)")]
        rows += list(found.plans[0].settings.paste.items())
        console.print()
        console.print(labelled(rows))
    if found.front:
        console.print()
        rows_of_front = tuple(
            (f"{plan.memory_gb:.4g} GB", seconds(plan.step_time_s), ",".join(map(str, plan.split)), plan.schedule,
             str(plan.microbatches))
            for plan in found.front
        )  # fmt: skip
        heads = ("memory", "step", "split", "schedule", "microbatches")
        console.print(section_table(Table("Front", heads, rows_of_front)))
    console.print()
    searched = f"{found.searched.replayed:,} of {found.searched.plans:,} plans replayed"
    console.print(labelled([("Searched", searched), *(("Note", note) for note in found.notes)]))
