"""The best plans of a job in a terminal.

In: an `Optimum`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tracekit.analysis.job.plan_words import PLAN_HEADS, in_gb, moves_words, plan_row, sentence
from tracekit.base.text import seconds
from tracekit.dashboards.terminal.tables import labelled, section_table
from tracekit.report.plans import Optimum
from tracekit.report.section import Table


def print_optimum(optimum: Optimum, console: Console) -> None:
    """Print the answer, the plans, the settings of the best one, and the front."""
    console.print(Text(sentence(optimum)))
    if optimum.plans:
        console.print()
        faster = [plan for plan in optimum.plans if plan.saved_s > 0] or optimum.plans[:1]
        console.print(section_table(Table("Plans", PLAN_HEADS, tuple(map(plan_row, faster)))))
        buckets = "; ".join(",".join(map(str, stage)) for stage in optimum.plans[0].buckets)
        rows = [("Buckets", f"{buckets} (layers of each, last first, by stage)")]
        rows += list(optimum.plans[0].settings.paste.items())
        console.print()
        console.print(labelled(rows))
    if optimum.front:
        console.print()
        rows_of_front = tuple(
            (in_gb(plan.memory_gb), seconds(plan.step_time_s), ",".join(map(str, plan.split)), plan.schedule,
             str(plan.microbatches))
            for plan in optimum.front
        )  # fmt: skip
        heads = ("memory", "step", "split", "schedule", "microbatches")
        console.print(section_table(Table("Front", heads, rows_of_front)))
    console.print()
    searched = f"{optimum.searched.replayed:,} of {optimum.searched.plans:,} plans replayed"
    moves = [("Or", words) for words in moves_words(optimum)]
    console.print(labelled([*moves, ("Searched", searched), *(("Note", note) for note in optimum.notes)]))
