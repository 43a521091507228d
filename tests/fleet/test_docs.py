"""docs/fleet.md lists every table, column and rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tracekit.fleet.study_tables import TABLES
from tracekit.fleet.tasks import Rule

TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()


@pytest.mark.parametrize("table", TABLES)
def test_the_columns_of_a_table(table: str) -> None:
    section = TEXT.split(f"#### {table}\n")[1].split("\n#### ")[0]
    named = [
        name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(named) == sorted(TABLES[table])


def test_the_rules_that_leave_jobs_out() -> None:
    section = TEXT.split("### Which jobs are left out")[1].split("\n### ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(Rule)
