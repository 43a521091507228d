"""The command `tracekit`, and `python -m tracekit`.

In: arguments. Out: whatever `cli` does with them. Importing the command line takes long enough for an impatient Ctrl-C,
so it is imported where an interruption is caught.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib.util import find_spec

import tracekit
from tracekit.base.errors import ExitCode
from tracekit.base.memory import collect_seldom
from tracekit.base.stderr import open_stderr, say


def main() -> None:
    """Entry point: import the command line and run it."""
    open_stderr()
    if "_HOMES" not in vars(tracekit):
        say(
            f"tracekit: {tracekit.__file__} is another project's package of that name, written over this one: "
            "pip uninstall tracekit, then pip install --force-reinstall tracekit-analysis"
        )
        sys.exit(ExitCode.BAD_INPUT)
    collect_seldom()
    try:
        _command_line()()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    finally:
        # At exit Python searches all objects for garbage, which the system frees anyway. DuckDB's bindings complain
        # about what is left then.
        if "duckdb" not in sys.modules:
            gc.freeze()


def _command_line() -> Callable[[], object]:
    """All commands or, in the distribution `tracekit-collect`, those that record."""
    if find_spec("tracekit.cli") is not None:
        from tracekit.cli import main as run_any

        return run_any
    from tracekit.collectors.launch.record import main as record

    return lambda: sys.exit(record())


if __name__ == "__main__":
    main()
