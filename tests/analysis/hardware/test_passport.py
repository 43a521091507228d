"""A passport is read as it was written, or refused with one line."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import polars as pl
import pytest

from tests.analysis.hardware.passports import TENSORS, elementwise, matmul, passport, usual, written
from tests.handmade import run
from tracekit.analysis.hardware.passport import PASSPORT_FILE, Passport, known_passport
from tracekit.base.atomic_write import check_writable
from tracekit.base.errors import FormatError, OutputError


def test_what_is_written_is_read(tmp_path):
    path = written(tmp_path / "a.passport", passport(matmul((1, 64, 64, 64), 1e-5), power_limit_w=(300.0, 700.0)))
    again = Passport.read(path)
    assert again.head.power_limit_w == (300.0, 700.0)
    assert again.kernels.row(0, named=True)["time_s"] == 1e-5


def test_a_measured_passport_of_the_same_name_ships_with_tracekit():
    h200 = known_passport("NVIDIA H200")
    assert h200 is not None
    assert h200.head.gpu == "NVIDIA H200"
    assert h200.kernels.height == 472


def test_of_other_known_cards_the_peaks_are_known():
    a100 = known_passport("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    assert (a100.head.peak_tflops["bf16"], a100.head.bandwidth_gb_s, a100.kernels.height) == (312, 2039, 0)
    assert known_passport("Abacus 3000") is None


DAMAGE = {
    "not a passport": ({}, {"tracekit": "{}"}),
    "version 2": ({}, {"passport_version": 2}),
    "bandwidth_gb_s": ({}, {"bandwidth_gb_s": "fast"}),
    "lacks the columns time_s": ({"drop": "time_s"}, {}),
    "impossible": ({"time_s": 0.0}, {}),
    "kernel 0 is": ({"time_s": 1e-300}, {}),
    "no kernel and no peaks": ({"rows": 0}, {}),
    "impossible size": ({"m": -4}, {}),
    "an impossible": ({"kind": None}, {}),
    "kernel 0 is faster than the peak of X": ({"time_s": 1e-7}, {"peak_tflops": {"bf16": 2.0, "fp32": 2.0}}),
    # 1.4e11 operations: 0.14 s at 1 TFLOP/s, as if milliseconds were seconds
    "kernel 0 takes over 100 times as long": (
        {"m": 1 << 24, "time_s": 140.0},
        {"peak_tflops": {"bf16": 1.0, "fp32": 1.0}},
    ),
}


@pytest.mark.parametrize(("words", "damage"), DAMAGE.items(), ids=DAMAGE)
def test_a_damaged_passport_is_refused_with_one_line(words, damage, tmp_path):
    columns, head = damage
    table = passport(matmul((1, 64, 64, 64), 1e-5)).kernels
    if "drop" in columns:
        table = table.drop(columns["drop"])
    elif "rows" in columns:
        table = table.head(columns["rows"])
    else:
        table = table.with_columns(pl.lit(value, table.schema[name]).alias(name) for name, value in columns.items())
    good = {"passport_version": 1, "gpu": "X", "memory_gb": 1, "peak_tflops": {}, "bandwidth_gb_s": 1}
    text = head.get("tracekit") or json.dumps(good | head)
    table.write_parquet(tmp_path / "a.passport", metadata={"tracekit": text})
    with pytest.raises(FormatError, match=words) as error:
        Passport.read(tmp_path / "a.passport")
    assert "\n" not in str(error.value)


def test_junk_is_refused(tmp_path):
    (tmp_path / "junk").write_bytes(b"\x00junk" * 100)
    with pytest.raises(FormatError, match="not a readable Parquet"):
        Passport.read(tmp_path / "junk")


def test_a_passport_in_the_place_of_a_trace_is_called_one():
    passport = Path(str(files("tracekit.analysis.hardware"))) / "passports" / "h100.parquet"
    refused = run("whatif", passport)
    assert refused.code == 2
    assert f"h100.parquet: a passport of a GPU, not a trace; add `--gpu {passport}`" in refused.err


def test_only_passports_are_replaced(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "theirs.parquet")
    with pytest.raises(OutputError):
        check_writable(tmp_path / "theirs.parquet", PASSPORT_FILE)
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" + bytes(99))
    with pytest.raises(OutputError):
        check_writable(tmp_path / "damaged.parquet", PASSPORT_FILE)
    path = tmp_path / "own.passport"
    written(path, usual())
    written(path, passport(elementwise(TENSORS[0], 1.0)))
    assert Passport.read(path).kernels.height == 1


def test_a_cap_and_a_slice_are_warned_of():
    kernel = matmul((1, 64, 64, 64), 1e-5)
    capped = passport(kernel, power_limit_w=(350.0, 700.0), mig="1g.10gb")
    assert [words.partition(" was measured ")[2][:12] for words in capped.warnings] == ["at 350 W of ", "as MIG slice"]
    assert not passport(kernel, power_limit_w=(700.0, 700.0)).warnings
    assert "no kernel was measured" in passport().warnings[0]


@pytest.mark.slow
def test_this_machine_has_a_passport(tmp_path):
    """Real kernels on the CPU: every kind in both types, and products of the shapes that other passports have."""
    from tracekit.collectors.measure_passport import measure

    found = measure("cpu", budget_s=60, largest=1 << 20)
    assert found is not None
    own, more = found
    own.write(tmp_path / "cpu.passport", more)
    kernels = Passport.read(tmp_path / "cpu.passport").kernels
    assert {*kernels["kind"]} == {"matmul", "elementwise", "norm", "softmax", "copy"}
    assert {*kernels["dtype"]} == {"bf16", "fp32"}
    assert kernels["time_s"].min() > 0
    h200 = known_passport("NVIDIA H200")
    assert h200 is not None
    sizes = ["kind", "batch", "m", "n", "k"]
    assert kernels.join(h200.kernels, on=sizes, how="anti").filter(kind="matmul").is_empty()
    assert own.head.gpu.startswith("CPU")
    assert own.head.bandwidth_gb_s > 0
    assert more["torch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "words"), [("tpu", "expected cuda"), ("cuda", "torch sees no GPU"), ("cpu:9:9", "cpu:9:9")]
)
def test_a_device_that_is_not_there_is_refused(device, words, tmp_path):
    ran = run("passport", "--out", tmp_path / "a.passport", "--device", device)
    assert ran.code == 2
    assert words in ran.err
    assert not (tmp_path / "a.passport").exists()
