import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Int32s = npt.NDArray[np.int32]

def are_identified(cell: _Int32s, rank: _Int32s, kind: _Bytes, seq: _Int32s, kinds: int, rank_of_cell: _Int32s) -> bool:
    """Whether each cell has one rank, and its ops of each kind have every seq from 0 on once.

    Keeps the rank in `rank_of_cell`, [cells], which starts as -1.
    """
