"""The replay kernel against an independent longest-path oracle, and its properties."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.oracle import oracle_times, random_jobs
from tracekit.analysis import replay
from tracekit.analysis.graph import build_template
from tracekit.analysis.replay import Costs, replay_lanes, replay_timeline
from tracekit.analysis.structure import Structure
from tracekit.errors import GraphError
from tracekit.model import OpKind

PATIENT = settings(deadline=None, max_examples=150)


@PATIENT
@given(random_jobs(), st.booleans())
def test_replay_equals_longest_path(job, delays):
    template = build_template([job.structure], lanes_join=True)
    costs = Costs.of_matrix(job.cost, job.delay if delays else None)
    starts, ends = oracle_times(job, delays=delays)
    timeline = replay_timeline(template, job.first_lane, costs)
    np.testing.assert_allclose(timeline.start, starts, rtol=1e-12)
    np.testing.assert_allclose(timeline.end, ends, rtol=1e-12)
    np.testing.assert_allclose(replay_lanes(template, job.first_lane, costs), ends.max(axis=0), rtol=1e-12)


@PATIENT
@given(random_jobs(), st.data())
def test_a_longer_op_never_shortens_the_step(job, data):
    template = build_template([job.structure], lanes_join=True)
    row = data.draw(st.integers(0, job.cost.shape[0] - 1))
    lane = data.draw(st.integers(0, job.cost.shape[1] - 1))
    longer = job.cost.copy()
    longer[row, lane] += data.draw(st.floats(0, 5))
    before = replay_lanes(template, job.first_lane, Costs.of_matrix(job.cost))
    assert (replay_lanes(template, job.first_lane, Costs.of_matrix(longer)) >= before).all()


@settings(deadline=None, max_examples=30)
@given(random_jobs())
def test_one_thread_and_two_give_the_same_bits(job):
    template = build_template([job.structure], lanes_join=True)
    steps = 700  # enough lanes that two threads get their own
    lanes = np.tile(np.arange(job.cost.shape[1]), steps)
    first_lane = np.concatenate([[0], np.cumsum(np.tile(job.lanes_per_step, steps))])
    costs = Costs.of_matrix(np.ascontiguousarray(job.cost[:, lanes]), np.ascontiguousarray(job.delay[:, lanes]))
    one = replay_lanes(template, first_lane, costs, threads=1)
    assert np.array_equal(one, replay_lanes(template, first_lane, costs, threads=2))


@PATIENT
@given(random_jobs())
def test_constant_costs_equal_the_same_costs_as_a_matrix(job):
    template = build_template([job.structure], lanes_join=True)
    constant = job.cost[:, 0]
    matrix = np.repeat(constant[:, None], job.cost.shape[1], axis=1)
    by_constant = replay_lanes(template, job.first_lane, Costs.of_constant(constant))
    assert np.array_equal(by_constant, replay_lanes(template, job.first_lane, Costs.of_matrix(matrix)))


@PATIENT
@given(random_jobs())
def test_a_step_replayed_as_one_merged_lane_gives_the_same_times(job):
    """The irregular form of the graph (all lanes of a step in one template) is the same graph."""
    joined = build_template([job.structure], lanes_join=True)
    expected = replay_timeline(joined, job.first_lane, Costs.of_matrix(job.cost))
    for first, width in zip(job.first_lane, job.lanes_per_step, strict=False):
        merged = build_template([job.structure] * width, lanes_join=False)
        cost = job.cost[:, first : first + width].T.reshape(-1, 1)
        actual = replay_timeline(merged, np.array([0, 1]), Costs.of_matrix(np.ascontiguousarray(cost)))
        shape = (width, job.cost.shape[0])
        np.testing.assert_allclose(actual.end.reshape(shape).T, expected.end[:, first : first + width], rtol=1e-12)


@PATIENT
@given(random_jobs())
def test_live_slots_never_collide(job):
    """A row keeps its slot until the last row that waits for it has started."""
    template = build_template([job.structure], lanes_join=True)
    group_of_row = np.empty(template.rows, int)
    group_of_row[template.order] = np.repeat(
        np.arange(len(template.first_of_group) - 1), np.diff(template.first_of_group)
    )
    last_use = group_of_row.copy()
    for row in range(template.rows):
        for before in template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]:
            last_use[before] = max(last_use[before], group_of_row[row])
    for row in range(template.rows):
        for other in range(row):
            apart = last_use[row] < group_of_row[other] or last_use[other] < group_of_row[row]
            assert apart or template.slot[row] != template.slot[other]


def test_replay_changes_none_of_its_arguments():
    structure = _chain(3)
    template = build_template([structure], lanes_join=False)
    cost, delay = np.ones((3, 2)), np.ones((3, 2))
    cost.flags.writeable = delay.flags.writeable = False
    assert replay_lanes(template, np.array([0, 1, 2]), Costs.of_matrix(cost, delay)).tolist() == [6.0, 6.0]


def test_a_cycle_is_an_error_that_names_an_op():
    structure = _chain(2)
    ring = Structure(
        **{name: getattr(structure, name) for name in ("pp_rank", "kind", "seq", "chunk", "group", "dp_key")},
        before=np.array([0, 1]),
        after=np.array([1, 0]),
    )
    with pytest.raises(GraphError, match="cycle: forward-compute 0 of stage 0"):
        build_template([ring], lanes_join=False)


def test_parts_are_whole_steps():
    first_lane = np.arange(0, 4001, 400)
    parts = replay._parts(first_lane)
    assert parts[0][0] == 0
    assert parts[-1][1] == len(first_lane) - 1
    assert all(before[1] == after[0] for before, after in pairwise(parts))


def _chain(rows):
    return Structure(
        pp_rank=np.zeros(rows, np.int16),
        kind=np.full(rows, OpKind.FORWARD_COMPUTE.code, np.uint8),
        seq=np.arange(rows, dtype=np.int32),
        chunk=np.full(rows, -1, np.int16),
        before=np.arange(rows - 1),
        after=np.arange(1, rows),
        group=np.arange(rows),
        dp_key=np.full(rows, -1),
    )
