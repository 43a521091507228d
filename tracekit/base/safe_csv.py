"""Tables as CSV that a spreadsheet opens without computing: names of jobs and hosts come from outside.

In: a frame. Out: text.
"""

from __future__ import annotations

import polars as pl

#: A cell that begins with one of these is a formula to a spreadsheet (OWASP, CSV injection).
_FORMULAS = r"^[=+\-@\t\r]"


def safe_csv(table: pl.DataFrame) -> str:
    """The table as CSV; text that would be taken for a formula begins with an apostrophe. Numbers stay as they are."""
    safe = table.with_columns(pl.col(pl.String).str.replace(_FORMULAS, "'$0"))
    return safe.rename({name: f"'{name}" for name in table.columns if name[:1] in "=+-@\t\r"}).write_csv()
