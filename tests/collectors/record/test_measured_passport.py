"""What is measured of a device for its passport, on one that is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import polars as pl
import pytest

from tracekit.analysis.hardware.passport import known_passport


@pytest.fixture
def played() -> Callable[..., Any]:
    from tests.collectors.played_device import played

    return played


def test_a_gpu_is_measured_as_the_one_whose_passport_ships_was(played):
    """The same kernels in the same order, and products of fp8: the sizes of mm, but for the two with a row of one."""
    import torch

    (passport, more), play = played("cuda")
    shipped = known_passport("NVIDIA H200")
    assert shipped is not None
    of_fp8 = pl.col("dtype") == "fp8"
    assert passport.kernels.filter(~of_fp8).drop("time_s").rows() == shipped.kernels.drop("time_s").rows()
    fp8, bf16 = passport.kernels.filter(of_fp8), passport.kernels.filter(dtype="bf16", op="mm").filter(pl.col("m") > 1)
    sizes = ["op", "batch", "m", "n", "k"]
    assert fp8.height == 62
    assert fp8[sizes].rows() == bf16[sizes].rows()
    assert (fp8["bytes"] * 2).to_list() == bf16["bytes"].to_list()
    # 1/64 s the first time, which does not count, twice that as it is looked how often to run, and then 3 to 5 times.
    assert passport.kernels["time_s"].to_list() == pytest.approx([1 / 16] * (472 + 62))
    assert (play.flushed, play.flush_bytes) == (4 * (472 + 62), 1 << 28)
    # 88 products with tf32, and 88 and 60 other kernels of 4 bytes without; the switch is back afterwards.
    assert (play.by_type[torch.float32, True], play.by_type[torch.float32, False]) == (5 * 88, 5 * (88 + 60))
    assert not torch.backends.cuda.matmul.allow_tf32
    head = passport.head
    assert (head.gpu, head.memory_gb, head.bandwidth_gb_s) == ("NVIDIA H200", 2.0, 4800.0)
    assert head.peak_tflops == pytest.approx({"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989, "fp8": 1978})
    assert (head.sm_clock_mhz, head.power_limit_w, head.mig) == (1980.0, (650.0, 700.0), None)
    assert more == {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": "550.54.15",
        "ranks": 1,
        "skipped": [],
    }


def test_long_kernels_run_less_often(played):
    """Nine times, the one in the middle 7 times as long as the first; if the second takes 2 ms, five times, the one in
    the middle 5 times as long; if it takes 20 ms, three times: 4 times as long.
    """
    slow_s = {"gelu": 1e-3, "softmax": 1 / 64, "add": 0.99e-3, "mul": 0.99e-2, "copy_": 1e-4, "layer_norm": 1.1e-3}
    (passport, _), _ = played("cuda", slow_s, largest=1 << 20)
    assert passport.kernels.filter(batch=512).select("op", "time_s").unique("op").sort("op").rows() == [
        ("add", pytest.approx(7 * 0.99e-3)),
        ("copy", pytest.approx(7e-4)),
        ("gelu", pytest.approx(5e-3)),
        ("ln", pytest.approx(5.5e-3)),
        ("mul", pytest.approx(5 * 0.99e-2)),
        ("softmax", pytest.approx(1 / 16)),
    ]


def test_a_cpu_is_measured_with_few_bytes_and_its_peaks_are_the_best_that_was_measured(played):
    import torch

    (passport, more), play = played("cpu")
    kernels = passport.kernels
    products = kernels.filter(kind="matmul")
    assert set(kernels["dtype"]) == {"bf16", "fp32"}
    assert products["bytes"].max() <= 1 << 24 < 4 * (3 << 24)
    # Tensors of 1, 4 and 12 MiB, read or written three times in `add` and twice in the five others.
    assert kernels.filter(op="add")["bytes"].to_list() == [3 << 20, 12 << 20, 36 << 20] * 2
    assert kernels.filter(op="copy", dtype="fp32")["batch"].to_list() == [256, 1024, 3072]
    assert kernels.filter(op="copy", dtype="bf16")["batch"].to_list() == [512, 2048, 6144]
    largest = {
        dtype: max(b * m * n * k for b, m, n, k in products.filter(dtype=dtype)["batch", "m", "n", "k"].rows())
        for dtype in ("bf16", "fp32")
    }
    assert passport.head.peak_tflops == pytest.approx({dtype: 2 * most * 16 / 1e12 for dtype, most in largest.items()})
    assert passport.head.bandwidth_gb_s == pytest.approx((24 << 20) * 16 / 1e9)
    assert passport.head.gpu == f"CPU, {torch.get_num_threads()} threads"
    assert passport.head.power_limit_w is None
    assert (more["driver"], play.flush_bytes) == (None, 1 << 24)


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_collectives_are_measured_and_one_rank_has_the_passport(rank, played, monkeypatch):
    import torch

    monkeypatch.setenv("WORLD_SIZE", "2")
    with mock.patch.multiple(
        torch.distributed,
        init_process_group=mock.DEFAULT,
        barrier=mock.DEFAULT,
        destroy_process_group=mock.DEFAULT,
        get_rank=lambda: rank,
        all_reduce=mock.DEFAULT,
    ) as faked:
        measured, _ = played("cuda", largest=32 << 20)
    faked["init_process_group"].assert_called_once_with("nccl")
    faked["barrier"].assert_called_once_with()
    faked["destroy_process_group"].assert_called_once_with()
    if rank == 1:
        assert measured is None
        return
    passport, more = measured
    assert more["ranks"] == 2
    assert passport.kernels.filter(kind="collective").drop("time_s").rows() == [
        ("collective", "all_reduce of 2", "fp32", megabytes << 18, 1, 0, 0, megabytes << 20)
        for megabytes in (1, 4, 12, 32)
    ]


def test_what_a_card_lacks_or_no_time_is_left_for_is_said(played):
    (passport, more), _ = played("cuda", broken="bmm", largest=1 << 20)
    assert passport.kernels.filter(op="bmm").is_empty()
    assert more["skipped"][0] == "bmm bf16 (16, 128, 128, 64): this card lacks it" + 62 * "!"
    (passport, more), _ = played("cuda", budget_s=-1.0)
    assert passport.kernels.is_empty()
    assert len(more["skipped"]) == 12
    assert more["skipped"][0] == "mm bf16 (1, 64, 64, 64): no time left"


def test_a_slice_of_a_gpu_is_named_and_an_unknown_power_limit_is_none(played):
    (passport, _), _ = played("cuda", printed="1980, [N/A], 700.00, Enabled, 550.54.15\n", budget_s=-1.0)
    assert (passport.head.sm_clock_mhz, passport.head.power_limit_w) == (1980.0, None)
    assert passport.head.mig == "NVIDIA H200 MIG 1g.18gb"
    for printed in ("", "no devices\n", None):
        (passport, more), _ = played("cuda", printed=printed, budget_s=-1.0)
        assert (passport.head.sm_clock_mhz, passport.head.mig, more["driver"]) == (None, None, None)
