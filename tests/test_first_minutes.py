"""What a newcomer meets: the demo, a file that is no trace, progress, completion in the shell."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import case
from tests.handmade import run, slow_trace
from tracekit.base import stderr
from tracekit.base.errors import ExitCode
from tracekit.base.text import pace_words
from tracekit.cli import main
from tracekit.store import Store
from tracekit.synth.simulate import DEMO

PATIENCE_S = 120
DUMP = {"version": "2.10", "pg_config": {}, "entries": []}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    slow_trace().write_parquet("slow.parquet")
    return tmp_path


def a_store() -> None:
    assert run("import", "slow.parquet", "--store", "jobs.store").code == 0


def a_page() -> None:
    assert run("whatif", "slow.parquet", "--html", "report.html").code == 0


def a_table() -> None:
    assert run("whatif", "slow.parquet", "--parquet", "table.parquet").code == 0


def a_report() -> None:
    Path("report.json").write_text(run("whatif", "slow.parquet", "--json").out)


def a_dump() -> None:
    Path("dumps").mkdir()
    Path("dumps/nccl_trace_rank_0").write_bytes(pickle.dumps(DUMP))


def a_json_dump() -> None:
    Path("rank_0").write_text(json.dumps(DUMP))


def an_empty_file() -> None:
    Path("empty.json").touch()


def a_folder_with_an_empty_file() -> None:
    Path("traces").mkdir(exist_ok=True)
    Path("traces/rank0.json").touch()


def a_script() -> None:
    Path("train it.py").write_text("import torch\n")


def a_layout() -> None:
    Path("meta.yaml").write_text("dp: 2\n")


def a_text() -> None:
    Path("notes.txt").write_text("hello\n")


def a_file_of_zstd() -> None:
    Path("packed").mkdir(exist_ok=True)
    Path("packed/rank0.json.zst").write_bytes(bytes.fromhex("28b52ffd") + b"packed")


WRONG: list[tuple[Callable[[], None], str, str]] = [
    (a_store, "jobs.store", "a store, not a trace; type `tracekit whatif --store jobs.store`"),
    (a_page, "report.html", "open it in a browser"),
    (a_table, "table.parquet", "a table that tracekit wrote with --parquet, not a trace"),
    (a_report, "report.json", "a report, not a trace; `tracekit whatif report.json` shows it"),
    (an_empty_file, "empty.json", "an empty file, not a trace"),
    (a_folder_with_an_empty_file, "traces", "a folder with nothing but empty files, not a trace"),
    (a_file_of_zstd, "packed/rank0.json.zst", "packed with zstd, not a trace; unpack it with `zstd -d`"),
    (a_file_of_zstd, "packed", "packed with zstd, not a trace; unpack it with `zstd -d`"),
    (a_dump, "dumps", "flight-recorder dumps of a hang, not a trace; type `tracekit hang dumps`"),
    (a_json_dump, "rank_0", "a flight-recorder dump, not a trace; type `tracekit hang .`"),
    (a_script, "train it.py", "record what it does: `tracekit collect -- python 'train it.py'`"),
    (a_layout, "meta.yaml", "`tracekit whatif TRACE --layout meta.yaml`"),
    (a_text, "notes.txt", "`tracekit import --format` lists the formats"),
]


@pytest.mark.parametrize("command", ["culprits", "whatif"])
def test_a_command_for_one_job_says_how_it_reads_a_store(folder: Path, command: str) -> None:
    a_store()
    assert f"type `tracekit {command} --store jobs.store`" in run(command, "jobs.store").message


def test_a_file_that_is_no_trace_is_named_with_the_command_that_fits(folder: Path) -> None:
    for make, name, words in WRONG:
        make()
        for command in ("whatif", "import"):
            with case((command, name)):
                ran = run(command, name)
                if (command, make) == ("whatif", a_report):  # which it shows: see test_report_files.py
                    assert ran.code == ExitCode.DONE
                    continue
                assert ran.code == ExitCode.BAD_INPUT
                assert ran.message.startswith(f"tracekit: {name}: ")
                assert words in ran.message


def test_hang_study_and_store_say_what_else_they_were_given(folder: Path) -> None:
    a_store()
    a_json_dump()
    gpus = Path(__file__).parents[1] / "sample_traces" / "gpu_slow_input"
    for command, words in (
        (("hang", "slow.parquet"), "a trace, not a folder of dumps; type `tracekit whatif slow.parquet`"),
        (("hang", gpus), f"traces of torch.profiler, not a folder of dumps; type `tracekit whatif {gpus}`"),
        (("hang", "rank_0"), "one flight-recorder dump; name the folder with those of all ranks: `tracekit hang .`"),
        (
            ("compare", "jobs.store", "slow.parquet"),
            "name two of its jobs: `tracekit compare JOB JOB --store jobs.store`",
        ),
        (("culprits", "jobs.store"), "type `tracekit culprits --store jobs.store`"),
        (("fleet", "report", "jobs.store"), "a store, not a study; type `tracekit whatif --store"),
        (
            ("store", "top", "--once", "--store", "slow.parquet"),
            "a trace, not a store; type `tracekit whatif slow.parquet`",
        ),
    ):
        ran = run(*command)
        assert ran.code == ExitCode.BAD_INPUT
        assert words in ran.message


def said(after_s: float, *, on_a_terminal: bool) -> str:
    """What a process with one stage of work writes to stderr."""
    shown = "with stderr.progress('reading') as tell:\n    tell('step times')"
    code = f"from tracekit.base import stderr\nstderr._SHOWN_AFTER_S = {after_s}\n{shown}"
    if not on_a_terminal:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    os.write(theirs, b"$")  # so that there is something to read in any case
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    written = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    return written


def test_progress_shows_stage_and_time_on_a_terminal_and_goes_at_the_end() -> None:
    written = said(0, on_a_terminal=True)
    assert re.search(r"step times \.\.\. \d+ s", written)
    assert written.endswith("\r\x1b[K")


def test_progress_of_what_is_quick_or_piped_is_not_shown() -> None:
    assert said(3600, on_a_terminal=True) == "$"
    assert said(0, on_a_terminal=False) == ""


#: Commands that can take more than two seconds, and what they say meanwhile.
SLOW = (
    (("store", "list", "slow.parquet"), "reading the trace"),
    (("whatif", "slow.parquet"), "step times"),
    (("store", "export", "slow.parquet", "--out", "timeline.json.gz"), "replaying and writing"),
    (("import", "slow.parquet", "--store", "new.store"), "slow.parquet"),
    (("store", "check", "--store", "jobs.store"), "checking window 1 of 1"),
    (("store", "repair", "--store", "jobs.store"), "checking window 1 of 1"),
    (("store", "prune", "--max-size", "0", "--store", "jobs.store"), "removing ops of "),
    (("fleet", "run", "slow.parquet", "--out", "study", "--processes", "1"), "analysing: 0 of 1 jobs"),
    (("synth", "--jobs", "2", "--dp", "2", "--pp", "1", "--out", "jobs"), "simulating: 1 of 2 jobs"),
)


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_count_has_a_rate_and_what_remains() -> None:
    assert pace_words(0, 1000, "jobs", 3.0) == "0 of 1,000 jobs"
    assert pace_words(320, 1000, "jobs", 20.0) == "320 of 1,000 jobs, 16 a second, 42 s to go"
    assert pace_words(3, 60, "files", 30.0) == "3 of 60 files, 6 a minute, 10 min to go"
    assert pace_words(5, 5, "jobs", 0.0) == "5 of 5 jobs, 5,000 a second, 0 s to go"


def test_the_time_of_a_count_runs_from_its_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stderr.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stderr, "_SHOWN_AFTER_S", 0.0)
    shown = stderr._Progress("looking")
    with contextlib.redirect_stderr(Terminal()) as terminal:
        for at_s, done in ((110.0, 0), (114.0, 8), (114.1, 9), (120.0, 10)):
            now[0] = at_s
            shown.count("importing", done, 20, "jobs")
    drawn = [line[5:] for line in terminal.getvalue().split("\r")[1:]]
    assert drawn == [
        "importing: 0 of 20 jobs ... 10 s",
        "importing: 8 of 20 jobs, 2 a second, 6 s to go ... 14 s",
        "importing: 10 of 20 jobs, 1 a second, 10 s to go ... 20 s",
    ]
    stderr.advance("importing", 1, 2, "jobs")  # where no command shows progress


@pytest.mark.slow
def test_a_command_says_on_a_terminal_what_it_is_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress shows from the first moment on here, not after two seconds."""
    monkeypatch.setattr(stderr, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(stderr, "_REDRAW_S", 0.0)
    a_store()
    for command, words in SLOW:
        monkeypatch.setattr(sys, "argv", ["tracekit", *command])
        with case(command):
            with contextlib.redirect_stderr(Terminal()) as terminal, pytest.raises(SystemExit, match=r"^0$"):
                main()
            assert words in terminal.getvalue()
            assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.slow
def test_the_demo_serves_jobs_with_a_cause_each_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tracekit", "open", "--port", "0", "--no-browser"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        try:
            url = re.search(r"http://\S+/", address)
            assert url, address
            with urllib.request.urlopen(url[0], timeout=PATIENCE_S) as answer:
                assert answer.status == 200
            (store,) = tmp_path.glob("*/demo.store")
            reports = [Store(store).report(spec.name) for spec in DEMO]
            assert len({report.findings[0].kind for report in reports}) == len(DEMO)
        finally:
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert list(tmp_path.glob("tracekit-demo-*")) == []


def completed(words: str, shell: str = "bash") -> list[str]:
    """What the shell offers after `words`, the last of which is incomplete."""
    ran = subprocess.run(
        [sys.executable, "-m", "tracekit"],
        env=os.environ
        | {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TRACEKIT_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout.split("\n")[:-1]


@pytest.mark.slow
def test_the_shell_completes_jobs_of_the_store_that_is_named(folder: Path) -> None:
    a_store()  # one job, "slow job"
    assert completed("tracekit whatif --store jobs.store --job s") == ["plain,'slow job'"]
    assert completed("tracekit hang jobs.store --job ") == ["plain,'slow job'"]
    assert completed("tracekit compare --store jobs.store ", "zsh")[:2] == ["plain", "slow job"]
    assert completed("tracekit compare sl") == ["file,sl"]
    Path("jobs.store/catalog.duckdb").write_bytes(b"damaged")
    assert completed("tracekit store top --store jobs.store ") == [""]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_a_script_that_completes(shell: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'tracekit'; from tracekit.cli import commands; commands()"],
        env=os.environ | {"_TRACEKIT_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_TRACEKIT_COMPLETE" in ran.stdout
