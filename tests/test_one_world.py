"""Every consumer takes every source: it works, or says in one sentence which source it is for."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.cases import case
from tests.fleet.few_jobs import study_here
from tests.handmade import LAYOUT, healthy_frame, run, slow_trace
from tracekit.base.errors import ExitCode
from tracekit.report.findings import Findings
from tracekit.report.report import REPORT_VERSION, Report
from tracekit.store.incidents import followed

RECORDING = Path(__file__).parents[1] / "sample_traces" / "gpu_slow_input"
HOSTS = {str(rank): f"n{rank}" for rank in range(4)}


class Source(NamedTuple):
    """A slow job, the same one healthy, and by hand: the rank that is slow, its host, the kind of finding; no rank, if
    the whole loop is.

    `of`: how messages name the source. `whole`: a training step, or the recording.
    """

    slow: Path
    healthy: Path
    rank: int | None
    host: str | None
    kind: str
    name: str
    of: str
    whole: str = "step"

    @property
    def place(self) -> str:
        """Where the finding is, in words."""
        return "the only engine" if self.rank is None else f"rank {self.rank} on {self.host}"

    @property
    def edit(self) -> str:
        """The job without it, as `--fix` takes it."""
        return "fix=instant-sync" if self.rank is None else f"rank={self.rank}"


def op_trace(forward_s: float, name: str) -> tracekit.OpTrace:
    """Four ranks meet after a forward of 0.1 s, which takes rank 1 `forward_s`; an optimizer of 0.02 s."""
    rows = []
    for step in range(5):
        for rank in range(4):
            own_s = forward_s if rank == 1 else 0.1
            rows += [
                (step, rank, "forward", 0.0, own_s, None, f"n{rank}"),
                (step, rank, "all-reduce", own_s, forward_s + 0.01 - own_s, str(step), f"n{rank}"),
                (step, rank, "optimizer", forward_s + 0.01, 0.02, None, f"n{rank}"),
            ]
    columns = ["step", "rank", "kind", "start", "duration", "rendezvous", "host"]
    ops = pl.DataFrame(rows, columns, orient="row").with_columns(stream=0, group=pl.lit("dp"))
    return tracekit.OpTrace(ops, name, groups=(tracekit.ProcessGroup("dp", (0, 1, 2, 3)),), rules=("streams",))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, ...]:
    folder = tmp_path_factory.mktemp("world")
    slow_trace(range(5), metadata={"hosts": HOSTS}).write_parquet(folder / "pipeline.parquet")
    healthy = tracekit.Trace.from_frame(healthy_frame(range(5)), LAYOUT, name="healthy", metadata={"hosts": HOSTS})
    healthy.write_parquet(folder / "pipeline_healthy.parquet")
    op_trace(0.16, "ops").write_parquet(folder / "ops.parquet")
    op_trace(0.1, "ops healthy").write_parquet(folder / "ops_healthy.parquet")
    write(folder / "rl.jsonl", lines(8, reward_s=0.125))  # the sync takes 1 of 10.625 s
    write(folder / "rl_healthy.jsonl", lines(8, reward_s=0.125, sync_s=0.125))
    return (
        Source(folder / "pipeline.parquet", folder / "pipeline_healthy.parquet", 1, "n1", "bad-worker", "slow job",
               "a pipeline trace"),
        Source(folder / "ops.parquet", folder / "ops_healthy.parquet", 1, "n1", "bad-worker", "ops", "an op trace"),
        Source(RECORDING, RECORDING, 2, "node-0", "late-data-loading", "gpu_slow_input", "of torch.profiler",
               "recording"),
        Source(folder / "rl.jsonl", folder / "rl_healthy.jsonl", None, None, "sync", "rl.jsonl", "of post-training"),
    )  # fmt: skip


@pytest.fixture(params=range(4), ids=["pipeline", "ops", "recording", "rl"])
def source(request: pytest.FixtureRequest, sources: tuple[Source, ...]) -> Source:
    return sources[request.param]


def accounts(report: Report) -> list[tuple[object, ...]]:
    """What a reader, an alert or a script needs of each finding."""
    return [(one.kind, one.part, one.who, one.why, one.fix, one.ranks, one.hosts, one.cost_s, one.share, one.confidence)
            for one in report.answer.accounts]  # fmt: skip


def test_each_form_of_the_report_names_the_rank(source: Source, tmp_path: Path) -> None:
    """A report that was kept prints what its trace does (test_report_files.py), and is analysed once for all forms."""
    kept = tmp_path / "report.json"
    kept.write_text(run("whatif", source.slow, "--json").out)
    edits = ("--fix", source.edit, *(("--keep", source.edit, "--by", "host") if source.rank is not None else ()))
    forms: dict[str, tuple[object, ...]] = {
        "terminal": (kept,), "full": (kept, "--full"), "explain": (kept, "--explain"),
        "markdown": (kept, "--markdown", "-"), "questions": (source.slow, *edits),
    }  # fmt: skip
    for name, columns in [*((name, 80) for name in forms), ("terminal", 120), ("full", 120)]:
        with case((name, columns)):
            ran = run("whatif", *forms[name], env={"COLUMNS": str(columns)})
            assert (ran.code, ran.err) == (0, "")
            assert source.place in " ".join(ran.out.split())
            assert "…" not in ran.out
            if name == "terminal":
                assert all(len(line) <= columns for line in ran.out.splitlines() if "tracekit " not in line)
    priced = " ".join(run("whatif", kept, "--gpu-hour", "2.5").out.split())
    assert source.place in priced
    assert (" a day at 2.5 a GPU-hour" in priced) == (source.rank is not None)  # of post-training, no GPUs are known
    assert run("whatif", kept, "--html", tmp_path / "page.html").code == 0
    assert source.place in (tmp_path / "page.html").read_text()
    assert run("whatif", kept, "--csv", tmp_path / "tables").code == 0
    assert source.kind in (tmp_path / "tables" / "causes.csv").read_text()


def test_one_json_object_and_one_library(source: Source) -> None:
    job = tracekit.load(source.slow)
    found, report = json.loads(run("whatif", source.slow, "--json").out), job.report
    assert found == json.loads(json.dumps(report.to_dict()))
    assert (found["job"]["whole"], found["report_version"]) == (source.whole, REPORT_VERSION)
    (finding, *_) = job.findings
    assert finding.kind == found["causes"][0]["kind"] == source.kind
    assert report.pandas("causes")["kind"][0] == source.kind
    assert source.place in job._repr_html_()
    saved_s = job.answer(source.edit).saved_s
    assert saved_s == pytest.approx(finding.saved_s, rel=0.05)
    for table in report.table_names:
        assert report.table(table) is not None


@pytest.mark.slow
def test_gates(source: Source) -> None:
    conditions = {"slowdown>1.01": 3, "slowdown>9": 0, f"{source.kind}>=5%": 3, f"{source.kind}>=99%": 0}
    for condition, code in conditions.items():
        with case(condition):
            assert run("whatif", source.slow, "--fail-on", condition).code == code


@pytest.mark.slow
def test_what_only_one_source_can_do_is_refused_in_a_sentence(source: Source, tmp_path: Path) -> None:
    options = {
        "--layers": ("--layers", "9,9"), "--ignore-steps": ("--ignore-steps", "1"),
        "--parquet": ("--parquet", str(tmp_path / "workers.parquet")), "--method": ("--method", "published"),
        "--redact": ("--redact",),
    }  # fmt: skip
    for name, words in options.items():
        with case(name):
            ran = run("whatif", source.slow, *words)
            if source.of == "a pipeline trace" or (name == "--redact" and source.of != "an op trace"):
                assert ran.code == 0
                assert name != "--redact" or (source.host or source.name) not in ran.out
            else:
                assert ran.code == ExitCode.BAD_INPUT
                assert name in ran.message or "pipelines" in ran.message
                assert "pipeline" in ran.message


@pytest.mark.slow
def test_timeline_info_and_the_bare_path(source: Source, tmp_path: Path) -> None:
    assert run("store", "export", source.slow, "--out", tmp_path / "timeline.json.gz").code == 0
    assert run("store", "list", source.slow).code == 0
    assert run(str(source.slow)).out == run("whatif", source.slow).out


def test_culprits(source: Source) -> None:
    rows = json.loads(run("culprits", source.slow, "--format", "json").out)["culprits"]
    if source.rank is None:
        assert rows == []
        return
    row = rows[0]
    assert (row["rank"], row["host"]) == (source.rank, source.host)
    assert run("culprits", source.slow, "--format", "slurm", "--suspects").out == f"{source.host}\n"
    assert source.host in run("culprits", source.slow).out


@pytest.mark.slow
def test_a_job_beside_itself_and_beside_a_healthy_one(source: Source) -> None:
    same = json.loads(run("compare", source.slow, source.slow, "--json").out)
    assert (same["causes"]["new"], same["causes"]["gone"]) == ([], [])
    assert len(same["causes"]["staying"]) == 1
    assert "on both sides" in same["sentence"]
    assert same["before"] == same["after"]
    if source.healthy != source.slow:
        changed = json.loads(run("compare", source.healthy, source.slow, "--json").out)
        assert changed["outcome"] == "worse"
        assert (f"rank {source.rank}" if source.host else "the sync takes 1.00 s") in changed["causes"]["new"][0]
    shown = run("compare", source.slow, source.slow, env={"COLUMNS": "80"}).out.splitlines()
    assert all(len(line) <= 80 for line in shown if not line.startswith("  tracekit"))


def test_jobs_of_two_sources_do_not_compare(sources: tuple[Source, ...]) -> None:
    ran = run("compare", sources[0].slow, sources[1].slow)
    assert (ran.code, ran.message) == (
        ExitCode.BAD_INPUT,
        "tracekit: A is a pipeline trace, B an op trace (docs/traces.md): compare two of the same source",
    )


def test_a_stored_job_keeps_its_findings_and_opens_an_incident(source: Source, tmp_path: Path) -> None:
    """Of a recording, the store keeps ops; the report says which figures are in its own report alone."""
    store = tmp_path / "jobs.store"
    assert run("import", source.slow, "--store", store).code == 0
    before, again = tracekit.load(source.slow).report, tracekit.load(store).report
    assert accounts(again) == accounts(before)
    assert (again.answer, again.job.whole, again.job.sizes) == (before.answer, before.job.whole, before.job.sizes)
    assert again.verdict.sentence == before.verdict.sentence
    notes = [words for words in (remark.words for remark in again.remarks) if "only the ops are kept" in words]
    assert len(notes) == (source.whole == "recording")
    assert again.to_dict()["job"]["source"] == before.to_dict()["job"]["source"]
    ran = run("whatif", "--store", store, "--job", source.name)
    assert (ran.code, source.place in " ".join(ran.out.split())) == (0, True)
    assert run("culprits", "--store", store).out == run("culprits", source.slow).out
    assert run("compare", source.name, source.name, "--store", store).code == 0
    figures = Findings(before).figures()
    assert (figures["cause_kinds"][0], figures["cause_hosts"][0]) == (source.kind, source.host)
    (incident, *_) = followed([], source.name, 0, before, datetime(2026, 1, 1, tzinfo=UTC))
    assert (incident.cause.kind, incident.cause.ranks, incident.cause.hosts) == (
        source.kind, () if source.rank is None else (source.rank,), () if source.host is None else (source.host,)
    )  # fmt: skip
    assert run(str(store)).code == 0


def test_a_study_has_the_finding(source: Source, tmp_path: Path) -> None:
    study_here(source.slow, out=tmp_path / "study")
    causes = pl.read_parquet(tmp_path / "study" / "causes" / "*.parquet")
    assert causes["kind"].to_list()[0] == source.kind
    assert run("fleet", "report", tmp_path / "study").code == 0
