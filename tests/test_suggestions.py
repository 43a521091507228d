"""Every command that a command suggests does as printed, also where names have spaces and quotes."""

from __future__ import annotations

import contextlib
import html
import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import duckdb
import pytest

from tests.cases import case
from tests.dashboards.page_text import Pages
from tests.handmade import run, slow_trace
from tests.test_first_minutes import DUMP
from tracekit.base.errors import ExitCode
from tracekit.cli import commands
from tracekit.collectors.launch.collect import CollectedAttempt, CollectSummary
from tracekit.collectors.launch.command import summary_lines
from tracekit.report.findings import Unanalysed
from tracekit.store import Incoming, Store

SAMPLES = Path(__file__).parents[1] / "sample_traces"
#: What only the user knows: such a command is parsed, and not run.
PLACEHOLDERS = {"COMMAND", "FILE", "FOLDER", "JOB", "SOURCES", "STORE", "STUDY", "TRACE", "TRACES", "SIZES"}
#: Commands that train, serve or wait.
LASTING = {"attach", "collect", "dashboard", "open", "watch"}
#: Exit codes that say something of the job and not of the command line.
FINE = {ExitCode.DONE, ExitCode.CONDITION, ExitCode.NO_ANSWER, ExitCode.UNKNOWN_NODE}
TRACE, STORE, STUDY, JOB = "it's a trace.parquet", "my jobs.store", "my study", "it's slow"

#: What a user types in a folder that has all of this.
TYPED = [
    ("whatif", TRACE),
    ("whatif", TRACE, "--markdown", "report.md"),
    ("whatif", "in ms.parquet", "--unit", "ms"),
    ("whatif", "--store", STORE, "--job", JOB),
    ("whatif", "--store", STORE, "--job", JOB, "--window", "0", "--markdown", "stored.md"),
    ("whatif", "my gpus"),
    ("whatif", "my gpus", "--markdown", "gpus.md"),
    ("culprits", TRACE),
    ("culprits", "healthy one.parquet"),
    ("culprits", "--store", STORE),
    ("compare", TRACE, "healthy one.parquet"),
    ("compare", JOB, "unanalysed", "--store", STORE),
    ("store", "list", "--store", STORE),
    ("store", "list", "--store", "empty one.store"),
    ("whatif", "--store", "empty one.store"),
    ("whatif", "--store", "no such.store"),
    ("import", TRACE, "--store", "another one.store"),
    ("hang", "my dumps"),
    ("hang", STORE),
    ("synth", "--dp", "2", "--pp", "2", "--steps", "3", "--out", "made up.parquet"),
    ("synth", "--jobs", "2", "--dp", "2", "--pp", "2", "--steps", "3", "--out", "a fleet"),
    ("fleet", "run", TRACE, "--out", "a new study", "--processes", "1"),
    ("fleet", "report", STUDY),
    ("fleet", "report", "no such study"),
    ("fleet", "report", STORE),
    ("fleet", "report", TRACE),
    ("store", "check", "--store", "damaged one.store"),
    ("whatif", "--store", "damaged one.store"),
    ("whatif", "--store", "without catalogue.store"),
    ("store", "prune", "--store", "old one.duckdb", "--older-than", "1d"),
    ("dashboard", TRACE, STORE),
    ("store", "top", "--once", "--store", TRACE),
    *(
        (*command, thing)
        for command in (
            ["whatif"], ["import"], ["store", "list"], ["store", "export"], ["culprits"], ["compare"], ["hang"],
        )
        for thing in (
            STORE, STUDY, "my dumps", "my dumps/nccl_trace_rank_0", "my traces", "train it.py", "sizes of it.yaml",
            "report of it.json", "notes of it.txt", "empty folder", "table of it.parquet",
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a thing of each kind, which is the working directory."""
    path = tmp_path_factory.mktemp("a folder")
    with contextlib.chdir(path):
        slow_trace((0, 1), name=JOB).write_parquet(TRACE)
        slow_trace((0, 1), name="in ms").write_parquet("in ms.parquet")
        shutil.copy(SAMPLES / "healthy.parquet", "healthy one.parquet")
        shutil.copytree(SAMPLES / "gpu_slow_input", "my gpus")
        made = (
            ("import", TRACE, "--store", STORE),
            ("import", TRACE, "--store", "damaged one.store"),
            ("import", TRACE, "--store", "without catalogue.store"),
            ("fleet", "run", TRACE, "--out", STUDY, "--processes", "1"),
            ("whatif", TRACE, "--parquet", "table of it.parquet"),
        )
        for command in made:
            assert run(*command).code == 0
        trace = slow_trace((0,), name="unanalysed")
        Store(Path(STORE)).add([Incoming(trace, "unanalysed", "x", Unanalysed("for a test"))])
        Store(Path("empty one.store")).add([])
        Path("damaged one.store/jobs/1/0.parquet").write_bytes(b"")
        Path("without catalogue.store/catalog.duckdb").unlink()
        duckdb.connect("old one.duckdb").close()
        Path("my dumps").mkdir()
        Path("my dumps/nccl_trace_rank_0").write_bytes(pickle.dumps(DUMP))
        Path("my traces").mkdir()
        shutil.copy(TRACE, "my traces")
        Path("train it.py").write_text("import torch\n")
        Path("sizes of it.yaml").write_text("dp: 2\n")
        Path("report of it.json").write_text(run("whatif", TRACE, "--json").out)
        Path("notes of it.txt").write_text("hello\n")
        Path("empty folder").mkdir()
        yield path


def suggested(text: str) -> list[str]:
    """The commands in what a command says, in backquotes or at the end of a line. Not what wrote a file."""
    plain = html.unescape(text)
    quoted = re.findall(r"(?<!of )(?<!that )`(tracekit [^`]+)`", re.sub(r"\n(?=[^\n]*`)", " ", plain))
    next_lines = re.findall(r"(?m)(?:^|^Next +|[Nn]ext: |^ +)(tracekit [a-z].*?)(?:  # .*)?$", plain)
    return [*quoted, *next_lines]


def check(suggestion: str) -> None:
    """Run it, or parse it where it cannot be run here."""
    words = shlex.split(suggestion)[1:]
    if words[0] in LASTING or len(words) == 1 or PLACEHOLDERS & set(words):
        parse(words)
        return
    ran = run(*words)
    assert ran.code in FINE, (suggestion, ran)


def parse(words: list[str]) -> None:
    """Raise click.UsageError for what the command does not know."""
    command: click.Command = commands
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    if words:
        command.make_context("x", list(words), resilient_parsing=False).close()


@pytest.mark.slow
def test_what_a_command_suggests_works_as_printed(folder: Path) -> None:
    """Each once, where it is suggested first."""
    checked: set[str] = set()
    for typed in TYPED:
        before = set(folder.iterdir())
        ran = run(*typed)
        written = [path.read_text() for path in set(folder.iterdir()) - before if path.suffix == ".md"]
        found = {suggestion for text in (ran.out, ran.err, *written) for suggestion in suggested(text)}
        for suggestion in sorted(found - checked):
            with case((typed, suggestion)):
                check(suggestion)
        checked |= found
    assert len(checked) > 30


@pytest.mark.slow
def test_the_test_finds_suggestions_in_each_form(folder: Path) -> None:
    shown = run("whatif", TRACE).out
    assert suggested(shown) == [
        f"tracekit store export {shlex.quote(TRACE)} --steps 0 --out timeline.json.gz",
        f"tracekit whatif {shlex.quote(TRACE)} --full",
        f"tracekit open {shlex.quote(TRACE)}",
    ]
    assert suggested(run("import", TRACE, "--store", "forms.store").out) == [
        f"tracekit whatif --store forms.store --job {shlex.quote(JOB)}"
    ]


@pytest.mark.slow
def test_what_collect_suggests_works_as_printed(folder: Path) -> None:
    """As its summaries say after runs of each kind."""
    where = {"out": None, "store": None}
    attempts = [
        attempt(**where | {"out": TRACE}),
        attempt(**where | {"store": STORE}),
    ]
    summaries = [CollectSummary(0, 1.0, (one,), None, False, None) for one in attempts]
    summaries.append(CollectSummary(0, 1.0, (), "my traces", False, "x", live=JOB, store=STORE))
    for summary in summaries:
        said = "\n".join(summary_lines(summary))
        assert suggested(said)
        for suggestion in suggested(said):
            if not suggestion.startswith("tracekit import"):  # of segments, which these are not
                check(suggestion)


def attempt(**fields: str | None) -> CollectedAttempt:
    """An attempt that was recorded and kept there."""
    layout = dict.fromkeys(("dp", "pp", "tp", "cp"), 1)
    return CollectedAttempt(0, JOB, 1, 2, 48, layout, "x", (), (), **fields, cost=None, problem=None)


@pytest.mark.slow
def test_what_pages_suggest_works_as_printed(folder: Path) -> None:
    pages = Pages(Path(STORE))
    empty = Pages(Path("empty one.store"))
    said = [
        *(pages.text(page) for page in ("/", "/hosts", "/incidents", "/fleet")),
        *(pages.text(page, job=job) for page in ("/job", "/hang", "/whatif") for job in (JOB, "unanalysed")),
        *(empty.text(page) for page in ("/", "/hang", "/job")),
    ]
    found = [suggestion for text in said for suggestion in suggested(text)]
    assert len(set(found)) > 3
    for suggestion in set(found):
        check(suggestion)
