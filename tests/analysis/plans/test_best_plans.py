"""The best plan against every plan of small spaces, each timed by an independent simulator."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import chain
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.analysis.plans.simulator import best_buckets, best_of_all, draw, memory_gb, step_time_s
from tests.handmade import run
from tracekit.analysis.job.best_plans import sentence
from tracekit.analysis.plans.best_plans import Bounds, SearchResult, search, space_size, step_times, timed
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.optimize import buckets_of_size, optimize
from tracekit.base.errors import SelectionError
from tracekit.base.text import seconds

#: Layers, stages and memory over that of the plan in use, of drawn spaces.
SIZES = [(6, 1, None), (6, 2, 0.85), (7, 3, 0.7), (6, 4, 1.0), (7, 4, 0.85), (5, 2, None)]


def _found(model: dict[str, Any]) -> tuple[PlanModel, SearchResult]:
    read = msgspec.convert(model, PlanModel)
    assert read.problem is None
    return read, search(read, read.memory_gb)


def _plain(plan: Any) -> dict[str, Any]:
    return msgspec.to_builtins(plan)


@pytest.mark.parametrize("seed", range(18))
def test_no_plan_of_the_space_is_faster(seed: int) -> None:
    layers, stages, memory = SIZES[seed % len(SIZES)]
    space = {
        "schedule": ["gpipe", "1f1b"],
        "microbatches": [[2, 4], [3, 8], [1, 16]][seed % 3],
        "recompute": "stages",
        "split": "free",
        "buckets": ["free", "one"][seed % 2],
    }
    model = draw(seed, layers=layers, stages=stages, memory=memory, space=space)
    if seed % 4 == 3:  # a slow worker
        model["slowness"] = [1.0 + 0.7 * (stage == 1) for stage in range(stages)]
    best_s, plans = best_of_all(model)
    read, found = _found(model)
    assert space_size(read) == plans
    assert [plan.step_time_s for plan in found.plans[:1]] == (
        [] if best_s is None else [pytest.approx(best_s, rel=1e-9)]
    )
    if best_s is not None:
        assert found.bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_above_the_step_that_it_bounds(seed: int) -> None:
    pick = random.Random(seed)
    for number in range(40):
        stages = pick.randint(1, 6)
        model = draw(1000 * seed + number, layers=stages + pick.randint(0, 4), stages=stages)
        model["slowness"] = [pick.choice((1.0, 1.0, pick.uniform(1, 2))) for _ in range(stages)]
        read = msgspec.convert(model, PlanModel)
        for schedule in dict(read.kinds):
            bounds = Bounds(read, schedule, pick.randint(1, 24), None)
            leaves, _ = bounds.leaves(sys.float_info.max, 1 << 20)
            assert len(leaves.splits) == comb(len(read.layers) - 1, stages - 1)
            steps_s = (step_times(bounds, leaves.splits) - read.optimizer_s) * (1 + 1e-12)
            assert (leaves.bound_s <= steps_s).all()
            assert bounds.least_s <= leaves.bound_s.min()


@pytest.fixture(scope="module")
def large() -> tuple[PlanModel, SearchResult]:
    """A space of 20 layers on 4 stages, and what all of it has."""
    space = {"schedule": ["1f1b", "gpipe"], "microbatches": [8, 16], "split": "free", "buckets": "free"}
    read = msgspec.convert(draw(3, layers=20, stages=4, space=space), PlanModel)
    return read, search(read, None)


@pytest.mark.parametrize("limit", [0, 1, 45, 100, 200, 400, 430, 10_000])
def test_a_search_ends_in_time_and_says_what_is_proven(
    large: tuple[PlanModel, SearchResult], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the clock takes a second, also while a kind of plan is set up, which takes 48 s."""
    read, whole = large
    looks: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: looks.append(len(looks)) or looks[-1])
    monkeypatch.setattr("tracekit.base.limits.time", clock)
    early = search(read, None, time_limit_s=limit)
    assert looks[-1] <= limit + 8
    assert 0 < early.bound_s <= whole.bound_s == whole.plans[0].step_time_s
    assert all(plan.step_time_s >= whole.bound_s for plan in early.plans)
    assert early.plans or limit < 100
    assert limit < 400 or early.bound_s > 0.8 * whole.bound_s


def test_without_time_the_plan_in_use_is_the_best_so_far(large: tuple[PlanModel, SearchResult]) -> None:
    read, whole = large
    result = optimize(read, time_limit_s=1e-9)
    (plan,) = result.plans
    assert (plan.step_time_s, plan.split) == (result.step_time_s.now, list(read.now.split))
    assert plan.bound_s <= whole.bound_s
    assert result.gap == pytest.approx(1 - plan.bound_s / plan.step_time_s)
    assert not result.nothing_to_gain
    assert "too large" in sentence(result)
    small = optimize(msgspec.structs.replace(read, memory_gb=0.1), time_limit_s=1e-9)
    assert (small.plans, small.gap, small.front) == ([], 0.0, [])
    assert small.reason == "no plan that fits was found in time; let the search last longer (--time-limit)"


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_takes_what_it_says_and_fits(seed: int) -> None:
    model = draw(seed, layers=12, stages=4, memory=(1.0, 0.8)[seed % 2])
    read, found = _found(model)
    for plan in found.plans:
        assert plan.step_time_s == pytest.approx(step_time_s(model, _plain(plan.plan)), rel=1e-9)
        assert plan.memory_gb == pytest.approx(memory_gb(model, _plain(plan.plan)), rel=1e-9)
        assert plan.memory_gb <= model["memory_gb"] * (1 + 1e-9)
    assert found.replayed <= 0.05 * space_size(read)


@pytest.mark.parametrize("seed", range(12))
def test_buckets_are_the_best_of_all_partitions(seed: int) -> None:
    layers = 8 + seed % 4
    space = {"buckets": "free"}
    model = draw(seed, layers=layers, stages=1, replicas=8, space=space)
    _, found = _found(model)
    exhaustive = {**model["now"], "buckets": [best_buckets(model, model["now"], 0)]}
    assert found.plans[0].step_time_s == pytest.approx(step_time_s(model, exhaustive), rel=1e-12)
    assert step_time_s(model, _plain(found.plans[0].plan)) == pytest.approx(found.plans[0].step_time_s, rel=1e-12)


def test_a_plan_with_any_buckets_takes_what_the_simulator_says() -> None:
    model = draw(5, layers=9, stages=3, replicas=4)
    plan = {**model["now"], "split": [4, 2, 3], "recompute": [True, False, True], "buckets": [[1, 3], [2], [2, 1]]}
    read = msgspec.convert(model, PlanModel)
    result = timed(read, msgspec.convert(plan, type(read.now)))
    assert result.step_time_s == pytest.approx(step_time_s(model, plan), rel=1e-12)
    assert result.memory_gb == pytest.approx(memory_gb(model, plan), rel=1e-12)


@pytest.mark.parametrize("memory", [None, 0.9])
def test_ten_million_plans_are_searched_to_the_end(memory: float | None) -> None:
    space = {"schedule": ["gpipe", "1f1b"], "microbatches": [8, 16], "split": "free", "buckets": "free"}
    read, found = _found(draw(2, layers=32, stages=8, memory=memory, space=space))
    assert space_size(read) == 10_518_300
    assert found.plans[0].step_time_s == found.bound_s


def test_nothing_fits() -> None:
    model = draw(3, layers=6, stages=2)
    model["memory_gb"] = 0.1
    result = optimize(msgspec.convert(model, PlanModel))
    assert result.plans == []
    assert result.reason.startswith("no plan fits into 0.1 GB; the smallest needs ")
    assert sentence(result) == f"{result.reason}; a step takes {seconds(result.step_time_s.now)} now"
    assert not result.nothing_to_gain


def test_the_best_plan_in_use_leaves_nothing_to_gain() -> None:
    model = draw(4, layers=6, stages=2, memory=1.0)
    _, found = _found(model)
    model["now"] = _plain(found.plans[0].plan)
    result = optimize(msgspec.convert(model, PlanModel))
    assert result.nothing_to_gain
    assert result.plans[0].bound_s == pytest.approx(result.step_time_s.now)
    now = seconds(result.step_time_s.now)
    assert sentence(result) == f"Nothing to gain: a step takes {now}, and no plan takes less than {now}"


def test_plans_within_the_error_of_the_replay_are_counted() -> None:
    result = optimize(msgspec.convert(draw(3, layers=6, stages=2, memory=1.0), PlanModel), error=0.03)
    first, second, third, *_ = result.plans
    assert second.step_time_s < 1.03 * first.step_time_s < third.step_time_s
    assert (second.tied, third.tied) == (True, False)
    assert "; 2 plans are within the error of the replay, 3.0%" in sentence(result)


def test_less_memory_never_makes_a_plan_faster() -> None:
    result = optimize(msgspec.convert(draw(7, layers=8, stages=4, memory=1.0), PlanModel))
    memory, times = zip(*((plan.memory_gb, plan.step_time_s) for plan in result.front), strict=True)
    assert len(memory) > 2
    assert list(memory) == sorted(memory)
    assert list(times) == sorted(times, reverse=True)


def test_without_figures_of_memory_plans_are_compared_by_time_only() -> None:
    model = draw(8, layers=5, stages=2)
    for layer in model["layers"]:
        del layer["state_gb"]
    result = optimize(msgspec.convert(model, PlanModel))
    assert result.plans[0].memory_gb is None
    assert result.front == []
    assert "by time only" in result.notes[-1]
    model["memory_gb"] = 0.1
    with pytest.raises(SelectionError, match=r"whether a plan fits into 0\.1 GB is unknown"):
        optimize(msgspec.convert(model, PlanModel))


def test_buckets_of_one_size_can_begin_with_a_small_one() -> None:
    assert buckets_of_size([5, 5, 5, 5, 0.5, 0.6], 9, 1) == (2, 2, 2)
    assert buckets_of_size([5, 5, 5], 100, 1) == (1, 2)
    assert buckets_of_size([5, 5, 5], 9, 9) == (2, 1)
    assert buckets_of_size([0.1, 0.1], 0.05, 0.05) == (1, 1)


def test_the_command_reads_the_model_file_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()
    (model,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "model.json").write_text(model)
    ran = run("optimize", "--model", tmp_path / "model.json", "--json")
    assert ran.code == 0, ran.err
    best = json.loads(ran.out)["plans"][0]
    assert best["step_time_s"] == pytest.approx(best["bound_s"])
    assert best["split"] == [3, 1]  # the last layer takes as long as two others
    settings = json.dumps(best["settings"])
    assert "--pipeline-model-parallel-layout 'Ettt|tL'" in settings


def test_settings_of_frameworks_are_the_plan() -> None:
    model = draw(1, layers=6, stages=2, replicas=4)
    result = optimize(msgspec.convert(model, PlanModel))
    best = result.plans[0]
    paste = {name: text.partition("  # ")[0] for name, text in best.settings.paste.items()}
    layout = re.search(r"layout 'E(t+)\|(t+)L'", paste["Megatron"])
    assert layout is not None
    assert [len(stage) for stage in layout.groups()] == best.split
    modules = json.loads(paste["torchtitan"].partition("module_fqns_per_model_part = ")[2])
    assert [*chain(*modules)] == ["tok_embeddings", *(f"layers.{layer}" for layer in range(6)), "norm", "output"]
    assert [sum(name.startswith("layers.") for name in stage) for stage in modules] == best.split
    runs = json.loads(paste["FSDP2"].removeprefix("for run in ").partition("[stage]")[0])
    assert [[len(run) for run in stage] for stage in runs] == best.buckets
    assert [sorted(chain(*stage)) for stage in runs] == [list(range(count)) for count in best.split]
    assert f"bucket_cap_mb={best.settings.bucket_cap_mb:g}" == paste["DDP"]


def test_one_stage_has_no_settings_of_pipelines() -> None:
    space = {"split": "free", "buckets": "one"}
    paste = optimize(msgspec.convert(draw(2, layers=3, stages=1, space=space), PlanModel)).plans[0].settings.paste
    assert paste == {"DDP": "DistributedDataParallel(model)  # 8 microbatches"}
