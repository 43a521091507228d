"""A rank that sleeps at one place of its step is one finding, whatever signatures show, and its price is the sleep.

Two DP ranks, drawn: steps, microbatches, noise, the place, how long and in which steps rank 1 sleeps, and whether the
kernel counted it.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in, recorded_s
from tests.cases import case
from tests.handmade import frame
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker
from tracekit.trace.schema import OFF_CPU

SLEEPER = Worker(1, 0)
REDUCTION_S = 0.002


def drawn(seed: int, *places: str) -> tuple[Trace, float]:
    """A job in which rank 1 sleeps at these places, in turn, and the seconds of the mean step that this takes."""
    rng = np.random.default_rng(seed)
    steps, microbatches = int(rng.choice([12, 20, 40])), int(rng.choice([1, 2, 4]))
    forward_s, noise = rng.uniform(0.002, 0.05), rng.choice([0.01, 0.03, 0.1])
    sleep_s = rng.uniform(0.5, 3) * microbatches * 3 * forward_s
    first = int(rng.integers(0, steps // 2))
    asleep = np.arange(steps) >= first
    asleep &= rng.random(steps) < rng.choice([1.0, 0.7, 0.4])
    parts = []
    for step in range(steps):
        place, lanes, ends = places[step % len(places)], {}, []
        for rank in range(2):
            slept_s = sleep_s * asleep[step] * rank
            at_s = 1e-5 + slept_s * (place == "before")
            lane = [(0, "host-delay", 0, None, 0.0, at_s)]
            for microbatch in range(microbatches):
                usual_s = forward_s * (1 + noise * rng.uniform(-1, 1, 2)) * (1, 2)
                lasts = zip(
                    ("forward-compute", "loss", "backward-compute"),
                    (usual_s[0] + slept_s / microbatches * (place == "forward"),
                     1e-5 + slept_s / microbatches * (place == "loss"), usual_s[1]), strict=True,
                )  # fmt: skip
                for kind, lasts_s in lasts:
                    lane.append((0, kind, microbatch, microbatch, at_s, at_s + lasts_s))
                    at_s += lasts_s
            lanes[rank] = lane
            ends.append(at_s)
        for rank, end_s in enumerate(ends):
            over_s = max(ends) + REDUCTION_S
            lanes[rank] += [
                (0, "all-reduce", 0, None, end_s, over_s),
                (0, "optimizer", 0, None, over_s, over_s + 0.002),
            ]
        parts.append(with_off_cpu(frame(lanes, [step]), sleep_s * asleep[step], counted=seed % 3 > 0))
    trace = Trace.from_frame(pl.concat(parts), Layout(dp=2, pp=1, world_size=2), name="sleeps")
    return trace, sleep_s * float(asleep.mean())


def with_off_cpu(ops: pl.DataFrame, slept_s: float, *, counted: bool) -> pl.DataFrame:
    if not counted:
        return ops
    off_s = pl.DataFrame({"dp_rank": [0, 1], OFF_CPU: [[1e-5], [1e-5 + slept_s]]})
    first = pl.int_range(pl.len()).over("dp_rank") == 0
    joined = ops.join(off_s, on="dp_rank", how="left", maintain_order="left")
    return joined.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU))


@pytest.mark.parametrize(
    "place", ["before", *(pytest.param(place, marks=pytest.mark.slow) for place in ("forward", "loss"))]
)
def test_a_sleep_at_one_place_is_one_finding_at_the_price_of_the_sleep(place: str) -> None:
    """Some draws are too short to tell from noise: those have no finding, never two."""
    told = 0
    for seed in range(700, 712):
        trace, truth_s = drawn(seed, place)
        causes = [cause for cause in found_in(trace) if SLEEPER in cause.where.workers]
        step_s = recorded_s(trace)
        with case((place, seed, [cause.kind for cause in causes])):
            assert len(causes) <= 1
            assert not causes or causes[0].saved_s == pytest.approx(truth_s, abs=0.05 * step_s)
        told += len(causes)
    assert told >= 8


def test_what_findings_on_one_rank_cost_adds_up_to_what_the_job_loses() -> None:
    """Rank 1 sleeps now in a forward and now before the loss: two findings share the loss, none counts it twice."""
    for seed in range(720, 732):
        trace, truth_s = drawn(seed, "forward", "loss")
        causes = [cause for cause in found_in(trace) if SLEEPER in cause.where.workers]
        step_s = recorded_s(trace)
        with case((seed, [cause.kind for cause in causes])):
            assert sum(cause.saved_s for cause in causes) <= truth_s + 0.05 * step_s
