"""Tables of the terminal at any width: no cell is cut, and notes use the whole line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tracekit.dashboards.terminal.tables import section_table
from tracekit.report.tables import Table

TABLE = Table(
    "Ranks",
    ("rank", "S alone", "sole delay", "in collectives"),
    (("12", "1.285", "5.9 ms", "6.0 ms"), ("host-with-a-long-name-7", "1.000", "", "0.00 s")),
    "One note that is longer than the table is wide, so that it has to go on below it.",
)


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(section_table(TABLE))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
def test_every_cell_is_whole_at_any_width(width: int) -> None:
    lines = printed(width)
    assert all(len(line) <= width for line in lines)
    text = "".join("".join(lines).split())
    for cell in (cell for row in TABLE.rows for cell in row):
        assert cell.replace(" ", "") in text
    assert TABLE.note.replace(" ", "") in text


def test_a_table_that_does_not_fit_is_a_list_that_names_its_figures() -> None:
    assert printed(44)[:5] == [
        " rank 12",
        "   S alone 1.285, sole delay 5.9 ms, in",
        "   collectives 6.0 ms",
        " host-with-a-long-name-7",
        "   S alone 1.000, in collectives 0.00 s",
    ]


def test_a_note_is_as_wide_as_the_terminal() -> None:
    assert printed(100)[-1] == TABLE.note
