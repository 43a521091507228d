"""Traces recorded with wrong clocks."""

from __future__ import annotations

import polars as pl
import pytest

from benchmarks.clocks import ClockOutcome, Wrong, recorded_with
from tests.handmade import slow_trace
from tracekit.trace.canonical import Trace


def starts_of(trace: Trace, dp_rank: int, pp_rank: int, step: int) -> list[float]:
    mine = (pl.col("dp_rank") == dp_rank) & (pl.col("pp_rank") == pp_rank) & (pl.col("step") == step)
    return trace.ops.filter(mine)["start"].to_list()


def test_a_wrong_clock_moves_the_starts_of_its_worker_alone() -> None:
    right = slow_trace((0, 1))
    wrong = recorded_with(right, [Wrong((1, 0), offset_s=0.5, jump_s=2.0, jump_at=1)])
    assert starts_of(wrong, 1, 0, 0) == pytest.approx([start + 0.5 for start in starts_of(right, 1, 0, 0)])
    assert starts_of(wrong, 1, 0, 1) == pytest.approx([start + 2.5 for start in starts_of(right, 1, 0, 1)])
    assert starts_of(wrong, 0, 0, 1) == starts_of(right, 0, 0, 1)
    assert wrong.ops["duration"].equals(right.ops["duration"])


def test_a_trusted_report_with_another_slowdown_misleads() -> None:
    """0.5 % of 1.2 is 0.006."""
    for slowdown, trusted, misled in ((1.204, True, False), (1.21, True, True), (1.21, False, False)):
        outcome = ClockOutcome("job", "offset", (), 1.2, slowdown, trusted, trusted_before=True)
        assert outcome.misled is misled, (slowdown, trusted)
