"""`python -m tracekit.collectors`: the command `tracekit collect` by itself."""

import sys

import click

from tracekit.collectors.command import collect_command
from tracekit.errors import TracekitError

EXIT_BAD_INPUT = 2


def main() -> int:
    """Run the command; an expected failure is one line and exit code 2."""
    try:
        return int(collect_command.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
    except TracekitError as error:
        click.echo(f"tracekit: {error}", err=True)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
