"""Input and output of dependency rules: the ops of one lane, and the edges and groups among them.

Out: `LaneOps`, which `lanes` extracts from a trace, and `Structure`, which the rules build from it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints


class LaneOps(Struct, frozen=True, eq=False):
    """The ops of one lane in row order, [rows] each; `start` and `end` in seconds; `where` opens error messages.

    `stream_order`: orders the ops of a stream; their starts, or numbers in the same order. `microbatch`: of each op, if
    receives were inferred from the computes and there are no sends; None if transfers were recorded. `virtual`: the
    `virtual_stages` of the job.
    """

    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    start: Floats
    end: Floats
    stream_order: Floats
    stages: int
    virtual: Ints
    where: str
    microbatch: npt.NDArray[np.int32] | None = None


class Structure(Struct, frozen=True, eq=False):
    """Dependencies among the rows of a lane.

    `before`, `after`: edges, [edges] row numbers. `group`: rows that start their transfer together share a number,
    [rows]. `dp_key`: rows that also wait for the same op on all other DP ranks share a number, which is the same in
    every structure of the job; -1 for other rows, [rows]. `call`: sends and receives of one stage posted in one call
    share a number; -1 for other rows, [rows]; None if every transfer is a call of its own.
    """

    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    before: Ints
    after: Ints
    group: Ints
    dp_key: Ints
    call: Ints | None = None
