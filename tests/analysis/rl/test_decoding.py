"""Requests on engines: when they end, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracekit.analysis.rl.latency import NO_LIMIT, Engines, Requests, decode, generations, partial_generations

HALF = Engines(0.25, 0.25, np.ones(1), NO_LIMIT)


def requests(*tokens: int, step: int = 0, **columns: list[float]) -> Requests:
    """Requests of one step on engine 0, all there from the start."""
    count = len(tokens)
    turn = np.arange(count, dtype=float)
    made = Requests(
        np.full(count, step),
        np.zeros(count, dtype=int),
        np.zeros(count),
        turn,
        np.array(tokens, float),
        np.zeros(count),
    )
    return made.replace(**{name: np.array(values) for name, values in columns.items()})


def test_all_running_requests_get_a_token_in_every_decoding_step() -> None:
    assert decode(requests(2, 4, 8), HALF)[0].tolist() == [2.0, 3.5, 5.5]


def test_a_request_waits_for_a_free_slot() -> None:
    # 2 and 4 run: 2 steps of 0.75 s. 8 starts at 1.5 s; 4 and 8: 2 steps of 0.75 s, then 6 of 0.5 s.
    two_slots = Engines(0.25, 0.25, np.ones(1), 2)
    assert decode(requests(2, 4, 8), two_slots)[0].tolist() == [1.5, 3.0, 6.0]
    # The last in turn waits, not the longest.
    assert decode(requests(2, 4, 8, turn=[3.0, 1.0, 2.0]), two_slots)[0].tolist() == [4.5, 3.0, 5.5]


def test_a_tool_begins_after_half_of_the_tokens_and_decodes_nothing() -> None:
    # Alone: 2 tokens of 0.5 s, 3 s of tool, 3 tokens.
    assert decode(requests(5, tool_s=[3.0]), HALF)[0].tolist() == [1.0 + 3.0 + 1.5]
    # Beside 4 tokens: both run for 2 steps of 0.75 s, the other one alone for 2 of 0.5 s; the tool ends at 4.5 s.
    assert decode(requests(4, 4, tool_s=[3.0, 0.0]), HALF)[0].tolist() == [5.5, 2.5]


def test_a_slow_engine_takes_longer_and_a_request_starts_when_it_arrives() -> None:
    slow = Engines(0.25, 0.25, np.array([0.5]), NO_LIMIT)
    assert decode(requests(2, 4, 8), slow)[0].tolist() == [4.0, 7.0, 11.0]
    # 4 tokens alone until 1 s (2 steps), then with 4 more: 2 steps of 0.75 s, 2 of 0.5 s.
    assert decode(requests(4, 4, arrives=[0.0, 1.0]), HALF)[0].tolist() == [2.5, 3.5]


def test_what_is_left_when_the_time_is_up() -> None:
    ends, tokens, tools = decode(requests(2, 4, 8, 5, tool_s=[0.0, 0.0, 0.0, 9.0]), HALF, 2.5)
    # 4 running: 2 steps of 1.25 s; the first ends then, the last is in its tool with 3 tokens to go.
    assert ends[0] == 2.5
    assert np.isnan(ends[1:]).all()
    assert (tokens.tolist(), tools.tolist()) == ([0.0, 2.0, 6.0, 3.0], [0.0, 0.0, 0.0, 9.0])


def test_requests_are_dealt_in_turn_or_to_the_engine_with_the_fewest_tokens() -> None:
    four = requests(1, 5, 2, 4)
    assert four.dealt(2).engine.tolist() == [0, 1, 0, 1]
    assert four.dealt(2, longest_first=True).engine.tolist() == [1, 0, 0, 1]  # 5, 4, 2, 1
    assert four.balanced(2).engine.tolist() == [0, 0, 1, 1]  # 5 | 4, 2 | then 1 to the 5


def test_a_partial_generation_carries_what_is_left_into_the_next() -> None:
    steps = requests(2, 4, 8, 2, 4, 8).replace(step=np.array([0, 0, 0, 1, 1, 1]))
    assert generations(steps, HALF).tolist() == [5.5, 5.5]
    # Two of three: 4 ends at 3.5 s, 8 has 4 left. Then 4, 2 and 4: 2 steps of 1 s, 2 of 0.75 s.
    took, oldest = partial_generations(steps, HALF, 0.6)
    assert took.tolist() == [3.5, 3.5]
    assert oldest == 1
    assert partial_generations(steps, HALF, 1.0)[0].tolist() == [5.5, 5.5]


@pytest.mark.parametrize("seed", range(5))
def test_any_requests_get_their_tokens_and_no_engine_exceeds_its_slots(seed: int) -> None:
    chance = np.random.default_rng(seed)
    count, slots = 40, 5
    made = requests(*chance.integers(1, 50, count).tolist())
    made = made.replace(
        engine=chance.integers(0, 2, count),
        arrives=np.sort(chance.uniform(0, 20, count)),
        tool_s=np.where(chance.random(count) < 0.4, chance.uniform(0, 9, count), 0.0),
    )
    engines = Engines(0.1, 0.02, np.array([1.0, 0.7]), slots)
    ends, tokens, _ = decode(made, engines)
    least = made.arrives + made.tool_s + made.tokens * 0.12
    most = 0.2 / 0.7 * made.tokens.sum() + made.tool_s.sum() + 20
    assert (tokens == 0).all()
    assert (ends >= least - 1e-9).all()
    assert ends.max() <= most
    assert math.isclose(decode(made, engines, 1e9)[0].sum(), ends.sum())
