"""What to say to a command that wants another kind of path.

In: a look at a path, and what the command wants. Out: an error that names what the path is and what to type.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tracekit.base.command_line import command
from tracekit.base.look import Look
from tracekit.base.object_storage import ADDRESSES, object_url
from tracekit.base.text import listed, nearest, printable
from tracekit.sources.recognise import source_of, with_content
from tracekit.sources.search import jobs_in
from tracekit.sources.source import Content, WrongSourceError


def wrong_source(look: Look, wanted: Content) -> WrongSourceError | None:
    """The error for a path that is not `wanted`, with what it is and what to type; None if nothing is known of it.

    Raises FormatError for a folder that is too large to be searched.
    """
    if wanted in (Content.TRACE, Content.DUMPS) and not look.exists:
        return WrongSourceError(look, None, _nearest(look.path))
    if with_content(wanted, look) is not None:
        return None
    source = source_of(look) or with_content(Content.OTHER, look)
    words = _folder(look, wanted) if source is None else source.instead(look, wanted)
    return None if words is None else WrongSourceError(look, source, words)


def _folder(look: Look, wanted: Content) -> str | None:
    """A folder that is no source itself; None for anything else of which nothing is known, and what cannot be read."""
    if not look.is_folder or not os.access(look.path, os.R_OK):
        return None
    if jobs := jobs_in(look.path):
        study = f"study all: `{command('fleet', 'run', look.path, '--out', 'STUDY')}`"
        return f"a folder of traces, not {wanted}; name one: `{command('whatif', jobs[0])}`, or {study}"
    if wanted is not Content.TRACE:
        return None
    return (
        "not a folder that tracekit reads; one of `tracekit collect --segments` has a run.json, one of the NCCL"
        " Inspector *.log files"
    )


def _nearest(path: Path) -> str:
    """What to type instead of a path that does not exist here: one with a similar name, if there is one."""
    if object_url(path) is not None:
        return f"in object storage: `{command('fleet', 'run')}` reads traces there, --store a store; else copy it here"
    folder = path.parent
    names = [entry.name for entry in os.scandir(folder)] if os.access(folder, os.R_OK) and folder.is_dir() else []
    similar = nearest(path.name, names)
    meant = f"; did you mean {printable(str(folder / similar))}?" if similar else ""
    if re.match(r"[a-z][\w+.-]+:/", str(path)):
        meant = f"; addresses of object storage begin with {listed(ADDRESSES)}"
    return f"no such file or folder{meant}"
