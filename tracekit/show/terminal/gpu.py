"""The report on a GPU-recorded job for a terminal.

In: a `GpuReport`. Out: what rich prints. The first lines answer who, how much, why, and whether to believe it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.base.text import seconds, short
from tracekit.report.gpu import GpuReport
from tracekit.report.gpu_words import answer_rows, headline, rank_table, recording_sizes
from tracekit.report.verdict import LossKind
from tracekit.show.terminal.tables import by_label, labelled, new_table, percent, questions, side_by_side, trust_line

_MOST_RANKS, _FEWEST_RANKS = 16, 8
_MOST_WAITS = 8
_MOST_KERNELS = 5
_STYLE = {LossKind.BALANCED: "bold black on green", LossKind.MINOR: "bold black on yellow"}


def print_gpu_report(
    report: GpuReport, console: Console, *, source: str | None = None, asked: Sequence[str] = (), full: bool = False
) -> None:
    """Print the answer, and with `full` all evidence behind it.

    `source`: the recording as arguments of a command, for the suggested next command. `asked`: labels, or several
    joined by commas, whose tables are printed in any case.
    """
    heading = (short(report.recording.name), "bold"), (f"   {recording_sizes(report)}", "dim")
    console.print(Text.assemble(*heading))
    console.print()
    console.print(_headline(report))
    console.print()
    console.print(labelled(_styled(answer_rows(report))))
    console.print()
    if report.replayed.questions_asked:
        console.print(questions(report.replayed.questions_asked, whole="recording"))
    panels: list[RenderableType] = [_by_rank(report, _MOST_RANKS if full else _FEWEST_RANKS)]
    if full:
        panels += [_waits(report), _kernels(report), _critical_path(report)]
    groups = [group for group in report.replayed.labels_asked if group.labels != ("rank",)]
    panels += [by_label(group) for group in groups if full or ",".join(group.labels) in asked]
    console.print(side_by_side(panels, console))
    if source is not None and not full:
        console.print(Text.assemble(("Next   ", "bold"), f"tracekit whatif {source} --full"), soft_wrap=True)


def _headline(report: GpuReport) -> Text:
    kind, said = headline(report)
    doubt = () if not report.distrust else (("NOT TRUSTED", "bold red"), ", looks like ")
    return Text.assemble(*doubt, (str(kind).upper(), _STYLE.get(kind, "bold white on dark_red")), f": {said}")


def _styled(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str | Text]]:
    """The rows, the word on trust in its colour."""
    for name, words in rows:
        if name == "Trust":
            trusted, _, why = words.partition(": ")
            yield name, trust_line(trusted == "yes", why)
        else:
            yield name, words


def _by_rank(report: GpuReport, most: int) -> Table:
    """Costliest ranks first."""
    heads, rows = rank_table(report)
    table = new_table(*heads)
    for row in rows[:most]:
        table.add_row(*row)
    if len(rows) > most:
        table.caption = f"the costliest {most} of {len(rows)}; all with --json"
        table.caption_justify = "left"
    return table


def _waits(report: GpuReport) -> Table:
    """Which rank waits for which, longest first."""
    table = new_table("waits", "for rank", "in collectives", "group")
    found = [
        (float(group.waited[at, by]), rank, other, group.group)
        for group in report.waits.by_group
        for at, rank in enumerate(report.waits.ranks)
        for by, other in enumerate(report.waits.ranks)
        if group.waited[at, by] > 0
    ]
    for waited, rank, other, group in sorted(found, key=lambda row: -row[0])[:_MOST_WAITS]:
        table.add_row(f"rank {rank}", str(other), seconds(waited), Text(short(group)))
    return table


def _kernels(report: GpuReport) -> Table:
    """Time by class of kernels, and the longest unclassified kernels."""
    table = new_table("kernels", "ops", "time", "share")
    times = report.kernel_time
    total = float(times["seconds"].sum()) or 1.0
    for name, ops, time in times.iter_rows():
        table.add_row(name, f"{ops:,}", seconds(time), percent(time / total))
    for name, ops, time in report.unknown_kernels.head(_MOST_KERNELS).iter_rows():
        table.add_row(Text(f"  {short(name)[:_WIDEST_KERNEL]}"), f"{ops:,}", seconds(time), percent(time / total))
    return table


_WIDEST_KERNEL = 40


def _critical_path(report: GpuReport) -> Table:
    """The critical path of the recording, by op class and by rank."""
    table = new_table("On the critical path", "time", "share")
    recorded, replayed = report.recorded_s, report.replayed
    shares = [
        *((short(name), found) for name, found in list(replayed.critical_peers.items())[:_MOST_WAITS]),
        ("unexplained gaps", replayed.critical_delay_s),
        *((f"rank {rank}", found) for rank, found in list(replayed.critical_ranks.items())[:_MOST_WAITS]),
    ]
    for name, found in shares:
        table.add_row(Text(name), seconds(found), percent(found / recorded))
    return table
