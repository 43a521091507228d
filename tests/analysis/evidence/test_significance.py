"""What noise can do and when a series is slow: exact descriptions, false alarms, the closed form of the error."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.evidence.significance import Episodes, episodes_of, most_telling, noise_of

SMALLEST = 0.04
STEPS = np.arange(24)


def wandering(rng: np.random.Generator, members: int, steps: int, memory: float) -> np.ndarray:
    """Unit normals, each step remembering the one before, [members, steps]."""
    walk = rng.normal(size=(members, steps))
    for step in range(1, steps):
        walk[:, step] = memory * walk[:, step - 1] + np.sqrt(1 - memory**2) * walk[:, step]
    return walk


def _share(memory: float, steps: int) -> float:
    """Variance of the mean of `steps` over that of one, summed over all pairs of them."""
    lags = np.arange(1, steps)
    return float(1 / steps + 2 / steps**2 * ((steps - lags) * memory**lags).sum())


def one_slow_at(on: np.ndarray, *, level: float = 0.4, noise: float = 0.01, seed: int = 0) -> Episodes:
    """Eight members beside their peers, the third of them slow in some steps."""
    series = noise * np.random.default_rng(seed).normal(size=(8, len(on)))
    series[2] += level * on
    return episodes_of(series, 8)


class TestWhen:
    @pytest.mark.parametrize(
        ("on", "words"),
        [
            (STEPS >= 0, (0, 0, 24)),
            (STEPS % 3 == 1, (3, 0, 24)),
            (STEPS >= 14, (0, 14, 24)),
            (STEPS < 5, (0, 0, 5)),
            (np.isin(STEPS, (4, 5, 13, 14, 19)), (0, 0, 24)),
        ],
        ids=["always", "every third", "since", "until", "bursts"],
    )
    def test_the_steps_are_found_and_described_in_the_simplest_way(self, on, words):
        found = one_slow_at(on)
        assert np.flatnonzero(found.significant(SMALLEST)).tolist() == [2]
        assert found.slow[2].tolist() == on.tolist()
        assert (found.period[2], found.since[2], found.until[2]) == words
        assert found.level[2] == pytest.approx(0.4, abs=0.01)

    def test_of_two_peers_one_is_slow_at_times_and_the_other_is_not_fast(self):
        series = 0.005 * np.random.default_rng(1).normal(size=(1, 16))
        series[0, 8:] += 0.5
        episodes = episodes_of(np.concatenate([series, -series]), 2)
        assert episodes.significant(SMALLEST).tolist() == [True, False]
        assert np.flatnonzero(episodes.slow[0]).tolist() == list(range(8, 16))

    @pytest.mark.parametrize("since", [36, 60, 72])
    def test_of_two_peers_that_both_stall_at_times_one_is_slow_since_a_step(self, since):
        """Every twentieth step of either takes up to half longer. Slow in half of the steps, neither level has most."""
        rng, found = np.random.default_rng(9), 0
        for _ in range(20):
            factor = 1 + 0.02 * np.abs(rng.normal(size=(2, 120)))
            factor += (rng.random((2, 120)) < 0.05) * 0.5 * rng.random((2, 120))
            factor[1, since:] *= 2
            beside = np.log(factor / factor[::-1])
            episodes = episodes_of(beside, 2)
            found += episodes.significant(SMALLEST).tolist() == [False, True] and abs(episodes.since[1] - since) <= 1
        assert found >= 19

    def test_of_two_peers_that_are_slow_in_turn_each_is_slow_in_its_half(self):
        """Levels of 0.3 and -0.3, within each of which steps scatter evenly by up to 0.08. Half of the steps, 20, lie
        within 0.16, which looks like a sigma of 0.17 of one level; 0.3 is 6 sigma of the scatter within (0.049).
        """
        scatter = np.random.default_rng(4).permutation(np.linspace(-0.08, 0.08, 20))
        series = np.concatenate([0.3 + scatter, -0.3 - scatter])[None]
        episodes = episodes_of(np.concatenate([series, -series]), 2)
        assert episodes.significant(SMALLEST).tolist() == [True, True]
        assert episodes.slow.tolist() == [[True] * 20 + [False] * 20, [False] * 20 + [True] * 20]
        assert episodes.level == pytest.approx([0.3, 0.3], abs=0.005)

    def test_of_two_peers_that_are_slow_in_turn_with_pauses_between_each_is_slow_in_its_steps(self):
        """Levels of 0.3, -0.3 and 0, within each of which seven steps scatter evenly by up to 0.03. Half of the steps,
        11, reach from one level to the next; 0.3 is 10 sigma of the scatter within (a median of 0.02 from its level).
        The two longest of the seven count as the third, so that tails of noise make no level: 0.03 and 0.02 as 0.01.
        """
        scatter, steps = np.tile(np.linspace(-0.03, 0.03, 7), (3, 1)), np.arange(21)
        scatter = np.random.default_rng(4).permuted(scatter, axis=1).T.ravel()
        series = (np.choose(steps % 3, (0.3, -0.3, 0.0)) + scatter)[None]
        episodes = episodes_of(np.concatenate([series, -series]), 2)
        assert episodes.significant(SMALLEST).tolist() == [True, True]
        assert episodes.slow.tolist() == [(steps % 3 == 0).tolist(), (steps % 3 == 1).tolist()]
        assert episodes.level == pytest.approx([0.3 - 0.03 / 7] * 2)

    def test_of_two_peers_that_come_close_to_each_other_between_turns_both_wander(self):
        series = 0.3 * np.sin(2 * np.pi * (np.arange(40) + 0.5) / 40)[None]
        assert not episodes_of(np.concatenate([series, -series]), 2).significant(SMALLEST).any()

    def test_one_long_step_is_the_tail_of_noise_and_no_episode(self):
        series = 0.005 * np.random.default_rng(2).normal(size=(12, 24))
        series[3, 7] = series[9, 2] = 2.0
        assert not episodes_of(series, 12).significant(SMALLEST).any()

    def test_thousands_of_steps_take_memory_in_proportion(self):
        found = one_slow_at(np.arange(20_000) >= 12_000)
        assert found.since[2] == 12_000


class TestViews:
    def test_each_member_counts_where_it_tells_most_and_every_view_is_a_test_more(self):
        """Members 2 and 5 are slow, each in another view; in the third view nobody is."""
        rng = np.random.default_rng(8)
        views = [0.01 * rng.normal(size=(8, 24)) for _ in range(3)]
        views[0][2] += 0.3
        views[1][5] += 0.2
        seen = [episodes_of(view, 8) for view in views]
        found = most_telling(seen)
        assert np.flatnonzero(found.significant(SMALLEST)).tolist() == [2, 5]
        assert found.level[[2, 5]] == pytest.approx([seen[0].level[2], seen[1].level[5]])
        assert found.needed == pytest.approx(seen[0].needed + np.log(3))

    def test_what_is_slow_in_all_kinds_counts_in_whole_where_one_kind_has_less_noise(self):
        """12 % in all, 4 % of it in forwards, which vary by a tenth of what the backwards do."""
        rng = np.random.default_rng(3)
        noise = rng.normal(size=(2, 8, 24))
        forwards, backwards = 0.001 * noise[0], 0.01 * noise[1]
        forwards[2] += np.log(1.04)
        backwards[2] += np.log(1.08)
        together, alone = episodes_of(forwards + backwards, 8), episodes_of(forwards, 8)
        assert alone.nats[2] > together.nats[2]
        found = most_telling([together, alone])
        assert found.level[2] == pytest.approx(np.log(1.04 * 1.08), abs=0.005)


class TestDrift:
    @pytest.mark.parametrize("steps", [12, 24, 120])
    @pytest.mark.parametrize(
        "rise",
        [lambda at: 0.5 * at, lambda at: np.log1p(0.5 * at), lambda at: 0.4 * (1 - np.exp(-4 * at))],
        ids=["exponential", "linear", "saturating"],
    )
    def test_a_member_that_becomes_slower_step_by_step_is_slow_and_rises(self, rise, steps):
        """Its steps are no noise, although they differ, and each is like the one before."""
        series = 0.005 * np.random.default_rng(3).normal(size=(8, steps))
        series[2] += rise(np.arange(1, steps + 1) / steps)
        found = episodes_of(series, 8)
        assert np.flatnonzero(found.significant(SMALLEST)).tolist() == [2]
        assert np.flatnonzero(found.rises).tolist() == [2]
        assert found.noise.error(steps)[2] < 0.02

    def test_a_rise_that_begins_late_is_slow_since_then(self):
        series = 0.005 * np.random.default_rng(4).normal(size=(8, 24))
        series[2] += 0.4 * np.clip((STEPS - 11) / 12, 0, 1)
        found = episodes_of(series, 8)
        assert (found.significant(SMALLEST)[2], found.rises[2]) == (True, True)
        assert 12 <= found.since[2] <= 14

    def test_a_member_that_is_slow_since_a_step_does_not_rise(self):
        assert not one_slow_at(STEPS >= 14).rises.any()


class TestChance:
    @pytest.mark.parametrize("memory", [0.0, 0.5, 0.8])
    @pytest.mark.parametrize("members", [4, 8])
    def test_workers_that_wander_name_nobody_however_large_the_walk(self, members, memory):
        """0.07 a step: in one of two such jobs some worker is 5 % slower than its peers on average."""
        rng, named = np.random.default_rng(members), 0
        for _ in range(120):
            walk = 0.07 * wandering(rng, members, 16, memory)
            named += episodes_of(walk - walk.mean(axis=0), members).significant(SMALLEST).any()
        assert named <= 2

    def test_the_more_alike_the_steps_the_less_they_prove(self):
        rng = np.random.default_rng(3)
        slow = 0.06 * (np.arange(16) == 5)[:, None]
        nats = []
        for memory in (0.0, 0.6, 0.9):
            found = [episodes_of(0.03 * wandering(rng, 16, 20, memory) + slow, 16).nats[5] for _ in range(40)]
            nats.append(np.median(found))
        assert nats[0] > 2 * nats[1] > 4 * nats[2]

    def test_the_error_of_a_level_is_what_levels_scatter_by(self):
        rng = np.random.default_rng(4)
        for memory in (0.0, 0.7):
            walks = 0.02 * wandering(rng, 4000, 30, memory)
            noise = noise_of(walks, 4000)
            assert float(np.median(noise.error(30) ** 2 - noise.spread**2)) == pytest.approx(
                float(walks.mean(axis=1).var()), rel=0.1
            )

    def test_noise_that_outlasts_its_memory_of_a_step_counts(self):
        """Half of it comes and goes over ten steps. One step hardly foretells the next, so memory alone sees a quarter
        of the variance of a mean over 128 steps; stretches of 16 steps see twice as much."""
        rng = np.random.default_rng(6)
        series = 0.01 * (rng.normal(size=(2000, 128)) + wandering(rng, 2000, 128, 0.9))
        noise, scattered = noise_of(series, 2000), float(series.mean(axis=1).var())
        remembered = noise_of(series[:, :15], 2000)  # too short for stretches
        alone = float(np.median(remembered.variance)) * _share(noise.memory, 128)
        assert alone < 0.3 * scattered
        assert 0.4 * scattered < float(np.median(noise.variance_over(128))) < 1.2 * scattered

    def test_two_members_are_no_surer_than_their_stretches(self):
        """Eight stretches of independent steps are eight witnesses for 2 x (1 - 1/2) members; one tells the level."""
        walk = np.random.default_rng(7).normal(size=(1, 64))
        assert noise_of(np.concatenate([walk, -walk]), 2).freedom == pytest.approx(7.0)

    def test_a_large_effect_in_three_steps_is_evidence_and_a_small_one_is_not(self):
        assert one_slow_at(np.ones(3, bool), level=0.4, noise=0.005).significant(SMALLEST)[2]
        assert not one_slow_at(np.ones(3, bool), level=0.05, noise=0.03).significant(SMALLEST).any()

    @pytest.mark.parametrize("slow", [1, 5, 8])
    def test_half_of_the_members_may_be_slow_and_are_no_spread_of_healthy_ones(self, slow):
        rng = np.random.default_rng(10)
        series = 0.11 * (np.arange(16) < slow)[:, None] + 0.01 * rng.normal(size=(16, 16))
        found = episodes_of(series - np.median(series, axis=0), 16)
        assert found.noise.spread < 0.01
        assert np.flatnonzero(found.significant(SMALLEST)).tolist() == list(range(slow))

    def test_two_kinds_of_members_hide_in_no_spread_of_their_own_levels(self):
        """Of eight, half is 8 % slower; of each kind, members differ by up to 1.6 %."""
        level = np.array([-0.025, -0.018, -0.015, -0.031, 0.058, 0.061, 0.049, 0.046])
        series = level[:, None] + 0.003 * np.random.default_rng(11).normal(size=(8, 16))
        assert np.flatnonzero(episodes_of(series, 8).significant(SMALLEST)).tolist() == [4, 5, 6, 7]

    def test_healthy_workers_that_differ_for_good_count_as_noise(self):
        rng = np.random.default_rng(5)
        level = 0.02 * rng.normal(size=(64, 1))
        steady = level + 0.0005 * rng.normal(size=(64, 20))
        assert not episodes_of(steady - steady.mean(axis=0), 64).significant(SMALLEST).any()
