"""What a job takes on another GPU, against the same job simulated with other kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.analysis.gpu.recorded_job import RecordedJob, recorded
from tests.analysis.hardware.passports import TENSORS, elementwise, matmul, passport, slower, usual, written
from tests.handmade import run
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit.analysis.hardware.passport import Passport, known_passport
from tracekit.base.errors import SelectionError
from tracekit.report.report import Report, decoded
from tracekit.sources.load import load
from tracekit.trace.op import OpTrace


def asked(folder: Path, tmp_path: Path, *targets: Passport, **more: Any) -> Report:
    """The report on what the job in `folder` takes on other GPUs."""
    files = [written(tmp_path / f"{number}.passport", target) for number, target in enumerate(targets)]
    source = written(tmp_path / "source.passport", usual())
    return load(folder).whatif(gpus=files, gpu_from=source, **more)


JOBS = {
    "GPU-bound, and so with faster kernels": (RecordedJob(kernel_us=80), 0.5),
    "GPU-bound, host-bound with faster kernels": (RecordedJob(kernel_us=30), 0.25),
    "host-bound whatever the GPU": (RecordedJob(), 0.5),
    "host-bound, GPU-bound with slower kernels": (RecordedJob(kernel_us=10), 4.0),
}


@pytest.mark.parametrize(("job", "factor"), JOBS.values(), ids=JOBS)
def test_the_step_is_that_of_the_job_with_other_kernels(job, factor, tmp_path):
    """With the profiler and without it, as the simulation runs with kernels of that length."""
    folder, recorded_us = recorded(tmp_path / "job", replace(job, events=[]))
    (answer,) = asked(folder, tmp_path, slower(factor)).on_gpus
    other = replace(job, kernel_us=factor * job.kernel_us)
    step, plain = answer.step_time_s, answer.step_time_s.unprofiled
    assert step.now * 1e6 == pytest.approx(recorded_us, rel=0.02)
    assert step.value * 1e6 == pytest.approx(replace(other, events=[]).run(), rel=0.02)
    assert plain is not None
    plain_us = replace(other, gap_us=0.0, events=[]).run()
    assert plain.value * 1e6 == pytest.approx(plain_us, rel=0.02)
    assert plain.low * 0.99 <= plain_us * 1e-6 <= plain.high * 1.01
    assert answer.bottleneck == ("compute" if factor * job.kernel_us > job.work_us else "host")
    assert answer.speedup == pytest.approx(plain.now / plain.value)


def test_the_same_gpu_takes_exactly_as_long(tmp_path):
    folder, _ = recorded(tmp_path / "job", RecordedJob(kernel_us=80))
    (answer,) = asked(folder, tmp_path, usual()).on_gpus
    step = answer.step_time_s
    assert step.now == step.value == step.low == step.high
    assert (answer.speedup, answer.ties) == (1.0, [-1])
    assert step.unprofiled is not None
    assert step.unprofiled.now == step.unprofiled.value


def test_shares_add_up_and_every_kind_has_a_tier(tmp_path):
    folder, _ = recorded(tmp_path / "job", RecordedJob(kernel_us=80))
    (answer,) = asked(folder, tmp_path, slower(2.0)).on_gpus
    assert sum(row.share for row in answer.tiers) == pytest.approx(1.0)
    assert [(row.kind, row.tier, round(row.factor, 6)) for row in answer.tiers] == [
        ("elementwise", "class", 2.0), ("host", "unchanged", 1.0)
    ]  # fmt: skip


def test_answers_come_in_the_order_asked_and_overlaps_are_ties(tmp_path):
    folder, _ = recorded(tmp_path / "job", RecordedJob(kernel_us=80))
    answers = asked(
        folder, tmp_path, slower(0.25, gpu="fast"), slower(2.0, gpu="slow"), slower(0.25, gpu="too")
    ).on_gpus
    assert [(answer.gpu, answer.ties) for answer in answers] == [("fast", [2]), ("slow", []), ("too", [0])]


def test_what_a_reader_must_know_is_said(tmp_path):
    folder, _ = recorded(tmp_path / "job", RecordedJob(kernel_us=80))
    report = asked(folder, tmp_path, slower(0.5, power_limit_w=(350.0, 700.0), mig="3g.40gb"))
    (answer,) = report.on_gpus
    assert [words.partition(" was measured ")[2][:5] for words in answer.warnings] == ["at 35", "as MI"]
    (table,) = [table for table in report.asked if table.title == "Other GPUs"]
    assert "350 W of 700 W" in str(table.note)
    assert decoded(report.to_json().encode(), "again").on_gpus == report.on_gpus


def test_a_passport_of_another_gpu_than_that_of_the_trace_is_said(tmp_path):
    files = [written(tmp_path / f"{name}.passport", card) for name, card in (("from", usual()), ("to", slower(0.5)))]
    (answer,) = load(products(tmp_path, "NVIDIA H200")).whatif(gpus=files[1:], gpu_from=files[0]).on_gpus
    assert "the trace is of NVIDIA H200, and its passport of usual" in answer.warnings


@pytest.mark.parametrize(("has", "fits"), [(40.0, True), (8.0, False), (0.0, None)])
def test_whether_the_job_fits(has, fits, tmp_path):
    reserved = {"name": "[memory]", "ph": "i", "pid": 100, "tid": 100, "ts": 12, "cat": "cpu_instant_event", "s": "t",
                "args": {"Total Reserved": 12_000_000_000, "Total Allocated": 1, "Device Type": 1, "Device Id": 0,
                         "Bytes": 1, "Addr": 1}}  # fmt: skip
    events = [event("cpu_op", "aten::mm", 0, 9), launch(2, 1), kernel(GEMM, 10, 80, correlation=1), reserved]
    write(tmp_path / "job" / "rank0.json", document(events, 0, world=1))
    (answer,) = asked(tmp_path / "job", tmp_path, slower(0.5, memory_gb=has)).on_gpus
    assert answer.fits is fits
    assert (answer.memory_gb.needed, answer.memory_gb.has) == (12.0, has or None)


def products(tmp_path: Path, gpu: str = "", **inputs: Any) -> Path:
    """A recording of one product of 1024^3 in float32 that takes 1 s."""
    events = [event("cpu_op", "aten::mm", 0, 9, **inputs), launch(2, 1), kernel(GEMM, 10, 1e6, correlation=1)]
    write(
        tmp_path / "job" / "rank0.json",
        document(events, 0, world=1, **({"deviceProperties": [{"id": 0, "name": gpu}]} if gpu else {})),
    )
    return tmp_path / "job"


SHAPE = (1, 1024, 1024, 1024)
INPUTS = {"Input Dims": [[1024, 1024], [1024, 1024]], "Input type": ["float", "float"]}
MEASURED = passport(
    matmul(SHAPE, 0.01), matmul(SHAPE, 0.004, "bf16"), *(elementwise(sizes, sizes[0] * 1e-11) for sizes in TENSORS)
)


def test_kinds_of_which_nothing_is_known_stay_and_are_named(tmp_path):
    own = passport(elementwise(TENSORS[0], 1.0), bandwidth_gb_s=0)
    source = written(tmp_path / "source.passport", own)
    other = written(tmp_path / "other.passport", slower(2.0, peak_tflops={}, bandwidth_gb_s=0))
    (answer,) = load(products(tmp_path, **INPUTS)).whatif(gpus=[other], gpu_from=source).on_gpus
    assert answer.tiers[0].tier == "unchanged"
    assert any("how long matmul take" in words for words in answer.warnings)


def test_a_precision_alone_asks_for_the_same_gpu(tmp_path):
    source = written(tmp_path / "source.passport", MEASURED)
    report = load(products(tmp_path, **INPUTS)).whatif(gpu_from=source, precision="bfloat16")
    (answer,) = report.on_gpus
    assert answer.precision == "bf16"
    assert answer.step_time_s.value == pytest.approx(0.4, rel=1e-3)
    same = load(tmp_path / "job").whatif(gpu_from=source, precision="float32").on_gpus[0].step_time_s
    assert same.value == same.now


def test_a_recording_without_shapes_is_answered_and_says_so(tmp_path):
    source = written(tmp_path / "source.passport", MEASURED)
    (answer,) = load(products(tmp_path)).whatif(gpu_from=source, gpus=[source]).on_gpus
    assert answer.tiers[0].tier == "class"
    assert "record_shapes=True" in answer.warnings[-1]


REFUSED = {
    "no such file, and no known GPU": ["--gpu", "Abacus"],
    "missing.passport: no such file or folder": ["--gpu", "missing.passport"],
    "not a passport": ["--gpu", "other.parquet"],
    "the trace does not name its GPU": ["--gpu", "H200"],
    "name another one with --gpu": ["--gpu-from", "H200"],
    "matches no op": ["--gpu", "H200 on rank=7", "--gpu-from", "H100"],
    "for 'rank' is missing": ["--gpu", "H200 on rank=", "--gpu-from", "H100"],
    "no such file, and no known GPU; ": ["--gpu", ""],
    "--precision 'int3': the passport of NVIDIA H200 has bf16": ["--precision", "int3", "--gpu-from", "H200"],
}


@pytest.mark.parametrize(("words", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_answered_is_refused_with_the_reason(words, options, tmp_path):
    products(tmp_path)
    MEASURED.kernels.write_parquet(tmp_path / "other.parquet")
    ran = run("whatif", "job", *options, cwd=tmp_path)
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


def pipeline(tmp_path: Path) -> Path:
    run("synth", "--out", tmp_path / "job.parquet", "--dp", "4", "--pp", "2", "--steps", "3")
    return tmp_path / "job.parquet"


def test_computes_of_a_pipeline_are_scaled_and_transfers_are_not(tmp_path):
    ran = run("whatif", pipeline(tmp_path), "--gpu-from", "H200", "--gpu", "H100", "--gpu", "H200", "--json")
    other, same = json.loads(ran.out)["gpus"]
    assert same["step_time_s"]["value"] == same["step_time_s"]["now"]
    assert {row["kind"]: row["tier"] for row in other["tiers"]} == {
        "compute": "class", "collective": "unchanged", "optimizer": "class"
    }  # fmt: skip
    assert "not divided into kernels" in other["warnings"][0]


def op_trace(tmp_path: Path, *rows: tuple[Any, ...]) -> Path:
    """Ops of rank 0 behind one another, of 1 s each: kind, name, rendezvous."""
    ops = [(0, kind, name, float(at), 1.0, meets) for at, (kind, name, meets) in enumerate(rows)]
    table = pl.DataFrame(ops, ["rank", "kind", "name", "start", "duration", "rendezvous"], orient="row", strict=False)
    trace = OpTrace(table.with_columns(stream=0), name="job", rules=("streams",), metadata={"gpu": "NVIDIA H200"})
    trace.write_parquet(tmp_path / "ops.parquet")
    return tmp_path / "ops.parquet"


def test_ops_without_classes_are_known_by_their_part_their_kind_and_the_names_of_kernels(tmp_path):
    path = op_trace(
        tmp_path,
        ("forward", None, None), ("exchange", None, 1), ("data-load", None, None), ("gc", None, None),
        ("kernel", "ampere_bf16_s16816gemm_128x128", None), ("kernel", "cunn_SoftMaxForward", None),
        ("optimizer", None, None),
    )  # fmt: skip
    (answer,) = load(path).whatif(gpus=["H100"]).on_gpus
    assert {row.kind: round(7 * row.share) for row in answer.tiers} == {
        "compute": 1, "collective": 1, "host": 2, "matmul": 1, "softmax": 1, "optimizer": 1
    }  # fmt: skip
    assert answer.bottleneck == "compute"


def test_a_precision_is_refused_if_nothing_says_in_which_type_products_compute(tmp_path):
    job = load(op_trace(tmp_path, ("kernel", "nvjet_tst_128x256", None)))
    with pytest.raises(SelectionError, match="does not say in which type"):
        job.whatif(precision="bf16")


def test_on_mixed_gpus_the_slow_ones_hold_up_the_rest_until_the_batch_is_shared_out(tmp_path):
    """Half of the replicas take twice as long: shares 4/3 and 2/3 of the batch make all take 4/3 of the time."""
    slow = passport(*(matmul((1, 1 << power, 64, 64), 2e-6, "bf16") for power in range(6, 12)))
    own = passport(*(matmul((1, 1 << power, 64, 64), 1e-6, "bf16") for power in range(6, 12)))
    gpus = [f"{written(tmp_path / 'slow.passport', slow)} on dp_rank=0-1"]
    (answer,) = load(pipeline(tmp_path)).whatif(gpus=gpus, gpu_from=written(tmp_path / "own.passport", own)).on_gpus
    step = answer.step_time_s
    assert answer.selection == "dp_rank=0-1"
    assert step.value > 1.7 * step.now
    assert answer.balanced is not None
    assert answer.balanced.shares == pytest.approx({"0": 2 / 3, "1": 2 / 3, "2": 4 / 3, "3": 4 / 3})
    assert answer.balanced.step_time_s == pytest.approx(4 / 3 * step.now, rel=0.05)


def test_the_finding_on_float32_without_tensor_cores_has_the_price_of_measured_tf32(tmp_path):
    """An H200 takes 21.6 ms for a product of 8192^3 in float32, and 2.7 ms in TF32, by its passport: 87 % less."""
    inputs = {"Input Dims": [[8192, 8192], [8192, 8192]], "Input type": ["float", "float"]}
    folder = products(tmp_path, "NVIDIA H200", **inputs)
    finding = next(cause for cause in load(folder).findings if "tensor cores" in cause.effect)
    h200 = known_passport("NVIDIA H200")
    assert h200 is not None
    rows = h200.kernels.filter(batch=1, m=8192, n=8192, k=8192)
    now, then = (rows.filter(dtype=dtype)["time_s"].item() for dtype in ("fp32", "tf32"))
    assert finding.saved_s == pytest.approx(1 - then / now, rel=0.03)
    assert "as measured" in finding.effect
