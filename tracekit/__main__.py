"""The command `tracekit`, and `python -m tracekit`.

In: arguments. Out: what `cli` makes of them. The command line takes longer to import than an impatient Ctrl-C does to
arrive, so it is imported where an interruption is caught.
"""

from __future__ import annotations

import sys

from tracekit.stderr import open_stderr, say

EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point: import the command line and run it."""
    open_stderr()
    try:
        from tracekit.cli import main as run

        run()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
