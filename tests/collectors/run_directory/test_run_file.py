"""What others can have put into a run directory: it is read by its types, and only the run's own files go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.writtenrun import WrittenRun
from tracekit.base.errors import FormatError
from tracekit.collectors.record.wire_format import attempt_directory
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.segments import LaunchedOptions, LaunchedRun, read_run
from tracekit.collectors.run_directory.steering import current_schedule

OPTIONS = {"first_step": 1, "last_step": None, "every": 1, "length": 1}
RIGHT = {"command": ["train"], "options": OPTIONS}


def test_the_record_of_a_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RIGHT | {"started_ns": 5, "further": [1]}))
    assert read_run(tmp_path) == LaunchedRun(("train",), LaunchedOptions(1), 5)


@pytest.mark.parametrize(
    "wrong",
    [{"command": "train"}, {"command": [1]}, {"options": {"first_step": "1"}}, {"options": []},
     {"options": {"first_step": 1 << 40}}, {"started_ns": -1}, {"started_ns": "now"}, {"ended_ns": 1 << 62}],
)  # fmt: skip
def test_a_record_with_a_field_that_cannot_be_is_an_error_that_names_it(
    wrong: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RIGHT | wrong))
    with pytest.raises(FormatError, match=r"run.json: damaged"):
        read_run(tmp_path)


def test_a_schedule_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RIGHT | {"options": OPTIONS | {"every": "x"}}))
    with pytest.raises(FormatError, match="every is 'x'; expected an integer"):
        current_schedule(tmp_path)


def test_spent_segments_behind_a_link_are_not_removed(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "run", 1, per_host=1)
    written.run(range(1, 11))
    attempt, elsewhere = attempt_directory(written.directory, 0), tmp_path / "elsewhere"
    attempt.rename(elsewhere)
    attempt.symlink_to(elsewhere)
    follower = AttemptFollower(0, attempt, 1)
    follower.update(0.0)
    follower.first = 1000
    for segment in elsewhere.glob("*.open"):
        segment.rename(segment.with_suffix(".ops"))
    before = {path.name for path in elsewhere.iterdir()}
    follower.remove_spent()
    assert {path.name for path in elsewhere.iterdir()} == before
    attempt.unlink()
    elsewhere.rename(attempt)
    follower.remove_spent()
    assert {path.name for path in attempt.iterdir()} < before
