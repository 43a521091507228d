"""The meaning of each exit code; the table in docs/scripts.md lists the same.

`tracekit collect`, and a hang that it watches, end with the exit code of the training command instead. An error
of tracekit itself ends as Python ends: with a traceback and 1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0  #: the command did what it was asked
    BAD_INPUT = 2  #: input, options or environment are wrong; one line on stderr says what to do
    #: `gate` found a regression, `hang` a hang, a `--fail-on` condition holds, `store check` found damage, `doctor` a
    #: reason why collecting fails
    CONDITION = 3
    #: `culprits` names no node: no rank is to blame, no trust, or no hardware evidence; noise hides what `gate` or
    #: `--fail-on` asks; a run is slower than the only baseline
    NO_ANSWER = 5
    UNKNOWN_NODE = 6  #: `culprits` names ranks, and the node of at least one is unknown
    INTERRUPTED = 130  #: Ctrl-C
