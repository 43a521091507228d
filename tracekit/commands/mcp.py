"""`tracekit mcp`: the questions that tracekit answers, as tools of an agent (Model Context Protocol).

In: requests on stdin. Out: answers on stdout, as data of the reports. Every tool only reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins
from msgspec.structs import asdict

from tracekit import __version__
from tracekit.analysis.job.job import Job
from tracekit.base.errors import TracekitError, extra
from tracekit.store import Store

Tool = Callable[..., dict[str, Any]]
#: The parts of a report that answer "why", as docs/report-schema.md describes them.
_WHY = ("job", "answer", "verdict", "trust", "causes", "fixes")


@click.command("mcp")
@click.option("--skill", is_flag=True, help="Print SKILL.md, which tells an agent when and how to ask, and leave.")
def mcp_command(skill: bool) -> None:
    """Answer the questions of an agent: a server of the Model Context Protocol on stdin and stdout.

    Its tools read recordings and stores, and change nothing: why_slow, who, what_if, compare, hang.
    """
    if skill:
        click.echo((files("tracekit") / "SKILL.md").read_text(encoding="utf-8"), nl=False)
        return
    with extra("mcp", "tracekit mcp"):
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations

    def in_one_line(tool: Tool) -> Tool:
        """The tool, whose errors are those of the command line."""

        @wraps(tool)
        def asked(**arguments: Any) -> dict[str, Any]:
            try:
                return tool(**arguments)
            except (TracekitError, OSError) as error:
                raise ToolError(str(error)) from None

        return asked

    server = MCPServer("tracekit", instructions=mcp_command.help, version=__version__, log_level="ERROR")
    for tool in (why_slow, who, what_if, compare, hang):
        server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(in_one_line(tool))
    server.run()


def _job(path: str, job: str | None) -> Job:
    from tracekit.sources.load import load, load_from_store

    return load(path) if job is None else load_from_store(job, store=path)


def why_slow(path: str, job: str | None = None) -> dict[str, Any]:
    """Why a training job is slow: the answer in words, its verdict, whether to trust it, causes and priced fixes.

    path: a trace, a folder of torch.profiler, a log of post-training, or a store. job: a job in that store, by default
    the newest. Times are seconds per step. Do not act on a report whose trust says no. run: of a job in a store, what
    all its windows lost, from when to when and whether that is over; the rest is about its newest window.
    """
    from tracekit.bill.account import run_of_job

    report = _job(path, job).report.to_dict()
    answer = {key: report[key] for key in _WHY}
    store = Store(Path(path))
    return answer | {"run": to_builtins(run_of_job(store, job or store.newest()))} if store.is_store() else answer


def who(path: str, job: str | None = None) -> dict[str, Any]:
    """Which ranks and nodes hold a job up. path, job: as for why_slow.

    drain: nodes whose hardware the recording shows at fault. suspects: nodes of the other culprits, to
    be checked first.
    """
    from tracekit.bill.account import accused_of_run
    from tracekit.report.conclusions import nodes_of

    store = Store(Path(path))
    accused = accused_of_run(store, job or store.newest()) if store.is_store() else None
    if accused is None:
        accused = _job(path, job).report.accused
    nodes = nodes_of(accused.culprits, trusted=accused.trustworthy)
    culprits = [asdict(culprit) for culprit in accused.culprits]
    return {"trust": accused.trust, "culprits": culprits, "drain": nodes.drain, "suspects": nodes.suspects}


def what_if(path: str, selection: str, job: str | None = None) -> dict[str, Any]:
    """What a step would take if the selected ops were as fast as their peers, by replay, or post-training under an
    alternative. path, job: as for why_slow.

    selection: such as "rank=9", "worker=1,2 and step=100-105", "stage=2 and compute * 0.9", "fix=NAME" of a fix in
    why_slow; of post-training "staleness=1", "partial=0.9", "engines=8".
    """
    return asdict(_job(path, job).answer(selection))


def compare(before: str, after: str) -> dict[str, Any]:
    """Whether run `after` is faster than run `before`, how sure that is, and which causes came and went."""
    from tracekit.report.comparison import compare_runs

    comparison = compare_runs((_job(before, None).report, _job(after, None).report))
    compared: dict[str, Any] = to_builtins(comparison.output)
    return compared


def hang(folder: str) -> dict[str, Any]:
    """Which rank a hung job waits for. folder: the flight-recorder dumps of all its ranks."""
    from tracekit.commands.hang import analyse

    return analyse(Path(folder))[1].to_dict()
