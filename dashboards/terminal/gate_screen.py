"""A gate's verdict in a terminal.

In: a `Gate`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tracekit.analysis.attribution.gate import SLOWER, Gate, Outcome, percent
from tracekit.base.text import counted
from tracekit.dashboards.documents.gate_files import gate_table
from tracekit.dashboards.terminal.colours import BAD, GOOD, UNSURE
from tracekit.dashboards.terminal.tables import labelled, print_next, section_table

_STYLE = {
    Outcome.PASSED: GOOD,
    Outcome.REGRESSION: BAD,
    Outcome.SLOWER: BAD,
    Outcome.CANNOT_TELL: UNSURE,
}
#: Longer names of parts are cut.
_LONGEST_NAME = 30


def print_gate(gate: Gate, console: Console, run: str) -> None:
    """Print the verdict. `run`: the arguments that name the run."""
    console.print(Text.assemble((str(gate.outcome).upper(), _STYLE[gate.outcome]), f": {gate.sentence}"))
    console.print()
    console.print(section_table(gate_table(gate, _LONGEST_NAME)))
    console.print()
    steps = " and ".join(counted(side.steps, "step") for side in (gate.baseline, gate.run))
    if gate.baseline.runs > 1:
        steps = f"{gate.baseline.runs} baselines of {steps}"
    if gate.noise is not None:
        steps += f"; identical runs differ by up to {percent(gate.noise)}"
    rows = [("Limit", percent(gate.limit)), ("Noise", f"99% interval of all changes together, from {steps}")]
    console.print(labelled([*rows, *(("Note", note) for note in gate.notes)]))
    if gate.outcome in SLOWER:
        print_next([f"tracekit whatif {run}"], console)
