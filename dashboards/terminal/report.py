"""The `whatif` report for a terminal: the answer first, on one screen.

In: a `Report`. Out: text on a rich console, laid out for its width. This module only draws; every sentence and number
comes from the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tracekit.base.paths import command
from tracekit.base.text import short
from tracekit.dashboards.terminal.tables import (
    BAD,
    UNSURE,
    VERDICT_STYLE,
    labelled,
    section_panel,
    section_table,
    side_by_side,
    small_map,
    steps_line,
)
from tracekit.dashboards.words import MOST_CAUSES, answer_rows, first_line
from tracekit.report.report import Report

#: Lines of the first screen without that of the browser, with pictures and without; lines that the steps take,
#: including an empty one before.
_SCREEN, _PLAIN_SCREEN, _STEPS_LINES = 24, 20, 2
#: A map with fewer rows is not informative, unless the job has no more.
_FEWEST_ROWS = 2


def print_report(
    report: Report,
    console: Console,
    *,
    source: str | None = None,
    path: Path | None = None,
    full: bool = False,
    explain: bool = False,
    gpu_hour: float | None = None,
) -> None:
    """Print the answer, and with `full` all evidence behind it.

    `source`: the job as arguments of a command, for the suggested next commands; `path`: what a browser opens, None if
    it cannot. `explain`: show how each number of the answer was computed. `gpu_hour`: the price of
    a GPU-hour, in any currency.
    """
    losses = bool(report.verdict.losses)
    commands = list(_commands(report, source, path, full)) if source is not None else []
    lines = (_SCREEN if report.by_worker else _PLAIN_SCREEN) - len(commands) - 1 + (path is not None)
    for limit in range(min(MOST_CAUSES, len(report.answer.others)), -1, -1):
        answer = _answer(report, gpu_hour, limit, full=full)
        height = len(console.render_lines(answer))
        if height <= lines:
            break
    console.print(answer)
    pictures = [] if full else list(_pictures(report, lines - height, console))
    answers = [section_panel(section, console) for section in report.asked]
    if full or pictures or answers or explain:
        console.print()
    if explain:
        console.print(Text("How each number came about", style="bold underline"))
        from tracekit.dashboards.terminal.details import explanations

        console.print(Padding(labelled(explanations(report, gpu_hour).items()), (0, 0, 1, 0)))
    if answers:
        console.print(side_by_side(answers, console))
        if full or pictures:
            console.print()
    if full:
        from tracekit.dashboards.terminal.details import print_details

        print_details(report, console)
    for picture in pictures:
        console.print(picture)
    if source is not None:
        if full or answers or pictures or (losses and not explain):
            console.print()
        for number, (line, purpose) in enumerate(commands):
            name = "       " if number else "Next   "
            fits = len(name) + len(line) + len(purpose) + 4 <= console.width
            words = f"{line}  # {purpose}" if fits else line
            console.print(Text.assemble((name, "bold"), words), soft_wrap=True)  # on one line, for copying


def _pictures(report: Report, lines: int, console: Console) -> Iterator[RenderableType]:
    """The map and the steps of a pipeline, or the tables of another job, if they fit into that many lines; of
    post-training always.
    """
    if tables := [section_table(table) for table in report.overview]:
        pair = side_by_side(tables, console)
        if report.by_worker or report.phases or len(console.render_lines(pair)) < lines:
            yield pair
    if not report.verdict.losses or lines < _STEPS_LINES or not report.by_worker:
        return
    grid, rows = report.worker_grid(), lines - _STEPS_LINES - 1  # the title
    if grid.slowdown.size > 1 and rows >= min(len(grid.dp_ranks), _FEWEST_ROWS):
        map_lines = small_map(report, grid, min(rows, len(grid.dp_ranks)))
        if map_lines is not None:
            yield map_lines
    yield steps_line(report)


def _answer(report: Report, gpu_hour: float | None, most_causes: int, *, full: bool) -> Group:
    """The job, the headline, and the rows of the answer."""
    verdict = report.verdict
    kind_of_loss, label, sentence = first_line(report)
    all_causes = "see Causes" if full else "--full"
    rows = answer_rows(report, gpu_hour, most_causes=most_causes, all_causes=all_causes)
    job = Text.assemble((short(report.name), "bold"), (f"   {report.job.sizes}", "dim"))
    kind = (label.removeprefix(report.caveat), VERDICT_STYLE.get(kind_of_loss, BAD))
    doubt = report.caveat if label.startswith(report.caveat) else ""
    headline = Text.assemble((doubt, UNSURE), kind, f": {sentence}")
    gap = [Text()] * bool(verdict.losses)
    return Group(job, *gap, headline, *gap, labelled(rows))


def _commands(report: Report, source: str, path: Path | None, full: bool) -> Iterator[tuple[str, str]]:
    """The commands to type next, and what for: a look at the worst step, the whole report, the browser."""
    job = f"{source} " if source else ""  # none: the newest job of the default store
    if report.verdict.losses and report.by_worker:
        worst = report.worst_step.step
        out = f"step-{worst}.json.gz" if source.endswith("timeline.json.gz") else "timeline.json.gz"
        yield f"tracekit store export {job}--steps {worst} --out {out}", "that step, for ui.perfetto.dev"
    if not full:
        yield f"tracekit whatif {job}--full", "what the answer rests on"
    if path is not None:
        yield command("open", path), "all of it in the browser"
