import numpy as np
import numpy.typing as npt

_Bools = npt.NDArray[np.bool_]
_Bytes = npt.NDArray[np.uint8]
_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]

def mark(values: _Int32s, least: int, seen: _Bools) -> None:
    """Set `seen[value - least]` for each of the values."""

def look_up(values: _Int32s, least: int, table: _Int32s, out: _Int32s) -> None:
    """Put `table[value - least]` of each of the values into `out`."""

def first_rows(cell: _Int32s, first: _Int64s) -> None:
    """Keep the first row of each cell in `first`, [cells], which starts as -1."""

def are_identified(cell: _Int32s, rank: _Int32s, kind: _Bytes, seq: _Int32s, kinds: int, rank_of_cell: _Int32s) -> bool:
    """Whether each cell has one rank, and its ops of each kind have every seq from 0 on once.

    Keeps the rank in `rank_of_cell`, [cells], which starts as -1.
    """
