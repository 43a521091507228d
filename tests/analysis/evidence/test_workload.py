"""Which places in the step are slow, and whether microbatches are like those before them."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.evidence.compute_profile import position_factor, remembers

#: [kinds, stages, chunks, microbatches, steps, dp_ranks]
SHAPE = (2, 1, 1, 4, 12, 2)


def relative(**slower: float) -> np.ndarray:
    """Computes with noise of 1 %; `slower`: "p<microbatch>" on both DP ranks, "w<microbatch>" on the first only."""
    values = 1 + 0.01 * np.random.default_rng(1).standard_normal(SHAPE)
    for name, factor in slower.items():
        ranks = slice(None) if name[0] == "p" else 0
        values[:, :, :, int(name[1]), :, ranks] *= factor
    return values


def test_a_place_that_is_slow_on_all_ranks_is_slow() -> None:
    assert position_factor(relative(p0=1.3)) == pytest.approx(np.array([[1.3, 1, 1, 1]] * 2), rel=0.02)


@pytest.mark.parametrize("places", [("w1",), ("w1", "w2"), ("w0", "w3")])
def test_what_slows_some_microbatches_of_one_rank_is_not_their_place(places: tuple[str, ...]) -> None:
    """With half of them, its others must not look fast, and those of the other rank slow beside them."""
    assert (position_factor(relative(**dict.fromkeys(places, 1.5))) == 1).all()


class TestMemory:
    """Microbatches [8, 24 steps, 8 DP ranks] without a pipeline, where the speed of a machine looks like data."""

    SHAPE = (8, 24, 8)

    def test_a_speed_that_wanders_is_remembered_over_the_run_and_within_a_step(self) -> None:
        rng = np.random.default_rng(1)
        walk = rng.normal(size=(8 * 24, 8))
        for at in range(1, len(walk)):
            walk[at] = 0.9 * walk[at - 1] + np.sqrt(1 - 0.9**2) * walk[at]
        assert remembers(np.exp(0.05 * walk).reshape(24, 8, 8).transpose(1, 0, 2)) == (True, True)

    def test_lengths_are_drawn_anew_for_each_microbatch(self) -> None:
        assert remembers(np.random.default_rng(2).lognormal(0, 0.5, self.SHAPE)) == (False, False)

    def test_long_ones_that_one_rank_gets_for_some_steps_still_come_in_any_order(self) -> None:
        """In each step, a quarter of the DP ranks have the longest, another quarter the next, for three steps."""
        rng = np.random.default_rng(3)
        level = np.repeat(rng.permuted(np.tile([0.0, 0.5, 1.0, 1.5], (8, 2)), axis=1), 3, axis=0)
        assert remembers(np.exp(level + 0.2 * rng.normal(size=self.SHAPE))) == (True, False)
