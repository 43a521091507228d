"""The report on a hang for a terminal of 80 columns: who, why, what to do first; then the rest."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator

from tracekit.analysis.hang.hang_report import HangCulprit, HangReport, StallClass, waiting_ranks
from tracekit.base.text import printable, ranks_text

_COLUMNS = 80
#: The number of culprits in the first ten lines; the others follow.
_AT_THE_TOP = 3
_LISTED = 16
_STACKS = 3


def report_lines(report: HangReport) -> Iterator[str]:
    """The report; the first ten lines give who, why and what to do first."""
    yield report.headline
    for culprit in report.culprits[:_AT_THE_TOP]:
        yield from _culprit(culprit)
    for question in report.undecided[: max(_AT_THE_TOP - len(report.culprits), 1)]:
        which = "which of " if len(question.ranks) > 1 else "whether it is "
        ranks = ranks_text(question.ranks)
        lead = f"{ranks} are alike" if question.alike else f"cannot tell {which}{ranks}"
        yield from _wrapped(f"{lead}: {question.missing}", "  ", limit=6 if question.alike else 3)
    if report.first_step is not None:
        yield from _wrapped(f"First: {report.first_step}", "", limit=3)
    yield from _rest(report)


def _culprit(one: HangCulprit) -> Iterator[str]:
    host = f" on {one.host}" if one.host else ""
    phase = f", in {one.phase}" if one.phase else ""
    yield from _wrapped(f"rank {one.rank}{host}: {one.stall_class}{phase}", "  ", limit=1)
    yield from _wrapped("; ".join(one.evidence), "    ", limit=2 if one.stall_class is not StallClass.MISMATCH else 8)


def _rest(report: HangReport) -> Iterator[str]:
    further = report.culprits[_AT_THE_TOP:]
    if further:
        yield ""
        yield "Further culprits"
        for one in further[:_LISTED]:
            yield from _wrapped(
                f"rank {one.rank}: {one.stall_class}; {one.evidence[0] if one.evidence else ''}", "  ", 1
            )
        if len(further) > _LISTED:
            yield f"  and {len(further) - _LISTED} more (--json lists all)"
    yield from _stacks(report)
    yield from _waiting(report)
    silent = [rank for rank in report.without_dump if rank not in {one.rank for one in report.culprits}]
    if silent and report.hang:
        yield ""
        they = "it hangs too or merely waits" if len(silent) == 1 else "they hang too or merely wait"
        yield from _wrapped(f"No dump of {ranks_text(silent)}: whether {they} cannot be told without it.", "")
    if report.notes:
        yield ""
        for note in report.notes[:_LISTED]:
            yield from _wrapped(f"Note: {note}", "")


def _stacks(report: HangReport) -> Iterator[str]:
    """Equal stacks once, the few before the many: those of culprits, and for comparison that of the largest group."""
    culprits = {one.rank for one in report.culprits}
    chosen = [one for one in report.stacks if culprits.intersection(one.ranks)] or list(report.stacks)
    usual = [one for one in report.stacks[-1:] if one not in chosen[:_STACKS]]
    for group in (*chosen[:_STACKS], *usual):
        yield ""
        yield f"Stack of {ranks_text(group.ranks)}, innermost first"
        for frame in group.frames[:8]:
            shown = printable(frame)
            yield f"  {shown if len(shown) <= _COLUMNS - 2 else '...' + shown[5 - _COLUMNS :]}"
    if len(report.stacks) > len(chosen[:_STACKS]) + len(usual):
        yield ""
        yield f"{len(report.stacks)} different stacks (--json has all)"


def _waiting(report: HangReport) -> Iterator[str]:
    if not report.waiting:
        return
    yield ""
    yield waiting_ranks(len(report.waiting))
    waits: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for one in report.waiting:
        waits[one.operation, one.waits_for].append(one.rank)
    for (operation, held), ranks in sorted(waits.items(), key=lambda pair: (-len(pair[1]), pair[1]))[:_LISTED]:
        held_up = f" for {ranks_text(held)}" if held else ""
        yield from _wrapped(f"{ranks_text(ranks)} in {operation}{held_up}", "  ", limit=2)
    if len(waits) > _LISTED:
        yield f"  and {len(waits) - _LISTED} more (--json lists all)"


def _wrapped(text: str, indent: str, limit: int = 3) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        max_lines=limit,
        placeholder=" ...",
        break_on_hyphens=False,
    )
