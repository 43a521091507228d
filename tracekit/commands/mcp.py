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
from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from tracekit import __version__
from tracekit.base.errors import TracekitError, extra
from tracekit.commands.options import JobArguments
from tracekit.report.conclusions import Answer, Finding, Fix, RunVerdict, Trust, Verdict
from tracekit.report.tables import Maybe, Outline
from tracekit.sources.load import is_a
from tracekit.sources.source import Content

Tool = Callable[..., dict[str, Any]]


class WhySlow(Struct, frozen=True):
    """The parts of a report that answer "why", as docs/report-schema.md describes them."""

    job: Outline
    answer: Answer
    verdict: Verdict
    trust: Trust
    causes: list[Finding]
    fixes: list[Fix]
    run: Maybe[RunVerdict]


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


def _source(path: str, job: str | None = None) -> JobArguments:
    """The job that a path names, by default the newest one if that is a store."""
    place = Path(path)
    in_store = job is not None or is_a(Content.STORE, place)
    return JobArguments(store=place, job=job) if in_store else JobArguments((place,))


def why_slow(path: str, job: str | None = None) -> dict[str, Any]:
    """Why a training job is slow: the answer in words, its verdict, whether to trust it, causes and priced fixes.

    path: a trace, a folder of torch.profiler, a log of post-training, a report (JSON), or a store. job: a job in that
    store, by default the newest. Times are seconds per step. Do not act on a report whose trust says no. run: of a job
    in a store, what all its windows lost, from when to when and whether that is over; the rest is about its newest
    window.
    """
    source = _source(path, job)
    report = source.with_run(source.report())
    answer = WhySlow(report.job, report.answer, report.verdict, report.trust, report.findings, report.fixes, report.run)
    why: dict[str, Any] = to_builtins(answer)
    return why


def who(path: str, job: str | None = None) -> dict[str, Any]:
    """Which ranks and nodes hold a job up. path, job: as for why_slow.

    drain: nodes whose hardware the recording shows at fault. suspects: nodes of the other culprits, to
    be checked first.
    """
    from tracekit.report.conclusions import nodes_of

    accused = _source(path, job).accused()
    nodes = nodes_of(accused.culprits, trusted=accused.trustworthy)
    culprits = [asdict(culprit) for culprit in accused.culprits]
    return {"trust": accused.trust, "culprits": culprits, "drain": nodes.drain, "suspects": nodes.suspects}


def what_if(path: str, selection: str, job: str | None = None) -> dict[str, Any]:
    """What a step would take if the selected ops were as fast as their peers, by replay, or post-training under an
    alternative. path, job: as for why_slow.

    selection: such as "rank=9", "worker=1,2 and step=100-105", "stage=2 and compute * 0.9", "fix=NAME" of a fix in
    why_slow; of post-training "staleness=1", "partial=0.9", "engines=8".
    """
    return asdict(_source(path, job).load().answer(selection))


def compare(before: str, after: str) -> dict[str, Any]:
    """Whether run `after` is faster than run `before`, how sure that is, and which causes came and went."""
    from tracekit.report.comparison import compare_runs

    comparison = compare_runs((_source(before).report(), _source(after).report()))
    compared: dict[str, Any] = to_builtins(comparison.output)
    return compared


def hang(folder: str) -> dict[str, Any]:
    """Which rank a hung job waits for. folder: the flight-recorder dumps of all its ranks."""
    from tracekit.commands.hang import analyse

    return analyse(Path(folder))[1].to_dict()
