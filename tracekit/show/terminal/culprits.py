"""The ranks that hold a job up, one per line.

In: rows as in the JSON of a report (`answer.culprits`). Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tracekit.base.text import percent_sure, seconds, short
from tracekit.show.terminal.tables import new_table


def print_culprits(culprits: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print each culprit with its node, what is slow, its cost per step, the confidence, and since when."""
    table = new_table("Rank", "host", "slow", "costs a step", "sure", "since")
    for row in culprits:
        unrecorded = f"worker ({row['dp_rank']},{row['pp_rank']})"
        confidence, first = row["confidence"], row["first_step"]
        table.add_row(
            unrecorded if row["rank"] is None else str(row["rank"]),
            Text("unknown" if row["host"] is None else short(row["host"])),
            str(row["part"]),
            seconds(row["cost_s"]),
            "-" if confidence is None else percent_sure(confidence),
            "-" if first is None else f"step {first}",
        )
    console.print(table)
