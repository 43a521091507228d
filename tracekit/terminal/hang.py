"""The report on a hang, as a person reads it in a terminal of 80 columns: who, why, what to do first; then the rest."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tracekit.analysis.hang import Culprit, HangReport, StallClass
from tracekit.text import printable

_COLUMNS = 80
#: Culprits in the first ten lines; the others follow.
_AT_THE_TOP = 3
_LISTED = 16

_FIRST = {
    StallClass.HOST: "look at its Python stack (py-spy dump --pid PID on its host): it computes, reads or waits there",
    StallClass.DEVICE: "look for Xid errors (dmesg), nvidia-smi and the network card on its host; restart without it",
    StallClass.GONE: "does its process live? If not: exit code, OOM killer; if so: py-spy dump --native --pid PID",
    StallClass.MISMATCH: "compare the calls below: the program calls collectives in different order or size",
    StallClass.PARTNER: "look for the missing receive in its pipeline schedule",
}


def report_lines(report: HangReport) -> Iterator[str]:
    """The report; the first ten lines say who, why and what to do first."""
    yield from _headline(report)
    for culprit in report.culprits[:_AT_THE_TOP]:
        yield from _culprit(culprit)
    for question in report.undecided[: max(_AT_THE_TOP - len(report.culprits), 1)]:
        yield from _wrapped(f"cannot tell which of {ranks_text(question.ranks)}: {question.missing}", "  ")
    yield from _first_step(report)
    yield from _rest(report)


def _headline(report: HangReport) -> Iterator[str]:
    seen = f"{report.dumps} of {report.world_size} ranks left a dump"
    if not report.hung:
        yield f"NO HANG  no rank waits for another one ({seen})"
    elif report.culprits:
        held = max(one.waiting for one in report.culprits)
        count = len(report.culprits)
        stalls = len({one.stall for one in report.culprits})
        apart = f" in {stalls} independent stalls" if stalls > 1 else ""
        verb = "holds" if count == 1 else "hold"
        yield f"HANG  {count} rank{'s' * (count != 1)} {verb} up {held} other{'s' * (held != 1)}{apart} ({seen})"
    else:
        yield f"HANG  {len(report.waiting)} ranks wait; who holds them up is not certain ({seen})"


def _culprit(one: Culprit) -> Iterator[str]:
    host = f" on {one.host}" if one.host else ""
    phase = f", in {one.phase}" if one.phase else ""
    yield from _wrapped(f"rank {one.rank}{host}: {one.stall_class}{phase}", "  ", limit=1)
    yield from _wrapped("; ".join(one.evidence), "    ", limit=2 if one.stall_class is not StallClass.MISMATCH else 8)


def _first_step(report: HangReport) -> Iterator[str]:
    for stall_class, count in Counter(one.stall_class for one in report.culprits).most_common(1):
        if count:
            yield from _wrapped(f"First: {_FIRST[stall_class]}", "", limit=2)


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
    yield from _stacks(report.culprits)
    yield from _waiting(report)
    silent = [rank for rank in report.without_dump if rank not in {one.rank for one in report.culprits}]
    if silent and report.hung:
        yield ""
        yield from _wrapped(
            f"No dump of {ranks_text(silent)}: whether they hang too or merely wait cannot be told without it.", ""
        )
    if report.notes:
        yield ""
        for note in report.notes[:_LISTED]:
            yield from _wrapped(f"Note: {note}", "")


def _stacks(culprits: Iterable[Culprit]) -> Iterator[str]:
    """Equal stacks once."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for one in culprits:
        if one.stack:
            groups[one.stack].append(one.rank)
    for stack, ranks in sorted(groups.items(), key=lambda pair: len(pair[1])):
        yield ""
        yield f"Stack of {ranks_text(ranks)}, innermost first"
        for frame in stack[:8]:
            shown = printable(frame)
            yield f"  {shown if len(shown) <= _COLUMNS - 2 else '...' + shown[5 - _COLUMNS :]}"


def _waiting(report: HangReport) -> Iterator[str]:
    if not report.waiting:
        return
    yield ""
    yield f"{len(report.waiting)} ranks wait"
    waits: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for one in report.waiting:
        waits[one.operation, one.waits_for].append(one.rank)
    for (operation, held), ranks in sorted(waits.items(), key=lambda pair: (-len(pair[1]), pair[1]))[:_LISTED]:
        held_up = f" for {ranks_text(held)}" if held else ""
        yield from _wrapped(f"{ranks_text(ranks)} in {operation}{held_up}", "  ", limit=2)
    if len(waits) > _LISTED:
        yield f"  and {len(waits) - _LISTED} more (--json lists all)"


def ranks_text(ranks: Iterable[int]) -> str:
    """`ranks 0-3, 8`, cut where there are many."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    count = sum(end - begin + 1 for begin, end in runs)
    shown = ", ".join(f"{begin}" if begin == end else f"{begin}-{end}" for begin, end in runs[:6])
    return f"rank{'s' * (count != 1)} {shown}{', ...' if len(runs) > 6 else ''}"


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
