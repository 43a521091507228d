"""Shared checks of importers.

In: the user's options for a file. Out: an error if its format already fixes them.
"""

from __future__ import annotations

from pathlib import Path

from polars.exceptions import PolarsError

from tracekit.base.errors import FormatError
from tracekit.trace.model import Unit

#: Exceptions that damaged bytes can cause; importers raise clearer ones where they can.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, PolarsError)


def refuse_options(path: Path, layout: Path | None, unit: Unit | None, form: str) -> None:
    """Raise FormatError if a `layout` or a `unit` was stated for a format that has both. `form`: its name, in words."""
    if layout is not None:
        raise FormatError(f"{path}: {form} carries its layout; leave out --layout")
    refuse_unit(path, unit, form)


def refuse_unit(path: Path, unit: Unit | None, form: str) -> None:
    """Raise FormatError if a `unit` is given for a format with a fixed one. `form`: the name of the format."""
    if unit is not None:
        raise FormatError(f"{path}: {form} fixes the unit of its times; leave out --unit")
