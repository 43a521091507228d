"""Plug-ins that fail: each is named, and the rest works as without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.analysis.small_jobs import of_steps
from tests.distributions import install
from tests.handmade import run
from tracekit.analysis.detectors.late_rank import LateStart
from tracekit.base import plug_ins
from tracekit.base.errors import OutputError, SelectionError, TracekitError
from tracekit.dashboards.documents.markdown import renderer

OPS = pl.DataFrame({"rank": [0, 0], "kind": ["a", "b"], "start": [0.0, 1.0], "duration": [1.0, 2.0]})
#: An importer of what begins with "odd".
IMPORTER = """
description = "odd files"
def sniff(path):
    return path.read_bytes()[:3] == b"odd"
def read(path):
    raise RuntimeError("not today")
"""


def plug(folder: Path, group: str, *, of: str = "acme", **modules: str) -> None:
    """Install a distribution with a plug-in for each module: the module, or `it` in the module if it defines `it`."""
    values = {name: f"{of}_{name}:it" if re.search(r"\bit =|def it|class it", code) else f"{of}_{name}"
              for name, code in modules.items()}  # fmt: skip
    points = {name.replace("_", "-"): value for name, value in values.items()}
    install(folder, of, {f"tracekit.{group}": points}, {f"{of}_{name}.py": code for name, code in modules.items()})


@pytest.fixture
def odd_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.odd"
    path.write_text("odd bytes")
    return path


def test_what_cannot_be_an_importer_is_named_once_and_left_out(site_packages: Path) -> None:
    plug(
        site_packages,
        "importers",
        broken="import no_such_module",
        leaves="raise SystemExit(3)",
        ndtimeline=IMPORTER,
        nothing="it = 7",
        odd=IMPORTER,
    )
    plug(site_packages, "importers", of="other", odd=IMPORTER)
    listed = run("import", "--format")
    assert "odd                  odd files" in listed.out
    assert listed.out.count("odd files") == 1
    assert listed.err.splitlines() == [
        f"tracekit: importer '{name}' of {of} 1.2 is left out: {why}"
        for name, of, why in (
            ("broken", "acme", "acme_broken cannot be used (ModuleNotFoundError: No module named 'no_such_module')"),
            ("leaves", "acme", "acme_leaves cannot be used (SystemExit: 3)"),
            ("ndtimeline", "acme", "its name is that of tracekit's own; rename the entry point"),
            ("nothing", "acme", "acme_nothing:it cannot be used (TypeError: 7 is not as docs/extending.md describes)"),
            ("odd", "other", "its name is that of importer 'odd' of acme 1.2; rename the entry point"),
        )
    ]
    assert run("import", "--format").err == ""


def test_an_importer_that_fails_to_read_is_one_error_and_nothing_is_stored(
    odd_file: Path, site_packages: Path, tmp_path: Path
) -> None:
    plug(site_packages, "importers", odd=IMPORTER)
    ran = run("import", odd_file, "--store", tmp_path / "jobs.store")
    assert ran.code == 2
    assert ran.message == f"tracekit: {odd_file}: importer 'odd' of acme 1.2 failed (RuntimeError: not today)"
    assert not (tmp_path / "jobs.store").exists()


def test_an_importer_must_return_a_trace(odd_file: Path, site_packages: Path) -> None:
    plug(site_packages, "importers", odd=IMPORTER.replace('raise RuntimeError("not today")', "return [1]"))
    assert "importer 'odd' of acme 1.2 failed (TypeError: it read a list" in run("whatif", odd_file).message


def test_an_importer_that_fails_to_recognise_leaves_the_path_to_others(odd_file: Path, site_packages: Path) -> None:
    """It is named once, though both commands show it the path."""
    plug(site_packages, "importers", failing=IMPORTER.replace("return path", "1 / 0; return path"), odd=IMPORTER)
    first, again = run("store", "list", odd_file), run("store", "list", odd_file)
    told, failed = first.err.splitlines()
    assert told.startswith("tracekit: importer 'failing' of acme 1.2 failed (ZeroDivisionError: division by zero) at ")
    assert "importer 'odd' of acme 1.2 failed" in failed
    assert again.err.splitlines() == [failed]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def it(ops): raise KeyError('batch')", r"rule 'odd' of acme 1.2 failed \(KeyError: 'batch'\)"),
        ("def it(ops): return None", r"rule 'odd' of acme 1.2 failed \(AttributeError"),
        (
            "def it(ops): return type(ops)({'before': [0, None], 'after': [1, 7], 'why': 'rule'})",
            r"rule 'odd' of acme 1.2 failed \(ValueError: an edge from row None to row 7; the ops have rows 0 to 1\)",
        ),
        (
            "import no_such_module\nit = 1",
            "rule 'odd' is unknown; known: explicit, streams, kineto; rule 'odd' of acme",
        ),
    ],
)
def test_a_trace_is_not_replayed_without_its_rule(code: str, words: str, site_packages: Path) -> None:
    """It would be replayed as another job."""
    plug(site_packages, "rules", odd=code)
    with pytest.raises(TracekitError, match=f"job: {words}"):
        tracekit.job_of(tracekit.OpTrace(OPS, "job", rules=("odd",))).whatif()


def test_no_rule_replaces_one_of_tracekit(site_packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`streams` orders the two ops, and a rule that works is used beside the impostor."""
    none = "def it(ops): return ops.clear().select(before='rank', after='rank', why='kind')"
    plug(site_packages, "rules", streams="def it(ops): raise RuntimeError", none=none)
    job = tracekit.job_of(tracekit.OpTrace(OPS.with_columns(stream=0), "job", rules=("streams", "none")))
    assert job.whatif().step_times().original.tolist() == [3.0]
    assert "rule 'streams' of acme 1.2 is left out: its name is that of tracekit's own" in capsys.readouterr().err


def test_a_renderer_that_fails_is_one_error(site_packages: Path) -> None:
    plug(
        site_packages,
        "renderers",
        raising="def it(report): raise OSError('no network')",
        numbers="def it(report): return 7",
        json="def it(report): return ''",
    )
    with pytest.raises(OutputError, match=r"^renderer 'raising' of acme 1.2 failed \(OSError: no network\)$"):
        renderer("raising")(None)
    with pytest.raises(OutputError, match=r"renderer 'numbers' of acme 1.2 failed .*it returned a int; expected a str"):
        renderer("numbers")(None)
    with pytest.raises(SelectionError, match="renderer 'json' is unknown; known: numbers, raising; renderer 'json' of"):
        renderer("json")


def test_damaged_metadata_hides_only_its_own_plug_ins(site_packages: Path) -> None:
    """That of packages without plug-ins does not matter."""
    plug(site_packages, "rules", none="def it(ops): return ops")
    for name, content in (
        ("ours", b"[tracekit.rules]\nnothing\n"),
        ("theirs", b"\xff[x]"),
        ("others", b"[x]\nnothing"),
    ):
        install(site_packages, name, {}, {})
        (site_packages / f"{name}-1.2.dist-info" / "entry_points.txt").write_bytes(content)
    found, problems = plug_ins.plug_ins("rules")
    assert list(found) == ["none"]
    (problem,) = problems
    assert problem.startswith("plug-ins of ours are left out: its metadata is damaged (")


def test_a_trace_of_tracekit_needs_no_look_for_importers_and_rules(
    site_packages: Path, slow_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []
    monkeypatch.setattr(plug_ins, "_entry_points", lambda group, _: looked_for.append(group) or iter(()))
    tracekit.OpTrace(OPS, "ops").write_parquet(tmp_path / "ops.parquet")
    assert run("whatif", slow_file).code == run("whatif", tmp_path / "ops.parquet").code == 0
    assert {"importers", "rules", "renderers"}.isdisjoint(looked_for)
    run("import", "--format")
    assert looked_for[-1] == "importers"


#: A detector of what is one second too long, anywhere.
DETECTOR = """
from tracekit.analysis.detectors.detector import Advice, Candidate, Detector, Figure
from tracekit.analysis.whatif.interventions import AddTime
from tracekit.report.finding import Place
class it(Detector):
    kind, title, suggested_fix = "odd", "A second too long", "shorten it"
    def find(self, job):
        yield Candidate(self.kind, Place(), "takes a second too long", (), 0.9, AddTime(-1.0))
"""


def found(plugged: str) -> tuple[list[str], tuple[str, ...]]:
    """The kinds of findings on a job whose second op takes a second too long, and the problems."""
    report = tracekit.job_of(tracekit.OpTrace(OPS.with_columns(stream=0), "job", rules=("streams",))).report
    assert [
        words for name, words in ((remark.name, remark.words) for remark in report.remarks) if name in {"Plug-ins", ""}
    ] == list(report.problems)
    assert report.to_dict()["problems"] == list(report.problems), plugged
    return [finding.kind for finding in report.findings], report.problems


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("yield", "1 / 0; yield", "detector 'odd' of acme 1.2 failed (ZeroDivisionError: division by zero)"),
        ("yield", "raise SystemExit(3); yield", "detector 'odd' of acme 1.2 failed (SystemExit: 3)"),
        (
            "yield Candidate",
            "return 7 or",
            "detector 'odd' of acme 1.2 failed (TypeError: 'int' object is not iterable)",
        ),
        ("(self.kind", "('bad-worker'", "expected a Candidate of kind 'odd'"),
        ("self.kind, Place()", "self.kind, None", "expected a Place, and texts, in "),
        ("Place()", "Place(ranks=(7,))", "it found something at rank 7; the job has no such place"),
        ("Place()", "Place(pp_ranks=(1,))", "it found something at stage 1; the job has no such place"),
        ("0.9", "float('nan')", "confidence nan; expected a number from 0 to 1"),
        ("-1.0", "-1e6", "failed (ValueError: after its change, some step time is negative or no number)"),
        ('"takes a second too long"', "7", "expected a Place, and texts, in "),
        ("0.9", "None", "(TypeError: "),
        ("(), 0.9", "(Figure('share', float('nan'), 0.0),), 0.9", "one of its figures is no number"),
        ('"shorten it"', "Advice(7, 7)", "a finding of detector 'odd' cannot be used ("),
        ("1.0", "float('nan')", "failed (ValueError: after its change, some step time is negative or no number)"),
        ("def find", "def fixes(self, *both): raise OSError('later')\n    def find", "failed (OSError: later)"),
        ("def find", "def review(self, *both): raise OSError('seen')\n    def find", "failed (OSError: seen)"),
    ],
)
def test_a_detector_that_fails_is_left_out_of_the_report(
    before: str, after: str, why: str, site_packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names it once; it is as without the detector."""
    plug(site_packages, "detectors", odd=DETECTOR.replace(before, after))
    kinds, problems = found(after)
    (problem,) = problems
    assert kinds == ["healthy"]
    assert why in problem
    assert problem.endswith("; this report leaves it out")
    assert capsys.readouterr().err == f"tracekit: {problem}\n"


def test_a_price_that_is_no_number_is_left_out_beside_a_stall_that_was_seen_once(site_packages: Path) -> None:
    """A forward of 0.1 s takes 5 s on one of three ranks in one step of ten."""
    plug(site_packages, "detectors", odd=DETECTOR.replace("-1.0", "float('nan')"))
    usual = [("forward-compute", 0.1), ("backward-compute", 0.2)]
    stalled = [("forward-compute", 5.0), ("backward-compute", 0.2)]
    steps = [[usual, usual, stalled if step == 4 else usual] for step in range(10)]
    report = tracekit.job_of(of_steps(steps)).report
    (problem,) = report.problems
    assert "failed (ValueError: after its change, some step time is negative or no number)" in problem
    assert [cause.once.steps for cause in report.findings if cause.once is not None] == [(4,)]


def test_what_a_plug_in_prints_does_not_go_into_the_report(site_packages: Path, slow_file: Path) -> None:
    code = DETECTOR.replace("yield", "print('run'); yield")
    plug(site_packages, "detectors", odd=f"print('imported')\n{code}")
    ran = run("whatif", slow_file, "--json")
    assert json.loads(ran.out)["causes"]
    assert ran.err.splitlines()[:2] == ["imported", "run"]


def test_a_detector_that_fails_spoils_no_other(site_packages: Path) -> None:
    plug(
        site_packages,
        "detectors",
        odd=DETECTOR,
        bad=DETECTOR.replace('"odd"', '"bad"').replace("yield", "1 / 0; yield"),
    )
    kinds, (problem,) = found("both")
    assert kinds == ["odd"]
    assert problem.startswith("detector 'bad' of acme 1.2 failed")


def test_a_gate_does_not_pass_if_the_detector_that_it_asks_about_failed(site_packages: Path, slow_file: Path) -> None:
    plug(site_packages, "detectors", odd=DETECTOR.replace("yield", "1 / 0; yield"))
    ran = run("whatif", slow_file, "--fail-on", "odd>5%")
    assert ran.code == 2
    assert ran.err.endswith("\ntracekit: --fail-on odd: cannot be judged, because its detector failed\n")
    assert run("whatif", slow_file, "--fail-on", "bad-worker>5%").code == 3


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("healthy", DETECTOR, "is left out: its name is that of tracekit's own; rename the entry point"),
        ("strange", DETECTOR, "is left out: its kind is 'odd'; give both the same name, one that"),
        ("odd", "it = object()", "is not as docs/extending.md describes"),
        ("odd", DETECTOR.replace('"A second too long"', "7"), "is not as docs/extending.md describes"),
        (
            "odd",
            "import no_such_module\nit = 1",
            "cannot be used (ModuleNotFoundError: No module named 'no_such_module')",
        ),
    ],
)
def test_what_cannot_be_a_detector_is_named_and_left_out(
    name: str, code: str, why: str, site_packages: Path, slow_file: Path
) -> None:
    plug(site_packages, "detectors", **{name: code})
    ran = run("whatif", slow_file)
    assert why in ran.message
    assert "STRAGGLER" in ran.out
    row = " ".join(ran.out[ran.out.index("Plug-ins") :].split())
    assert row.startswith(f"Plug-ins detector '{name}' of acme 1.2 is left out: ")


def test_detectors_of_tracekit_are_not_guarded(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of tracekit must not become a report without a finding, even beside a plug-in."""
    plug(site_packages, "detectors", odd=DETECTOR)
    monkeypatch.setattr(LateStart, "find", lambda *_: iter([1 // 0]))
    with pytest.raises(ZeroDivisionError):
        found("ours")


def test_only_a_plug_in_costs_the_import_of_the_metadata() -> None:
    """Looking for detectors reads small files; `importlib.metadata` takes longer to import than all of that."""
    code = """
import sys
from tracekit.analysis.detectors.detector import detectors
from tracekit.analysis.evidence.subject import JobKind
before = "importlib.metadata" in sys.modules
detectors(JobKind.ANY)
print(before or "importlib.metadata" not in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
