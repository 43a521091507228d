"""The Chrome export: valid JSON, one slice per op and timeline, at the times of the replay, on the right track."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.analysis.rl.logs import lines, write
from tests.analysis.whatif.test_peers import op_job
from tests.handmade import LAYOUT, OPS_PER_STEP, slow_frame, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.job.rl_job import RlJob
from tracekit.base.errors import SelectionError
from tracekit.trace.canonical import Trace
from tracekit.trace.chrome import STREAMS
from tracekit.trace.model import KINDS, OpKind

TIMELINES = ("recorded", "original", "ideal")


def exported(job: PipelineJob, path: Path, **options: Any) -> dict[str, Any]:
    job.export(path, **options)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def slices(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def process_names(content: dict[str, Any]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"}


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """The slow job, steps 2 and 5, exported whole."""
    return exported(PipelineJob(slow_trace((2, 5))), tmp_path / "out.json.gz")


def slice_of(content: dict[str, Any], process: str, kind: str, step: int, seq: int) -> dict[str, Any]:
    names = process_names(content)
    found = [
        event
        for event in slices(content)
        if names[event["pid"]].startswith(process)
        and event["name"] == kind
        and (event["args"]["step"], event["args"]["seq"]) == (step, seq)
    ]
    assert len(found) == 1
    return found[0]


def test_every_op_is_one_slice_in_each_timeline(content: dict[str, Any]) -> None:
    names = process_names(content)
    keys = [
        (names[event["pid"]], event["name"], event["args"]["step"], event["args"]["seq"]) for event in slices(content)
    ]
    assert len(keys) == len(set(keys)) == 3 * 2 * OPS_PER_STEP
    for timeline in TIMELINES:
        assert sum(name.startswith(f"{timeline}: ") for name, *_ in keys) == 2 * OPS_PER_STEP


def test_arrows_follow_the_critical_path_of_each_timeline(content: dict[str, Any]) -> None:
    """Each leaves where a slice ends and arrives within another one that does not end before; in the recording they
    pass through the slow worker's backwards.
    """
    arrows = [event for event in content["traceEvents"] if event["name"] == "critical path"]
    by_id = {event["id"]: event for event in arrows if event["ph"] == "f"}
    ends = {(one["pid"], one["tid"], round(one["ts"] + one["dur"], 3)) for one in slices(content)}
    spans = [(one["pid"], one["tid"], one["ts"], one["ts"] + one["dur"]) for one in slices(content)]
    assert len(arrows) == 2 * len(by_id)
    names = process_names(content)
    for leaving in (event for event in arrows if event["ph"] == "s"):
        arriving = by_id[leaving["id"]]
        assert (leaving["pid"], leaving["tid"], round(leaving["ts"], 3)) in ends
        assert arriving["ts"] >= leaving["ts"] - 1e-3
        assert any(
            (pid, tid) == (arriving["pid"], arriving["tid"]) and first - 1e-3 <= arriving["ts"] <= last + 1e-3
            for pid, tid, first, last in spans
        )
    for timeline in TIMELINES:
        assert any(names[event["pid"]].startswith(timeline) for event in arrows)
    backward = slice_of(content, "recorded: dp 1 pp 0", "backward-compute", 2, 1)
    assert any(
        (event["pid"], event["tid"]) == (backward["pid"], backward["tid"])
        and event["ts"] == pytest.approx(backward["ts"] + backward["dur"])
        for event in arrows
        if event["ph"] == "s"
    )


def test_times_are_those_worked_out_by_hand(content: dict[str, Any]) -> None:
    """Microseconds. The second backward of worker (1,0): 10.25 to 14.25 s as it ran, 9.75 to 12.25 s in the ideal job.

    Step 5 begins 1 ms after step 2 has ended in the slowest timeline, at 15.501 s, in all three of them.
    """
    assert content["otherData"]["step_starts_us"] == {"2": 0.0, "5": 15.501e6}
    for timeline, start, duration in (("recorded", 10.25, 4.0), ("original", 10.25, 4.0), ("ideal", 9.75, 2.5)):
        for step, begin in ((2, 0.0), (5, 15.501)):
            found = slice_of(content, f"{timeline}: dp 1 pp 0", "backward-compute", step, 1)
            assert found["ts"] == pytest.approx((begin + start) * 1e6, abs=1e-3)
            assert found["dur"] == pytest.approx(duration * 1e6, abs=1e-3)


def test_a_slice_carries_the_columns_of_its_op(content: dict[str, Any]) -> None:
    found = slice_of(content, "recorded: dp 0 pp 1", "forward-recv", 5, 1)
    assert found["args"] == {"step": 5, "dp_rank": 0, "pp_rank": 1, "seq": 1, "microbatch": 1, "chunk": 0}
    clip = slice_of(content, "ideal: dp 0 pp 1", "optimizer-clip-main-grad", 2, 0)
    assert clip["args"]["microbatch"] is None


def test_each_worker_is_a_process_and_each_stream_a_thread(content: dict[str, Any]) -> None:
    expected = [
        f"{timeline}: dp {dp_rank} pp {pp_rank} (rank {pp_rank * 2 + dp_rank})"
        for timeline in TIMELINES
        for dp_rank in (0, 1)
        for pp_rank in (0, 1)
    ]
    assert list(process_names(content).values()) == expected
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    for event in slices(content):
        assert threads[event["pid"], event["tid"]] == STREAMS[OpKind(event["name"])]


def test_slices_of_one_thread_do_not_overlap(content: dict[str, Any]) -> None:
    """An overlap would make the viewer nest them; the model-parallel and data-parallel streams run one by one too."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices(content):
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


def test_every_kind_has_a_track() -> None:
    assert set(STREAMS) == set(KINDS)


def test_a_worker_left_out_of_the_replay_does_not_shift_the_names(tmp_path: Path) -> None:
    """DP rank 0 lacks stage 1 and is left out; what is drawn under DP rank 1 is DP rank 1's."""
    ops = slow_frame((0, 1)).filter(~((pl.col("dp_rank") == 0) & (pl.col("pp_rank") == 1)))
    content = exported(PipelineJob(Trace.from_frame(ops, LAYOUT, name="partial")), tmp_path / "out.json.gz")
    names = process_names(content)
    assert slices(content)
    for event in slices(content):
        place = f"dp {event['args']['dp_rank']} pp {event['args']['pp_rank']} "
        assert place in names[event["pid"]]


def test_a_hostile_job_name_stays_valid_json(tmp_path: Path) -> None:
    name = '</script>"\\\n\x1b[31m\u2028'
    assert exported(PipelineJob(slow_trace(name=name)), tmp_path / "out.json.gz")["otherData"]["name"] == name


def test_chosen_steps_are_written_and_no_others(tmp_path: Path) -> None:
    job = PipelineJob(slow_trace((2, 5, 9)))
    content = exported(job, tmp_path / "out.json.gz", steps=[5, 7])
    assert {event["args"]["step"] for event in slices(content)} == {5}
    with pytest.raises(SelectionError, match="it has 3 steps from 2 to 9"):
        job.export(tmp_path / "out.json.gz", steps=[7])


def test_too_many_slices_of_ops_or_of_post_training_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops are drawn three times, phases and requests once: 28 in four steps."""
    monkeypatch.setattr("tracekit.trace.chrome.MOST_SLICES", 27)
    ops = op_job(rank=list(range(10)), duration=[1.0] * 10)
    with pytest.raises(SelectionError, match=r"30 slices are too many for a browser \(at most 27\)"):
        ops.export(tmp_path / "out.json.gz")
    phases = RlJob.read([write(tmp_path / "run.jsonl", lines())])
    with pytest.raises(SelectionError, match="28 slices are too many for a browser; choose fewer --steps"):
        phases.export(tmp_path / "out.json.gz")
    monkeypatch.setattr("tracekit.trace.chrome.MOST_SLICES", 30)
    assert ops.export(tmp_path / "out.json.gz").slices == 30
    assert phases.export(tmp_path / "out.json.gz").slices == 28


def test_by_default_a_large_job_shows_its_slowest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one step of three: step 9, whose every op takes twice as long."""
    monkeypatch.setattr("tracekit.trace.chrome.MOST_SLICES", 3 * OPS_PER_STEP)
    slow = pl.when(pl.col("step") == 9).then(2.0).otherwise(1.0)
    ops = slow_frame((2, 5, 9)).with_columns(pl.col("start") * slow, pl.col("duration") * slow)
    job = PipelineJob(Trace.from_frame(ops, LAYOUT, name="long"))
    done = job.export(tmp_path / "out.json.gz")
    assert (done.steps, done.steps_in_job, done.slices) == (1, 3, 3 * OPS_PER_STEP)
    assert list(exported(job, tmp_path / "out.json.gz")["otherData"]["step_starts_us"]) == ["9"]
