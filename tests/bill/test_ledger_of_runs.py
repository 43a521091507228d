"""The verdict of a run is a ledger: whatever windows lost, and whatever their clocks say, its rows sum to the bill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.bill.account import Account, accounted, run_of
from tracekit.costs import USEFUL, BillPart, ClaimedCosts, PlacedLoss
from tracekit.report.conclusions import State
from tracekit.report.finding import LossKind
from tracekit.store import Store

BEGAN_S, GPUS = 1_700_000_000.0, 4
CAUSES = (("slow", LossKind.STRAGGLER, BillPart.STRAGGLERS), ("loader", LossKind.INPUT, BillPart.INPUT))
HOSTS = ("node-a", "node-b")


@st.composite
def losses(draw: st.DrawFn, first: int, steps: int, step_s: float, starts_s: float) -> tuple[PlacedLoss, ...]:
    """At most one of each cause, in a run of the steps, together less than a step."""
    drawn = []
    for cause, kind, part in CAUSES:
        if share := draw(st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.45])):
            begin = draw(st.integers(0, steps - 1))
            end = draw(st.integers(begin, steps - 1))
            rank = draw(st.sampled_from([(), (0,), (1,)]))
            hosts = (draw(st.sampled_from(HOSTS)),) if rank else ()
            since, until = starts_s + begin * step_s, starts_s + (end + 1) * step_s
            loss = PlacedLoss(kind, part, cause, share * step_s, 0.0, None, rank, hosts, first + begin, first + end)
            drawn.append(PlacedLoss(*(getattr(loss, name) for name in loss.__struct_fields__[:10]), since, until))
    return tuple(drawn)


@st.composite
def ledgers(draw: st.DrawFn, folder: Path) -> tuple[Account, float]:
    """A job of windows with gaps, restarts that go back, clocks that jump, and windows that nobody could judge; and the
    seconds that all steps lose.
    """
    rows, costs, at_s, first, attempt = list[dict[str, Any]](), dict[tuple[str, int], ClaimedCosts](), BEGAN_S, 0, 0
    ends = draw(st.sampled_from([None, "ended with exit code 0", "ended with exit code 1"]))
    for number in range(draw(st.integers(1, 6))):
        if number and draw(st.booleans()):
            attempt, first, at_s = attempt + 1, max(first - draw(st.integers(0, 4)), 0), at_s + 5.0
        at_s += draw(st.sampled_from([0.0, 0.0, 3.0]))
        steps, step_s = draw(st.integers(1, 8)), draw(st.sampled_from([0.5, 1.0]))
        clock_s = at_s + draw(st.sampled_from([0.0, 0.0, 0.0, -500.0, 86_400.0]))
        rows.append(
            {
                "job": "job",
                "number": number,
                "first_step": first,
                "last_step": first + steps - 1,
                "steps": steps,
                "recorded_s": step_s,
                "started_at": clock_s,
                "ended_at": clock_s + (steps - 1) * step_s,
                "added_s": at_s + steps * step_s + 1e5,
                "began_s": BEGAN_S - 2,
                "ending": ends,
                "problem": None,
                "watched_until_s": None,
                "world_size": GPUS,
                "metadata": json.dumps({"attempt": attempt}),
            }
        )
        doubt = draw(st.sampled_from([None, None, None, "the replay misses"]))
        drawn = () if doubt else draw(losses(first, steps, step_s, clock_s))
        planned = dict.fromkeys((BillPart.CHECKPOINTS, BillPart.EVALUATION, BillPart.INPUT), 0.0)
        costs["job", number] = ClaimedCosts(planned, drawn, (USEFUL,), GPUS, None, doubt)
        at_s, first = at_s + steps * step_s, first + steps
    if ends is not None:
        rows = [row | {"watched_until_s": at_s + 1e5 + 2} for row in rows]
    lost_s = sum(row["steps"] * loss.seconds for row in rows for loss in costs["job", row["number"]].losses)
    return accounted(Store(folder / "none.store"), rows, costs), lost_s


@examples(200)
@given(data=st.data())
def test_every_lost_hour_has_cause_place_from_to_and_state_and_is_on_the_bill(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    account, lost_s = data.draw(ledgers(tmp_path_factory.getbasetemp()))
    run, bill = run_of(account), account.bill
    assert bill.rows["seconds"].min() > 0
    assert bill.rows["seconds"].sum() == pytest.approx(run.wall_s)
    assert run.lost_share <= run.covered_share + 1e-9 <= 1 + 2e-9
    by_cause = dict(bill.rows.group_by("cause").agg(pl.col("gpu_hours").sum()).iter_rows())
    billed = {cause: by_cause.get(cause, 0.0) for cause, *_ in CAUSES}
    for cause in run.causes:
        assert cause.cause in billed
        assert bool(cause.ranks) == bool(cause.hosts)
        assert cause.first_step is not None
        assert cause.last_step is not None
        assert run.first_step <= min(cause.first_step, cause.last_step)
        assert max(cause.first_step, cause.last_step) <= run.last_step
        if cause.since is not None and cause.until is not None:
            assert cause.since < cause.until
        assert cause.state in ((State.OPEN, State.OVER) if run.ended is None else (State.OVER, State.ENDED))
        assert 1 <= cause.windows <= cause.windows + cause.clear_windows <= run.windows
        billed[cause.cause] -= (cause.lost_s - cause.redone_s) * GPUS / 3600
    assert billed == pytest.approx(dict.fromkeys(billed, 0.0), abs=1e-9)
    assert run.gpu_hours_lost == pytest.approx(run.lost_s * GPUS / 3600)
    assert run.lost_s == pytest.approx(lost_s)
    assert by_cause.get("lost work", 0.0) + by_cause.get("kept or lost: no checkpoint shows it", 0.0) >= (
        sum(cause.redone_s for cause in run.causes) * GPUS / 3600 - 1e-9
    )
