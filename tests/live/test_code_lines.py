"""The line of code of a slow rank: asked for as an incident opens, and named only if it explains the loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from benchmarks.writtenrun import WrittenRun
from tests.collectors.conftest import SCRIPTS, environment, forks
from tests.handmade import run
from tests.live.beside import Beside
from tests.live.test_notify import receiving
from tests.reports import report_with
from tests.test_incidents import LATE, SLOW
from tracekit.collectors.record.wire_format import STACK_REQUEST
from tracekit.collectors.run_directory.segments import read_run
from tracekit.live.code_lines import PATIENCE_S, LineQuestion
from tracekit.report.findings import Findings

TRAIN, DECODE, TORCH = (
    ("/job/train.py", 80, "train"),
    ("/job/data.py", 14, "decode"),
    ("/x/site-packages/t.py", 9, "get"),
)


def answers(folder: Path, counts: dict[int, dict[tuple[str, int, str], int]], number: int = 5) -> None:
    """The answers of ranks: of 100 samples, how many show a line; lines are given from the outermost on."""
    for rank, lines in counts.items():
        rows = [[*line, hits, depth] for depth, (line, hits) in enumerate(lines.items())]
        content = {"id": number, "samples": 100, "steps": 3, "lines": rows}
        (folder / f"rank-{rank:06d}.lines").write_text(json.dumps(content))


def words(folder: Path, counts: dict[int, dict[tuple[str, int, str], int]], share: float = 0.4) -> str | None:
    """What is said of rank 0 beside its peers 1 and 2."""
    answers(folder, counts)
    question = LineQuestion(folder, 5, 0, (1, 2), share, 0.0)
    return question.words(question.answers())


def test_the_deepest_line_of_the_user_that_explains_the_loss_is_named(tmp_path: Path) -> None:
    healthy = {TRAIN: 30, DECODE: 2}
    slow = {TRAIN: 75, DECODE: 45, TORCH: 44}
    assert words(tmp_path, {0: slow, 1: healthy, 2: healthy | {DECODE: 5}}) == (
        "rank 0 is at decode (data.py:14) in 45% of samples, rank 1 in 2%, rank 2 in 5%"
    )  # 40 of the 45 that `train` has more; what torch does there is not the user's
    split = {TRAIN: 75, DECODE: 30}
    said = words(tmp_path, {0: split, 1: healthy, 2: healthy})
    assert said == "rank 0 is at train (train.py:80) in 75% of samples, rank 1 in 30%, rank 2 in 30%"


def test_nothing_is_said_of_a_line_that_does_not_explain_the_loss(tmp_path: Path) -> None:
    healthy = {TRAIN: 30, DECODE: 2}
    for slow, peer, share in (
        ({TRAIN: 32, DECODE: 4}, healthy, 0.1),  # chance: two standard errors are 13 of 100
        ({TRAIN: 55, DECODE: 2}, healthy, 0.6),  # 25 of the 60 that are lost
        ({TRAIN: 30, DECODE: 45}, {TRAIN: 30, DECODE: 44}, 0.4),  # another peer is there as often
    ):
        assert words(tmp_path, {0: slow, 1: healthy, 2: peer}, share) is None
    (tmp_path / "rank-000000.lines").unlink()
    assert words(tmp_path, {1: healthy, 2: healthy}) is None


def test_a_line_is_asked_for_only_of_a_rank_that_has_healthy_peers(tmp_path: Path) -> None:
    nobody = replace(SLOW, ranks=())
    assert LineQuestion.ask(tmp_path, nobody, report_with(), [0, 1]) is None
    assert LineQuestion.ask(tmp_path, SLOW, report_with(), []) is None
    assert list(tmp_path.iterdir()) == []


def test_the_line_is_that_of_the_causes_of_its_rank() -> None:
    report = report_with()
    answer = replace(report.answer, accounts=(SLOW, replace(SLOW, ranks=(0, 1)), LATE))
    found = Findings(replace(report, answer=answer)).with_code(3, "rank 3 is at train (train.py:80)")
    codes = [account.code for account in found.report.answer.accounts]
    assert codes == ["rank 3 is at train (train.py:80)", UNSET, UNSET]


def test_what_is_no_answer_is_left_out(tmp_path: Path) -> None:
    good = {0: {DECODE: 60}, 1: {TRAIN: 10}}
    answers(tmp_path, good)
    named = "rank 0 is at decode (data.py:14) in 60% of samples, rank 1 in 0%"
    question = LineQuestion(tmp_path, 5, 0, (1, 2), 0.4, 0.0)
    path = tmp_path / "rank-000002.lines"
    for content in (b"", b"[", b"[" * 100_000, b"{}", b'{"id": 5, "samples": -1, "steps": 0, "lines": []}',
                    b'{"id": 4, "samples": 1, "steps": 0, "lines": []}'):  # fmt: skip
        path.write_bytes(content)
        assert question.words(question.answers()) == named
    path.unlink()
    os.mkfifo(path)
    assert question.words(question.answers()) == named
    escapes = {("/job/\x1b[2J.py", 1, "\n"): 60}
    answers(tmp_path, {0: escapes})
    assert question.words(question.answers()).isprintable()


@pytest.fixture
def asked(written: WrittenRun) -> WrittenRun:
    """A run that allows to be asked."""
    launched = json.loads((written.directory / "run.json").read_text())
    launched["options"]["stacks"] = True
    (written.directory / "run.json").write_text(json.dumps(launched))
    return written


def request_of(written: WrittenRun) -> dict[str, Any] | None:
    path = written.attempt_directory / STACK_REQUEST
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_the_line_is_on_the_incident_and_stays_there(tmp_path: Path, asked: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    asked.run(range(1, 11))
    beside.look()
    assert request_of(asked) is None
    asked.run(range(11, 21), slow={3: 2.0})
    beside.look()
    request = request_of(asked)
    assert (request["ranks"], request["samples"], request["seconds"]) == ([3, 2, 1], 200, 1.0)
    assert beside.windows() == [(1, 10)]  # the alert waits for the line
    answers(asked.attempt_directory, {3: {TRAIN: 100, DECODE: 60}, 2: {TRAIN: 100}, 1: {TRAIN: 100}}, request["id"])
    beside.look()
    line = "rank 3 is at decode (data.py:14) in 60% of samples, rank 2 in 0%, rank 1 in 0%"
    (incident,) = beside.store.incidents()
    assert (incident.cause.ranks, incident.cause.code) == ((3,), line)
    asked.run(range(21, 31), slow={3: 2.0})
    beside.look()
    assert request_of(asked) == request  # which was asked when the incident opened
    (incident,) = beside.store.incidents()
    assert (incident.seen_window, incident.cause.code) == (2, line)
    shown = " ".join(run("whatif", "--store", beside.store.path).out.split())
    assert f"Code {line}" in shown
    assert line not in " ".join(run("whatif", "--store", beside.store.path, "--window", "0").out.split())
    assert "data.py" not in run("whatif", "--store", beside.store.path, "--redact").out
    assert beside.said == []


def test_an_alert_does_not_wait_for_ever(tmp_path: Path, asked: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    asked.run(range(1, 11), slow={3: 2.0})
    beside.look()
    beside.look(1.0 + PATIENCE_S - 0.1)
    assert beside.store.incidents() == ()
    beside.look(0.2)
    (incident,) = beside.store.incidents()
    assert not incident.cause.code


def test_a_job_that_ends_is_not_waited_for(tmp_path: Path, asked: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    asked.run(range(1, 11), slow={3: 2.0})
    beside.look()
    asked.end()
    beside.run.finish()
    assert beside.windows() == [(1, 10)]


def test_a_job_that_forbids_it_is_not_asked(tmp_path: Path, written: WrittenRun, clock: list[float]) -> None:
    beside = Beside(tmp_path, clock)
    written.run(range(1, 11), slow={3: 2.0})
    beside.look()
    assert beside.windows() == [(1, 10)]
    assert request_of(written) is None


def test_the_options_of_a_launch_allow_it_or_forbid_it(tmp_path: Path) -> None:
    """Where the launcher notes them, and every rank reads them."""
    for number, (options, variables, allowed) in enumerate((
        ([], {}, True), (["--no-stacks"], {}, False), ([], {"TRACEKIT_STACKS": "0"}, False),
        (["--stacks"], {"TRACEKIT_STACKS": "0"}, True),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        assert run("collect", "--no-store", "--segments", folder, *options, "--", "true", env=variables).code == 0
        assert json.loads((folder / "run.json").read_text())["options"]["stacks"] is allowed
        assert read_run(folder).options.stacks is allowed


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, asked: WrittenRun, clock: list[float]) -> None:
    (asked.attempt_directory / f".{STACK_REQUEST}").mkdir()
    beside = Beside(tmp_path, clock)
    asked.run(range(1, 11), slow={3: 2.0})
    beside.look()
    asked.run(range(11, 21))
    beside.look()
    assert beside.windows() == [(1, 10), (11, 20)]
    (line,) = beside.said
    assert line.startswith("ranks are not asked for lines of code: ")


@pytest.mark.slow
def test_an_alert_of_a_real_job_names_the_line_of_the_sleep(tmp_path: Path) -> None:
    """Two ranks, rank 1 of which sleeps in a named function."""
    script = (SCRIPTS / "slow_line.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(script, 1) if line.endswith("# here")]
    with receiving() as receiver:
        command = [
            sys.executable,
            "-m",
            "tracekit",
            "collect",
            "--live",
            "--window-steps",
            "20",
            "--notify",
            receiver.url,
        ]
        command += ["--store", "s.store", "--name", "job", "--", *forks(2, "slow_line.py")]
        with subprocess.Popen(command, cwd=tmp_path, env=environment(STOP=tmp_path / "stop")) as process:
            try:
                code = ""
                while not code:
                    receiver.wait_for(1)
                    code = next(filter(None, (one["code"] for one in receiver.got[-1]["incidents"])), "")
            finally:
                (tmp_path / "stop").touch()
        assert process.returncode == 0
    assert code.startswith(f"rank 1 is at decode_shard (slow_line.py:{number}) in ")
    assert code.endswith("of samples, rank 0 in 0%")
    assert code in " ".join(run("whatif", "--store", tmp_path / "s.store").out.split())
