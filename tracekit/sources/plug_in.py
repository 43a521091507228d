"""Sources of plug-ins: importers of other installed distributions (docs/extending.md).

In: entry points of the group `importers`. Out: entries like tracekit's own. Whatever a plug-in raises becomes an error
that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base.errors import TraceError, TracekitError
from tracekit.base.look import Look
from tracekit.base.plug_ins import PlugIn, plug_ins, tell
from tracekit.base.text import printable, quoted
from tracekit.sources.registry import FORMATS
from tracekit.sources.source import Content, ReadOptions, Source
from tracekit.trace import facts

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job


class _Importer:
    """An importer of another distribution."""

    def __init__(self, plug_in: PlugIn) -> None:
        self._plug_in, self._failed = plug_in, False

    def sniff(self, look: Look) -> bool:
        """Whether it recognises the path; once it has failed, it is not asked again. A pipe would block it."""
        if self._failed or not (look.is_file or look.is_folder):
            return False
        try:
            with self._plug_in.guarded(TraceError, passed=(OSError,)):
                return bool(self._plug_in.value.sniff(look.path))
        except OSError:
            return False
        except TraceError as error:
            self._failed = True
            tell([f"{error} at {quoted(str(look.path))}, and recognises no file from now on"])
            return False

    def read(self, paths: Sequence[Path], options: ReadOptions) -> Job:
        """The job of the trace that it reads. The importer gets `layout` and `unit` only if they are given."""
        from tracekit.analysis.job.load import job_of
        from tracekit.collectors.importers.formats import one_error
        from tracekit.trace.canonical import Trace
        from tracekit.trace.op import OpTrace

        (path,) = paths
        stated = {name: value for name, value in options.stated.items() if name in {"layout", "unit"}}
        guarded = self._plug_in.guarded(lambda why: TraceError(f"{path}: {why}"), passed=(OSError, TracekitError))
        with one_error(path), guarded:
            trace = self._plug_in.value.read(path, **stated)
            if not isinstance(trace, Trace | OpTrace):
                raise TypeError(f"it read a {type(trace).__name__}; expected a tracekit.Trace or a tracekit.OpTrace")
        return job_of(trace, options.method or "tracekit")


@cache
def plugged_in() -> tuple[Source, ...]:
    """The sources of plug-ins; those that are left out are named on stderr."""
    fitting, problems = plug_ins("importers", frozenset(FORMATS), _is_importer)
    tell(problems)
    return tuple(_entry(name, plug_in) for name, plug_in in fitting.items())


def _entry(name: str, plug_in: PlugIn) -> Source:
    importer = _Importer(plug_in)
    return Source(
        name,
        "a recording",
        importer.sniff,
        content=Content.TRACE,
        read=importer.read,
        takes=frozenset({"layout", "unit", "method"}),
        description=printable(plug_in.value.description),
        page="extending.md",
        kinds=(facts.TABLE,),
    )


def _is_importer(value: object) -> bool:
    described = isinstance(getattr(value, "description", None), str)
    return described and all(callable(getattr(value, name, None)) for name in ("sniff", "read"))
