"""Regular expressions that people type, searched in time linear in the names, whatever they are.

In: a pattern and names, both from outside. Out: which names match, or a sentence on what is wrong with the pattern. The
engine is Rust's: it has neither look-around nor backreferences, limits the size of patterns, and releases the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekit.base.text import quoted
from tracekit.base.time_limit import check_time

#: A longer pattern is no question of a person.
LONGEST_PATTERN = 200
#: Characters searched between two looks at the time, and at Ctrl-C.
_AT_ONCE = 1 << 16


def check_pattern(pattern: str, *, any_case: bool = False) -> None:
    """Raise ValueError for what is no pattern, or one too large."""
    search(pattern, ("",), any_case=any_case)


def search(pattern: str, names: Sequence[str], *, any_case: bool = False) -> list[bool]:
    """Whether `pattern` matches each name anywhere. Raises ValueError as `check_pattern`, and TimeLimitError."""
    import polars as pl  # `--help` needs none

    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{quoted(pattern, 40)} has {len(pattern):,} characters, more than {LONGEST_PATTERN}")
    matched: list[bool] = []
    for part in _some_at_once(names):
        try:
            matched += pl.Series(part, dtype=pl.String).str.contains("(?i)" * any_case + pattern).to_list()
        except pl.exceptions.ComputeError as error:
            why = str(error).partition("\n\n")[0].splitlines()[-1].rpartition("error: ")[2]
            raise ValueError(f"{quoted(pattern)} is not a regular expression: {why}") from None
        check_time()
    return matched


def _some_at_once(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names in order, about `_AT_ONCE` characters of them at a time."""
    first = characters = 0
    for number, name in enumerate(names, 1):
        characters += len(name)
        if characters >= _AT_ONCE or number == len(names):
            yield names[first:number]
            first, characters = number, 0
