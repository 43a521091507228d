"""The report as Markdown: tables that hold together, names that stay text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from tests.documents.evil import EVIL, SAMPLES, write_evil
from tests.handmade import run
from tracekit.base.errors import ExitCode
from tracekit.dashboards.documents.markdown import escaped, markdown
from tracekit.report.tables import ShareGrid
from tracekit.sources.load import load


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evil(tmp_path_factory.mktemp("evil"))


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, a row a list, without the line under the heads."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()] for table in found]
    return [[[cell.strip() for cell in row] for at, row in enumerate(table) if at != 1] for table in rows]


def test_answer_causes_and_fixes_are_the_tables_of_the_report() -> None:
    job = SAMPLES / "slow_worker.parquet"
    text = run("whatif", job, "--markdown", "-").out
    report = json.loads(run("whatif", job, "--json").out)
    answer, causes, fixes = tables(text)
    assert ["Who", report["answer"]["who"]] in answer
    assert ["Do", report["answer"]["action"]] in answer
    assert ["Saves", report["answer"]["saves"].removeprefix("saves ")] in answer
    assert [row[0] for row in causes[1:]] == [cause["title"] for cause in report["causes"]]
    assert len(fixes) == 1 + len(report["fixes"])
    assert f"**STRAGGLER: {report['answer']['headline']}**" in text
    assert text.endswith(f"```sh\ntracekit whatif {job} --full\n```\n")


def test_names_stay_text(evil: Path) -> None:
    text = run("whatif", evil, "--markdown", "-").out
    assert "<img" not in text
    assert all(len(row) == len(table[0]) for table in tables(text) for row in table)


def test_a_name_in_a_picture_does_not_end_its_block() -> None:
    drawn = ShareGrid("loads", "", "", ["```", "row"], ["0"], [[0.0], [0.0]], "tokens")
    report = structs.replace(load(SAMPLES / "healthy.parquet").report, sections=[drawn])
    assert markdown(report).count("```") == 2


def test_markup_is_escaped_and_plain_names_are_left_alone() -> None:
    assert escaped("node_1 -> a|b*c* <x> @me _y_\n") == r"node_1 -> a\|b\*c\* &lt;x> &#64;me \_y\_\\n"


def test_a_file_is_written_and_replaced_and_the_screen_stays_the_report(tmp_path: Path) -> None:
    job, path = SAMPLES / "healthy.parquet", tmp_path / "report.md"
    for _ in range(2):
        ran = run("whatif", job, "--markdown", path)
        assert ran.out.startswith("healthy   dp 4")
    assert path.read_text().partition("\n")[2] == run("whatif", job, "--markdown", "-").out
    foreign = tmp_path / "notes.md"
    foreign.write_text("# mine\n")
    assert run("whatif", job, "--markdown", foreign).code == ExitCode.BAD_INPUT
    assert foreign.read_text() == "# mine\n"


def test_redacted_outputs_name_neither_job_nor_host_and_say_the_same_figures(evil: Path) -> None:
    redacted = run("whatif", evil, "--redact", "--json").out
    assert EVIL not in json.dumps(json.loads(redacted), ensure_ascii=False)
    assert "GPU-secret" not in redacted
    content, named = json.loads(redacted), json.loads(run("whatif", evil, "--json").out)
    assert content["job"]["name"] == "job"
    (culprit,) = content["answer"]["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["gpu_uuid"]) == (9, "host-2", None)
    assert (content["slowdown"], content["verdict"]["lost_s"]) == (named["slowdown"], named["verdict"]["lost_s"])
    screen = run("whatif", evil, "--redact").out
    assert "alert" not in screen
    assert screen.endswith("tracekit whatif JOB --full  # what the answer rests on\n")
