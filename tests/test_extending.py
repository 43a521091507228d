"""docs/extending.md: its package, installed as it stands there, does what the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.distributions import install
from tests.handmade import LAYOUT, healthy_frame, run, run_process
from tracekit.dashboards.documents.markdown import renderer

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
#: In each of two steps, rank 0 computes its forward in 1 s, and rank 1 in 3 s. Times count from T microseconds.
T = 1_700_000_000_000_000
LOG = "# acme step log\nstep,rank,kind,microbatch,begin_us,end_us\n" + "".join(
    f"{step},{rank},{kind},{microbatch},{T + step * 10_000_000 + begin},{T + step * 10_000_000 + end}\n"
    for step in (0, 1)
    for rank, forward in ((0, 1_000_000), (1, 3_000_000))
    for kind, microbatch, begin, end in (
        ("forward-compute", 0, 0, forward),
        ("backward-compute", 0, forward, forward + 2_000_000),
        ("grads-reduce-scatter", "", forward + 2_000_000, 5_500_000),
    )
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def modules() -> dict[str, str]:
    """The code of the page by path, which its first line states."""
    return {code.partition("\n")[0].removeprefix("# "): code for code in blocks("python")}


@pytest.fixture
def acme(site_packages: Path) -> Path:
    """The package of the page, installed."""
    (project,) = (tomllib.loads(block)["project"] for block in blocks("toml"))
    install(site_packages, project["name"], project["entry-points"], modules(), project["version"])
    return site_packages


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(LOG)
    return path


def test_each_example_is_short() -> None:
    assert all(code.count("\n") <= 32 for code in modules().values())


@pytest.mark.slow
def test_the_importer_reads_its_format_and_is_listed(acme: Path, log: Path, tmp_path: Path) -> None:
    """In a process of its own. The forwards should take 2 s each: 4.5 s a step instead of 5.5 s."""
    store = tmp_path / "jobs.store"
    imported = run_process("import", log, "--format", "acme-steps", "--store", store, env={"PYTHONPATH": str(acme)})
    assert (imported.code, imported.err) == (0, "")
    assert "Imported run (12 ops)" in imported.out
    report = json.loads(run("whatif", "--store", store, "--job", "run", "--json").out)
    assert report["slowdown"] == pytest.approx(5.5 / 4.5)
    assert report["slowest_workers"] == [{"dp_rank": 1, "pp_rank": 0}]
    assert "acme-steps           step log of ACME's trainer" in run("import", "--format").out


def test_the_detector_finds_the_stage_whose_optimizer_is_slow(acme: Path, tmp_path: Path) -> None:
    """Stage 1 takes 1.5 s for its optimizer, stage 0 takes 0.5 s: 1 s of each step. No other detector sees it."""
    longer = pl.when(pl.col("pp_rank").eq(1) & pl.col("kind").eq("optimizer")).then(1.5).otherwise("duration")
    trace = tracekit.Trace.from_frame(healthy_frame(range(4)).with_columns(duration=longer), LAYOUT, name="job")
    report = tracekit.job_of(trace).report
    (finding,) = report.findings
    assert (finding.kind, str(finding.where), finding.saved_s) == (
        "acme-stage-optimizer",
        "stage 1",
        pytest.approx(1.0),
    )
    assert report.answer.headline.endswith("its optimizer takes 3.0 times as long")
    assert [fix.title for fix in report.fixes if fix.cause] == ["Make the optimizers of all stages equally fast"]
    assert report.answer.fix.startswith("Give the optimizer of that stage what the others have")


@pytest.mark.slow
def test_the_job_of_the_page_shows_the_finding_in_a_report_and_in_a_store(acme: Path, tmp_path: Path) -> None:
    """The optimizer of stage 1 takes 94 ms longer than that of other stages."""
    run("synth", "--out", "healthy.parquet", cwd=tmp_path)
    subprocess.run([sys.executable, acme / "make_job.py"], cwd=tmp_path, check=True)
    run("import", "slow.parquet", "--store", "jobs.store", cwd=tmp_path)
    report = json.loads(run("whatif", "slow.parquet", "--json", cwd=tmp_path).out)
    (row,) = json.loads(
        run("store", "sql", "select * from findings", "--store", "jobs.store", "--json", cwd=tmp_path).out
    )
    (cause,) = report["causes"]
    assert (cause["kind"], cause["where_text"]) == ("acme-stage-optimizer", "stage 1")
    assert cause["saved_s"] == pytest.approx(0.094, abs=0.001)
    assert (row["kind"], row["cost_s"]) == (cause["kind"], pytest.approx(cause["saved_s"]))


def test_every_command_recognises_the_format(acme: Path, log: Path) -> None:
    assert json.loads(run("whatif", log, "--json").out)["job"]["ops"] == 12
    assert run("store", "list", log).code == 0
    assert tracekit.load(log).report.name == "run"


def test_the_rule_finds_the_dependencies_of_a_trace_that_names_it(acme: Path, tmp_path: Path) -> None:
    """Rank 0 forwards for 2 s what rank 1 loads in 3 s; a load should take 2 s. Without the rule, no op waits."""
    ops = pl.DataFrame(
        {
            "step": 0,
            "rank": [0, 1, 0, 1],
            "kind": ["load", "load", "forward", "forward"],
            "batch": [0, 1, 1, 0],
            "start": [0.0, 0.0, 3.0, 1.0],
            "duration": [1.0, 3.0, 2.0, 2.0],
        }
    )
    path = tmp_path / "ops.parquet"
    tracekit.OpTrace(ops, "batches", rules=("acme-batches",)).write_parquet(path)
    steps = json.loads(run("whatif", path, "--json").out)["step_time_s"]
    assert (steps["original"], steps["ideal"]) == (5.0, 4.0)
    assert tracekit.job_of(tracekit.OpTrace(ops, "alone")).whatif().step_times().original.tolist() == [3.0]


def test_the_renderer_makes_text_of_the_report_of_any_job(acme: Path, slow_file: Path, tmp_path: Path) -> None:
    """S = 15.5 / 13.5 by hand; an op trace of one op is as it should be."""
    render = renderer("acme-metrics")
    shown = render(tracekit.load(slow_file).report)
    assert shown == 'acme_slowdown{job="slow job"} 1.1481\nacme_waste{job="slow job"} 0.1290\n'
    ops = pl.DataFrame({"rank": [0], "kind": ["a"], "start": [0.0], "duration": [1.0]})
    assert 'acme_slowdown{job="one"} 1.0000' in render(tracekit.job_of(tracekit.OpTrace(ops, "one")).whatif())
