"""The `whatif` report as a person reads it in a terminal: the answer first, on one screen.

In: a `Report`. Out: text on a rich console, laid out for its width. Draws only; every sentence and number comes from
the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from tracekit.analysis.causes.rules_outside import SMALLEST_OFFSET_S
from tracekit.analysis.graph.gaps import gaps_text
from tracekit.analysis.replay.method import Method
from tracekit.analysis.verdict import LossKind
from tracekit.report import ClockOffset, Report
from tracekit.terminal.details import print_details
from tracekit.terminal.maps import step_bars, worker_map
from tracekit.terminal.tables import by_label, labelled, questions, trust_line
from tracekit.text import seconds, short

_LOSS_STYLE = "bold white on dark_red"
_VERDICT_STYLE = {LossKind.BALANCED: "bold black on green", LossKind.CONTRADICTION: "bold black on yellow"}
#: The map of the first screen, DP ranks x stages.
_SMALL_MAP = (6, 32)
#: Further causes that the first screen names, and clocks.
_MOST_CAUSES = 3
_MOST_CLOCKS = 3


def print_report(
    report: Report, console: Console, *, source: str | None = None, full: bool = False, gpu_hour: float | None = None
) -> None:
    """Print the answer, and with `full` all that it rests on.

    `source`: the job as arguments of a command, for the commands to type next. `gpu_hour`: the price of a GPU-hour, in
    any currency.
    """
    console.print(_job(report))
    console.print()
    console.print(_headline(report))
    console.print()
    console.print(_answer(report, gpu_hour))
    console.print()
    if report.questions_asked:
        console.print(questions(report.questions_asked, report.attribution.original_s))
    for group in report.labels_asked:
        console.print(by_label(group))
    if full:
        print_details(report, console)
    elif report.diagnosis.verdict.losses:
        console.print(worker_map(report, _SMALL_MAP))
        console.print(Padding(step_bars(report, console.width), (0, 0, 1, 0)))
    if source is not None:
        console.print(Text("Next", style="bold"))
        for command in _commands(report, source, full):
            console.print(Text(f"  {command}"), soft_wrap=True)  # whole, to be copied


def _job(report: Report) -> Text:
    """What was analysed."""
    layout = report.layout
    sizes = [f"dp {layout.dp}"] + [f"{name} {size}" for name, size in _other_sizes(report) if size > 1]
    line = Text(short(report.name), style="bold")
    steps, gpus = len(report.attribution.steps), layout.world_size
    line.append(
        f"   {' x '.join(sizes)} on {gpus:,} GPU{'s' if gpus > 1 else ''}, {steps:,} step{'s' if steps > 1 else ''},"
        f" {report.ops:,} ops",
        style="dim",
    )
    return line


def _other_sizes(report: Report) -> Iterable[tuple[str, int]]:
    layout = report.layout
    return (("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep), ("vpp", layout.vpp))


def _headline(report: Report) -> Text:
    verdict = report.diagnosis.verdict
    kind = (str(verdict.kind).upper(), _VERDICT_STYLE.get(verdict.kind, _LOSS_STYLE))
    return Text.assemble(kind, f": {report.diagnosis.answer.headline}")


def _answer(report: Report, gpu_hour: float | None) -> RenderableType:
    """What it costs, who, why, what to do first, what that saves, and whether to believe it."""
    answer = report.diagnosis.answer
    cost = answer.cost
    if cost is not None and gpu_hour is not None:
        cost += f", {report.diagnosis.verdict.lost_gpu_hours_per_day * gpu_hour:,.0f} a day at {gpu_hour:g} a GPU-hour"
    rows: list[tuple[str, str | Text | None]] = [
        ("Cost", cost), ("Who", answer.who), ("Why", answer.why), ("Check", answer.check), ("Fix", answer.fix)
    ]  # fmt: skip
    rows += [("" if number else "Also", cause) for number, cause in enumerate(answer.others[:_MOST_CAUSES])]
    rows += [
        ("Trust", trust_line(report.trust.trustworthy, answer.trust)),
        ("Clocks", _clocks(report)),
        ("Method", _method(report)),
        ("Missing", Text(_coverage(report), style="yellow")),
    ]
    return labelled(rows)


def _commands(report: Report, source: str, full: bool) -> Iterator[str]:
    """What to type next: a look at the worst step, and the whole report."""
    found = report.attribution
    if report.diagnosis.verdict.losses:
        worst = int(found.steps[int(found.recorded.argmax())])
        yield f"tracekit export {source} --steps {worst} --out timeline.json.gz"
    if not full:
        yield f"tracekit whatif {source} --full"


def _clocks(report: Report) -> str:
    """Which clocks were off and set right, or that some could not be compared; empty where neither."""
    clocks = report.clocks
    off = [row for row in clocks.offsets if max(abs(row.offset_s), abs(row.jump_s)) >= SMALLEST_OFFSET_S]
    parts = [_clock(row) for row in off[:_MOST_CLOCKS]]
    if parts:
        more = f" and {len(off) - _MOST_CLOCKS} more" if len(off) > _MOST_CLOCKS else ""
        return f"worker{'s' if len(off) > 1 else ''} {', '.join(parts)}{more}: taken out of all figures"
    if clocks.untied:
        return f"{clocks.untied} cannot be compared: no op ends at once on several of them"
    return ""


def _clock(row: ClockOffset) -> str:
    """How one clock was off."""
    if row.jump_step is not None:
        way = "forward" if row.jump_s > 0 else "back"
        return f"{row.worker} set {way} by {seconds(abs(row.jump_s))} at step {row.jump_step}"
    way = "ahead" if row.offset_s > 0 else "behind"
    drift = f", drifting by {row.drift * 1e6:+.0f} us/s" if row.drift else ""
    return f"{row.worker} {way} by {seconds(abs(row.offset_s))} \u00b1 {seconds(row.error_s)}{drift}"


def _method(report: Report) -> str:
    """Which rules were followed, and where the published ones say something else; empty where they agree."""
    if report.method is Method.PUBLISHED:
        return "published: the rules of the OSDI'25 paper, nothing else"
    published = report.published
    if published is None or not published.differs(report.slowdown):
        return ""
    return f"the published method has S = {published.slowdown:.2f}: {'; '.join(published.reasons)}"


def _coverage(report: Report) -> str:
    """What is missing from the trace; empty where nothing is."""
    coverage, parts = report.coverage, []
    if coverage.workers_traced < coverage.workers_expected:
        shown = ", ".join(str(worker) for worker in coverage.missing_workers[:4])
        more = coverage.workers_expected - coverage.workers_traced - 4
        parts.append(
            f"{coverage.workers_traced} of {coverage.workers_expected} workers traced (missing {shown}"
            + (f" and {more} more)" if more > 0 else ")")
        )
    elif not coverage.complete:
        parts.append(
            f"{coverage.worker_steps_traced} of {coverage.worker_steps_expected} worker-steps traced: some workers miss"
            " some steps"
        )
    if report.dropped_lanes:
        ranks = sorted({dp_rank for _, dp_rank in report.dropped_lanes})
        parts.append(
            f"left out {len(report.dropped_lanes)} DP-rank-steps that lack a stage (DP rank"
            f" {', '.join(map(str, ranks[:6]))}{' ...' if len(ranks) > 6 else ''})"
        )
    if steps := report.left_out_steps:
        parts.append(f"left out {len(steps)} steps that some DP ranks lack")
    elif parts:
        parts.append("waiting for untraced workers shows as slow communication")
    if gaps := report.attribution.gaps:
        done = "" if report.attribution.slowdown_as_recorded is None else ", reconstructed from their peers"
        parts.append(f"not recorded{done}: {gaps_text(gaps)}")
    return "; ".join(parts)
