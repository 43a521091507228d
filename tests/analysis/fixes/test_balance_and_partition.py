"""Dealing microbatches and splitting layers: within 1 % of an exhaustive search on small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.properties import examples
from tracekit.analysis.fixes import best_deal_of_step, deal_job, deal_step, dealt_cost, grouped_cost
from tracekit.analysis.plans.best_plans import OneLane, best_split, stage_model
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import IDEAL, mean_step_time
from tracekit.synth import Schedule, SynthSpec, synthesize
from tracekit.trace.model import Layout, OpKind


def best_load(cost: np.ndarray) -> float:
    """The smallest possible load of the busiest of two or three DP ranks, each running as many microbatches."""
    microbatches, dp_ranks = cost.shape
    flat = cost.ravel()
    everything = frozenset(range(flat.size))

    def smallest(left: frozenset, ranks: int) -> float:
        if ranks == 1:
            return float(flat[list(left)].sum())
        first = min(left)
        return min(
            max(float(flat[list(mine)].sum()), smallest(left - set(mine), ranks - 1))
            for rest in itertools.combinations(sorted(left - {first}), microbatches - 1)
            for mine in [(first, *rest)]
        )

    return smallest(everything, dp_ranks)


@pytest.mark.parametrize(("microbatches", "dp_ranks"), [(4, 2), (5, 2), (6, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_a_deal_is_within_one_percent_of_the_best(microbatches, dp_ranks, seed):
    rng = np.random.default_rng(seed)
    # Of costs that differ by much a few large ones decide; then the best deal is easy to miss.
    cost = rng.lognormal(0, (0.2, 0.5)[seed % 2], (microbatches, dp_ranks))
    dealt = cost.ravel()[best_deal_of_step(cost, deal_step(cost))]
    assert dealt.sum(axis=0).max() <= best_load(cost) * 1.01


def test_the_swap_that_helps_both_ranks_most_comes_first(monkeypatch):
    """Of 16 and 3 s, 6 for 1 s leaves 11 and 8; 10 for 1 s would leave 7 and 12."""
    monkeypatch.setattr("tracekit.analysis.fixes.SWAPS", 1)
    cost = np.array([[10.0, 1.0], [6.0, 1.0], [0.0, 1.0]])
    assert cost.ravel()[best_deal_of_step(cost, np.arange(6).reshape(3, 2))].sum(axis=0).tolist() == [11.0, 8.0]


def test_one_dp_rank_has_nobody_to_change_places_with():
    cost = np.array([[3.0], [1.0], [2.0]])
    assert best_deal_of_step(cost, deal_step(cost)).tolist() == deal_step(cost).tolist() == [[0], [2], [1]]


def test_steps_of_one_microbatch_get_those_that_are_alike_the_cheap_ones_in_the_step_that_was_cheap():
    """The longest of both steps last 5 and 4 s, then 2 and 5 s."""
    assert grouped_cost(np.array([[[1.0, 5.0], [4.0, 1.5]]])).tolist() == [[[4.0, 5.0], [1.0, 1.5]]]


def test_the_longest_microbatches_are_dealt_first_to_the_dp_rank_with_the_least_work_that_has_room():
    """7 to rank 0, 6 to 1, 3 to 1 (9), 2 to 0 (9): both have two of their three; 1 to rank 0, 1 to rank 1."""
    cost = np.array([[7.0, 1.0], [3.0, 2.0], [1.0, 6.0]])
    assert cost.ravel()[deal_step(cost)].tolist() == [[7.0, 6.0], [2.0, 3.0], [1.0, 1.0]]
    full = np.array([[9.0, 1.0], [1.0, 1.0]])
    assert full.ravel()[deal_step(full)].tolist() == [[9.0, 1.0], [1.0, 1.0]]  # rank 1 has no room for a third


@examples(25)
@given(
    microbatches=st.integers(1, 6), dp_ranks=st.integers(1, 5), steps=st.integers(1, 3), seed=st.integers(0, 2**32)
)  # fmt: skip
def test_a_deal_runs_every_microbatch_once_and_never_lengthens_the_busiest(microbatches, dp_ranks, steps, seed):
    cost = np.random.default_rng(seed).lognormal(0, 1, (microbatches, steps, dp_ranks))
    deal = deal_job(cost)
    for step in range(steps):
        assert sorted(deal[:, step].ravel()) == list(range(microbatches * dp_ranks))
        assert np.allclose(dealt_cost(cost, deal)[:, step], cost[:, step].ravel()[deal[:, step]])
    naive = np.sort(cost.transpose(1, 0, 2).reshape(steps, -1))[:, ::-1].reshape(steps, microbatches, dp_ranks)
    assert (dealt_cost(cost, deal).sum(axis=0).max(axis=1) <= naive.sum(axis=1).max(axis=1) + 1e-9).all()


def replay_of(layout: Layout, schedule: Schedule = Schedule.ONE_F_ONE_B) -> JobReplay:
    return JobReplay.from_trace(synthesize(SynthSpec(layout, schedule, microbatches=4, steps=2, noise=0.0)))


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(pp=3), Schedule.ONE_F_ONE_B),
        (Layout(dp=2, pp=4), Schedule.GPIPE),
        (Layout(pp=2, vpp=2), Schedule.INTERLEAVED),
    ],
)
def test_one_lane_replays_the_ideal_job(layout, schedule):
    replay = replay_of(layout, schedule)
    kinds = replay.graph.blocks[0].template.kind
    computes = (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE)
    ideal = [replay.durations.ideal[0][kinds == kind.code][0] for kind in computes]
    chunk_s = np.broadcast_to(np.array(ideal)[:, None, None], (2, layout.pp, layout.vpp))
    assert OneLane.of(replay).step_s(chunk_s) == pytest.approx(mean_step_time(replay, IDEAL), rel=1e-12)


@pytest.mark.parametrize("loss", [0.0, 1.5, 4.0, 9.0])
@pytest.mark.parametrize("slow_stage", [None, 0, 1])
def test_a_split_is_within_one_percent_of_the_best_of_all_splits(loss, slow_stage):
    """16 layers over 4 stages: 455 splits, all replayed."""
    lane = OneLane.of(replay_of(Layout(pp=4)))
    base = np.zeros((2, 4, 1))
    base[0], base[1] = 0.010, 0.020  # four layers a stage
    base[:, -1] += loss * base[:, :1, 0] / 4
    base[:, 0] *= 1.1  # embedding
    slowness = np.ones(4)
    if slow_stage is not None:
        slowness[slow_stage] = 1.7
    model = replace(stage_model(base, (4, 4, 4, 4)), slowness=slowness)

    def step_s(layers) -> float:
        return lane.step_s(model.chunk_s(layers) * slowness[None, :, None])

    splits = [split for split in itertools.product(range(1, 14), repeat=4) if sum(split) == 16]
    assert len(splits) == 455
    assert step_s(best_split(model, lane)) <= min(map(step_s, splits)) * 1.01


def test_the_model_of_stages_tells_layers_embedding_and_loss_apart():
    # 2 ms a layer forward; the first stage embeds for 1 ms, the last computes a loss of 6 ms.
    forward = np.array([7 * 2 + 1, 8 * 2, 9 * 2, 8 * 2 + 6]) * 1e-3
    base = np.stack([forward, 2 * forward])[:, :, None]
    model = stage_model(base, (7, 8, 9, 8))
    assert model.layer_s == pytest.approx([2e-3, 4e-3])
    assert model.extra_s[0] == pytest.approx([1e-3, 0, 0, 6e-3])
    assert model.chunk_s((7, 8, 9, 8)) == pytest.approx(base)
    assert (model.chunk_s((8, 8, 8, 8)) / model.chunk_s(model.layers))[0, :, 0] == pytest.approx(
        [17 / 15, 1, 16 / 18, 1]
    )


def test_noise_at_the_ends_is_no_embedding():
    base = np.array([1.01, 1.0, 1.0, 1.01])[None, :, None] * np.array([0.02, 0.04])[:, None, None]
    assert not stage_model(base, (4, 4, 4, 4)).extra_s.any()
