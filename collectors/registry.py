"""All importers, behind one door.

In: a path. Out: the `Trace` an importer reads from it. An importer has a name, says whether a path looks like its
format, and reads it; `IMPORTERS` lists them in the order they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from tracekit.collectors import ndtimeline
from tracekit.collectors.clock import read_clocks
from tracekit.collectors.merge import merge_attempt
from tracekit.collectors.published import read_published
from tracekit.collectors.segments import attempts, is_run_directory, read_attempt, read_run
from tracekit.errors import FormatError
from tracekit.trace import Trace, read_header, read_parquet

#: First bytes of a Parquet file.
_PARQUET = b"PAR1"


class Importer(Protocol):
    """A format tracekit reads. `name` is what `--format` takes, `description` one line for its list."""

    @property
    def name(self) -> str:
        """What `--format` takes."""

    @property
    def description(self) -> str:
        """One line about the format."""

    def sniff(self, path: Path) -> bool:
        """Whether the path looks like this format. Cheap; raises OSError where it cannot be read."""

    def read(self, path: Path, *, layout: Path | None = None) -> Trace:
        """Read it. Raises FormatError, TraceError or LayoutError, each naming the path."""


class CanonicalImporter:
    """Traces tracekit wrote."""

    name = "tracekit"
    description = "canonical Parquet written by tracekit"

    def sniff(self, path: Path) -> bool:
        """A Parquet file with tracekit's header."""
        return _starts_with(path, _PARQUET) and read_header(path) is not None

    def read(self, path: Path, *, layout: Path | None = None) -> Trace:
        """The trace; it carries its layout inside."""
        if layout is not None:
            raise FormatError(f"{path}: a canonical trace carries its layout inside; leave out --layout")
        return read_parquet(path)


class PublishedImporter:
    """The published artifact: Parquet and a YAML layout beside it."""

    name = "published"
    description = "Parquet + YAML of the straggler study (OSDI'25); give the YAML with --layout"

    def sniff(self, path: Path) -> bool:
        """A Parquet file without tracekit's header."""
        return _starts_with(path, _PARQUET) and read_header(path) is None

    def read(self, path: Path, *, layout: Path | None = None) -> Trace:
        """The trace, with the layout of the YAML file."""
        if layout is None:
            raise FormatError(f"{path}: a published trace needs its layout; add --layout meta.yaml")
        return read_published(path, layout)


class SegmentsImporter:
    """What the ranks of `tracekit collect` wrote: a kept `--segments` folder."""

    name = "segments"
    description = "folder of `tracekit collect --segments`"

    def sniff(self, path: Path) -> bool:
        """A folder with the file of a run."""
        return is_run_directory(path)

    def read(self, path: Path, *, layout: Path | None = None) -> Trace:
        """The last attempt of the run."""
        if layout is not None:
            raise FormatError(f"{path}: segments carry their layout; leave out --layout")
        if not is_run_directory(path):
            raise FormatError(f"{path}: not a folder of `tracekit collect --segments`; it has no run.json")
        run = read_run(path)
        numbers = attempts(path)
        if not numbers:
            raise FormatError(f"{path}: no rank has written anything; record the run again")
        return merge_attempt(
            read_attempt(path, numbers[-1]),
            name=path.name,
            first_step=run.first_step,
            clocks=read_clocks(path),
            metadata={"command": list(run.command)},
        ).trace


IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        importer.name: importer
        for importer in (
            SegmentsImporter(),
            CanonicalImporter(),
            PublishedImporter(),
            ndtimeline.RawLogImporter(),
            ndtimeline.ChromeImporter(),
        )
    }
)


def read_any(path: Path, *, name: str | None = None, layout: Path | None = None) -> Trace:
    """Read `path` with the importer called `name`, else with the first that recognises it. Raises FormatError.

    A path that nothing recognises is taken for a Parquet trace, whose errors say what is wrong with it.
    """
    if name is not None:
        if name not in IMPORTERS:
            raise FormatError(f"unknown format {name!r}; known: {', '.join(IMPORTERS)}")
        return IMPORTERS[name].read(path, layout=layout)
    if layout is not None:
        return IMPORTERS["published"].read(path, layout=layout)
    for importer in IMPORTERS.values():
        if _recognises(importer, path):
            return importer.read(path)
    # Nothing recognises it: say what is wrong with it as a trace file, which most inputs are meant to be.
    return read_parquet(path)


def _recognises(importer: Importer, path: Path) -> bool:
    """Whether the importer takes the path. Never looks into a pipe: that would wait, and eat what comes."""
    if importer.name in {"tracekit", "published"} or not (path.is_file() or path.is_dir()):
        return False
    try:
        return importer.sniff(path)
    except OSError:
        return False


def _starts_with(path: Path, magic: bytes) -> bool:
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
