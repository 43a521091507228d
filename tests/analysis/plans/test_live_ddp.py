"""A recommended size of buckets, tried in DistributedDataParallel on this machine: the mechanics, not the times."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.collectors.conftest import forks
from tracekit.analysis.plans.from_recording import MB, Buckets
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.optimize import optimize

JOB = Path(__file__).with_name("ddp_job.py")
DEFAULT_MB = 25.0


def measured(out: Path, caps_mb: list[float]) -> dict[str, Any]:
    """Figures of a job of two ranks."""
    command = forks(2, str(JOB), str(out), ",".join(map(str, caps_mb)))
    subprocess.run(command, check=True, capture_output=True)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def model_of(figures: dict[str, Any]) -> PlanModel:
    """The model of that job, as a model file has it."""
    fitted = Buckets.of([(size * MB, seconds, 0.0, 0.0) for size, seconds in figures["reductions"]]).fitted(None)
    assert fitted is not None
    layers = len(figures["layers_mb"])
    forward_s, backward_s = (seconds / layers for seconds in figures["compute_s"])
    rows = [
        {"forward_s": [0, forward_s], "backward_s": [0, backward_s], "gradient_mb": size}
        for size in figures["layers_mb"]
    ]
    plan = {"split": [layers], "schedule": "1f1b", "microbatches": 1, "recompute": [False], "buckets": [[layers]]}
    reduce = msgspec.to_builtins(fitted.cost)
    rest = {"stages": 1, "replicas": 2, "samples": 1, "transfer_s": [0, 0], "reduce": reduce, "optimizer_s": 0}
    return msgspec.convert({"layers": rows, **rest, "now": plan, "space": {"buckets": "free"}}, PlanModel)


@pytest.mark.slow
def test_the_reducer_makes_the_buckets_of_the_recommended_size(tmp_path: Path) -> None:
    model = model_of(measured(tmp_path / "first.json", [DEFAULT_MB]))
    settings = optimize(model).plans[0].settings
    assert settings.bucket_cap_mb is not None
    tried = measured(tmp_path / "then.json", [settings.bucket_cap_mb, DEFAULT_MB])
    for steps in tried["steps"]:
        sizes = [int(size) for size in steps["bucket_bytes"].split(",")]
        assert sum(sizes) == sum(size * MB for size in tried["layers_mb"])
        # All but the last are closed once they have that size.
        assert all(size >= steps["cap_mb"] * MB for size in sizes[:-1])
        assert len(steps["seconds"]) > 0
