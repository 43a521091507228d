"""Short screens of the terminal: what changed between two runs, the verdict of a gate, and the bill of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from typing import Any

import polars as pl
from rich.console import Console
from rich.text import Text

from tracekit.analysis.attribution.gate import SLOWER, Gate, Outcome, percent
from tracekit.base.text import counted, printable, short, three_digits
from tracekit.bill.ledger import Bill
from tracekit.costs import BillPart
from tracekit.costs.of_report import NOT_TRUSTED, PART_OF
from tracekit.dashboards.documents.markdown import gate_table
from tracekit.dashboards.terminal.tables import BAD, GOOD, UNSURE, labelled, new_table, print_next, section_table
from tracekit.dashboards.words import cause_sentence, trust_row
from tracekit.report.compare import ChangeEffect, Side, rates
from tracekit.report.comparison import Comparison
from tracekit.report.finding import kind_words
from tracekit.report.findings import AppliedFix

_STYLE = {
    **dict.fromkeys((ChangeEffect.BETTER, Outcome.PASSED), GOOD),
    **dict.fromkeys((ChangeEffect.WORSE, Outcome.REGRESSION, Outcome.SLOWER), BAD),
}
#: The number of causes of a kind to list.
_MOST_CAUSES = 4


def print_comparison(
    comparison: Comparison, console: Console, *, commands: Sequence[str], fix: AppliedFix | None = None
) -> None:
    """Print what changed. `commands`: what to type next. `fix`: the one that B has."""
    console.print(_side_text("A", comparison.before))
    console.print(_side_text("B", comparison.after))
    console.print()
    verdict, output = comparison.effect, comparison.output
    outcome = (str(verdict.outcome).upper(), _STYLE.get(verdict.outcome, UNSURE))
    console.print(Text.assemble(outcome, f": {verdict.change}"))
    console.print()
    rows: list[tuple[str, str | None]] = [("Sure", verdict.certainty), ("Cost", output.cost)]
    rows += [("Fix", f"{fix.title}: {fix.outcome}")] if fix else []
    rows += _causes("Gone", output.causes.gone, "no cause went away")
    rows += _causes("New", output.causes.new, "no cause is new")
    rows += _causes("Stays", output.causes.staying, None)
    rows += [
        ("Rate", rates(comparison.before.tokens_per_s, comparison.after.tokens_per_s)),
        ("Ops", output.kinds),
        trust_row(output.trust, trustworthy=output.trustworthy),
    ]
    rows += [("" if number else "Note", note) for number, note in enumerate(verdict.notes)]
    console.print(labelled(rows))
    print_next(commands, console)


def _side_text(name: str, side: Side) -> Text:
    steps = f", {counted(len(side.steps) * side.steps_each, 'step')}" if side.whole == "step" else ""
    return Text.assemble((f"{name}  ", "bold"), (short(side.job), "bold"), (f"   {side.sizes}{steps}", "dim"))


def _causes(name: str, causes: Sequence[str], none: str | None) -> list[tuple[str, str | None]]:
    rows: list[tuple[str, str | None]] = [
        (name if index == 0 else "", cause) for index, cause in enumerate(causes[:_MOST_CAUSES])
    ]
    if len(causes) > _MOST_CAUSES:
        rows.append(("", f"and {len(causes) - _MOST_CAUSES} more; all with --json"))
    return rows or [(name, none)]


#: Longer names of parts are cut.
_LONGEST_METRIC = 30


def print_gate(gate: Gate, console: Console, run: str) -> None:
    """Print the verdict. `run`: the arguments that name the run."""
    console.print(Text.assemble((str(gate.outcome).upper(), _STYLE.get(gate.outcome, UNSURE)), f": {gate.sentence}"))
    console.print()
    console.print(section_table(gate_table(gate, _LONGEST_METRIC)))
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


#: Longer names are cut.
_LONGEST_CAUSE = 46
#: The rows of what has no team, or no time.
_WITHOUT = {"team": "no team", "week": "no date"}
#: Parts that fixing their cause wins back.
_LOSSES = sorted({*PART_OF.values()} - {BillPart.EVALUATION})


def print_bill(bill: Bill, console: Console, by: str, gpu_hour: float | None, next_command: str) -> None:
    """Print the totals of each part, cause, week, team or job; what is unknown, with each reason. `gpu_hour`: the price
    of a GPU-hour, in any currency. `next_command`: what says more about the job that lost most.
    """
    console.print(Text(headline(bill), style="bold"))
    console.print(labelled(_worst(bill, gpu_hour)))
    console.print()
    totals, hours = bill.by(by), sum(bill.wall_s.values()) / 3600
    if by == "part":  # the unknown is the last part
        unknown = pl.col("part") == BillPart.UNKNOWN
        totals = pl.concat([totals.remove(unknown), bill.by("cause").filter(unknown)], how="diagonal")
    by_part = by in ("part", "cause")
    heads = [by, "hours", "GPU-hours", "share" if by_part else "useful", *(["cost"] if gpu_hour is not None else [])]
    table = new_table(*heads)
    table.columns[0].no_wrap = True

    def add(name: str, row: Mapping[str, Any], whole: float | None) -> None:
        gpu_hours, spent = row["gpu_hours"], row["spent"] if by_part else row["useful"]
        share = spent and spent / (whole or 1.0)
        money = "-" if gpu_hours is None else f"{gpu_hours * (gpu_hour or 0.0):,.2f}"
        table.add_row(
            Text(short(name, _LONGEST_CAUSE)),
            three_digits(row["hours"]),
            "-" if gpu_hours is None else three_digits(gpu_hours),
            "-" if share is None else f"{share:.1%}",
            *([] if gpu_hour is None else [money]),
        )

    for row in totals.iter_rows(named=True):
        name = _WITHOUT[by] if row[by] is None else row[by]
        if row.get("cause"):
            name = f"{row['part']}: {kind_words(row['cause'])}"
        add(name, row, bill.total if by_part else row["spent"])
    useful = float(totals["useful"].sum())
    whole = {"hours": hours, "gpu_hours": bill.gpu_hours, "spent": bill.total, "useful": useful}
    add("wall clock", whole, bill.total)
    console.print(table)
    if bill.notes:
        console.print()
        console.print(labelled(("Note", printable(note)) for note in bill.notes))
    console.print(Text.assemble("\n", ("Next   ", "bold"), next_command), soft_wrap=True)


def headline(bill: Bill) -> str:
    """The useful share, and the largest other part: "84% of 0.00435 GPU-hours were useful; ..."."""
    total = bill.total
    spent = dict(bill.by("part").drop_nulls("spent").select("part", "spent").rows())
    parts = {part: spent[part] / total if total else 0.0 for part in spent}
    words = f"{parts.pop(BillPart.USEFUL, 0.0):.0%} of {three_digits(total)} {bill.unit} were useful"
    largest = max(parts, key=lambda part: parts[part], default=None)
    return words if largest is None else f"{words}; the largest other part is {largest}, {parts[largest]:.0%}"


def _worst(bill: Bill, gpu_hour: float | None) -> Iterator[tuple[str, str]]:
    """Yield the cause that cost most, with its place and its times where these are known, and the bill without it."""
    cost = _costliest_of_runs(bill) or _costliest_of_rows(bill)
    if cost is None:
        return
    words, saved = cost
    if saved is None:
        yield "Worst", words
        return
    useful = float(bill.by("part").filter(part=BillPart.USEFUL)["spent"].sum())
    money = ""
    if gpu_hour is not None and bill.gpu_hours is not None:
        money = f", {saved * gpu_hour:,.2f} less at {gpu_hour:g} a GPU-hour"
    before, after = (
        (three_digits(spent), f"{useful / spent:.0%}" if spent > 0 else "")
        for spent in (bill.total, bill.total - saved)
    )
    trend = f"; {before[1]} to {after[1]} useful" if after[1] not in ("", before[1]) else ""
    yield "Worst", words
    if after[0] != before[0] or trend:
        yield "Without", f"{before[0]} to {after[0]} {bill.unit}{money}{trend}"


def _costliest_of_runs(bill: Bill) -> tuple[str, float | None] | None:
    """The sentence about the costliest cause of all jobs, and what the bill would be less without it, in the unit of
    the bill; None if no cause stands out.
    """
    in_hours = bill.gpu_hours is None
    worst = [(run.alarming[0], job, run) for job, run in bill.runs.items() if run.alarming]
    costs = [(cause.lost_s / 3600 if in_hours else cause.gpu_hours_lost, cause, job, run) for cause, job, run in worst]
    counted = [(lost, cause, job, run) for lost, cause, job, run in costs if lost is not None]
    if not counted:
        return None
    _, cause, job, run = max(counted, key=lambda cost: cost[0])
    prefix = f"{short(job)}: " if len(bill.wall_s) > 1 else ""
    saved = cause.gpu_hours_saved
    if in_hours and cause.saved_s is not None:
        saved = cause.saved_s / 3600
    return f"{prefix}{cause_sentence(cause, UTC, run)}", saved


def _costliest_of_rows(bill: Bill) -> tuple[str, float | None] | None:
    """The same of a bill without places: the costliest cause of a loss. Its rows do not say what a cause that overlaps
    with others cost by itself. None if more went to steps whose analysis is not trusted: any cause may have cost that.
    """
    untrusted = bill.by("cause").filter(part=NOT_TRUSTED[0], cause=NOT_TRUSTED[1])["spent"].sum()
    losses = bill.by("cause").filter(pl.col("part").is_in(_LOSSES)).sort("spent", descending=True)
    if losses.is_empty():
        return None
    cause, lost = losses.select("cause", "spent").row(0)
    if lost < untrusted:
        return None
    return f"{kind_words(cause)}, {three_digits(lost)} {bill.unit}", None if cause in bill.overlapping else lost
