"""`tracekit culprits`: the nodes that hold a job up, for scripts.

In: a trace, a folder of torch.profiler or a job in a store. Out: only a Slurm hostlist, JSON or a table on stdout;
doubts go to stderr and into the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import click
import msgspec
from msgspec import Struct

from tracekit.base.errors import SelectionError, StoreError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.hostlist import hostlist, is_node_name
from tracekit.base.stderr import progress, say
from tracekit.base.text import did_you_mean, listed, printable, short
from tracekit.commands.options import JobArguments, console, store_at, trace_source
from tracekit.report.answer import Culprit
from tracekit.report.nodes import Accused, Nodes, nodes_of

#: The number of unknown nodes to list on stderr.
_MOST_LISTED = 8


class CulpritsOutput(Struct, frozen=True):
    """What `tracekit culprits --format json` prints."""

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
        accused = _accused(source)
    trusted = accused.trustworthy
    culprits = [culprit for culprit in accused.culprits if not part or culprit.part in part]
    nodes = nodes_of(culprits, trusted=trusted)
    named = nodes.drain + (nodes.suspects if suspects and trusted else ())
    nameless = [
        f"worker ({culprit.dp_rank},{culprit.pp_rank})" if culprit.rank is None else f"rank {culprit.rank}"
        for culprit in culprits
        if culprit.host is None or not is_node_name(culprit.host)
    ]
    if form == "json":
        output = CulpritsOutput(accused.job, trusted, accused.trust, named, hostlist(named), nodes.suspects, culprits)
        click.echo(msgspec.json.encode(output))
    elif form == "text" and culprits:
        from tracekit.dashboards.terminal.culprits import print_culprits

        print_culprits(culprits, console())
    elif form == "slurm" and named:
        click.echo(hostlist(named))
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
    elif form == "slurm" and len(named) < len(nodes.drain + nodes.suspects):
        doubt = f"{Nodes((), nodes.suspects).sentence} Check first; --suspects prints them all the same"
    if form != "json" and doubt is not None:
        say(f"tracekit: {short(accused.job)}: {doubt}")
    if not culprits or not trusted:
        return ExitCode.NO_ANSWER
    if nameless:
        return ExitCode.UNKNOWN_NODE
    return ExitCode.DONE if named or form == "text" else ExitCode.NO_ANSWER


def _accused(source: JobArguments) -> Accused:
    """The culprits of a run or, where its windows name nobody, of a trace or one window."""
    if not source.traces and source.window is None:
        from tracekit.bill.run_account import accused_of_run

        with suppress(StoreError):  # of a job that is not there, or damaged: the newest window says what is wrong
            if (accused := accused_of_run(*source.in_store())) is not None:
                return accused
    report = source.load().whatif()
    return Accused(report.name, report.trust.trustworthy, report.answer.trust, report.answer.culprits)


def _history(source: JobArguments, form: str, part: Sequence[str]) -> ExitCode:
    """Name the nodes that compute slower than they used to: no evidence against hardware, so none for Slurm."""
    from tracekit.analysis.job.history import history_of
    from tracekit.dashboards.terminal.culprits import print_history

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
    from tracekit.analysis.detectors.all_detectors import parts as parts_of_ranks

    expected = parts_of_ranks()
    if unknown := [name for name in parts if name not in expected]:
        meant = did_you_mean(unknown[0], expected)
        raise SelectionError(f"--part {unknown[0]!r:.100}; expected one of {', '.join(expected)}{meant}")
