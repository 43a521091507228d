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
    for one in culprits:
        table.add_row(
            f"worker ({one.dp_rank},{one.pp_rank})" if one.rank is None else str(one.rank),
            Text("unknown" if one.host is None else short(one.host)),
            one.part,
            seconds(one.cost_s),
            percent_sure(one.confidence),
            "-" if one.first_step is None else f"step {one.first_step}",
        )
    console.print(table)


def print_history(found: History, console: Console) -> None:
    """Print each host that computes slower than it used to, since when, and what that costs together."""
    if not found.slower:
        work = f"with the same work in {FEWEST_WINDOWS} windows"
        none = f"Of {counted(found.hosts, 'node')} {work}, none is slower than it was."
        console.print(none if found.hosts else f"There is no node {work}, so none could be compared.")
        return
    table = new_table("Host", "computes", "before", "change", "since")
    for one in found.slower:
        table.add_row(
            Text(short(one.host, _LONGEST_HOST)),
            seconds(one.now_s),
            seconds(one.before_s),
            f"{one.change:+.1%}",
            short(f"window {one.since_window}" + (f" of {one.since_job}" if one.since_job != found.job else ""), 24),
        )
    console.print(table)
    saved = three_digits(found.saved_gpu_hours_per_day)
    console.print(f"As fast as they used to be, the job would save {saved} GPU-hours a day.", soft_wrap=True)
    if found.all_slower:
        console.print("All became slower at once: compare their work first, such as the lengths of sequences.")
