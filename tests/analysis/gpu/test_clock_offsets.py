"""Clocks are compared by when collectives end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.gpu.matching import Matches, measure_offsets
from tracekit.report.tables import GroupMatches


def matches(instances, ahead, synchronising=True, noise=0.0):
    """Instances as (end, ranks), ends seen by clocks that are `ahead`, seconds."""
    rng = np.random.default_rng(0)
    members = [(number, rank, end) for number, (end, ranks) in enumerate(instances) for rank in ranks]
    instance, rank = (np.array([member[at] for member in members]) for at in (0, 1))
    end = np.array([end + ahead[one] for _, one, end in members]) + rng.normal(0, noise, len(members))
    return Matches(
        row=np.arange(len(members)), instance=instance, rank=rank.astype(np.int32), start=end - 1e-4, end=end,
        synchronising=np.full(len(instances), synchronising), group_of=np.zeros(len(instances), np.int64),
        groups=(GroupMatches("g", tuple(range(len(ahead))), len(instances), {}, {}),),
    )  # fmt: skip


def test_of_two_ranks_each_is_half_of_the_difference_away():
    found = measure_offsets(matches([(1.0, (0, 1)), (2.0, (0, 1))], (0.0, 30e-6)), (0, 1))
    assert found.ahead.tolist() == pytest.approx([-15e-6, 15e-6])
    assert found.uncertainty.tolist() == pytest.approx([0, 0], abs=1e-9)
    assert found.collectives.tolist() == [2, 2]


@examples(50)
@given(st.lists(st.floats(-5e-3, 5e-3), min_size=2, max_size=8))
def test_ranks_that_share_no_group_are_compared_through_others(ahead):
    """A chain of pairs: differences of neighbours are exact, whatever they are."""
    pairs = [(float(step), (rank, rank + 1)) for step in range(3) for rank in range(len(ahead) - 1)]
    found = measure_offsets(matches(pairs, ahead), tuple(range(len(ahead))))
    assert np.diff(found.ahead) == pytest.approx(np.diff(ahead), abs=2e-4)


def test_the_stated_error_is_about_the_real_one():
    """400 ends that scatter by 10 us: the median of them is good to about 0.6 us."""
    ahead = np.array([0.0, 1e-3, -2e-3])
    found = measure_offsets(matches([(n * 1e-2, (0, 1, 2)) for n in range(400)], ahead, noise=10e-6), (0, 1, 2))
    error = (found.ahead - found.ahead.mean()) - (ahead - ahead.mean())
    assert (np.abs(error) < 5 * found.uncertainty).all()
    assert (found.uncertainty < 2e-6).all()


def test_broadcasts_say_nothing():
    found = measure_offsets(matches([(1.0, (0, 1))], (0.0, 30e-6), synchronising=False), (0, 1))
    assert found.ahead.tolist() == [0, 0]
    assert np.isnan(found.uncertainty).all()
