"""What `tracekit collect` says at the end, and the environment it gives its command."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tracekit.collectors.launch import launcher, live
from tracekit.collectors.launch.collect import CollectedAttempt, CollectSummary
from tracekit.collectors.launch.command import summary_lines
from tracekit.collectors.launch.launcher import prepare_run, run_command
from tracekit.collectors.merge.merge import RankReport
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.merge.run_facts import RecordingCost
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


def test_the_closing_lines_say_what_was_recorded_what_lacks_and_what_to_type_next():
    """Of two attempts, each line has the number; of one, none has. The trace of the second one ends the job."""
    broken = RankReport(
        1, "n1", 7, 90, dropped=12, unfinished=3, failures={"gc": 2, "p2p": 1}, off="full", closed=False
    )
    whole = RankReport(0, "n0", 8, 99, dropped=0, unfinished=0, failures={}, off=None, closed=True)
    first = CollectedAttempt(
        attempt=0,
        world_size=40,
        steps=8,
        ops=640,
        layout={"dp": 2, "pp": 4, "tp": 1, "cp": 5},
        layout_source="Megatron",
        ranks=(whole, broken),
        missing_ranks=tuple(range(2, 40, 2)),
        cost="no step ran without recording",
        notes=("no collectives",),
        nccl=("120 operations of NCCL",),
        continued=True,
    )
    cost = RecordingCost(share=0.012, error=0.003, off_s=0.25, on_steps=1, off_steps=9)
    second = CollectedAttempt(
        attempt=1,
        name="gpt",
        world_size=1,
        steps=3,
        ops=30,
        layout={"dp": 1, "pp": 1, "tp": 1, "cp": 1},
        layout_source="a single rank",
        ranks=(whole,),
        out="out.parquet",
        store="my.store",
        cost=cost,
    )
    costs = "recording costs 1.2% +- 0.3% of a step of 250.00 ms (1 recorded step against those before and after, of 9"
    assert summary_lines(CollectSummary(3, 1.0, (first, second), None, False, None, profiles=("2 profiles",))) == [
        "attempt 0: recorded 8 steps, 640 ops of 2 of 40 ranks (dp 2 x pp 4 x cp 5; from Megatron)",
        (
            "WARNING: attempt 0: ranks 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, ..."
            ' reported nothing; the trace lacks them (see "Missing ranks" in docs/collecting.md)'
        ),
        "attempt 0: no collectives",
        "attempt 0: 120 operations of NCCL",
        (
            "attempt 0: rank 1: dropped 12 records (ring full), 3 transfers were never waited for,"
            " hooks failed: gc 2 x, p2p 1 x, stopped recording (full),"
            " its recording stops after 7 steps (killed, or out of disk space); the trace has what it wrote"
        ),
        "attempt 0: no step ran without recording",
        "attempt 0: its trace continues with the next attempt",
        "attempt 1: recorded 3 steps, 30 ops of 1 of 1 ranks (one worker; from a single rank)",
        f"attempt 1: {costs} without)",
        "attempt 1: wrote out.parquet",
        "attempt 1: stored as gpt in my.store",
        "next: tracekit whatif --store my.store --job gpt",
        "2 profiles",
        "the command ended with exit code 3",
    ]
    assert cost.sentence() == f"{costs} without)"
    unplaced = CollectedAttempt(attempt=0, problem="no layout; give one with --layout", continued=True)
    assert summary_lines(
        CollectSummary(
            0, 1.0, (unplaced,), "kept", False, "no rank", live="gpt", unstored="tracekit watch x", store="s"
        )
    ) == [
        "no trace: no layout; give one with --layout",
        "next: tracekit store windows gpt --store s",
        "no trace: no rank",
        "windows are missing, because the watch died; store them with `tracekit watch x`",
        "segments are kept in kept; merge them with `tracekit import kept --layout sizes.yaml`",
    ]
    only_a_file = CollectedAttempt(attempt=0, layout=dict.fromkeys(("dp", "pp", "tp", "cp"), 1), out="a.parquet")
    assert summary_lines(CollectSummary(0, 1.0, (only_a_file,), "kept", True, None, live="gpt", store="s"))[-3:] == [
        "wrote a.parquet",
        "next: tracekit whatif a.parquet",
        "the node that started first merges the ranks; segments are in kept",
    ]


class PlayedWatch:
    """Processes of `tracekit watch` that end with these exit codes, one after another."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.started, self.environments = [*codes], list[str](), list[dict[str, str]]()
        self.said = list[str]()

    def process(self, words: list[str], env: dict[str, str], start_new_session: bool, **_: Any) -> SimpleNamespace:
        assert start_new_session
        self.started.append(shlex.join(words[3:]))
        self.environments.append(env)
        code = self.codes.pop(0)
        return SimpleNamespace(wait=lambda: code, poll=lambda: code)

    def run(self, options: live.WatchOptions, layout: LayoutOptions, *, consume: bool) -> str | None:
        """Start and await it; what `WatchProcess.wait` returns."""
        with (
            mock.patch.object(live.subprocess, "Popen", self.process),
            mock.patch.object(live, "say", self.said.append),
        ):
            watch = live.WatchProcess(options, Path("run"), Path("my.store"), "gpt", layout, consume)
            watch.start()
            return watch.wait()


def test_options_that_a_user_has_typed_are_told_from_defaults_and_from_the_environment(monkeypatch):
    monkeypatch.delenv("TRACEKIT_NOTIFY", raising=False)
    monkeypatch.setenv("TRACEKIT_METRICS", "http://prometheus")
    assert live.WatchOptions().given() == []
    assert live.WatchOptions(metrics="http://prometheus", late_after=10.0).given() == []
    assert live.WatchOptions(notify="https://hooks", log="wandb", late_after=3.0).given() == [
        "--late-after=3.0",
        "--log=wandb",
        "--notify",
    ]


def test_a_watch_that_is_killed_is_started_once_more_and_one_that_refuses_is_not(monkeypatch):
    """Exit code 2 says that its input is bad, which would only repeat. A command that a user can type remains."""
    monkeypatch.delenv("TRACEKIT_NOTIFY", raising=False)
    options = live.WatchOptions(window_steps=20, notify="https://hooks/secret")
    typed = (
        "tracekit watch --store=my.store --name=gpt --window-steps=20 --late-after=10.0 --metrics-host=127.0.0.1"
        " --dp=4 --tp=2"
    )
    layout = LayoutOptions(dp=4, tp=2)
    went_well = PlayedWatch(0)
    assert went_well.run(options, layout, consume=True) is None
    assert (went_well.started, went_well.said) == ([f"{typed} --consume -- run"], [])
    assert went_well.environments[0]["TRACEKIT_NOTIFY"] == "https://hooks/secret"
    assert "TRACEKIT_METRICS" not in went_well.environments[0]
    killed = PlayedWatch(-9, 0)
    assert killed.run(options, layout, consume=False) is None
    assert killed.started == [f"{typed} -- run"] * 2
    assert killed.said == [
        "tracekit: the watch of this run was killed by signal 9; restarting it after the last stored window"
    ]
    killed_twice, refuses = PlayedWatch(-9, 1), PlayedWatch(2)
    without = f"the run continues without windows and alerts until you run {typed} run"
    assert killed_twice.run(options, layout, consume=False) == f"{typed} run"
    assert killed_twice.said[1:] == [f"tracekit: the watch of this run ended with exit code 1; {without}"]
    assert refuses.run(options, layout, consume=False) == f"{typed} run"
    assert refuses.said == [f"tracekit: the watch of this run ended with exit code 2; {without}"]


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
