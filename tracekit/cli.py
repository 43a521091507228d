"""The command line: the group of commands, and how errors end a command.

In: arguments. Out: a report, JSON or files; progress and errors on stderr. Exit codes: `ExitCode`. Heavy imports
are inside the commands (`commands/`), so that `--help` is fast.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from tracekit import __version__
from tracekit.base import memory
from tracekit.base.errors import ExitCode, NotAStoreError, TracekitError, bounded
from tracekit.base.stderr import open_stderr, open_stdout, say, silence_stdout
from tracekit.base.text import printable

if TYPE_CHECKING:
    from tracekit.report.findings import Findings, Unanalysed
    from tracekit.trace.canonical import Trace

#: The group of commands that help names in one line.
_FEW_NEED = "More"
#: Commands by purpose: each with the module that defines `NAME_command`, and a line of help.
_GROUPS = {
    "Record": {
        "collect": ("tracekit.collectors.launch.command", "Record the steps of a training command, unmodified."),
        "attach": ("tracekit.commands.record", "Record a few steps of a job that is already running."),
        "import": ("tracekit.commands.record", "Put traces of any format into a store."),
        "synth": ("tracekit.commands.record", "Simulate a job, or many, with known stragglers."),
        "doctor": ("tracekit.commands.record", "Check whether `collect` works on this machine."),
    },
    "Ask": {
        "whatif": ("tracekit.commands.whatif", "Who slows the job down, why, and what each fix saves."),
        "watch": ("tracekit.commands.watch", "Analyse a running job window by window."),
        "hang": ("tracekit.commands.hang", "Which rank a hung job waits for."),
        "culprits": ("tracekit.commands.scripts", "Nodes that hold a job up, for scripts."),
        "compare": ("tracekit.commands.scripts", "What changed from one run to another."),
        "gate": ("tracekit.commands.scripts", "Fail if a run is slower than a baseline, beyond noise."),
        "bill": ("tracekit.commands.scripts", "What every hour of a run went to, and what it cost."),
        "fleet": ("tracekit.commands.fleet", "Study many jobs: what is lost, and to what."),
        "metrics": (
            "tracekit.commands.metrics_command",
            "Whether clocks, links, CPU pressure confirm a culprit; alerts.",
        ),
        "optimize": ("tracekit.commands.optimize", "The best plan that fits, with the bound that proves it."),
    },
    "Open": {
        "open": ("tracekit.commands.door", "Open a trace, store or study, or a demo, in the browser."),
        "dashboard": ("tracekit.dashboards.browser.web.command", "Serve the dashboard to others."),
        "store": ("tracekit.commands.store_command", "List, query, export what a path holds; keep a store."),
    },
    _FEW_NEED: {
        "experts": ("tracekit.commands.optimize", "Where to place experts, by the tokens that they get."),
        "mcp": ("tracekit.commands.mcp", "Answer an agent's questions (MCP server)."),
        "passport": ("tracekit.commands.optimize", "Measure a GPU, for `whatif --gpu`."),
        "rl": ("tracekit.commands.whatif", "Where a step of RL post-training goes."),
    },
}
#: Commands that are part of a group now.
_MOVED = {"alerts": "metrics alerts", "export": "store export", "sql": "store sql", "top": "store top"}
_HOMES = {name: home for group in _GROUPS.values() for name, (home, _) in group.items()}
_HELP = """\b
Record  tracekit collect --out job.parquet -- torchrun train.py
Ask     tracekit whatif job.parquet
Open    tracekit open job.parquet

Finds out what slows a large training job down, who causes it, and what each fix saves.

PATH is a trace, a folder of torch.profiler, dumps of a hung job, a log of RL post-training, a report, a store or a
study: tracekit finds out which.
"""

#: The commands that start other people's processes, which must find the environment as it was.
_STARTS_OTHERS = ("collect", "doctor")

memory.return_soon()


def main() -> None:
    """Entry point: run a command; turn every expected failure into one line and an exit code."""
    open_stderr()
    open_stdout()
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = commands.main(prog_name="tracekit", standalone_mode=False, obj=_analyse)
        click.echo(nl=False)  # flushes, and tolerates a closed stdout
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(ExitCode.BAD_INPUT)
    except click.ClickException as error:
        say(f"tracekit: {_usage(error)}")
        sys.exit(ExitCode.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        _end_interrupted()
    except RuntimeError as error:
        if type(error) is not RuntimeError or str(error) != "Query interrupted":  # what DuckDB makes of Ctrl-C
            raise
        _end_interrupted()
    except NotAStoreError as error:
        from tracekit.base.paths import Look
        from tracekit.sources.load import wrong_source
        from tracekit.sources.source import Content

        say(f"tracekit: {bounded(printable(str(wrong_source(Look(error.path), Content.STORE) or error)))}")
        sys.exit(ExitCode.BAD_INPUT)
    except TracekitError as error:
        say(f"tracekit: {bounded(printable(str(error)))}")
        sys.exit(ExitCode.BAD_INPUT)
    except OSError as error:
        silence_stdout()
        say(f"tracekit: reading or writing failed: {bounded(printable(str(error)))}; check disk and permissions")
        sys.exit(ExitCode.BAD_INPUT)
    except MemoryError:
        say("tracekit: out of memory; use fewer steps, or a larger machine")
        sys.exit(ExitCode.BAD_INPUT)
    sys.exit(code or 0)


def _end_interrupted() -> NoReturn:
    say("interrupted")
    sys.exit(ExitCode.INTERRUPTED)


def _usage(error: click.ClickException) -> str:
    """The error about the arguments, on one line, with the command for help."""
    words = (
        bounded(printable(" ".join(error.format_message().split()).rstrip(".")))
        .replace(". (Did you", " (did you")
        .replace(". Did you", "; did you")
    )
    names: list[str] = ["tracekit"]
    command: click.Command = commands
    for word in sys.argv[1:]:
        inner = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if inner is None:
            break
        names.append(word)
        command = inner
    return f"{words[:1].lower()}{words[1:]}; see `{' '.join(names)} --help`"


class _Commands(click.Group):
    """All commands, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, by purpose."""
        return list(_HOMES)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The commands in groups; none is imported."""
        for title, group in _GROUPS.items():
            if title == _FEW_NEED:
                formatter.write_paragraph()
                formatter.write_text(f"{title}: {', '.join(group)}; `tracekit COMMAND --help` says what each does.")
                continue
            with formatter.section(title):
                formatter.write_dl([(f"{name:<11}", words) for name, (_, words) in group.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names, or the one that reads it if it is a path."""
        if args[0] not in _HOMES and not args[0].startswith("-"):
            from tracekit.commands import door

            if args[0] in _MOVED:
                raise click.UsageError(f"`tracekit {args[0]}` is `tracekit {_MOVED[args[0]]}` now", ctx)
            if not door.looks_like_path(args[0]):
                raise click.UsageError(door.nearest_command(args[0], _HOMES), ctx)
            args = [*door.arguments_for(args[0]), *args[1:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of that name."""
        if cmd_name not in _HOMES:
            return None
        if cmd_name not in _STARTS_OTHERS:
            # The analysis multiplies small matrices only. To start numpy's threads, one per core, takes longer.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command: click.Command = getattr(import_module(_HOMES[cmd_name]), f"{cmd_name.replace('-', '_')}_command")
        return command


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="PATH | COMMAND [ARGS]...",
    help=_HELP,
)
@click.version_option(__version__, prog_name="tracekit")
def commands() -> None:
    """All commands."""


def _analyse(trace: Trace) -> Findings | Unanalysed:
    """Findings that `tracekit collect` stores with a trace."""
    from tracekit.analysis.job.pipeline import PipelineJob

    return PipelineJob(trace).stored()


if __name__ == "__main__":
    main()
