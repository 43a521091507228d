"""The `whatif` report as a person reads it in a terminal: the answer first, on one screen.

In: a `Report`. Out: text on a rich console, laid out for its width. Draws only; every sentence and number comes from
the report.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from tracekit.analysis.verdict import LossKind
from tracekit.explanation import explanations
from tracekit.report import Report
from tracekit.report_words import answer_rows, job_sizes
from tracekit.terminal.details import print_details
from tracekit.terminal.maps import step_bars, worker_map
from tracekit.terminal.tables import by_label, labelled, questions
from tracekit.text import short

_LOSS_STYLE = "bold white on dark_red"
_VERDICT_STYLE = {LossKind.BALANCED: "bold black on green", LossKind.CONTRADICTION: "bold black on yellow"}
#: The map of the first screen, DP ranks x stages.
_SMALL_MAP = (6, 32)


def print_report(
    report: Report,
    console: Console,
    *,
    source: str | None = None,
    full: bool = False,
    explain: bool = False,
    gpu_hour: float | None = None,
) -> None:
    """Print the answer, and with `full` all that it rests on.

    `source`: the job as arguments of a command, for the commands to type next. `explain`: say how each number of the
    answer came about. `gpu_hour`: the price of a GPU-hour, in any currency.
    """
    console.print(_job(report))
    console.print()
    console.print(_headline(report))
    console.print()
    console.print(_answer(report, gpu_hour))
    console.print()
    if explain:
        console.print(Text("How each number came about", style="bold underline"))
        console.print(labelled(explanations(report, gpu_hour)))
        console.print()
    if report.questions_asked:
        console.print(questions(report.questions_asked, report.attribution.original_s))
    for group in report.labels_asked:
        console.print(by_label(group))
    if full:
        print_details(report, console)
    elif report.diagnosis.verdict.losses:
        console.print(worker_map(report.attribution.worker_slowdown, report.attribution.dp_ranks, _SMALL_MAP))
        console.print(Padding(step_bars(report, console.width), (0, 0, 1, 0)))
    if source is not None:
        console.print(Text("Next", style="bold"))
        for command in _commands(report, source, full):
            console.print(Text(f"  {command}"), soft_wrap=True)  # whole, to be copied


def _job(report: Report) -> Text:
    """What was analysed."""
    return Text.assemble((short(report.name), "bold"), (f"   {job_sizes(report)}", "dim"))


def _headline(report: Report) -> Text:
    verdict = report.diagnosis.verdict
    kind = (str(verdict.kind).upper(), _VERDICT_STYLE.get(verdict.kind, _LOSS_STYLE))
    return Text.assemble(kind, f": {report.diagnosis.answer.headline}")


def _answer(report: Report, gpu_hour: float | None) -> RenderableType:
    """The rows of the answer, with colours for trust and for what is missing."""
    shown = []
    for name, words in answer_rows(report, gpu_hour):
        line = Text(words, style="yellow" if name == "Missing" else "")
        if name == "Trust":
            line.highlight_regex("^yes", "green")
            line.highlight_regex("^NO", "bold red")
        shown.append((name, line))
    return labelled(shown)


def _commands(report: Report, source: str, full: bool) -> Iterator[str]:
    """What to type next: a look at the worst step, and the whole report."""
    found = report.attribution
    if report.diagnosis.verdict.losses:
        worst = int(found.steps[int(found.recorded.argmax())])
        yield f"tracekit export {source} --steps {worst} --out timeline.json.gz"
    if not full:
        yield f"tracekit whatif {source} --full"
