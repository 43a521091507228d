"""A study holds what its sources hold, the same bytes however it came about."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from tests.fleet.few_jobs import STEPS, Here, study_here, study_of, tables, write_jobs
from tests.handmade import IDEAL_STEP_S, SLOW_STEP_S, little_space, run, slow_trace
from tracekit.base.errors import OutputError, SelectionError, StudyError
from tracekit.fleet.executors import LocalExecutor
from tracekit.fleet.sources import StudySource, find_sources
from tracekit.fleet.study import Standing, Study, analysing_files, run_study
from tracekit.fleet.study_tables import TABLES, frame
from tracekit.fleet.tasks import Rule, Task, TaskOutcome
from tracekit.sources.load import load_trace
from tracekit.store import Incoming, Store
from tracekit.trace.op import OpTrace


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jobs(tmp_path_factory.mktemp("fleet") / "jobs")


@pytest.fixture(scope="module")
def study(jobs: Path) -> Path:
    """A study by two processes that nothing disturbs."""
    summary = study_of(jobs, out=jobs.parent / "study")
    assert (summary.sources, summary.unchanged, summary.failed) == (8, 0, {})
    return jobs.parent / "study"


def test_the_figures_of_a_job_are_those_worked_out_by_hand(study: Path) -> None:
    row = Study(study).read("jobs").filter(name="slow 3").row(0, named=True)
    assert (row["gpus"], row["steps"], row["ops"]) == (4, 4, 4 * 48)
    assert row["original_s"] == pytest.approx(SLOW_STEP_S)
    assert row["slowdown"] == pytest.approx(SLOW_STEP_S / IDEAL_STEP_S)
    hours = 4 * 4 * SLOW_STEP_S / 3600  # GPUs x steps x seconds
    assert row["gpu_hours"] == pytest.approx(hours)
    assert row["lost_gpu_hours"] == pytest.approx(hours * (1 - IDEAL_STEP_S / SLOW_STEP_S))
    workers = Study(study).read("workers").filter(job=row["job"])
    assert workers.filter(pl.col("part") == "compute").select("dp_rank", "pp_rank").rows() == [(1, 0)]


def test_a_copy_counts_once_and_what_is_no_trace_is_a_row_with_its_reason(study: Path, jobs: Path) -> None:
    assert Study(study).read("jobs").height == 6
    assert Study(study).read("sources").height == 8
    (row,) = Study(study).read("exclusions").to_dicts()
    assert (row["source"], row["rule"]) == (str(jobs / "torn.parquet"), Rule.NO_TRACE)
    assert "not a readable Parquet file" in row["reason"]


@pytest.mark.slow
def test_a_damaged_store_stops_no_other_job(jobs: Path, tmp_path: Path) -> None:
    shutil.copytree(jobs, tmp_path / "jobs")
    torn = tmp_path / "jobs" / "torn.store"
    Store(torn).add([Incoming(slow_trace(), "slow", "by hand")])
    (torn / "catalog.duckdb").unlink()
    study_here(tmp_path / "jobs", out=tmp_path / "study")
    found = Study(tmp_path / "study")
    assert found.read("jobs").height == 6
    row = found.read("exclusions").filter(source=str(torn)).row(0, named=True)
    assert "catalog.duckdb is missing" in row["reason"]


@pytest.mark.slow
def test_duckdb_pandas_and_polars_read_the_same_tables(study: Path) -> None:
    import pandas as pd

    for name, schema in TABLES.items():
        found = pl.read_parquet(f"{study}/{name}/*.parquet")
        assert found.schema == schema
        pandas = pd.concat(map(pd.read_parquet, sorted((study / name).iterdir())))
        count = duckdb.read_parquet(f"{study}/{name}/*.parquet").count("*").fetchall()
        assert [(found.height,)] == [(len(pandas),)] == count


def test_neither_order_nor_processes_nor_a_second_half_change_a_byte(jobs: Path, study: Path, tmp_path: Path) -> None:
    files = sorted(jobs.iterdir())
    study_here(*files[:3], out=tmp_path / "halves")
    study_here(*reversed(files), out=tmp_path / "halves")
    assert tables(tmp_path / "halves") == tables(study)


def test_with_nothing_to_do_nothing_is_read_or_written(
    jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.fleet.sources._SETTLED_S", -1.0)  # the files are seconds old
    first = study_here(jobs, out=tmp_path)
    assert [Path(one.url).name for one in first.outcomes if one.reused] == ["slow0.parquet"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    again = study_here(jobs, out=tmp_path)
    assert (again.unchanged, again.outcomes) == (8, [])
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}


def test_hours_that_a_job_states_count_instead_of_those_of_its_steps(tmp_path: Path) -> None:
    hours = 4 * 4 * SLOW_STEP_S / 3600
    for name, stated in (("stated", 12.5), ("zero", 0), ("endless", float("inf")), ("words", "12.5")):
        trace = slow_trace(STEPS, name=name, metadata={"gpu_hours": stated})
        trace.write_parquet(tmp_path / f"{name}.parquet")
    study_here(tmp_path, out=tmp_path / "study")
    found = dict(Study(tmp_path / "study").read("jobs").select("name", "gpu_hours").rows())
    assert found == {"stated": 12.5, **dict.fromkeys(("zero", "endless", "words"), pytest.approx(hours))}


def test_one_run_at_a_time_writes_a_study(tmp_path: Path) -> None:
    study = Study(tmp_path / "study")
    another = Study(study.path).running("one")
    with study.running("one"), pytest.raises(StudyError, match="another run is writing this study; wait for it"):
        another.__enter__()


def test_results_of_a_killed_run_are_taken_over_only_if_they_are_whole_and_of_this_analysis(tmp_path: Path) -> None:
    """Of three results that were left behind, one is damaged, and one is of another version."""
    study, rows = Study(tmp_path / "study"), {"exclusions": frame("exclusions", {"job": []})}
    with study.running("one"):
        for digest, analysis in (("a", "one"), ("b", "one"), ("c", "older")):
            study.write_result(digest, analysis, rows | {"jobs": frame("jobs", {"job": [digest]})})
            study.log_seen(StudySource(digest, "", 0, None), TaskOutcome(digest, digest=digest))
        results = tmp_path / "study" / ".run" / "results"
        (damaged,) = results.glob("b-*")
        damaged.write_bytes(damaged.read_bytes()[:-30])
    with study.running("one"):
        assert sorted(path.name.partition("-")[0] for path in results.iterdir()) == ["a", "b"]
        study.fold("one", {}, set())
    assert study.read("jobs")["job"].to_list() == ["a"]
    assert list(results.iterdir()) == []


@pytest.mark.slow
def test_another_analysis_does_all_again(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_here(jobs, out=tmp_path)
    monkeypatch.setattr("tracekit.fleet.study.analysis_version", lambda: "of-tomorrow")
    assert study_here(jobs, out=tmp_path).unchanged == 0
    assert set(Study(tmp_path).read("jobs")["analysis"]) == {"of-tomorrow"}
    assert Study(tmp_path).read("jobs").height == 6


ANALYSED = """
import sys
from pathlib import Path
from tracekit.fleet.tasks import Task
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import Study
from tracekit.fleet.executors import work

(source,) = find_sources([sys.argv[1]])
with Study(Path(sys.argv[2])).running("x"):
    outcome = work(Task(source, sys.argv[2], "x"))
assert outcome.rule is None, outcome.reason
modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tracekit"}
print(*(module.__file__ for name, module in modules.items() if module.__file__.endswith(".py")), sep="\\n")
"""


@pytest.mark.slow
def test_all_code_that_takes_part_in_an_analysis_is_part_of_its_version(jobs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ANALYSED, str(jobs / "slow0.parquet"), str(tmp_path)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    counted = {path.resolve() for path in analysing_files()}
    assert {"canonical.py", "units.py", "lanes.py"} <= {Path(path).name for path in loaded}
    assert {Path(path).resolve() for path in loaded} <= counted
    assert {"replay.c", "pipeline.py"} <= {path.name for path in counted}
    assert not any("dashboards" in path.parts for path in counted)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.fleet.few_jobs import GIB
from tracekit.fleet.executors import LocalExecutor
from tracekit.fleet.study import run_study
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import Study

jobs, out, what, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rename, renamed = os.rename, 0


def die_at_rename(*names, **folders):
    # the driver dies before it puts the number-th file in its place
    global renamed
    renamed += 1
    if renamed == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(*names, **folders)


def progress(standing):
    if what == "driver" and standing.done == number:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "workers" and standing.done < number:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


if what == "fold":
    os.rename = die_at_rename
run_study(Study(out), find_sources([str(jobs)]), LocalExecutor(2, 2 * GIB), progress)
"""


def killed(jobs: Path, out: Path, what: str, number: int) -> int:
    """Exit code of a run whose workers or driver are killed."""
    arguments = [sys.executable, "-c", KILLED, jobs, out, what, str(number)]
    return subprocess.run(arguments, check=False, timeout=300).returncode


@pytest.mark.fleet
def test_kill_9_of_workers_and_driver_leaves_the_same_bytes(jobs: Path, study: Path, tmp_path: Path) -> None:
    """The driver dies with no outcome, with some, and at files of the tables; both workers die several times."""
    out = tmp_path / "study"
    for what, number in (("driver", 0), ("driver", 3), ("fold", 2), ("fold", 9), ("fold", 31)):
        assert killed(jobs, out, what, number) == -9
    assert killed(jobs, out, "none", 0) == 0
    assert tables(out) == tables(study)
    assert killed(jobs, tmp_path / "other", "workers", 6) == 0
    study_of(jobs, out=tmp_path / "other")
    assert tables(tmp_path / "other") == tables(study)
    assert not list((tmp_path / "other" / ".run" / "results").iterdir())


@pytest.mark.fleet
def test_a_trace_that_kills_its_process_is_tried_twice_then_recorded(
    jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(jobs, tmp_path / "jobs")
    slow_trace(STEPS, name="poison").write_parquet(tmp_path / "jobs" / "poison.parquet")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('poison.parquet'):\n"
        f"        open({str(tmp_path / 'deaths')!r}, 'a').write('x')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
    )
    monkeypatch.syspath_prepend(str(site))
    summary = study_of(tmp_path / "jobs", out=tmp_path / "study")
    assert (tmp_path / "deaths").read_text() == "xx"
    assert summary.failed == {Rule.CRASHED: 1}
    row = Study(tmp_path / "study").read("exclusions").filter(rule=str(Rule.CRASHED)).row(0, named=True)
    assert (row["source"], row["reason"]) == (
        str(tmp_path / "jobs" / "poison.parquet"),
        "its analysis was killed by SIGKILL",
    )
    assert Study(tmp_path / "study").read("jobs").height == 6

    (site / "sitecustomize.py").write_text("")  # whatever it was has been repaired: the next run tries again
    assert study_of(tmp_path / "jobs", out=tmp_path / "study").failed == {}
    assert Study(tmp_path / "study").read("jobs").height == 7


def test_a_source_that_changed_takes_the_place_of_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for name in ("one", "two"):
        slow_trace(STEPS, name=name).write_parquet(tmp_path / "jobs" / f"{name}.parquet")
    study_here(tmp_path / "jobs", out=tmp_path / "study")
    slow_trace(STEPS, name="three").write_parquet(tmp_path / "jobs" / "two.parquet")
    study_here(tmp_path / "jobs", out=tmp_path / "study")
    found = Study(tmp_path / "study")
    assert sorted(found.read("jobs")["name"]) == ["one", "three"]
    assert found.read("steps").height == 2 * len(STEPS)


def test_clocks_of_1970_and_2100_say_no_time_and_few_steps_and_restarts_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for name, first in (("old", 86_400.0), ("new", 4_200_000_000.0), ("fine", 1_700_000_000.0)):
        starts = {step: first + 20 * step for step in STEPS}
        slow_trace(
            STEPS, name=name, step_starts=starts, metadata={"restarts": 16 if name == "fine" else 2}
        ).write_parquet(tmp_path / "jobs" / f"{name}.parquet")
    slow_trace((0, 1), name="short").write_parquet(tmp_path / "jobs" / "short.parquet")
    study_here(tmp_path / "jobs", out=tmp_path / "study")
    found = Study(tmp_path / "study")
    started = dict(found.read("jobs").select("name", "started_at").iter_rows())
    assert started == {"old": None, "new": None, "fine": 1.7e9, "short": None}
    rules = found.read("exclusions").join(found.read("jobs").select("job", "name"), on="job")
    assert {(row["name"], row["rule"], row["scope"]) for row in rules.to_dicts()} == {
        ("old", "clock", "by-time"),
        ("new", "clock", "by-time"),
        ("fine", "many-restarts", "everywhere"),
        ("short", "too-few-steps", "everywhere"),
    }


def test_a_trace_that_is_replaced_while_it_is_read_is_said_and_read_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    slow_trace(STEPS, name="before").write_parquet(tmp_path / "jobs" / "job.parquet")

    def slow_load(path: Path, **options: Any) -> Any:
        loaded = load_trace(path, **options)
        slow_trace(STEPS, name="after").write_parquet(path)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr("tracekit.sources.load.load_trace", slow_load)
        assert study_here(tmp_path / "jobs", out=tmp_path / "study").failed == {Rule.CHANGED: 1}
    assert Study(tmp_path / "study").read("exclusions")["rule"].to_list() == [str(Rule.CHANGED)]
    assert study_here(tmp_path / "jobs", out=tmp_path / "study").failed == {}
    assert Study(tmp_path / "study").read("jobs")["name"].to_list() == ["after"]
    assert Study(tmp_path / "study").read("exclusions").is_empty()


@pytest.mark.slow
def test_a_disk_that_fills_as_the_tables_are_made_costs_nothing(jobs: Path, study: Path, tmp_path: Path) -> None:
    study_here(jobs / "slow1.parquet", out=tmp_path)
    before = tables(tmp_path)
    limit = ExitStack()

    def fill(standing: Standing) -> None:
        if standing.done == standing.total:
            limit.enter_context(little_space(3000))

    with limit, pytest.raises(OutputError, match="cannot be written: File too large; make room"):
        run_study(Study(tmp_path), find_sources([str(jobs)]), Here(), fill)
    assert {name: tables(tmp_path)[name] for name in before} == before
    assert "its last run did not finish" in run("fleet", "report", tmp_path, "--json").err
    again = study_here(jobs, out=tmp_path)
    assert all(one.reused for one in again.outcomes)
    assert tables(tmp_path) == tables(study)


def test_recordings_of_gpus_and_op_traces_are_jobs_too(tmp_path: Path) -> None:
    """Of the GPU trace, rank 2's data loader is slow. The op trace: rank 1 takes 160 ms, 130 ms is the mean."""
    sample = Path(__file__).parents[2] / "sample_traces" / "gpu_slow_input"
    rows = [
        {"step": step, "rank": rank, "stream": 0, "start": 0.0, "duration": 0.16 if rank else 0.10, "kind": "work",
         "role": "work"}
        for step in range(3) for rank in range(2)
    ]  # fmt: skip
    OpTrace(pl.DataFrame(rows), "two ranks", rules=("streams",)).write_parquet(tmp_path / "ops.parquet")
    study_here(sample, tmp_path / "ops.parquet", out=tmp_path / "study")
    found = {row["kind"]: row for row in Study(tmp_path / "study").read("jobs").to_dicts()}
    assert set(found) == {"recording", "ops"}
    assert (found["ops"]["gpus"], found["ops"]["steps"]) == (2, 3)
    assert found["ops"]["slowdown"] == pytest.approx(0.16 / 0.13)
    causes = Study(tmp_path / "study").read("causes").filter(job=found["recording"]["job"])
    assert causes.row(0, named=True)["kind"] == "late-data-loading"
    workers = Study(tmp_path / "study").read("workers").filter(pl.col("part").is_not_null())
    named = {job: workers.filter(job=found[job]["job"]).select("rank", "part").rows() for job in found}
    assert named == {"recording": [(2, "data-loading")], "ops": [(1, "compute")]}


@pytest.mark.fleet
def test_a_disk_without_room_is_said_of_each_job_and_the_next_run_goes_on(
    jobs: Path, study: Path, tmp_path: Path
) -> None:
    """The processes that analyse may write nothing; what they would have written is missing, and nothing else."""
    script = (
        "import sys, resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pathlib import Path; from tests.fleet.few_jobs import study_of; from tracekit.fleet import executors\n"
        "start = executors.subprocess.Popen\n"
        "executors.subprocess.Popen = lambda *a, **k: start(*a, **k, preexec_fn=lambda: resource.setrlimit("
        "resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)))\n"
        "print(sorted(study_of(Path(sys.argv[1]), out=Path(sys.argv[2])).failed.items()))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, jobs, tmp_path / "study"], capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.strip() == "[('not-stored', 8)]", ran.stderr
    assert set(Study(tmp_path / "study").read("exclusions")["reason"]) == {"File too large"}
    study_of(jobs, out=tmp_path / "study")
    assert tables(tmp_path / "study") == tables(study)


def test_stores_globs_and_folders_within_lead_to_the_same_jobs(jobs: Path, tmp_path: Path) -> None:
    from tracekit.trace.canonical import read_parquet

    Store(tmp_path / "jobs.store").add([Incoming(read_parquet(jobs / "slow1.parquet"), "slow 1", "by hand")])
    (stored,) = find_sources([str(tmp_path / "jobs.store")])
    assert stored.url.endswith("/jobs/1/0.parquet")
    assert [Path(one.url).name for one in find_sources([str(jobs / "slow?.parquet"), str(jobs / "slow0.parquet")])] == [
        f"slow{number}.parquet" for number in range(5)
    ]
    assert {one.url for one in find_sources([str(jobs.parent)])} >= {str(path) for path in jobs.iterdir()}


def test_a_trace_starts_where_it_fits_beside_the_others_and_a_large_one_alone() -> None:
    """220 MiB for a process, and 40 bytes for each byte of its trace: 260, 620 and 2,220 MiB, in 1,000."""
    small, middle, large = (Task(StudySource(f"/{mib}", "", mib << 20), "", "") for mib in (1, 10, 50))
    executor = LocalExecutor(processes=2, memory_bytes=1000 << 20)
    waiting = [large, middle, small]
    assert [executor._pop(waiting, running) for running in ([small], [middle], [middle])] == [
        middle,
        small,
        None,
    ]
    assert (waiting, executor._pop(waiting, [])) == ([], large)


def test_bad_places_are_one_clear_error(tmp_path: Path, jobs: Path) -> None:
    with pytest.raises(SelectionError, match="not found; expected trace files, a folder"):
        find_sources([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SelectionError, match="no trace found"):
        find_sources([str(tmp_path / "empty")])
    with pytest.raises(StudyError, match="neither empty nor a study"):
        study_of(jobs, out=jobs)
    assert run("fleet", "report", tmp_path / "empty").message.startswith(
        f"tracekit: {tmp_path / 'empty'}: an empty folder, not a study; `tracekit fleet run"
    )
    assert run("fleet", "run", jobs, "--out", tmp_path / "s", "--memory", "much").message.endswith(
        "expected a size such as 2500M or 16G"
    )
