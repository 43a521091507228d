"""Every error tracekit raises on purpose.

The command line catches `TracekitError` once and exits with 2. A message carries the offending value,
what was expected and the next step. Every message is cut here, whatever a foreign file put into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

from .text import LONGEST_QUOTE, cut

if TYPE_CHECKING:
    from pathlib import Path

#: A message has at most this many characters in all, and `LONGEST_QUOTE` of one value.
LONGEST_MESSAGE = 1500
_LONG_WORD = re.compile(rf"\S{{{LONGEST_QUOTE + 1},}}")


def bounded(message: str) -> str:
    """A message without endless values: words of at most `LONGEST_QUOTE` characters, `LONGEST_MESSAGE` in all. Its
    beginning, which says where, and its end, which says what to do, are kept.
    """
    if len(message) <= LONGEST_QUOTE:
        return message
    few = cut(message, 4 * LONGEST_MESSAGE)
    return cut(_LONG_WORD.sub(lambda word: cut(word.group(), LONGEST_QUOTE), few), LONGEST_MESSAGE)


class TracekitError(Exception):
    """Base of all errors that a user can act on."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(bounded(arg) if isinstance(arg, str) else arg for arg in args))


class TraceError(TracekitError):
    """The trace is not one that tracekit can analyse: it violates the data model."""


class FormatError(TraceError):
    """The file is not a trace at all: empty, truncated, or in a format that tracekit does not read."""


class GraphError(TraceError):
    """The ops of a trace do not form a dependency graph: an unpaired send, a cycle."""


class LayoutError(TracekitError):
    """The parallel layout is impossible or contradicts the trace."""


class StoreError(TracekitError):
    """The store cannot be opened, read or written, or lacks the job."""


class StoreBusyError(StoreError):
    """Another process has the store open; the same call can work in a moment."""


class NotAStoreError(StoreError):
    """The path exists, but is not a store. `path`: where."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


class StoreTakenError(StoreError):
    """Another process is adding windows to the same job."""


class NotStoredError(StoreError):
    """The store can be read, and does not have the job, or results of it."""


class StudyError(TracekitError):
    """A folder cannot be used as a study of a fleet."""


class UnsafeFileError(StoreError, StudyError):
    """A link, a pipe, a socket or a device is where a file or folder of a store or a study belongs."""


class UnreadableFileError(StoreError, StudyError):
    """A file of a store or a study cannot be read now, or is far too large: that does not make it damaged."""


class SelectionError(TracekitError):
    """A selection of ops, workers or steps cannot be understood or matches nothing."""


class TimeLimitError(TracekitError):
    """A question takes longer than it may."""


class OutputError(TracekitError):
    """A result cannot be written to the requested place."""


class MissingExtraError(TracekitError):
    """An optional part of tracekit is not installed."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Code that needs modules of an extra. Raises MissingExtraError, which says what needs them, if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{purpose} needs {error.name or name}, which is not installed"
        raise MissingExtraError(f"{missing}: pip install 'tracekit-analysis[{name}]'") from None


class ExitCode(IntEnum):
    """How a command ended.

    The table in docs/scripts.md lists the same. `tracekit collect`, and a hang that it watches, end with the exit code
    of the training command instead. An error of tracekit itself ends as Python ends: with a traceback and 1.
    """

    DONE = 0  #: the command succeeded
    BAD_INPUT = 2  #: input, options or environment are wrong; one line on stderr says what to do
    #: `gate` found a regression, `hang` a hang, a `--fail-on` condition holds, `store check` found damage, `doctor` a
    #: reason why collecting fails
    CONDITION = 3
    #: `culprits` names no node: no rank is to blame, no trust, or no hardware evidence; noise hides what `gate` or
    #: `--fail-on` asks; a run is slower than the only baseline
    NO_ANSWER = 5
    UNKNOWN_NODE = 6  #: `culprits` names ranks, and the node of at least one is unknown
    INTERRUPTED = 130  #: Ctrl-C
