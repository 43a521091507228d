"""`tracekit gate`: fail if a run is slower than a baseline, beyond the noise.

In: a run and its baselines, each a trace or a job in a store. Out: the verdict in the terminal, as JSON or in files,
and as an exit code.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import short
from tracekit.commands.arguments import parse_share, parse_steps
from tracekit.commands.options import OUT, PATH, JobArguments, console, job_source


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    from tracekit.dashboards.documents.gate_files import (
        GATE_JUNIT,
        GATE_MARKDOWN,
        write_gate_junit,
        write_gate_markdown,
    )

    limit = parse_share(max_regression, "--max-regression")
    apart = None if noise is None else parse_share(noise, "--noise")
    if apart is not None and apart >= 1:
        raise SelectionError(f"--noise {noise!r:.200}; expected less than 100%, such as 2% or 0.02")
    ignored = [] if ignore_steps is None else parse_steps(ignore_steps, "--ignore-steps")
    if len({os.path.realpath(each) for each in baselines}) < len(baselines):
        raise click.BadParameter("the same one twice does not show how far runs differ", param_hint="--baseline")
    for path, kind in ((junit, GATE_JUNIT), (markdown, GATE_MARKDOWN)):
        if path is not None:
            check_writable(path, kind)
    with progress("reading the run") as tell:
        run = source.load()
        before = []
        for baseline in baselines:
            tell(f"reading {short(baseline)}")
            before.append(_named(baseline, source).load())
        verdict = gate(run, before, limit, parts=parts, noise=apart, ignored=ignored)
    if junit is not None:
        write_gate_junit(junit, verdict)
    if markdown is not None:
        write_gate_markdown(markdown, verdict)
    if as_json:
        click.echo(msgspec.json.encode(verdict))
    else:
        from tracekit.dashboards.terminal.gate_screen import print_gate

        print_gate(verdict, console(), source.arguments)
    codes = {Outcome.PASSED: ExitCode.DONE, Outcome.REGRESSION: ExitCode.CONDITION}
    return codes.get(verdict.outcome, ExitCode.NO_ANSWER)


def _named(baseline: str, run: JobArguments) -> JobArguments:
    """What a baseline names: an existing path, else a job in a store if the words before a colon are one."""
    from tracekit.sources.recognise import is_a
    from tracekit.sources.source import Content

    colons = [at for at, char in enumerate(baseline) if char == ":"] if not Path(baseline).exists() else []
    for colon in colons:
        if is_a(Content.STORE, Path(baseline[:colon])):
            return JobArguments(store=Path(baseline[:colon]), job=baseline[colon + 1 :])
    return JobArguments((Path(baseline),), run.layout, run.unit)
