"""The text of a report: names, rows and tables, the verdict of a run, and pictures in characters.
Terminal, Markdown, HTML and notebooks show the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from itertools import cycle, islice
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.replay import Method
from tracekit.base.text import (
    counted,
    main_clause,
    percent_sure,
    printable,
    ranks_text,
    seconds,
    short,
    steps_text,
    three_digits,
    with_error,
)
from tracekit.report.conclusions import Answer, Fix, RunCause, RunVerdict, State
from tracekit.report.finding import LossKind, kind_words
from tracekit.report.report import Report
from tracekit.report.tables import BarTimeline, Picture, Section, Series, ShareGrid, Table
from tracekit.trace.model import EARLIEST_S, Worker

#: Limits of further causes and stalls in an answer.
MOST_CAUSES = 3
_MOST_STALLS = 3
#: Two methods agree if their S differ by at most this share.
_LARGEST_DIFFERENCE = 0.01
#: How a cell begins that holds a figure, or none where others have one.
_FIGURE = re.compile(r"-?$|(at most )?[-+]?\d")
#: Shares over the mean from which on a cell of a grid is darker.
_SHADES, _FROM = "·░▒▓█", (0.05, 0.2, 0.5, 1.0)
_SPARKS = "▁▂▃▄▅▆▇█"
#: What bars of a timeline can be, in the order of the legend, which begins again where it is longer.
_WHATS = "█▓▒░:-+=*"
#: The most rows of a timeline; the width of names, and of the ends of a range.
_MOST_ROWS, _NAMES, _ENDS = 24, 16, 24


def worker_name(worker: Worker, rank: int | None, host: str | None = None) -> str:
    """Rank and node, as far as known: "rank 9 on host-0001"; the worker's coordinates if the trace does not name it."""
    if rank is None:
        return worker.coordinates
    return f"rank {rank}" if host is None else f"rank {rank} on {short(host)}"


def answer_rows(
    report: Report, gpu_hour: float | None = None, *, most_causes: int = MOST_CAUSES, all_causes: str = "see Causes"
) -> Iterator[tuple[str, str]]:
    """The rows of the answer: cost, who, why, what to do first, what that saves, and trust. Leaves out what the
    headline already says.

    A row without a name continues the row before. `gpu_hour`: the price of a GPU-hour, in any currency. `most_causes`:
    how many further causes get a row each; the others are only counted. `all_causes`: where a reader finds them.
    """
    yield from run_rows(report)
    answer, lost, hours = report.answer, "", report.verdict.lost_gpu_hours_per_day
    if gpu_hour is not None and report.daily and hours is not None:
        lost = f", {hours * gpu_hour:,.0f} a day at {gpu_hour:g} a GPU-hour"
    yield from core_rows(answer, lost, since_words(report))
    others = list(answer.others[:most_causes])
    if more := len(answer.others) - len(others):
        others.append(f"{counted(more, 'more cause' if others else 'cause')}: {all_causes}")
    yield from (("" if number else "Also", cause) for number, cause in enumerate(others))
    if answer.stalls:
        more = len(answer.stalls) - _MOST_STALLS
        yield "Stalls", "; ".join(answer.stalls[:_MOST_STALLS]) + (f"; and {more} more" if more > 0 else "")
    yield trust_row(answer.trust, trustworthy=report.trust.trustworthy)
    yield from ((remark.name, remark.words) for remark in report.remarks)


def core_rows(answer: Answer, money: str = "", since: str = "") -> Iterator[tuple[str, str]]:
    """Cost, who, why, what to do first, and what that saves. `money`, `since`: the ends of the sentences about the cost
    and the culprit.
    """
    why, saves = answer.why, answer.saves
    rows = {
        "Cost": answer.cost and answer.cost + money,
        "Who": answer.who and answer.who + since,
        "Why": None if why is None or main_clause(why) in answer.headline else why,
        "Do": answer.action or answer.check,
        "Saves": saves and saves.removeprefix("saves "),
    }
    yield from ((name, words) for name, words in rows.items() if words)


def trust_row(trust: str, *, trustworthy: bool) -> tuple[str, str]:
    """Whether to believe the report, and why."""
    return "Trust", f"{'yes' if trustworthy else 'NO'}: {trust}"


def tables(report: Report) -> Iterator[Section]:
    """The tables of causes, fixes, and requested sections."""
    if report.findings:
        yield cause_table(report)
    yield fix_table(report)
    yield from report.asked


def cause_table(report: Report) -> Table:
    """The causes, costliest first."""
    rows = []
    for cause, place in zip(report.findings, report.answer.places, strict=True):
        priced = (cause.when, percent_sure(cause.confidence), cause.costs.removeprefix("costs "))
        rows.append((cause.title, place, *(priced if cause.priced else ("", "", "")), cause.effect,
                     cause.next_check))  # fmt: skip
    return Table("Causes", ("Cause", "Where", "When", "Sure", "Costs", "Because", "Check"), tuple(rows))


def fix_table(report: Report) -> Table:
    """The fixes, best first; without figures if no saving is promised."""
    whole = report.job.whole
    unprofiled = any(fix.saves_step_s is not None for fix in report.fixes)
    unit = "step" if unprofiled else whole
    heads = (
        "Fix",
        "Sure",
        f"{unit.capitalize()} after",
        "Saved per step" if unit == "step" else "Saves",  # a wider head would break the titles of fixes
        *(["GPU-hours a day"] if report.daily else ()),
    )
    rows = tuple((*_fix_row(fix), *_a_day(fix, report)) for fix in report.fixes)
    if not rows:
        return Table("Fixes", heads, rows, f"No fix saves enough of the {whole} to be named.")
    delays = ["Times as recorded, with launch delays"] if report.trust.discrepancy else []
    notes = (*report.assumptions, *(["Times without the profiler, estimated"] if unprofiled else delays))
    return Table("Fixes", heads, rows, "".join(f"{note}. " for note in notes).rstrip())


def _fix_row(fix: Fix) -> tuple[str, str, str, str]:
    """A row of the fixes: title, confidence of its cause, the step after it, and the saving."""
    confidence = "-" if fix.confidence is None else percent_sure(fix.confidence)
    if fix.withheld is not None or fix.new_step_s is None or fix.saved_s is None:
        return f"{fix.title}: no promise, {fix.withheld}", confidence, "", ""
    remarks = [*(["at most"] if fix.bound else []), *([f"assumes {fix.assumes}"] if fix.assumes else [])]
    title = f"{fix.title} ({'; '.join(remarks)})" if remarks else fix.title
    return title, confidence, *fix_times(fix)


def fix_times(fix: Fix) -> tuple[str, str]:
    """The step with a fix, and what it saves: without the profiler, where that is known."""
    if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
        saves = seconds(fix.worth_s) if fix.bound else fix.saves_step_s.words
        return seconds(fix.unprofiled_step_s - fix.worth_s), saves
    return seconds(fix.new_step_s or 0.0), with_error(fix.saved_s or 0.0, fix.error_s)


def _a_day(fix: Fix, report: Report) -> tuple[str, ...]:
    if not report.daily:
        return ()
    return ("" if fix.saved_gpu_hours_per_day is None else f"{fix.saved_gpu_hours_per_day:,.1f}",)


def figure_columns(rows: Iterable[Sequence[object]]) -> list[int]:
    """The positions of the columns that contain figures; the first column is the row's subject."""
    columns = enumerate(zip(*rows, strict=True))
    return [number for number, column in columns if number and all(map(_FIGURE.match, map(str, column)))]


def published_difference(report: Report) -> str:
    """The result of the published rules if it differs; empty if they agree."""
    method = report.method
    if not method or method.name is Method.PUBLISHED or not method.published_slowdown or not report.slowdown:
        return ""
    if abs(report.slowdown / method.published_slowdown - 1) <= _LARGEST_DIFFERENCE:
        return ""
    return f"S = {method.published_slowdown:.2f}: {'; '.join(method.differs_because)}"


#: Further causes that get a sentence each, and the share of the run that these cost at least.
_MOST_RUN_CAUSES, _SMALLEST_SHARE = 3, 0.005
#: Times between shorter events, seconds, include the second.
_SHORT_S = 600
#: A verdict that covers less of the run says so.
_COVERED = 0.9
#: Of a run of which less is covered, a share of all its time says little about its steps.
_SPARSE = 0.5
_STATES = {
    State.OPEN: "it goes on",
    State.OVER: "it is over",
    State.ENDED: "it lasted until the job ended",
}


def run_of_several(report: Report) -> RunVerdict | None:
    """The verdict of a run of several windows, of which the report is about the newest; None for other reports."""
    return report.run if report.run and report.run.windows > 1 else None


def first_line(report: Report) -> tuple[LossKind, str, str]:
    """The kind of loss, its label and the first sentence of a report: about the run if it has several windows whose
    losses are known.
    """
    run, verdict = run_of_several(report), report.verdict
    if run is None or not run.recorded_s:
        return verdict.kind, f"{report.caveat}{verdict.label.upper()}", report.answer.headline
    kind = run_kind(run)
    return kind, str(kind).upper(), run_sentence(run)


def run_kind(run: RunVerdict) -> LossKind:
    """The kind of loss that cost a run most; balanced if no cause stands out in any window."""
    return next((cause.kind for cause in run.alarming if cause.kind), LossKind.BALANCED)


def run_sentence(run: RunVerdict, zone: tzinfo = UTC) -> str:
    """The first sentence about a run, without a full stop."""
    if run.alarming:
        return cause_sentence(run.alarming[0], zone, run)
    return f"nothing costs 5% of any window; {share_words(run, run.lost_s)} is lost in all"


def share_words(run: RunVerdict, lost_s: float) -> str:
    """A loss in seconds as a share of a run: "15.6% of the run". If most of it was not recorded, also of what was."""
    scope = "the run" if run.of_windows is None else "the chosen range"
    words = f"{lost_s / run.wall_s if run.wall_s else 0.0:.1%} of {scope}"
    if run.covered_share < _SPARSE and run.recorded_s:
        words += f" ({lost_s / run.recorded_s:.1%} of its recorded steps)"
    return words


def cause_sentence(cause: RunCause, zone: tzinfo, run: RunVerdict) -> str:
    """The cost of one cause: `rank 1 on a cost 15.6% of the run, steps 40 to 66, from 10:02 to 10:09 UTC; it is over`.
    Of several at the same place, with its name; of one that overlaps with others, also what it cost by itself.
    """
    place = cause.ranks, cause.hosts
    several = cause.ranks and sum((other.ranks, other.hosts) == place for other in run.alarming) > 1
    subject = f"{who_words(cause)}, {kind_words(cause.cause)}," if several else who_words(cause)
    cost = f"{subject} cost {share_words(run, cause.lost_s)}"
    parts = [cost, _by_itself(cause, run), steps_words(cause), times_words(cause, zone)]
    state = f"; {_STATES[cause.state]}" if run.windows > 1 else ""
    return f"{', '.join(part for part in parts if part)}{state}"


def _by_itself(cause: RunCause, run: RunVerdict) -> str:
    """What a cause cost by itself, if its share of what it cost together with others is another figure."""
    if cause.saved_s is None or not run.wall_s:
        return ""
    share, by_itself = (f"{cost_s / run.wall_s:.1%}" for cost_s in (cause.lost_s, cause.saved_s))
    return "" if share == by_itself else f"{by_itself} by itself"


def who_words(cause: RunCause) -> str:
    """Who or what lost the time: "rank 1 on node-33", "late data loading", "straggler losses without a known cause"."""
    if cause.ranks:
        host = f" on {cause.hosts[0]}" if len(cause.hosts) == 1 else ""
        return f"{ranks_text(cause.ranks)}{host}"
    return kind_words(cause.cause) if cause.is_known else f"{cause.kind} losses without a known cause"


def steps_words(cause: RunCause) -> str:
    """The steps that a cause slowed down; of one that comes and goes, also how many windows show it."""
    if cause.first_step is None or cause.last_step is None:
        return ""
    steps = steps_text(cause.first_step, cause.last_step)
    if not cause.clear_windows:
        return steps
    return f"{steps} in {cause.windows:,} of {cause.windows + cause.clear_windows:,} windows"


def times_words(cause: RunCause, zone: tzinfo = UTC) -> str:
    """When a cause acted; empty where that is unknown."""
    since, until = moment(cause.since, zone), moment(cause.until, zone)
    if since is None or until is None:
        return ""
    clock = "%H:%M:%S" if (until - since).total_seconds() < _SHORT_S else "%H:%M"
    dated = clock if since.date() == until.date() else f"%Y-%m-%d {clock}"
    return f"from {since:{dated}} to {until:{dated}} {until:%Z}"


def lost_words(run: RunVerdict, in_all: str = "in all") -> str:
    """What a run lost: "0.5 GPU-hours in all, 15.6% of the run"; without its GPUs, in seconds."""
    lost = seconds(run.lost_s) if run.gpu_hours_lost is None else f"{three_digits(run.gpu_hours_lost)} GPU-hours"
    return f"{lost} {in_all}, {share_words(run, run.lost_s)}"


def run_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Name and words of what else to say about a run: further causes, what to do, what the verdict covers, and the
    newest window. Nothing for a report on one window.
    """
    run = run_of_several(report)
    if run is None:
        return
    others = [cause for cause in run.alarming[1:] if cause.lost_share >= _SMALLEST_SHARE][:_MOST_RUN_CAUSES]
    yield from (("" if number else "Then", cause_sentence(cause, UTC, run)) for number, cause in enumerate(others))
    if run.lost_s > 0:
        yield "Lost", f"{lost_words(run)}; `tracekit bill` has every hour"
    if advice := run_advice(run, report):
        yield "Do", advice
    if covers := coverage_words(run):
        yield "Covers", covers
    rows = report.by_step
    steps = steps_text(rows[0].step, rows[-1].step) if rows else "the newest window"
    yield "Now", f"{steps}: {report.caveat}{report.verdict.label}: {report.answer.headline}"


def run_advice(run: RunVerdict, report: Report) -> str | None:
    """The advice about the worst cause of a run; None without advice, or if the report on its newest window has it."""
    worst = next(iter(run.alarming), None)
    if worst is None or worst.do is None or (worst.cause, worst.ranks) in _cause_keys(report):
        return None
    match worst.state:
        case State.OPEN:
            return worst.do
        case State.OVER if run.ended is None:
            return f"should it come back: {_lower_first(worst.do)}"
        case _:
            return f"before the next run: {_lower_first(worst.do)}"


def _lower_first(advice: str) -> str:
    return advice[:1].lower() + advice[1:]


def coverage_words(run: RunVerdict) -> str:
    """The share of a run that its verdict covers; empty if it is nearly all."""
    covered = []
    if run.of_windows is not None:
        covered.append(f"{run.windows:,} of {run.of_windows:,} windows, {steps_text(run.first_step, run.last_step)}")
    if run.covered_share < _COVERED:
        covered.append(
            f"{run.covered_share:.0%} of {seconds(run.wall_s)}: the rest, such as the start, is in no analysed window"
        )
    return "; ".join([*covered, *filter(None, [run.coverage_note])])


def since_words(report: Report, zone: tzinfo = UTC) -> str:
    """Since when the leading cause of the newest window acts on its run, as a clause after its place: its first slow
    step and when that began, as of its incident. Empty if it began in this window, or is not known.
    """
    run = run_of_several(report)
    leading = next(iter(report.answer.accounts), None)
    if run is None or leading is None or not report.by_step:
        return ""
    matching = [cause for cause in run.causes if (cause.cause, cause.ranks) == (leading.kind, leading.ranks)]
    if not matching or matching[0].first_step is None or matching[0].first_step >= report.by_step[0].step:
        return ""
    began = moment(matching[0].since, zone)
    when = "" if began is None else f", {began:%Y-%m-%d %H:%M:%S %Z}"
    return f"; since step {matching[0].first_step}{when}"


def elsewhere_words(run: RunVerdict, report: Report) -> str | None:
    """The causes in other windows than that of the report: `5 other windows name rank 1, steps 45 to 95`."""
    words = []
    for cause in run.alarming[:_MOST_RUN_CAUSES]:
        others = cause.windows - ((cause.cause, cause.ranks) in _cause_keys(report))
        if others:
            name = "other window names" if others == 1 else "other windows name"
            words.append(f"{others:,} {name} {who_words(cause)}, {steps_words(cause)}")
    return "; ".join(words) or None


def _cause_keys(report: Report) -> set[tuple[str, tuple[int, ...]]]:
    """Kinds and ranks of the causes in a report."""
    return {(account.kind, account.ranks) for account in report.answer.accounts}


def moment(epoch_s: float | None, zone: tzinfo) -> datetime | None:
    """A point in time in a zone; None where it is unknown, or no date can show it."""
    if epoch_s is None or epoch_s < EARLIEST_S:  # from a clock that does not count from 1970
        return None
    try:
        return datetime.fromtimestamp(epoch_s, zone)
    except (ValueError, OverflowError, OSError):  # a trace can hold any number
        return None


def gaps_before(steps: npt.NDArray[np.integer[Any]]) -> Ints:
    """The positions of the steps before which some were not recorded: those that follow later than steps mostly do."""
    apart = np.diff(steps)
    return np.flatnonzero(apart > np.median(apart)) + 1 if len(apart) else np.zeros(0, np.int64)


def gaps_of_bars(steps: npt.NDArray[np.integer[Any]], size: int) -> set[int]:
    """The numbers of the bars, of `size` steps each, before which some steps were not recorded."""
    return set((-(-gaps_before(steps) // size)).tolist())


def lines_of(picture: Picture, width: int) -> list[str]:
    """The picture, then what its characters mean; `printable`, because names come from outside."""
    match picture:
        case ShareGrid():
            lines = _grid(picture, width - _NAMES)
        case Series():
            lines = _series(picture, width - _NAMES - _ENDS)
        case BarTimeline():
            lines = _timeline(picture, width - _NAMES)
        case _:
            assert_never(picture)
    return [*map(printable, lines)]


def _named_row(name: str, marks: str) -> str:
    label = short(name, _NAMES - 2) if name else ""
    return f"{label:<{_NAMES}}{marks}".rstrip()


def _grid(grid: ShareGrid, width: int) -> Iterator[str]:
    for name, values in zip(grid.rows, grid.values, strict=True):
        places = np.searchsorted(_FROM, values[:width], side="right")
        yield _named_row(f"{grid.down} {name}", "".join(_SHADES[place] for place in places.tolist()))
    bounds = ", ".join(f"{shade} {bound:.0%}" for shade, bound in zip(_SHADES[1:], _FROM, strict=True))
    cut = f", the first {width} of {len(grid.columns)}" if width < len(grid.columns) else ""
    yield f"{grid.across}s in order{cut}; more {grid.unit} than the mean: {_SHADES[0]} hardly, {bounds}"


def _series(series: Series, width: int) -> Iterator[str]:
    for line in series.lines:
        values = np.array([np.nan if value is None else value for value in line.values])
        cells = [cell[~np.isnan(cell)] for cell in np.array_split(values, min(width, len(values)) or 1)]
        peaks = [float(cell.max()) if len(cell) else None for cell in cells]
        if not np.isnan(values).all():
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
            span = high - low or 1.0
            marks = "".join(
                " " if peak is None else _SPARKS[round((peak - low) / span * (len(_SPARKS) - 1))] for peak in peaks
            )
            yield _named_row(line.name, f"{marks} {low:,.3g} to {high:,.3g} {series.unit}")
    ends = f"{series.axis} {series.places[0]:,.4g} to {series.places[-1]:,.4g}" if series.places else series.axis
    yield "; ".join(filter(None, (ends, series.note)))


def _timeline(timeline: BarTimeline, width: int) -> Iterator[str]:
    end_s = max((bar.end_s for bar in timeline.bars), default=0.0) or 1.0
    rows = np.unique(np.linspace(0, len(timeline.rows) - 1, min(len(timeline.rows), _MOST_ROWS)).astype(int)).tolist()
    spent_by_row: dict[int, np.ndarray] = {row: np.zeros((len(timeline.legend), width)) for row in rows}
    edges, signs = np.linspace(0, end_s, width + 1), [*islice(cycle(_WHATS), len(timeline.legend))]
    for bar in timeline.bars:
        if bar.row in spent_by_row:
            inside = np.minimum(edges[1:], bar.end_s) - np.maximum(edges[:-1], bar.start_s)
            spent_by_row[bar.row][bar.what] += np.maximum(inside, 0)
    for row, spent in spent_by_row.items():
        marks = np.where(spent.any(axis=0), spent.argmax(axis=0), len(timeline.legend))
        yield _named_row(timeline.rows[row], "".join((*signs, " ")[mark] for mark in marks.tolist()))
    seen = {bar.what for bar in timeline.bars}
    legend = enumerate(zip(signs, timeline.legend, strict=True))
    yield ", ".join(f"{mark} {short(what.name)}" for number, (mark, what) in legend if number in seen)
    few = [f"{len(rows)} of {len(timeline.rows)} rows"] if len(rows) < len(timeline.rows) else []
    yield "; ".join([f"{seconds(end_s)} in all", *few, *timeline.notes])
