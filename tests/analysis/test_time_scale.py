"""A job that takes eight times as long has the same report: each time is eight times as long, each share the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.synth import (
    LateDataLoading,
    PythonGc,
    SequenceLengthImbalance,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.trace.model import Layout

LONGER = 8.0
#: Of launch delays, which times rounded to nanoseconds change, and of a test on few steps.
ROUNDED = {"unexplained", "statistic"}


def differences(usual: Any, longer: Any, where: str = "") -> list[str]:
    """Where two reports differ otherwise than by times that are `LONGER` times as long. Sentences are not compared."""
    if isinstance(usual, dict) and isinstance(longer, dict):
        if usual.keys() != longer.keys():
            return [f"{where}: {usual.keys() ^ longer.keys()}"]
        pairs = [(f"{where}.{key}", usual[key], longer[key]) for key in usual.keys() - ROUNDED]
    elif isinstance(usual, list) and isinstance(longer, list):
        if len(usual) != len(longer):
            return [f"{where}: {len(usual)} and {len(longer)} items"]
        pairs = [(f"{where}[{at}]", *pair) for at, pair in enumerate(zip(usual, longer, strict=True))]
    elif isinstance(usual, str) and isinstance(longer, str):
        return []
    elif isinstance(usual, float) and isinstance(longer, float):
        near = (pytest.approx(factor * usual, rel=1e-6, abs=1e-9) for factor in (1.0, LONGER))
        return [] if any(longer == expected for expected in near) else [f"{where}: {usual} and {longer}"]
    else:
        return [] if usual == longer else [f"{where}: {usual} and {longer}"]
    return [line for path, before, after in pairs for line in differences(before, after, path)]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (SlowWorker(1, 1, 1.8), "bad-worker"),
        (SlowLastStage(), "stage-imbalance"),
        (SequenceLengthImbalance(), "sequence-length-imbalance"),
        (PythonGc(), "python-gc"),
        (SlowNic(1, 1, 8.0), "unexplained"),
        (SlowP2pLink(), "slow-p2p-link"),
        (LateDataLoading(), "late-data-loading"),
        (SlowSteps(), "slow-steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_pipeline_that_takes_longer(cause: Any, kind: str) -> None:
    trace = synthesize(SynthSpec(Layout(dp=4, pp=2, tp=1), steps=10, seed=31, microbatches=4, causes=(cause,)))
    longer = replace(trace, ops=trace.ops.with_columns(pl.col("start", "duration") * LONGER))
    usual, slow = PipelineJob(trace).whatif(), PipelineJob(longer).whatif()
    assert [finding.kind for finding in usual.findings] == [kind]
    assert slow.findings[0].saved_s == pytest.approx(LONGER * usual.findings[0].saved_s)
    assert slow.step_time_s.original == pytest.approx(LONGER * usual.step_time_s.original)
    assert differences(usual.to_dict(), slow.to_dict()) == []


@pytest.mark.parametrize(
    ("changed", "losses"),
    [
        ({}, {"sync": 1.0, "reward": 0.5}),
        ({"reward_s": 2.0}, {"reward": 2.0, "sync": 1.0}),
        ({"sync_s": 6.0}, {"sync": 6.0, "reward": 0.5}),
        ({"sync_s": 0.125}, {"reward": 0.5}),  # 1.2 % of a step are not named
        ({"reward_s": 0.25}, {"sync": 1.0, "reward": 0.25}),  # 2.3 % are
    ],
    ids=["usual", "reward", "sync", "short sync", "short reward"],
)
def test_post_training_that_takes_longer(changed: dict[str, float], losses: dict[str, float], tmp_path: Path) -> None:
    usual = lines(6, **changed)
    times = {"start", "end", "submit"}
    slow = [{name: value * LONGER if name in times else value for name, value in line.items()} for line in usual]
    reports = [tracekit.load(write(tmp_path / f"{run[0]['end']}.jsonl", run)).report for run in (usual, slow)]
    assert {finding.kind: finding.saved_s for finding in reports[0].findings} == pytest.approx(losses)
    assert reports[1].step_time_s.original == pytest.approx(LONGER * reports[0].step_time_s.original)
    assert differences(*(report.to_dict() for report in reports)) == []
