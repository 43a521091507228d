"""`tracekit PATH` and `tracekit open PATH`: whatever the path is, the command that reads it; nearest names."""

from __future__ import annotations

import pickle
import re
import shutil
import threading
from pathlib import Path

import click
import pytest

from tests.analysis.rl.logs import lines, write
from tests.cases import case
from tests.handmade import COMMANDS, run, slow_trace
from tracekit.base import limits, paths
from tracekit.base.errors import ExitCode, StoreError
from tracekit.cli import _MOVED
from tracekit.live import watch
from tracekit.sources.load import jobs_in
from tracekit.store import Store

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


@pytest.mark.slow
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
    before = set(Path().iterdir())
    for command in ("whatif X", "open X", "store list X", "hang X", "dashboard X", "collect --segments X -- true"):
        with case(command):
            ran = run(*("" if word == "X" else word for word in command.split()))
            assert (ran.code, ran.out) == (2, "")
            assert ran.message.endswith("the path is empty")
    assert set(Path().iterdir()) == before


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


def test_the_help_opens_with_what_to_type_to_record_to_ask_and_to_open() -> None:
    lines = [line.split(maxsplit=1) for line in run("--help").out.splitlines()[2:5]]
    assert [word for word, _ in lines] == ["Record", "Ask", "Open"]
    assert [line.split()[:2] for _, line in lines] == [["tracekit", name] for name in ("collect", "whatif", "open")]


def test_a_command_that_moved_says_where_it_is() -> None:
    for name, path in _MOVED.items():
        ran = run(name, "x")
        assert (ran.code, ran.out) == (2, "")
        assert ran.message.startswith(f"tracekit: `tracekit {name}` is `tracekit {path}` now; see")
        assert run(*path.split(), "--help").code == 0


def test_a_long_list_of_options_has_sections_and_lacks_none() -> None:
    for name in ("collect", "whatif"):
        command = COMMANDS[name]
        sections = [option for names in command.sections.values() for option in names]
        options = [param.name for param in command.params if isinstance(param, click.Option)]
        assert sorted(sections) == sorted(options)
        shown = run(name, "--help").out
        assert all(f"\n{title}:\n" in shown for title in command.sections)


def test_a_mistyped_label_kind_or_cause_is_answered_with_the_nearest() -> None:
    whatif = ("whatif", "slow.parquet")
    for words, meant in (
        ((*whatif, "--fix", "stge=1"), "stage"),
        ((*whatif, "--by", "stpe"), "step"),
        ((*whatif, "--fix", "kind=forward-computte"), "forward-compute"),
        ((*whatif, "--fix", "fix=replace-worker"), "replace-workers"),
        ((*whatif, "--fail-on", "bad-workr>5%"), "bad-worker"),
        (("culprits", "slow.parquet", "--part", "compte"), "compute"),
        (("gate", "slow.parquet", "--baseline", "one", "--part", "forward-comput"), "forward-compute"),
        (("synth", "--out", "x.parquet", "--cause", "slow-workr"), "slow-worker"),
    ):
        ran = run(*words)
        assert (ran.code, ran.out) == (2, ""), words
        assert ran.message.endswith(f"; did you mean `{meant}`?"), ran.message


def test_a_mistyped_option_of_collect_is_no_command() -> None:
    ran = run("collect", "--stps", "1:2", "--", "true")
    assert (ran.code, ran.out) == (2, "")
    assert "no such option '--stps' (did you mean" in ran.message
    assert "--steps" in ran.message


#: Commands that read a file which cannot be in object storage, whose place is X.
READERS = (
    *("whatif X", "rl X", "experts X --ranks 8 --replicas 64", "optimize X", "optimize --model X", "culprits X"),
    *("store export X --out o.parquet", "import X", "compare X slow.parquet", "gate slow.parquet --baseline X"),
    *("fleet report X", "fleet culprits X", "whatif slow.parquet --unprofiled X", "dashboard --study X"),
    *("whatif slow.parquet --gpu X", "whatif slow.parquet --gpu H200 --gpu-from X"),
)
#: Commands that read a store or something else.
READERS_OF_STORES = ("X", "open X", "dashboard X", "bill X", "hang X", "watch X", "store list X", "store check X")
WRITERS = (
    *("whatif slow.parquet --html X", "whatif slow.parquet --markdown X", "whatif slow.parquet --csv X"),
    *("synth --out X", "collect --out X -- true", "collect --segments X -- true", "collect --profiler X -- true"),
    *("fleet run slow.parquet --out X", "store export slow.parquet --out X", "metrics alerts X", "hang dumps --out X"),
)


@pytest.mark.parametrize("address", ["gs://bucket/a.log", "https://host/a.log"])
def test_an_address_is_refused_as_it_was_written_and_nobody_is_asked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_answer", lambda *_: pytest.fail("storage was asked"))
    stored = address.startswith("gs:")
    readers = READERS if stored else (*READERS, *READERS_OF_STORES)
    why = "in object storage: `tracekit fleet run` reads traces there" if stored else "no such file or folder"
    refused = "in object storage, which is only read" if stored else "an address"
    for commands, words in ((readers, why), (WRITERS, refused)):
        for command in commands:
            with case(command):
                ran = run(*(address if word == "X" else word for word in command.split()))
                assert (ran.code, ran.message.startswith(f"tracekit: {address}: {words}")) == (2, True), ran.err
    assert not list(Path().glob("*:"))


def test_of_storage_that_does_not_answer_every_reader_of_stores_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    address = "az://container/live"
    for command in READERS_OF_STORES:
        with case(command):
            ran = run(*(address if word == "X" else word for word in command.split()))
            why = (
                "a store in object storage is read-only" if "check" in command else "cannot be read: AZURE_STORAGE_ACC"
            )
            assert (ran.code, ran.message.startswith(f"tracekit: {address}: {why}")) == (2, True), ran.err


def test_an_output_that_cannot_be_meant_is_refused() -> None:
    assert "ends in .gz, .json, .parquet" in run("store", "export", "slow.parquet", "--out", "timeline.txt").message
    assert not Path("timeline.txt").exists()


def test_incidents_of_a_job_that_is_not_there_are_no_empty_list() -> None:
    assert run("import", "slow.parquet", "--store", "jobs.store", "--name", "slow").code == 0
    assert run("store", "incidents", "slow", "--store", "jobs.store").code == 0
    ran = run("store", "incidents", "slw", "--store", "jobs.store")
    assert (ran.code, ran.out) == (2, "")
    assert ran.message.endswith("no job 'slw'; did you mean 'slow'?")


def test_what_to_type_next_names_the_browser_once() -> None:
    (named,) = [line for line in run("whatif", "slow.parquet").out.splitlines() if "tracekit open" in line]
    assert named.split("  #")[0].strip() == "tracekit open slow.parquet"
    assert run("import", "one", "--store", "jobs.store").code == 0
    assert "tracekit open jobs.store" in run("whatif", "--store", "jobs.store").out
    assert "tracekit open" not in run("whatif", "slow.parquet", "--redact").out


def test_a_screen_waits_for_the_store_that_a_watch_is_about_to_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(Path("jobs.store"))
    monkeypatch.setattr(watch.time, "sleep", lambda _: store.add([]))
    watch.await_store(store)
    assert store.is_store()
    assert capsys.readouterr().err == (
        "tracekit: jobs.store: no store there yet; waiting for its first window (Ctrl-C ends it)\n"
    )
    Path("file.store").touch()
    for path in ("slow.parquet", "file.store", "no-such"):
        with pytest.raises(StoreError):
            watch.await_store(Store(Path(path)))
    assert capsys.readouterr().err == ""


def test_the_help_shows_every_command_whole() -> None:
    shown = run("--help").out
    assert "..." not in shown.split("PATH | COMMAND [ARGS]...", 1)[1]
    few = re.search(r"^More: (.*);", shown, re.MULTILINE)
    assert few is not None
    assert {*re.findall(r"^  (\w+) ", shown, re.MULTILINE), *few[1].split(", ")} >= set(COMMANDS)


def test_a_folder_of_dumps_does_not_open_in_the_browser() -> None:
    ran = run("open", "dumps")
    assert ran.code == 2
    assert "tracekit hang dumps" in ran.err


def test_a_search_that_takes_long_says_what_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said_at_once: tuple[list[str], threading.Event]
) -> None:
    """The search goes on once the line is out."""
    lines, said = said_at_once
    monkeypatch.setattr(limits.Search, "count", lambda *_: said.wait(30))
    run("whatif", tmp_path)
    assert lines[0] == f"tracekit: {tmp_path}: looking for traces, in up to 50,000 files and folders"


def test_folders_of_the_kernel_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("disk/proc", "disk/home"):
        (tmp_path / folder).mkdir(parents=True)
        slow_trace().write_parquet(tmp_path / folder / "slow.parquet")
    disk = tmp_path / "disk"
    assert jobs_in(disk) == [disk / "home" / "slow.parquet", disk / "proc" / "slow.parquet"]
    monkeypatch.setattr(limits, "OF_KERNEL", (str(disk / "proc"), str(disk / "absent")))
    assert jobs_in(disk) == [disk / "home" / "slow.parquet"]


def test_a_folder_as_large_as_a_disk_is_not_searched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_ENTRIES", 30)
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
