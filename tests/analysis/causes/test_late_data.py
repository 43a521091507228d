"""Data that is late: by milliseconds where steps take seconds, by a share of the step where they take milliseconds."""

from __future__ import annotations

import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.analysis.causes import CauseKind
from tracekit.analysis.causes.model import Where
from tracekit.model import Layout
from tracekit.trace import Trace

STEPS = 10


def loading(usual_s: float, late_s: float, computes_s: float):
    """What is found in a job of two DP ranks, the second of which loads data for longer."""

    def lane(loads_s: float):
        done = loads_s + computes_s
        return (
            (0, "data-load", 0, None, 0.0, loads_s),
            (0, "forward-compute", 0, 0, loads_s, loads_s + computes_s / 3),
            (0, "backward-compute", 0, 0, loads_s + computes_s / 3, done),
            (0, "all-reduce", 0, None, done, max(usual_s, late_s) + computes_s + 0.001),
        )

    parts = [frame({0: lane(usual_s), 1: lane(late_s)}, [step]) for step in range(STEPS)]
    return found_in(Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="by hand"))


@pytest.mark.parametrize(
    ("late_s", "computes_s", "found"),
    [(0.004, 0.020, True), (0.001, 0.030, False), (0.012, 0.300, True), (0.004, 0.500, False)],
)
def test_recorded_loading_is_late_from_5_ms_or_a_twentieth_of_the_step_on(late_s, computes_s, found):
    """Of steps of 25, 32, 313 and 505 ms; where it is late, going without it saves it all."""
    late = [one for one in loading(0.0003, late_s, computes_s) if one.kind is CauseKind.LATE_DATA]
    assert [one.where for one in late] == [Where(dp_ranks=(1,))] * found
    assert [one.saved_s for one in late] == [pytest.approx(late_s - 0.0003)] * found
