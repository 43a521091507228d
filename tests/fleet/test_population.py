"""A fleet has the shares that were set, and a study measures them back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.population import Population, dealt, job_of_population, write_fleet
from tests.cases import case
from tests.fleet.few_jobs import study_here
from tracekit.base.errors import SelectionError
from tracekit.fleet.figures import figures_of
from tracekit.fleet.study import Study
from tracekit.synth import SlowWorker, SynthSpec, simulated_slowdown
from tracekit.trace.model import Layout

POPULATION = Population(
    jobs=30,
    layouts={(4, 2, 4): 0.5, (2, 4, 8): 0.3, (4, 4, 1): 0.2},
    straggling=0.4,
    causes={"slow-last-stage": 0.4, "sequence-length-imbalance": 0.3, "python-gc": 0.1, "slow-worker": 0.2},
    mild=0.5,
    teams={"search": 0.5, "speech": 0.5},
    weeks=2,
    hosts=32,
    on_bad_hosts=1.0,
    bad_hosts=1,
    steps=4,
    microbatches=4,
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 jobs and truth.csv."""
    folder = tmp_path_factory.mktemp("fleet") / "jobs"
    assert write_fleet(POPULATION, folder)["straggling"].sum() == 12
    return folder


@pytest.mark.slow
def test_the_shares_are_those_that_were_set(fleet: Path) -> None:
    truth = pl.read_csv(fleet / "truth.csv")
    assert dict(truth["gpus"].value_counts().iter_rows()) == {32: 15, 64: 9, 16: 6}
    assert dict(truth.filter("straggling")["cause"].value_counts().iter_rows()) == {
        "slow-last-stage": 5, "sequence-length-imbalance": 4, "python-gc": 1, "slow-worker": 2}  # fmt: skip
    assert (truth.filter(~pl.col("straggling"))["cause"] == "").sum() == 9
    assert dict(truth["team"].value_counts().iter_rows()) == {"search": 15, "speech": 15}


@pytest.mark.slow
def test_a_study_measures_them_back(fleet: Path, tmp_path: Path) -> None:
    """Each share within 1 percentage point, each total of GPU-hours within 2 %."""
    study_here(fleet, out=tmp_path)
    truth, found = pl.read_csv(fleet / "truth.csv"), figures_of(Study(tmp_path))
    assert (found.sources, found.jobs) == (30, 30)
    assert found.straggling_jobs.value == pytest.approx(0.4, abs=0.01)
    assert found.gpu_hours == pytest.approx(truth["gpu_hours"].sum(), rel=1e-9)
    assert found.lost_gpu_hours == pytest.approx(truth["lost_gpu_hours"].sum(), rel=0.02)
    by_hours = truth.filter("straggling")["gpu_hours"].sum() / truth["gpu_hours"].sum()
    assert found.straggling_hours.value == pytest.approx(by_hours, abs=0.01)
    teams = dict(found.groups["team"].select("group", "lost_gpu_hours").iter_rows())
    for team, lost in truth.group_by("team").agg(pl.col("lost_gpu_hours").sum()).iter_rows():
        assert teams[team] == pytest.approx(lost, rel=0.02)
    jobs = Study(tmp_path).read("jobs").join(truth, on="name", suffix="_true")
    assert (jobs["slowdown"] - jobs["slowdown_true"]).abs().max() < 0.005
    assert jobs["started_at"].to_list() == pytest.approx(jobs["started_at_true"].to_list())
    hit = set(truth["bad_host"]) - {""}
    named = Study(tmp_path).read("workers").filter(pl.col("part") == "compute")["host"]
    assert hit == {"node-00000"} <= set(named)


def test_the_slowdown_by_definition_is_that_worked_out_by_hand() -> None:
    """One stage, two DP ranks, one of which computes twice as long: S = (2 f) / (1.5 f) of the compute part."""
    layout = Layout(dp=2, pp=1)
    spec = SynthSpec(layout, noise=0.0, steps=2, microbatches=4, causes=(SlowWorker(dp_rank=0, pp_rank=0, factor=2.0),))
    costs = spec.costs
    compute = 4 * (costs.forward_s + costs.backward_s) + costs.optimizer_s
    rest = costs.all_gather_s + costs.reduce_scatter_s + costs.layernorm_s + costs.clip_s
    assert simulated_slowdown(spec) == pytest.approx((2 * compute + rest) / (1.5 * compute + rest))


def test_dealt_shares_are_exact_up_to_whole_jobs() -> None:
    hand = dealt({"a": 0.5, "b": 0.3, "c": 0.2}, 7, np.random.default_rng(0))
    assert sorted(hand) == list("aaaabbc")  # 3.5, 2.1, 1.4: the largest remainder goes up


def test_a_job_is_the_same_whichever_come_before() -> None:
    population = Population(jobs=3, layouts={(2, 2, 1): 1.0}, steps=3, hosts=8)
    first, again = (job_of_population(population, 2) for _ in range(2))
    assert first[1] == again[1]
    assert first[0].ops.equals(again[0].ops)


def test_a_population_that_cannot_be_is_one_clear_error() -> None:
    for settings, reason in (
        ({"straggling": 2}, "straggling is 2; expected 0 to 1"),
        ({"causes": {"bad-luck": 1}}, "unknown cause 'bad-luck'; known: slow-worker"),
        ({"teams": {}}, "teams is empty; expected shares"),
    ):
        with case(settings), pytest.raises(SelectionError, match=reason):
            Population(**settings)
    impossible = Population(jobs=1, layouts={(1, 1, 1): 1.0}, straggling=1, causes={"slow-worker": 1.0})
    with pytest.raises(SelectionError, match="cannot be made to straggle by slow-worker"):
        job_of_population(impossible, 0)
