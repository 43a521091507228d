"""Passports by hand, and those of a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.hardware.passport import KERNEL_SCHEMA, PASSPORT_VERSION, Passport, PassportHead

#: Eight elementwise kernels of 2^20 elements and more.
TENSORS = tuple((1 << 20 + power, 1, 0, 0) for power in range(8))


def matmul(shape: tuple[int, ...], time_s: float, dtype: str = "fp32") -> tuple[Any, ...]:
    return ("matmul", "mm", dtype, *shape, 0.0, time_s)


def elementwise(sizes: tuple[int, ...], time_s: float, dtype: str = "fp32") -> tuple[Any, ...]:
    return ("elementwise", "add", dtype, *sizes, 12.0 * sizes[0] * sizes[1], time_s)


def passport(*rows: tuple[Any, ...], gpu: str = "NVIDIA A100", **head: Any) -> Passport:
    said = {"memory_gb": 40.0, "peak_tflops": {"fp32": 20.0, "bf16": 300.0}, "bandwidth_gb_s": 1500.0} | head
    return Passport(
        PassportHead(passport_version=PASSPORT_VERSION, gpu=gpu, **said),
        pl.DataFrame(list(rows), KERNEL_SCHEMA, orient="row"),
    )


def slower(times: float, *, gpu: str = "other", **head: Any) -> Passport:
    """A GPU on which elementwise kernels take `times` as long as on `usual()`."""
    return passport(*(elementwise(sizes, times * sizes[0] * 1e-11) for sizes in TENSORS), gpu=gpu, **head)


def usual(**head: Any) -> Passport:
    return slower(1.0, gpu="usual", **head)


def written(path: Path, one: Passport) -> str:
    one.write(path, {})
    return str(path)


def drawn_time_s(shape: Sequence[int], peak: float, bandwidth: float, waves: float, rng: np.random.Generator) -> float:
    """How long a simulated GPU takes for a product: its roofline, whole waves of tiles, and what nobody can predict."""
    batch, m, n, k = shape
    tiles = batch * np.ceil(m / 128) * np.ceil(n / 128)
    whole = np.ceil(tiles / waves) * waves / tiles
    roofline = max(2.0 * batch * m * n * k * whole / peak, 4.0 * batch * (m * k + k * n + m * n) / bandwidth)
    return float((roofline + 3e-6) * np.exp(rng.normal(0, 0.06)))
