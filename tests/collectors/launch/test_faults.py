"""What must not happen to the training, and what is kept, when something goes wrong. Real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.collectors.conftest import TIMEOUT_S, collect, contradictions, digests, environment, plain, python, torchrun
from tests.handmade import slow_trace
from tracekit.collectors.importers.registry import read_any
from tracekit.collectors.run_directory.segments import read_attempt
from tracekit.collectors.runtime.wire_format import Category
from tracekit.store import Incoming, Store
from tracekit.trace import read_parquet

pytest.importorskip("torch", reason="collecting needs the extra `torch`")

SABOTAGE = Path(__file__).parents[1] / "sabotage"


def test_exit_code_and_streams_pass_through(tmp_path):
    """What the command prints and returns is what the caller gets."""
    command = ["sh", "-c", "echo to-stdout; echo to-stderr >&2; cat; exit 7"]
    process = subprocess.run(
        [sys.executable, "-m", "tracekit.collectors", "--no-store", "--", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        input="from-stdin\n",
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 7
    assert process.stdout == "to-stdout\nfrom-stdin\n"
    assert process.stderr.startswith("to-stderr\n")
    assert "nothing was recorded" in process.stderr


@pytest.mark.parametrize("module", ["tracekit", "tracekit.collectors"])
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_without_a_stderr_the_trace_and_the_exit_code_are_the_same(tmp_path, module, redirection):
    """Closed or full: what cannot be said must not part the launcher from its command."""
    under = [sys.executable, "-m", module]
    collecting = ["collect"] if module == "tracekit" else []
    options = [*collecting, "--no-store", "--out", "job.parquet", "--"]
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *under, *options, *python("loop.py", "raise")],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
    )
    # Python itself leaves with 1 after a traceback, even one that found no place.
    assert process.returncode == 1
    assert list(read_parquet(tmp_path / "job.parquet").steps) == [1, 2, 3]
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *under, *collecting, "--no-store", "--", "sh", "-c", "exit 0"],
        cwd=tmp_path,
        env=environment(),
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0


def refused(directory, *options):
    """The one line of a collection that did not start its command."""
    process = subprocess.run(
        [sys.executable, "-m", "tracekit", "collect", *options, "--", "touch", "started"],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("\n") == 1
    assert not (directory / "started").exists()
    return process.stderr


def test_what_could_not_be_written_is_refused_before_the_command_starts(tmp_path):
    """A missing folder, a folder for a file, no store, a store that has the job; the advice is one collect takes."""
    assert "nowhere/job.parquet: cannot be written: No such file" in refused(tmp_path, "--out", "nowhere/job.parquet")
    assert f"{tmp_path}: is a folder; name a file in it" in refused(tmp_path, "--out", str(tmp_path))
    assert "nowhere/store: cannot be written: No such file" in refused(tmp_path, "--store", "nowhere/store")
    (tmp_path / "notes.txt").write_text("no store at all")
    assert "notes.txt: not a DuckDB store" in refused(tmp_path, "--store", "notes.txt")
    Store(tmp_path / "jobs").add([Incoming(slow_trace((0,)), "taken", "by hand")])
    told = refused(tmp_path, "--store", "jobs", "--name", "taken")
    assert "job 'taken' is there already; choose another --name" in told
    assert "--replace" not in told
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["jobs", "notes.txt"]


def test_an_unknown_command_is_one_message(tmp_path):
    """A command that cannot be started is an error that names it."""
    process = subprocess.run(
        [sys.executable, "-m", "tracekit.collectors", "--no-store", "--", "no-such-command"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "no-such-command: cannot be started" in process.stderr


def test_a_script_that_raises_keeps_its_traceback_and_its_trace(tmp_path):
    """The traceback is the one of the script alone; the steps before are in the trace."""
    alone = plain(python("loop.py", "raise"), tmp_path)
    collected = collect(tmp_path, python("loop.py", "raise"))
    assert collected.process.returncode == alone.returncode == 1
    assert collected.process.stderr.startswith(alone.stderr)
    assert "ValueError: the loss is not to my liking" in alone.stderr
    assert list(collected.trace.steps) == [1, 2, 3]


def test_ctrl_c_reaches_the_command(tmp_path):
    """Ctrl-C at the terminal ends the command as it would alone, and the steps before are kept."""
    out = tmp_path / "job.parquet"
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tracekit.collectors", "--no-store", "--out", str(out), "--"),
            *python("loop.py", "interrupt"),
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)  # as `kill -INT` does; the launcher hands it on
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in stderr
    assert process.returncode == 130
    assert "recorded 3 steps" in stderr
    assert out.exists()


@pytest.mark.parametrize("crash", ["raise", "kill"])
def test_a_rank_that_dies_costs_only_its_last_step(tmp_path, crash):
    """Whole steps of all ranks survive; the exit code is the command's; the dead rank is named."""
    collected = collect(
        tmp_path, torchrun(4, "dp2_pp2.py"), STEPS=10, DEVICE_MS=1, CRASH_STEP=7, CRASH_RANK=2, CRASH=crash
    )
    assert collected.process.returncode == 1
    trace = collected.trace
    steps = {rank: part["step"].unique().sort().to_list() for (rank,), part in trace.ops.group_by("rank")}
    for rank in range(4):
        assert steps[rank][:6] == [1, 2, 3, 4, 5, 6]
    assert contradictions(trace) == []  # step 7, on some ranks only, does no harm
    if crash == "kill":
        assert "rank 2: ended without closing its recorder" in collected.process.stderr
    else:
        assert "rank 2 fails in step 7" in collected.process.stderr


@pytest.mark.parametrize("handler", [{}, {"HANDLER": 1}])
def test_ranks_that_are_killed_lose_nothing(tmp_path, handler):
    """Up to the signal, SIGKILL or torchrun's SIGTERM, every op is kept; how the ranks die is their own business."""
    segments = tmp_path / "segments"
    collected = collect(
        tmp_path, torchrun(2, "killed.py"), "--segments", str(segments), COUNTED=tmp_path, TMPDIR=tmp_path, **handler
    )
    recording = read_attempt(segments, 0)
    for rank in (0, 1):
        done = int((tmp_path / str(rank)).read_text())
        records = recording.ranks[rank].records
        spans = records[records["category"] == Category.SPAN]
        assert len(spans) in (done, done + 1)  # the signal can come between a span and its count
        assert np.all(np.diff(spans["end_ns"]) >= 0)
        assert np.array_equal(records["number"], np.arange(1, len(records) + 1))
    assert list(segments.glob("attempt-000/rank-000001-9999.ops"))  # rank 1 killed itself before it could write
    assert not recording.missing_ranks
    assert "exitcode  : -9" in collected.process.stderr
    assert "Sending process" in collected.process.stderr
    assert collected.process.stdout.count("my own handler") == len(handler)


def test_elastic_restarts_are_separate_attempts(tmp_path):
    """Each attempt has its own trace. One rank: restarted gloo groups of two often fail to connect by themselves."""
    collected = collect(tmp_path, torchrun(1, "ddp_accumulation.py", "--max-restarts", "1"), CRASH_STEP=4, STEPS=6)
    assert collected.process.returncode == 0, collected.process.stderr
    first, second = collected.summary["attempts"]
    assert (first["steps"], second["steps"]) == (3, 5)
    assert Path(first["out"]).name == "job.attempt-0.parquet"
    assert Path(second["out"]).name == "job.parquet"


def test_failing_hooks_cost_one_warning(tmp_path):
    """Every hook's body raises; the job ends with the same weights and one warning."""
    alone = plain(python("loop.py", "plain"), tmp_path)
    collected = collect(
        tmp_path,
        python("loop.py", "plain"),
        PYTHONPATH=SABOTAGE,
        SABOTAGE="hooks",
        SITECUSTOMIZE_SAYS=tmp_path / "said",
    )
    assert collected.process.returncode == 0
    assert collected.process.stdout.startswith(alone.stdout)
    assert collected.process.stderr.count("and is off from here; the training goes on") == 1
    assert collected.process.stderr.count("sabotage") == 1
    assert set(collected.attempt["ranks"][0]["failures"]) >= {"data-load", "forward", "backward", "optimizer"}


def test_failing_hooks_of_a_pipeline_cost_one_warning(tmp_path, pipeline_alone):
    """Pipeline stages, transfers and buckets on four ranks: the same weights, one warning for all of them."""
    collected = collect(
        tmp_path,
        torchrun(4, "dp2_pp2.py"),
        PYTHONPATH=SABOTAGE,
        SABOTAGE="hooks",
        SITECUSTOMIZE_SAYS=tmp_path / "said",
    )
    assert collected.process.returncode == 0
    assert digests(collected.process.stdout) == pipeline_alone
    assert collected.process.stderr.count("and is off from here; the training goes on") == 1
    for rank in collected.attempt["ranks"]:
        expected = {"data-load", "forward-compute", "backward-compute", "p2p", "allreduce", "gc", "optimizer"}
        assert set(rank["failures"]) >= expected


def test_a_torch_without_what_a_hook_holds_on_to_is_named(tmp_path):
    """Which hook, of which torch, what the trace lacks: at once, at the end and in the trace; the rest is there."""
    alone = plain(python("loop.py", "plain"), tmp_path)
    collected = collect(
        tmp_path,
        python("loop.py", "plain"),
        PYTHONPATH=SABOTAGE,
        SABOTAGE="renamed",
        SITECUSTOMIZE_SAYS=tmp_path / "said",
    )
    assert collected.process.stdout.startswith(alone.stdout)
    hook = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
    (lost,) = collected.trace.metadata["lost_hooks"]
    version = lost.pop("torch")
    assert version.startswith("2.")
    assert lost == {"hook": hook, "reason": "there is none", "lacks": "data-load ops", "ranks": [0]}
    said = collected.process.stderr
    assert said.count(f"rank 0: {hook} cannot be hooked") == 1
    closing = (
        f"tracekit: WARNING: {hook} of torch {version} cannot be hooked (there is none) on rank 0; the trace lacks"
    )
    assert said.count(closing) == 1
    kinds = set(collected.trace.ops["kind"].cast(str))
    assert kinds >= {"forward-compute", "backward-compute", "optimizer", "checkpoint"}
    assert "data-load" not in kinds


def test_a_torch_for_cuda_records_without_a_driver(tmp_path):
    """As `pip install torch` gives it on a login node: every question to CUDA raises, and none is asked."""
    collected = collect(
        tmp_path,
        torchrun(2, "ddp_accumulation.py"),
        PYTHONPATH=SABOTAGE,
        SABOTAGE="driverless",
        SITECUSTOMIZE_SAYS=tmp_path / "said",
    )
    said = collected.process.stderr
    assert collected.process.returncode == 0, said
    assert (collected.trace.layout.dp, list(collected.trace.steps)) == (2, list(range(1, 8)))
    assert collected.trace.ops.filter(kind="all-reduce").height == 2 * 7
    assert said.count("torch is built for CUDA 13.0, but no GPU was used: ops have host times") == 1
    assert "CUDA events failed" not in said
    assert [rank["failures"] for rank in collected.attempt["ranks"]] == [{}, {}]
    assert {"device_clock", "lost_hooks", "failed_hooks"}.isdisjoint(collected.trace.metadata)


def test_a_full_disk_costs_one_warning_per_rank(tmp_path):
    """The recorder switches itself off, the training ends as it would."""
    alone = plain(python("loop.py", "plain"), tmp_path)
    collected = collect(
        tmp_path,
        python("loop.py", "plain"),
        PYTHONPATH=SABOTAGE,
        SABOTAGE="disk",
        SITECUSTOMIZE_SAYS=tmp_path / "said",
    )
    assert collected.process.returncode == 0
    assert collected.process.stdout.startswith(alone.stdout)
    assert collected.process.stderr.count("stopped recording, the training goes on") == 1
    assert "No space left on device" in collected.process.stderr


def test_an_unwritable_folder_is_refused_before_the_command_runs(tmp_path):
    """Segments that cannot be written are an error at once, not after hours of training."""
    (tmp_path / "file").write_text("")
    process = subprocess.run(
        [sys.executable, "-m", "tracekit.collectors", "--segments", "file/inside", "--", "touch", "ran"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 2
    assert "choose another place with --segments" in process.stderr
    assert not (tmp_path / "ran").exists()


def test_the_users_sitecustomize_still_runs(tmp_path):
    """The one that collect shadows is run behind it, in every process."""
    said = tmp_path / "said"
    collected = collect(tmp_path, python("loop.py", "plain"), PYTHONPATH=SABOTAGE, SITECUSTOMIZE_SAYS=said)
    assert collected.process.returncode == 0
    assert len(said.read_text().splitlines()) >= 1
    assert list(collected.trace.steps) == [1, 2, 3, 4, 5]


def test_missing_ranks_are_named(tmp_path):
    """A rank that keeps the recorder out is missing from the trace, and the summary says so."""
    collected = collect(tmp_path, torchrun(2, "one_rank_silent.py"))
    assert collected.process.returncode == 0, collected.process.stderr
    assert collected.attempt["missing_ranks"] == [1]
    assert "WARNING: 1 ranks reported nothing: 1" in collected.process.stderr


def test_kept_segments_can_be_imported_and_are_not_written_to_again(tmp_path):
    """--segments keeps them; the importer gives the same trace; another run there is refused."""
    segments = tmp_path / "segments"
    collected = collect(tmp_path, python("loop.py", "plain"), "--segments", str(segments))
    assert read_any(segments).ops.equals(collected.trace.ops)
    again = plain([sys.executable, "-m", "tracekit.collectors", "--segments", str(segments), "--", "true"], tmp_path)
    assert again.returncode == 2
    assert "holds the segments of a finished run" in again.stderr


def test_two_runs_in_one_directory(tmp_path):
    """Runs at the same time share the store and nothing else."""
    command = [sys.executable, "-m", "tracekit.collectors", "--", *python("loop.py", "plain")]
    runs = [
        subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for run in runs:
        _, stderr = run.communicate(timeout=TIMEOUT_S)
        assert run.returncode == 0, stderr
        assert "stored as loop-" in stderr
    assert len(Store(tmp_path / "tracekit.duckdb").jobs()) == 2
