"""Each threshold says what fixed it, and a benchmark that a comment or a document names can be run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import ALWAYS_WITH_OPTIONS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("analysis", "benchmarks", "collectors", "dashboards", "docs", "judges", "tests", "tracekit")
BENCHMARKS = {*SECTIONS, *ALWAYS_WITH_OPTIONS}
#: What can fix a threshold; "Chosen": nobody measured it.
FIXED_BY = re.compile(r"Benchmark `|Simulated fleets|(?:Statistic|Definition|Chosen)\b")
NAMED = re.compile(r"Benchmarks?[\s#:]+`([\w-]+)`|python -m benchmarks ([a-z][\w-]*)|\bJudges? `([\w-]+)`")
JUDGES = {path.stem for path in (ROOT / "judges").iterdir()}


def texts() -> Iterator[tuple[Path, str]]:
    """The sources and documents, but this file."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]  # follows no links to folders
    for path in [*sorted(ROOT.glob("*.md")), *paths]:
        if path.suffix in {".py", ".md"} and path != Path(__file__):
            yield path.relative_to(ROOT), path.read_text()


def unknown(text: str) -> list[str]:
    """The benchmarks and judges that a text names and that are not there."""
    return [
        benchmark or command or judge
        for benchmark, command, judge in NAMED.findall(text)
        if not ({benchmark, command} & BENCHMARKS or judge in JUDGES)
    ]


def unsaid(source: str) -> Iterator[str]:
    """The thresholds whose comment does not say what fixed them."""
    lines = source.split("\n")
    for struct in ast.walk(ast.parse(source)):
        if isinstance(struct, ast.ClassDef) and struct.name.endswith("Thresholds"):
            for field in struct.body:
                if isinstance(field, ast.AnnAssign):
                    first = field.lineno - 1
                    while lines[first - 1].lstrip().startswith("#:"):
                        first -= 1
                    comment = " ".join(line.strip().removeprefix("#: ") for line in lines[first : field.end_lineno])
                    if not FIXED_BY.search(comment):
                        yield f"{struct.name}.{ast.unparse(field.target)}"


def test_benchmarks_and_judges_that_are_named_exist() -> None:
    named = {path: names for path, text in texts() if (names := unknown(text))}
    assert named == {}


def test_each_threshold_says_what_fixed_it() -> None:
    named = {path: names for path, text in texts() if "Thresholds(Struct" in text and (names := list(unsaid(text)))}
    assert named == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Benchmark `causes`", []),
        ("Benchmark `one_gpu`. Judge `fleet`.", ["one_gpu", "fleet"]),
        ("`python -m benchmarks one-gpu FOLDER`; python -m benchmarks nothing", ["nothing"]),
        ("Judge `hangsim`, Judge `eventsim`", []),
    ],
)
def test_a_name_of_nothing_is_noticed(text: str, names: list[str]) -> None:
    assert unknown(text) == names


def test_a_threshold_without_its_reason_is_noticed() -> None:
    source = "class WaitThresholds:\n    #: Long. Chosen.\n    long: int = 1\n    #: Short ...\n    short: int = 2"
    assert list(unsaid(source)) == ["WaitThresholds.short"]
