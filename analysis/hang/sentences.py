"""A report on a hang in sentences, the same in terminal, JSON, dashboard and alerts."""

from __future__ import annotations

from collections import Counter

from tracekit.analysis.hang.model import HangReport, StallClass

_FIRST = {
    StallClass.HOST: "look at its Python stack (py-spy dump --pid PID on its host): it computes, reads or waits there",
    StallClass.DEVICE: "look for Xid errors (dmesg), nvidia-smi and the network card on its host; restart without it",
    StallClass.GONE: "is its process alive? If not: exit code, OOM killer; if so: py-spy dump --native --pid PID",
    StallClass.MISMATCH: "compare the calls below: the program calls collectives in different order or size",
    StallClass.PARTNER: "look for the missing receive in its pipeline schedule",
}


def headline(report: HangReport) -> str:
    """The finding, in one line."""
    seen = f"{report.dumps} of {report.world_size} rank{'s' * (report.world_size != 1)} left a dump"
    if not report.hung:
        return f"NO HANG  no rank waits for another one ({seen})"
    if not report.culprits:
        return f"HANG  {waiting_ranks(len(report.waiting))}; who holds them up is not certain ({seen})"
    held, count = max(one.waiting for one in report.culprits), len(report.culprits)
    stalls = len({one.stall for one in report.culprits})
    apart = f" in {stalls} independent stalls" if stalls > 1 else ""
    verb = "holds" if count == 1 else "hold"
    return f"HANG  {count} rank{'s' * (count != 1)} {verb} up {held} other{'s' * (held != 1)}{apart} ({seen})"


def waiting_ranks(count: int) -> str:
    """The number of waiting ranks, in words."""
    return "1 rank waits" if count == 1 else f"{count:,} ranks wait"


def first_step(report: HangReport) -> str | None:
    """The first action for the most frequent class of the culprits; None if there are none."""
    classes = Counter(one.stall_class for one in report.culprits).most_common(1)
    return _FIRST[classes[0][0]] if classes else None
