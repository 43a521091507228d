"""The verdict of a run in words: what it lost to whom, from when to when, and whether that is over.

In: a `RunVerdict`. Out: sentences for every surface, which differ in the zone of their times alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo

from tracekit.base.text import ranks_text, seconds, three_digits
from tracekit.report.finding import kind_words
from tracekit.report.report import Report
from tracekit.report.run import RunCause, RunVerdict, State
from tracekit.report.verdict import LossKind
from tracekit.trace.units import EARLIEST_S

#: Further causes that get a sentence each, and the share of the run that these cost at least.
MOST_CAUSES, _SMALLEST_SHARE = 3, 0.005
#: What took less time than this, seconds, is told to the second.
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


def first_line(report: Report, zone: tzinfo = UTC) -> tuple[LossKind, str, str]:
    """The kind of loss, its label and the first sentence of a report: about the run if it has several windows whose
    losses are known.
    """
    run, verdict = run_of_several(report), report.verdict
    if run is None or not run.recorded_s:
        return verdict.kind, f"{report.caveat}{verdict.label.upper()}", report.answer.headline
    kind = run_kind(run)
    return kind, str(kind).upper(), run_sentence(run, zone)


def run_kind(run: RunVerdict) -> LossKind:
    """The kind of loss that cost a run most; balanced if no cause stands out in any window."""
    return next((one.kind for one in run.alarming if one.kind), LossKind.BALANCED)


def run_sentence(run: RunVerdict, zone: tzinfo = UTC) -> str:
    """The first sentence about a run, without a full stop."""
    if run.alarming:
        return cause_sentence(run.alarming[0], zone, run)
    return f"nothing costs 5% of any window; {share_words(run, run.lost_s)} is lost in all"


def share_words(run: RunVerdict, lost_s: float) -> str:
    """How much of a run so many seconds are: "15.6% of the run". If most of it was not recorded, also of what was."""
    whole = "the run" if run.of_windows is None else "the chosen range"
    words = f"{lost_s / run.wall_s if run.wall_s else 0.0:.1%} of {whole}"
    if run.covered_share < _SPARSE and run.recorded_s:
        words += f" ({lost_s / run.recorded_s:.1%} of its recorded steps)"
    return words


def cause_sentence(cause: RunCause, zone: tzinfo, run: RunVerdict) -> str:
    """What one cause cost: `rank 1 on a cost 15.6% of the run, steps 40 to 66, from 10:02 to 10:09 UTC; it is over`. Of
    several at the same place, with its name.
    """
    place = cause.ranks, cause.hosts
    several = cause.ranks and sum((other.ranks, other.hosts) == place for other in run.alarming) > 1
    who = f"{who_words(cause)}, {kind_words(cause.cause)}," if several else who_words(cause)
    parts = [f"{who} cost {share_words(run, cause.lost_s)}", steps_words(cause), times_words(cause, zone)]
    state = f"; {_STATES[cause.state]}" if run.windows > 1 else ""
    return f"{', '.join(part for part in parts if part)}{state}"


def who_words(cause: RunCause) -> str:
    """Who or what lost the time: "rank 1 on node-33", "late data loading", "straggler losses without a known cause"."""
    if cause.ranks:
        host = f" on {cause.hosts[0]}" if len(cause.hosts) == 1 else ""
        return f"{ranks_text(cause.ranks)}{host}"
    return kind_words(cause.cause) if cause.is_known else f"{cause.kind} losses without a known cause"


def steps_words(cause: RunCause) -> str:
    """The steps that a cause slowed down; of one that comes and goes, also how many windows show it."""
    if cause.first_step is None or cause.first_step == cause.last_step:
        return "" if cause.first_step is None else f"step {cause.first_step}"
    steps = f"steps {cause.first_step} to {cause.last_step}"
    if not cause.clear_windows:
        return steps
    return f"{steps} in {cause.windows:,} of {cause.windows + cause.clear_windows:,} windows"


def times_words(cause: RunCause, zone: tzinfo = UTC) -> str:
    """When a cause acted; empty where that is unknown."""
    since, until = _moment(cause.since, zone), _moment(cause.until, zone)
    if since is None or until is None:
        return ""
    clock = "%H:%M:%S" if (until - since).total_seconds() < _SHORT_S else "%H:%M"
    dated = clock if since.date() == until.date() else f"%Y-%m-%d {clock}"
    return f"from {since:{dated}} to {until:{dated}} {until:%Z}"


def run_rows(report: Report, zone: tzinfo = UTC) -> Iterator[tuple[str, str]]:
    """Name and words of what else to say about a run: further causes, what to do, what the verdict covers, and the
    newest window. Nothing for a report on one window.
    """
    run = run_of_several(report)
    if run is None:
        return
    others = [cause for cause in run.alarming[1:] if cause.lost_share >= _SMALLEST_SHARE][:MOST_CAUSES]
    yield from (("" if number else "Then", cause_sentence(cause, zone, run)) for number, cause in enumerate(others))
    if run.lost_s > 0:
        hours = three_digits(run.gpu_hours_lost)
        yield "Lost", f"{hours} GPU-hours in all, {share_words(run, run.lost_s)}; `tracekit bill` has every hour"
    if advice := run_advice(run, report):
        yield "Do", advice
    if covers := coverage_words(run):
        yield "Covers", covers
    steps = f"steps {report.by_step[0].step} to {report.by_step[-1].step}" if report.by_step else "the newest window"
    yield "Now", f"{steps}: {report.caveat}{report.verdict.label}: {report.answer.headline}"


def run_advice(run: RunVerdict, report: Report) -> str | None:
    """What to do first about the worst cause of a run; None without advice, or if the report on its newest window has
    it.
    """
    worst = next(iter(run.alarming), None)
    if worst is None or worst.do is None or (worst.cause, worst.ranks) in _shown(report):
        return None
    match worst.state:
        case State.OPEN:
            return worst.do
        case State.OVER if run.ended is None:
            return f"should it come back: {_begun(worst.do)}"
        case _:
            return f"before the next run: {_begun(worst.do)}"


def _begun(advice: str) -> str:
    """Advice in the middle of a sentence."""
    return advice[:1].lower() + advice[1:]


def coverage_words(run: RunVerdict) -> str:
    """How much of a run its verdict covers; empty if it is nearly all."""
    covered = []
    if run.of_windows is not None:
        covered.append(f"{run.windows:,} of {run.of_windows:,} windows, steps {run.first_step} to {run.last_step}")
    if run.covered_share < _COVERED:
        covered.append(
            f"{run.covered_share:.0%} of {seconds(run.wall_s)}: the rest, such as the start, is in no window"
        )
    return "; ".join([*covered, *[note for note in run.notes if "clock" in note][:1]])


def since_words(report: Report, zone: tzinfo = UTC) -> str:
    """Since when the leading cause of the newest window acts on its run, to stand behind the place of the cause: its
    first slow step and when that began, as of its incident. Empty if it began in this window, or is not known.
    """
    run = run_of_several(report)
    leading = next(iter(report.answer.accounts), None)
    if run is None or leading is None or not report.by_step:
        return ""
    same = [cause for cause in run.causes if (cause.cause, cause.ranks) == (leading.kind, leading.ranks)]
    if not same or same[0].first_step is None or same[0].first_step >= report.by_step[0].step:
        return ""
    began = _moment(same[0].since, zone)
    moment = "" if began is None else f", {began:%Y-%m-%d %H:%M:%S %Z}"
    return f"; since step {same[0].first_step}{moment}"


def elsewhere_words(run: RunVerdict, report: Report) -> str | None:
    """The causes in other windows than that of the report: `5 other windows name rank 1, steps 45 to 95`."""
    words = []
    for cause in run.alarming[:MOST_CAUSES]:
        others = cause.windows - ((cause.cause, cause.ranks) in _shown(report))
        if others:
            name = "other window names" if others == 1 else "other windows name"
            words.append(f"{others:,} {name} {who_words(cause)}, {steps_words(cause)}")
    return "; ".join(words) or None


def _shown(report: Report) -> set[tuple[str, tuple[int, ...]]]:
    """Kinds and ranks of the causes in a report."""
    return {(account.kind, account.ranks) for account in report.answer.accounts}


def _moment(epoch_s: float | None, zone: tzinfo) -> datetime | None:
    if epoch_s is None or epoch_s < EARLIEST_S:  # from a clock that does not count from 1970
        return None
    try:
        return datetime.fromtimestamp(epoch_s, zone)
    except (ValueError, OverflowError, OSError):  # a trace can hold any number
        return None
