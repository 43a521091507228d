import numpy as np
import numpy.typing as npt

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
    first: _Int32s,
    filled: _Bytes,
    place: _Int32s,
) -> bool:
    """Fill `place`, [ops], where each belongs if ops are in the order of cell, kind and seq.

    `first`: where the ops of each cell and kind begin, and where the last end, [cells x kinds + 1]. Sets the bits of
    places in `filled`; false if a seq is not below its count, or a place was filled.
    """

def put_4_bytes(values: _Int32s, place: _Int32s, ordered: _Int32s) -> None:
    """Put each value into its place, all [ops]."""

def put_8_bytes(values: _Int64s, place: _Int32s, ordered: _Int64s) -> None:
    """Likewise."""
