"""Who left a job first, by what ranks left behind as they ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracekit.collectors.launch.hang_answers import Departure, Pulse, find_departure
from tracekit.collectors.record.wire_format import LAST_WORDS_SUFFIX, rank_stem


def leave(attempt: Path, rank: int, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps({"tracekit": content})
    (attempt / f"{rank_stem(rank)}{LAST_WORDS_SUFFIX}").write_text(text)


def pulses(ranks: int) -> dict[int, Pulse]:
    fields = dict.fromkeys(Pulse.__dataclass_fields__, 0)
    return {rank: Pulse(**(fields | {"process_id": 100 + rank})) for rank in range(ranks)}


def test_the_rank_that_left_before_others_failed_is_to_blame(tmp_path: Path) -> None:
    leave(tmp_path, 0, {"taken_ns": 5})
    leave(tmp_path, 1, {"taken_ns": 9, "error": "RuntimeError: connection closed"})
    assert find_departure(tmp_path, pulses(2), {}) == Departure(0, frozenset({1}))


@pytest.mark.parametrize(
    "damaged",
    ["", "[1, 2", "[]", '{"tracekit": []}', '{"tracekit": {"taken_ns": "soon"}}', '{"tracekit": {}}', "[" * 9999],
)
def test_damaged_last_words_are_none(tmp_path: Path, damaged: str) -> None:
    """Another rank that left and one that failed are still told."""
    leave(tmp_path, 0, {"taken_ns": 5})
    leave(tmp_path, 1, {"taken_ns": 9, "error": "RuntimeError: connection closed"})
    leave(tmp_path, 2, damaged)
    assert find_departure(tmp_path, pulses(3), {}) == Departure(0, frozenset({1}))
