"""A bill in the terminal: what it leaves out."""

from __future__ import annotations

from msgspec.structs import replace
from rich.console import Console

from tracekit.bill.ledger import Bill, Ledger
from tracekit.costs import BillPart
from tracekit.dashboards.terminal.verdicts import print_bill
from tracekit.report.conclusions import RunCause, RunVerdict, State
from tracekit.report.finding import LossKind


def screen(bill: Bill) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        print_bill(bill, console, "part", None, "tracekit bill")
    return "\n".join(map(str.rstrip, capture.get().splitlines()))


def bill(useful_s: float, stragglers_s: float, rest_s: float) -> Bill:
    """One GPU that works, waits for a straggler, and spends the rest unexplained."""
    ledger = Ledger("job", None, None)
    parts = ((BillPart.USEFUL, "training", useful_s), (BillPart.STRAGGLERS, "slow-worker", stragglers_s))
    whole_s = useful_s + stragglers_s + rest_s
    ledger.add_one(0.0, whole_s, 1, *parts, (BillPart.UNKNOWN, "unknown", rest_s))
    return ledger.bill(whole_s)


def test_the_useful_share_without_the_worst_cause_is_left_out_where_it_stays_the_same() -> None:
    assert "Without  2 to 1 GPU-hours; 25% to 50% useful\n" in screen(bill(1800, 3600, 1800))
    assert "Without  10 to 9.98 GPU-hours\n" in screen(bill(2880, 72, 33048))


def test_a_cause_without_which_the_bill_is_the_same_has_no_line_about_that() -> None:
    shown = screen(bill(2880, 3.6, 33116.4))
    assert "Worst" in shown
    assert "Without" not in shown


def test_no_cause_is_the_worst_where_more_went_to_steps_that_are_not_trusted() -> None:
    for untrusted_s, is_told in ((3600.0, True), (3601.0, False)):
        ledger = Ledger("job", None, None)
        parts = ((BillPart.INPUT, "input", 3600.0), (BillPart.UNKNOWN, "analysis not trusted", untrusted_s))
        ledger.add_one(0.0, 10_000.0, 1, *parts, (BillPart.USEFUL, "training", 6400.0 - untrusted_s))
        assert ("Worst    input, 1 GPU-hours" in screen(ledger.bill(10_000.0))) == is_told


def test_a_cause_that_overlaps_is_told_with_what_it_cost_by_itself_and_the_bill_is_without_only_that() -> None:
    """Of 2 hours, 1 is billed to a cause without which alone the run had taken half an hour less."""
    billed = bill(1800, 3600, 1800)
    cause = RunCause(
        LossKind.STRAGGLER, "slow-worker", (1,), (), 3600.0, 0.5, 1.0, 0, 9, None, None, State.OVER, 1, 0, 0.5, 0.0,
        saved_s=1800.0, gpu_hours_saved=0.5,
    )  # fmt: skip
    run = RunVerdict(0, 9, 1, 7200.0, 1.0, 7200.0, 3600.0, 0.5, 1.0, [cause], None, ())
    shown = screen(replace(billed, runs={"job": run}))
    assert "Worst    rank 1 cost 50.0% of the run, 25.0% by itself, steps 0 to 9\n" in shown
    assert "Without  2 to 1.5 GPU-hours; 25% to 33% useful\n" in shown
    assert "Without" not in screen(replace(billed, overlapping={"slow-worker"}))
