"""Steps that `tracekit collect` timed, in the place of the estimate of the step without the profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.analysis.gpu.recorded_job import RecordedJob, recorded
from tests.handmade import run
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

#: As recorded, the host takes 1,904 us a step, and without what gaps show of the recording 800; the GPU takes 1,200.
JOB = RecordedJob(kernel_us=30)


def collected(folder: Path, steps_us: Sequence[float], ranks: int = 1, form: str = "collected", **more: Any) -> Path:
    """A trace as `tracekit collect` writes it, whose steps begin so long after each other."""
    starts = dict(enumerate((1e9 + np.cumsum([0.0, *steps_us]) * 1e-6).tolist()))
    computes = [
        {"step": step, "rank": rank, "dp_rank": rank, "pp_rank": 0, "kind": kind, "seq": 0, "microbatch": 0, "chunk": 0,
         "start": start, "duration": 1e-4}
        for step in starts for rank in range(ranks)
        for kind, start in (("forward-compute", 0.0), ("backward-compute", 2e-4))
    ]  # fmt: skip
    trace = Trace.from_frame(
        pl.DataFrame(computes),
        Layout(dp=ranks, pp=1),
        name="plain",
        step_starts=starts,
        metadata={"format": form, **more},
    )
    trace.write_parquet(folder / "plain.parquet")
    return folder / "plain.parquet"


def asked(recording: Path, measured: Path) -> dict[str, Any]:
    ran = run("whatif", recording, "--unprofiled", measured, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["gpu"]


def test_their_median_replaces_the_estimate(tmp_path: Path) -> None:
    """1,500 us, of 1,400, 1,500 and 1,600 six times each: 90 % within 1.645 x 1.2533 x 1.4826 x 100 us / root of 18."""
    folder, _ = recorded(tmp_path / "job", JOB)
    found = asked(folder, collected(tmp_path, [1400, 1500, 1600] * 6))["unprofiled"]
    assert found["step_s"]["value"] * 1e6 == pytest.approx(1500, abs=0.5)
    assert (found["step_s"]["high"] - 1.5e-3) * 1e6 == pytest.approx(72.0, abs=0.5)
    assert found["overhead_s"] * 1e6 == pytest.approx(1904 - 1500, rel=0.02)
    assert "18 steps of plain" in found["how"]
    words = " ".join(run("whatif", folder, "--unprofiled", tmp_path / "plain.parquet").out.split())
    assert "without the profiler, a step takes 1.5 ms (1.9 ms as recorded)" in words


def test_savings_are_of_the_measured_step(tmp_path: Path) -> None:
    """By its gaps, recording hides a GPU that is the limit, and dispatch costs nothing; by steps of 1,500 us, recording
    costs (1,904 - 1,500) / (1,904 - 800) of that, and dispatch the 300 us beyond the GPU.
    """
    folder, _ = recorded(tmp_path / "job", JOB)
    gpu = asked(folder, collected(tmp_path, [1500] * 20))
    dispatch = next(one for one in gpu["findings"] if one["reason"] == "launch-bound")
    assert dispatch["saves_step_s"]["value"] * 1e6 == pytest.approx(300, abs=25)
    assert gpu["unprofiled"]["per_operator_s"] * 1e6 == pytest.approx(JOB.operator_us * 404 / 1104, rel=0.05)


def test_a_gpu_that_is_the_limit_stays_the_limit(tmp_path: Path) -> None:
    """Steps 3 % shorter than the GPU's work, as by a higher clock: that says nothing of what recording costs."""
    folder, _ = recorded(tmp_path / "job", JOB)
    gpu = asked(folder, collected(tmp_path, [1164] * 20))
    assert gpu["unprofiled"]["step_s"]["value"] * 1e6 == pytest.approx(1164, abs=0.5)
    assert gpu["unprofiled"]["per_operator_s"] * 1e6 == pytest.approx(JOB.operator_us, rel=0.01)


REFUSED: dict[str, Callable[[Path], Path]] = {
    "(ranks: 2 and 1)": lambda folder: collected(folder, [1500] * 20, ranks=2),
    "(GPU: NVIDIA H200 and NVIDIA H100)": lambda folder: collected(folder, [1500] * 20, gpu_model="NVIDIA H200"),
    "(a step takes 600 us, not 1.2 ms to 1.9 ms)": lambda folder: collected(folder, [600] * 20),
    "(a step takes 3.0 ms, not 1.2 ms to 1.9 ms)": lambda folder: collected(folder, [3000] * 20),
    "has 2 whole steps, too few": lambda folder: collected(folder, [1500] * 2),
    "was not recorded by `tracekit collect`": lambda folder: collected(folder, [1500] * 20, form="synthetic"),
    "job was not recorded by `tracekit collect`": lambda folder: folder / "job",
}


@pytest.mark.parametrize(("why", "measured"), REFUSED.items(), ids=REFUSED)
def test_another_job_is_refused(why: str, measured: Callable[[Path], Path], tmp_path: Path) -> None:
    job = RecordedJob(kernel_us=30)
    job.run()
    device = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
    write(tmp_path / "job" / "rank0.json", document(job.events, 0, world=1, **device))
    ran = run("whatif", tmp_path / "job", "--unprofiled", measured(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert why in ran.err
    assert ran.err.count("\n") == 1


def test_jobs_that_no_profiler_recorded_are_refused(tmp_path: Path) -> None:
    trace = collected(tmp_path, [1500] * 20)
    ran = run("whatif", trace, "--unprofiled", trace)
    assert ran.code == 2
    assert "--unprofiled is for recordings of torch.profiler; plain is a pipeline trace" in ran.err


def test_a_recording_that_does_not_show_its_cost_is_refused(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::mm", 0, 12), launch(5, 1), kernel(GEMM, 20, 100, correlation=1),
        event("cpu_op", "aten::mm", 30, 12), launch(35, 2), kernel(GEMM, 300, 100, correlation=2),
    ]  # fmt: skip
    write(tmp_path / "job" / "rank0.json", document(events, world=1))
    ran = run("whatif", tmp_path / "job", "--unprofiled", collected(tmp_path, [400] * 20))
    assert ran.code == 2
    assert "what recording cost the hosts of job is not known" in ran.err
