"""Files that are small and claim to be huge cost little memory and time, and end in one sentence that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import case
from tests.faults.bombs import BOMBS, MOST_BYTES
from tests.faults.test_store import ran

#: The exit codes that are not 2: a report on a hang is left out, with a line, and another one shown; a check goes on.
CODES = {"hang": 3, "hang, checked": 3, "report, checked": 3, "stray file, checked": 3, "mark": 0}
#: Seconds of a processor each.
LONG = [name for name in BOMBS if name.startswith(("gzip", "timeline", "long"))]


def outcomes_are_short(library: Path, folder: Path, names: list[str]) -> None:
    for outcome in ran(library, "bombs", folder, *names):
        with case(outcome["bomb"]):
            assert outcome["code"] == CODES.get(outcome["bomb"], 2), outcome
            assert outcome["MB"] < MOST_BYTES >> 20
            if outcome["code"] == 2 or outcome["bomb"] == "hang":
                (line,) = outcome["said"].splitlines()
                assert outcome["file"] in line
                assert len(line) < 2000
            assert "out of memory" not in outcome["said"]


@pytest.mark.slow
def test_files_without_end_are_refused(library: Path, tmp_path: Path) -> None:
    """Files of 100 GB that take no space, in traces, dumps and every place of a store."""
    outcomes_are_short(library, tmp_path, [name for name in BOMBS if name not in LONG])


@pytest.mark.nightly
def test_small_files_that_unpack_to_gigabytes_are_refused(library: Path, tmp_path: Path) -> None:
    outcomes_are_short(library, tmp_path, LONG)
