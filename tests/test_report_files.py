"""A report is a file: `whatif` prints it, `open` shows it, and what is no whole report of this version is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.handmade import run
from tracekit.commands.door import report_page
from tracekit.trace.canonical import read_parquet

SAMPLES = Path(__file__).parent.parent / "sample_traces"


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sent") / "report.json"
    path.write_text(run("whatif", SAMPLES / "slow_worker.parquet", "--json").out)
    return path


@pytest.mark.parametrize(
    "name", ["slow_worker.parquet", pytest.param("gpu_slow_input", marks=pytest.mark.slow), "rl.jsonl"]
)
@pytest.mark.parametrize("words", [("--full", "--explain"), ("--markdown", "-"), ("--json",)])
def test_a_file_prints_what_its_trace_did(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    trace = write(tmp_path / name, lines()) if name == "rl.jsonl" else SAMPLES / name
    (tmp_path / "report.json").write_text(run("whatif", trace, "--json").out)
    printed, of_trace = run("whatif", tmp_path / "report.json", *words).out, run("whatif", trace, *words).out
    for suggestion in ("\nNext ", "\n```sh"):  # what to type next about a trace
        of_trace = of_trace.partition(suggestion)[0]
    assert printed.strip() == of_trace.strip()


def test_a_file_becomes_a_page(sent: Path, tmp_path: Path) -> None:
    text = report_page(sent).read_text("utf-8")
    assert run("whatif", sent, "--html", tmp_path / "page.html").code == 0
    assert text == (tmp_path / "page.html").read_text("utf-8")
    assert "rank 9 on host-0001" in text
    assert text.count('<rect class="level') == 16


@pytest.mark.parametrize("option", [("--fix", "rank=9"), ("--bubbles",), ("--redact",), ("--by", "host")])
def test_what_needs_the_trace_is_refused(option: tuple[str, ...], sent: Path) -> None:
    ran = run("whatif", sent, *option)
    assert (ran.code, ran.message) == (
        2,
        f"tracekit: {option[0]} needs the trace, and a report is without it; leave it out",
    )


GRID: dict[str, Any] = {
    "type": "grid", "title": "loads", "down": "layer", "across": "rank", "rows": ["0"], "columns": [], "values": [[]],
    "unit": "tokens",
}  # fmt: skip


def edited(**keys: Any) -> Any:
    def change(content: dict[str, Any]) -> str:
        return json.dumps({**content, **{key: {**content[key], **value} for key, value in keys.items()}})

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda content: json.dumps({**content, "report_version": 2}),
            "a report of version 2, and this tracekit reads",
        ),
        (
            lambda content: json.dumps({**content, "report_version": 1}),
            "a report of version 1, and this tracekit reads",
        ),
        (lambda content: json.dumps(content)[:5000], "not whole JSON"),
        (edited(verdict={"share": 4.0}), "a lost share of 400%, which no job can have: it was edited"),
        (lambda content: json.dumps({**content, "slowdown": 0}), "S = 0, which no job can have: it was edited"),
        (edited(answer={"headline": "x" * 5_000_000}), "a text of 5,000,000 characters, 'xxxxxxxxxxxxxxxxxxxx', which"),
        (lambda content: json.dumps({**content, "by_step": []}), "a report without a step, which no job can have"),
        (edited(answer={"places": []}), "an answer on 1 causes at 0 places, and 1 causes, which"),
        (edited(verdict={"first_fix": 99}), "a first fix 99 of "),
        (
            lambda content: json.dumps({**content, "sections": [GRID | {"values": [[0.1, 0.2]]}]}),
            "a section 'loads' whose parts do not fit together",
        ),
        (edited(step_time_s={"recorded": -1.0}), "a step time of -1 s, which no job can have: it was edited"),
        (lambda content: json.dumps({**content, "slowdown": 7.5}), "S = 7.5 of steps of "),
        (
            edited(answer={"headline": "rank 9\x1b[2J is slow"}),
            r"a text with the control character '\x1b', 'rank 9\x1b[2J is slow', which no job can have: it was edited",
        ),
        (lambda _: '{"report_version": 3, "job": ' + "[" * 100_000, "not whole JSON"),
        (edited(trust={"trustworthy": "yes"}), "not a report as tracekit writes it"),
    ],
)
def test_what_is_no_whole_report_of_this_version_is_refused_in_a_sentence(
    change: Any, words: str, sent: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(change(json.loads(sent.read_text())))
    ran = run("whatif", tmp_path / "bad.json")
    assert (ran.code, ran.out) == (2, "")
    assert f"bad.json: {words}" in ran.message


def test_names_of_any_characters_are_read_and_shown_escaped(tmp_path: Path) -> None:
    trace = read_parquet(SAMPLES / "slow_worker.parquet")
    hosts = {rank: f"{host}\x1b[2J" for rank, host in trace.hosts.items()}
    named = replace(trace, name="job\x1b[2J", metadata={**trace.metadata, "hosts": hosts})
    (tmp_path / "report.json").write_text(tracekit.job_of(named).report.to_json())
    ran = run("whatif", tmp_path / "report.json", "--full")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "host-0001\\x1b[2J" in ran.out


def test_rl_names_the_command_that_shows_a_report(sent: Path) -> None:
    ran = run("rl", sent)
    assert (ran.code, ran.out) == (2, "")
    assert ran.message.endswith(f"a report, not a trace; `tracekit whatif {sent}` shows it, all else needs its trace")
