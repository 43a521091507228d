"""`tracekit gate`: by hand on steps without noise, and on simulated noise."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
import yaml

from benchmarks.gate import KINDS, simulated
from tests.cases import case
from tests.handmade import HEALTHY_LANE as LANE
from tests.handmade import LAYOUT, command, frame, healthy_frame, run, slow_trace
from tracekit.analysis.attribution.gate import Gate, Judged, Outcome, Runs, unclear_slowdown
from tracekit.analysis.job.gate_jobs import gate
from tracekit.analysis.job.graph import GraphJob
from tracekit.base.errors import ExitCode
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

SAMPLES = Path(__file__).parents[1] / "sample_traces"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Five healthy steps of 11.25 s, and five in which stage 0 of DP rank 1, rank 1, computes half as fast: 15.5 s."""
    healthy = Trace.from_frame(healthy_frame(range(5)), LAYOUT, name="healthy job")
    healthy.write_parquet(tmp_path / "healthy.parquet")
    slow_trace(range(5)).write_parquet(tmp_path / "slow.parquet")
    return tmp_path / "healthy.parquet", tmp_path / "slow.parquet"


def test_a_regression_says_what_moved_by_how_much_and_on_which_rank(runs: tuple[Path, Path]) -> None:
    """The mean rank spends 4 s on backwards and 2 s on forwards; one of four ranks twice that: 5 s and 2.5 s."""
    ran = run("gate", runs[1], "--baseline", runs[0], "--noise", "0", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["outcome"]) == (ExitCode.CONDITION, "regression")
    rows = {row["name"]: row for row in found["rows"]}
    figures = {name: (row["before_s"], row["after_s"], row["outcome"]) for name, row in rows.items()}
    assert figures["step"] == (11.25, 15.5, "regression")
    assert figures["backward-compute"] == (4, 5, "regression")
    assert figures["forward-compute"] == (2, 2.5, "regression")
    assert figures["optimizer"] == (0.5, 0.5, "pass")
    assert rows["backward-compute"]["where"] == rows["forward-compute"]["where"] == "on rank 1"
    assert [rows[name]["allowed_s"] for name in ("step", "backward-compute", "optimizer")] == pytest.approx(
        [0.03 * 11.25, 0.03 * 4, 0.03 * 0.1 * 11.25]  # a part below a tenth of the step may grow as if it were a tenth
    )
    assert found["sentence"].startswith(
        "a step takes 15.50 s instead of 11.25 s (+37.8% ± 0.0%); backward-compute takes"
    )
    shown = run("gate", runs[1], "--baseline", runs[0], "--noise", "0", env={"COLUMNS": "100"})
    assert shown.code == ExitCode.CONDITION
    assert shown.out.startswith("REGRESSION: a step takes 15.50 s instead of 11.25 s")
    assert shown.out.endswith(f"  tracekit whatif {runs[1]}\n")


def test_one_baseline_alone_shows_that_a_run_is_slower_than_it_and_not_that_it_is_a_regression(
    runs: tuple[Path, Path],
) -> None:
    """15.5 s are 3.9125 s above the limit of 3 % of 11.25 s, which is 34.8 % of 11.25 s."""
    for noise, code, outcome in (
        ((), ExitCode.NO_ANSWER, "slower"),
        (("--noise", "34%"), ExitCode.CONDITION, "regression"),
        (("--noise", "35%"), ExitCode.NO_ANSWER, "cannot tell"),
    ):
        with case(str(noise)):
            ran = run("gate", runs[1], "--baseline", runs[0], "--part", "step", "--json", *noise)
            found = json.loads(ran.out)
            assert (ran.code, found["outcome"], len(found["notes"])) == (code, outcome, 0 if noise else 1)
            assert ("15.50 s" in found["sentence"]) == (outcome != "cannot tell")
            assert found["rows"][0]["margin_s"] == pytest.approx(found["noise"] * 11.25 if noise else 0)
    assert found["sentence"] == "the step of identical runs differs by up to 35.0%"
    assert run("gate", runs[1], "--baseline", runs[0]).out.startswith("SLOWER: a step takes 15.50 s")


def test_the_same_run_and_a_faster_one_pass_and_a_larger_limit_lets_the_slow_one_pass(runs: tuple[Path, Path]) -> None:
    healthy, slow = runs
    for words in ((healthy, healthy), (slow, slow), (healthy, slow), (slow, healthy, "--max-regression", "40%"),
                  (slow, healthy, "--max-regression", "0.4"), (slow, healthy, "--part", "optimizer")):  # fmt: skip
        with case(str(words)):
            assert run("gate", words[0], "--baseline", *words[1:]).code == ExitCode.DONE


def test_a_regression_between_the_ops_is_one_of_the_step(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    """The optimizer of all ranks begins half a second late: no op takes longer."""
    late = tuple((*op[:4], op[4] + 0.5, op[5] + 0.5) if op[1] == "optimizer" else op for op in LANE)
    Trace.from_frame(frame({0: late, 1: late}, range(5)), LAYOUT, name="late").write_parquet(tmp_path / "late.parquet")
    found = json.loads(run("gate", tmp_path / "late.parquet", "--baseline", runs[0], "--json").out)
    assert [row["name"] for row in found["rows"] if row["outcome"] == "slower"] == ["step"]
    assert found["rows"][0]["where"] == ""


@pytest.mark.slow
def test_a_part_that_the_baseline_has_not_is_what_it_takes(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    """Without the optimizer, at the end of a step, the step takes 0.5 s less and has 44 ops of 48."""
    before = healthy_frame(range(5)).filter(pl.col("kind") != "optimizer")
    Trace.from_frame(before, LAYOUT, name="before").write_parquet(tmp_path / "before.parquet")
    ran = run("gate", runs[0], "--baseline", tmp_path / "before.parquet", "--noise", "0", "--json")
    gate_ = json.loads(ran.out)
    rows = {row["name"]: row for row in gate_["rows"]}
    assert (rows["optimizer"]["before_s"], rows["optimizer"]["after_s"]) == (0.0, 0.5)
    assert rows["optimizer"]["where"] == "on all 4 ranks"
    assert (rows["step"]["before_s"], rows["step"]["after_s"]) == (10.75, 11.25)
    assert "optimizer takes 500.0 ms instead of 0.00 s (500.0 ms more), on all 4 ranks" in gate_["sentence"]
    assert "a step has 44 ops in the baseline and 48 in the run" in gate_["notes"]


def test_a_verdict_that_more_baselines_would_give_asks_for_them() -> None:
    side, unclear = Runs("run", 9, 2), partial(Judged, "step", Outcome.CANNOT_TELL, 10.0, 10.5, 0.5, 0.3)
    for rows, words in (
        ([unclear(None, 3)], ": record 3 more baselines"),
        ([unclear(7, None), unclear(None, 1)], ": record 1 more baseline"),
        ([unclear(7, None), unclear(4, None)], ": record 7 more steps of every run"),
    ):
        verdict = Gate.of(side, side, tuple(rows), limit=0.03, noise=None, notes=())
        assert verdict.sentence == f"the step of identical runs differs by up to 5.0%{words}"


def test_several_baselines_show_the_noise_between_runs(tmp_path: Path) -> None:
    """Optimizers of 0.45, 0.5 and 0.55 s end steps of 11.2, 11.25 and 11.3 s, without noise within a run: s is 0.05 s.
    Of the step alone, t of 2 degrees of freedom at 99 % is 9.9248, so identical runs differ by up to
    9.9248 x 0.05 x sqrt(4/3) = 0.573 s. Nothing tells a run of 11.5 s from a limit of 1 %, one of 12 s is a regression,
    and one of 11.5 s passes 10 %. Beside one of them, it is slower.
    """
    paths = {}
    for more in (-0.05, 0.0, 0.05, 0.25, 0.75):
        lane = tuple((*op[:5], op[5] + more) if op[1] == "optimizer" else op for op in LANE)
        trace = Trace.from_frame(frame({0: lane, 1: lane}, range(5)), LAYOUT, name=f"run {more}")
        trace.write_parquet(paths.setdefault(more, tmp_path / f"{more}.parquet"))
    three = [word for more in (-0.05, 0.0, 0.05) for word in ("--baseline", paths[more])]

    def judged(more: float, limit: str, *words: object) -> tuple[int, dict[str, Any]]:
        ran = run("gate", paths[more], "--max-regression", limit, "--part", "step", "--json", *words)
        return ran.code, json.loads(ran.out)

    code, found = judged(0.25, "1%", *three)
    (row,) = found["rows"]
    assert (code, row["before_s"], row["after_s"]) == (ExitCode.NO_ANSWER, pytest.approx(11.25), pytest.approx(11.5))
    assert row["margin_s"] == pytest.approx(9.9248 * 0.05 * math.sqrt(4 / 3), rel=1e-4)
    # The limit is 0.1375 s away: t sqrt(1 + 1/k) may be 2.75. It is 2.751 for 38 baselines, and 2.746 for 39.
    assert (row["more_steps"], row["more_baselines"]) == (None, 36)
    assert found["sentence"] == "the step of identical runs differs by up to 5.1%: record 36 more baselines"
    assert (found["baseline"], found["notes"]) == ({"name": "run -0.05, run 0.0, run 0.05", "steps": 15, "runs": 3}, [])
    assert judged(0.75, "1%", *three)[0] == ExitCode.CONDITION
    assert judged(0.25, "10%", *three)[0] == ExitCode.DONE
    code, found = judged(0.25, "1%", "--baseline", paths[0.0])
    assert (code, found["outcome"]) == (ExitCode.NO_ANSWER, "slower")
    shown = run("gate", paths[0.0], *three)
    assert (shown.code, "from 3 baselines of 15 steps and 5 steps" in " ".join(shown.out.split())) == (
        ExitCode.NO_ANSWER,
        True,
    )
    markdown = tmp_path / "gate.md"
    run("gate", paths[0.0], *three[:4], "--markdown", markdown)
    assert "Baseline run -0.05, run 0.0, 10 steps; run run 0.0, 5 steps" in markdown.read_text()


@pytest.mark.slow
def test_stored_jobs_and_runs_of_other_sources_are_judged_alike(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    store = tmp_path / "jobs"
    assert run("import", *runs, "--store", store).code == 0
    assert run("gate", runs[1], "--baseline", f"{store}:healthy job", "--noise", "1%").code == ExitCode.CONDITION
    assert run("gate", "--store", store, "--job", "healthy job", "--baseline", f"{store}:slow job").code == 0
    recording = SAMPLES / "gpu_slow_input"
    assert run("import", recording, "--store", store).code == 0
    ran = run("gate", recording, "--baseline", f"{store}:{recording.name}", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["sentence"]) == (
        ExitCode.NO_ANSWER, "3 steps, 3 in the baseline: record at least 5 of both")  # fmt: skip
    names = [row["name"] for row in found["rows"]]
    assert {"matrix-product", "phase backward", "kernel cudaLaunchKernel"} <= {*names}
    assert all(row["before_s"] == row["after_s"] for row in found["rows"])
    assert found["rows"][0]["before_s"] == pytest.approx(
        0.00464, rel=0.02
    )  # what its marks say, in numbers of the file


@pytest.mark.parametrize(("noise", "factor", "code"), [
    (0.002, 1.0, "pass"), (0.002, 1.05, "slower"), (0.1, 1.0, "cannot tell"), (0.1, 1.05, "cannot tell"),
    (0.1, 3.0, "slower"),
])  # fmt: skip
def test_what_noise_allows(noise: float, factor: float, code: str) -> None:
    """12 steps, of which each resembles the one before it."""
    for seed in range(3):
        baseline = simulated(2 * seed, steps=12, noise=noise, memory=0.3)
        slower = simulated(2 * seed + 1, steps=12, noise=noise, memory=0.3, slower={"backward": factor})
        found = gate(GraphJob(slower), [GraphJob(baseline)], 0.03)
        assert found.outcome == code, found.sentence
        if code == "slower":
            assert next(row for row in found.rows if row.name == "backward").where == "on all 4 ranks"
            assert {row.name for row in found.rows if row.outcome == code} <= {"step", "backward"}
        if code == "cannot tell":
            assert found.sentence.startswith("the ")
            assert " of identical runs differs by up to " in found.sentence
            assert found.sentence.endswith(" more steps of both")


def test_more_steps_tell_what_few_could_not() -> None:
    """As many as the gate asks for, but for a tenth: how much they differ is itself uncertain."""

    def judged(steps: int) -> tuple[str, int]:
        run, baseline = (GraphJob(simulated(seed, steps=steps, noise=0.03, memory=0.0)) for seed in (21, 20))
        found = gate(run, [baseline], 0.03)
        return found.outcome, max((row.more_steps or 0 for row in found.rows), default=0)

    outcome, more = judged(12)
    assert (outcome, more > 20) == ("cannot tell", True)
    assert judged(12 + more)[0] == "pass"


def test_junit_and_markdown(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    files = tmp_path / "gate.xml", tmp_path / "gate.md"
    outputs = "--junit", files[0], "--markdown", files[1]
    assert run("gate", runs[1], "--baseline", runs[0], *outputs).code == 5
    suite = ElementTree.parse(files[0]).getroot()  # noqa: S314 - our own file
    assert (suite.get("failures"), suite.get("errors")) == ("0", "3")
    assert run("gate", runs[1], "--baseline", runs[0], "--noise", "0%", *outputs).code == 3
    suite = ElementTree.parse(files[0]).getroot()  # noqa: S314 - our own file
    failed = [test.get("name") for test in suite if test.find("failure") is not None]
    assert failed == ["step", "backward-compute", "forward-compute"]
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("3", "0", str(len(suite)))
    text = files[1].read_text()
    assert "**REGRESSION** (limit 3%): a step takes 15.50 s instead of 11.25 s" in text
    assert "| step | 11.25 s | 15.50 s | +37.8% ± 0.0% | +3.0% | regression |" in text
    assert run("gate", runs[0], "--baseline", runs[0], "--junit", files[0]).code == 0  # replaces its own
    assert ElementTree.parse(files[0]).getroot().get("failures") == "0"  # noqa: S314


def test_names_cannot_break_the_files(tmp_path: Path) -> None:
    evil = "<b>|`x`\x01"
    for at in range(2):
        trace = simulated(at, steps=6, noise=0.01, memory=0.0)
        ops = trace.ops.with_columns(pl.col("kind").replace("forward", evil))
        GraphJob(type(trace)(ops, name=evil, groups=trace.groups)).trace.write_parquet(tmp_path / f"{at}.parquet")
    files = tmp_path / "gate.xml", tmp_path / "gate.md"
    outputs = "--junit", files[0], "--markdown", files[1]
    ran = run("gate", tmp_path / "0.parquet", "--baseline", tmp_path / "1.parquet", *outputs)
    assert ran.code in (ExitCode.DONE, ExitCode.NO_ANSWER)
    names = [test.get("name") for test in ElementTree.parse(files[0]).getroot()]  # noqa: S314
    assert "<b>|`x`\\x01" in names
    assert "<b>" not in files[1].read_text()


def test_what_cannot_be_compared_or_understood_is_one_line(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    healthy, slow = runs
    wide = Layout(dp=1, pp=2, world_size=2)
    Trace.from_frame(frame({0: LANE}, range(5)), wide, name="small").write_parquet(tmp_path / "small.parquet")
    for name, layers in (("nine", [9, 9]), ("eight", [8, 8])):
        made = Trace.from_frame(healthy_frame(range(5)), LAYOUT, name=name, metadata={"layers": layers})
        made.write_parquet(tmp_path / f"{name}.parquet")
    simulated(0, steps=5, noise=0, memory=0).write_parquet(tmp_path / "ops.parquet")
    wrong = {
        "another layout": ((tmp_path / "small.parquet", "--baseline", healthy),
                           "the baseline is of another job: dp 2 in the baseline, 1 in the run; world_size 4 in the"),
        "another model": ((tmp_path / "nine.parquet", "--baseline", tmp_path / "eight.parquet"),
                          "layers [8, 8] in the baseline, [9, 9] in the run; record a baseline of this one"),
        "another source": ((tmp_path / "ops.parquet", "--baseline", healthy),
                           "it is a pipeline trace, the run an op trace (docs/traces.md); record a baseline"),
        "another layout among several": (
            (slow, "--baseline", healthy, "--baseline", tmp_path / "small.parquet"),
            "the baseline small is of another job: dp 1 in the baseline, 2 in the run; world_size 2 in the baseline"),
        "one twice": ((slow, "--baseline", healthy, "--baseline", f"{tmp_path}/../{tmp_path.name}/{healthy.name}"),
                      "the same one twice does not show how far runs differ"),
        "a copy": ((slow, "--baseline", healthy, "--baseline", shutil.copy(healthy, tmp_path / "again.parquet")),
                   "two baselines have the same step times: a copy does not show how far runs differ"),
        "no baseline": ((slow, "--baseline", tmp_path / "gone.parquet"), "gone.parquet"),
        "no job": ((slow, "--baseline", f"{tmp_path}:gone"), "gone"),
        "limit": ((slow, "--baseline", healthy, "--max-regression", "three"), "expected a share such as 3% or 0.03"),
        "whole": ((slow, "--baseline", healthy, "--noise", "100%"), "--noise '100%'; expected less than 100%"),
        "noise": ((slow, "--baseline", healthy, "--noise", "some"), "--noise 'some'; expected a share such as 3%"),
        "negative": ((slow, "--baseline", healthy, "--max-regression=-3%"), "expected a share such as 3% or 0.03"),
        "part": ((slow, "--baseline", healthy, "--part", "attention"), "no part is called attention; there are step"),
        "steps": ((slow, "--baseline", healthy, "--ignore-steps", "0-4"), "no step is left; there are steps 0-4"),
        "folder": ((slow, "--baseline", healthy, "--junit", tmp_path), "is a folder; name a file in it"),
    }  # fmt: skip
    for name, (words, message) in wrong.items():
        with case(name):
            ran = run("gate", *words)
            assert (ran.code, ran.out) == (ExitCode.BAD_INPUT, "")
            assert message in ran.message


def test_a_condition_on_s_knows_the_same_noise(tmp_path: Path) -> None:
    """S of 20 steps of 1.1 +- 0.05 s, ideal 1 s, is their mean: around 1.1, and far from 1.2."""
    steps = np.random.default_rng(0).normal(1.1, 0.05, 20)
    assert unclear_slowdown(steps, np.ones(20), 1.2) is None
    unclear = unclear_slowdown(steps, np.ones(20), 1.101)
    assert unclear is not None
    assert unclear.startswith(f"slowdown is {steps.mean():.3f} ± 0.")
    assert unclear_slowdown(steps[:4], np.ones(4), 1.101) is None  # nobody knows the noise of so few
    simulated(0, steps=12, noise=0.1, memory=0.0).write_parquet(tmp_path / "noisy.parquet")
    slowdown = json.loads(run("whatif", tmp_path / "noisy.parquet", "--json").out)["slowdown"]
    ran = run("whatif", tmp_path / "noisy.parquet", "--fail-on", f"slowdown>{slowdown:.4f}")
    assert (ran.code, "--fail-on slowdown: cannot tell: slowdown is " in ran.err) == (ExitCode.NO_ANSWER, True)
    assert run("whatif", tmp_path / "noisy.parquet", "--fail-on", f"waste>{1 - 1 / slowdown:.4f}").code == ran.code
    assert run("whatif", tmp_path / "noisy.parquet", "--fail-on", "slowdown>9").code == ExitCode.DONE
    assert run("whatif", tmp_path / "noisy.parquet", "--fail-on", "slowdown<9").code == ExitCode.CONDITION


@pytest.mark.slow
def test_the_action_passes_the_verdict_on(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    (step,) = yaml.safe_load((SAMPLES.parent / "action.yml").read_text())["runs"]["steps"]
    healthy, slow = runs
    three = tmp_path / "three.parquet"
    slow_trace(range(3)).write_parquet(three)
    (tmp_path / "tracekit").write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command()))} "$@"\n')
    (tmp_path / "tracekit").chmod(0o755)
    for traces, more, code in (
        ((slow, healthy), {}, 5), ((healthy, slow), {}, 0), ((three, three), {}, 5),
        ((three, three), {"CANNOT_TELL": "pass"}, 0), ((slow, healthy), {"OPTIONS": "--part optimizer"}, 0),
        ((slow, healthy), {"CANNOT_TELL": "pass", "OPTIONS": "--noise 2%"}, 3),
    ):  # fmt: skip
        with case(str((traces, more))):
            files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
            given = {
                "RUN": traces[0],
                "BASELINE": traces[1],
                "LIMIT": "3%",
                "CANNOT_TELL": "fail",
                "OPTIONS": "",
            } | more
            env = {**os.environ, **given, **files, "RUNNER_TEMP": tmp_path, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
            assert given.keys() <= step["env"].keys()
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", step["run"]], env=env, check=False, capture_output=True
            )
            assert done.returncode == code, done.stderr
            assert files["GITHUB_STEP_SUMMARY"].read_text().count("(limit 3%)") == 1
            assert files["GITHUB_OUTPUT"].read_text() == f"junit={tmp_path}/tracekit-gate.xml\n"
            assert ElementTree.parse(tmp_path / "tracekit-gate.xml").getroot().tag == "testsuite"  # noqa: S314
            for file in files.values():
                file.unlink()


def test_what_the_simulation_records() -> None:
    """Without noise, a step lasts as long as its ops: 0.03 + 0.06 + 0.01 + 0.005 s."""
    ops = simulated(0, steps=2, noise=0.0, memory=0.0).ops
    assert (ops["start"] + ops["duration"]).max() == pytest.approx(sum(KINDS.values()))
