"""Rows and tables of a recording of GPUs: who waits for whom, which kernels take the time.

In: what was recorded. Out: tables of words, and rows of a report.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from tracekit.analysis.gpu.recorded import Recorded
from tracekit.base.text import seconds, short
from tracekit.report.rows import Kernels, OnPath
from tracekit.report.section import Table

#: The most rows of waits, and of kernels of no class.
MOST_WAITS, _MOST_KERNELS = 8, 5
WIDEST_NAME = 40


def shortened(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int) -> Table:
    """A table of the first `most` rows."""
    note = f"the costliest {most} of {len(rows)}; all with --json" if len(rows) > most else None
    return Table(title, heads, tuple(rows[:most]), note)


def waits_table(recorded: Recorded) -> Table:
    """Which rank waits for which, longest first."""
    rows = [
        (f"rank {rank}", f"rank {other}", seconds(waited), short(group))
        for waited, rank, other, group in sorted(recorded.waits.each(), reverse=True)
    ]
    return shortened("Waits", ("waits", "for", "in collectives", "group"), rows, MOST_WAITS)


def on_path(label: str, name: str | None, recorded_s: float) -> OnPath:
    """A row of the critical path. `label`: what its ops differ by, "kind" or "peer"; `name`: None for delays."""
    return OnPath(kind=name, recorded_s=recorded_s) if label == "kind" else OnPath(peer=name, recorded_s=recorded_s)


def kernel_rows(kernels: pl.DataFrame) -> list[Kernels]:
    """The rows of a frame of kernels, as a report has them."""
    return [Kernels(**row) for row in kernels.iter_rows(named=True)]


def kernels_table(recorded: Recorded) -> Table:
    """Time by class of kernels, and the longest kernels of no class."""
    times, unknown = recorded.kernel_time, recorded.unknown_kernels.head(_MOST_KERNELS)
    total = float(times["seconds"].sum()) or 1.0
    named = [
        *times.iter_rows(),
        *((f"  {short(name, WIDEST_NAME)}", ops, spent) for name, ops, spent in unknown.iter_rows()),
    ]
    rows = tuple((name, f"{ops:,}", seconds(spent), f"{spent / total * 100:.0f}%") for name, ops, spent in named)
    return Table("Kernels", ("Kernels", "ops", "time", "share"), rows)
