"""The latency of decoding, from when requests ran."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tracekit.analysis.rl.latency import NO_LIMIT, Engines, Ran, Requests, decode, fit, queued, started


def ran(engines: Engines, *, count: int = 60, steps: int = 3, tools: bool = False, seed: int = 1) -> Ran:
    """Requests that engines of a known latency decoded, each submitted at second 0."""
    chance = np.random.default_rng(seed)
    step = np.repeat(np.arange(steps), count)
    engine = np.tile(np.arange(count) % len(engines.speeds), steps)
    tokens = chance.integers(50, 400, len(step)).astype(float)
    tool_s = np.where(chance.random(len(step)) < 0.5, chance.uniform(0, 3, len(step)), 0.0) * tools
    made = Requests(step, engine, np.zeros(len(step)), np.arange(len(step), dtype=float), tokens, tool_s)
    ends = decode(made, engines)[0]
    start = np.zeros(len(step))
    for one in range(steps * len(engines.speeds)):  # in order, the k-th starts when the (k - slots)-th to end has
        mine = np.flatnonzero(step * len(engines.speeds) + engine == one)
        late = mine[engines.slots :]
        start[late] = np.sort(ends[mine])[: len(late)]
    return Ran(step, engine, np.zeros(len(step)), start, ends, tokens, tool_s)


@pytest.mark.parametrize("tools", [False, True])
def test_latency_and_speeds_are_found_again(tools: bool) -> None:
    truth = Engines(0.008, 0.0005, np.array([1.0, 1.0, 0.5, 1.25]), NO_LIMIT)
    found = fit(ran(truth, tools=tools), 4)
    within = {"rtol": 0.01 if tools else 1e-6}
    np.testing.assert_allclose([found.base_s, found.per_request_s], [0.008, 0.0005], **within)
    np.testing.assert_allclose(found.speeds, truth.speeds, **within)


def test_slots_are_seen_where_requests_queued() -> None:
    truth = Engines(0.008, 0.0005, np.ones(2), 7)
    known = ran(truth)
    found = fit(known, 2)
    assert found.base_s == pytest.approx(0.008)
    waited, slots = queued(known, found)
    assert slots == 7
    assert waited.sum() == 3 * 2 * (30 - 7)


def test_slots_tell_when_requests_started_whose_submission_alone_was_recorded() -> None:
    known = ran(Engines(0.008, 0.0005, np.ones(2), 7))
    submitted = msgspec.structs.replace(known, start=known.submit)
    assert started(submitted, 7).start.tolist() == known.start.tolist()
    assert started(known, 7).start.tolist() == known.start.tolist()
    assert started(known, 2).start.max() <= known.end.max()  # fewer slots than the recording had


def test_a_wait_that_no_other_request_ended_is_no_queue() -> None:
    truth = Engines(0.008, 0.0005, np.ones(2), NO_LIMIT)
    known = ran(truth)
    assert queued(known, truth) == (pytest.approx(np.zeros(180)), None)
    later = msgspec.structs.replace(known, submit=known.submit - 0.5)  # each starts half a second after submission
    assert queued(later, truth)[1] is None


def test_one_request_at_a_time_tells_the_latency_of_one() -> None:
    truth = Engines(0.01, 0.002, np.ones(1), 1)
    found = fit(ran(truth, count=5), 1)
    assert found.base_s + found.per_request_s == pytest.approx(0.012)
