"""Measure the passport of a GPU: how long matrix products, memory-bound kernels and collectives take on it.

In: a GPU that nothing else uses, through torch. Out: a `Passport`, and what else its file says. Each time is the median
of several runs behind a flush of the cache. Under torchrun, collectives are measured, too, and rank 0 has the passport.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import polars as pl
import torch
from msgspec import Struct
from torch import distributed
from torch.nn import functional

from tracekit.analysis.gpu.roofline import Card
from tracekit.analysis.hardware.passport import KERNEL_SCHEMA, PASSPORT_VERSION, Passport, PassportHead

#: No kernel is begun later than this, seconds.
BUDGET_S = 150.0
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
_ON_CPU = ("bf16", "fp32")
_FLOAT8, _FLOAT8_SINCE, _FLOAT8_MULTIPLE = "fp8", (8, 9), 16
#: Larger than any cache, bytes.
_FLUSH_BYTES = 1 << 28
#: A kernel runs so often, and less often if it takes longer than this, seconds.
_RUNS = ((0.02, 3), (2e-3, 5), (0.0, 9))
#: Sizes of tensors, bytes; rows are longer in large ones.
_TENSORS = tuple(megabytes << 20 for megabytes in (1, 4, 12, 32, 64, 128, 256, 1024, 2048, 4096))
_COLUMNS, _MANY_COLUMNS, _LARGE = 1024, 4096, 1 << 27
_SEED, _SHAPES = 0, 64
#: Bytes of the largest tensor.
_LARGEST, _LARGEST_ON_CPU = 1 << 40, 1 << 24

Call = Callable[[], Any]
#: Memory-bound kernels of a tensor, another like it and a row: kind, op, how often they read or write a tensor, call.
_MEMORY_BOUND: tuple[tuple[str, str, int, Callable[[Any, Any, Any], Any]], ...] = (
    ("elementwise", "add", 3, lambda x, y, _: torch.add(x, y, out=y)),
    ("elementwise", "gelu", 2, lambda x, *_: functional.gelu(x)),
    ("elementwise", "mul", 2, lambda x, y, _: torch.mul(x, 1.5, out=y)),
    ("norm", "ln", 2, lambda x, _, row: functional.layer_norm(x, row.shape, row, row)),
    ("softmax", "softmax", 2, lambda x, *_: torch.softmax(x, -1)),
    ("copy", "copy", 2, lambda x, y, _: y.copy_(x)),
)


class Kernel(Struct, frozen=True):
    """A kernel to measure. `prepare`: allocates its tensors, and returns the call."""

    kind: str
    op: str
    dtype: str
    sizes: tuple[int, int, int, int]
    bytes: float
    prepare: Callable[[], Call]


def measure(
    device: str, *, budget_s: float = BUDGET_S, largest: int | None = None
) -> tuple[Passport, dict[str, Any]] | None:
    """Measure the passport of a device of torch, such as "cuda" or "cpu"; None on other ranks than 0.

    `largest`: bytes of the largest tensor, by default any on a GPU, and few on a CPU.
    """
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    largest = largest or (_LARGEST if on_gpu else _LARGEST_ON_CPU)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", place.index or 0)))
    timer = _Timer(place, min(_FLUSH_BYTES, largest))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ends, rows, skipped = time.monotonic() + budget_s, list[tuple[Any, ...]](), list[str]()
    if ranks > 1:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
        rows += [_measured(kernel, timer) for kernel in _collectives(place, ranks, largest)]
        distributed.barrier()
        rank = distributed.get_rank()
        distributed.destroy_process_group()
        if rank:
            return None
    for kernel in itertools.chain(_products(place, largest), _memory_bound(place, largest)):
        name = f"{kernel.op} {kernel.dtype} {kernel.sizes}"
        if time.monotonic() > ends:
            skipped.append(f"{name}: no time left")
            continue
        try:
            rows.append(_measured(kernel, timer))
        except RuntimeError as error:  # out of memory, or a type that this card lacks
            skipped.append(f"{name}: {str(error)[:80]}")
    state = _state() if on_gpu else {}
    more = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": state.pop("driver", None)}
    kernels = pl.DataFrame(rows, KERNEL_SCHEMA, orient="row")
    return Passport(_head(place, kernels, state), kernels), more | {"ranks": ranks, "skipped": skipped[:12]}


def _measured(kernel: Kernel, timer: _Timer) -> tuple[Any, ...]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kernel.dtype == "tf32"
    try:
        seconds = timer.time(kernel.prepare())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return (kernel.kind, kernel.op, kernel.dtype, *kernel.sizes, kernel.bytes, seconds)


class _Timer:
    """Seconds of a call on a cold cache."""

    def __init__(self, place: torch.device, flush_bytes: int) -> None:
        self.on_gpu = place.type == "cuda"
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=place)

    def time(self, call: Call) -> float:
        """The median of several runs, the first of which does not count."""
        call()
        first_s = self._once(call)
        runs = next(runs for longer_s, runs in _RUNS if first_s >= longer_s)
        return statistics.median(self._once(call) for _ in range(runs))

    def _once(self, call: Call) -> float:
        self.flush.zero_()
        if not self.on_gpu:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) * 1e-3


def _shapes() -> list[tuple[int, int, int]]:
    """Sizes m, n, k: those that models have, and a spread over 64 to 16,384."""
    sizes = (64, 256, 1024, 4096, 16384)
    usual = [(size, size, size) for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    usual += [(8192, 768, 768), (8192, 3072, 768), (8192, 768, 3072), (4096, 12288, 4096), (4096, 4096, 16384)]
    usual += [(16384, 4096, 1024), (1, 4096, 4096), (1, 16384, 4096), (16, 4096, 4096), (64, 16384, 4096)]
    usual += [(512, 30592, 768), (4096, 50304, 1024)]
    spread = ((m, n, k) for m in sizes for n in sizes for k in sizes)
    others = [shape for shape in spread if shape not in usual and shape.count(16384) < 3]
    random.Random(_SEED).shuffle(others)  # noqa: S311
    return usual + others[: _SHAPES - len(usual)]


def _batched_shapes() -> list[tuple[int, int, int, int]]:
    """Sizes batch, m, n, k: scores and values of attention, and experts."""
    shapes = []
    for batch, length in itertools.product((16, 96, 384), (128, 512, 2048)):
        shapes += [(batch, length, length, 64), (batch, length, 64, length)]
    shapes += [(8, 1024, 4096, 1024), (32, 512, 2048, 1024), (64, 1, 2048, 128)]
    return [*shapes, (1024, 64, 64, 64), (32, 256, 256, 128), (128, 1, 128, 1024)]


def _products(place: torch.device, largest: int) -> Iterator[Kernel]:
    """Matrix products in every type that the device has."""
    shapes = [("mm", (1, *shape)) for shape in _shapes()] + [("bmm", shape) for shape in _batched_shapes()]
    float8 = place.type == "cuda" and torch.cuda.get_device_capability() >= _FLOAT8_SINCE
    for dtype in (*(_TYPES if place.type == "cuda" else _ON_CPU), *([_FLOAT8] if float8 else [])):
        width = 1 if dtype == _FLOAT8 else _TYPES[dtype].itemsize
        for op, (batch, m, n, k) in shapes:
            moved = width * batch * (m * k + k * n + m * n)
            lacks = dtype == _FLOAT8 and (op == "bmm" or m % _FLOAT8_MULTIPLE)
            if moved <= largest and not lacks:
                sizes = (batch, m, n, k)
                yield Kernel("matmul", op, dtype, sizes, moved, partial(_product, place, op, dtype, sizes))


def _product(place: torch.device, op: str, dtype: str, sizes: tuple[int, int, int, int]) -> Call:
    batch, m, n, k = sizes
    if dtype == _FLOAT8:
        first, second = (torch.randn(rows, k, device=place).to(torch.float8_e4m3fn) for rows in (m, n))
        scale = torch.ones((), device=place)
        return partial(torch._scaled_mm, first, second.t(), scale, scale, out_dtype=torch.bfloat16)  # noqa: SLF001
    lead = (batch,) if op == "bmm" else ()
    first, second = (torch.randn(*lead, *size, dtype=_TYPES[dtype], device=place) for size in ((m, k), (k, n)))
    return partial(torch.bmm if lead else torch.mm, first, second)


def _memory_bound(place: torch.device, largest: int) -> Iterator[Kernel]:
    """Kernels that read and write tensors."""
    for dtype, size in itertools.product(_ON_CPU, _TENSORS):
        columns = _COLUMNS if size < _LARGE else _MANY_COLUMNS
        rows = size // _TYPES[dtype].itemsize // columns
        for kind, op, passes, call in _MEMORY_BOUND if size <= largest else ():
            prepare = partial(_on_tensors, call, place, dtype, rows, columns)
            yield Kernel(kind, op, dtype, (rows, columns, 0, 0), passes * size, prepare)


def _on_tensors(call: Callable[[Any, Any, Any], Any], place: torch.device, dtype: str, rows: int, columns: int) -> Call:
    x = torch.randn(rows, columns, dtype=_TYPES[dtype], device=place)
    return partial(call, x, torch.zeros_like(x), torch.ones_like(x[0]))


def _collectives(place: torch.device, ranks: int, largest: int) -> Iterator[Kernel]:
    """All-reduces of all ranks."""
    for size in _TENSORS[:-2]:
        if size <= largest:
            sizes, op = (size // _TYPES["fp32"].itemsize, 1, 0, 0), f"all_reduce of {ranks}"
            yield Kernel("collective", op, "fp32", sizes, size, partial(_all_reduce, sizes[0], place))


def _all_reduce(elements: int, place: torch.device) -> Call:
    return partial(distributed.all_reduce, torch.ones(elements, device=place))


def _head(place: torch.device, kernels: pl.DataFrame, state: dict[str, Any]) -> PassportHead:
    """What is known of the card; of one that `cards.csv` lacks, the best that was measured stands for its peaks."""
    name, memory = f"CPU, {torch.get_num_threads()} threads", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        name, memory = properties.name, properties.total_memory
    card = Card.named(name)
    if card is None:
        flops = 2.0 * pl.col("batch") * pl.col("m") * pl.col("n") * pl.col("k") / pl.col("time_s")
        peaks = dict(kernels.filter(kind="matmul").group_by("dtype").agg(flops.max()).sort("dtype").iter_rows())
        bytes_s = kernels.filter(kind="copy").select((pl.col("bytes") / pl.col("time_s")).max()).item() or 0.0
    else:
        peaks = {"fp32": card.single, "tf32": card.tensor, "fp16": card.half, "bf16": card.half, "fp8": 2 * card.half}
        bytes_s = card.bytes_s
    return PassportHead(
        passport_version=PASSPORT_VERSION,
        gpu=name,
        memory_gb=round(memory / 2**30, 1),
        peak_tflops={dtype: peak / 1e12 for dtype, peak in peaks.items()},
        bandwidth_gb_s=bytes_s / 1e9,
        **state,
    )


def _state() -> dict[str, Any]:
    """Clock, power limit, slice and driver of the GPU in use, as nvidia-smi prints them; nothing if it fails."""
    fields = "clocks.max.sm,power.limit,power.max_limit,mig.mode.current,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command += [f"--id=GPU-{uuid}"] if uuid else []
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S603
        clock, limit, most, mig, driver = (value.strip() for value in printed.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {}
    power = (_number(limit), _number(most))
    return {
        "sm_clock_mhz": _number(clock),
        "power_limit_w": None if None in power else power,
        "mig": torch.cuda.get_device_name() if mig == "Enabled" else None,
        "driver": driver,
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
