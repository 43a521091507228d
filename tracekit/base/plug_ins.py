"""What other installed distributions add to tracekit, through entry points (docs/extending.md).

In: a group of entry points. Out: its plug-ins, and a sentence for each one that is left out. Searches only when needed:
the first search reads the entry points of every installed distribution, which takes about a millisecond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tracekit.base.stderr import say
from tracekit.base.text import printable, quoted

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

#: A failure of the process, not of a plug-in.
_NOT_ITS_FAULT = (KeyboardInterrupt, GeneratorExit, MemoryError)
_problems_said: set[str] = set()


class PlugIn(NamedTuple):
    """An object of another distribution. `source`: its name in messages, such as "importer 'csv' of acme 1.2"."""

    source: str
    value: Any

    @contextmanager
    def guarded(self, error: Callable[[str], Exception], passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Raise `error`, with a sentence that names the plug-in, for whatever the body raises, even SystemExit.

        `passed`: exceptions that are raised as they are. What the body prints goes to stderr: stdout is the report.
        """
        try:
            with redirect_stdout(sys.stderr):
                yield
        except BaseException as failure:
            if isinstance(failure, (*_NOT_ITS_FAULT, *passed)):
                raise
            raise error(f"{self.source} failed ({in_words(failure)})") from failure


@cache
def plug_ins(
    group: str, reserved: frozenset[str] = frozenset(), fits: Callable[[object], bool] = callable
) -> tuple[Mapping[str, PlugIn], tuple[str, ...]]:
    """The plug-ins of a group by the names of their entry points, and why others are left out. Raises nothing.

    `group`: such as `importers`, the entry points `tracekit.importers`. `reserved`: the names of tracekit's own.
    `fits`: whether an object is one. A class is called without arguments.
    """
    plug_ins_by_name: dict[str, PlugIn] = {}
    problems: list[str] = []
    for source, point in _entry_points(group, problems):
        if point.name in reserved or point.name in plug_ins_by_name:
            owner = plug_ins_by_name[point.name].source if point.name in plug_ins_by_name else "tracekit's own"
            problems.append(f"{source} is left out: its name is that of {owner}; rename the entry point")
            continue
        try:
            with redirect_stdout(sys.stderr):
                plug_ins_by_name[point.name] = PlugIn(source, _loaded(point, fits))
        except (Exception, SystemExit) as failure:
            problems.append(f"{source} is left out: {printable(point.value)} cannot be used ({in_words(failure)})")
    return plug_ins_by_name, tuple(problems)


def _loaded(point: EntryPoint, fits: Callable[[object], bool]) -> object:
    """The object behind an entry point. Raises TypeError if it does not fit, and whatever it raises itself."""
    value = point.load()
    plug_in: object = value() if isinstance(value, type) else value
    if not fits(plug_in):
        raise TypeError(f"{quoted(plug_in, 80)} is not as docs/extending.md describes")
    return plug_in


def tell(problems: Iterable[str]) -> None:
    """Write each sentence to stderr, once per process."""
    for problem in problems:
        if problem not in _problems_said:
            _problems_said.add(problem)
            say(f"tracekit: {problem}")


def _entry_points(group: str, problems: list[str]) -> Iterator[tuple[str, EntryPoint]]:
    """The entry points of a group, each with its description; of a distribution installed twice, the first."""
    section, seen = f"tracekit.{group}", set()
    named_points: list[tuple[str, EntryPoint]] = []
    if not any(_may_mention(Path(folder), section.encode()) for folder in sys.path):
        return
    from importlib.metadata import distributions  # takes 20 times as long as a look at the files

    for distribution in distributions():
        if not _mentions(distribution, section) or (name := _distribution_name(distribution)) in seen:
            continue
        seen.add(name)
        try:
            points = list(distribution.entry_points.select(group=section))
            version = distribution.version
        except Exception as failure:
            problems.append(f"plug-ins of {name} are left out: its metadata is damaged ({in_words(failure)})")
            continue
        for point in points:
            named_points.append((printable(f"{group.removesuffix('s')} {point.name!r:.40} of {name} {version}"), point))
    yield from sorted(named_points, key=lambda pair: pair[0])  # the order of files in a folder differs between machines


def _may_mention(folder: Path, section: bytes) -> bool:
    """Whether the entry points of a distribution in this folder of sys.path have a section; always for a zip file."""
    try:
        folders = [entry for entry in folder.iterdir() if entry.suffix in {".dist-info", ".egg-info"}]
    except OSError:
        return folder.is_file()
    for entry in folders:
        with suppress(OSError):
            if section in (entry / "entry_points.txt").read_bytes():
                return True
    return False


def _mentions(distribution: Distribution, section: str) -> bool:
    """Whether the entry points of a distribution have this section; damaged ones of other packages do not matter."""
    try:
        return section in (distribution.read_text("entry_points.txt") or "")
    except (OSError, ValueError):
        return False


def _distribution_name(distribution: Distribution) -> str:
    """The name of a distribution; where it is, if its metadata is damaged."""
    try:
        return printable(distribution.name)
    except Exception:
        return printable(f"a package in {distribution.locate_file('')}")


def in_words(failure: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(failure).__name__}: {printable(' '.join(str(failure).split())):.200}".removesuffix(": ")
