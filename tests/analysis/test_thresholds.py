"""Each threshold says what fixed it, and a benchmark that a comment or a document names can be run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import ALWAYS_WITH_OPTIONS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("analysis", "benchmarks", "collectors", "dashboards", "docs", "judges", "tests", "tracekit")
BENCHMARKS = {*SECTIONS, *ALWAYS_WITH_OPTIONS}
#: What can fix a threshold; "Chosen": nobody measured it.
FIXED_BY = re.compile(r"Benchmark `|Simulated fleets|(?:Statistic|Definition|Chosen)\b")
#: Folders of `analysis/` whose numbers decide what is found. In the first two, thresholds stand in structs.
DECIDING = ("detectors", "evidence", "attribution", "diagnosis", "gpu", "metrics", "rl")
#: Numbers there that decide nothing: how much is looked at or named, codes, rounding, statistics of normal values.
NO_THRESHOLDS = {
    "attribute": {"COSTLIEST_BY_DP_RANK", "_LENGTHS_AT_ONCE"},
    "attribution": {"_MOST_WORKERS", "_NUMBERS_AT_ONCE"},
    "by_label": {"COSTLIEST_OP_REPLAYS"},
    "compute_profile": {"FORWARD", "BACKWARD"},
    "computes": {"LARGEST_SAMPLE"},
    "critical_path": {"_STEPS_AT_ONCE", "_OPS_AT_ONCE"},
    "detector": {"_MOST_HOSTS"},
    "effects": {"_OUTER_QUARTERS"},
    "gate": {"GATE_VERSION", "_MOST_NAMED"},
    "gpu_host": {"_MOST_TOLD", "_MOST_LAUNCHERS", "_MOST_REASONS"},
    "gpu_time": {"MOST_OF_A_KIND", "MOST_NAMES", "_MOST_WARMED_UP"},
    "guided": {"_OF_95", "_PARTS_OF_HOURS", "_POINTS", "_MARGIN", "_LOW", "_HIGH"},
    "latency": {"_ENOUGH", "_ROUNDS", "_ROUNDS_OF_TOOLS", "NO_LIMIT"},
    "matching": {"UNMATCHED", "_AGREED_S", "_ROUNDS"},
    "measured_steps": {"_ROUNDING_S"},
    "of_graph": {"_MOST_GAPS"},
    "off_cpu": {"_MOST_SEQ"},
    "one_offs": {"MOST_TIMES"},
    "op_trace": {"_SHORTEST_S"},
    "pace": {"_PARTS", "_MOST_RANKS", "_AT_ONCE"},
    "patterns": {"_SPARSEST", "_ROUNDING"},
    "pauses": {"GC_INTERVALS", "MOST_SPANS"},
    "pipeline_experts": {"_MOST_OPS"},
    "price": {"LONGEST_COMBINATION"},
    "recorded": {"MOST_RANKS"},
    "rl_run": {"_MOST_STEPS", "_MOST_GPUS"},
    "samples": {"_MOST_LISTED"},
    "significance": {"HALF_WIDTH", "HALF_WIDTH_LOST", "THIRD_WIDTH", "THIRD_WIDTH_LOST"},
    "slow_computes": {"_ALIKE"},
    "slow_kernels": {"_OF_IMAGES", "_MOST_NAMES"},
    "slow_workers": {"HIGHEST_MHZ", "SMALLEST_NATS"},
    "subject": {"_MOST_NAMED"},
    "testimony": {"_EARLIEST_S", "_MOST_HOSTS", "_MOST_SENTENCES"},
    "times": {"MOST_ROWS", "MOST_NAMES", "MOST_SHAPES", "ROUNDING_S"},
    "transfers": {"NO_TIME_S"},
}
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


def is_number(value: ast.expr) -> bool:
    """Whether an expression is a number, or numbers."""
    if isinstance(value, ast.Constant):
        return type(value.value) in {int, float}
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Tuple) and any(map(is_number, value.elts))


def comment_on(lines: Sequence[str], row: int) -> str:
    """The comment directly above the line `row`, counted from 1, and what that line says."""
    first = row - 1
    while lines[first - 1].lstrip().startswith("#:"):
        first -= 1
    return " ".join(line.strip().removeprefix("#: ") for line in lines[first:row])


def bare(source: str, *, may_say: bool) -> Iterator[str]:
    """Numbers outside the structs of a module, but for those, if they `may_say`, that say what fixed them."""
    lines = source.split("\n")
    for line in ast.parse(source).body:
        if not isinstance(line, ast.Assign) or not is_number(line.value):
            continue
        if not may_say or not FIXED_BY.search(comment_on(lines, line.lineno)):
            yield from (name.id for target in line.targets for name in ast.walk(target) if isinstance(name, ast.Name))


def unsaid(source: str) -> Iterator[str]:
    """The thresholds whose comment does not say what fixed them."""
    lines = source.split("\n")
    for struct in ast.walk(ast.parse(source)):
        if isinstance(struct, ast.ClassDef) and struct.name.endswith("Thresholds"):
            for field in struct.body:
                if isinstance(field, ast.AnnAssign) and not FIXED_BY.search(comment_on(lines, field.lineno)):
                    yield f"{struct.name}.{ast.unparse(field.target)}"


def test_benchmarks_and_judges_that_are_named_exist() -> None:
    named = {path: names for path, text in texts() if (names := unknown(text))}
    assert named == {}


def test_each_threshold_says_what_fixed_it() -> None:
    named = {path: names for path, text in texts() if "Thresholds(Struct" in text and (names := list(unsaid(text)))}
    assert named == {}


def test_what_decides_stands_in_a_struct_or_says_what_fixed_it() -> None:
    numbers: dict[str, set[str]] = {}
    for folder in DECIDING:
        for path in sorted((ROOT / "analysis" / folder).glob("*.py")):
            numbers.setdefault(path.stem, set()).update(bare(path.read_text(), may_say=folder not in DECIDING[:2]))
    assert {module: names for module, names in numbers.items() if names} == NO_THRESHOLDS


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


def test_a_bare_threshold_is_noticed() -> None:
    source = "#: Long. Chosen.\nLONG = 3.0\n#: Short ...\nSHORT, SHORTER = -1, 1 << 4\nSHARES = (2.5,)\nNAME = 'x'"
    assert list(bare(source, may_say=True)) == ["SHORT", "SHORTER", "SHARES"]
    assert list(bare(source, may_say=False)) == ["LONG", "SHORT", "SHORTER", "SHARES"]
