"""Commands whose answers scripts read: `tracekit culprits`, `gate`, `compare` and `bill`.

In: traces, reports, jobs in a store, run directories. Out: lists of nodes, verdicts, changes and hours in the terminal,
as JSON or in files; doubts go to stderr and into the exit code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from tracekit.base.arguments import OUT, PATH, STORE_PATH
from tracekit.base.errors import ExitCode, SelectionError
from tracekit.base.paths import command
from tracekit.base.stderr import progress, say
from tracekit.base.text import did_you_mean, listed, printable, short
from tracekit.commands.options import (
    AS_JSON,
    GPU_HOUR,
    UNIT,
    JobArguments,
    console,
    job_source,
    parse_share,
    parse_steps,
    read_job,
    store_at,
    trace_source,
    traces_or_job_names,
)
from tracekit.report.conclusions import Culprit, Nodes, hostlist, is_node_name, nodes_of
from tracekit.sources.load import is_a
from tracekit.sources.source import Content

#: The number of unknown nodes to list on stderr.
_MOST_LISTED = 8
#: As `tracekit.bill.ledger.GROUPS`; that module imports polars.
_GROUPS = ("part", "cause", "week", "team", "job")


class CulpritsOutput(Struct, frozen=True):
    """The output of `tracekit culprits --format json`."""

    job: str
    trustworthy: bool
    trust: str
    nodes: Sequence[str]
    hostlist: str
    suspects: Sequence[str]
    culprits: Sequence[Culprit]


@click.command("culprits")
@trace_source
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "slurm", "json"]),
    default="text",
    show_default=True,
    help="slurm: a hostlist such as node-[1,3-4], and nothing else.",
)
@click.option(
    "--part",
    multiple=True,
    metavar="PART",
    help="Only culprits that are slow in this part, such as compute. Repeatable.",
)
@click.option("--suspects", is_flag=True, help="Print nodes without hardware evidence against them, too.")
@click.option("--history", is_flag=True, help="Nodes of a job in a store that compute slower than they used to.")
def culprits_command(
    source: JobArguments,
    form: str,
    part: tuple[str, ...],
    suspects: bool,
    history: bool,
) -> int:
    """Which nodes hold the job up? Names that a script can use.

    TRACE is anything that `tracekit whatif` reads, also a report that its --json printed.

    A script gets a node only if the recording shows its hardware at fault, such as a throttled GPU, or with --suspects:
    user code, input or a neighbour slow a rank down just as well.

    A PART is what is slow about a rank: compute, workload, optimizer, data-loading, host, python-gc, process,
    checkpoint, network or unrecorded. Of these, compute, process and network point at a machine.

    With --history, each node is compared with itself in earlier windows of the store, of jobs that gave it the same
    work: a node that became slower is named even if all its peers did, too. No hardware evidence, so only a suspect.

    Exit codes: 0 all culprits have a node, 5 no rank is to blame, the report cannot be trusted, or a script gets no
    node (slurm: no output), 6 the node of a culprit is unknown (slurm: the others).
    """
    _check_parts(part)
    if history:
        return _history(source, form, part)
    with progress("reading the trace"):
        accused = source.accused()
    trusted = accused.trustworthy
    culprits = [culprit for culprit in accused.culprits if not part or culprit.part in part]
    nodes = nodes_of(culprits, trusted=trusted)
    drain = nodes.drain + (nodes.suspects if suspects and trusted else ())
    nameless = [
        f"worker ({culprit.dp_rank},{culprit.pp_rank})" if culprit.rank is None else f"rank {culprit.rank}"
        for culprit in culprits
        if culprit.host is None or not is_node_name(culprit.host)
    ]
    if form == "json":
        output = CulpritsOutput(accused.job, trusted, accused.trust, drain, hostlist(drain), nodes.suspects, culprits)
        click.echo(msgspec.json.encode(output))
    elif form == "text" and culprits:
        from tracekit.dashboards.terminal.details import print_culprits

        print_culprits(culprits, console())
    elif form == "slurm" and drain:
        click.echo(hostlist(drain))
    doubt = None
    if not trusted:
        doubt = f"the report cannot be trusted, so no node is named for a script: {printable(accused.trust)}"
    elif not culprits:
        doubt = f"no rank is to blame; `{f'tracekit whatif {source.arguments}'.rstrip()}` says where the time goes"
    elif nameless:
        doubt = (
            f"the node of {listed(nameless, _MOST_LISTED)} is unknown: the trace's metadata has"
            " no `hosts` for it, or a name that no node can have"
        )
    elif form == "slurm" and len(drain) < len(nodes.drain + nodes.suspects):
        doubt = f"{Nodes((), nodes.suspects).sentence} Check first; --suspects prints them all the same"
    if form != "json" and doubt is not None:
        say(f"tracekit: {short(accused.job)}: {doubt}")
    if not culprits or not trusted:
        return ExitCode.NO_ANSWER
    if nameless:
        return ExitCode.UNKNOWN_NODE
    return ExitCode.DONE if drain or form == "text" else ExitCode.NO_ANSWER


def _history(source: JobArguments, form: str, part: Sequence[str]) -> ExitCode:
    """Name the nodes that compute slower than they used to: no evidence against hardware, so none for Slurm."""
    from tracekit.analysis.job.history import history_of
    from tracekit.dashboards.terminal.details import print_history

    if source.traces or part or form == "slurm":
        raise SelectionError(
            "--history is for the computes of a job in a store, and shows suspects only: give --store and --job, leave"
            " out --part and --format slurm"
        )
    with progress("reading the history"):
        history = history_of(store_at(source.store), source.job, source.window)
    if form == "json":
        click.echo(msgspec.json.encode(history))
    else:
        print_history(history, console())
    return ExitCode.DONE if history.slower else ExitCode.NO_ANSWER


def _check_parts(parts: Sequence[str]) -> None:
    from tracekit.analysis.detectors.detector import parts as parts_of_ranks

    expected = parts_of_ranks()
    if unknown := [name for name in parts if name not in expected]:
        suggestion = did_you_mean(unknown[0], expected)
        raise SelectionError(f"--part {unknown[0]!r:.100}; expected one of {', '.join(expected)}{suggestion}")


@click.command("gate")
@click.argument("traces", metavar="[RUN]...", nargs=-1, type=PATH)
@job_source
@click.option(
    "--baseline",
    "baselines",
    required=True,
    multiple=True,
    metavar="FILE|STORE:JOB",
    help="What the run must not be slower than. Repeat it: several show how far identical runs differ.",
)
@click.option(
    "--max-regression", default="3%", show_default=True, metavar="SHARE", help="The largest increase to pass."
)
@click.option("--noise", metavar="SHARE", help="How far identical runs differ, instead of what the baselines show.")
@click.option("--part", "parts", multiple=True, metavar="NAME", help="Judge only this: step, a kind, phase or kernel.")
@click.option("--ignore-steps", metavar="STEPS", help="Leave these steps out of all runs, such as 0-2.")
@AS_JSON
@click.option("--junit", type=OUT, metavar="FILE", help="Write the verdict as JUnit XML.")
@click.option("--markdown", type=OUT, metavar="FILE", help="Write the verdict as Markdown.")
def gate_command(
    source: JobArguments,
    baselines: tuple[str, ...],
    max_regression: str,
    noise: str | None,
    parts: tuple[str, ...],
    ignore_steps: str | None,
    as_json: bool,
    junit: Path | None,
    markdown: Path | None,
) -> ExitCode:
    """Has RUN become slower than a baseline, by more than a limit and beyond the noise?

    Judges the step and its parts: kinds of ops, phases and kernels, on the mean rank. Exits with 0 if all of them pass,
    3 if one is a regression, 5 if noise hides the answer, as with a single baseline.
    """
    from tracekit.analysis.attribution.gate import Outcome
    from tracekit.analysis.job.gate_jobs import gate
    from tracekit.base.atomic_write import check_writable
    from tracekit.dashboards.documents.markdown import (
        GATE_JUNIT,
        GATE_MARKDOWN,
        write_gate_junit,
        write_gate_markdown,
    )

    limit = parse_share(max_regression, "--max-regression")
    noise_share = None if noise is None else parse_share(noise, "--noise")
    if noise_share is not None and noise_share >= 1:
        raise SelectionError(f"--noise {noise!r:.200}; expected less than 100%, such as 2% or 0.02")
    ignored = [] if ignore_steps is None else parse_steps(ignore_steps, "--ignore-steps")
    if len({os.path.realpath(text) for text in baselines}) < len(baselines):
        raise click.BadParameter("the same one twice does not show how far runs differ", param_hint="--baseline")
    for path, kind in ((junit, GATE_JUNIT), (markdown, GATE_MARKDOWN)):
        if path is not None:
            check_writable(path, kind)
    with progress("reading the run") as show_stage:
        run = source.load()
        before = []
        for baseline in baselines:
            show_stage(f"reading {short(baseline)}")
            before.append(_baseline_arguments(baseline, source).load())
        verdict = gate(run, before, limit, parts=parts, noise=noise_share, ignored=ignored)
    if junit is not None:
        write_gate_junit(junit, verdict)
    if markdown is not None:
        write_gate_markdown(markdown, verdict)
    if as_json:
        click.echo(msgspec.json.encode(verdict))
    else:
        from tracekit.dashboards.terminal.verdicts import print_gate

        print_gate(verdict, console(), source.arguments)
    codes = {Outcome.PASSED: ExitCode.DONE, Outcome.REGRESSION: ExitCode.CONDITION}
    return codes.get(verdict.outcome, ExitCode.NO_ANSWER)


def _baseline_arguments(baseline: str, run: JobArguments) -> JobArguments:
    """The arguments of a baseline: an existing path, else JOB of a store in STORE:JOB."""
    colons = [position for position, char in enumerate(baseline) if char == ":"] if not Path(baseline).exists() else []
    for colon in colons:
        if is_a(Content.STORE, Path(baseline[:colon])):
            return JobArguments(store=Path(baseline[:colon]), job=baseline[colon + 1 :])
    return JobArguments((Path(baseline),), run.layout, run.unit)


@click.command("compare")
@click.argument("before", metavar="A", shell_complete=traces_or_job_names)
@click.argument("after", metavar="B", shell_complete=traces_or_job_names)
@click.option("--layout", type=PATH, help="YAML file with the parallel sizes of published traces.")
@click.option("--unit", type=UNIT, help="Unit of the times in both traces [default: s].")
@click.option("--store", type=STORE_PATH, help="A and B are jobs in this store: their newest windows.")
@click.option("--fix", metavar="NAME", help="The fix of A that B has, by its kind or title: keep what it gave back.")
@AS_JSON
def compare_command(
    before: str, after: str, layout: Path | None, unit: str | None, store: Path | None, fix: str | None, as_json: bool
) -> None:
    """Compare run A with run B: faster or slower, by how much, how certain, and which causes came and went.

    A and B are traces, reports that `whatif --json` printed or, with --store, names of jobs. With --fix, the store
    keeps what the fix was expected to save and what it saved, for the dashboard and `fleet report`.
    """
    from tracekit.report.comparison import ComparedOutput, compare_runs, fix_applied

    if fix is not None and before == after:
        raise SelectionError("--fix: A and B are the same job; B is the one that has the fix")
    if fix is not None and store is None:
        raise SelectionError("--fix: a store keeps the result; give --store, and A and B as names of its jobs")
    sources = [
        JobArguments((Path(name),), layout, unit) if store is None else JobArguments(store=store, job=name)
        for name in (before, after)
    ]
    if not all(source.is_report for source in sources):  # one may be a report, to which --layout and --unit say nothing
        sources = [JobArguments(source.traces) if source.is_report else source for source in sources]
    with progress() as show_stage:
        reports = []
        for name, source in zip((before, after), sources, strict=True):
            show_stage(f"analysing {short(name)}")
            reports.append(source.report())
    comparison = compare_runs((reports[0], reports[1]))
    applied = None
    if fix is not None and store is not None:
        from tracekit.store import Store
        from tracekit.store.incidents import current_user

        jobs = Store(store)
        expected = jobs.report(before)
        promised = reports[0] if expected is None else expected
        applied = fix_applied((reports[0], reports[1]), promised.fixes, fix, time.time(), current_user())
        jobs.note_applied(applied)
    if as_json:
        click.echo(msgspec.json.encode(ComparedOutput(**msgspec.structs.asdict(comparison.output), fix=applied)))
        return
    from tracekit.dashboards.terminal.verdicts import print_comparison

    print_comparison(comparison, console(), commands=[f"tracekit whatif {sources[1].arguments}"], fix=applied)


@click.command("bill")
@click.argument("source", metavar="DIR|STORE|TRACE", type=STORE_PATH)
@click.option("--by", type=click.Choice(_GROUPS), default="part", show_default=True, help="What to total.")
@GPU_HOUR
@AS_JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print every row as CSV.")
def bill_command(source: Path, by: str, gpu_hour: float | None, as_json: bool, as_csv: bool) -> None:
    """What the hours of a run went to: useful steps, stragglers, input, checkpoints, restarts and lost work, ...

    DIR is what `tracekit collect --segments DIR` leaves of a command, with all its attempts; STORE is a store of jobs
    and of windows of running jobs; TRACE is anything that `tracekit whatif` reads. The rows add up to the wall clock;
    what no recording shows is a row, too.
    """
    from tracekit.bill.account import bill_of_job, bill_of_store
    from tracekit.bill.bill_of_run import bill_of_run
    from tracekit.collectors.run_directory.segments import is_run_directory
    from tracekit.dashboards.terminal.verdicts import print_bill
    from tracekit.report.tables import safe_csv
    from tracekit.store import Store

    if as_json and as_csv:
        raise SelectionError("one of --json and --csv at a time")
    with progress("reading the recording"):
        more = command("whatif", source)
        if is_a(Content.STORE, source):
            bill = bill_of_store(Store(source))
            lost = {job: (run.gpu_hours_lost or 0.0, run.lost_s) for job, run in bill.runs.items()}
            more = command("whatif", "--store", source, "--job", max(lost, key=lambda job: lost[job], default="JOB"))
        else:
            bill = bill_of_run(source) if is_run_directory(source) else bill_of_job(read_job(source))
    if as_json:
        click.echo(msgspec.json.encode(bill.output(gpu_hour)))
    elif as_csv:
        priced = bill.rows if gpu_hour is None else bill.rows.with_columns(cost=bill.rows["gpu_hours"] * gpu_hour)
        click.echo(safe_csv(priced), nl=False)
    else:
        print_bill(bill, console(), by, gpu_hour, more)
