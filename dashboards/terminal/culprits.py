"""The ranks that hold a job up, one per line.

In: the culprits of a report, or hosts against their own history. Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tracekit.analysis.job.history import FEWEST_WINDOWS, History
from tracekit.base.text import counted, percent_sure, seconds, short, three_digits
from tracekit.dashboards.terminal.tables import new_table
from tracekit.report.answer import Culprit

_LONGEST_HOST = 28


def print_culprits(culprits: Sequence[Culprit], console: Console) -> None:
    """Print each culprit with its node, what is slow, its cost per step, the confidence, and since when."""
    table = new_table("Rank", "host", "slow", "costs a step", "sure", "since")
    for culprit in culprits:
        table.add_row(
            f"worker ({culprit.dp_rank},{culprit.pp_rank})" if culprit.rank is None else str(culprit.rank),
            Text("unknown" if culprit.host is None else short(culprit.host)),
            culprit.part,
            seconds(culprit.cost_s),
            percent_sure(culprit.confidence),
            "-" if culprit.first_step is None else f"step {culprit.first_step}",
        )
    console.print(table)


def print_history(history: History, console: Console) -> None:
    """Print each host that computes slower than it used to, since when, and what that costs together."""
    if not history.slower:
        work = f"with the same work in {FEWEST_WINDOWS} windows"
        none = f"Of {counted(history.hosts, 'node')} {work}, none is slower than it was."
        console.print(none if history.hosts else f"There is no node {work}, so none could be compared.")
        return
    table = new_table("Host", "computes", "before", "change", "since")
    for node in history.slower:
        job = f" of {node.since_job}" if node.since_job != history.job else ""
        table.add_row(
            Text(short(node.host, _LONGEST_HOST)),
            seconds(node.now_s),
            seconds(node.before_s),
            f"{node.change:+.1%}",
            short(f"window {node.since_window}{job}", 24),
        )
    console.print(table)
    saved = three_digits(history.saved_gpu_hours_per_day)
    console.print(f"As fast as they used to be, the job would save {saved} GPU-hours a day.", soft_wrap=True)
    if history.all_slower:
        console.print("All became slower at once: compare their work first, such as the lengths of sequences.")
