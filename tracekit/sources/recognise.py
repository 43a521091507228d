"""Which source is this path?

In: a look at a path, and what a command wants. Out: the entry of the registry.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tracekit.base.look import Look
from tracekit.base.object_storage import object_url
from tracekit.sources.registry import FIRST, LAST
from tracekit.sources.source import Content, Source


def source_of(look: Look) -> Source | None:
    """The source that a path is, if tracekit shows it by itself; None for folders of jobs, and for anything else."""
    return next((entry for entry in _entries(look) if entry.content is not Content.OTHER and entry.sniff(look)), None)


def with_content(wanted: Content, look: Look) -> Source | None:
    """The first source that a path is, of those that hold what is wanted."""
    return next((entry for entry in _entries(look, wanted) if entry.content is wanted and entry.sniff(look)), None)


def is_a(content: Content, path: Path) -> bool:
    """Whether a path holds this, such as a store."""
    return with_content(content, Look(path)) is not None


def _entries(look: Look, wanted: Content = Content.TRACE) -> Iterator[Source]:
    """The entries to try; plug-ins, which read traces only, are looked for only if those before them do not recognise
    the path.
    """
    if object_url(look.path) is not None:
        yield from (entry for entry in FIRST if entry.content is Content.STORE)
        return
    yield from FIRST
    if wanted is Content.TRACE and (look.is_file or look.is_folder):
        from tracekit.sources.plug_in import plugged_in

        yield from plugged_in()
    yield from LAST
