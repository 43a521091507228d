"""What changed between two runs, as a person reads it in a terminal.

In: a `Comparison`. Out: what rich prints; every sentence comes from the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tracekit.base.text import counted, short
from tracekit.dashboards.terminal.colours import BAD, GOOD, UNSURE
from tracekit.dashboards.terminal.tables import labelled, print_next
from tracekit.dashboards.words import trust_row
from tracekit.report.applied import AppliedFix
from tracekit.report.compare import ChangeEffect, Side, rates
from tracekit.report.comparison import Comparison

_STYLE = {ChangeEffect.BETTER: GOOD, ChangeEffect.WORSE: BAD}
#: The number of causes of a kind to list.
_MOST_CAUSES = 4


def print_comparison(
    comparison: Comparison, console: Console, *, commands: Sequence[str], fix: AppliedFix | None = None
) -> None:
    """Print what changed. `commands`: what to type next. `fix`: the one that B has."""
    console.print(_side("A", comparison.before))
    console.print(_side("B", comparison.after))
    console.print()
    verdict = comparison.verdict
    outcome = (str(verdict.outcome).upper(), _STYLE.get(verdict.outcome, UNSURE))
    console.print(Text.assemble(outcome, f": {verdict.change}"))
    console.print()
    rows: list[tuple[str, str | None]] = [("Sure", verdict.certainty), ("Cost", comparison.cost)]
    rows += [("Fix", f"{fix.title}: {fix.outcome}")] if fix else []
    rows += _causes("Gone", comparison.gone, "no cause went away")
    rows += _causes("New", comparison.new, "no cause is new")
    rows += _causes("Stays", comparison.staying, None)
    rows += [
        ("Rate", rates(comparison.before.tokens_per_s, comparison.after.tokens_per_s)),
        ("Ops", comparison.kinds),
        trust_row(comparison.trust, trustworthy=comparison.before.trustworthy and comparison.after.trustworthy),
    ]
    rows += [("" if number else "Note", note) for number, note in enumerate(verdict.notes)]
    console.print(labelled(rows))
    print_next(commands, console)


def _side(name: str, side: Side) -> Text:
    steps = f", {counted(len(side.steps) * side.steps_each, 'step')}" if side.whole == "step" else ""
    return Text.assemble((f"{name}  ", "bold"), (short(side.job), "bold"), (f"   {side.sizes}{steps}", "dim"))


def _causes(name: str, causes: Sequence[str], none: str | None) -> list[tuple[str, str | None]]:
    """A row per cause, with the name in the first one."""
    shown: list[tuple[str, str | None]] = [
        (name if at == 0 else "", cause) for at, cause in enumerate(causes[:_MOST_CAUSES])
    ]
    if len(causes) > _MOST_CAUSES:
        shown.append(("", f"and {len(causes) - _MOST_CAUSES} more; all with --json"))
    return shown or [(name, none)]
