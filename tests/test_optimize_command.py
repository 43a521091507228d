"""The command `tracekit optimize`: model files and step times of runs, good and bad."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.plans.simulator import draw
from tests.handmade import run

SAMPLE = Path(__file__).parents[1] / "sample_traces" / "slow_worker.parquet"
#: Medians of three submissions of Llama-3.1-405B to MLPerf Training v5.0, H100.
RUNS = {24: 5.1695, 288: 55.1272}


def _write(path: Path, rows: dict[int, float] | str) -> Path:
    text = rows if isinstance(rows, str) else "".join(f"{count},{step_s}\n" for count, step_s in rows.items())
    path.write_text(f"microbatches,step_time_s\n{text}")
    return path


def _step(tmp_path: Path, rows: dict[int, float], count: int) -> dict[str, float]:
    ran = run("optimize", "--runs", _write(tmp_path / "runs.csv", rows), "--microbatches", str(count), "--json")
    step: dict[str, float] = json.loads(ran.out)["microbatches"][0]["step_time_s"]
    return step


def test_a_line_through_two_runs(tmp_path: Path) -> None:
    ran = run("optimize", "--runs", _write(tmp_path / "runs.csv", RUNS), "--microbatches", "24,96", "--json")
    line = json.loads(ran.out)["line"]
    assert line["per_microbatch_s"] == pytest.approx(0.1892, rel=1e-3)
    assert line["fixed_s"] / line["per_microbatch_s"] == pytest.approx(3.32, rel=1e-2)
    assert _step(tmp_path, RUNS, 24)["value"] == pytest.approx(RUNS[24])


def test_two_near_counts_say_little_of_a_far_one(tmp_path: Path) -> None:
    near, far = {56: 11.22, 64: 12.74}, {24: 5.17, 288: 55.1}
    wide, narrow = (_step(tmp_path, rows, 24) for rows in (near, far))
    assert wide["low"] <= 5.17 <= wide["high"]
    assert wide["high"] - wide["low"] > 5 * (narrow["high"] - narrow["low"])


def test_runs_off_their_line_widen_the_interval(tmp_path: Path) -> None:
    straight = {count: 0.2 * count + 1 for count in (8, 16, 24, 32)}
    scattered = {count: step_s * (1.1, 0.9)[at % 2] for at, (count, step_s) in enumerate(straight.items())}
    even, uneven = (_step(tmp_path, rows, 64) for rows in (straight, scattered))
    assert uneven["high"] - uneven["low"] > 2 * (even["high"] - even["low"])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("24,5.17\n24,5.2\n", "one count of microbatches, 24"),
        ("", "no runs"),
        ("24,fast\n48,9\n", "line 2: 24,fast"),
        ("24\n", "no column microbatches or step_time_s; expected microbatches,step_time_s"),
        ("24,9\n48,5\n", "take no longer"),
    ],
)
def test_runs_that_show_no_line(rows: str, words: str, tmp_path: Path) -> None:
    ran = run("optimize", "--runs", _write(tmp_path / "runs.csv", rows), "--microbatches", "48")
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


def _no_layers(model: dict[str, Any]) -> None:
    model["layers"] = []


def _too_few_layers(model: dict[str, Any]) -> None:
    model["layers"] = model["layers"][:1]


def _no_microbatches(model: dict[str, Any]) -> None:
    model["space"]["microbatches"] = []


def _other_split(model: dict[str, Any]) -> None:
    model["now"]["split"] = [1, 1]


def _negative_time(model: dict[str, Any]) -> None:
    model["layers"][0]["forward_s"] = [-1.0, 0.0]


def _unknown_schedule(model: dict[str, Any]) -> None:
    model["space"]["schedule"] = ["zigzag"]


def _interleaved(model: dict[str, Any]) -> None:
    model["space"]["schedule"] = ["interleaved"]


def _fixed_buckets(model: dict[str, Any]) -> None:
    model["space"]["buckets"] = "fixed"


def _mistyped(model: dict[str, Any]) -> None:
    model["memory_gB"] = model.pop("memory_gb", 1.0)


def _too_large(model: dict[str, Any]) -> None:
    model["layers"] *= 2_000


def _slow_stages(model: dict[str, Any]) -> None:
    model["slowness"] = [1.0] * 3


def _recomputing(model: dict[str, Any]) -> None:
    model["now"]["recompute"] = [False]


def _other_buckets(model: dict[str, Any]) -> None:
    model["now"]["buckets"] = [[1]] * len(model["now"]["split"])


def _no_stages(model: dict[str, Any]) -> None:
    del model["stages"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_layers, "no layers"),
        (_too_few_layers, "cannot fill"),
        (_no_microbatches, "the space is empty"),
        (_other_split, "`now` splits 2 layers"),
        (_negative_time, "forward_s"),
        (_unknown_schedule, "zigzag"),
        (_interleaved, "interleaved cannot be planned"),
        (_fixed_buckets, 'cannot be fixed if the `split` is free; write "one" or "free", or keep the split, too'),
        (_too_large, "10000 layers on 2 stages are too many to search; join layers that stay together"),
        (_slow_stages, "`slowness` of 3 stages; expected 2"),
        (_recomputing, "`now` says of 1 stages whether they recompute; expected 2"),
        (_other_buckets, "the `buckets` of `now` do not hold the layers of its `split`"),
        (_no_stages, "missing required field `stages`"),
        (_mistyped, "unknown field `memory_gB`"),
    ],
)
def test_a_model_that_cannot_be_searched(change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path) -> None:
    model = draw(1, layers=5, stages=2)
    change(model)
    (tmp_path / "model.json").write_text(json.dumps(model))
    ran = run("optimize", "--model", tmp_path / "model.json")
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--model", "m.json", "--runs", "r.csv", "--microbatches", "2"),
        ("--runs", "r.csv"),
        ("--model", "m.json", "--layers", "2,2"),
        ("--model", "m.json", "--memory-gb", "nan"),
        ("--runs", "r.csv", "--microbatches", "2", "--keep", "split"),
    ],
)
def test_one_question_at_a_time(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without a store
    ran = run("optimize", *words)
    assert ran.code == 2
    assert "cannot be read" not in ran.err
    assert ran.err.count("\n") == 1


def test_what_is_kept_stays(tmp_path: Path) -> None:
    model = draw(1, layers=6, stages=2, memory=1.3)
    (tmp_path / "model.json").write_text(json.dumps(model))
    ran = run("optimize", "--model", tmp_path / "model.json", "--keep", "schedule", "--keep", "microbatches", "--json")
    plans = json.loads(ran.out)["plans"]
    assert {(plan["schedule"], plan["microbatches"]) for plan in plans} == {("1f1b", 8)}


def test_the_terminal_says_what_to_do(tmp_path: Path) -> None:
    model = draw(1, layers=6, stages=2, memory=1.2, replicas=4)
    (tmp_path / "model.json").write_text(json.dumps(model))
    out = " ".join(run("optimize", "--model", tmp_path / "model.json").out.split())
    for words in ("The best plan takes", "no plan of those searched", "bucket_cap_mb=", "Megatron", "plans replayed"):
        assert words in out


def test_a_limit_that_nothing_can_be_compared_with_is_refused(tmp_path: Path) -> None:
    model = draw(1, layers=6, stages=2)
    for layer in model["layers"]:
        del layer["state_gb"]
    (tmp_path / "model.json").write_text(json.dumps(model))
    for source in ((SAMPLE,), ("--model", tmp_path / "model.json")):
        ran = run("optimize", *source, "--memory-gb", "1e-300")
        assert (ran.code, ran.out) == (2, "")
        assert "whether a plan fits into 1e-300 GB is unknown" in ran.err


def test_the_first_sentence_says_what_saves_more_than_the_best_plan() -> None:
    ran = run("optimize", SAMPLE, "--json")
    optimum = json.loads(ran.out)
    assert max(move["saved_s"] for move in optimum["moves"]) > optimum["plans"][0]["saved_s"] > 0
    saved_ms = 1e3 * max(move["saved_s"] for move in optimum["moves"])
    first = " ".join(run("optimize", SAMPLE).out.partition("\n\n")[0].split())
    assert first.endswith(f"is faster; moving work, which none of them does, saves more: {saved_ms:.1f} ms")


@pytest.mark.parametrize("option", ["--model", "--runs"])
def test_what_is_no_file_is_refused(option: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    more = ["--microbatches", "48"] if option == "--runs" else []
    for name in ("pipe", "text", "missing", "."):
        ran = run("optimize", option, tmp_path / name, *more)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
