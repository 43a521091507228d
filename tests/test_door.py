"""`tracekit PATH` and `tracekit open PATH`: whatever the path is, the command that reads it; nearest names."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from tests.analysis.rl.logs import lines, write
from tests.handmade import COMMANDS, run, slow_trace
from tracekit.base import searches
from tracekit.base.exit_codes import ExitCode

GPU_FOLDER = Path(__file__).resolve().parents[1] / "sample_traces" / "gpu_slow_input"
DUMP = {"version": "2.10", "pg_config": {}, "entries": []}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of each: a trace, two jobs, a store, a study, dumps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    slow_trace().write_parquet("slow.parquet")
    Path("runs").mkdir()
    shutil.copy("slow.parquet", "runs/a.parquet")
    shutil.copytree(GPU_FOLDER, "runs/gpus")
    Path("one").mkdir()
    shutil.copy("slow.parquet", "one/only.parquet")
    Path("dumps").mkdir()
    Path("dumps/dump_0").write_bytes(pickle.dumps(DUMP))
    Path("console.log").write_text("loading\nstep:1 - timing_s/gen:6.0 - timing_s/step:9.0\n")
    write(Path("rl.jsonl"), lines())
    Path("records").mkdir()
    write(Path("records/node-1.jsonl"), lines())
    return tmp_path


def test_a_path_runs_the_command_that_reads_it() -> None:
    for path, same in (
        ("slow.parquet", ["whatif", "slow.parquet"]),
        ("one", ["whatif", "one"]),
        ("runs/gpus", ["whatif", "runs/gpus"]),
        ("runs", ["store", "list", "runs"]),
        ("dumps", ["hang", "dumps"]),
        ("console.log", ["whatif", "console.log"]),
        ("rl.jsonl", ["whatif", "rl.jsonl"]),
        ("records", ["whatif", "records"]),
    ):
        ran, expected = run(path), run(*same)
        assert (ran.code, ran.out) == (expected.code, expected.out), path
        assert ran.out, path


def test_the_only_trace_in_a_folder_is_read() -> None:
    assert run("whatif", "one", "--json").out == run("whatif", "one/only.parquet", "--json").out


@pytest.mark.slow
def test_a_store_lists_its_jobs_and_a_study_is_reported() -> None:
    assert run("import", "runs", "--store", "jobs").code == 0
    ran = run("jobs")
    assert (ran.code, ran.out) == (0, run("store", "list", "--store", "jobs").out)
    assert "gpus" in ran.out
    assert run("fleet", "run", "one", "--out", "study", "--processes", "1").code == 0
    assert run("study").out == run("fleet", "report", "study").out


def test_traces_and_the_store_that_they_were_imported_into_are_no_two_jobs() -> None:
    assert run("import", "one", "--store", "one/tracekit.store").code == 0
    assert (
        run("one").out == run("whatif", "one").out == run("whatif", "one/only.parquet").out.replace("/only.parquet", "")
    )
    assert run("import", "runs", "--store", "runs/tracekit.store").code == 0
    listed = run("runs").out
    assert "runs holds 2 jobs" in listed
    assert "A store:      tracekit open runs/tracekit.store" in listed


def test_an_empty_path_is_not_the_working_directory() -> None:
    for command in (["whatif"], ["open"], ["store", "list"]):
        ran = run(*command, "")
        assert (ran.code, ran.out) == (2, "")
        assert ran.message.endswith("the path is empty")


def test_options_reach_the_command() -> None:
    assert run("slow.parquet", "--json").out == run("whatif", "slow.parquet", "--json").out


def test_a_folder_of_several_jobs_is_listed_and_never_analysed_in_part() -> None:
    listed = run("runs").out
    assert "runs holds 2 jobs" in listed
    assert "    a.parquet\n    gpus\n" in listed
    for command in (("whatif", "runs"), ("culprits", "runs"), ("compare", "runs", "slow.parquet")):
        ran = run(*command)
        assert (ran.code, ran.out) == (2, "")
        assert "runs: a folder of 2 jobs, not one trace" in ran.err


def test_a_misspelt_command_or_path_is_answered_with_the_nearest() -> None:
    for words, meant in (
        (["whatiff"], "tracekit whatif"),
        (["dashbord"], "tracekit dashboard"),
        (["slow_parquet"], "tracekit slow.parquet"),
        (["slow.parqet"], "slow.parquet"),
        (["whatif", "runs/b.parquet"], "runs/a.parquet"),
        (["hang", "dump"], "dumps"),
    ):
        ran = run(*words)
        assert (ran.code, ran.out) == (2, ""), words
        assert f"did you mean {meant}?" in ran.err.replace("`", "")


def test_a_word_like_nothing_is_refused() -> None:
    assert "no such command or path 'zzz'" in run("zzz").err
    assert run("zzz/zzz.parquet").err.startswith("tracekit: zzz/zzz.parquet: no such file or folder")


def test_the_help_shows_every_command_whole() -> None:
    shown = run("--help").out
    assert "..." not in shown.split("PATH | COMMAND [ARGS]...", 1)[1]
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_a_folder_of_dumps_does_not_open_in_the_browser() -> None:
    ran = run("open", "dumps")
    assert ran.code == 2
    assert "tracekit hang dumps" in ran.err


def test_a_folder_as_large_as_a_disk_is_not_searched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searches, "MOST_ENTRIES", 30)
    for number in range(20):
        (tmp_path / "disk" / f"folder-{number:02}" / "below").mkdir(parents=True)
    few = tmp_path / "disk" / "folder-00"
    for command in (
        ("bill",),
        ("whatif",),
        (
            "store",
            "list",
        ),
        ("hang",),
        ("fleet", "report"),
        (),
    ):
        ran = run(*command, tmp_path / "disk")
        assert (ran.code, ran.out) == (ExitCode.BAD_INPUT, "")
        assert ran.message.removeprefix(f"tracekit: {tmp_path / 'disk'}: ") == (
            "not searched further after 30 files and folders; name the trace, or a smaller folder"
        ), command
    assert "not searched" not in run("whatif", few).message
