"""What `tracekit collect` says at the end, and the environment it gives its command."""

import pytest

from tracekit.collectors.launch import launcher
from tracekit.collectors.launch.collect import CollectedAttempt, CollectSummary
from tracekit.collectors.launch.command import summary_lines
from tracekit.collectors.launch.launcher import prepare_run, run_command
from tracekit.collectors.record.wire_format import ENV_DIRECTORY, RuntimeOptions
from tracekit.collectors.run_directory.launchers import Ending, announce_end, have_ended, how_ended


def test_names_and_paths_cannot_break_a_line():
    """Neither in what is told nor in the command to type next; a long name is cut."""
    attempt = CollectedAttempt(
        attempt=0,
        name="p\nq" + "r" * 100,
        world_size=1,
        steps=2,
        ops=3,
        layout={"dp": 1, "pp": 1, "tp": 1, "cp": 1},
        layout_source="a single rank",
        ranks=(),
        missing_ranks=(),
        out="o\x1b[2J.parquet",
        store="s\rt",
        cost=None,
        problem=None,
    )
    lines = summary_lines(CollectSummary(0, 1.0, (attempt,), "seg\nments", False, "no\nway"))
    assert all(line.isprintable() for line in lines)
    (stored,) = (line for line in lines if line.startswith("stored as"))
    assert stored == f"stored as p\\nq{'r' * 73}... in s\\rt"


def test_a_command_inherits_none_of_our_variables(tmp_path, monkeypatch):
    """What a collection around this one, or the user's shell, has set would be taken for this run's."""
    monkeypatch.setenv("TRACEKIT_NCCL_PLUGIN", "/nosuch/x")
    monkeypatch.setenv("TRACEKIT_NCCL_MASK", "0x2")
    monkeypatch.setenv("TRACEKIT_COLLECT_RINGS", "/proc/1/fd/9")
    monkeypatch.setenv("TRACEKIT_NCCL_SLOTS", "65536")
    environment = prepare_run(tmp_path, RuntimeOptions(), ["train"])
    ours = {name for name in environment if name.startswith("TRACEKIT_")}
    assert ours - {"TRACEKIT_STORE"} == {ENV_DIRECTORY, "TRACEKIT_COLLECT_OPTIONS", "TRACEKIT_NCCL_SLOTS"}


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("exit 0", Ending("ended with exit code 0", failed=False)),
        ("exit 3", Ending("ended with exit code 3", failed=True)),
        ("kill -9 $$", Ending("was killed by SIGKILL", failed=True)),
    ],
)
def test_the_launcher_leaves_word_of_how_its_command_ended(script, ending, tmp_path):
    command = ["sh", "-c", script]
    environment = prepare_run(tmp_path, RuntimeOptions(), command)
    run_command(command, environment, tmp_path, {})
    assert (have_ended(tmp_path), how_ended(tmp_path)) == (True, ending)


def test_a_command_that_removes_the_folder_before_the_clock_is_in_it_is_not_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_CLOCK_FILE", "removed/clock.json")
    command = ["sh", "-c", "exit 7"]
    ended = run_command(command, prepare_run(tmp_path, RuntimeOptions(), command), tmp_path, {})
    assert (ended.exit_code, ended.first) == (7, True)


def test_signals_are_named_where_they_have_names(tmp_path):
    """Above 128 are the exit codes that shells give for them."""
    for code, words in (
        (1, "ended with exit code 1"),
        (137, "ended with exit code 137 (SIGKILL)"),
        (-250, "was killed by signal 250"),
    ):
        run = tmp_path / str(code)
        run.mkdir()
        presence = run / "launcher-node-7.running"
        presence.touch()
        announce_end(presence, code)
        assert how_ended(run) == Ending(words, failed=True)
