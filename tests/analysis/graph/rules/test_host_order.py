"""What the host of a stage waited for is read from when it requested its transfers and went on after them."""

import numpy as np

from tests.analysis.graph.rules.test_megatron import FR, FS, Built, F, Lane
from tracekit.analysis.graph.posting import RecordedLanes, with_host_order

LANES = 8


def ordered(requested, resumed):
    """Two stages, two forwards: stage 1 runs its first one at 3 s. `requested`, `resumed`: seconds, by transfer."""
    lane = Lane(2).add(0, F, 0.0).add(0, FS, 1.0, 0.5).add(0, F, 1.5).add(0, FS, 2.5, 0.5)
    built = lane.add(1, FR, 0.0, 1.5).add(1, FR, 0.0, 3.0).add(1, F, 3.0).add(1, F, 4.0).build()
    times = {op[:3]: op[4:] for op in lane.ops}
    rows = [[*times[name], requested.get(name, np.nan), resumed.get(name, np.nan)] for name in built.names]
    start, end, posted, went_on = np.repeat(np.array(rows)[:, :, None], LANES, axis=2).swapaxes(0, 1)
    structure = with_host_order(RecordedLanes(built.structure, start, end, posted=posted, resumed=went_on))
    return None if structure is None else Built(structure)


REQUESTED = {(0, FS, 0): 1.0, (0, FS, 1): 2.5, (1, FR, 0): 0.0, (1, FR, 1): 0.0}
RESUMED = {(0, FS, 0): 1.5, (0, FS, 1): 3.0, (1, FR, 0): 1.5, (1, FR, 1): 3.0}


def test_work_waits_for_all_transfers_after_which_the_host_went_on():
    """Stage 1 waits for both receives before its first forward; stage 0 for its send before its second one."""
    built = ordered(REQUESTED, RESUMED)
    assert built.waits_for(1, F, 0) == {(1, FR, 0), (1, FR, 1)}
    assert built.waits_for(0, F, 1) == {(0, F, 0), (0, FS, 0)}
    assert built.waits_for(0, FS, 1) == {(0, F, 1), (0, FS, 0)}


def test_nothing_waits_for_a_send_that_ended_before_its_receive_was_requested():
    """It was buffered."""
    built = ordered(REQUESTED | {(1, FR, 0): 2.0}, RESUMED | {(0, FS, 0): 1.25, (1, FR, 0): 2.5})
    assert built.waits_for(0, F, 1) == {(0, F, 0)}


def test_a_transfer_without_recorded_times_leaves_the_order_to_other_rules():
    assert ordered(REQUESTED, RESUMED | {(1, FR, 1): np.nan}) is None
