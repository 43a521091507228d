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
    yield from _other_culprits(report)


def _culprit(culprit: HangCulprit) -> Iterator[str]:
    host = f" on {culprit.host}" if culprit.host else ""
    phase = f", in {culprit.phase}" if culprit.phase else ""
    yield from _wrapped(f"rank {culprit.rank}{host}: {culprit.stall_class}{phase}", "  ", limit=1)
    limit = 8 if culprit.stall_class is StallClass.MISMATCH else 2
    yield from _wrapped("; ".join(culprit.evidence), "    ", limit=limit)


def _other_culprits(report: HangReport) -> Iterator[str]:
    others = report.culprits[_AT_THE_TOP:]
    if others:
        yield ""
        yield "Further culprits"
        for culprit in others[:_LISTED]:
            evidence = culprit.evidence[0] if culprit.evidence else ""
            yield from _wrapped(f"rank {culprit.rank}: {culprit.stall_class}; {evidence}", "  ", 1)
        if len(others) > _LISTED:
            yield f"  and {len(others) - _LISTED} more (--json lists all)"
    yield from _stacks(report)
    yield from _waiting(report)
    silent = [rank for rank in report.without_dump if rank not in {culprit.rank for culprit in report.culprits}]
    if silent and report.hang:
        yield ""
        they = "it hangs too or merely waits" if len(silent) == 1 else "they hang too or merely wait"
        yield from _wrapped(f"No dump of {ranks_text(silent)}: without it, nothing says whether {they}.", "")
    if report.notes:
        yield ""
        for note in report.notes[:_LISTED]:
            yield from _wrapped(f"Note: {note}", "")


def _stacks(report: HangReport) -> Iterator[str]:
    """Equal stacks once, the few before the many: those of culprits, and for comparison that of the largest group."""
    culprits = {culprit.rank for culprit in report.culprits}
    chosen = [group for group in report.stacks if culprits.intersection(group.ranks)] or list(report.stacks)
    usual = [group for group in report.stacks[-1:] if group not in chosen[:_STACKS]]
    for group in (*chosen[:_STACKS], *usual):
        yield ""
        yield f"Stack of {ranks_text(group.ranks)}, innermost first"
        for frame in group.frames[:8]:
            line = printable(frame)
            yield f"  {line if len(line) <= _COLUMNS - 2 else '...' + line[5 - _COLUMNS :]}"
    if len(report.stacks) > len(chosen[:_STACKS]) + len(usual):
        yield ""
        yield f"{len(report.stacks)} different stacks (--json has all)"


def _waiting(report: HangReport) -> Iterator[str]:
    if not report.waiting:
        return
    yield ""
    yield waiting_ranks(len(report.waiting))
    waits: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for waiting in report.waiting:
        waits[waiting.operation, waiting.waits_for].append(waiting.rank)
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
