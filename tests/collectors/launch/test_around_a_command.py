"""What `tracekit collect` does around a command: exit codes, streams, where the trace goes. Real processes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectors.conftest import SCRIPTS, TIMEOUT_S, brings, collect, environment, plain, python
from tests.handmade import read_any, run, slow_trace
from tracekit.store import Incoming, Store

SABOTAGE = Path(__file__).parents[1] / "sabotage"


def test_exit_code_and_streams_pass_through(tmp_path):
    """What the command prints and returns is what the caller gets."""
    command = ["sh", "-c", "echo to-stdout; echo to-stderr >&2; cat; exit 7"]
    process = subprocess.run(
        [sys.executable, "-m", "tracekit", "collect", "--no-store", "--", *command],
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


@pytest.mark.slow
def test_the_exit_code_passes_through_where_exits_of_children_are_ignored(tmp_path):
    """As some supervisors pass on; the command itself starts with it."""
    command = [sys.executable, "-c", "import signal, sys; sys.exit(7 - 3 * (signal.getsignal(signal.SIGCHLD) != 1))"]
    process = subprocess.run(
        [sys.executable, "-m", "tracekit", "collect", "--no-store", "--", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=TIMEOUT_S,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert process.returncode == 7


@pytest.mark.slow
@pytest.mark.parametrize("left", ["", 'mkdir -p "$TRACEKIT_COLLECT_DIR";'], ids=["nothing", "an empty folder"])
def test_a_recording_that_is_removed_meanwhile_is_one_line_and_the_exit_code_is_the_commands(tmp_path, left):
    """What the launcher writes at that very moment may keep `rm` from removing the folder itself."""
    collected = collect(tmp_path, ["sh", "-c", f'rm -r "$TRACEKIT_COLLECT_DIR"; {left} exit 7'])
    assert collected.process.returncode == 7
    assert "was removed while the command ran, and the recording with it" in collected.process.stderr
    assert "segments are kept" not in collected.process.stderr
    assert "Errno" not in collected.process.stderr


def shell(redirection, *command):
    """The command with its streams redirected."""
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_without_a_stderr_the_exit_code_is_the_commands(tmp_path, redirection):
    """Closed or full: what cannot be said must not part the launcher from its command."""
    under = shell(redirection, sys.executable, "-m", "tracekit", "collect", "--no-store", "--", "sh", "-c", "exit 7")
    assert subprocess.run(under, cwd=tmp_path, env=environment(), timeout=TIMEOUT_S).returncode == 7


@pytest.mark.slow
def test_two_runs_without_a_stderr_share_the_store_and_lose_nothing(tmp_path):
    """Side by side in one directory, one's stderr closed and one's full: both end as their commands do and are stored.

    Python itself leaves with 1 after a traceback, even one that found no place.
    """
    collections = [
        subprocess.Popen(
            shell(redirection, sys.executable, "-m", "tracekit", "collect", "--name", name, "--", *python("quick.py")),
            cwd=tmp_path,
            env=environment(END="raise"),
        )
        for name, redirection in (("closed", "2>&-"), ("full", "2>/dev/full"))
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
    ("s3://bucket/jobs.store", "s3://bucket/jobs.store: a store in object storage is read-only"),
]


@pytest.mark.parametrize(("store", "why"), UNUSABLE)
def test_a_store_that_cannot_be_used_keeps_no_command_from_starting(store, why, tmp_path):
    (tmp_path / "notes.txt").write_text("no store at all")
    ran = run("collect", "--store", store, "--", "touch", "started", cwd=tmp_path)
    assert (ran.code, (tmp_path / "started").exists()) == (0, True)
    assert ran.err.startswith(f"tracekit: WARNING: {why}")


@pytest.mark.slow
def test_a_run_whose_store_cannot_be_used_is_recorded_and_its_segments_are_kept(raised, tmp_path):
    """A line says why, before it starts and at the end."""
    (tmp_path / "notes.txt").write_text("no store at all")
    ran = plain(under_collect(raised, "--store", "notes.txt"), tmp_path, TMPDIR=tmp_path)
    assert ran.returncode == 0
    first, *rest = ran.stderr.splitlines()
    assert first.startswith("tracekit: WARNING: notes.txt: not a tracekit store")
    assert any(line.startswith("tracekit: no trace: notes.txt: not a tracekit store") for line in rest)
    (merge,) = re.findall(r"segments are kept in .*; merge them with `tracekit (.*)`", ran.stderr)
    assert (tmp_path / "notes.txt").read_text() == "no store at all"
    assert run(*shlex.split(merge), "--store", "good.store", cwd=tmp_path).code == 0


def under_collect(raised, *options):
    """A run that brings the segments of that one."""
    command = brings(raised.out.parent / "segments" / "attempt-000")
    return [sys.executable, "-m", "tracekit", "collect", *options, "--", *command]


@pytest.mark.slow
def test_a_live_run_starts_though_its_store_cannot_be_used(raised, tmp_path):
    (tmp_path / "notes.txt").write_text("no store at all")
    ran = plain(under_collect(raised, "--live", "--store", "notes.txt", "--segments", "run"), tmp_path)
    assert ran.returncode == 0
    assert "tracekit: notes.txt: not a tracekit store" in ran.stderr
    assert "windows are missing, because the watch died; store them with `tracekit watch " in ran.stderr
    assert run("watch", "run", "--store", "good.store", cwd=tmp_path).code == 0
    assert len(Store(tmp_path / "good.store").windows("run")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("live", [(), ("--live",)], ids=["whole", "live"])
def test_a_job_that_is_started_again_under_its_name_starts_and_gets_a_number(tmp_path, live):
    """As a scheduler does that puts a job back into its queue."""
    store = Store(tmp_path / "jobs")
    store.add([Incoming(slow_trace((0,)), "j1", "by hand"), Incoming(slow_trace((0,)), "j1-2", "by hand")])
    before = store.jobs()
    ran = run("collect", *live, "--store", "jobs", "--name", "j1", "--", "touch", "started", cwd=tmp_path)
    assert (ran.code, (tmp_path / "started").exists()) == (0, True)
    assert ran.err.splitlines()[0] == "tracekit: the store already has a job 'j1'; this run is stored as 'j1-3'"
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
        [sys.executable, "-m", "tracekit", "collect", "--no-store", "--", sys.executable, "-c", waits],
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


def test_an_unwritable_folder_is_refused_before_the_command_runs(tmp_path):
    """Segments that cannot be written are an error at once, not after hours of training."""
    (tmp_path / "file").write_text("")
    assert "choose another place with --segments" in refused(tmp_path, "--segments", "file/inside")


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """A loop that ends with an exception; its segments are kept."""
    directory = tmp_path_factory.mktemp("raised")
    return collect(directory, python("quick.py"), "--segments", str(directory / "segments"), END="raise")


@pytest.mark.slow
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


def test_the_users_sitecustomize_still_runs(tmp_path):
    """The one that collect shadows is run behind it, in the command, too."""
    command = [sys.executable, "-c", "import os; print('command', os.getpid())"]
    collected = collect(tmp_path, command, PYTHONPATH=SABOTAGE, SITECUSTOMIZE_SAYS=tmp_path / "said")
    (process,) = re.findall(r"command (\d+)", collected.process.stdout)
    assert process in (tmp_path / "said").read_text().split()


def test_kept_segments_can_be_imported_and_are_not_written_to_again(runs, tmp_path):
    """--segments keeps them; the importer gives the same trace; another run there is refused."""
    plain, segments = runs["plain"], tmp_path / "segments"
    attempt = plain.segments / f"attempt-{plain.attempt['attempt']:03d}"
    collected = collect(tmp_path, brings(attempt), "--segments", str(segments))
    assert read_any(segments).ops.equals(collected.trace.ops)
    assert "holds the segments of a finished run" in refused(tmp_path, "--segments", str(segments))
