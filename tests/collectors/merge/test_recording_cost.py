"""What recording costs: hand-made step times, with hooks and without."""

from pathlib import Path

import numpy as np
import pytest

from tracekit.collectors.merge.run_facts import RecordingCost, recording_cost
from tracekit.collectors.record.wire_format import Category, Flag, RecordingSchedule
from tracekit.collectors.run_directory.segments import RECORD_DTYPE, AttemptRecording, RankRecording

MS = 1_000_000


def recording(*ranks: list[float], on) -> AttemptRecording:
    """Ranks whose step number n took ranks[...][n] ms and was recorded where `on(n)`."""
    made = {}
    for rank, took_ms in enumerate(ranks):
        records = np.zeros(len(took_ms), RECORD_DTYPE)
        ends = np.cumsum(took_ms) * MS
        records["category"], records["step"] = Category.STEP, range(len(took_ms))
        records["flags"] = [Flag.COMPLETE | (Flag.RECORDING if on(step) else 0) for step in range(len(took_ms))]
        records["start_ns"], records["end_ns"] = ends - np.array(took_ms) * MS, ends
        made[rank] = RankRecording(rank, records, {}, {})
    return AttemptRecording(0, Path(), made)


def test_the_cost_of_each_block_is_that_beside_its_neighbours():
    """Steps take 10 ms and become 1 % longer every 20 steps; recorded ones take 10 % more. Three ranks, one slow."""
    schedule = RecordingSchedule(first_step=1, every=20, length=10)
    took_ms = [10 * 1.01 ** (step // 20) * (1.1 if schedule.records(step) else 1) for step in range(400)]
    cost = recording_cost(recording(took_ms, took_ms, [5 * one for one in took_ms], on=schedule.records))
    assert isinstance(cost, RecordingCost)
    assert cost.share == pytest.approx(0.1, abs=0.006)
    assert cost.error < 0.006
    assert (cost.on_steps, cost.off_steps) == (20 * 9, 19 * 9 + 8)
    assert "(180 recorded steps against those before and after, of 179 without)" in cost.sentence()


def test_a_step_is_measured_in_seconds():
    """Steps of 10 ms take 11 ms where two in ten are recorded; of each two, the first is not compared."""
    on = RecordingSchedule(first_step=1, every=10, length=2).records
    cost = recording_cost(recording([11.0 if on(step) else 10.0 for step in range(100)], on=on))
    assert isinstance(cost, RecordingCost)
    assert (cost.off_s, cost.error, cost.on_steps) == (pytest.approx(0.01), pytest.approx(0), 10)
    assert cost.share == pytest.approx(0.1)
    assert cost.sentence().startswith("recording costs 10.0% +- 0.0% of a step of 10.00 ms (10 recorded steps against")


def test_the_error_is_what_steps_without_recording_vary_by():
    """Recording that costs nothing stays within three errors; 2 % of noise leave no room for a claim of less."""
    noise = np.random.default_rng(0).normal(1, 0.02, 600)
    cost = recording_cost(recording(list(10 * noise), on=lambda step: 500 <= step < 506))
    assert isinstance(cost, RecordingCost)
    assert abs(cost.share) < 3 * cost.error
    assert 0.005 < cost.error < 0.02  # 2 % over the root of five steps, and as much of their neighbours'


def test_why_the_cost_is_not_known():
    for steps, on, why in (
        (100, lambda step: step >= 0, "0 steps ran without it, 7 are needed"),
        (9, lambda step: step >= 6, "5 steps ran without it, 7 are needed"),
        (100, lambda step: step < 0, "no two steps in a row were recorded"),
        (100, lambda step: step % 2 == 1, "(with `--every N`, use `--for 2` or more)"),
    ):
        assert why in str(recording_cost(recording([10.0] * steps, on=on)))
