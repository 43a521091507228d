"""What reports on recordings of GPUs say, in every form: the recording is not a step, and what it does not tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.handmade import run
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tests.reports import report_with
from tracekit import load
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.text import with_error
from tracekit.dashboards.words import answer_rows, fix_times


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products, 10 to 100 and 300 to 400 us. In between, the host works in Python for 170 us, then launches."""
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 400),
        event("user_annotation", "log_metrics", 106, 170),
        launch(0, 1), kernel(GEMM, 10, 90, correlation=1),
        launch(280, 2), kernel(GEMM, 300, 100, correlation=2),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("one_step")
    write(folder / "trace.json", document(events, world=1))
    return folder


def test_one_step_says_nothing_about_a_day_in_any_form(one_step: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    whole = run("whatif", one_step, "--full", "--explain", "--gpu-hour", "2", "--html", page, "--markdown", text)
    compared = run("compare", one_step, one_step)
    asked = run("whatif", one_step, "--fix", "kind=host * 0.5")
    for shown in (whole.out, compared.out, asked.out, page.read_text(), text.read_text()):
        assert "GPU-hours" not in shown
        assert "a step" not in shown
    assert "B loses" in compared.out


def test_heads_name_the_recording(one_step: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    shown = run("whatif", one_step, "--full", "--markdown", text, env={"COLUMNS": "120"}).out
    assert "| Fix | Sure | Recording after | Saves |" in text.read_text()
    heads = ["Fix", "Sure", "Recording", "after", "Saves"]
    assert any(line.split() == heads for line in shown.splitlines())


def test_documents_have_the_answers_to_questions(one_step: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    run("whatif", one_step, "--fix", "kind=host * 0.5", "--by", "name", "--html", page, "--markdown", text)
    for shown in (page.read_text(), text.read_text()):
        assert "fix kind=host" in shown
        assert "By name" in shown


def test_names_that_no_stack_gives_are_explained(one_step: Path, tmp_path: Path) -> None:
    assert "with_stack=True" in run("whatif", one_step).out
    events = [
        event("python_function", "train.py(10): step", 6, 290),
        launch(0, 1), kernel(GEMM, 10, 90, correlation=1), launch(280, 2), kernel(GEMM, 300, 100, correlation=2),
    ]  # fmt: skip
    write(tmp_path / "trace.json", document(events, world=1))
    with_stacks = run("whatif", tmp_path).out
    assert "step (train.py:10)" in with_stacks
    assert "with_stack" not in with_stacks


def test_idle_time_has_its_reasons_in_sum_and_their_names_below(one_step: Path) -> None:
    lines = [line.strip() for line in run("whatif", one_step, "--full").out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("python "))
    assert lines[at].split()[1:3] == ["180", "us"]
    assert lines[at + 1].split()[:3] == ["log_metrics", "170", "us"]


def test_output_into_a_pipe_has_no_blanks_at_ends_of_lines(one_step: Path) -> None:
    for ran in (run("whatif", one_step, "--full", "--explain"), run("compare", one_step, one_step)):
        assert [line for line in ran.out.splitlines() if line != line.rstrip()] == []


def test_an_export_counts_marked_steps_only(one_step: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json.gz"
    assert ", 1 of 1 step. Open it" in run("store", "export", one_step, "--out", out).out
    assert "has none of these steps: it has 3" in run("store", "export", one_step, "--out", out, "--steps", "4").err
    write(tmp_path / "unmarked" / "trace.json", document([launch(0, 1), kernel(GEMM, 10, 90, correlation=1)], world=1))
    assert " slices. Open it" in run("store", "export", tmp_path / "unmarked", "--out", out).out
    assert "no step is marked" in run("store", "export", tmp_path / "unmarked", "--out", out, "--steps", "4").err


@pytest.mark.slow
def test_redacted_reports_find_the_same(tmp_path: Path) -> None:
    """Two functions of the job between two launches, 50 us each, and a module, which a CUDA graph does not run."""
    names = ("job.py(3): secret", "job.py(9): also_secret", "nn.Module: Secret")
    events = [event("python_function", name, 110 + 55 * at, 50) for at, name in enumerate(names)]
    events += [launch(0, 1), kernel(GEMM, 10, 90, correlation=1), launch(280, 2), kernel(GEMM, 300, 100, correlation=2)]
    write(tmp_path / "trace.json", document(events, world=1))
    redacted, named = (run("whatif", tmp_path, *options, "--json").out for options in (["--redact"], []))
    assert "secret" not in redacted.lower()
    assert "also_secret" in named
    found = [[(one["kind"], one["saved_s"]) for one in json.loads(out)["causes"]] for out in (redacted, named)]
    assert found[0] == found[1]
    assert {"python-code", "host-bound-launch"} <= {kind for kind, _ in found[0]}


def test_info_shows_a_recording_in_words(one_step: Path) -> None:
    shown = run("store", "list", one_step).out
    assert "recording of GPUs" in shown
    assert "1 marked" in shown
    assert "{" not in shown


@pytest.mark.slow
def test_a_stored_recording_is_answered_on_20_lines(tmp_path: Path) -> None:
    ranks = Path(__file__).parents[1] / "sample_traces" / "gpu_slow_input"
    assert run("import", ranks, "--store", tmp_path / "store").code == 0
    for source in ((ranks,), ("--store", tmp_path / "store", "--job", "gpu_slow_input")):
        lines = run("whatif", *source, env={"COLUMNS": "80"}).out.splitlines()
        assert len(lines) <= 20
        assert any(line.startswith("STRAGGLER") for line in lines)


def test_the_table_of_ranks_keeps_its_last_column_at_80_columns() -> None:
    """Spans of 12.4 and 13.7 ms."""
    ranks = Path(__file__).parents[1] / "sample_traces" / "gpu_slow_input"
    lines = run("whatif", ranks, "--full", env={"COLUMNS": "80"}).out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:3] == ["rank", "sole", "delay"])
    assert lines[at].endswith("  of")
    assert lines[at + 1].endswith("12.4 ms")


def test_causes_without_a_row_are_counted_and_found(tmp_path: Path) -> None:
    """Three functions of 800 us, and what is left of Python: one leads, three are others."""
    many = [launch(0, 1), kernel(GEMM, 10, 90, correlation=1)]
    for at in range(3):
        many += [event("user_annotation", f"part {at}", 110 + 1000 * at, 800),
                 launch(1000 + 1000 * at, at + 2), kernel(GEMM, 1010 + 1000 * at, 90, correlation=at + 2)]  # fmt: skip
    write(tmp_path / "trace.json", document(many, world=1))
    report = load(tmp_path).report
    for most, last in ((3, None), (2, "1 more cause: see Causes"), (0, "3 causes: see Causes")):
        words = [words for _, words in answer_rows(report, most_causes=most)]
        assert [one for one in words if "see Causes" in one] == ([] if last is None else [last])


def test_a_fix_is_priced_without_the_profiler_where_that_is_known() -> None:
    saves = {"value": 1.0, "low": 0.5, "high": 1.5}
    fixes = [
        {"saves_step_s": saves, "unprofiled_step_s": 4.0, "new_step_s": 9.0, "saved_s": 2.0},
        {"saves_step_s": saves, "unprofiled_step_s": 4.0, "bound": True},
        {"saves_step_s": saves, "new_step_s": 9.0, "saved_s": 2.0},
        {"new_step_s": 9.0, "saved_s": 2.0, "error_s": 0.25},
    ]
    found = [fix_times(fix) for fix in report_with(fixes=fixes).fixes]
    words = Estimate(1.0, 0.5, 1.5).words
    with_profiler = [("9.00 s", with_error(2.0, 0.0)), ("9.00 s", with_error(2.0, 0.25))]
    assert found == [("3.00 s", words), ("3.00 s", "1.00 s"), *with_profiler]
