"""The command line: the group of commands, and what their errors end with.

In: arguments. Out: a report, JSON or files; progress and errors on stderr. Exit codes: `exit_codes.py`. Heavy imports
live in the commands (`commands/`), so that `--help` is fast.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

import click

from tracekit import __version__
from tracekit.collectors.launch.command import collect_command
from tracekit.commands.compare import compare_command
from tracekit.commands.culprits import culprits_command
from tracekit.commands.doctor import doctor_command
from tracekit.commands.export import export_command
from tracekit.commands.hang import hang_command
from tracekit.commands.importing import import_command
from tracekit.commands.info import info_command
from tracekit.commands.store import store_command
from tracekit.commands.synth import synth_command
from tracekit.commands.whatif import whatif_command
from tracekit.dashboards.web.command import dashboard_command
from tracekit.errors import TracekitError
from tracekit.exit_codes import ExitCode
from tracekit.stderr import open_stderr, say, silence_stdout
from tracekit.text import printable

if TYPE_CHECKING:
    from tracekit.findings import Findings, Unanalysed
    from tracekit.trace import Trace

# polars' allocator keeps freed memory for seconds, longer than most commands run: give it back at once.
os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")


def main() -> None:
    """Entry point: run a command, turn every expected failure into one line and an exit code."""
    open_stderr()
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    output = sys.stdout
    try:
        code = commands.main(standalone_mode=False, obj=_analyse)
        click.echo(nl=False)  # flushes, and bears a stdout that was closed
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except TracekitError as error:
        say(f"tracekit: {printable(str(error))}")
        sys.exit(ExitCode.BAD_INPUT)
    except BrokenPipeError:
        silence_stdout()
        sys.exit(0)
    except SystemExit as stop:
        if sys.stdout is output:
            raise
        silence_stdout()  # click replaces stdout and leaves with 1 where the reader of our output has left
        sys.exit(0 if stop.code == 1 else stop.code)
    except OSError as error:
        silence_stdout()
        say(f"tracekit: reading or writing failed: {printable(str(error))}; check disk and permissions")
        sys.exit(ExitCode.BAD_INPUT)
    except MemoryError:
        say("tracekit: out of memory; analyse fewer steps or use a larger machine")
        sys.exit(ExitCode.BAD_INPUT)
    sys.exit(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tracekit")
def commands() -> None:
    """Find out what slows a large training job down, who causes it, and what each fix would buy."""


for command in (
    whatif_command,
    compare_command,
    culprits_command,
    import_command,
    info_command,
    export_command,
    synth_command,
    collect_command,
    doctor_command,
    dashboard_command,
    hang_command,
    store_command,
):
    commands.add_command(command)


def _analyse(trace: Trace) -> Findings | Unanalysed:
    """What `tracekit collect` stores beside a trace."""
    from tracekit.job import Job

    return Job(trace).findings()


if __name__ == "__main__":
    main()
