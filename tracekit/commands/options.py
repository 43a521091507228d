"""Shared by several commands: options that name a job, values with a grammar of their own, completion, the console.

In: what the user typed. Out: jobs, numbers, names of jobs in a store, or a SelectionError that shows the expected
form. Selections have their own module, `analysis/whatif/selection_text.py`, because the dashboard reads them too.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from tracekit.base.arguments import OUT, PATH, PRICE, STORE_PATH
from tracekit.base.errors import ExitCode, FormatError, OutputError, SelectionError, StoreError
from tracekit.base.paths import Look, command, object_url, quoted, shown
from tracekit.base.stderr import hushed_panics, say
from tracekit.base.text import did_you_mean, listed, printable, short
from tracekit.sources.load import is_a, with_content
from tracekit.sources.source import Content

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import Console

    from tracekit.analysis.job.job import Job
    from tracekit.fleet.tasks import Executor
    from tracekit.report.conclusions import Accused, RunVerdict
    from tracekit.report.report import Report
    from tracekit.store import Store
    from tracekit.store.catalogue_rows import StoredWindow

_Made = TypeVar("_Made")

#: Most steps that an option names, and most digits of the number of one.
_MOST_STEPS, _MOST_DIGITS = 1_000_000, 9
#: Figures of a report that a condition may compare.
_FIGURES = ("slowdown", "waste", "replay_error", "discrepancy")
#: Most names to complete: more are no help on a terminal.
_MOST_NAMES = 200
#: As `tracekit.store.folder` names it, whose import takes longer than all of this.
_CATALOGUE = "catalog.duckdb"
_NEWEST_FIRST = "SELECT name FROM jobs WHERE starts_with(name, $typed) ORDER BY job_id DESC LIMIT $most"


#: Options of several commands.
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
FULL = click.option("--full", is_flag=True, help="Print every table, cause and fix, not only the answer.")
GPU_HOUR = click.option("--gpu-hour", type=PRICE, metavar="PRICE", help="State the cost in money, too.")
HTML = click.option("--html", type=OUT, metavar="FILE", help="Write one page that needs no network, with figures.")
#: Units of times in traces.
UNIT = click.Choice(["s", "ms", "us", "ns"])
#: Commands that take `--store` with `--job` instead of a trace.
_OF_ONE_JOB = ("culprits", "store export", "whatif")

#: Lines of code of incidents that a report lists.
_MOST_LINES = 3


#: Every command that reads a store has the same option for it.
STORE = click.option("--store", type=STORE_PATH, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")


def store_at(path: Path | None) -> Store:
    """The store at a path, by default the one that the environment names."""
    from tracekit.store import Store, default_store

    return Store(path or default_store())


class JobArguments(Struct, frozen=True):
    """The job that the options of a command name: `traces` with `layout` and `unit`, or a `job` in a `store`."""

    traces: tuple[Path, ...] = ()
    layout: Path | None = None
    unit: str | None = None
    store: Path | None = None
    job: str | None = None
    window: int | None = None

    @property
    def is_report(self) -> bool:
        """Whether the only path is a report, as `tracekit whatif --json` prints it."""
        return len(self.traces) == 1 and is_a(Content.REPORT, self.traces[0])

    def load(self, *, method: str = "tracekit", kernel_classes: Sequence[str] = ()) -> Job:
        """The job; if nothing is named, the newest in the default store, with a note that says so."""
        from tracekit.sources.load import load_from_store

        self._check()
        if self.traces:
            return read_job(
                *self.traces, layout=self.layout, unit=self.unit, method=method, kernel_classes=kernel_classes
            )
        loaded = load_from_store(self.job, store=self.store, window=self.window, method=method)
        if self.job is None:
            _say_newest(loaded.trace.name)
        return loaded

    def report(self) -> Report:
        """The report on the job: the one in a file of `whatif --json`, else the one that the analysis of its ops makes.

        Raises SelectionError for a layout or a unit, which belong to a trace, and whatever reading raises.
        """
        if not self.is_report:
            return self.load().report
        self._check()
        if self.layout is not None or self.unit is not None:
            raise SelectionError(f"--layout and --unit belong to a TRACE; {self.traces[0]} is a report: leave them out")
        from tracekit.report.report_file import read_report

        return read_report(self.traces[0])

    def accused(self) -> Accused:
        """The culprits of a run or, where its windows name nobody, of the report on the job or one window."""
        if not self.traces and self.window is None:
            from tracekit.bill.account import accused_of_run

            with suppress(StoreError):  # of a job that is not there, or damaged: the newest window says what is wrong
                if (accused := accused_of_run(*self.in_store())) is not None:
                    return accused
        return self.report().accused

    def run(self) -> RunVerdict | None:
        """The verdict of the run, of a job in a store; None and a line on stderr if what is stored of it is damaged."""
        if self.traces:
            return None
        from tracekit.bill.account import run_of_job

        try:
            return run_of_job(*self.in_store())
        except StoreError as error:
            say(f"tracekit: only the newest window can be judged: {error}")
            return None

    def with_run(self, report: Report, *, redact: bool = False) -> Report:
        """The report with the verdict of the run, if it is of a job in a store; with what other windows name, if it is
        of a named window. `redact`: without the names of hosts and jobs.
        """
        run = self.run()
        if run is None:
            return report
        if redact:
            causes = [replace(cause, hosts=(), do=None) for cause in run.causes]
            run = replace(run, notes=(), coverage_note=None, causes=causes)
        from tracekit.dashboards.words import elsewhere_words
        from tracekit.report.report import Remark

        codes = [] if redact else [Remark("Code", words) for words in self._code_lines()]
        if self.window is None:
            return replace(report, run=run, remarks=[*report.remarks, *codes])
        words = elsewhere_words(run, report)
        elsewhere = [] if words is None else [Remark("Run", words)]
        return replace(report, remarks=[*report.remarks, *codes, *elsewhere])

    def _code_lines(self) -> list[str]:
        """The lines of code of the incidents of the job, or of those that show in the window; the newest first."""
        store, name = self.in_store()
        incidents = [
            incident
            for incident in store.incidents(name)
            if self.window is None or incident.shows_in_window(self.window)
        ]
        return [words for incident in incidents if (words := incident.cause.code)][:_MOST_LINES]

    def of_file(self, use: Callable[[Path], _Made]) -> _Made | None:
        """What `use` makes of the Parquet file of the job, None if this is not a pipeline in one file."""
        self._check()
        if self.traces:
            from tracekit.sources.load import only_job, wrong_source

            path = only_job(self.traces[0])
            look = Look(path)
            if not look.exists and (missing := wrong_source(look, Content.TRACE)) is not None:
                raise missing
            with hushed_panics():
                source = with_content(Content.TRACE, look)
                return use(path) if len(self.traces) == 1 and source is not None and source.in_batches else None
        store, name = self.in_store()
        if self.job is None:
            _say_newest(name)
        if not self.stored_window().kind.in_batches:
            return None
        return store.of_ops(name, self.window, use)

    def stored_window(self) -> StoredWindow:
        """The window of the job in the store."""
        self._check()
        store, name = self.in_store()
        with store.reading() as catalogue:
            return catalogue.window(name, self.window)

    def in_store(self) -> tuple[Store, str]:
        """The store, and the name of the job in it."""
        store = store_at(self.store)
        return store, self.job or store.newest()

    def _check(self) -> None:
        """Raise SelectionError if the options contradict each other."""
        if self.traces and (self.store is not None or self.job is not None or self.window is not None):
            options = {"--store": self.store, "--job": self.job, "--window": self.window}
            given = listed([name for name, value in options.items() if value is not None], 3)
            raise SelectionError(f"a TRACE and {given}: give a TRACE, or what chooses a job of a store, not both")
        if not self.traces and self.layout is not None:
            raise SelectionError("--layout belongs to a TRACE; name the trace file too")
        if not self.traces and self.unit is not None:
            raise SelectionError("--unit belongs to a TRACE; a store holds seconds")

    @property
    def in_browser(self) -> Path | None:
        """What `tracekit open` shows of the job: its trace or its store; None for what that cannot open."""
        if len(self.traces) == 1 and self.layout is None and self.unit is None:
            return self.traces[0]
        return None if self.traces else store_at(self.store).path

    @property
    def arguments(self) -> str:
        """The arguments that name the same job on the command line."""
        options = {name: getattr(self, name) for name in ("layout", "unit", "store", "job", "window")}
        given = [(f"--{name}", value) for name, value in options.items() if value is not None]
        words = [word if isinstance(word, Path) else str(word) for option in given for word in option]
        return quoted(*self.traces, *words)


def read_job(*paths: Path, **stated: Any) -> Job:
    """The job at a path, or of several files, as `load_trace` reads it. Raises what that raises; for a store,
    FormatError with the options of the running command.
    """
    from tracekit.sources.load import load_trace

    try:
        with hushed_panics():
            return load_trace(*paths, **stated)
    except FormatError:
        # Storage that does not answer would hold the error up.
        if len(paths) > 1 or object_url(paths[0]) is not None or not is_a(Content.STORE, paths[0]):
            raise
        raise FormatError(f"{shown(paths[0])}: a store, not a trace; {_with_store(paths[0])}") from None


def _with_store(path: Path) -> str:
    """How the running command, or `whatif`, reads a store."""
    context = click.get_current_context(silent=True)
    name = "" if context is None else context.command_path.partition(" ")[2]
    if name == "compare":
        return f"name two of its jobs: `{command('compare', 'JOB', 'JOB', '--store', path)}`"
    words = name.split() if name in _OF_ONE_JOB else ["whatif"]
    return f"type `{command(*words, '--store', path)}`"


def _say_newest(name: str) -> None:
    click.echo(f"No job named: taking the newest one in the store, {short(name)}", err=True)


def trace_source(body: Callable[..., Any]) -> Any:
    """Give a command the `source` that an optional TRACE and the options of `job_source` name."""
    return click.argument("traces", metavar="[TRACE]", nargs=1, required=False, type=PATH)(job_source(body))


def job_source(body: Callable[..., Any]) -> Any:
    """Give a command with the argument `traces` the `source` that this and the options name."""

    @click.option("--layout", type=PATH, help="YAML file with the parallel sizes of a published trace.")
    @click.option("--unit", type=UNIT, help="Unit of the times in TRACE [default: s].")
    @STORE
    @click.option("--job", shell_complete=job_names, help="Job in the store [default: the newest].")
    @click.option(
        "--window", type=int, help="One window of a job of several [default: the run, and its newest window]."
    )
    @functools.wraps(body)
    def with_source(traces: Any, layout: Any, unit: Any, store: Any, job: Any, window: Any, **options: Any) -> Any:
        if not isinstance(traces, tuple):
            traces = () if traces is None else (traces,)
        return body(source=JobArguments(traces, layout, unit, store, job, window), **options)

    return with_source


def layout_sizes(body: Callable[..., Any]) -> Any:
    """Give a command the `layout` that its options state."""

    @functools.wraps(body)
    def with_layout(dp: int | None, pp: int | None, tp: int | None, **options: Any) -> Any:
        from tracekit.collectors.merge.placement import LayoutOptions

        return body(layout=LayoutOptions(dp=dp, pp=pp, tp=tp), **options)

    for size, title in (("tp", "Tensor"), ("pp", "Pipeline"), ("dp", "Data")):
        text = f"{title}-parallel size, if it cannot be found."
        with_layout = click.option(f"--{size}", type=click.IntRange(min=1), help=text)(with_layout)
    return with_layout


def made_folder(path: Path, instead: str = "another folder") -> Path:
    """The folder for a command's output. Raises OutputError, which says what to choose `instead`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be created: {error.strerror or error}; choose {instead}") from None
    return path


def executor_of(ray: bool, address: str | None, memory_bytes: int, processes: int | None = None) -> Executor:
    """What runs the analyses of a study or a large job: the Ray cluster at `address`, None for one on this machine, or
    processes that share so much memory, by default one a core.
    """
    cores = processes or len(os.sched_getaffinity(0))
    if ray:
        from tracekit.fleet.executors import RayExecutor

        return RayExecutor(address, cores)
    from tracekit.fleet.executors import LocalExecutor

    return LocalExecutor(cores, memory_bytes)


def console() -> Console:
    """A console for stdout: into a file or a pipe, it writes no blanks at the ends of lines."""
    from rich.console import Console

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            if self.is_terminal:
                super().print(*objects, **options)
            else:
                with self.capture() as captured:
                    super().print(*objects, **options)
                self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))

    return Terminal(highlight=False, markup=False, emoji=False, soft_wrap=False)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """`9,9,9,9` as layers per stage. Raises SelectionError for anything else."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise SelectionError(f"--layers {text!r:.200}; expected a number per stage, such as 9,9,9,9")
    return tuple(int(count) for count in text.split(","))


def parse_steps(text: str, option: str) -> list[int]:
    """`3,5,9-12`, the value of `option`, as step numbers. Raises SelectionError for anything else."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise SelectionError(f"{option} {text!r:.200}; expected numbers and ranges such as 12,40-45")
    if too_long := next((number for number in re.findall(r"\d+", text) if len(number) > _MOST_DIGITS), None):
        raise SelectionError(f"{option}: {too_long:.40} is no step number, which has at most {_MOST_DIGITS} digits")
    steps: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        count = int(last or first) - int(first) + 1
        if count < 1 or len(steps) + count > _MOST_STEPS:
            raise SelectionError(
                f"{option} {part!r}; expected a range from a smaller to a larger number, and at most {_MOST_STEPS}"
                " numbers in all"
            )
        steps.extend(range(int(first), int(last or first) + 1))
    return steps


def parse_share(text: str, option: str) -> float:
    """`3%` or `0.03`, the value of `option`, as 0.03. Raises SelectionError for anything else."""
    match = re.fullmatch(r"\s*([0-9]{0,6}\.?[0-9]{1,9})\s*(%?)\s*", text)
    if not match:
        raise SelectionError(f"{option} {text!r:.200}; expected a share such as 3% or 0.03")
    return float(match[1]) / (100 if match[2] else 1)


class Condition:
    """A condition such as `slowdown>1.1` or `python-gc>5%`, for --fail-on.

    Raises SelectionError if it cannot be understood.
    """

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"\s*([\w-]+)\s*(>=|<=|>|<)\s*([0-9]{0,15}\.?[0-9]{1,15})\s*(%?)\s*", text)
        if not match or (match[1] not in _FIGURES and match[1] not in _finding_kinds()):
            suggestion = did_you_mean(match[1], [*_FIGURES, *_finding_kinds()]) if match else ""
            raise SelectionError(
                f"--fail-on {text!r:.200}; expected slowdown, waste, replay_error, discrepancy or a kind of cause"
                f" compared with a number, such as 'slowdown>1.1' or 'python-gc>=5%'{suggestion}"
            )
        self.figure, self.comparison = match[1], match[2]
        self.bound = float(match[3]) / (100 if match[4] else 1)

    def judge(self, report: Report) -> ExitCode:
        """CONDITION if the figure satisfies the condition, DONE if not, and NO_ANSWER, with a reason on stderr, if the
        noise of the steps does not allow to tell. The figure of a cause is its share of the step.

        Raises SelectionError if the condition is about a cause whose detector failed.
        """
        if self.figure in ("slowdown", "waste"):
            from tracekit.analysis.attribution.gate import unclear_slowdown

            bound = self.bound if self.figure == "slowdown" else 1 / max(1 - self.bound, 1e-9)
            times = report.step_times()
            if words := unclear_slowdown(times.original, times.ideal, bound):
                say(f"tracekit: --fail-on {self.figure}: cannot tell: {words}")
                return ExitCode.NO_ANSWER
        return ExitCode.CONDITION if self._holds(report) else ExitCode.DONE

    def _holds(self, report: Report) -> bool:
        if self.figure in report.failed:
            raise SelectionError(f"--fail-on {self.figure}: cannot be judged, because its detector failed")
        figures = {
            "slowdown": report.slowdown,
            "waste": report.waste,
            "replay_error": report.trust.replay_error,
            "discrepancy": report.trust.discrepancy,
        }
        share = sum(account.share for account in report.answer.accounts if account.kind == self.figure)
        value = figures.get(self.figure, share)
        if value is None:
            return False
        return {
            ">": value > self.bound,
            ">=": value >= self.bound,
            "<": value < self.bound,
            "<=": value <= self.bound,
        }[self.comparison]


def _finding_kinds() -> Collection[str]:
    from tracekit.analysis.detectors.detector import kinds

    return kinds()


def job_names(context: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """The jobs that begin with what is `typed`, in the store that the command line names, else in the default one.

    The catalogue is read with DuckDB alone, which loads in half the time of what commands need.
    """
    from click.shell_completion import CompletionItem

    # Before an option without its value, click has parsed the options, but not the arguments: `hang STORE --job`.
    given = context.params.get("store") or next(filter(_is_store, _typed_words()), None)
    store = Path(given or os.environ.get("TRACEKIT_STORE") or "tracekit.store")
    # Unprintable names cannot be typed either.
    names = [name for name in _stored(store, typed) if name.strip() and name == printable(name)]
    return [CompletionItem(_shell_quoted(name)) for name in names]


def traces_or_job_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Jobs if a store is named, else files."""
    from click.shell_completion import CompletionItem

    if context.params.get("store") is None:
        return [CompletionItem(typed, type="file")]
    return job_names(context, parameter, typed)


def _typed_words() -> list[str]:
    """The command line so far."""
    from click.shell_completion import split_arg_string

    return split_arg_string(os.environ.get("COMP_WORDS", ""))


def _is_store(path: str | Path) -> bool:
    return (Path(path) / _CATALOGUE).is_file()


def _stored(store: Path, typed: str) -> list[str]:
    """The newest jobs of a store in a folder; empty for anything else."""
    if not _is_store(store):
        return []
    import duckdb

    try:
        with duckdb.connect(str(store / _CATALOGUE), read_only=True) as connection:
            rows = connection.execute(_NEWEST_FIRST, {"typed": typed, "most": _MOST_NAMES}).fetchall()
    except (duckdb.Error, OSError):  # damaged, or of another version: the command itself reports it
        return []
    return [name for (name,) in rows]


def _shell_quoted(name: str) -> str:
    """The name quoted for the shell: bash inserts words as they are, zsh and fish quote them."""
    return shlex.quote(name) if os.environ.get("_TRACEKIT_COMPLETE", "").startswith("bash") else name
