"""Workers that are slow in turn, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.evidence.hidden_slowness import faster_minority, quiet_level, together, two_levels, usual_worker


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


class TestFasterMinority:
    """Rows are steps, columns workers: the fast ones take 1.0, the others 1.25."""

    @staticmethod
    def times(fast: list[int], workers: int) -> np.ndarray:
        return np.tile(np.where(np.isin(np.arange(workers), fast), 1.0, 1.25), (12, 1))

    @pytest.mark.parametrize(("fast", "workers"), [([1], 3), ([1], 4), ([2, 5], 8), ([0], 5)])
    def test_fewer_than_half_that_are_faster_in_all_steps(self, fast, workers):
        assert np.flatnonzero(faster_minority(self.times(fast, workers))).tolist() == fast

    @pytest.mark.parametrize(("fast", "workers"), [([], 4), ([1], 2), ([0, 1], 4), ([0, 2, 3], 4)])
    def test_half_are_no_minority(self, fast, workers):
        assert not faster_minority(self.times(fast, workers)).any()

    def test_one_that_is_fast_in_some_steps_only_is_not_of_a_faster_kind(self):
        times = self.times([], 4)
        times[6:, 1] = 1.0
        assert not faster_minority(times).any()

    def test_steps_without_ops_make_nobody_fast(self):
        times = self.times([], 4)
        times[:, 1] = 0.0
        assert not faster_minority(times).any()

    def test_a_quarter_sets_the_level_and_a_single_one_of_five_does_not(self):
        of_four, of_five = self.times([1], 4), self.times([1], 5)
        assert quiet_level(of_four, True, faster_minority(of_four)) == pytest.approx(np.ones(12))
        assert np.isnan(quiet_level(of_five, True, faster_minority(of_five))).all()


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
