"""What an attempt says of its GPUs, and of what it could not record: facts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tracekit.collectors.merge.run_facts import find_unrecorded, read_samples, summarize_gpu
from tracekit.collectors.record.wire_format import GPU_SUFFIX, rank_stem
from tracekit.collectors.run_directory.segments import RECORD_DTYPE, AttemptRecording, RankRecording


def attempt(*ranks: dict[str, Any], last_step: int = 6) -> AttemptRecording:
    """Ranks with these facts, each with a record of that step; the summary is that of a rank that ended well."""
    records = np.zeros(1, RECORD_DTYPE)
    records["step"] = last_step
    ended = {"summary": [{"off": None, "failures": {}, "gpu_used": False}]}
    facts = [{name: [value] if isinstance(value, dict) else value for name, value in rank.items()} for rank in ranks]
    return AttemptRecording(0, Path(), {n: RankRecording(n, records, {}, ended | fact) for n, fact in enumerate(facts)})


def test_hooks_that_could_not_be_installed_are_told_by_reason_with_their_ranks() -> None:
    lost = {"hook": "DDP", "reason": "not found", "lacks": "buckets"}
    torch = {"version": "2.9.0"}
    unrecorded = find_unrecorded(
        attempt({"torch": torch, "lost-hook": lost}, {"torch": torch}, {"torch": torch, "lost-hook": lost})
    )
    assert unrecorded.metadata() == {"lost_hooks": [{**lost, "torch": "2.9.0", "ranks": [0, 2]}]}
    assert unrecorded.lines() == [
        "WARNING: DDP of torch 2.9.0 cannot be hooked (not found) on ranks 0, 2; the trace lacks buckets"
    ]
    assert unrecorded.stopped_line() is None


def test_hooks_that_failed_and_ranks_that_stopped_are_counted() -> None:
    failed = {"summary": {"off": "disk full", "failures": {"p2p": 2, "gc": 1}, "gpu_used": True}}
    unrecorded = find_unrecorded(attempt(failed, {}, {**failed, "torch": {"version": "2.9.0", "device": "CUDA 12.8"}}))
    assert unrecorded.metadata() == {
        "failed_hooks": [{"hook": "gc", "calls": 2, "ranks": [0, 2]}, {"hook": "p2p", "calls": 4, "ranks": [0, 2]}],
        "stopped_ranks": {"0": 6, "2": 6},
    }
    assert unrecorded.stopped_line() == (
        "the recording stops early on ranks 0 (step 6), 2 (step 6): killed, out of disk space, or still running"
    )
    alone = find_unrecorded(attempt({"summary": []}, {}))
    assert alone.stopped_line() == (
        "the recording stops early on rank 0 (step 6): killed, out of disk space, or still running"
    )


def test_a_gpu_that_no_rank_used_is_told() -> None:
    """Not if one rank used it, timed on it, or has a torch without it."""
    built = {"torch": {"version": "2.9.0", "device": "CUDA 12.8"}}
    unused = find_unrecorded(attempt(built, built))
    assert unused.unused_device == "CUDA 12.8"
    assert unused.lines() == ["torch is built for CUDA 12.8, but no GPU was used: ops have host times"]
    other = {"torch": {"version": "2.8.0", "device": "CUDA 12.6"}}
    assert find_unrecorded(attempt(built, other)).unused_device == "CUDA 12.6, CUDA 12.8"
    used = {"off": None, "failures": {}, "gpu_used": True}
    for rank in ({"torch": {"version": "2.9.0"}}, {**built, "device-clock": {}}, {**built, "summary": used}):
        assert find_unrecorded(attempt(built, rank)).unused_device is None


def test_samples_are_read_up_to_the_first_that_is_damaged(tmp_path: Path) -> None:
    """Of the last line, which may be torn, nothing is read."""
    path, whole = tmp_path / f"{rank_stem(0)}{GPU_SUFFIX}", "[0, 1980, 60, 650000, 1]\n"
    assert read_samples(tmp_path, 0, GPU_SUFFIX) == []
    for damaged in ("[1, 19\n", "[1, 2]\n", '{"a": 1}\n', '[1, 2, 3, "x", 5]\n', '["now", 2, 3, 4, 5]\n', "[1, 2"):
        path.write_text(whole + whole.replace("60", "null") + damaged + whole * (damaged[-1] == "\n"))
        assert read_samples(tmp_path, 0, GPU_SUFFIX) == [[0, 1980, 60, 650000, 1], [0, 1980, None, 650000, 1]]


def test_a_gpu_is_summarised_by_its_samples() -> None:
    """Four samples of (time, clock, temperature, milliwatts, reasons): bit 0 is no reason that slows work down."""
    samples = [
        (0, 1980, 60, 650_000, 0x1),
        (1, 1410, 70, 700_000, 0x4 | 0x20),
        (2, 1500, None, None, 0x4),
        (3, None, 80, 690_000, None),
    ]
    assert summarize_gpu({"name": "H100"}, samples) == {
        "name": "H100",
        "samples": 4,
        "sm_mhz": {"min": 1410, "median": 1500, "max": 1980},
        "temperature_c": {"min": 60, "median": 70, "max": 80},
        "power_w": {"min": 650.0, "median": 690.0, "max": 700.0},
        "throttled": 2 / 3,
        "reasons": {"sw-power-cap": 2 / 3, "sw-thermal-slowdown": 1 / 3},
    }
