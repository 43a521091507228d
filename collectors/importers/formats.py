"""What importers have in common.

In: what was said of a file. Out: an error where its format says it already.
"""

from __future__ import annotations

from pathlib import Path

from polars.exceptions import PolarsError

from tracekit.errors import FormatError
from tracekit.model import Unit

#: What reading can raise over bytes that nobody wrote so; importers say it better where they can.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, PolarsError)


def refuse_unit(path: Path, unit: Unit | None, form: str) -> None:
    """Raise FormatError where a `unit` was stated for a format that has one: `form`, in words."""
    if unit is not None:
        raise FormatError(f"{path}: {form} has its times in a unit of its own; leave out --unit")
