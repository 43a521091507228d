import numpy as np
import numpy.typing as npt

def scan_events(
    text: bytes,
    begin: int,
    categories: bytes,
    rows: npt.NDArray[np.int64],
    times: npt.NDArray[np.float64],
    /,
) -> tuple[int, int, int]: ...
