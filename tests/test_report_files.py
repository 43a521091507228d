"""A report is a file: every command that needs no ops reads it, and only whole reports of this version are read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.cases import case
from tests.handmade import run
from tracekit.base.errors import FormatError
from tracekit.commands import mcp
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


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("report.json", lambda content: json.dumps(content, indent=2).encode()),
        ("report.json", lambda content: json.dumps(content, sort_keys=True).encode()),
        ("report.json", lambda content: b"\xef\xbb\xbf" + json.dumps(content).encode()),
        ("report.json.gz", lambda content: gzip.compress(json.dumps(content).encode())),
        ("report.json.gz", lambda content: gzip.compress(json.dumps(content, indent=2, sort_keys=True).encode())),
    ],
)
def test_a_report_is_read_as_any_program_writes_json(name: str, written: Any, sent: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(written(json.loads(sent.read_text())))
    ran = run(tmp_path / name)
    assert (ran.code, ran.out) == (0, run("whatif", sent).out)


def test_json_in_which_only_a_part_is_a_report_is_none(sent: Path, tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(json.dumps({"answer": json.loads(sent.read_text())}))
    ran = run("whatif", tmp_path / "all.json")
    assert (ran.code, "not JSON that tracekit reads" in ran.message) == (2, True)


@pytest.mark.parametrize("option", [("--fix", "rank=9"), ("--bubbles",), ("--redact",), ("--by", "host")])
def test_what_needs_the_trace_is_refused(option: tuple[str, ...], sent: Path) -> None:
    ran = run("whatif", sent, *option)
    assert (ran.code, ran.message) == (
        2,
        f"tracekit: {option[0]} needs the ops of its trace, and a report has none; leave it out",
    )


GRID: dict[str, Any] = {
    "type": "grid", "title": "loads", "down": "layer", "across": "rank", "rows": ["0"], "columns": [], "values": [[]],
    "unit": "tokens",
}  # fmt: skip


def put(content: Any, place: str, value: object) -> Any:
    """The report with another value at a place such as `fixes.0.saved_s`, or without it for `...`."""
    *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
    holder = content
    for key in outer:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    return content


def edited(place: str, value: object) -> Callable[[dict[str, Any]], str]:
    return lambda content: json.dumps(put(content, place, value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited("report_version", 2), "a report of version 2, and this tracekit reads"),
        (edited("report_version", 1), "a report of version 1, and this tracekit reads"),
        (lambda content: json.dumps(content)[:5000], "not whole JSON"),
        (
            edited("verdict.share", 4),
            "not a report as tracekit writes it (Expected `float` <= 1.000001 - at `$.verdict",
        ),
        (edited("job.gpus", -5), "not a report as tracekit writes it (Expected `int` >= 0 - at `$.job.gpus`)"),
        (edited("by_step.0.step", 10**15), "not a report as tracekit writes it (Expected `int` <= 2147483647 - at `$."),
        (
            edited("step_time_s.recorded", -1.0),
            "not a report as tracekit writes it (Expected `float` >= -1e-06 - at",
        ),
        (edited("slowdown", 0), "not a report as tracekit writes it (Expected `float` > 0.0 - at `$.slowdown`)"),
        (
            edited("slowdown", 7.5),
            "S x ideal = 5.88139 instead of 1.10381, which no job can have: it was edited; print",
        ),
        (edited("waste", 4), "not a report as tracekit writes it (Expected `float` <= 1.000001 - at `$.waste`)"),
        (edited("waste", 0.4), "1 - waste = 0.6 instead of 0.710434, which no job can have: it was edited"),
        (edited("m_w", 4), "m_w x waste = 1.15826 of at most 1, which no job can have: it was edited"),
        (
            edited("answer.accounts.0.share", 4),
            "share x step of bad-worker = 4.42899 instead of 0.343391, which",
        ),
        (
            edited("causes.0.saved_s", 1e5),
            "seconds that bad-worker costs of a step = 100000 of at most 1.10725, which no",
        ),
        (
            edited("fixes.1.saved_s", 1e5),
            "new_step_s + saved_s of shift-work-from-slow-worker = 100001 instead of 1.10725",
        ),
        (edited("by_step.0.lost_s", 1e4), "seconds lost in step 100 = 10000 of at most 13.287, which no job can have"),
        (edited("verdict.share", 0), "0.343391 s lost, 0% of the time, of 1 kind, which no job can have"),
        (edited("verdict.losses", []), "0.343391 s lost, 31% of the time, of 0 kinds, which no job can have"),
        (edited("fixes", []), "a first fix 0 of 0, which no job can have"),
        (edited("verdict.first_fix", 99), "a first fix 99 of 6, which no job can have"),
        (edited("by_step", []), "a report without a step, which no job can have"),
        (edited("verdict.losses.0.causes", [0, 99]), "losses by the causes [0, 99] of "),
        (edited("by_worker.0.pp_rank", 7), "a map of 32 workers, 16 of which have a figure, which no job can have"),
        (edited("answer.places", []), "an answer on 1 causes at 0 places, and 1 causes, which"),
        (edited("sections", [GRID | {"values": [[0.1, 0.2]]}]), "a section 'loads' whose parts do not fit together"),
        (edited("answer.headline", "x" * 5_000_000), "a text of 5,000,000 characters, 'xxxxxxxxxxxxxxxxxxxx', which"),
        (
            edited("answer.headline", "rank 9\x1b[2J is slow"),
            r"a text with the control character '\x1b', 'rank 9\x1b[2J is slow', which no job can have: it was edited",
        ),
        (lambda _: '{"report_version": 3, "job": ' + "[" * 100_000, "not whole JSON"),
        (edited("trust.trustworthy", "yes"), "not a report as tracekit writes it"),
    ],
)
def test_what_is_no_whole_report_of_this_version_is_refused_in_a_sentence(
    change: Any, words: str, sent: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(change(json.loads(sent.read_text())))
    ran = run("whatif", tmp_path / "bad.json")
    assert (ran.code, ran.out) == (2, "")
    assert f"bad.json: {words}" in ran.message


def places(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and element of a report, with what is there."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else [])
    for key, value in pairs:
        yield f"{place}{key}", value
        yield from places(value, f"{place}{key}.")


#: What a hand puts in the place of a value, by its type.
EDITS: dict[type, tuple[Any, ...]] = {
    **dict.fromkeys((int, float), (0, -1, 4, 1e15, 10**15, 1e300, None, ...)),
    list: ([], ...),
    dict: ({}, ...),
}


@pytest.mark.parametrize(
    "name", ["slow_worker.parquet", pytest.param("gpu_slow_input", marks=pytest.mark.slow), "rl.jsonl"]
)
def test_a_report_edited_anywhere_is_refused_in_a_sentence_or_shown(name: str, tmp_path: Path) -> None:
    trace = write(tmp_path / name, lines()) if name == "rl.jsonl" else SAMPLES / name
    printed, edits = run("whatif", trace, "--json").out, Random(name)
    leaves = [leaf for leaf in places(json.loads(printed)) if type(leaf[1]) in EDITS]
    for place, value in edits.sample(leaves, 12):
        (tmp_path / "edited.json").write_text(edited(place, edits.choice(EDITS[type(value)]))(json.loads(printed)))
        written = ("--markdown", tmp_path / "report.md", "--html", tmp_path / "report.html")
        for words in (written, ("--explain", "--full")):
            ran = run("whatif", tmp_path / "edited.json", *words)
            assert ran.code == 0 or (ran.code == 2 and ran.err.count("\n") == 1), (place, ran.err)


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
    assert ran.message.endswith(refusal(sent))


def refusal(report: Path) -> str:
    shows = f"`tracekit whatif {report}` shows it"
    return f"{report}: a report, not a trace; {shows}, but this command needs the ops of its trace"


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_compare_of_reports_or_of_one_and_a_trace_prints_what_it_does_of_traces(
    words: tuple[str, ...], sent: Path, tmp_path: Path
) -> None:
    slow, healthy = SAMPLES / "slow_worker.parquet", SAMPLES / "healthy.parquet"
    later = tmp_path / "healthy.json"
    later.write_text(run("whatif", healthy, "--json").out)
    expected = run("compare", slow, healthy, *words).out.partition("\nNext")[0]
    assert "343.8 ms (31.1%) less" in expected
    for before, after in ((sent, later), (slow, later), (sent, healthy)):
        with case(f"{before.name} {after.name}"):
            ran = run("compare", before, after, *words)
            assert (ran.code, ran.out.partition("\nNext")[0]) == (0, expected)


def test_compare_and_culprits_of_reports_on_post_training_are_those_of_the_logs(tmp_path: Path) -> None:
    for name, reward_s in (("a", 0.5), ("b", 2.5)):
        (tmp_path / f"{name}.json").write_text(
            run("whatif", write(tmp_path / f"{name}.jsonl", lines(reward_s=reward_s)), "--json").out
        )
    of_reports, of_logs = (
        run("compare", *(tmp_path / f"{name}.{ending}" for name in "ab"), "--json").out for ending in ("json", "jsonl")
    )
    assert of_reports == of_logs
    assert of_reports
    for words in ((), ("--format", "json")):
        ran, expected = (run("culprits", tmp_path / f"a.{ending}", *words) for ending in ("json", "jsonl"))
        assert (ran.code, ran.out) == (expected.code, expected.out)


@pytest.mark.parametrize(
    "words", [(), ("--format", "slurm", "--suspects"), ("--format", "json"), ("--part", "compute")]
)
def test_culprits_of_a_report_are_those_of_its_trace(words: tuple[str, ...], sent: Path) -> None:
    ran, expected = run("culprits", sent, *words), run("culprits", SAMPLES / "slow_worker.parquet", *words)
    assert (ran.code, ran.out, ran.err) == (expected.code, expected.out, expected.err)
    assert "host-0001" in ran.out


def test_a_command_that_needs_ops_says_so_and_names_the_one_that_works(sent: Path, tmp_path: Path) -> None:
    healthy = SAMPLES / "healthy.parquet"
    for words in (
        ("gate", sent, "--baseline", healthy),
        ("gate", healthy, "--baseline", sent),
        ("bill", sent),
        ("import", sent, "--store", tmp_path / "jobs.store"),
        ("optimize", sent),
        ("store", "export", sent, "--out", tmp_path / "timeline.json.gz"),
    ):
        with case(words[0]):
            ran = run(*words)
            assert (ran.code, ran.out) == (2, "")
            assert ran.message == f"tracekit: {refusal(sent)}"


def test_an_option_of_traces_belongs_to_the_one_beside_a_report(sent: Path) -> None:
    for words in (("culprits", sent), ("compare", sent, sent)):
        ran = run(*words, "--unit", "s")
        assert (ran.code, ran.out) == (2, "")
        assert ran.message.endswith(f"{sent} is a report: leave them out")
    assert run("compare", sent, SAMPLES / "healthy.parquet", "--unit", "s").code == 0


def test_reports_by_different_methods_are_not_compared(sent: Path, tmp_path: Path) -> None:
    published = tmp_path / "published.json"
    published.write_text(run("whatif", SAMPLES / "healthy.parquet", "--method", "published", "--json").out)
    ran = run("compare", sent, published)
    assert (ran.code, ran.out) == (2, "")
    assert ran.message == (
        "tracekit: A is a report by --method tracekit, B by published: print both by the same method"
    )


def test_an_agent_gets_of_a_report_what_it_gets_of_the_trace(sent: Path) -> None:
    slow, healthy = (str(SAMPLES / f"{name}.parquet") for name in ("slow_worker", "healthy"))
    assert mcp.why_slow(str(sent)) == mcp.why_slow(slow)
    assert mcp.who(str(sent)) == mcp.who(slow)
    assert mcp.compare(str(sent), healthy) == mcp.compare(slow, healthy)
    with pytest.raises(FormatError, match="this command needs the ops of its trace"):
        mcp.what_if(str(sent), "rank=9")
