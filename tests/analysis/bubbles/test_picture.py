"""The picture of a step: every moment of every stage is a bar, and each bubble says who is waited for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.analysis.bubbles.simulated import Pipeline, gpipe, one_f_one_b, random_lanes, trace
from tracekit.analysis.bubbles import picture as picture_module
from tracekit.analysis.bubbles.bubbles import find_bubbles
from tracekit.analysis.bubbles.picture import DrawnSchedule, draw_step, summary
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import LayoutError, SelectionError

#: 1F1B of two stages, forwards of 1 s, backwards of 2 s, transfers of 0.25 s; the last forward is launched 0.5 s late.
ORDERS = one_f_one_b(2, 2)
COST = {c: 1.0 if c[0] == "F" else 2.0 for order in ORDERS for c in order}


def small() -> JobReplay:
    lane = Pipeline(ORDERS, COST, lambda _: 0.25, {("F", 1, 1): 0.5}).run()
    return JobReplay.from_trace(trace({(0, 0): lane}))


def rows(picture: DrawnSchedule, stage: int) -> list[tuple[str, float, float, int | None]]:
    bars = sorted((bar for bar in picture.bars if bar.stage == stage), key=lambda bar: bar.start_s)
    return [(bar.what, round(bar.start_s, 9), round(bar.end_s, 9), bar.waits_for) for bar in bars]


def test_a_step_is_drawn_as_worked_out_by_hand() -> None:
    (picture,) = draw_step(small(), 0)
    assert (picture.name, picture.stages, picture.window_s) == ("recorded", 2, pytest.approx(10.0))
    assert rows(picture, 0) == [
        ("forward", 0.0, 1.0, None),
        ("forward", 1.0, 2.0, None),
        ("peer", 2.0, 4.25, 1),
        ("transfer", 4.25, 4.5, 1),
        ("backward", 4.5, 6.5, None),
        ("peer", 6.5, 7.75, 1),
        ("transfer", 7.75, 8.0, 1),
        ("backward", 8.0, 10.0, None),
    ]
    assert [bar.words for bar in picture.bars if bar.what == "host"] == [
        "stage 1 waits for its host, which launches late: 500.0 ms"
    ]
    assert "stage 0 waits for stage 1: 2.25 s" in {bar.words for bar in picture.bars}
    assert "stage 1: backward of microbatch 1: 2.00 s" in {bar.words for bar in picture.bars}


@pytest.mark.parametrize("schedules", [(), ("gpipe", "interleaved:chunks=2", "zb-h1,weight=0.4")])
def test_bars_fill_the_window_of_every_stage_without_overlap(schedules: tuple[str, ...]) -> None:
    lanes = random_lanes(2, gpipe(4, 8))
    for picture in draw_step(JobReplay.from_trace(trace(lanes)), 1, 2, schedules):
        for stage in range(4):
            bars = rows(picture, stage)
            assert bars[0][1] == 0.0
            assert bars[-1][2] == pytest.approx(picture.window_s)
            assert all(one[2] == pytest.approx(other[1]) for one, other in pairwise(bars))


def test_a_picture_shows_what_the_report_says() -> None:
    """One lane: idle time by reason, and the window and the microbatches held under another schedule."""
    lanes = random_lanes(3, one_f_one_b(3, 6), ranks=1, steps=1)
    replay = JobReplay.from_trace(trace(lanes))
    found = find_bubbles(replay, ("gpipe",))
    recorded, other = draw_step(replay, 0, schedules=("gpipe",))
    for reason in ("peer", "transfer", "host"):
        drawn_s = sum(bar.end_s - bar.start_s for bar in recorded.bars if bar.what == reason) / 3
        assert drawn_s == pytest.approx(sum(row.idle_s for row in found.places if row.reason == reason))
    (row,) = found.schedules
    assert other.window_s == pytest.approx(row.window_s)
    assert other.peak_microbatches == max(row.peak_microbatches or [0])


def test_by_default_the_dp_rank_with_the_longest_pipeline_is_drawn() -> None:
    lanes = random_lanes(1, one_f_one_b(3, 3))
    longest = max(range(3), key=lambda d: lanes[1, d].window)
    (picture,) = draw_step(JobReplay.from_trace(trace(lanes)), 1)
    assert picture.window_s == pytest.approx(lanes[1, longest].window)


def test_what_cannot_be_drawn_is_one_error() -> None:
    replay = small()
    with pytest.raises(SelectionError, match="none of these steps is in the job"):
        draw_step(replay, 7)
    with pytest.raises(SelectionError, match="step 0 does not have every compute of DP rank 3"):
        draw_step(replay, 0, 3)
    with pytest.raises(SelectionError, match="not a schedule"):
        draw_step(replay, 0, schedules=("dualpipe",))
    orders = one_f_one_b(3, 4)
    uneven = Pipeline(orders, {c: 1.0 for order in orders for c in order}, lambda _: 0.0).run()
    with pytest.raises(LayoutError, match="4 is not a multiple of pp 3"):
        draw_step(JobReplay.from_trace(trace({(0, 0): uneven})), 0, schedules=("interleaved:chunks=2",))


def test_of_very_many_bars_the_shortest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = draw_step(small(), 0)
    monkeypatch.setattr(picture_module, "MOST_BARS", 5)
    (some,) = draw_step(small(), 0)
    assert some.left_out == len(whole.bars) - 5
    lengths = sorted((bar.end_s - bar.start_s for bar in whole.bars), reverse=True)
    assert sorted((bar.end_s - bar.start_s for bar in some.bars), reverse=True) == pytest.approx(lengths[:5])
    assert summary([some])[-1] == f"the {some.left_out} shortest computes and bubbles are not drawn"
