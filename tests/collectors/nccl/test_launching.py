"""`tracekit collect --nccl`: what the command is given, and what is said before and behind it."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from tests.collectors.conftest import contradictions, several
from tests.collectors.nccl.handmade import HandmadeRing
from tests.handmade import read_any
from tracekit.collectors.launch import record
from tracekit.collectors.nccl import launching
from tracekit.collectors.nccl.rings import operations, read_ring
from tracekit.collectors.record.wire_format import DEFAULT_MASK
from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording

ROOT = Path(__file__).parents[3]


def test_the_default_mask_is_what_the_documents_say():
    """Collectives, transfers, channels."""
    assert int(DEFAULT_MASK) == 0x46


def test_events_are_named_or_numbered():
    """As people say them, or as NCCL's documents write them."""
    masks = {"coll,p2p,kernel": 0x46, "coll": 0x02, "proxy": 0x18, "0x46": 0x46, "70": 0x46}
    assert {text: record.parse_mask(text) for text in masks} == masks


def test_unknown_events_are_refused():
    """With what is known."""
    for text, message in (("coll,gpu", "'gpu' is not an NCCL event"), ("0x80", "expected bits"), ("0", "0")):
        with pytest.raises(ValueError, match=message):
            record.parse_mask(text)


def test_a_users_plugin_stays(monkeypatch):
    """NCCL takes one; theirs was there first."""
    environment, (warning,) = launching.prepare_nccl({"NCCL_PROFILER_PLUGIN": "/their/plugin.so"})
    assert environment == {"NCCL_PROFILER_PLUGIN": "/their/plugin.so"}
    assert warning.startswith("NCCL_PROFILER_PLUGIN=/their/plugin.so is already set")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (None, "the NCCL plugin is not compiled; install tracekit again"),
        (SimpleNamespace(origin=f"/{'x' * 254}"), ": too long, NCCL cuts paths at 255 bytes; install"),
    ],
)
def test_without_a_plugin_that_nccl_can_load_the_rest_is_recorded(spec, why, monkeypatch):
    """The environment is as it was."""
    monkeypatch.setattr(launching, "find_spec", lambda _: spec)
    environment, (warning,) = launching.prepare_nccl({"A": "b"})
    assert environment == {"A": "b"}
    assert warning.startswith("--nccl records nothing, the rest is recorded: ")
    assert why in warning


def test_nccl_and_the_ranks_are_told_where_the_plugin_is():
    """And which events."""
    environment, _ = launching.prepare_nccl({}, 0x02)
    path = str(launching.find_plugin())
    assert environment == {
        "NCCL_PROFILER_PLUGIN": path,
        "TRACEKIT_NCCL_PLUGIN": path,
        "TRACEKIT_NCCL_MASK": "0x2",
    }


def test_known_troubles_of_a_version_are_told():
    """Before the run."""
    for version, mask, words in (
        ((2, 26, 2), 0x46, "NCCL 2.26.2 cannot load such a plugin; --nccl needs 2.27 or newer"),
        ((2, 30, 3), 0x46, "NCCL 2.30.3 can crash"),
        ((2, 31, 2), 0x46, "NCCL 2.31.2 spends 4 to 13%"),
        ((2, 31, 2), 0x06, None),
        ((2, 29, 7), 0x46, None),
        (None, 0x46, None),
    ):
        found = launching.hazards(version, mask)
        assert found == () if words is None else found[0].startswith(words), version


def test_small_shared_memory_is_told(monkeypatch):
    """A container's usual 64 MB."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=64_000_000 // 4096))
    assert launching._shared_memory(0x46)[0].startswith(f"{launching.SHARED_MEMORY} has 64 MB")
    assert launching._shared_memory(0x06) == ()
    monkeypatch.undo()
    monkeypatch.setattr(launching, "SHARED_MEMORY", "/no/such/folder")
    assert launching._shared_memory(0x46) == ()


def recording(tmp_path, fact):
    """Two ranks that say the same about their NCCL."""
    facts = {"process": [{"world_size": 2, "host": "a", "process_id": 1}], "nccl": [fact]}
    return AttemptRecording(0, tmp_path, {rank: RankRecording(rank, [], {}, facts) for rank in range(2)})


def test_why_no_ring_appeared_is_said(tmp_path):
    """NCCL itself says nothing but an INFO line."""
    for number, (fact, words) in enumerate((
        (
            {"version": [2, 29, 7], "backends": "nccl"},
            "NCCL did not load the plugin, made no communicator, or the ring",
        ),
        ({"version": [2, 26, 2], "backends": "nccl"}, "NCCL 2.26.2 cannot load such a plugin"),
        ({"version": None, "backends": "cpu:gloo"}, "the job communicates with cpu:gloo, not with NCCL"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        *_, line = launching.nccl_lines(recording(folder, fact), None, 0x46)
        assert line.startswith(f"no NCCL ring appeared on any of 2 ranks: {words}")


def test_rings_without_a_trace_to_join_are_kept(tmp_path):
    HandmadeRing("a", 1).write(tmp_path)
    fact = {"version": [2, 29, 7], "backends": "nccl"}
    *_, line = launching.nccl_lines(recording(tmp_path, fact), None, 0x46)
    assert line == "1 NCCL rings are kept with the segments"


def test_a_hazard_of_the_version_the_job_ran_with_is_told_behind_it(tmp_path):
    """A container brings an NCCL of its own, which nobody knew before."""
    fact = {"version": [2, 31, 2], "backends": "nccl"}
    first, _ = launching.nccl_lines(recording(tmp_path, fact), None, 0x46)
    assert first.startswith("WARNING: NCCL 2.31.2 spends 4 to 13%")


def test_what_was_joined_is_said(tmp_path):
    """Ranks without a ring, matches, losses."""
    report = {
        "timed": 40,
        "untimed": 1,
        "size_differs": 2,
        "unmatched_records": {"allreduce": 3},
        "unmatched_operations": {"Send": 4, "Recv": 1},
        "overwritten": 6,
        "dropped": 0,
        "ranks_without_ring": (1,),
        "unreadable": ("x: damaged",),
    }
    missing, damaged, timed, sizes, lost = launching.nccl_lines(
        recording(tmp_path, {"version": None, "backends": "nccl"}), report, 0x46
    )
    assert missing.startswith("no NCCL ring appeared on rank 1: NCCL did not load the plugin")
    assert damaged == "x: damaged"
    assert timed == (
        "NCCL timed 40 communication ops; 1 that it did not time and 3 that it did not report keep their host times;"
        " 5 NCCL operations match no op"
    )
    assert sizes == "2 ops keep their host times because NCCL reported another size"
    assert lost.startswith("NCCL's rings lost 6 events to newer ones and 0 for lack of lanes; record fewer steps")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two ranks without NCCL, one that plays it, a loop and a pipeline without it, two that play it together; every
    second step is recorded.
    """
    directory = tmp_path_factory.mktemp("nccl")
    jobs = {
        "without": "RANKS=2 ddp_accumulation.py",
        "one": "plays_nccl_alone.py",
        "loop": "STEPS=8 loop.py plain",
        "pipeline": "RANKS=2 STEPS=8 plain_pipeline.py",
        "two": "RANKS=2 plays_nccl.py",
    }
    variables = {"XDG_CACHE_HOME": directory / "cache", "PYTHONPATH": ROOT, "TRACEKIT_NCCL_SLOTS": 64}
    return several(directory, jobs, "--nccl", "--every", "2", **variables)


@pytest.mark.slow
def test_a_job_without_nccl_is_recorded_and_told(jobs):
    """A CPU job with gloo: the trace is there, and the user knows that NCCL told nothing."""
    ran = jobs["without"]
    assert ran.trace.steps.tolist() == [1, 3, 5, 7]
    (line,) = ran.attempt["nccl"]
    assert line.startswith("no NCCL ring appeared on any of 2 ranks: the job communicates with cpu:gloo")
    assert f"tracekit: {line}" in ran.closing
    assert "nccl" not in ran.trace.metadata


@pytest.mark.slow
def test_steps_that_are_not_recorded_switch_nccl_off(jobs):
    """A process plays NCCL inside a real training loop: every second step has events, each with its step."""
    ran = jobs["one"]
    assert ran.exit_codes == [0], ran.complained
    (path,) = (ran.segments / "attempt-001").glob("*.ring")
    assert path.with_suffix(".slots").exists()  # the launcher saved them
    assert operations(read_ring(path)).select("step", "sequence").rows() == [(0, 0), (1, 1), (3, 3), (5, 5)]
    assert ran.trace.metadata["nccl"]["ranks_without_ring"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "pipeline"])
def test_hooks_go_out_and_come_back_on_the_same_step_everywhere(jobs, name):
    ran = jobs[name]
    assert set(ran.exit_codes) == {0}, ran.complained
    assert ran.trace.steps.tolist() == [1, 3, 5, 7]
    assert ran.trace.coverage().complete
    assert contradictions(ran.trace) == []


@pytest.mark.slow
def test_kept_segments_give_the_same_times_of_nccl(jobs):
    """The importer takes the last attempt of a run."""
    kept = read_any(jobs["two"].segments)
    assert kept.metadata["nccl"] == jobs["two"].trace.metadata["nccl"]
    assert kept.ops.equals(jobs["two"].trace.ops)


@pytest.mark.slow
def test_a_job_that_plays_nccl_gets_its_kernels_times(jobs):
    """From the hooks, the step's switch, the rings of two processes and the launcher that empties them to the trace:
    every reduction of every second step lasts as long as its kernel, and begins where it began.
    """
    ran = jobs["two"]
    assert ran.exit_codes == [0, 0], ran.complained
    told = [json.loads(line) for line in re.findall(r"\{\"rank\".*?\]\]\}", ran.said)]
    report = ran.trace.metadata["nccl"]
    assert (report["timed"], report["untimed"], report["size_differs"]) == (2 * 3 * 4, 0, 0)
    assert report["unmatched_records"] == report["unmatched_operations"] == {}
    assert report["overwritten"] == report["dropped"] == 0
    reductions = ran.trace.ops.filter(pl.col("kind") == "all-reduce").sort("rank", "step", "seq")
    assert reductions["step"].unique().sort().to_list() == [1, 3, 5, 7]
    assert reductions["duration"].to_list() == pytest.approx([700e-6] * 24, abs=1e-6)
    for one in told:
        found = reductions.filter(pl.col("rank") == one["rank"])
        starts = [start + ran.trace.step_starts[step] for step, start in found.select("step", "start").rows()]
        began = [begin / 1e9 for step, begin in one["kernels"] if step in ran.trace.step_starts]
        uncertainty_s = report["clocks"][str(one["rank"])]["uncertainty_ns"] / 1e9
        gaps = [after - before for before, after in pairwise(starts)]
        assert gaps == pytest.approx([after - before for before, after in pairwise(began)], abs=uncertainty_s + 1e-6)
