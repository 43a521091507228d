"""What tracekit shows of small jobs, whole, is what somebody read and approved: tests/approved/, a file per case.

After a change that is meant: `python -m tests.approved`, and read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.approved import APPROVED, CASES, fill, shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("approved").resolve()
    fill(folder)
    return folder


def test_each_approved_file_is_of_a_case() -> None:
    assert {path.stem for path in APPROVED.glob("*.txt")} == {*CASES}


@pytest.mark.parametrize("case", CASES)
def test_what_is_shown_is_what_was_approved(case: str, folder: Path) -> None:
    assert (shown(case, folder) + "\n").splitlines() == (APPROVED / f"{case}.txt").read_text("utf-8").splitlines()
