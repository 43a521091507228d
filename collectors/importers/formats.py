"""What importers share: checks of the user's options for a file.

In: a path and options. Out: nothing, or an error that names the file.
"""

from __future__ import annotations

from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.trace.model import TimeUnit


def refuse_options(path: Path, layout: Path | None, unit: TimeUnit | None, form: str) -> None:
    """Raise FormatError if a `layout` or a `unit` was stated for a format that has both. `form`: its name, in words."""
    if layout is not None:
        raise FormatError(f"{path}: {form} carries its layout; leave out --layout")
    refuse_unit(path, unit, form)


def refuse_unit(path: Path, unit: TimeUnit | None, form: str) -> None:
    """Raise FormatError if a `unit` is given for a format with a fixed one. `form`: the name of the format."""
    if unit is not None:
        raise FormatError(f"{path}: {form} fixes the unit of its times; leave out --unit")
