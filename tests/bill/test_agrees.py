"""A bill says of every second what `whatif` says of it: drawn jobs of every source."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from judges import kinetosim, rlsim
from tests.properties import examples
from tracekit.analysis.detectors.detector import detector_of
from tracekit.analysis.job.job import Job
from tracekit.bill.account import bill_of_job
from tracekit.report.finding import Place
from tracekit.sources.load import load
from tracekit.sources.registry import job_of
from tracekit.synth.injected_causes import CAUSES, parse_cause
from tracekit.synth.simulate import SynthSpec, synthesize
from tracekit.trace.model import Layout
from tracekit.trace.op import OpTrace

#: The rows that a kind of loss may be in: checkpoints are stalls.
ROWS = {
    "straggler": {"stragglers"}, "input-bound": {"input"}, "host-bound": {"host"}, "compute-bound": {"compute"},
    "communication-bound": {"communication"}, "idle": {"idle", "checkpoints"}, "stalls": {"idle", "checkpoints"},
    "evaluation": {"evaluation"},
    **{kind: {"post-training"} for kind in ("queueing", "tail", "engines", "tools", "reward", "sync")},
}  # fmt: skip
PLANNED = {"checkpoint": "checkpoints", "evaluation": "evaluation", "data-load": "input"}


def pipeline(draw: st.DrawFn, folder: Path) -> Job:
    """With up to two causes. Clocks that are off, and parts that are missing, make other reports than these."""
    names = sorted(set(CAUSES) - {"missing-ranks", "missing-steps", "clock-offset"})
    causes = tuple(map(parse_cause, draw(st.lists(st.sampled_from(names), max_size=2, unique=True))))
    layout, steps, seed = Layout(dp=2, pp=2), draw(st.integers(4, 8)), draw(st.integers(0, 99))
    return job_of(synthesize(SynthSpec(layout, microbatches=4, steps=steps, seed=seed, causes=causes)))


def op_trace(draw: st.DrawFn, folder: Path) -> Job:
    """Ranks load, compute, save and meet; some work only on some ranks, some delays nobody explains."""
    ranks, random = draw(st.integers(2, 4)), draw(st.randoms(use_true_random=False))
    work = {
        (kind, rank): draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]))
        for kind in ("data-load", "checkpoint", "evaluation")
        for rank in range(ranks)
    }
    slow, delay_s = draw(st.sampled_from([1.0, 1.0, 2.0])), draw(st.sampled_from([0.0, 0.0, 0.1]))
    ops: list[dict[str, Any]] = []
    for step in range(3):
        ends = [0.0] * ranks
        for rank in range(ranks):
            compute_s = (4.0 * slow if rank == 0 else 4.0) * random.uniform(0.99, 1.01)
            for kind, seconds in (*((kind, work[kind, rank]) for kind in PLANNED), ("forward-compute", compute_s)):
                if seconds:
                    start = ends[rank] + (delay_s if kind == "forward-compute" else 0.0)
                    ops.append({"step": step, "rank": rank, "kind": kind, "start": start, "duration": seconds})
                    ends[rank] = start + seconds
        for rank in range(ranks):
            meet = {"start": ends[rank], "duration": max(ends) + 0.5 - ends[rank], "rendezvous": step}
            ops.append({"step": step, "rank": rank, "kind": "all-reduce"} | meet)
    frame = pl.DataFrame(ops, infer_schema_length=None).with_columns(row=pl.int_range(pl.len()))
    waits = pl.col("row").shift(1).over("step", "rank")
    before = pl.when(waits.is_null()).then(pl.lit([], pl.List(pl.Int64))).otherwise(pl.concat_list(waits))
    return job_of(OpTrace(frame.with_columns(waits_for=before).drop("row"), "ops"))


def recording(draw: st.DrawFn, folder: Path) -> Job:
    """Of GPUs, one to three ranks, which may be slow in several ways; the file of one may be missing."""
    ranks = draw(st.integers(1, 3))
    share = st.sampled_from([0.0, 0.0, 2000.0, 9000.0])
    troubles = (
        kinetosim.Trouble(ranks - 1, draw(st.sampled_from([1.0, 1.6])), input_us=draw(share), syncs=2),
        kinetosim.Trouble(0, input_us=draw(share), pause_us=draw(share)),
    )
    host_us, transfer_us = draw(st.sampled_from([5.0, 40.0, 150.0])), draw(st.sampled_from([50.0, 300.0, 5000.0]))
    job = kinetosim.Job(ranks, 2, 4, 2, host_us, transfer_us, troubles=troubles, seed=draw(st.integers(0, 99)))
    paths = job.run().write(folder)
    if ranks > 1 and draw(st.booleans()):
        paths[1].unlink()
    return load(folder)


def trajectories(draw: st.DrawFn, folder: Path) -> Job:
    planted = draw(st.sampled_from(["tail", "queueing", "engines", "tools", "none"]))
    rlsim.record(rlsim.draw(planted, draw(st.integers(0, 99))), folder / "run.jsonl")
    return load(folder / "run.jsonl")


def log(draw: st.DrawFn, folder: Path) -> Job:
    """Of verl: phases that may take longer than the step."""
    seconds = [draw(st.integers(1, 60)) for _ in range(3)]
    generated, synced, stepped = seconds
    line = f"timing_s/gen:{generated} - timing_s/update_weights:{synced} - timing_s/step:{stepped + 40}"
    (folder / "verl.log").write_text("".join(f"step:{step} - {line}\n" for step in range(3)))
    return load(folder / "verl.log")


def said(report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The findings that cost something beside all others, by the kind of their loss."""
    for cause in report["causes"]:
        if cause["kind"] != "unexplained" and (seconds := min(cause["saved_s"], cause["alone_s"])) > 0:
            yield str(detector_of(cause["kind"]).loss_at(Place(**cause["where"]))), seconds


@pytest.mark.parametrize("source", [pipeline, op_trace, recording, trajectories, log])
@given(data=st.data())
@examples(6)
def test_a_bill_says_of_every_second_what_the_report_says(
    source: Callable[[st.DrawFn, Path], Job], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        job = source(data.draw, Path(folder))
        report, bill = json.loads(job.whatif().to_json()), bill_of_job(job)
    rows = bill.rows
    (wall_s,) = bill.wall_s.values()
    assert rows["seconds"].sum() == pytest.approx(wall_s, rel=1e-6)
    gpus = report["job"]["gpus"]
    assert bill.gpu_hours == (None if gpus is None else pytest.approx(wall_s * gpus / 3600, rel=1e-6))
    assert rows["cause"].is_not_null().all()
    by_part: dict[str, float] = defaultdict(float)
    for part, seconds in rows.select("part", "seconds").iter_rows():
        by_part[part] += seconds
    gap = rows.filter(cause="between recorded steps")["seconds"].sum()
    step_s, verdict = report["step_time_s"]["recorded"], report["verdict"]
    steps = (wall_s - gap) / step_s
    if not report["trust"]["trustworthy"]:
        assert by_part["useful"] == 0
        assert bill.notes
        return
    assert by_part["useful"] <= steps * (step_s - verdict["lost_s"]) + 1e-6 * wall_s
    planned = dict.fromkeys(PLANNED.values(), 0.0)
    for op in report.get("critical_kinds", report["critical_path"]):
        if op.get("kind") in PLANNED:
            planned[PLANNED[op["kind"]]] += op["recorded_s"]
    kinds = {loss["kind"]: loss["lost_s"] for loss in verdict["losses"]}
    others = [kind for kind, _ in said(report) if kind not in kinds]
    overlap = any(abs(cause["saved_s"] - cause["alone_s"]) > 1e-6 * step_s for cause in report["causes"])
    additive = sum(kinds.values()) <= verdict["lost_s"] * (1 + 1e-9) and (len(kinds) == 1 or not overlap)
    if sum(planned.values()) == 0 and additive:
        for rows_of in ROWS.values():
            lost_s = sum(seconds for kind, seconds in kinds.items() if ROWS[kind] == rows_of)
            billed_s = sum(by_part[row] for row in rows_of) / steps
            assert billed_s >= lost_s - 1e-6 * step_s
            exposed = "exposed_communication_s" in verdict and rows_of == {"communication"} and not lost_s
            if not exposed and not any(ROWS[kind] == rows_of for kind in others):
                assert billed_s == pytest.approx(lost_s, abs=1e-6 * step_s)
    if source is op_trace:  # 4 s of compute and 0.5 s of transfer, whatever else there is, are not billed as a loss
        assert by_part["useful"] >= 0.75 * 4.5 * steps
    for part, seconds in planned.items():
        assert by_part[part] >= min(seconds, step_s - verdict["lost_s"]) * steps - 1e-6 * wall_s
