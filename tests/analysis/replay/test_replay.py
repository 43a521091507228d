"""The replay kernel against an independent longest-path oracle, and its properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.oracle import oracle_times, random_jobs
from tests.properties import examples
from tracekit.analysis.graph.dependency_graph import build_coupled_template, build_templates, rendezvous_keys
from tracekit.analysis.graph.megatron import Structure
from tracekit.analysis.replay import kernel as replay
from tracekit.analysis.replay.kernel import (
    Costs,
    LanesToReplay,
    replay_lanes,
    replay_meeting_lanes,
    replay_timelines,
)
from tracekit.base.errors import GraphError
from tracekit.trace.model import OpKind

PATIENT = examples(25)


def meeting_template(structure):
    """The structure's template, its collectives joining the lanes of a step."""
    return build_templates([structure], rendezvous_keys([structure]))[0]


def replay_timeline(template, first_lane, costs):
    step = np.repeat(np.arange(len(first_lane) - 1, dtype=np.int32), np.diff(first_lane))
    return replay_timelines([LanesToReplay(template, step, first_lane, costs)], 0, meet=False)[0]


@PATIENT
@given(random_jobs(), st.booleans())
def test_replay_equals_longest_path(job, delays):
    template = meeting_template(job.structure)
    costs = Costs.of_matrix(job.cost, job.delay if delays else None)
    starts, ends = oracle_times(job, delays=delays)
    timeline = replay_timeline(template, job.first_lane, costs)
    np.testing.assert_allclose(timeline.start, starts, rtol=1e-12)
    np.testing.assert_allclose(timeline.end, ends, rtol=1e-12)
    np.testing.assert_allclose(replay_lanes(template, job.first_lane, costs), ends.max(axis=0), rtol=1e-12)


@PATIENT
@given(random_jobs(), st.data())
def test_a_longer_op_never_shortens_the_step(job, data):
    template = meeting_template(job.structure)
    row = data.draw(st.integers(0, job.cost.shape[0] - 1))
    lane = data.draw(st.integers(0, job.cost.shape[1] - 1))
    longer = job.cost.copy()
    longer[row, lane] += data.draw(st.floats(0, 5))
    before = replay_lanes(template, job.first_lane, Costs.of_matrix(job.cost))
    assert (replay_lanes(template, job.first_lane, Costs.of_matrix(longer)) >= before).all()


@examples(8)
@given(random_jobs())
def test_one_thread_and_two_give_the_same_bits(job):
    template = meeting_template(job.structure)
    steps = 700  # enough lanes that two threads get their own
    lanes = np.tile(np.arange(job.cost.shape[1]), steps)
    first_lane = np.concatenate([[0], np.cumsum(np.tile(job.lanes_per_step, steps))])
    costs = Costs.of_matrix(np.ascontiguousarray(job.cost[:, lanes]), np.ascontiguousarray(job.delay[:, lanes]))
    one = replay_lanes(template, first_lane, costs, threads=1)
    assert np.array_equal(one, replay_lanes(template, first_lane, costs, threads=2))


@PATIENT
@given(random_jobs())
def test_constant_costs_equal_the_same_costs_as_a_matrix(job):
    template = meeting_template(job.structure)
    constant = job.cost[:, 0]
    matrix = np.repeat(constant[:, None], job.cost.shape[1], axis=1)
    by_constant = replay_lanes(template, job.first_lane, Costs.of_constant(constant))
    assert np.array_equal(by_constant, replay_lanes(template, job.first_lane, Costs.of_matrix(matrix)))


@PATIENT
@given(random_jobs())
def test_a_step_replayed_as_one_merged_lane_gives_the_same_times(job):
    """The irregular form of the graph (all lanes of a step in one template) is the same graph."""
    joined = meeting_template(job.structure)
    expected = replay_timeline(joined, job.first_lane, Costs.of_matrix(job.cost))
    for first, width in zip(job.first_lane, job.lanes_per_step, strict=False):
        merged = build_coupled_template([job.structure] * width)
        cost = job.cost[:, first : first + width].T.reshape(-1, 1)
        actual = replay_timeline(merged, np.array([0, 1]), Costs.of_matrix(np.ascontiguousarray(cost)))
        shape = (width, job.cost.shape[0])
        np.testing.assert_allclose(actual.end.reshape(shape).T, expected.end[:, first : first + width], rtol=1e-12)


@PATIENT
@given(random_jobs(), st.data())
def test_lanes_of_two_templates_meet_like_lanes_of_one_graph(job, data):
    """Each step has lanes of the random structure and one lane of it with an op more at some place."""
    rows = job.cost.shape[0]
    at = data.draw(st.integers(0, rows - 1))
    longer = with_one_more_op(job.structure, before=at)
    structures = [job.structure, longer]
    templates = build_templates(structures, rendezvous_keys(structures))
    steps = np.arange(len(job.lanes_per_step), dtype=np.int32)
    extra = np.concatenate([job.cost[:, job.first_lane[:-1]], np.full((1, len(steps)), 0.5)])
    parts = [
        LanesToReplay(templates[0], np.repeat(steps, job.lanes_per_step), job.first_lane, Costs.of_matrix(job.cost)),
        LanesToReplay(templates[1], steps, np.arange(len(steps) + 1), Costs.of_matrix(extra)),
    ]
    count = len(rendezvous_keys(structures))
    ends = replay_meeting_lanes(parts, count)
    timelines = replay_timelines(parts, count, meet=True)
    for step, width in enumerate(job.lanes_per_step):
        lanes = slice(job.first_lane[step], job.first_lane[step + 1])
        graph = build_coupled_template([job.structure] * width + [longer])
        cost = np.concatenate([job.cost[:, lanes].T.ravel(), extra[:, step]]).reshape(-1, 1)
        expected = replay_timeline(graph, np.array([0, 1]), Costs.of_matrix(cost)).end[:, 0]
        regular = expected[: rows * width].reshape(width, rows)
        np.testing.assert_allclose(ends[0][lanes], regular.max(axis=1), rtol=1e-12)
        np.testing.assert_allclose(timelines[0].end[:, lanes].T, regular, rtol=1e-12)
        np.testing.assert_allclose(timelines[1].end[:, step], expected[rows * width :], rtol=1e-12)


def with_one_more_op(structure, *, before):
    """The structure with one more compute, which the row `before` waits for."""
    rows = len(structure.kind)
    return Structure(
        pp_rank=np.append(structure.pp_rank, np.int16(0)),
        kind=np.append(structure.kind, np.uint8(OpKind.CHECKPOINT.code)),
        seq=np.append(structure.seq, np.int32(0)),
        chunk=np.append(structure.chunk, np.int16(-1)),
        before=np.append(structure.before, rows),
        after=np.append(structure.after, before),
        group=np.append(structure.group, rows),
        dp_key=np.append(structure.dp_key, -1),
    )


def test_templates_that_meet_in_contradicting_orders_are_an_error():
    one, other = _gathers([0, 1]), _gathers([1, 0])
    with pytest.raises(GraphError, match="contradict"):
        build_templates([one, other], rendezvous_keys([one, other]))


@PATIENT
@given(random_jobs())
def test_live_buffers_never_collide(job):
    """A row keeps its buffer until the last row that waits for it has started."""
    template = meeting_template(job.structure)
    group_of_row = np.empty(template.rows, int)
    group_of_row[template.order] = np.repeat(
        np.arange(len(template.first_of_group) - 1), np.diff(template.first_of_group)
    )
    meets = template.rendezvous >= 0
    rounds = np.repeat(np.arange(len(template.first_of_round) - 1), np.diff(template.first_of_round))
    begin, until = np.arange(len(meets)), np.arange(len(meets))
    for number in range(len(meets)):  # all rendezvous of a round are under way together
        if meets[number]:
            peers = np.flatnonzero(meets & (rounds == rounds[number]))
            begin[number], until[number] = peers[0], peers[-1]
    last_use = until[group_of_row]
    for row in range(template.rows):
        for before in template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]:
            last_use[before] = max(last_use[before], until[group_of_row[row]])
    for row in range(template.rows):
        for other in range(row):
            apart = last_use[row] < begin[group_of_row[other]] or last_use[other] < begin[group_of_row[row]]
            assert apart or template.buffer[row] != template.buffer[other]


def test_replay_changes_none_of_its_arguments():
    structure = _chain(3)
    template = build_coupled_template([structure])
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
        build_coupled_template([ring])


def test_threads_share_whole_steps():
    assert replay._runs(np.array([400, 400, 400, 400, 400])) == [(0, 2), (2, 4), (4, 5)]
    assert replay._runs(np.array([2000, 1])) == [(0, 1), (1, 2)]


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


def _gathers(keys):
    """Two collectives, one after the other, with these keys."""
    chain = _chain(2)
    return Structure(
        **{name: getattr(chain, name) for name in ("pp_rank", "seq", "chunk", "before", "after", "group")},
        kind=np.full(2, OpKind.PARAMS_ALL_GATHER.code, np.uint8),
        dp_key=np.array(keys),
    )
