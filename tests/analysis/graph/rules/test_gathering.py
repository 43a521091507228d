"""Whether the first compute waits for the parameters of all chunks is read from the recording."""

import numpy as np
import pytest

from tracekit.analysis.graph.rules.gathering import gathers_first, with_gathers_first
from tracekit.analysis.graph.rules.megatron import build_structure
from tracekit.analysis.graph.rules.posting import RecordedLanes
from tracekit.analysis.graph.structure import LaneOps
from tracekit.model import OpKind

#: One stage, two chunks: rows in order of kind, then seq.
KINDS_OF_ROWS = (
    [OpKind.FORWARD_COMPUTE] * 2 + [OpKind.BACKWARD_COMPUTE] * 2 + [OpKind.PARAMS_ALL_GATHER] * 2 + [OpKind.OPTIMIZER]
)
ROWS = sorted(
    ((kind.code, number % 2, number % 2) for number, kind in enumerate(KINDS_OF_ROWS)), key=lambda row: (row[0], row[1])
)
KIND, SEQ, CHUNK = (np.array(column) for column in zip(*ROWS, strict=True))


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
    ops = LaneOps(
        pp_rank=np.zeros(len(KIND), np.int16),
        kind=KIND.astype(np.uint8),
        seq=SEQ.astype(np.int32),
        chunk=np.where(OpKind.OPTIMIZER.code == KIND, -1, CHUNK).astype(np.int16),
        start=start,
        end=end,
        stream_order=start,
        stages=1,
        chunks=2,
        where="test",
    )
    return RecordedLanes(
        build_structure(ops), np.repeat(start[:, None], count, axis=1), np.repeat(end[:, None], count, axis=1)
    )


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
