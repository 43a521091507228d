"""The command line: the group of commands, and how errors end a command.

In: arguments. Out: a report, JSON or files; progress and errors on stderr. Exit codes: `exit_codes.py`. Heavy imports
are inside the commands (`commands/`), so that `--help` is fast.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from tracekit import __version__, memory
from tracekit.errors import NotAStoreError, TracekitError, bounded
from tracekit.exit_codes import ExitCode
from tracekit.stderr import open_stderr, say, silence_stdout
from tracekit.text import printable

if TYPE_CHECKING:
    from tracekit.findings import Findings, Unanalysed
    from tracekit.trace import Trace

#: The module of each command, which defines `NAME_command`.
_HOMES = {
    "alerts": "tracekit.commands.alerts",
    "attach": "tracekit.commands.attach",
    "collect": "tracekit.collectors.launch.command",
    "compare": "tracekit.commands.compare",
    "culprits": "tracekit.commands.culprits",
    "dashboard": "tracekit.dashboards.web.command",
    "demo": "tracekit.commands.demo",
    "doctor": "tracekit.commands.doctor",
    "export": "tracekit.commands.export",
    "fleet": "tracekit.commands.fleet",
    "hang": "tracekit.commands.hang",
    "import": "tracekit.commands.importing",
    "info": "tracekit.commands.info",
    "store": "tracekit.commands.store",
    "synth": "tracekit.commands.synth",
    "synth-fleet": "tracekit.commands.synth_fleet",
    "top": "tracekit.commands.top",
    "watch": "tracekit.commands.watch",
    "whatif": "tracekit.commands.whatif",
}

#: The commands that start other people's processes, which must find the environment as it was.
_STARTS_OTHERS = ("collect", "doctor")

memory.return_soon()


def main() -> None:
    """Entry point: run a command; turn every expected failure into one line and an exit code."""
    open_stderr()
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    output = sys.stdout
    try:
        code = commands.main(prog_name="tracekit", standalone_mode=False, obj=_analyse)
        click.echo(nl=False)  # flushes, and tolerates a closed stdout
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(ExitCode.BAD_INPUT)
    except click.ClickException as error:
        say(f"tracekit: {_usage(error)}")
        sys.exit(ExitCode.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except NotAStoreError as error:
        from tracekit.commands.recognise import Wanted, what_it_is

        words = what_it_is(error.path, Wanted.STORE)
        say(f"tracekit: {bounded(printable(str(error) if words is None else f'{error.path}: {words}'))}")
        sys.exit(ExitCode.BAD_INPUT)
    except TracekitError as error:
        say(f"tracekit: {bounded(printable(str(error)))}")
        sys.exit(ExitCode.BAD_INPUT)
    except BrokenPipeError:
        silence_stdout()
        sys.exit(0)
    except SystemExit as stop:
        if sys.stdout is output:
            raise
        silence_stdout()  # click replaces stdout and exits with 1 if the reader of the output has gone
        sys.exit(0 if stop.code == 1 else stop.code)
    except OSError as error:
        silence_stdout()
        say(f"tracekit: reading or writing failed: {bounded(printable(str(error)))}; check disk and permissions")
        sys.exit(ExitCode.BAD_INPUT)
    except MemoryError:
        say("tracekit: out of memory; analyse fewer steps or use a larger machine")
        sys.exit(ExitCode.BAD_INPUT)
    sys.exit(code or 0)


def _usage(error: click.ClickException) -> str:
    """What is wrong with the arguments, on one line, and where it says what to type."""
    words = (
        bounded(printable(" ".join(error.format_message().split()).rstrip(".")))
        .replace(". (Did you", " (did you")
        .replace(". Did you", "; did you")
    )
    names: list[str] = ["tracekit"]
    command: click.Command = commands
    for word in sys.argv[1:]:
        found = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if found is None:
            break
        names.append(word)
        command = found
    return f"{words[:1].lower()}{words[1:]}; see `{' '.join(names)} --help`"


class _Commands(click.Group):
    """All commands, each imported when it is called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, in order."""
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of that name."""
        if cmd_name not in _HOMES:
            return None
        if cmd_name not in _STARTS_OTHERS:
            # The analysis multiplies small matrices only. To start numpy's threads, one per core, takes longer.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command: click.Command = getattr(import_module(_HOMES[cmd_name]), f"{cmd_name.replace('-', '_')}_command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tracekit")
def commands() -> None:
    """Find out what slows a large training job down, who causes it, and what each fix would buy."""


def _analyse(trace: Trace) -> Findings | Unanalysed:
    """Findings that `tracekit collect` stores with a trace."""
    from tracekit.job import Job

    return Job(trace).findings()


if __name__ == "__main__":
    main()
