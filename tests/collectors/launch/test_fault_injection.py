"""Whatever fails of tracekit's own, the command ends as it does alone: its exit code and its weights are the same."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cases import case
from tests.collectors.conftest import TIMEOUT_S, environment, quick_and_slow
from tests.collectors.sabotage.faults import FAULTS, TESTED, UNNOTICED
from tests.collectors.shared_runs import ALONE, SABOTAGED
from tracekit.base.errors import OutputError
from tracekit.collectors.launch import collect as library
from tracekit.collectors.launch import launcher
from tracekit.collectors.launch.collect import CollectOptions, collect
from tracekit.collectors.launch.hang_answers import Departures
from tracekit.collectors.launch.hang_watcher import ExplainerProcess, HangWatcher
from tracekit.collectors.launch.launcher import ClockKeeper
from tracekit.collectors.record.wire_format import LeftOver
from tracekit.collectors.run_directory import launchers, steering
from tracekit.collectors.run_directory.launchers import (
    announce,
    announce_end,
    append_sample,
    write_left_over,
    write_manifest,
)


@pytest.mark.parametrize("names", quick_and_slow(SABOTAGED))
def test_a_fault_in_the_training_process_changes_neither_exit_code_nor_weights(names, runs, alone):
    for name in names:
        ran, expected = runs[name], alone[name if name in ALONE else "none"]
        assert ran.exit_codes == expected.exit_codes, (name, ran.complained)
        assert ran.said == expected.said, name


def test_there_are_forty_faults():
    assert len(TESTED) >= 40
    assert set(TESTED) <= FAULTS.keys()


@pytest.mark.parametrize("names", quick_and_slow(TESTED))
def test_faults_take_effect(names, runs):
    """The recording suffers, or a line says what has failed; without a fault it is whole."""
    sound = runs["none"]
    assert (sound.complained, sound.attempt["steps"], sound.attempt["problem"]) == ("", 5, None)
    whole = [line for line in sound.closing if "wrote" not in line]
    harmed = {
        name
        for name in names
        if runs[name].complained or [line for line in runs[name].closing if "wrote" not in line] != whole
    }
    assert harmed | UNNOTICED >= set(names)


def test_no_file_of_a_rank_is_written_through_a_link(runs):
    assert (runs["every-file-is-a-link"].segments.parent / "victim").read_text() == "precious"


@pytest.mark.slow
def test_a_run_directory_that_is_gone_is_not_made_again(runs):
    """Anybody can have taken its place since."""
    assert not (runs["folder-cannot-be-made"].segments.parent / "run-of-folder-cannot-be-made").exists()


def raises(*_args, **_kwargs):
    raise LookupError("sabotage")


#: What the launcher does once the command runs, or has run.
BESIDE = {
    "the notes": (steering, "_open_first"),
    "the way to the notes": (launcher, "announced"),
    "the reference clock": (ClockKeeper, "tick"),
    "the end of the clock": (ClockKeeper, "close"),
    "the first launcher": (ClockKeeper, "_claim"),
    "what runs beside the command": (launcher, "_await"),
    "the sign of life": (launcher._SideTasks, "_beat"),
    "hang detection": (HangWatcher, "tick"),
    "watched processes": (Departures, "follow"),
    "its start": (library, "_hang_watcher"),
    "its last look": (HangWatcher, "command_ended"),
    "its end": (ExplainerProcess, "close"),
    "what killed ranks left": (launcher, "write_left_over"),
    "the rings": (launcher.RingStore, "left_over"),
    "their end": (launcher.RingStore, "close"),
    "the announced end": (launcher, "announce_end"),
    "how it ended": (library, "how_ended"),
    "merging": (library, "collect_attempts"),
    "what the ranks left": (library, "attempts"),
    "the finished run": (library, "finish_run"),
    "other launchers": (library, "await_other_launchers"),
    "the summary": (library, "_profile_lines"),
}


def test_a_fault_in_the_launcher_leaves_the_exit_code(tmp_path, monkeypatch):
    """The command runs to its end, and is waited for."""
    for number, (part, attribute) in enumerate(BESIDE.items()):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "launcher-elsewhere-1.running").touch()  # so that the reference clock is served
        command = ("sh", "-c", f"mkdir {run}/attempt-000; touch {run}/over; exit 7")
        options = CollectOptions(command, segments=run, keep_in_store=False, out=run / "out", hang_after_s=60)
        with case(part), monkeypatch.context() as patch:
            patch.setattr(library, "await_other_launchers", lambda _: None)
            patch.setattr(*attribute, raises)
            assert collect(options).exit_code == 7
            assert (run / "over").exists()


def test_a_clock_that_cannot_be_served_costs_a_line(tmp_path, monkeypatch, capsys):
    """No thread can start: that is said once."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    (tmp_path / "launcher-elsewhere-1.running").touch()
    monkeypatch.setattr(launchers.threading.Thread, "start", refuse)
    beside = launcher._SideTasks(tmp_path, announce(tmp_path), ClockKeeper(tmp_path), {})
    for _ in range(2):
        assert not beside.tick()
        beside.clocks._due = 0
    assert capsys.readouterr().err == (
        "tracekit: the clock of the run failed (RuntimeError: can't start new thread); the command is not affected\n"
    )


def test_a_damaged_address_of_the_clock_costs_at_most_a_line(tmp_path, capsys):
    for number, content in enumerate(("[" * 60_000, "null", '{"host": "h", "port": "x", "token": "zz"}', "{")):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "clock-server.json").write_text(content)
        with case(number):
            assert collect(CollectOptions(("sh", "-c", "exit 7"), segments=run, keep_in_store=False)).exit_code == 7
            assert len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.parametrize("plant", [os.symlink, lambda _, path: os.mkfifo(path)], ids=["links", "pipes"])
def test_what_the_launcher_writes_goes_through_no_link_and_waits_for_no_pipe(tmp_path, plant):
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("precious")
    presence = announce(run)
    presence.unlink()
    for name in (presence.name, "clock-here.samples", "clock-server.json"):
        plant(victim, run / name)
    with pytest.raises(OSError, match=r"link|regular|No such device"):
        announce(run)
    announce_end(presence, 0)
    with pytest.raises(OSError, match=r"link|regular|No such device"):
        append_sample(run, "here", launchers.ClockSample(1, 2, 3))
    assert not ClockKeeper(run).first
    assert victim.read_text() == "precious"


#: Hands its launcher a signal, which comes back.
COMMAND = "import os, signal, select; os.kill(os.getppid(), signal.{}); select.select([], [], [], 60)"


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_the_command_as_it_would_alone(name, tmp_path):
    """With a shell's exit code."""
    command = [sys.executable, "-c", COMMAND.format(name)]
    under = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--", *command]
    ran = subprocess.run(under, cwd=tmp_path, env=environment(), timeout=TIMEOUT_S, capture_output=True)
    assert ran.returncode == 128 + getattr(signal, name)


def test_nothing_is_written_into_an_attempt_that_is_a_link(tmp_path):
    """No rank makes one: it leads to a folder of somebody's choice."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "attempt-000").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="is a link, which is not followed"):
        write_manifest(tmp_path / "attempt-000")
    with pytest.raises(OutputError, match="is a link, which is not followed"):
        write_left_over(tmp_path, LeftOver(0, 0, 1, b""))
    assert list(elsewhere.iterdir()) == []
