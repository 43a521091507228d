"""Experts against a simulator that shares no code: loads, prices, causes, and nobody blamed for uneven loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.analysis.experts.simulated import (
    ATTENTION,
    BASE,
    EXPERTS,
    PER_ROW,
    PER_TOKEN,
    RANKS,
    TRANSFER,
    log,
    on_ranks,
    simulate,
    varied,
)
from tests.handmade import run
from tests.kineto_files import document, event, kernel, launch, write
from tracekit.analysis.experts import loads as loads_file
from tracekit.analysis.experts.balance import MEMBERS, ExpertJob
from tracekit.analysis.experts.expert_loads import NO_LOADS, ExpertLoads
from tracekit.analysis.experts.loads import Loads, balanced_placement, loads_of_ranks
from tracekit.base.errors import FormatError

SAMPLES = Path(__file__).parents[3] / "sample_traces"
RNG = np.random.default_rng(3)
SKEW = varied(RNG.gamma(1.4, 1, (4, EXPERTS)) + 0.05)
HOT_EXPERT = varied([np.roll([5.0, *[1.0] * 7], 3 * layer) for layer in range(3)])
HOT_RANK = varied([[1, 1, 2.5, 2.5, 1, 1, 1, 1]] * 3)
ROTATING = np.array(
    [[(1 + layer / 4) * np.roll([5000, *[1000] * 7], layer + step) for layer in range(3)] for step in range(3)]
)
EVEN = np.full((3, 3, EXPERTS), 1000.0)


def even(tokens: np.ndarray) -> np.ndarray:
    """The same tokens, as many on each rank."""
    return np.broadcast_to(on_ranks(tokens).mean(axis=-1, keepdims=True), (*tokens.shape[:-1], RANKS))


def whatif(folder: Path, *options: str | Path) -> dict[str, Any]:
    ran = run("whatif", folder, "--experts", *options, "--json")
    assert ran.code == 0, ran.err
    content: dict[str, Any] = json.loads(ran.out)
    return content


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skew")
    simulate(SKEW, folder / "recording")
    log(folder / "loads.jsonl", SKEW)
    return folder


@pytest.mark.parametrize(
    ("tokens", "cause", "rank", "expert"),
    [
        (SKEW, "skew", None, None),
        (HOT_EXPERT, "hot-expert", None, 0),
        (HOT_RANK, "hot-rank", 1, None),
        (ROTATING, "rotating", None, None),
        (EVEN, None, None, None),
    ],
    ids=["skew", "hot-expert", "hot-rank", "rotating", "even"],
)
def test_the_cause_is_the_planted_one_and_its_price_that_of_the_even_job(
    tokens: np.ndarray, cause: str | None, rank: int | None, expert: int | None, tmp_path: Path
) -> None:
    """No rank is blamed; without the log, one hot expert shows as uneven loads only."""
    recorded_us = np.mean(simulate(tokens, tmp_path / "recording"))
    saved_s = (recorded_us - np.mean(simulate(even(tokens)))) * 1e-6
    content = whatif(tmp_path / "recording", "--expert-loads", log(tmp_path / "loads.jsonl", tokens))
    found = content["experts"]["causes"]
    assert [(one["cause"], one["rank"], one["expert"]) for one in found] == [(cause, rank, expert)][: cause is not None]
    assert [one["saved_s"] for one in found] == pytest.approx([saved_s][: cause is not None], rel=0.002)
    assert [one["where"]["ranks"] for one in content["causes"]] == [[]] * len(content["causes"])
    if cause:
        (first, *_) = content["causes"]
        assert first["kind"] == cause
        assert first["saved_s"] == pytest.approx(3 * saved_s, rel=0.002)
        assert content["trust"]["trustworthy"]
        assert content["answer"]["headline"]


@pytest.mark.parametrize("lists", ["all", "none"])
def test_a_slow_rank_among_uneven_loads_is_still_named(tmp_path: Path, lists: str) -> None:
    """Rank 1 computes experts three times as long as its tokens explain, which is longer than the hot rank, rank 2."""
    tokens = HOT_RANK[..., ::-1]
    simulate(tokens, tmp_path / "recording", slow=3.0, lists=lists)
    content = whatif(tmp_path / "recording", "--expert-loads", log(tmp_path / "loads.jsonl", tokens))
    assert [one["where"]["ranks"] for one in content["causes"] if one["where"]["ranks"]] == [[1]]
    assert content["trust"]["trustworthy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lists", "recorded", "why"),
    [
        ("none", (0, 1, 2, 3), "its loads were not recorded"),
        *((lists, (0, 1, 2, 3), "its loads were not recorded") for lists in ("numbers", "digits", "others", "few")),
        ("cut", (0, 1, 2, 3), "the profiler cut the lists of its loads"),
        ("all", (1, 2, 3), "not all ranks of its group were recorded"),
    ],
)
def test_without_loads_a_hot_rank_and_a_slow_gpu_are_not_told_apart(
    tmp_path: Path, lists: str, recorded: tuple[int, ...], why: str
) -> None:
    """Rank 1 gets 3,636 of 8,000 tokens in the mean, its peers 1,454: 1,918 us instead of 827 us, 132 % longer."""
    simulate(HOT_RANK, tmp_path, lists=lists)
    for rank in {*range(RANKS)} - {*recorded}:
        (tmp_path / f"rank{rank}.json").unlink()
    content = whatif(tmp_path)
    (cause,) = content["causes"]
    assert (cause["kind"], cause["where"]["ranks"], content["answer"]["culprits"]) == ("unknown-loads", [], [])
    assert cause["evidence"][0]["value"] == pytest.approx(2.32, abs=0.1)
    assert "the experts of rank 1 take 13" in cause["effect"]
    assert why in content["trust"]["reasons"][0]
    assert not content["trust"]["trustworthy"]
    ran = run("culprits", tmp_path)
    assert (ran.code, ran.out) == (5, "")
    assert why in ran.err


def test_a_gpu_that_is_slow_at_other_kernels_too_is_blamed_without_loads(tmp_path: Path) -> None:
    simulate(EVEN, tmp_path, slow=2.0, late=2.0, lists="none")
    content = whatif(tmp_path)
    assert [(one["kind"], one["where"]["ranks"]) for one in content["causes"]] == [("bad-worker", [1])]
    assert content["trust"]["trustworthy"]


@pytest.mark.parametrize("lists", ["none", "cut"])
@pytest.mark.parametrize(("tokens", "cause"), [(HOT_RANK, "hot-rank"), (HOT_EXPERT, "hot-expert")])
def test_a_log_of_loads_reaches_findings_and_headline(
    tmp_path: Path, tokens: np.ndarray, cause: str, lists: str
) -> None:
    recorded_us = np.mean(simulate(tokens, tmp_path / "recording", lists=lists))
    saved_s = 3e-6 * (recorded_us - np.mean(simulate(even(tokens))))
    content = whatif(tmp_path / "recording", "--expert-loads", log(tmp_path / "loads.jsonl", tokens))
    assert [one["kind"] for one in content["causes"]] == [cause]
    assert content["causes"][0]["saved_s"] == pytest.approx(saved_s, rel=0.01)
    assert "the heaviest rank of a layer gets" in content["answer"]["headline"]
    assert content["trust"]["trustworthy"]


def test_a_late_peer_is_no_uneven_load(tmp_path: Path) -> None:
    """Attention of rank 1 takes twice as long: 3 x 0.3 ms forward and 3 x 0.6 ms backward a step."""
    simulate(EVEN, tmp_path, late=2.0)
    (cause,) = whatif(tmp_path)["experts"]["causes"]
    assert (cause["cause"], cause["rank"]) == ("late-peer", 1)
    assert cause["saved_s"] == pytest.approx(9 * ATTENTION * 1e-6, rel=0.01)


def test_loads_and_fits_are_those_of_the_simulator(skewed: Path) -> None:
    experts = whatif(skewed / "recording")["experts"]
    assert experts["source"] == "splits"
    for layer, found in enumerate(experts["layers"]):
        tokens = on_ranks(SKEW)[:, layer]
        assert found["tokens_by_rank"] == pytest.approx(tokens.mean(axis=0).tolist())
        assert found["max_over_mean"] == pytest.approx((tokens.max(axis=1) / tokens.mean(axis=1)).mean())
        assert found["tokens_by_expert"] is None
    assert {one["phase"]: (one["base_s"], one["per_token_s"]) for one in experts["fits"]} == {
        "experts-forward": pytest.approx((BASE * 1e-6, PER_TOKEN * 1e-6), rel=1e-3),
        "experts-backward": pytest.approx((2 * BASE * 1e-6, 2 * PER_TOKEN * 1e-6), rel=1e-3),
        "dispatch": pytest.approx((TRANSFER * 1e-6, PER_ROW * 1e-6), rel=1e-3),
        "combine": pytest.approx((TRANSFER * 1e-6, PER_ROW * 1e-6), rel=1e-3),
    }


def test_plans_cost_what_the_simulator_says(skewed: Path) -> None:
    """With the placement that tracekit gives: the job runs again with those loads."""
    plans = ("balanced", "capacity=1.0", "capacity=1.25", "replicas=12")
    options = [word for plan in plans for word in ("--rebalance", plan)]
    content = whatif(skewed / "recording", "--expert-loads", skewed / "loads.jsonl", *options)
    rows = {one["plan"]: one for one in content["experts"]["rebalance"]}
    recorded_us = np.mean(simulate(SKEW))
    mean = SKEW.sum(axis=-1, keepdims=True) / EXPERTS
    loads = {
        "balanced": even(SKEW),
        "capacity=1.0": on_ranks(np.minimum(SKEW, np.ceil(mean))),
        "capacity=1.25": on_ranks(np.minimum(SKEW, np.ceil(1.25 * mean))),
    }
    placement = rows["replicas=12"]["placement"]
    copies = [[sum(expert == one for expert, _ in layer) for one in range(EXPERTS)] for layer in placement]
    moved = np.zeros((*SKEW.shape[:2], RANKS))
    for layer, pairs in enumerate(placement):
        assert sorted(rank for _, rank in pairs) == sorted([*range(RANKS)] * 3)
        for expert, rank in pairs:
            moved[:, layer, rank] += SKEW[:, layer, expert] / copies[layer][expert]
    loads["replicas=12"] = moved
    for plan, tokens in loads.items():
        saved_s = (recorded_us - np.mean(simulate(tokens))) * 1e-6
        assert rows[plan]["saved_s"] == pytest.approx(saved_s, rel=0.01), plan
    assert rows["capacity=1.0"]["dropped_share"] == pytest.approx(
        1 - np.minimum(SKEW, np.ceil(mean)).sum() / SKEW.sum()
    )


def test_bytes_and_chunks_cost_what_the_formulas_say(tmp_path: Path) -> None:
    """Even loads that grow from step to step, so that base and slope of a transfer are known.

    In k chunks, a pass takes two transfers of a k-th of the rows, and between them the longer of its experts, k times
    without tokens, and of the other transfers with a k-th of the experts.
    """
    tokens = EVEN * np.array([1.0, 1.5, 2.0])[:, None, None]
    simulate(tokens, tmp_path)
    content = whatif(tmp_path, "--rebalance", "volume=0.5", "--rebalance", "chunks")
    half, chunked = content["experts"]["rebalance"]
    rows = on_ranks(tokens)[:, 0, 0]
    assert half["saved_s"] == pytest.approx(12 * 0.5 * PER_ROW * rows.mean() * 1e-6, rel=0.01)

    def layer_us(count: int) -> float:
        each = (TRANSFER + PER_ROW * rows / count) * 2
        passes = []
        for factor in (1, 2):
            experts = factor * (count * BASE + PER_TOKEN * rows)
            one = factor * (BASE + PER_TOKEN * rows) / count
            passes.append(each + np.maximum(experts, (count - 1) * each + one))
        return float(np.sum(passes, axis=0).mean())

    best = min(range(1, 17), key=layer_us)
    assert f"chunks: {best}" in run("whatif", tmp_path, "--rebalance", "chunks").out
    assert (chunked["chunks"], best > 1) == (best, True)
    assert chunked["saved_s"] == pytest.approx(3 * (layer_us(1) - layer_us(best)) * 1e-6, rel=0.01)


@pytest.mark.slow
def test_transfers_that_never_vary_leave_an_interval(tmp_path: Path) -> None:
    """The heaviest rank always has 4,000 of 8,000 rows, so nobody can tell the base of a transfer from its slope."""
    tokens = np.array([[np.roll([2500, 500, 500, 500], layer) for layer in range(4)]] * 3, float)
    simulate(tokens, tmp_path)
    (price,) = whatif(tmp_path, "--rebalance", "balanced")["experts"]["rebalance"]
    even_us = np.mean(simulate(np.full(tokens.shape, 1000.0)))
    base_s = (np.mean(simulate(tokens)) * 1e-6) - whatif(tmp_path)["step_time_s"]["recorded"] / 3
    assert (price["step_time_s"], price["saved_s"]) == (None, None)
    assert price["low_s"] <= even_us * 1e-6 - base_s <= price["high_s"]


def test_transfers_that_never_vary_and_hardly_take_time_leave_a_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a row of them costs, 32 transfers of 5 us move the step by less than the 2 % that a point may be off."""
    monkeypatch.setattr("tests.analysis.experts.simulated.TRANSFER", 1.0)
    monkeypatch.setattr("tests.analysis.experts.simulated.PER_ROW", 0.001)
    tokens = np.array([[np.roll([2500, 500, 500, 500], layer) for layer in range(4)]] * 3, float)
    saved_s = (np.mean(simulate(tokens, tmp_path)) - np.mean(simulate(np.full(tokens.shape, 1000.0)))) * 1e-6
    experts = whatif(tmp_path, "--rebalance", "balanced")["experts"]
    (price,), (cause,) = experts["rebalance"], experts["causes"]
    assert price["saved_s"] == cause["saved_s"] == pytest.approx(saved_s, abs=price["error_s"])
    assert 0 < price["error_s"] < 0.02 * saved_s


def test_cut_lists_are_said_and_priced_by_nothing(tmp_path: Path) -> None:
    simulate(SKEW, tmp_path / "recording", lists="cut")
    options = ("--expert-loads", log(tmp_path / "loads.jsonl", SKEW), "--rebalance", "balanced")
    experts = whatif(tmp_path / "recording", *options)["experts"]
    assert (experts["cut"], experts["source"], experts["causes"]) == (True, "loads", [])
    assert experts["rebalance"][0]["saved_s"] is None
    assert experts["layers"][0]["tokens_by_rank"] == pytest.approx(on_ranks(SKEW)[:, 0].mean(axis=0).tolist())


def test_the_log_stands_in_for_lists_that_are_not_there(tmp_path: Path) -> None:
    recorded_us = np.mean(simulate(SKEW, tmp_path / "recording", lists="none"))
    options = ("--expert-loads", log(tmp_path / "loads.jsonl", SKEW), "--rebalance", "balanced")
    experts = whatif(tmp_path / "recording", *options)["experts"]
    assert (experts["cut"], experts["source"]) == (False, "loads")
    saved_s = (recorded_us - np.mean(simulate(even(SKEW)))) * 1e-6
    assert experts["rebalance"][0]["saved_s"] == pytest.approx(saved_s, rel=0.01)


def test_times_of_kernels_bound_the_price_and_name_no_cause(tmp_path: Path) -> None:
    recorded_us = np.mean(simulate(SKEW, tmp_path, lists="none"))
    content = whatif(tmp_path, "--rebalance", "balanced")
    experts, (price,) = content["experts"], content["experts"]["rebalance"]
    assert (experts["source"], experts["causes"], price["saved_s"]) == ("kernel-times", [], None)
    saved_s = (recorded_us - np.mean(simulate(even(SKEW)))) * 1e-6
    step_s = content["step_time_s"]["recorded"] / 3
    assert price["low_s"] <= step_s - saved_s <= price["high_s"]


def test_steps_of_the_log_may_count_from_another_one(tmp_path: Path) -> None:
    simulate(SKEW, tmp_path / "recording")
    experts = whatif(tmp_path / "recording", "--expert-loads", log(tmp_path / "loads.jsonl", SKEW, first=0))["experts"]
    assert experts["notes"] == ["step 0 of the loads is step 3 of the recording"]
    assert experts["layers"][1]["tokens_by_expert"] == pytest.approx(SKEW[:, 1].mean(axis=0).tolist())


@pytest.mark.parametrize(
    ("factor", "words"), [(1.25, "20.0% fewer tokens than the loads state: dropped"), (0.8, "25.0% more rows")]
)
def test_dropped_and_padded_tokens_are_said(skewed: Path, tmp_path: Path, factor: float, words: str) -> None:
    (note,) = whatif(skewed / "recording", "--expert-loads", log(tmp_path / "l.jsonl", SKEW * factor))["experts"][
        "notes"
    ]
    assert words in note


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_log_of_equal_loads_blames_no_expert(skewed: Path, tmp_path: Path, tokens: int) -> None:
    report = whatif(skewed / "recording", "--expert-loads", log(tmp_path / "l.jsonl", np.full_like(SKEW, tokens)))
    assert "more rows" in report["experts"]["notes"][0]
    assert [one["cause"] for one in report["experts"]["causes"]] == ["skew"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "no loads; expected a line per step and layer"),
        ("{", "line 1: Input data was truncated"),
        ('{"step": 3, "layer": 0, "tokens_per_expert": [NaN]}', "line 1: JSON is malformed"),
        ('{"step": 3, "layer": 0, "tokens_per_expert": [-1]}', "line 1: Expected `float` >= 0"),
        ('{"step": 3, "layer": 0}', "line 1: Object missing required field `tokens_per_expert`"),
        ('{"step": 3, "layer": 0, "tokens_per_expert": [1]}\n' * 2, "line 2: step 3 has layer 0 twice"),
        (
            '{"step": 3, "layer": 0, "tokens_per_expert": [1]}\n{"step": 4, "layer": 1, "tokens_per_expert": [1]}',
            "step 3 lacks layer 1",
        ),
        (
            '{"step": 3, "layer": 0, "tokens_per_expert": [1]}\n{"step": 3, "layer": 1, "tokens_per_expert": [1, 2]}',
            "line 2: 2 experts, the lines before have 1",
        ),
        (
            "\n".join(f'{{"step": 3, "layer": {layer}, "tokens_per_expert": [1, 2, 3, 4]}}' for layer in range(4)),
            "holds steps 3 to 3, not step 4 of the recording",
        ),
    ],
)
def test_a_damaged_log_is_one_error(skewed: Path, tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "loads.jsonl"
    path.write_text(lines)
    ran = run("whatif", skewed / "recording", "--expert-loads", path)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_blank_lines_of_a_log_are_no_loads_and_what_cannot_be_read_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log(tmp_path / "loads.jsonl", SKEW)
    whole = Loads.read(path)
    path.write_text(path.read_text().replace("\n", "\n\n \n"))
    assert np.array_equal(Loads.read(path).tokens, whole.tokens)
    monkeypatch.setattr(loads_file, "_LARGEST_FILE", 100)
    with pytest.raises(FormatError, match=r"loads\.jsonl: larger than 0 GiB; keep the steps of the recording"):
        Loads.read(path)
    with pytest.raises(FormatError, match="absent: no such file or folder"):
        Loads.read(tmp_path / "absent")


def test_one_rank_has_all_experts() -> None:
    assert balanced_placement(np.array([3.0, 1.0]), 1, 2) == [[0, 0], [1, 0]]


def test_a_plan_that_the_recording_cannot_price_says_what_it_needs(skewed: Path, tmp_path: Path) -> None:
    simulate(EVEN, tmp_path)
    for folder, plan, words in (
        (skewed / "recording", "capacity=1.25", "the tokens of each expert are not known; give --expert-loads"),
        (tmp_path, "chunks", "what transfers take without rows is not known; loads must vary"),
    ):
        (price,) = whatif(folder, "--rebalance", plan)["experts"]["rebalance"]
        assert (price["saved_s"], price["unknown"]) == (None, words)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (SKEW[..., ::-1], "these are the loads of another job"),
        (SKEW[:, :2], "2 layers of experts, the recording has 4"),
        (SKEW[..., :6], "6 experts cannot be divided among 4 ranks equally"),
    ],
)
def test_the_log_of_another_job_is_one_error(skewed: Path, tmp_path: Path, tokens: np.ndarray, words: str) -> None:
    ran = run("whatif", skewed / "recording", "--expert-loads", log(tmp_path / "loads.jsonl", tokens))
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        *((plan, "not a plan; write balanced, capacity=C") for plan in ("even", "balanced=1", "capacity=", "volume=x")),
        *((plan, "expected a number above 0, at most 1,000,000") for plan in ("capacity=0", "volume=1000001")),
        *((f"replicas={count}", "expected a whole number above 0, at most 9,999") for count in ("-4", "1.5", "10000")),
    ],
)
def test_another_plan_is_an_error(skewed: Path, plan: str, words: str) -> None:
    ran = run("whatif", skewed / "recording", "--rebalance", plan)
    assert (ran.code, ran.out) == (2, "")
    assert f"--rebalance '{plan}': {words}" in ran.err


def test_loads_for_a_job_without_experts_are_an_error(skewed: Path, tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", document([launch(10, 1), kernel("gemm_kernel", 20, 50, correlation=1)], 0, world=1))
    for job in (tmp_path / "rank0.json", SAMPLES / "healthy.parquet"):
        ran = run("whatif", job, "--expert-loads", skewed / "loads.jsonl")
        assert (ran.code, ran.out) == (2, "")
        assert "has no all-to-alls of experts; leave the loads out" in ran.err


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_loads_are_read_from_files_only(path: str) -> None:
    ran = run("experts", path, "--ranks", "2", "--replicas", "4")
    assert (ran.code, ran.err) == (
        2, f"tracekit: {path}: not a file; loads are read from a file with a line per step and layer\n"
    )  # fmt: skip


def test_a_group_with_unrecorded_ranks_has_no_loads(skewed: Path, tmp_path: Path) -> None:
    """What rank 0 gets is not known, so that neither the mean nor the heaviest rank is."""
    for rank in (1, 2, 3):
        (tmp_path / f"rank{rank}.json").write_bytes((skewed / "recording" / f"rank{rank}.json").read_bytes())
    content = whatif(tmp_path, "--expert-loads", skewed / "loads.jsonl", "--rebalance", "balanced")
    experts = content["experts"]
    assert (experts["source"], experts["layers"], experts["causes"]) == (None, [], [])
    assert experts["notes"] == [NO_LOADS, f"{skewed / 'loads.jsonl'} is not used"]
    assert experts["rebalance"][0]["saved_s"] is None


def test_replicas_that_do_not_fit_say_why(skewed: Path) -> None:
    options = ("--expert-loads", skewed / "loads.jsonl", "--rebalance", "replicas=10", "--rebalance", "replicas=4")
    rows = whatif(skewed / "recording", *options)["experts"]["rebalance"]
    assert [one["unknown"] for one in rows] == [
        "10 slots among 4 ranks: not equally many; choose a multiple of 4",
        "4 slots for 8 experts; each needs at least one",
    ]


def test_the_terminal_shows_who_has_how_much(skewed: Path) -> None:
    ran = run("whatif", skewed / "recording", "--overlap", "--experts", "--rebalance", "balanced")
    assert ran.code == 0
    assert "Loads of experts" in ran.out or "max over mean" in ran.out
    assert "balanced" in ran.out


def test_overlap_of_one_rank_bounds_waits_by_the_shortest_kernel(tmp_path: Path) -> None:
    simulate(EVEN, tmp_path / "all")
    one = tmp_path / "one" / "rank0.json"
    one.parent.mkdir()
    one.write_bytes((tmp_path / "all" / "rank0.json").read_bytes())
    overlap = json.loads(run("whatif", one.parent, "--overlap", "--json").out)["overlap"]
    (rank,) = overlap["ranks"]
    transfer = (TRANSFER + PER_ROW * 2000) * 1e-6
    assert rank["wait_basis"] == "minimum"
    assert rank["wait_s"] == pytest.approx(0.0, abs=1e-9)
    assert rank["communication_s"] == pytest.approx(3 * (12 * transfer + 200e-6))
    assert rank["both_s"] == pytest.approx(0.0, abs=1e-9)
    assert {one["phase"]: one["ops"] for one in overlap["phases"]} == {
        f"{name}({letter})": 9 for name in ("attn", "dispatch", "mlp", "combine") for letter in "FB"
    }
    assert (overlap["gpu_ops"], overlap["assigned_ops"]) == (3 * 26, 3 * 24)


def test_calls_of_gloo_show_loads_without_a_price(tmp_path: Path) -> None:
    """Received rows are the fourth input of the call, sent ones the fifth: ranks get 40 and 24 of 64 rows."""
    received = {0: ["[20, 20]", "[12, 12]"], 1: ["[12, 12]", "[20, 20]"]}
    for rank in range(2):
        events = [event("user_annotation", "ProfilerStep#5", 0, 1000)]
        for number in range(4):
            ours = received[rank][number in {1, 2}]
            sent = "[20, 12]"
            inputs = ["", "", "", ours, sent] if number % 2 == 0 else ["", "", "", sent, ours]
            events.append(event("cpu_op", "c10d::alltoall_base_", 10 + 50 * number, 20, **{"Concrete Inputs": inputs}))
        write(tmp_path / f"rank{rank}_trace.json.gz", document(events, rank, world=2))
    experts = whatif(tmp_path, "--rebalance", "balanced")["experts"]
    assert experts["source"] == "splits"
    assert experts["layers"][0]["tokens_by_rank"] == [40.0, 24.0]
    assert experts["rebalance"][0]["saved_s"] is None
    ran = run("whatif", tmp_path, "--rebalance", "balanced")
    assert ran.code == 0
    for words in ("loads by rows of the all-to-alls", "no GPU ops were recorded", "max over mean", "1.25"):
        assert words in ran.out
    ran = run("whatif", tmp_path, "--experts", "--html", tmp_path / "page.html")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "tracekit: --html needs GPU ops, and the recording has none; leave it out\n"


def test_replicas_go_where_they_balance_most() -> None:
    """Loads 8, 4, 2, 2 in six slots on two ranks: two more replicas of the first leave 8 on each rank."""
    tokens = np.array([8.0, 4.0, 2.0, 2.0])
    placement = balanced_placement(tokens, ranks=2, slots=6)
    assert loads_of_ranks(tokens[None], placement, 2)[0].tolist() == pytest.approx([8.0, 8.0])
    assert sorted(rank for _, rank in placement) == [0, 0, 0, 1, 1, 1]


def test_groups_stay_on_a_node_and_no_greedy_packing_is_better() -> None:
    """Against packing by falling load, which is what remains without exchanges."""
    for seed in range(20):
        tokens = np.random.default_rng(seed).gamma(1.4, 1.0, 16)
        placement = balanced_placement(tokens, ranks=4, slots=24, nodes=2, groups=4)
        homes = {expert: {rank // 2 for one, rank in placement if one == expert} for expert in range(16)}
        assert all(len(set.union(*(homes[4 * group + one] for one in range(4)))) == 1 for group in range(4))
        free = loads_of_ranks(tokens[None], balanced_placement(tokens, ranks=4, slots=24), 4)[0].max()
        assert free <= _greedy(tokens, 4, 24) + 1e-9


def _greedy(tokens: np.ndarray, ranks: int, slots: int) -> float:
    counts = [1] * len(tokens)
    for _ in range(slots - len(tokens)):
        counts[max(range(len(tokens)), key=lambda one: tokens[one] / counts[one])] += 1
    shares = sorted((tokens[one] / counts[one] for one in range(len(tokens)) for _ in range(counts[one])), reverse=True)
    total, held = [0.0] * ranks, [0] * ranks
    for share in shares:
        best = min((rank for rank in range(ranks) if held[rank] < slots // ranks), key=lambda rank: total[rank])
        total[best] += share
        held[best] += 1
    return max(total)


def test_the_command_places_experts_without_a_trace(tmp_path: Path) -> None:
    path = log(tmp_path / "loads.jsonl", np.array([[[8.0, 4.0, 2.0, 2.0]]]))
    options = ("--ranks", "2", "--replicas", "6")
    (layer,) = json.loads(run("experts", path, *options, "--json").out)["layers"]
    assert (layer["layer"], layer["max_over_mean"], len(layer["placement"])) == (0, pytest.approx(1.0), 6)
    out = run("experts", path, *options).out
    assert "The heaviest rank of a layer gets 1.000 times the mean tokens; with experts in order, 1.500 times." in out
    assert "layer 0: the heaviest rank gets 1.000 times the mean" in out
    assert "--rebalance replicas=6 says what this saves" in out
    ran = run("experts", path, *options, "--nodes", "2")
    assert (ran.code, "--nodes 2 needs --groups" in ran.err) == (2, True)
    ran = run("experts", path, "--ranks", "4", "--replicas", "6")
    assert (ran.code, "6 slots among 4 ranks: not equally many" in ran.err) == (2, True)


def test_groups_of_ranks_that_take_turns_are_read_apart() -> None:
    """Ranks 0 and 2 exchange 30 and 10 rows, ranks 1 and 3 20 and 20; the log states the sums, 50 and 30."""
    rows = {0: 30, 2: 10, 1: 20, 3: 20}
    members = pl.DataFrame(
        [
            (
                str(rank % 2),
                7,
                rank,
                number,
                0,
                float(number),
                *((20, rows[rank]) if number % 2 == 0 else (rows[rank], 20)),
            )
            for number in range(4)
            for rank in range(4)
        ],
        MEMBERS,
        orient="row",
    )
    loads = Loads("log", np.array([7]), np.array([0]), np.array([[[25.0, 25.0, 30.0, 0.0]]]))
    experts = ExpertLoads(ExpertJob(members), loads).experts_with([])
    assert (experts.source, experts.notes) == ("splits", [])
    (layer,) = experts.layers
    assert layer.tokens_by_rank == [30.0, 20.0, 10.0, 20.0]
    assert layer.max_over_mean == pytest.approx((30 / 20 + 20 / 20) / 2)
    unknown = members.with_columns(rows_sent=None, rows_received=None)
    (layer,) = ExpertLoads(ExpertJob(unknown), loads).experts_with([]).layers
    assert layer.tokens_by_rank == [25.0, 25.0, 15.0, 15.0]
