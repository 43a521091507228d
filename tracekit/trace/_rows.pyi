import numpy as np
import numpy.typing as npt

_Bools = npt.NDArray[np.bool_]
_Bytes = npt.NDArray[np.uint8]
_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]

def count(cell: _Int32s, rank: _Int32s, kind: _Bytes, kinds: int, rank_of_cell: _Int32s, counts: _Int32s) -> bool:
    """Count ops in `counts`, [cells x kinds]; false if a cell has two ranks, or does not exist.

    Keeps the rank in `rank_of_cell`, [cells], which starts as -1.
    """

def find_places(
    cell: _Int32s,
    kind: _Bytes,
    seq: _Int32s,
    kinds: int,
    counts: _Int32s,
    first: _Int64s,
    taken: _Bools,
    place: _Int64s,
) -> bool:
    """Fill `place`, [ops], where each belongs if ops are in the order of cell, kind and seq.

    `first`: where the ops of each cell and kind begin, [cells x kinds]. Marks places in `taken`; false if a seq is not
    below its count, or a place was taken.
    """
