"""Backwards and reductions that slow each other down: plans against a simulation from event to event."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.analysis.plans.simulator import draw, reduced, splits, step_time_s
from tracekit.analysis.plans.best_plans import search, timed
from tracekit.analysis.plans.from_recording import MB, Buckets
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.stages import buckets_of_size, sizes_of

RATES = ("compute_rate", "reduce_rate")


def _contended(seed: int, kind: str) -> dict[str, Any]:
    pick = random.Random(seed)
    model = draw(seed, layers=6 + seed % 3, stages=1, replicas=4, space={"buckets": kind})
    model["reduce"] |= {"compute_rate": pick.uniform(0.3, 1), "reduce_rate": pick.uniform(0.1, 1)}
    model["reduce"] |= {"copy_per_mb_s": pick.choice((0.0, 2e-4)), "at_once": pick.choice((1, 2, 3))}
    return model


@pytest.mark.parametrize("seed", range(12))
def test_the_best_size_is_the_best_of_all_sizes(seed: int) -> None:
    model = _contended(seed, "size")
    sizes = [layer["gradient_mb"] for layer in model["layers"]]
    plans = ({**model["now"], "buckets": [list(buckets_of_size(sizes, cap, cap))]} for cap in sizes_of(sizes))
    found = search(msgspec.convert(model, PlanModel), None)
    best_s = min(step_time_s(model, plan) for plan in plans)
    assert found.plans[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert found.bound_s == found.plans[0].step_time_s


@pytest.mark.parametrize("seed", range(4))
def test_any_buckets_take_what_the_simulator_says(seed: int) -> None:
    model = _contended(seed, "fixed")
    read = msgspec.convert(model, PlanModel)
    for count in range(1, len(model["layers"]) + 1):
        for buckets in splits(len(model["layers"]), count):
            plan = {**model["now"], "buckets": [buckets]}
            result = timed(read, msgspec.convert(plan, type(read.now)))
            assert result.step_time_s == pytest.approx(step_time_s(model, plan), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_one_recording_shows_what_other_buckets_take(seed: int) -> None:
    pick = random.Random(seed)
    works = [pick.uniform(0.005, 0.02) for _ in range(12)]
    sizes = [pick.uniform(2, 12) for _ in range(12)]
    rate = pick.uniform(0.4, 0.95)
    reduce = {"fixed_s": pick.uniform(0, 2e-3), "per_mb_s": pick.uniform(5e-4, 2e-3), "compute_rate": rate}
    reduce |= {"reduce_rate": pick.uniform(0.3, 1), "copy_per_mb_s": pick.uniform(0, 4e-4), "at_once": 1 + seed % 2}
    buckets = reduced(works, sizes, list(buckets_of_size(sizes, 15, 1)), reduce)
    rows = [(each["mb"] * MB, each["alone"], each["beside"], each["ready"]) for each in buckets]
    recorded = Buckets.of(rows)
    delay_s = buckets[-1]["ready"] - sum(works)
    assert recorded.compute_rate(delay_s) == pytest.approx(rate)
    fitted = recorded.fitted(recorded.compute_rate(delay_s))
    assert fitted is not None
    until_s = recorded.computed_until(np.array(sizes), rate)
    modelled = [*np.diff(until_s, prepend=0.0)[::-1]]
    cost = {**reduce, **{name: getattr(fitted.cost, name) for name in ("fixed_s", "per_mb_s", *RATES)}}
    for cap in (5, 30, 60, 200):
        plan = list(buckets_of_size(sizes, cap, cap))
        promised, true = (reduced(work, sizes, plan, of) for work, of in ((modelled, cost), (works, reduce)))
        assert promised[-1]["end"] == pytest.approx(true[-1]["end"], rel=0.03, abs=fitted.unsure_s)
        # Of two buckets that are reduced at once, the copy of the one that ends first hides behind the other.
        copy_s = reduce["copy_per_mb_s"] * sum(sizes) * (reduce["at_once"] - 1)
        assert promised[-1]["copied"] == pytest.approx(true[-1]["copied"], abs=copy_s + 0.03 * true[-1]["copied"])


def test_two_buckets_leave_the_rate_open() -> None:
    recorded = Buckets.of([(30 * MB, 0.02, 0.04, 0.1), (10 * MB, 0.02, 0.0, 0.14)])
    fitted = recorded.fitted(0.6)
    assert fitted is not None
    assert fitted.cost.reduce_rate == pytest.approx(0.4)  # what the reduction gets, the backward loses
    assert fitted.unsure_s > 0.01


def test_reductions_of_one_size_are_not_fitted() -> None:
    assert Buckets.of([(4 * MB, 0.01, 0.0, 0.1)] * 3).fitted(1.0) is None
    assert Buckets.of([]).fitted(1.0) is None


@pytest.mark.parametrize(
    ("stages", "kind", "reason"), [(2, "one", "one stage only"), (1, "free", 'cannot be "free"'), (2, "size", "one st")]
)
def test_contention_is_searched_on_one_stage_by_size(stages: int, kind: str, reason: str) -> None:
    model = draw(1, layers=4, stages=stages, space={"buckets": kind})
    model["reduce"]["compute_rate"] = 0.5
    problem = msgspec.convert(model, PlanModel).problem
    assert problem is not None
    assert reason in problem
