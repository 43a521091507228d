"""A detector of another package, one file and one entry point, is seen wherever findings of tracekit are."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.dashboards.page_text import Pages
from tests.distributions import install
from tests.handmade import LAYOUT, healthy_frame, run
from tracekit.dashboards.documents.page import page
from tracekit.fleet.analyse import rows_of
from tracekit.store.incidents import followed

TOY = """
import numpy as np
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.pipeline_subject import optimizers
from tracekit.analysis.whatif.interventions import AddTime
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Place

class Toy(Detector):
    kind, title, part, label = "toy", "Toys are slow", "toys", "slow toys"
    next_check, suggested_fix = "the toy box", "oil the toys of {ranks}"
    repair = Repair("oil-toys", "Make all toys equally fast")

    def find(self, job):
        ops = optimizers(job)
        if ops is None:
            yield from self.in_graph(job)
            return
        taken_s = ops.gather(job.replay.durations.cost).sum(axis=1).mean(axis=1)
        slow = taken_s > 1
        if slow.any():
            change = Scale(ops, np.where(slow, 0.5 / taken_s, 1.0)[:, None, None, :])
            yield Candidate(self.kind, Place(workers=job.workers_where(slow)), "toys take 1.50 s", (), 0.9, change)

    @only_in(GraphSubject)
    def in_graph(self, job):
        toys_s = job.ops.filter(kind="toy", rank=0)["duration"].sum() / len(job.steps)
        if toys_s > 1:
            yield Candidate(self.kind, Place(), "toys take 1.50 s", (), 0.9, AddTime(0.5 - toys_s))
"""


def pipeline(toys_s: float, name: str) -> tracekit.Trace:
    """In a healthy step of 11.25 s, the optimizers of stage 1 take this long instead of 0.5 s."""
    toy = pl.col("pp_rank").eq(1) & pl.col("kind").eq("optimizer")
    ops = healthy_frame(range(4)).with_columns(duration=pl.when(toy).then(toys_s).otherwise("duration"))
    return tracekit.Trace.from_frame(
        ops, LAYOUT, name=name, metadata={"hosts": {str(rank): f"n{rank}" for rank in range(4)}}
    )


def ops(toys_s: float, name: str) -> tracekit.OpTrace:
    """On both ranks, a forward of 3 s, and toys after it."""
    rows = [(step, rank, kind, start, lasts) for step in range(4) for rank in (0, 1)
            for kind, start, lasts in (("forward", 0.0, 3.0), ("toy", 3.0, toys_s))]  # fmt: skip
    frame = pl.DataFrame(rows, ["step", "rank", "kind", "start", "duration"], orient="row")
    return tracekit.OpTrace(frame.with_columns(stream=0), name, rules=("streams",))


@pytest.fixture(params=[pipeline, ops], ids=["pipeline", "ops"])
def jobs(request: pytest.FixtureRequest, site_packages: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The job with slow toys, and the one without."""
    install(site_packages, "toys", {"tracekit.detectors": {"toy": "toys:Toy"}}, {"toys.py": TOY})
    paths = tmp_path / "slow.parquet", tmp_path / "healthy.parquet"
    for path, toys_s in zip(paths, (1.5, 0.5), strict=True):
        request.param(toys_s, path.stem).write_parquet(path)
    return paths


def test_every_output_of_the_job_shows_the_finding(jobs: tuple[Path, Path]) -> None:
    slow, healthy = jobs
    report = tracekit.load(slow).report
    (finding,) = report.findings
    assert (finding.kind, finding.saved_s) == ("toy", pytest.approx(1.0))
    shown = (run("whatif", slow).out, run("whatif", slow, "--markdown", "-").out, page(report), report._repr_html_())
    for text in shown:
        words = " ".join(unescape(text).split()).lower()
        assert "slow toys" in words
        assert "toys take 1.50 s" in words
        assert "oil the toys of " in words
    found = json.loads(run("whatif", slow, "--json").out)
    assert (found["causes"][0]["kind"], found["fixes"][0]["kind"]) == ("toy", "oil-toys")
    assert found["fixes"][0]["saved_s"] == pytest.approx(1.0)
    assert "toy" not in run("whatif", healthy, "--json").out.replace('"toy"', "")


def test_the_fix_can_be_asked_for(site_packages: Path, tmp_path: Path) -> None:
    install(site_packages, "toys", {"tracekit.detectors": {"toy": "toys:Toy"}}, {"toys.py": TOY})
    asked = tracekit.job_of(pipeline(1.5, "job")).whatif(fix=["fix=oil-toys"]).questions
    assert [question.saved_s for question in asked] == [pytest.approx(1.0)]


def test_gate_comparison_and_fleet_see_it(jobs: tuple[Path, Path]) -> None:
    slow, healthy = jobs
    assert [run("whatif", path, "--fail-on", "toy>5%").code for path in jobs] == [3, 0]
    (new,) = json.loads(run("compare", healthy, slow, "--json").out)["causes"]["new"]
    assert new.endswith("toys take 1.50 s (costs 1.00 s a step)")
    rows = rows_of(tracekit.load(slow), "digest", "analysis")
    assert rows["causes"]["kind"].to_list() == ["toy"]
    assert rows["fixes"]["kind"].to_list()[0] == "oil-toys"


def test_it_opens_an_incident(jobs: tuple[Path, Path]) -> None:
    slow, healthy = (tracekit.load(path).report for path in jobs)
    assert healthy.alarming == ()
    (incident,) = followed([], "job", 0, slow, datetime(2026, 1, 1, tzinfo=UTC))
    assert (incident.cause.kind, incident.cause.part) == ("toy", "toys")
    assert "toys take 1.50 s" in incident.cause.what


@pytest.mark.slow
def test_the_store_and_its_pages_show_it(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    store = tmp_path / "jobs.store"
    assert run("import", *jobs, "--store", store).code == 0
    assert "toys take 1.50 s" in " ".join(run("whatif", "--store", store, "--job", "slow").out.split())
    text = Pages(store).text("/job", job="slow")
    assert "toys take 1.50 s" in text
    assert "Toys are slow" in text


def test_culprits_name_its_nodes(site_packages: Path, tmp_path: Path) -> None:
    """Ranks 2 and 3 are those of stage 1."""
    install(site_packages, "toys", {"tracekit.detectors": {"toy": "toys:Toy"}}, {"toys.py": TOY})
    pipeline(1.5, "job").write_parquet(tmp_path / "job.parquet")
    ran = run("culprits", tmp_path / "job.parquet", "--part", "toys", "--suspects", "--format", "slurm")
    assert (ran.code, ran.out) == (0, "n[2-3]\n")
