"""What stands out of noise: numbers by hand, milliseconds that each of four ranks is behind in parts of three steps."""

from types import SimpleNamespace

import numpy as np
import pytest

from tracekit.analysis.gpu.pace import causes_that_stand_out

STEPS, PARTS = 3, 8
#: In each of 8 parts of 3 steps, to and fro.
JITTER = np.array([0.1, -0.1, 0.05])[:, None] * np.array([1, -1] * 4)


class Behind:
    """Ranks so far behind, [ranks, steps, parts]; one op in each part of a step."""

    def __init__(self, behind):
        self._behind, self.marked_steps = behind, np.arange(STEPS)
        mesh = SimpleNamespace(ranks=np.arange(len(behind)))
        self.graph = SimpleNamespace(ops=SimpleNamespace(mesh=mesh))

    def behind(self, *_):
        return self._behind

    def part_of_step(self, _):
        return np.arange(PARTS)


def proven_parts(behind):
    """The parts of a step in which something is proven of rank 0, of a cause that covers all."""
    found = causes_that_stand_out(Behind(behind), 0, [np.ones(PARTS, np.bool_)])
    return [np.flatnonzero(one).tolist() for one in found]


def ranks(mine, others):
    return np.array([mine, *(JITTER * factor for factor in (1, -1, 0.5, -0.5, 0.2, 0.3, 0.4)[:others])])


def with_pause(step_of_stall):
    """2 ms more at part 5 of every step, and a stall of 6 ms at part 2 of one."""
    mine = JITTER.copy()
    mine[:, 5] += 2
    mine[step_of_stall, 2] += 6
    return mine


@pytest.mark.parametrize("step", range(STEPS))
def test_a_pause_at_one_place_of_every_step_is_proven_there_beside_stalls_elsewhere(step):
    found = ranks(with_pause(step), 3)
    for rank in (1, 2, 3):
        found[rank, rank % STEPS, rank] += 5
    assert proven_parts(found) == [[5]]


def test_of_two_ranks_nobody_says_which_is_usual_at_a_place():
    assert proven_parts(ranks(with_pause(0), 1)) == []


def test_what_others_do_now_and_then_is_no_place_of_ones_own():
    found = ranks(with_pause(0), 3)
    found[1, 0, 5] += 6
    found[2, 2, 5] += 5
    assert proven_parts(found) == []


def test_all_parts_count_where_the_rank_is_behind_in_all():
    assert proven_parts(ranks(JITTER + 1, 3)) == [list(range(PARTS))]


@pytest.mark.parametrize("others", [1, 3, 7])
def test_to_and_fro_proves_nothing(others):
    assert proven_parts(ranks(JITTER, others)) == []
