"""The map behind the figures: pooling, who is where, which host costs what; and its figure, without a browser."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.properties import examples
from tracekit.dashboards.figures.charts import step_times, step_workers, worker_heatmap
from tracekit.dashboards.figures.worker_map import MOST_CELLS, WorkerMap, blocks_that_fit, level_of, pool
from tracekit.dashboards.theme import LIGHT, LOST_LEVELS
from tracekit.dashboards.words import gaps_before
from tracekit.trace.model import Worker

DP_RANKS, STAGES, STEPS = (0, 1, 3), 2, (7, 9)


def small(dropped: tuple[tuple[int, int], ...] = ()) -> WorkerMap:
    """DP ranks 0, 1 and 3 (2 was never traced) x 2 stages. Host a has DP ranks 0 and 1, host b the rest; the rank of
    worker (3,1) is unknown, and so is its host.
    """
    slowdown = {(0, 0): 1.0, (0, 1): 1.1, (1, 0): 1.3, (1, 1): 0.9, (3, 0): 1.2, (3, 1): 1.0}
    rows = [
        {
            "dp_rank": dp_rank,
            "pp_rank": stage,
            "rank": None if (dp_rank, stage) == (3, 1) else dp_rank * STAGES + stage,
            "host": None if (dp_rank, stage) == (3, 1) else "a" if dp_rank < 2 else "b",
            "slowdown": value,
            "slowdown_approx": value + 0.01,
        }
        for (dp_rank, stage), value in sorted(slowdown.items(), key=lambda item: -item[1])
    ]
    mean = np.array(list(slowdown.values()), np.float32).reshape(3, STAGES)
    per_step = np.stack([mean - 0.05, mean + 0.05])
    return WorkerMap.build(pl.DataFrame(rows), np.array(STEPS), np.array(DP_RANKS), per_step, dropped)


def one_slow(dp: int, pp: int, slow: Worker) -> WorkerMap:
    """A job in which a single worker takes three times as long."""
    slowdown = np.ones((dp, pp))
    slowdown[slow.dp_rank, slow.pp_rank] = 3
    rows = pl.DataFrame(
        {
            "dp_rank": np.repeat(np.arange(dp), pp),
            "pp_rank": np.tile(np.arange(pp), dp),
            "rank": np.arange(dp * pp),
            "host": [None] * (dp * pp),
            "slowdown": slowdown.ravel(),
            "slowdown_approx": slowdown.ravel(),
        }
    )
    return WorkerMap.build(rows, np.array([0]), np.arange(dp), slowdown[None].astype(np.float32), ())


def test_a_worker_is_called_by_rank_and_host_and_by_its_place_only_where_these_are_unknown() -> None:
    found = small()
    known, unknown = found.cell(Worker(3, 0)), found.cell(Worker(3, 1))
    assert known is not None
    assert unknown is not None
    assert (found.label(known), found.name(known)) == ("rank 6", "rank 6 on b")
    assert found.full_name(known) == "rank 6 on b (dp 3, stage 0)"
    assert {found.label(unknown), found.name(unknown), found.full_name(unknown)} == {"dp 3, stage 1"}
    assert (found.cell_of_rank(6), found.cell_of_rank(7), found.cell_of_rank(-1)) == (known, None, None)


def test_every_worker_is_found_where_it_stands() -> None:
    found = small()
    for at, dp_rank in enumerate(DP_RANKS):
        for stage in range(STAGES):
            cell = found.cell(Worker(dp_rank, stage))
            assert cell == at * STAGES + stage
            assert found.worker(cell) == Worker(dp_rank, stage)
    assert found.cell(Worker(2, 0)) is None
    assert found.cell(Worker(4, 0)) is None
    assert found.cell(Worker(1, 2)) is None
    cell = found.cell(Worker(1, 0))
    assert cell is not None
    assert found.slowdown.ravel()[cell] == 1.3
    assert (found.rank_of(cell), found.host_name(cell), found.place(cell)) == (2, "a", 1)
    assert (found.rank_of(5), found.host_name(5), found.place(5)) == (None, None, 4)


def test_the_worst_are_those_of_the_step_and_nobody_who_was_left_out_of_it() -> None:
    found = small(dropped=((9, 1), (9, 2), (8, 1)))
    assert [found.worker(cell) for cell in found.worst(None, 2)] == [Worker(1, 0), Worker(3, 0)]
    assert [found.worker(cell) for cell in found.worst(0, 2)] == [Worker(1, 0), Worker(3, 0)]
    assert [found.worker(cell) for cell in found.worst(1, 2)] == [Worker(3, 0), Worker(0, 1)]
    assert np.isnan(found.per_step[1, 1]).all()
    assert np.isnan(found.per_step).sum() == STAGES


def test_hosts_are_ranked_by_their_worst_worker_and_sum_what_each_worker_costs() -> None:
    first, second = small().host_loads()
    assert (first.name, first.workers, first.worst, first.worst_slowdown) == ("a", 4, Worker(1, 0), 1.3)
    assert first.summed == pytest.approx(0.1 / 1.1 + 0.3 / 1.3)  # 0.9 does not pay anything back
    assert (second.name, second.workers, second.worst, second.worst_slowdown) == ("b", 1, Worker(3, 0), 1.2)


@examples(25)
@given(
    values=arrays(
        np.float64, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(0, 5) | st.just(np.nan)
    ),
    row_block=st.integers(1, 4),
    column_block=st.integers(1, 4),
)
def test_a_pooled_cell_is_the_largest_of_its_block_and_knows_where_it_stood(
    values: np.ndarray, row_block: int, column_block: int
) -> None:
    pooled = pool(values, row_block, column_block)
    for (down, across), value in np.ndenumerate(pooled.values):
        block = values[down * row_block :, across * column_block :][:row_block, :column_block]
        if np.isnan(block).all():
            assert np.isnan(value)
        else:
            assert value == np.nanmax(block)
            assert value == values[pooled.row[down, across], pooled.column[down, across]]


def test_blocks_leave_no_more_cells_than_a_browser_draws() -> None:
    for rows, columns in ((1, 1), (16, 512), (64, 1024), (1, 1_000_000), (2000, 2000)):
        down, across = blocks_that_fit(rows, columns)
        left = -(-rows // down) * -(-columns // across)
        assert left <= MOST_CELLS + max(rows, columns)
        assert (down, across) == (1, 1) or rows * columns > MOST_CELLS


def test_one_slow_worker_of_65536_is_on_the_map_with_its_name_and_a_ring() -> None:
    slow = Worker(700, 33)
    found = one_slow(1024, 64, slow)
    cell = found.cell(slow)
    assert cell is not None
    drawn = worker_heatmap(found, None, LIGHT, marked=[cell])
    heat, ring = drawn.data
    assert heat.z.shape == (147, 64)  # 7 DP ranks in a row
    assert "rank %{customdata[2]}<br>dp %{customdata[0]}, stage %{customdata[1]}<br>" in heat.hovertemplate
    row, column = np.unravel_index(np.nanargmax(heat.z), heat.z.shape)
    assert heat.z[row, column] == pytest.approx(2 / 3)
    assert heat.customdata[row, column].tolist() == [700, 33, 700 * 64 + 33]
    assert (ring.x, ring.y) == ((column,), (row,))
    assert (heat.z > 0).sum() == 1


def test_a_small_map_outlines_cells_and_labels_dp_ranks_by_their_number() -> None:
    found = small()
    drawn = worker_heatmap(found, 1, LIGHT, marked=[2], chosen=4)
    assert [(shape.x0, shape.y0) for shape in drawn.layout.shapes] == [(-0.5, 0.5), (-0.5, 1.5)]
    assert drawn.layout.yaxis.ticktext == ("0", "1", "3")
    assert drawn.data[0].z == pytest.approx(1 - 1 / found.per_step[1])
    assert "rank" not in drawn.data[0].hovertemplate  # one of them is unknown


def test_a_dot_stands_beside_the_number_of_its_cell_and_in_the_middle_of_a_cell_without_one() -> None:
    with_numbers = worker_heatmap(small(), None, LIGHT, dotted=[1]).data[-1]
    assert -0.5 < with_numbers.x[0] - 1 < -0.25
    without = worker_heatmap(one_slow(100, 10, Worker(42, 3)), None, LIGHT, dotted=[13]).data[-1]
    assert (without.x, without.y) == ((3,), (1,))


def test_the_map_of_steps_shows_the_chosen_workers() -> None:
    found = one_slow(100, 10, Worker(42, 3))
    few = step_workers(found, found.worst(None, 5), LIGHT).data[0]
    assert few.customdata[0, 0].tolist() == [0, 42, 3, 423]  # step, DP rank, stage, rank
    assert few.z[:, 0] == pytest.approx([2 / 3, 0, 0, 0, 0])


def test_the_lowest_map_of_steps_has_room_for_the_title_of_its_axis() -> None:
    assert step_workers(small(), [0, 1], LIGHT).layout.height >= 200


def test_a_slowdown_has_one_colour_in_every_picture() -> None:
    """Whatever else is on the map: in maps of other jobs and of steps, in small maps, and as a shade."""
    assert [level_of(value) for value in (0.9, 1.02, 1.03, 1.07, 1.15, 1.42, 1.43)] == [0, 0, 1, 2, 3, 4, 5]
    for drawn in (worker_heatmap(small(), None, LIGHT).data[0], step_workers(small(), [0, 1], LIGHT).data[0]):
        assert (drawn.zmin, drawn.zmax) == (0, 0.4)
        ends = [(0.4 * share, colour) for share, colour in drawn.colorscale]
        for level, (low, high) in enumerate(pairwise((0, *LOST_LEVELS, 0.4))):
            assert ends[2 * level : 2 * level + 2] == [
                (pytest.approx(low), LIGHT.slow[level]), (pytest.approx(high), LIGHT.slow[level])]  # fmt: skip


def test_a_line_of_steps_breaks_where_steps_were_not_recorded() -> None:
    steps = [100, 101, 102, 200, 201]
    by_step = pl.DataFrame({"step": steps, "recorded_s": [1.0, 2, 3, 4, 5], "ideal_s": [1.0] * 5})
    recorded = step_times(by_step, ["", "", "", "", ""], LIGHT).data[0]
    assert recorded.x.tolist() == [0, 1, 2, 2.5, 3, 4]
    assert recorded.y.tolist() == pytest.approx([1, 2, 3, math.nan, 4, 5], nan_ok=True)
    assert [row[0] for row in recorded.customdata if row[0]] == steps


@pytest.mark.parametrize(
    ("steps", "gaps"), [([7], []), ([7, 8, 9], []), ([0, 10, 20], []), ([0, 1, 2, 5, 6], [3]), ([0, 10, 20, 500], [3])]
)
def test_a_gap_is_longer_than_the_usual_distance_of_steps(steps: list[int], gaps: list[int]) -> None:
    assert gaps_before(np.array(steps)).tolist() == gaps
