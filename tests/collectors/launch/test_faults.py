"""What must not happen to the training, and what is kept, when something goes wrong in it. Real processes."""

import signal

import numpy as np
import pytest

from tests.collectors.conftest import collect, contradictions, python
from tests.handmade import read_any, run_process
from tracekit.collectors.record.wire_format import HEADER, RECORD, Category
from tracekit.collectors.run_directory.follow import read_attempt


@pytest.mark.parametrize("crash", [pytest.param("raise", marks=pytest.mark.slow), "kill"])
def test_a_rank_that_dies_costs_only_its_last_step(runs, crash):
    """Whole steps of all ranks survive; the dead rank is named."""
    ran = runs[f"rank-2-{crash}s"]
    assert ran.exit_codes[2] == {"raise": 1, "kill": -signal.SIGKILL}[crash]
    steps = {rank: part["step"].unique().sort().to_list() for (rank,), part in ran.trace.ops.group_by("rank")}
    for rank in range(4):
        assert steps[rank][:3] == [1, 2, 3]
    assert contradictions(ran.trace) == []  # step 4, on some ranks only, does no harm
    if crash == "kill":
        assert any("rank 2: its recording stops after " in line for line in ran.closing)
        assert "2" in ran.trace.metadata["stopped_ranks"]
    else:
        assert "rank 2 fails in step 4" in ran.complained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed", "killed-handler"])
def test_ranks_that_are_killed_lose_nothing(runs, name):
    """Up to the signal, SIGKILL or SIGTERM, every op is kept; how the ranks die is their own business."""
    ran = runs[name]
    assert ran.exit_codes == [9 if name == "killed-handler" else -signal.SIGTERM, -signal.SIGKILL]
    assert ran.said.count("my own handler") == (name == "killed-handler")
    recording = read_attempt(ran.segments, ran.attempt["attempt"])
    for rank in (0, 1):
        done = int((ran.segments.parent / f"{name}-{rank}").read_text())
        records = recording.ranks[rank].records
        spans = records[records["category"] == Category.SPAN]
        assert len(spans) in (done, done + 1)  # the signal can come between a span and its count
        assert np.all(np.diff(spans["end_ns"]) >= 0)
        assert np.array_equal(records["number"], np.arange(1, len(records) + 1))
    assert list(recording.directory.glob("rank-000001-99999999.ops"))  # rank 1 killed itself before it could write
    assert not recording.missing_ranks


@pytest.mark.parametrize(
    ("name", "as_alone", "hooks"),
    [
        ("hooks-broken", "plain", {"data-load", "forward", "backward", "optimizer"}),
        pytest.param(
            "hooks-broken-pipeline",
            "pipeline",
            {"data-load", "forward-compute", "backward-compute", "p2p", "ddp-buckets", "gc", "optimizer"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failing_hooks_cost_one_warning(runs, alone, name, as_alone, hooks):
    """Every hook's body raises, on each rank; the job ends with the same weights and one warning for all of them."""
    ran = runs[name]
    assert set(ran.exit_codes) == {0}
    assert ran.weights == alone[as_alone].weights
    assert ran.complained.count("and is now off; training continues") == 1
    assert ran.complained.count("sabotage") == 1
    for rank in ran.attempt["ranks"]:
        assert set(rank["failures"]) >= hooks


@pytest.mark.slow
def test_a_torch_without_what_a_hook_holds_on_to_is_named(runs, alone):
    """Which hook, of which torch, what the trace lacks: at once, at the end and in the trace; the rest is there."""
    ran = runs["renamed"]
    assert ran.said == alone["plain"].said
    hook = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
    (lost,) = ran.trace.metadata["lost_hooks"]
    version = lost.pop("torch")
    assert version.startswith("2.")
    assert lost == {"hook": hook, "reason": "not found", "lacks": "data-load ops", "ranks": [0]}
    assert ran.complained.count(f"rank 0: {hook} cannot be hooked") == 1
    closing = f"tracekit: WARNING: {hook} of torch {version} cannot be hooked (not found) on rank 0; the trace lacks"
    assert sum(line.startswith(closing) for line in ran.closing) == 1
    kinds = set(ran.trace.ops["kind"].cast(str))
    assert kinds >= {"forward-compute", "backward-compute", "optimizer", "checkpoint"}
    assert "data-load" not in kinds


@pytest.mark.slow
def test_a_torch_for_cuda_records_without_a_driver(runs):
    """As `pip install torch` gives it on a login node: every question to CUDA raises, and none is asked."""
    ran = runs["driverless"]
    assert ran.exit_codes == [0, 0], ran.complained
    assert (ran.trace.layout.dp, list(ran.trace.steps)) == (2, list(range(1, 8)))
    assert ran.trace.ops.filter(kind="all-reduce").height == 2 * 7
    assert ran.closing.count("tracekit: torch is built for CUDA 13.0, but no GPU was used: ops have host times") == 1
    assert "CUDA events failed" not in ran.complained
    assert [rank["failures"] for rank in ran.attempt["ranks"]] == [{}, {}]
    assert {"device_clock", "lost_hooks", "failed_hooks"}.isdisjoint(ran.trace.metadata)


@pytest.mark.slow
def test_a_full_disk_costs_one_warning_per_rank(runs, alone):
    """The recorder switches itself off, the training ends as it would."""
    ran = runs["full-disk"]
    assert ran.exit_codes == [0]
    assert ran.said == alone["plain"].said
    assert ran.complained.count("stopped recording, training continues") == 1
    assert "No space left on device" in ran.complained


#: Runs the rest of its command line with Python, where no file may grow beyond 32 KiB.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_what_fits_on_a_disk_that_fills_up_is_read(tmp_path):
    """No file of the training may grow beyond 32 KiB: whole records up to there are in the trace, the rank says why.

    Who reads the segments later is told that they stop early.
    """
    interpreter, *script = python("many_steps.py")
    command = [interpreter, "-c", LIMITED, *script]
    ran = collect(tmp_path, command, "--segments", str(tmp_path / "run"), STEPS=400)
    assert ran.process.returncode == 0, ran.process.stderr
    assert "rank 0 stopped recording, training continues (OSError: [Errno 27] File too large)" in ran.process.stderr
    (segment,) = (tmp_path / "run").glob("attempt-000/rank-*.open")
    assert segment.stat().st_size == 32 * 1024
    whole = (32 * 1024 - HEADER.size) // RECORD.size
    records = read_attempt(tmp_path / "run", 0).ranks[0].records
    assert len(records) >= whole  # and what was still in memory
    steps = ran.trace.steps.tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert steps[-1] >= records["step"][whole - 1] - 1
    assert ran.trace.metadata["stopped_ranks"] == {"0": int(records["step"].max())}
    assert read_any(tmp_path / "run").ops.equals(ran.trace.ops)
    told = run_process("store", "list", str(tmp_path / "run")).err
    assert f"the recording stops early on rank 0 (step {records['step'].max()})" in told


@pytest.mark.slow
def test_a_folder_that_takes_no_manifest_has_its_trace_all_the_same(runs):
    """As on a full disk; a link to nowhere is refused in the same way."""
    ran = runs["no-manifest"]
    assert ran.exit_codes == [0], ran.complained
    assert ran.trace.steps.tolist() == [1, 2, 3, 4, 5]
    (line,) = [line for line in ran.closing if "/manifest.json: " in line]
    assert line.startswith("tracekit: WARNING: ")
    assert ran.attempt["problem"] is None
