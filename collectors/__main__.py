"""`python -m tracekit.collectors`: the command `tracekit collect` by itself."""

import sys

import click

from tracekit.base.errors import TracekitError
from tracekit.base.stderr import open_stderr, say
from tracekit.base.text import printable
from tracekit.collectors.launch.command import collect_command

EXIT_BAD_INPUT = 2


def main() -> int:
    """Run the command; an expected failure is one line and exit code 2."""
    open_stderr()
    try:
        return int(collect_command.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
    except TracekitError as error:
        say(f"tracekit: {printable(str(error))}")
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
