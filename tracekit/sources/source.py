"""An entry of the registry: one kind of path.

In: a look at a path. Out: whether it is of this kind, its job, the command that shows it, and a sentence for a command
that wants another kind; one error for whatever damaged bytes cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.paths import Look, command
from tracekit.trace.facts import SourceKind
from tracekit.trace.model import TimeUnit

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job

#: Exceptions that damaged bytes can cause; importers raise clearer ones where they can.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Content(StrEnum):
    """The content of a path, or what a command wants, as errors name it."""

    TRACE = "a trace"
    DUMPS = "a folder of dumps"
    STUDY = "a study"
    STORE = "a store"
    REPORT = "a report"
    RUN = "a running job"
    OTHER = "something else"


class ReadOptions(Struct, frozen=True):
    """What the user states about the traces to read; None and () where nothing is stated.

    `layout`: YAML file with parallel sizes. `unit`: of the times. `method`: of the analysis. `kernel_classes`: patterns
    of kernels.
    """

    layout: Path | None = None
    unit: TimeUnit | None = None
    method: str | None = None
    kernel_classes: tuple[str, ...] = ()

    @property
    def stated(self) -> dict[str, object]:
        """The options that are stated, by their names on the command line."""
        options = {
            "layout": self.layout,
            "unit": self.unit,
            "method": self.method,
            "kernel-class": self.kernel_classes or None,
        }
        return {name: value for name, value in options.items() if value is not None}


class Source(Struct, frozen=True):
    """One kind of path.

    `name`: the value of `--format`. `title`: with its article, for errors. `sniff`: whether a path is of this kind.
    `content`: what it holds. `read`: its job, None if it holds none. `takes`: names of the options that `read` uses.
    `command`: the words before the path on the command line that shows it. `sentence`: what to say of it to a command
    that wants something else. `description`: a line for lists of formats. `page`: of the documentation. `kinds`: what
    reports on it cannot show. `in_batches`: whether steps of such a file can be analysed in batches.
    """

    name: str
    title: str
    sniff: Callable[[Look], bool]
    content: Content = Content.OTHER
    read: Callable[[Sequence[Path], ReadOptions], Job] | None = None
    takes: frozenset[str] = frozenset()
    command: tuple[str, ...] = ("whatif",)
    sentence: Callable[[Look, Content], str] | None = None
    description: str = ""
    page: str = ""
    kinds: tuple[SourceKind, ...] = ()
    in_batches: bool = False

    def instead(self, look: Look, wanted: Content) -> str:
        """The error of a command that wants another kind of path: what this path is, and what to type."""
        if self.sentence is not None:
            return self.sentence(look, wanted)
        return f"{self.title}, not {wanted}; type `{command(*self.command, look.path)}`"


@contextmanager
def one_error(path: Path) -> Iterator[None]:
    """Raise FormatError for whatever unreadable or damaged bytes cause in the body."""
    from polars.exceptions import PolarsError  # which help and commands that read no trace do not wait for

    try:
        yield
    except OSError as error:
        raise FormatError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}; check the path, or copy it again"
        ) from None
    except (*_DAMAGE, PolarsError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise FormatError(
            f"{path}: damaged, or not in this format ({type(error).__name__}: {reason:.200}); copy or record it again"
        ) from None
