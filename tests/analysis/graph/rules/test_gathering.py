"""What gathering waits for, and what waits for it, is read from the recording."""

import numpy as np
import pytest

from tracekit.analysis.graph.megatron import LaneOps, build_structure
from tracekit.analysis.graph.posting import (
    RecordedLanes,
    gathers_first,
    with_gathering_among_work,
    with_gathers_first,
)
from tracekit.trace.model import OpKind

#: One stage, two chunks: rows in order of kind, then seq.
KINDS_OF_ROWS = (
    [OpKind.FORWARD_COMPUTE] * 2 + [OpKind.BACKWARD_COMPUTE] * 2 + [OpKind.PARAMS_ALL_GATHER] * 2 + [OpKind.OPTIMIZER]
)
ROWS = sorted(
    ((kind.code, number % 2, number % 2) for number, kind in enumerate(KINDS_OF_ROWS)), key=lambda row: (row[0], row[1])
)
KIND, SEQ, CHUNK = (np.array(column) for column in zip(*ROWS, strict=True))


def recorded(
    kind: np.ndarray, seq: np.ndarray, chunk: np.ndarray, start: np.ndarray, end: np.ndarray, count: int, *, chunks: int
) -> RecordedLanes:
    """`count` lanes of one stage, all with these ops at these times."""
    ops = LaneOps(
        pp_rank=np.zeros(len(kind), np.int16),
        kind=kind.astype(np.uint8),
        seq=seq.astype(np.int32),
        chunk=chunk.astype(np.int16),
        start=start,
        end=end,
        stream_order=start,
        stages=1,
        virtual=np.arange(chunks).reshape(-1, 1),
        where="test",
        after_tail=np.zeros(len(kind), np.int64),
    )
    return RecordedLanes(
        build_structure(ops), np.repeat(start[:, None], count, axis=1), np.repeat(end[:, None], count, axis=1)
    )


def lanes(first_forward: float, count: int = 8) -> RecordedLanes:
    """The gathering of chunk 0 ends at 0.1 s, that of chunk 1 at 0.3 s; the first forward begins when said."""
    start = np.zeros(len(KIND))
    end = np.zeros(len(KIND))
    computes = np.flatnonzero(np.isin(KIND, (OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code)))
    order = np.argsort(KIND[computes] == OpKind.BACKWARD_COMPUTE.code, kind="stable")
    for place, row in enumerate(computes[order]):
        start[row] = first_forward + 0.1 * place
        end[row] = start[row] + 0.1
    start[OpKind.PARAMS_ALL_GATHER.code == KIND] = 0.0, 0.1
    end[OpKind.PARAMS_ALL_GATHER.code == KIND] = 0.1, 0.3
    start[OpKind.OPTIMIZER.code == KIND] = first_forward + 0.4
    end[OpKind.OPTIMIZER.code == KIND] = first_forward + 0.5
    return recorded(KIND, SEQ, np.where(OpKind.OPTIMIZER.code == KIND, -1, CHUNK), start, end, count, chunks=2)


@pytest.mark.parametrize(("first_forward", "waits"), [(0.1, False), (0.12, False), (0.3, True), (0.31, True)])
def test_the_first_forward_tells_what_it_waited_for(first_forward: float, waits: bool) -> None:
    assert gathers_first([lanes(first_forward)]) is waits


def test_too_few_ops_tell_nothing() -> None:
    assert not gathers_first([lanes(0.3, count=7)])


def test_the_first_compute_waits_for_the_parameters_of_all_chunks() -> None:
    structure = lanes(0.3).structure
    found = with_gathers_first(structure)
    forward = int(np.flatnonzero(OpKind.FORWARD_COMPUTE.code == KIND)[0])
    gathers = np.flatnonzero(OpKind.PARAMS_ALL_GATHER.code == KIND)
    edges = set(zip(found.before.tolist(), found.after.tolist(), strict=True))
    added = edges - set(zip(structure.before.tolist(), structure.after.tolist(), strict=True))
    assert added == {(int(gathers[1]), forward)}


#: A step that loads data and gathers twice before its first compute; in seconds. Of 8 lanes all are alike.
LOADED = {
    OpKind.FORWARD_COMPUTE: [(1.0, 1.1)],
    OpKind.BACKWARD_COMPUTE: [(1.1, 1.2)],
    OpKind.OPTIMIZER: [(1.2, 1.3)],
}


def edges_added(times: dict[OpKind, list[tuple[float, float]]]) -> set[tuple[str, str]]:
    """What waits for what, as `kind number`, beyond the published rules, in lanes with ops at these times."""
    named = {
        (kind.code, seq): (f"{kind} {seq}", start, end)
        for kind, spans in (times | LOADED).items()
        for seq, (start, end) in enumerate(spans)
    }
    keys = sorted(named)
    kinds, seqs = (np.array(column) for column in zip(*keys, strict=True))
    start, end = (np.array([named[key][place] for key in keys]) for place in (1, 2))
    computes = np.isin(kinds, [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code])
    alike = recorded(kinds, seqs, np.where(computes, 0, -1), start, end, 8, chunks=1)
    found = with_gathering_among_work(alike.structure, alike)
    published = set(zip(alike.structure.before.tolist(), alike.structure.after.tolist(), strict=True))
    added = set(zip(found.before.tolist(), found.after.tolist(), strict=True)) - published
    return {(named[keys[before]][0], named[keys[after]][0]) for before, after in added}


def test_gathering_waits_for_the_work_before_it() -> None:
    """The thread loads data for 0.4 s and then asks for the parameters."""
    times = {OpKind.DATA_LOAD: [(0.0, 0.4)], OpKind.PARAMS_ALL_GATHER: [(0.4, 0.9)]}
    assert edges_added(times) == {("data-load 0", "params-all-gather 0")}


def test_work_waits_for_gathering_that_blocks_its_thread() -> None:
    """A metric is gathered, for 0.4 s; then data are loaded, and the parameters gathered."""
    times = {OpKind.DATA_LOAD: [(0.4, 0.6)], OpKind.PARAMS_ALL_GATHER: [(0.0, 0.4), (0.6, 0.9)]}
    assert edges_added(times) == {
        ("params-all-gather 0", "data-load 0"),
        ("data-load 0", "params-all-gather 1"),
    }


def test_work_waits_for_gathering_between_works() -> None:
    """Host code runs, two metrics are gathered, data are loaded, and the parameters gathered."""
    times = {
        OpKind.HOST_DELAY: [(0.0, 0.2)],
        OpKind.DATA_LOAD: [(0.6, 0.8)],
        OpKind.PARAMS_ALL_GATHER: [(0.2, 0.4), (0.4, 0.6), (0.8, 0.9)],
    }
    assert edges_added(times) == {
        ("host-delay 0", "params-all-gather 0"),
        ("params-all-gather 1", "data-load 0"),
        ("data-load 0", "params-all-gather 2"),
    }


def test_work_beside_gathering_does_not_wait_for_it() -> None:
    """Gathering is asked for and goes on while data are loaded."""
    times = {OpKind.DATA_LOAD: [(0.01, 0.5)], OpKind.PARAMS_ALL_GATHER: [(0.0, 0.9)]}
    assert edges_added(times) == set()


def test_gathering_of_no_length_tells_nothing() -> None:
    times = {OpKind.DATA_LOAD: [(0.1, 0.5)], OpKind.PARAMS_ALL_GATHER: [(0.0, 0.0001)]}
    assert edges_added(times) == set()
