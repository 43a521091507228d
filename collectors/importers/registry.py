"""All importers, behind one function.

In: a path. Out: the `Trace` an importer reads from it. An importer has a name, says whether a path looks like its
format, and reads it. `importers` lists them in the order they are asked: tracekit's own, then those of plug-ins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from tracekit.base.errors import FormatError, LayoutError, TraceError, TracekitError
from tracekit.base.plug_ins import PlugIn, plug_ins, tell
from tracekit.base.stderr import say
from tracekit.base.text import printable, quoted
from tracekit.collectors.importers import megascan, ndtimeline
from tracekit.collectors.importers.formats import DAMAGE, refuse_unit
from tracekit.collectors.importers.kineto.other_recordings import other_recording
from tracekit.collectors.importers.nccl_inspector import InspectorImporter
from tracekit.collectors.importers.published import read_layout_file, read_published
from tracekit.collectors.merge.merge import MergedAttempt, merge_attempt
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.merge.restarts import merge_run
from tracekit.collectors.merge.unrecorded import find_unrecorded
from tracekit.collectors.run_directory.host_clocks import read_clocks
from tracekit.collectors.run_directory.segments import is_run_directory, read_run
from tracekit.collectors.run_directory.whole import read_attempt
from tracekit.collectors.run_directory.writing import attempts
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import Unit, is_size

#: First bytes of a Parquet file.
_PARQUET = b"PAR1"
#: Size in the YAML file of a segments folder -> word of `LayoutOptions`.
STATED_SIZES = {"dp_size": "dp", "pp_size": "pp", "tp_size": "tp", "vpp_size": "vpp"}
#: How the names of Chrome traces end.
_JSON = (".json", ".json.gz")


class Importer(Protocol):
    """A format that tracekit reads. `name`: its value for `--format`; `description`: one line for lists of formats."""

    @property
    def name(self) -> str:
        """Its value for `--format`."""

    @property
    def description(self) -> str:
        """One line about the format."""

    def sniff(self, path: Path) -> bool:
        """True if the path looks like this format. Cheap; raises OSError if it cannot be read."""

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """Read it; `unit`: of its times, if the format does not fix it.

        Raises FormatError, TraceError or LayoutError, each naming the path.
        """


class CanonicalImporter:
    """Traces written by tracekit."""

    name = "tracekit"
    description = "canonical Parquet written by tracekit"

    def sniff(self, path: Path) -> bool:
        """False: a Parquet file is read as such a trace, or it says why it is none."""
        del path
        return False

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """Read the trace; the layout is in the file."""
        if layout is not None:
            raise FormatError(f"{path}: a canonical trace contains its layout; leave out --layout")
        return read_parquet(path, unit=unit)


class PublishedImporter:
    """The published artifact: Parquet and a YAML layout next to it."""

    name = "published"
    description = "Parquet + YAML of the straggler study (OSDI'25); give the YAML with --layout"

    def sniff(self, path: Path) -> bool:
        """False: `--layout` says that it is one."""
        del path
        return False

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """Read the trace, with the layout of the YAML file."""
        if layout is None:
            raise FormatError(f"{path}: a published trace needs its layout; add --layout meta.yaml")
        return read_published(path, layout, unit=unit)


class SegmentsImporter:
    """Segments of the ranks of `tracekit collect`: a kept `--segments` folder."""

    name = "segments"
    description = "folder of `tracekit collect --segments`; --layout sizes.yaml where its sizes cannot be found"

    def sniff(self, path: Path) -> bool:
        """Recognise a folder with the file of a run."""
        return is_run_directory(path)

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """Read the run's last job, from its first attempt on. `layout`: YAML with those of `STATED_SIZES` that the
        ranks did not record.
        """
        refuse_unit(path, unit, "a folder of `tracekit collect`")
        if not is_run_directory(path):
            raise FormatError(f"{path}: not a folder of `tracekit collect --segments`; it has no run.json")
        run = read_run(path)
        numbers = attempts(path)
        if not numbers:
            raise FormatError(f"{path}: no rank wrote anything; record the run again")
        options, clocks = None if layout is None else _stated_sizes(layout), read_clocks(path)

        def merge(number: int) -> MergedAttempt:
            recording = read_attempt(path, number)
            stopped = find_unrecorded(recording).stopped_line()
            for line in (*recording.left_out, *([] if stopped is None else [stopped])):
                say(f"tracekit: {printable(line)}")
            return merge_attempt(
                recording,
                name=path.absolute().name,
                first_step=run.first_step,
                options=options,
                clocks=clocks,
                metadata={"command": list(run.command)},
            )

        return merge_run(numbers, merge)


def _stated_sizes(path: Path) -> LayoutOptions:
    """Read the sizes in a YAML file. Raises FormatError or LayoutError, naming the file."""
    content = read_layout_file(path)
    stated = {word: content[name] for name, word in STATED_SIZES.items() if name in content}
    if not stated:
        raise LayoutError(f"{path}: states no size; expected some of {', '.join(STATED_SIZES)}, such as `dp_size: 4`")
    for word, size in stated.items():
        if not is_size(size):
            raise LayoutError(
                f"{path}: {word}_size is {size!r:.40}; expected an integer of at least 1, such as `{word}_size: 4`"
            )
    return LayoutOptions(**stated)


IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        importer.name: importer
        for importer in (
            SegmentsImporter(),
            CanonicalImporter(),
            PublishedImporter(),
            ndtimeline.RawLogImporter(),
            ndtimeline.ChromeImporter(),
            megascan.RawImporter(),
            megascan.AggregatedImporter(),
            InspectorImporter(),
        )
    }
)


class PlugInImporter:
    """An importer of another distribution. Whatever it raises becomes an error that names it."""

    def __init__(self, name: str, plug_in: PlugIn) -> None:
        self.name, self.description = name, printable(plug_in.value.description)
        self._plug_in, self._failed = plug_in, False

    def sniff(self, path: Path) -> bool:
        """Whether it recognises the path; once it has failed, it is not asked again."""
        try:
            with self._plug_in.guarded(TraceError, passed=(OSError,)):
                return not self._failed and bool(self._plug_in.value.sniff(path))
        except TraceError as error:
            self._failed = True
            tell([f"{error} at {quoted(str(path))}, and recognises no file from now on"])
            return False

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """The trace. The importer gets `layout` and `unit` only if they are given."""
        stated = {name: value for name, value in (("layout", layout), ("unit", unit)) if value is not None}
        with self._plug_in.guarded(lambda why: TraceError(f"{path}: {why}"), passed=(OSError, TracekitError)):
            trace = self._plug_in.value.read(path, **stated)
            if not isinstance(trace, Trace):
                raise TypeError(f"it read a {type(trace).__name__}; expected a tracekit.Trace")
            return trace


@cache
def _plugged() -> Mapping[str, Importer]:
    """The importers of plug-ins; those that are left out are named on stderr."""
    found, problems = plug_ins("importers", frozenset(IMPORTERS), _is_importer)
    tell(problems)
    return {name: PlugInImporter(name, plug_in) for name, plug_in in found.items()}


def _is_importer(value: object) -> bool:
    described = isinstance(getattr(value, "description", None), str)
    return described and all(callable(getattr(value, name, None)) for name in ("sniff", "read"))


def importers() -> Iterator[Importer]:
    """Every importer; plug-ins are looked for once tracekit's own are exhausted."""
    yield from IMPORTERS.values()
    yield from _plugged().values()


def read_any(path: Path, *, name: str | None = None, layout: Path | None = None, unit: Unit | None = None) -> Trace:
    """Read `path` with the importer called `name`, else with the first that recognises it. Raises FormatError.

    JSON that no importer recognises belongs to another tool. Any other path is read as a Parquet trace, to report what
    is wrong with it.
    """
    if name is not None:
        importer = IMPORTERS.get(name) or _plugged().get(name)
        if importer is None:
            raise FormatError(f"unknown format {name!r}; known: {', '.join(known.name for known in importers())}")
        return _read(importer, path, layout, unit)
    if layout is not None:
        return _read(IMPORTERS["segments" if is_run_directory(path) else "published"], path, layout, unit)
    for importer in importers():
        if _recognises(importer, path):
            return _read(importer, path, layout, unit)
    if (instead := other_recording(path)) is not None:
        raise FormatError(f"{path}: {instead}")
    if path.is_dir():
        raise FormatError(
            f"{path}: not a folder that tracekit reads; one of `tracekit collect --segments` has a run.json, one of the"
            " NCCL Inspector *.log files"
        )
    if path.is_file() and path.name.endswith(_JSON):
        raise FormatError(f"{path}: not JSON that tracekit reads; `tracekit import --format` lists the formats")
    # Not recognised: report its error as a trace file, which most inputs are meant to be.
    return _read(IMPORTERS["tracekit"], path, None, unit)


def is_known(path: Path) -> bool:
    """Whether some importer of pipeline traces recognises a path."""
    return any(_recognises(importer, path) for importer in importers())


def _read(importer: Importer, path: Path, layout: Path | None, unit: Unit | None) -> Trace:
    """Read the path with the importer; errors from damaged bytes become one FormatError."""
    try:
        return importer.read(path, layout=layout, unit=unit)
    except OSError as error:
        raise FormatError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}; check the path, or copy it again"
        ) from None
    except DAMAGE as error:
        reason = (str(error).splitlines() or [""])[0]
        raise FormatError(
            f"{path}: damaged, or not in the format {importer.name} ({type(error).__name__}: {reason:.200}); copy or"
            " record it again"
        ) from None


def _recognises(importer: Importer, path: Path) -> bool:
    """True if the importer recognises the path. Never reads a pipe: that would block and consume its data."""
    if not (path.is_file() or path.is_dir()):
        return False
    try:
        return importer.sniff(path)
    except OSError:
        return False
