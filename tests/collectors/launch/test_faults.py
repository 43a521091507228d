"""What must not happen to the training, and what is kept, when something goes wrong. Real processes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.collectors.conftest import SCRIPTS, TIMEOUT_S, collect, contradictions, environment, plain, python, torchrun
from tests.handmade import run, run_process, slow_trace
from tracekit.collectors.importers.registry import read_any
from tracekit.collectors.run_directory.whole import read_attempt
from tracekit.collectors.runtime.wire_format import HEADER, RECORD, Category
from tracekit.store import Incoming, Store

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


def test_a_recording_that_is_removed_meanwhile_is_one_line_and_the_exit_code_is_the_commands(tmp_path):
    collected = collect(tmp_path, ["sh", "-c", 'rm -r "$TRACEKIT_COLLECT_DIR"; exit 7'])
    assert collected.process.returncode == 7
    assert "was removed while the command ran, and with it what was recorded" in collected.process.stderr
    assert "segments are kept" not in collected.process.stderr
    assert "Errno" not in collected.process.stderr


def shell(redirection, *command):
    """The command with its streams redirected."""
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]


@pytest.mark.parametrize(
    ("module", "redirection"), [(("tracekit", "collect"), "2>/dev/full"), (("tracekit.collectors",), "2>&-")]
)
def test_without_a_stderr_the_exit_code_is_the_commands(tmp_path, module, redirection):
    """Closed or full: what cannot be said must not part the launcher from its command."""
    under = shell(redirection, sys.executable, "-m", *module, "--no-store", "--", "sh", "-c", "exit 7")
    assert subprocess.run(under, cwd=tmp_path, env=environment(), timeout=TIMEOUT_S).returncode == 7


def test_two_runs_without_a_stderr_share_the_store_and_lose_nothing(tmp_path):
    """Side by side in one directory, one's stderr closed and one's full: both end as their commands do and are stored.

    Python itself leaves with 1 after a traceback, even one that found no place.
    """
    collections = [
        subprocess.Popen(
            shell(redirection, sys.executable, "-m", *module, "--name", name, "--", *python("quick.py")),
            cwd=tmp_path,
            env=environment(END="raise"),
        )
        for name, module, redirection in (
            ("closed", ("tracekit", "collect"), "2>&-"),
            ("full", ("tracekit.collectors",), "2>/dev/full"),
        )
    ]
    assert [one.wait(TIMEOUT_S) for one in collections] == [1, 1]
    store = Store(tmp_path / "tracekit.store")
    for name in ("closed", "full"):
        assert store.load(name).steps.tolist() == [1, 2, 3]


def refused(directory, *options):
    """The one line of a collection that did not start its command."""
    ran = run("collect", *options, "--", "touch", "started", cwd=directory)
    assert ran.code == 2, ran.err
    assert not (directory / "started").exists()
    return ran.message


def test_what_could_not_be_written_is_refused_before_the_command_starts(tmp_path):
    """A missing folder, a folder for a file."""
    assert "nowhere/job.parquet: cannot be written: No such file" in refused(tmp_path, "--out", "nowhere/job.parquet")
    assert f"{tmp_path}: is a folder; name a file in it" in refused(tmp_path, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


UNUSABLE = [
    ("nowhere/store", "nowhere/store: cannot be written: No such file"),
    ("notes.txt", "notes.txt: not a tracekit store"),
    ("s3://bucket/jobs.store", "s3://bucket/jobs.store: a store in S3 is only read"),
]


@pytest.mark.parametrize(("store", "why"), UNUSABLE)
def test_a_store_that_cannot_be_used_keeps_no_training_from_starting(store, why, tmp_path):
    """The run is recorded, its segments are kept, and a line says why, before it starts and at the end."""
    (tmp_path / "notes.txt").write_text("no store at all")
    ran = plain(under_collect("--store", store), tmp_path, TMPDIR=tmp_path)
    assert ran.returncode == 0
    first, *rest = ran.stderr.splitlines()
    assert first.startswith(f"tracekit: WARNING: {why}")
    assert any(line.startswith(f"tracekit: no trace: {why}") for line in rest)
    (merge,) = re.findall(r"segments are kept in .*; merge them with `tracekit (.*)`", ran.stderr)
    assert (tmp_path / "notes.txt").read_text() == "no store at all"
    assert run(*shlex.split(merge), "--store", "good.store", cwd=tmp_path).code == 0


def under_collect(*options):
    return [sys.executable, "-m", "tracekit", "collect", *options, "--", *python("quick.py")]


def test_a_live_run_starts_though_its_store_cannot_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("no store at all")
    ran = plain(under_collect("--live", "--store", "notes.txt", "--segments", "run"), tmp_path)
    assert ran.returncode == 0
    assert "tracekit: notes.txt: not a tracekit store" in ran.stderr
    assert "windows are missing, because the watch died; store them with `tracekit watch " in ran.stderr
    assert run("watch", "run", "--store", "good.store", cwd=tmp_path).code == 0
    assert len(Store(tmp_path / "good.store").windows("run")) == 1


@pytest.mark.parametrize("live", [(), ("--live",)], ids=["whole", "live"])
def test_a_job_that_is_started_again_under_its_name_starts_and_gets_a_number(tmp_path, live):
    """As a scheduler does that puts a job back into its queue."""
    store = Store(tmp_path / "jobs")
    store.add([Incoming(slow_trace((0,)), "j1", "by hand"), Incoming(slow_trace((0,)), "j1-2", "by hand")])
    before = store.jobs()
    ran = run("collect", *live, "--store", "jobs", "--name", "j1", "--", "touch", "started", cwd=tmp_path)
    assert (ran.code, (tmp_path / "started").exists()) == (0, True)
    assert ran.err.splitlines()[0] == "tracekit: the store has a job 'j1'; this run is 'j1-3'"
    assert store.jobs() == before


def test_an_unknown_command_is_one_message(tmp_path):
    """A command that cannot be started is an error that names it."""
    ran = run("collect", "--no-store", "--", "no-such-command", cwd=tmp_path)
    assert ran.code == 2
    assert "no-such-command: cannot be started" in ran.message


def test_an_interruption_sent_to_the_launcher_alone_reaches_the_command(tmp_path):
    """`kill -INT` interrupts the launcher only, which hands it on; Ctrl-C at a terminal: see `test_terminal.py`."""
    # signal.pause() would miss a signal that comes just before it.
    waits = "import select; print('ready', flush=True)\nwhile True: select.select([], [], [], 0.1)"
    with subprocess.Popen(
        [sys.executable, "-m", "tracekit.collectors", "--no-store", "--", sys.executable, "-c", waits],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in stderr
    assert process.returncode == 130


@pytest.mark.parametrize("crash", ["raise", "kill"])
def test_a_rank_that_dies_costs_only_its_last_step(runs, crash):
    """Whole steps of all ranks survive; the dead rank is named."""
    ran = runs[f"rank-2-{crash}s"]
    assert ran.exit_codes[2] == {"raise": 1, "kill": -signal.SIGKILL}[crash]
    steps = {rank: part["step"].unique().sort().to_list() for (rank,), part in ran.trace.ops.group_by("rank")}
    for rank in range(4):
        assert steps[rank][:6] == [1, 2, 3, 4, 5, 6]
    assert contradictions(ran.trace) == []  # step 7, on some ranks only, does no harm
    if crash == "kill":
        assert any("rank 2: its recording stops after " in line for line in ran.closing)
        assert "2" in ran.trace.metadata["stopped_ranks"]
    else:
        assert "rank 2 fails in step 7" in ran.complained


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


def test_attempts_of_an_elastic_job_are_segments_of_one_trace(tmp_path):
    """Step 4 fails, so three steps of the first attempt are whole behind its step 0, and five of the second. The first
    of those is the sixth number: one is left free. One rank: restarted gloo groups of two often fail to connect by
    themselves.
    """
    kept = ["--segments", "segments"]
    collected = collect(tmp_path, torchrun(1, "quick.py", "--max-restarts", "1"), *kept, CRASH_STEP=4, STEPS=6)
    assert collected.process.returncode == 0, collected.process.stderr
    first, second = collected.summary["attempts"]
    assert (first["steps"], second["steps"]) == (3, 5)
    assert first["out"] == second["out"] == str(collected.out)
    trace = collected.trace
    assert trace.steps.tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert trace.metadata["segments"] == [
        {"attempt": 0, "first_step": 1, "last_step": 3, "numbered_from": 1, "missing_ranks": []},
        {"attempt": 1, "first_step": 5, "last_step": 9, "numbered_from": 1, "missing_ranks": []},
    ]
    starts = [trace.step_starts[step] for step in trace.steps.tolist()]
    assert starts == sorted(starts)
    assert read_any(tmp_path / "segments").ops.equals(trace.ops)
    assert not list(tmp_path.glob("job.attempt-*"))


@pytest.mark.parametrize(
    ("name", "as_alone", "hooks"),
    [
        ("hooks-broken", "plain", {"data-load", "forward", "backward", "optimizer"}),
        (
            "hooks-broken-pipeline",
            "pipeline",
            {"data-load", "forward-compute", "backward-compute", "p2p", "allreduce", "gc", "optimizer"},
        ),
    ],
)
def test_failing_hooks_cost_one_warning(runs, alone, name, as_alone, hooks):
    """Every hook's body raises, on each rank; the job ends with the same weights and one warning for all of them."""
    ran = runs[name]
    assert set(ran.exit_codes) == {0}
    assert ran.weights == alone[as_alone].weights
    assert ran.complained.count("and is off from here; the training goes on") == 1
    assert ran.complained.count("sabotage") == 1
    for rank in ran.attempt["ranks"]:
        assert set(rank["failures"]) >= hooks


def test_a_torch_without_what_a_hook_holds_on_to_is_named(runs, alone):
    """Which hook, of which torch, what the trace lacks: at once, at the end and in the trace; the rest is there."""
    ran = runs["renamed"]
    assert ran.said == alone["plain"].said
    hook = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
    (lost,) = ran.trace.metadata["lost_hooks"]
    version = lost.pop("torch")
    assert version.startswith("2.")
    assert lost == {"hook": hook, "reason": "there is none", "lacks": "data-load ops", "ranks": [0]}
    assert ran.complained.count(f"rank 0: {hook} cannot be hooked") == 1
    closing = (
        f"tracekit: WARNING: {hook} of torch {version} cannot be hooked (there is none) on rank 0; the trace lacks"
    )
    assert sum(line.startswith(closing) for line in ran.closing) == 1
    kinds = set(ran.trace.ops["kind"].cast(str))
    assert kinds >= {"forward-compute", "backward-compute", "optimizer", "checkpoint"}
    assert "data-load" not in kinds


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


def test_a_full_disk_costs_one_warning_per_rank(runs, alone):
    """The recorder switches itself off, the training ends as it would."""
    ran = runs["full-disk"]
    assert ran.exit_codes == [0]
    assert ran.said == alone["plain"].said
    assert ran.complained.count("stopped recording, the training goes on") == 1
    assert "No space left on device" in ran.complained


#: Runs the rest of its command line with Python, where no file may grow beyond 32 KiB.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_what_fits_on_a_disk_that_fills_up_is_read(tmp_path):
    """No file of the training may grow beyond 32 KiB: whole records up to there are in the trace, the rank says why.

    Who reads the segments later is told that they stop early.
    """
    interpreter, *script = python("many_steps.py")
    command = [interpreter, "-c", LIMITED, *script]
    ran = collect(tmp_path, command, "--segments", str(tmp_path / "run"), STEPS=400)
    assert ran.process.returncode == 0, ran.process.stderr
    assert "rank 0 stopped recording, the training goes on (OSError: [Errno 27] File too large)" in ran.process.stderr
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
    told = run_process("info", str(tmp_path / "run")).err
    assert f"the recording stops early on rank 0 (step {records['step'].max()})" in told


def test_a_folder_that_takes_no_manifest_has_its_trace_all_the_same(tmp_path):
    """As on a full disk; a link to nowhere is refused in the same way."""
    plant = 'python=$0; "$python" "$1" && ln -s nowhere run/attempt-000/manifest.json'
    command = ["sh", "-c", plant, *python("quick.py")]
    ran = collect(tmp_path, command, "--segments", "run")
    assert ran.process.returncode == 0, ran.process.stderr
    assert ran.trace.steps.tolist() == [1, 2, 3, 4, 5]
    assert "WARNING: run/attempt-000/manifest.json: " in ran.process.stderr
    assert "no trace" not in ran.process.stderr


def test_an_unwritable_folder_is_refused_before_the_command_runs(tmp_path):
    """Segments that cannot be written are an error at once, not after hours of training."""
    (tmp_path / "file").write_text("")
    assert "choose another place with --segments" in refused(tmp_path, "--segments", "file/inside")


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """The loop of a user with a sitecustomize, which ends with an exception; its segments are kept."""
    directory = tmp_path_factory.mktemp("raised")
    options = ["--segments", str(directory / "segments")]
    variables = {"PYTHONPATH": SABOTAGE, "SITECUSTOMIZE_SAYS": directory / "said", "END": "raise"}
    return collect(directory, python("quick.py"), *options, **variables)


def test_a_script_that_raises_keeps_its_traceback_and_its_trace(raised):
    """The traceback is the one of the script alone, without a frame of ours; the steps before are in the trace."""
    assert raised.process.returncode == 1
    script = re.escape(str(SCRIPTS / "quick.py"))
    alone = rf"""Traceback \(most recent call last\):
  File "{script}", line \d+, in <module>
    main\(\)
  File "{script}", line \d+, in main
    raise ValueError\("the loss is not to my liking"\)
ValueError: the loss is not to my liking
"""
    assert re.match(alone, raised.process.stderr)
    assert list(raised.trace.steps) == [1, 2, 3]


def test_the_users_sitecustomize_still_runs(raised):
    """The one that collect shadows is run behind it, in every process."""
    assert len((raised.out.parent / "said").read_text().splitlines()) >= 1


def test_missing_ranks_are_named(runs):
    """A rank that keeps the recorder out is missing from the trace, and the summary says so."""
    ran = runs["silent"]
    assert ran.exit_codes == [0, 0], ran.complained
    assert ran.attempt["missing_ranks"] == [1]
    assert any("WARNING: 1 ranks reported nothing: 1" in line for line in ran.closing)


def test_kept_segments_can_be_imported_and_are_not_written_to_again(raised):
    """--segments keeps them; the importer gives the same trace; another run there is refused."""
    segments = raised.out.parent / "segments"
    assert read_any(segments).ops.equals(raised.trace.ops)
    assert "holds the segments of a finished run" in refused(segments.parent, "--segments", str(segments))
