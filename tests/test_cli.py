"""The commands as a person or a script uses them: answers, files, exit codes, what goes to which stream.

Most run in this process through click; what only a process can show (exit codes of `main`, imports) runs as one.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import polars as pl
import pytest
from click.testing import CliRunner, Result

import tracekit
from tests.handmade import (
    COMMANDS,
    FIXED_STEP_S,
    HEALTHY_STEP_S,
    IDEAL_STEP_S,
    KEPT_STEP_S,
    LAYOUT,
    SLOW_STEP_S,
    Ran,
    healthy_frame,
    published_columns,
    run,
    run_process,
    slow_frame,
    slow_trace,
)
from tracekit import cli
from tracekit.base.errors import TracekitError
from tracekit.cli import commands
from tracekit.store import Incoming, Store
from tracekit.trace.canonical import Trace


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, at 80 columns, with no default store but the one there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TRACEKIT_STORE", raising=False)
    return tmp_path


@pytest.fixture
def slow(folder: Path) -> str:
    slow_trace().write_parquet("slow.parquet")
    return "slow.parquet"


@pytest.fixture
def healthy(folder: Path) -> str:
    Trace.from_frame(healthy_frame((0, 1)), LAYOUT, name="healthy job").write_parquet("healthy.parquet")
    return "healthy.parquet"


def tracekit_(*arguments: str) -> Result:
    """Run a command in this process; errors come back as `exception`."""
    return CliRunner().invoke(commands, arguments, standalone_mode=False)


def done(*arguments: str) -> Result:
    result = tracekit_(*arguments)
    assert result.exception is None, result.exception
    return result


def failed(*arguments: str) -> str:
    result = tracekit_(*arguments)
    assert isinstance(result.exception, TracekitError), result.output
    return str(result.exception)


def whatif(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(done("whatif", *arguments, "--json").stdout)
    return content


# ---- whatif


def test_whatif_answers_what_was_worked_out_by_hand(slow: str) -> None:
    found = whatif(slow)
    assert found["step_time_s"] == dict.fromkeys(("recorded", "original", "with_delays"), SLOW_STEP_S) | {
        "ideal": IDEAL_STEP_S
    }
    assert found["slowdown"] == pytest.approx(SLOW_STEP_S / IDEAL_STEP_S)
    assert found["waste"] == pytest.approx(1 - IDEAL_STEP_S / SLOW_STEP_S)
    assert found["straggling"]
    assert found["wasted_gpu_hours"] == pytest.approx(2 * (SLOW_STEP_S - IDEAL_STEP_S) * 4 / 3600)
    assert found["wasted_gpu_hours_per_day"] == pytest.approx((1 - IDEAL_STEP_S / SLOW_STEP_S) * 4 * 24)
    assert found["m_w"] == pytest.approx((SLOW_STEP_S - FIXED_STEP_S) / (SLOW_STEP_S - IDEAL_STEP_S))
    assert found["slowest_workers"] == [{"dp_rank": 1, "pp_rank": 0}]
    worst = found["by_worker"][0]
    assert (worst["dp_rank"], worst["pp_rank"], worst["rank"]) == (1, 0, 1)
    assert worst["slowdown"] == pytest.approx(KEPT_STEP_S / IDEAL_STEP_S)
    assert found["trust"]["replay_error"] == found["trust"]["discrepancy"] == 0


def test_whatif_on_a_healthy_job_finds_no_straggler(healthy: str) -> None:
    found = whatif(healthy)
    assert found["slowdown"] == 1
    assert not found["straggling"]
    assert found["verdict"]["kind"] == "balanced"
    assert len(done("whatif", healthy).stdout.splitlines()) <= 5


def test_fix_and_keep_answer_each_question_in_order(slow: str) -> None:
    """--fix makes ops as fast as their peers in the job as it ran; --keep leaves them as recorded in the ideal job."""
    asked = whatif(
        slow, "--fix", "worker=1,0", "--fix", "worker=1,0 and step=1", "--fix", "compute", "--keep", "worker=1,0",
        "--keep", "kind=optimizer", "--fix", "everything",
    )["questions"]  # fmt: skip
    answers = {row["question"]: (row["ops"], row["step_time_s"]) for row in asked}
    assert answers == {
        "fix worker=1,0": (24, HEALTHY_STEP_S),
        "fix worker=1,0 and step=1": (12, (SLOW_STEP_S + HEALTHY_STEP_S) / 2),
        "fix compute": (40, HEALTHY_STEP_S),
        "fix everything": (96, HEALTHY_STEP_S),
        "keep only worker=1,0": (24, KEPT_STEP_S),
        "keep only kind=optimizer": (8, IDEAL_STEP_S),
    }
    assert list(answers)[-2:] == ["keep only worker=1,0", "keep only kind=optimizer"]
    assert asked[0]["saved_s"] == SLOW_STEP_S - HEALTHY_STEP_S
    assert asked[0]["saved_gpu_hours_per_day"] == pytest.approx((1 - 11.25 / 15.5) * 4 * 24)
    shown = done("whatif", slow, "--fix", "worker=1,0").stdout
    assert "fix worker=1,0" in shown
    assert "11.25 s" in shown


def test_ignored_steps_are_as_if_never_recorded(folder: Path) -> None:
    """Step 7 takes twice as long throughout; without it the job is the slow job again."""
    twice = pl.when(pl.col("step") == 7).then(2.0).otherwise(1.0)
    ops = slow_frame((0, 1, 7)).with_columns(pl.col("start") * twice, pl.col("duration") * twice)
    Trace.from_frame(ops, LAYOUT, name="job").write_parquet("job.parquet")
    assert whatif("job.parquet")["step_time_s"]["recorded"] == pytest.approx(SLOW_STEP_S * 4 / 3)
    left = whatif("job.parquet", "--ignore-steps", "7")
    assert left["step_time_s"]["ideal"] == IDEAL_STEP_S
    assert [row["step"] for row in left["by_step"]] == [0, 1]
    assert whatif("job.parquet", "--ignore-steps", "1-3,7")["job"]["steps"] == 1


def test_steps_that_make_no_sense_are_quoted(slow: str) -> None:
    for steps, reason in (
        ("0-9", "every step is left out; the trace has steps 0 to 1"),
        ("5", "none of the steps to leave out exists; the trace has steps 0 to 1"),
        ("", "--ignore-steps ''; expected numbers and ranges such as 12,40-45"),
        ("a", "--ignore-steps 'a'; expected numbers"),
        ("9-3", "--ignore-steps '9-3'; expected a range from a smaller to a larger number"),
        ("0-999999999", "--ignore-steps '0-999999999'; expected a range"),
        ("0-9999999999", "--ignore-steps: 9999999999 is no step number, which has at most 9 digits"),
    ):
        assert reason in failed("whatif", slow, "--ignore-steps", steps)


#: Tables of a pipeline that only the replay has.
PER_STEP_TABLES = ("by_kind_per_step", "by_pp_rank_per_step", "by_dp_rank_per_step", "by_worker_per_step")


def test_csv_writes_every_table(slow: str, folder: Path) -> None:
    result = done("whatif", slow, "--csv", "deep/tables")
    report = tracekit.load(slow).whatif()
    assert sorted(path.stem for path in (folder / "deep/tables").iterdir()) == sorted(
        (*report.table_names, *PER_STEP_TABLES)
    )
    assert "Wrote deep/tables" in result.stderr
    for name in report.table_names:
        written = pl.read_csv(folder / "deep/tables" / f"{name}.csv", schema=report.table(name).schema)
        assert written.equals(report.table(name)), name


def test_names_in_csv_are_no_formulas(slow: str, folder: Path) -> None:
    trace = tracekit.load(slow).trace
    hosts = {str(rank): "=HYPERLINK(0)" for rank in range(4)}
    replace(trace, metadata={**trace.metadata, "hosts": hosts}).write_parquet("formula.parquet")
    done("whatif", "formula.parquet", "--csv", "formula")
    written = pl.read_csv(folder / "formula" / "by_worker.csv")
    assert written["host"].unique().to_list() == ["'=HYPERLINK(0)"]


@pytest.mark.parametrize("command", ["whatif", "bill", "dashboard"])
def test_a_price_is_a_number_that_a_gpu_hour_can_cost(command: str, slow: str) -> None:
    for price in ("nan", "inf", "1e400", "-1", "1e300"):
        assert f"{float(price)} is not in the range 0<=x<=1000000" in run(command, slow, "--gpu-hour", price).err


def test_parquet_writes_exact_s_of_every_worker_in_every_step(slow: str) -> None:
    result = done("whatif", slow, "--parquet", "workers.parquet", "--json")
    json.loads(result.stdout)
    assert "Wrote workers.parquet" in result.stderr
    with open("workers.parquet", "rb") as file:
        table = pl.read_parquet(file)
    assert table.columns == ["step", "dp_rank", "pp_rank", "slowdown"]
    assert table.height == 2 * 4
    worst = table.filter((pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 0))["slowdown"]
    assert worst.to_list() == pytest.approx([KEPT_STEP_S / IDEAL_STEP_S] * 2)


#: The slow job has S = 1.148, waste 12.9 %, replay error and discrepancy 0.
CONDITIONS = {
    "slowdown>1.1": 3,
    "slowdown>1.2": 0,
    "slowdown<1.2": 3,
    "slowdown >= 1.1": 3,
    "slowdown<=1.1": 0,
    "waste>12%": 3,
    "waste>0.12": 3,
    "waste>13%": 0,
    "replay_error>0": 0,
    "replay_error<=0": 3,
    "discrepancy>=0": 3,
    "discrepancy>.05": 0,
}


def test_fail_on_exits_with_3_where_the_condition_holds(slow: str) -> None:
    codes = {text: done("whatif", slow, "--json", "--fail-on", text).return_value for text in CONDITIONS}
    assert codes == CONDITIONS


@pytest.mark.slow
def test_fail_on_still_prints_the_report_and_leaves_the_process_with_3(slow: str) -> None:
    ran = run_process("whatif", slow, "--fail-on", "slowdown>1.1")
    assert ran.code == 3
    assert "STRAGGLER" in ran.out


def test_a_condition_that_makes_no_sense_is_quoted_before_any_work() -> None:
    for text in ("", "S>1.1", "slowdown=1.1", "slowdown>", "slowdown>1.1.1", "slowdown>-1", "waste>1e1"):
        message = failed("whatif", "gone.parquet", "--fail-on", text)
        assert message.startswith(f"--fail-on {text!r}; expected slowdown, waste")


def test_a_published_trace_takes_its_layout_from_yaml(folder: Path) -> None:
    published_columns(slow_frame((0, 1))).write_parquet("trace.parquet")
    Path("meta.yaml").write_text("trial_name: trial\ndp_size: 2\npp_size: 2\nworld_size: 4\n")
    found = whatif("trace.parquet", "--layout", "meta.yaml")
    assert found["job"]["name"] == "trial"
    assert found["step_time_s"]["ideal"] == IDEAL_STEP_S


def test_sources_that_contradict_each_other_are_said() -> None:
    for arguments, reason in (
        (
            ("a.parquet", "--store", "b", "--job", "b"),
            "a TRACE and --store, --job: give a TRACE, or what chooses a job",
        ),
        (
            ("a.parquet", "--window", "99"),
            "a TRACE and --window: give a TRACE, or what chooses a job of a store, not both",
        ),
        (("--layout", "meta.yaml"), "--layout belongs to a TRACE; name the trace file too"),
        ((), "tracekit.store: no such store; make one with `tracekit import TRACE"),
        (("--store", "gone.duckdb"), "gone.duckdb: no such store"),
    ):
        assert reason in failed("whatif", *arguments)


def test_options_that_cannot_go_together_are_refused_before_any_work() -> None:
    for reason, *arguments in (
        ("--json and --markdown - both write to stdout", "whatif", "gone", "--json", "--markdown", "-"),
        ("--as prints to stdout, and so does --json", "whatif", "gone", "--json", "--as", "theirs"),
        ("--as prints to stdout, and so does --json", "whatif", "gone", "--markdown", "-", "--as", "theirs"),
        ("no TRACE given; expected at least one", "import"),
        ("--steps chooses what a timeline shows", "store", "export", "gone", "-o", "x.parquet", "--steps", "1"),
        ("one of --json, --csv and --parquet at a time", "store", "sql", "SELECT 1", "--json", "--csv"),
        ("one of --json, --csv and --parquet at a time", "store", "sql", "SELECT 1", "--csv", "--parquet", "x.parquet"),
        ("one of --json and --csv at a time", "bill", "gone", "--json", "--csv"),
        ("--layout and --unit belong to a TRACE", "store", "list", "--unit", "ms"),
        ("--layout and --unit belong to a TRACE", "store", "list", "--layout", "meta.yaml"),
        ("--microbatches '24,0'; expected whole", "optimize", "--runs", "gone", "--microbatches", "24,0"),
        ("--microbatches '24,x'; expected whole", "optimize", "--runs", "gone", "--microbatches", "24,x"),
        ("--microbatches '1048577'; expected whole", "optimize", "--runs", "gone", "--microbatches", "1048577"),
    ):
        assert reason in failed(*arguments)


def test_a_folder_for_output_that_cannot_be_made_is_said(slow: str) -> None:
    said = f"{slow}: cannot be created: File exists; choose another"
    assert failed("metrics", "alerts", slow) == f"{said} folder"
    assert failed("whatif", slow, "--csv", slow) == f"{said} directory"


def test_a_long_question_is_shortened_where_it_is_answered(slow: str) -> None:
    assert len(done("whatif", slow, "--fix", f"rank={','.join(['3'] * 2000)}").stdout) < 4000


def test_what_cannot_be_read_is_said_as_what_it_is(slow: str, folder: Path) -> None:
    Path("report.json").write_bytes(tracekit.load(slow).report.to_json().encode()[:2000])
    Path("loop").symlink_to("loop")
    cut = "report.json: a report, not a trace, and not whole JSON (Input data was truncated); copy the report again"
    assert cut in failed("import", "report.json")
    assert "loop: a link that leads nowhere, or back to itself" in failed("store", "check", "loop")
    assert "file:///etc/none: no such file or folder" in failed("whatif", "file:///etc/none")
    assert "slow-worker: factor is 1e+300; expected 1 to 1e+06" in failed(
        "synth", "--out", "x.parquet", "--cause", "slow-worker:factor=1e300"
    )
    assert "steps is 99999999999; expected 1 to 10,000,000" in failed("synth", "--out", "x", "--steps", "99999999999")


# ---- import, info and the store


@pytest.mark.slow
def test_import_then_whatif_by_name_by_default_and_by_environment(slow: str, healthy: str, folder: Path) -> None:
    result = done("import", slow, healthy)
    assert result.stdout.splitlines() == [
        "Imported slow job (96 ops) into tracekit.store",
        "Imported healthy job (96 ops) into tracekit.store",
        "Next: tracekit whatif --store tracekit.store --job 'healthy job'",
    ]
    newest = done("whatif", "--json")
    assert json.loads(newest.stdout)["job"]["name"] == "healthy job"
    assert newest.stderr.splitlines() == ["No job named: taking the newest one in the store, healthy job"]
    named = done("whatif", "--job", "slow job", "--json")
    assert json.loads(named.stdout)["slowdown"] == pytest.approx(SLOW_STEP_S / IDEAL_STEP_S)
    assert named.stderr.splitlines() == []
    Path("tracekit.store").rename("other.duckdb")
    assert whatif("--store", "other.duckdb")["job"]["name"] == "healthy job"
    environment = CliRunner(env={"TRACEKIT_STORE": "other.duckdb"}).invoke(
        commands, ["store", "list"], standalone_mode=False
    )
    assert "healthy job" in environment.stdout


def test_the_next_command_can_be_pasted_into_a_shell(slow: str) -> None:
    name = "$(touch hacked); 'x' \"y\""
    line = done("import", slow, "--name", name, "--store", "my jobs.duckdb").stdout.splitlines()[-1]
    assert shlex.split(line)[1:] == ["tracekit", "whatif", "--store", "my jobs.duckdb", "--job", name]


def test_import_takes_all_traces_or_none(slow: str, healthy: str) -> None:
    Path("bad.parquet").write_bytes(b"")
    assert "bad.parquet: the file is empty" in failed("import", slow, "bad.parquet")
    assert not Path("tracekit.store").exists()
    done("import", healthy)
    assert "already has a job 'healthy job'; replace it with --replace" in failed("import", slow, healthy)
    assert [job.name for job in Store(Path("tracekit.store")).jobs()] == ["healthy job"]


def test_import_replaces_and_names_on_request(slow: str, healthy: str) -> None:
    done("import", slow, "--name", "mine")
    done("import", healthy, "--name", "mine", "--replace")
    assert not whatif("--job", "mine")["straggling"]
    assert "two of the traces have the job name 'slow job'" in failed("import", slow, slow)
    assert "--name 'x' for 2 traces; name one trace at a time" in failed("import", slow, healthy, "--name", "x")
    done("import", slow, "--name", "")
    assert [job.name for job in Store(Path("tracekit.store")).jobs()] == ["", "mine"]


def test_import_of_a_path_that_is_not_utf8_works(slow: str) -> None:
    published_columns(slow_frame()).write_parquet("trace.parquet")
    Path("trace.parquet").rename("half\udcff.parquet")
    Path("meta.yaml").write_text("dp_size: 2\npp_size: 2\nworld_size: 4\n")
    ran = run("import", "half\udcff.parquet", "--layout", "meta.yaml", "--store", "jobs.duckdb")
    assert ran.code == 0, ran.err
    job = Store(Path("jobs.duckdb")).jobs()[0]
    assert (job.name, job.source) == ("half\\udcff", "half\\udcff.parquet")


def test_info_says_what_a_trace_holds(folder: Path) -> None:
    gone = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1) & (pl.col("step") == 5)
    trace = Trace.from_frame(
        slow_frame((4, 5)).filter(~gone), LAYOUT, name="partial", metadata={"framework": "Megatron"}
    )
    trace.write_parquet("partial.parquet")
    shown = done("store", "list", "partial.parquet").stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[:6] == [
        "Job        partial",
        "Layout     dp 2, pp 2, tp 1, cp 1, ep 1, vpp 1, dsp 1, world_size 4",
        "Steps      2, from 4 to 5",
        "Workers    4 of 4 traced, 7 of 8 worker-steps",
        "Ops        84",
        'framework  "Megatron"',
    ]
    assert [line.split() for line in shown.splitlines() if "optimizer " in line] == [
        ["optimizer", "7", "500.0", "ms", "500.0", "ms"]
    ]


def test_info_lists_the_jobs_of_a_store_by_what_fixing_them_saves(slow: str, healthy: str) -> None:
    """Like its peers, rank 2 takes 4.25 s less of 15.5 s: 26.3 of the 96 GPU-hours that 4 GPUs have in a day."""
    done("import", healthy, slow)
    rows = [line for line in done("store", "list", "--store", "tracekit.store").stdout.splitlines() if " job " in line]
    assert [row.split()[:5] for row in rows] == [["slow", "job", "26.3", "4", "2"], ["healthy", "job", "0", "4", "2"]]
    assert "Job" in done("store", "list", "--job", "slow job").stdout


# ---- export


def test_export_writes_a_timeline_and_says_what_is_in_it(slow: str) -> None:
    result = done("store", "export", slow, "-o", "out.json.gz", "--steps", "1")
    assert result.stdout == "Wrote out.json.gz: 144 slices, 1 of 2 steps. Open it in https://ui.perfetto.dev\n"
    with gzip.open("out.json.gz", "rt") as file:
        assert json.load(file)["otherData"]["name"] == "slow job"
    done("import", slow)
    assert "288 slices, 2 of 2 steps" in done("store", "export", "--job", "slow job", "--out", "two.json.gz").stdout
    assert "none of these steps is in the job; it has 2 steps from 0 to 1" in failed(
        "store", "export", slow, "-o", "x.json.gz", "--steps", "9"
    )
    assert "--steps 'x'; expected numbers" in failed("store", "export", slow, "-o", "x.json.gz", "--steps", "x")
    assert not Path("x.json.gz").exists()


def test_export_to_parquet_writes_the_whole_trace(slow: str) -> None:
    assert done("store", "export", slow, "-o", "again.parquet").stdout == "Wrote again.parquet: 96 ops\n"
    assert tracekit.load("again.parquet").trace.ops.equals(tracekit.load(slow).trace.ops)


def test_a_timeline_of_too_many_slices_has_the_slowest_steps_and_says_so(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has 48 ops, which are drawn three times."""
    monkeypatch.setattr("tracekit.trace.chrome.MOST_SLICES", 144)
    shown = done("store", "export", slow, "-o", "out.json.gz").stdout
    assert shown.startswith("Wrote out.json.gz: 144 slices, 1 of 2 steps, the slowest ones; choose others with --steps")


# ---- synth


def test_a_job_that_cannot_be_simulated_is_said(folder: Path) -> None:
    for options, reason in (
        (("--dp", "0"), "dp is 0; expected an integer from 1 to 1048576"),
        (("--microbatches", "0"), "microbatches is 0; expected 1 to 10,000,000"),
        (("--steps", "-1"), "steps is -1; expected 1 to 10,000,000"),
        (("--noise", "nan"), "noise is nan; expected 0 to 1"),
        (("--seed", "-1"), "seed is -1; expected 0 or more"),
        (("--vpp", "2", "--microbatches", "3"), "3 is not a multiple of pp 4; use 4"),
        (("--vpp", "2", "--microbatches", "6"), "6 is not a multiple of pp 4; use 4 or 8"),
        (("--cause", "slow"), "unknown cause 'slow'; known: slow-worker"),
        (("--cause", "slow-worker:dp=99"), "dp_rank is 99; the job has 4 of them, so dp_rank must be 0 to 3"),
        (("--cause", "slow-worker:factor=x"), "factor is 'x'; expected a number"),
        (("--cause", "slow-worker:speed=2"), "'speed=2'; slow-worker takes dp_rank="),
        (("--pp", "1", "--cause", "slow-p2p-link"), "use a larger layout"),
    ):
        assert reason in failed("synth", "--out", "job.parquet", *options)
        assert list(folder.iterdir()) == []


def test_a_simulated_job_can_be_asked_what_if_by_pasting_the_next_command(folder: Path) -> None:
    options = ("--dp", "2", "--pp", "2", "--microbatches", "2", "--steps", "1", "--name", "small")
    line = done("synth", "--out", "my job.parquet", *options).stdout
    assert shlex.split(line.partition("Next: ")[2]) == ["tracekit", "whatif", "my job.parquet"]
    assert whatif("my job.parquet")["job"]["name"] == "small"


# ---- help, width, speed of start


def test_every_command_and_option_explains_itself() -> None:
    for name, command in {"": commands, **COMMANDS}.items():
        assert command.help, name
        assert command.help.lstrip("\b\n")[0].isupper(), name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"
                assert parameter.help.endswith("."), f"{name} {parameter.opts}"


def test_help_fits_80_columns() -> None:
    for arguments in (("--help",), *((name, "--help") for name in COMMANDS)):
        shown = done(*arguments).stdout
        assert shown
        assert max(map(len, shown.splitlines())) <= 80, arguments


def test_no_report_is_wider_than_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With long names and hosts, many questions, a large store, and missing workers."""
    gone = (pl.col("dp_rank") == 0) & (pl.col("pp_rank") == 1) & (pl.col("step") == 1)
    hosts = {str(rank): f"node-{rank}." + "very-long-domain." * 4 for rank in range(4)}
    trace = Trace.from_frame(
        slow_frame((0, 1)).filter(~gone),
        LAYOUT,
        name="long name " * 30,
        metadata={"hosts": hosts, "key " * 40: "x" * 400},
    )
    trace.write_parquet("job.parquet")
    done("import", "job.parquet")
    questions = ("--fix", "worker=1,0", "--keep", "stage=1 or " * 12 + "stage=0")
    for width, command in itertools.product(
        (80, 120),
        (
            ("whatif", "job.parquet", *questions),
            ("store", "list", "job.parquet"),
            (
                "store",
                "list",
            ),
        ),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(len(line.rstrip()) for line in done(*command).stdout.splitlines()) <= width, command


HEAVY = ("numpy", "polars", "duckdb", "pandas", "pyarrow", "rich", "networkx", "yaml")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import contextlib, sys\nfrom tracekit.cli import main\n"
        "for arguments in (['--version'], ['--help'], ['whatif', '--help']):\n"
        "    sys.argv[1:] = arguments\n    with contextlib.suppress(SystemExit):\n        main()\n"
        f"    print(arguments, [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines() == ["['--version'] []", "['--help'] []", "['whatif', '--help'] []"]
    assert ran.stdout.startswith(f"tracekit, version {tracekit.__version__}\n")


#: Says, where numpy is imported, how many threads it is told to start.
WATCH_NUMPY = """
import os, sys
class Numpy:
    def find_spec(name, path=None, target=None):
        if name == "numpy":
            print("threads", os.environ.get("OPENBLAS_NUM_THREADS"), file=sys.stderr)
sys.meta_path.insert(0, Numpy)
from tracekit.cli import main
main()
"""


@pytest.mark.slow
def test_analysing_starts_no_threads_for_multiplying_matrices_and_the_job_of_collect_may(slow_file: Path) -> None:
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
        return subprocess.run(
            [sys.executable, "-c", WATCH_NUMPY, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=slow_file.parent,
            env=environment,
        )

    for command, out in ((("whatif",), ()), (("store", "export"), ("--out", "job.json"))):
        assert said(*command, slow_file.name, *out).stderr.startswith("threads 1\n")
    code = "import os; print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    assert "None" in said("collect", "--no-store", "--", sys.executable, "-c", code).stdout.splitlines()


def test_an_interruption_while_the_command_line_loads_is_one_line() -> None:
    """As if Ctrl-C came just when click is imported."""
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'click':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted)\n"
        "from tracekit.__main__ import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), click.Abort(), RuntimeError("Query interrupted")], ids=repr)
def test_ctrl_c_is_one_line_however_libraries_report_it(stop: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.commands, "main", Mock(side_effect=stop))
    assert run("store", "list") == Ran(130, "", "interrupted\n")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no queue"),
        RecursionError("deep"),
        NotImplementedError("Query interrupted"),
        BrokenProcessPool("x"),
    ],
    ids=repr,
)
def test_no_other_error_is_shown_as_an_interruption(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints its traceback, and ends with 1."""
    monkeypatch.setattr(cli.commands, "main", Mock(side_effect=error))
    with pytest.raises(type(error)) as raised:
        cli.main()
    assert raised.value is error


def test_a_machine_without_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.commands, "main", Mock(side_effect=MemoryError))
    assert run("whatif") == Ran(2, "", "tracekit: out of memory; use fewer steps, or a larger machine\n")


def test_importing_tracekit_imports_nothing_at_all() -> None:
    """A training process that imports tracekit pays for nothing it does not use."""
    code = "import sys, tracekit; print([name for name in sys.modules if name.startswith('tracekit.')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_an_unknown_option_exits_with_2_and_names_the_help() -> None:
    ran = run("whatif", "--fixx", "a")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.message.startswith("tracekit: no such option '--fixx'; did you mean")
    assert ran.message.endswith("; see `tracekit whatif --help`")


def test_no_arguments_at_all_shows_the_help() -> None:
    ran = run()
    assert "Usage:" in ran.out + ran.err


@pytest.mark.slow
def test_a_process_that_has_used_the_store_ends_without_a_word(tmp_path: Path) -> None:
    """What libraries say at the end of a process reaches the user, too."""
    Store(tmp_path / "jobs.store").add([Incoming(slow_trace(), "slow job", "x")])
    whole = [sys.executable, "-m", "tracekit", "store", "list", "--store", tmp_path / "jobs.store"]
    ran = subprocess.run(whole, capture_output=True, text=True, check=True)
    assert "slow job" in ran.stdout
    assert ran.stderr.splitlines() == []
