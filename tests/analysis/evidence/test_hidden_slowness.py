"""Workers that are slow in turn, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.evidence.hidden_slowness import together, two_levels, usual_worker


class TestUsualWorker:
    """Each row of `values` is a step, each column a worker."""

    QUIET, SLOW = 1.0, 1.5

    def times(self, slow: np.ndarray) -> np.ndarray:
        return np.where(slow, self.SLOW, self.QUIET)

    def test_of_workers_that_are_mostly_slow_in_turn_it_is_one_that_is_not(self):
        """Of four, another one is quiet in each step, so that the usual one is always slow."""
        slow = np.arange(12)[:, None] % 4 != np.arange(4)
        assert usual_worker(self.times(slow)) == pytest.approx(np.full(12, self.QUIET))

    def test_steps_in_which_all_are_slow_do_not_change_it(self):
        slow = np.arange(12)[:, None] % 4 != np.arange(4)
        slow[[3, 8]] = True
        assert usual_worker(self.times(slow)) == pytest.approx(np.full(12, self.QUIET))

    def test_steps_that_are_slow_for_all_are_slow(self):
        slow = np.repeat(np.arange(12)[:, None] % 2 == 1, 4, axis=1)
        assert usual_worker(self.times(slow)) == pytest.approx(np.where(np.arange(12) % 2, self.SLOW, self.QUIET))

    def test_a_worker_that_is_always_fast_is_no_measure_of_the_others(self):
        slow = np.ones((12, 4), np.bool_)
        slow[:, 0] = False
        assert usual_worker(self.times(slow)) == pytest.approx(np.full(12, self.SLOW))

    def test_workers_are_slow_together_if_they_are_so_more_than_by_chance_and_half(self):
        """Two workers: never at once, at once in a quarter of the steps (as independent ones), always at once."""
        first = np.array([1, 1, 0, 0], np.bool_)
        for second, alike in (([0, 0, 1, 1], False), ([1, 0, 1, 0], False), ([1, 1, 0, 0], True)):
            assert together(np.stack([first, np.array(second, np.bool_)], axis=-1)) == alike

    def test_one_that_is_slow_at_times_beside_one_that_always_is_takes_no_turns(self):
        slow = np.ones((10, 2), np.bool_)
        slow[0, 1] = False
        assert together(slow)


class TestTwoLevels:
    def test_the_cut_is_between_the_means_of_both_levels(self):
        """Means 0.01 and 0.41."""
        low, high = [0.0, 0.01, 0.02] * 3, [0.4, 0.41, 0.42] * 2
        assert two_levels(np.array([low + high])) == pytest.approx([0.21])

    @pytest.mark.parametrize(
        "series",
        [
            np.zeros(24),
            np.linspace(0, 1, 24),
            np.r_[np.zeros(22), 0.4, 0.4],  # two steps are no level
            np.r_[np.zeros(117), 0.4, 0.4, 0.4],  # nor are three of 120
            np.r_[0.0, 0.0, 0.4, 0.4, 0.4],  # too few steps
        ],
    )
    def test_else_there_is_none(self, series):
        assert np.isnan(two_levels(series[None])).all()

    def test_noise_has_hardly_ever_two(self):
        """One in a thousand, by definition."""
        rng = np.random.default_rng(5)
        for draw in (rng.normal(size=(4000, 24)), rng.lognormal(0, 0.3, size=(4000, 24))):
            assert np.isfinite(two_levels(draw)).mean() < 1e-3
