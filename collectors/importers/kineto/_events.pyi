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
def nest_spans(
    lane: npt.NDArray[np.int32],
    begin: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
    name: npt.NDArray[np.int32],
    inputs: npt.NDArray[np.int32],
    flags: npt.NDArray[np.int32],
    reason_of_call: npt.NDArray[np.uint8],
    begun: npt.NDArray[np.float64],
    ended: npt.NDArray[np.float64],
    what: npt.NDArray[np.int32],
    where: npt.NDArray[np.int32],
    around: npt.NDArray[np.int32],
    parent: npt.NDArray[np.int32],
    /,
) -> tuple[int, bytes]: ...
