"""Timelines as frames: the recording and its replays, op by op."""

from __future__ import annotations

import polars as pl

from tests.handmade import slow_trace
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL
from tracekit.analysis.whatif.timeline import compared_frame, recorded_frame, timeline_frame


def test_the_compared_frame_is_the_recording_and_both_replays_side_by_side() -> None:
    replay = JobReplay.from_trace(slow_trace())
    compared = compared_frame(replay)
    frames = {"recorded": recorded_frame(replay)}
    frames |= {"original": timeline_frame(replay, ORIGINAL), "ideal": timeline_frame(replay, IDEAL)}
    for name, frame in frames.items():
        assert compared[f"{name}_start"].to_list() == frame["start"].to_list()
        assert compared[f"{name}_duration"].to_list() == frame["duration"].to_list()
    forward = compared.filter(pl.col("kind") == "forward-compute")
    assert set(forward["ideal_cost"].round(12)) == {1.25}
    assert compared["launch_delay"].abs().max() == 0.0
