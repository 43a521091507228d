"""Whatever one of three ranks writes, the steps of the other two are handed out whole."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.writtenrun import WrittenRun
from tests.properties import examples
from tracekit.collectors.record.wire_format import HEADER, RECORD
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.segments import RECORD_DTYPE

ROWS = 70
EDGES = [0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ranks", "number", "x"]), inner),
    max_leaves=6,
)
KINDS = ["process", "name", "group", "mesh", "pipeline", "megatron", "device-clock", "dropped", "summary", "torch", "?"]
IN_FACTS = st.tuples(st.integers(0, 500), st.binary(max_size=6))
IN_RECORDS = st.tuples(
    st.integers(0, ROWS - 1), st.sampled_from(RECORD_DTYPE.names or ()), st.sampled_from(EDGES) | st.integers(0, 100)
)


@given(
    st.lists(IN_FACTS, max_size=3),
    st.lists(st.tuples(st.sampled_from(KINDS), JSON), max_size=3),
    st.lists(IN_RECORDS, max_size=4),
    st.binary(max_size=2 * RECORD.size),
    st.booleans(),
)
@examples(60)
def test_the_other_ranks_go_on_whatever_one_writes(
    edits: list[tuple[int, bytes]],
    facts: list[tuple[str, object]],
    cells: list[tuple[int, str, int]],
    tail: bytes,
    at_once: bool,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        written = WrittenRun(Path(name), 3)
        follower = AttemptFollower(0, written.attempt_directory, 1)
        written.run(range(1, 11))
        path = written.attempt_directory / "rank-000001.facts"
        content = bytearray(path.read_bytes())
        for at, new in edits:
            content[at : at + len(new)] = new
        path.write_bytes(content)
        written.tell(1, facts)
        segment = written.segment(1)
        records = _records(segment)
        for row, column, value in cells:
            bits = 8 * RECORD_DTYPE[column].itemsize
            records[column][row % len(records)] = _fitting(value, bits, RECORD_DTYPE[column].kind == "i")
        segment.write_bytes(segment.read_bytes()[: HEADER.size] + records.tobytes() + tail)
        if not at_once:
            _look(follower)
        written.run(range(11, 21))
        _look(follower)
        assert {rank: follower.good[rank].whole for rank in (0, 2)} == {0: 20, 2: 20}
        window = follower.take(20)
        assert {rank: len(window.ranks[rank].records) for rank in (0, 2)} == {0: 2 * ROWS, 2: 2 * ROWS}


def _records(segment: Path) -> np.ndarray:
    return np.frombuffer(segment.read_bytes()[HEADER.size :], RECORD_DTYPE).copy()


def _fitting(value: int, bits: int, signed: bool) -> int:
    """The lowest bits of a number."""
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if signed and low >> (bits - 1) else low


def _look(follower: AttemptFollower) -> None:
    for notice in (*follower.update(0.0), *follower.leave_out_strangers()):
        assert "\n" not in notice.line
        assert notice.line.startswith("rank 1 ") or notice.line.startswith("rank 1:")
