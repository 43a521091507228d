"""What operators compute and move, how long that takes at the peak of a card, and attention that is not fused.

In: an operator's name and the sizes and types of its inputs. Out: `ShapeTime`. The peaks are in `cards.csv`, with their
source; a file of the user's own, named by TRACEKIT_CARDS, adds to them.

Unfused attention runs as separate products with a softmax in between, whose scores go through memory. The forward is
two products around a softmax; the backward is four around the gradient of the softmax. A fused backward computes the
scores again: five products in place of four.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, number, numbered, of_each
from tracekit.base.errors import FormatError
from tracekit.base.text import quoted
from tracekit.report.hardware import ShapeTime
from tracekit.trace.gpu_activity import KernelClass

#: Bytes of an element by the name of its type in traces.
_BYTES = {
    "float": 4, "double": 8, "c10::half": 2, "c10::bfloat16": 2, "int": 4, "long int": 8, "long": 8, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
    "c10::float8_e4m3fnuz": 1, "c10::float8_e5m2fnuz": 1,
}  # fmt: skip
_HALF = {"c10::half", "c10::bfloat16"}
_QUARTER = {name for name, size in _BYTES.items() if size == 1}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}
_PEAKS = ("half_tflops", "tensor_tflops", "single_tflops", "memory_gb_s", "link_gb_s")
_HEAD = ("name", *_PEAKS, "processors")
#: Products of a softmax over classes, or of a router, are no attention.
_LOG_SOFTMAX = re.compile(r"log_?softmax|softmax_warp_(?:for|back)ward<[^>]*\d, true", re.IGNORECASE)
_NO_ATTENTION = re.compile(r"nll_loss|cross_?entropy|top_?k|sort|multinomial", re.IGNORECASE)
#: Kernels that only finish a product.
_PART_OF_PRODUCT = "(?i)reduce"
#: Operators whose products have a batch, as those of attention do for its heads.
_BATCHED = ("aten::bmm", "aten::baddbmm")
#: Where operators were not recorded, so many kernels lie between the two products at most. Chosen.
_LONGEST = 8
#: The work of a fused backward, as a multiple of the forward's: five products in place of two, and the gradients
#: moved. Definition.
_BACKWARD_FLOPS, _BACKWARD_BYTES = 2.5, 2.0


class Card(Struct, frozen=True):
    """A GPU. `half`, `single`: peak operations a second of dense matrix products in 16 bits, and in float32 without
    tensor cores; `tensor`: in float32 with them (TF32, XF32). `bytes_s`: of its memory. `link_s`: bytes a second from
    pinned memory of the host. `processors`: its multiprocessors.
    """

    name: str
    half: float
    tensor: float
    single: float
    bytes_s: float
    link_s: float
    processors: int

    @staticmethod
    def named(device: str | None) -> Card | None:
        """The card whose name is part of that of the device, the longest if several are; None if it is unknown."""
        matching = [card for card in cards() if device and card.name.lower() in device.lower()]
        return max(matching, key=lambda card: len(card.name), default=None)


@cache
def cards() -> tuple[Card, ...]:
    """Return every known card, those of the user first. Raises FormatError if TRACEKIT_CARDS cannot be read."""
    path = os.environ.get("TRACEKIT_CARDS")
    built_in = tuple(_cards(files("tracekit.analysis.gpu").joinpath("cards.csv").read_text().splitlines()))
    if not path:
        return built_in
    try:
        return (*_cards(Path(path).read_text(encoding="utf-8-sig").splitlines()), *built_in)
    except OSError as error:
        raise FormatError(f"TRACEKIT_CARDS={path}: {error.strerror or error}; check the path") from None
    except (ValueError, csv.Error) as error:
        raise FormatError(f"TRACEKIT_CARDS={path}: {error}; expected a table with the head {','.join(_HEAD)}") from None


def _cards(lines: Sequence[str]) -> Iterator[Card]:
    """Yield the cards of a table in CSV; lines that begin with # do not count. Raises ValueError."""
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    if missing := [name for name in _HEAD if name not in (table.fieldnames or ())]:
        raise ValueError(f"lacks the column {missing[0]}")
    rows = list(table)
    if not rows:
        raise ValueError("holds no card")
    for row in rows:
        name = (row["name"] or "").strip()
        if not name:
            raise ValueError("holds a card without a name")
        half, tensor, single, memory, link, processors = (_positive(name, key, row[key]) for key in _HEAD[1:])
        if processors != int(processors):
            raise ValueError(f"{name}: processors is {processors:g}, not a whole number")
        yield Card(name, half * 1e12, tensor * 1e12, single * 1e12, memory * 1e9, link * 1e9, int(processors))


def _positive(card: str, column: str, text: str | None) -> float:
    """The number in a column. Raises ValueError unless it is positive and finite."""
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{card:.80}: {column} is {quoted(text, 40)}, not a positive number")
    return value


def shape_times(op: str, row: tuple[str, int, float], card: Card | None) -> ShapeTime:
    """The time of an operator with inputs of one shape. `row`: the inputs as JSON, how many times, seconds."""
    inputs, count, seconds = row
    dims, types = msgspec.json.decode(inputs)
    flops, moved, _ = work_of(op, dims, types)
    dtype = next((str(dtype) for dtype in types if str(dtype).lower() in _BYTES), "")
    return ShapeTime(
        dims=str([sizes for sizes in dims if sizes]),
        dtype=dtype,
        count=count,
        seconds=seconds,
        flops_s=None if flops is None else number(flops * count / (seconds or math.nan)),
        bytes_s=None if moved is None else number(moved * count / (seconds or math.nan)),
        roofline_s=None if card is None or moved is None else count * roofline_s(flops or 0.0, moved, dtype, card),
    )


def roofline_s(flops: float, moved: float, dtype: str, card: Card) -> float:
    """How long work takes at the peaks of a card, seconds. `flops`: operations; `moved`: bytes."""
    return max(flops / _peak(dtype.lower(), card), moved / card.bytes_s)


def _peak(dtype: str, card: Card) -> float:
    """Floating-point operations per second of a card."""
    if dtype in _HALF:
        return card.half
    if dtype in _QUARTER:
        return 2 * card.half
    return card.tensor if dtype == "float" else card.single


def work_of(op: str, dims: Sequence[Any], types: Sequence[Any]) -> tuple[float | None, float | None, float | None]:
    """Return what an operator computes (floating-point operations), what it moves (bytes, inputs and output, each
    once), and its output alone, of as many elements as the largest input unless it is a product.

    None where that is unknown: operations of anything but products and convolutions, bytes of unknown types.
    """
    tensors = [
        (tuple(size), _BYTES[str(kind).lower()])
        for size, kind in zip(dims, types, strict=False)
        if str(kind).lower() in _BYTES and _is_size(size)
    ]
    if not tensors:
        return None, None, None
    read, item_bytes = float(sum(math.prod(size) * item_bytes for size, item_bytes in tensors)), tensors[0][1]
    shape = product_shape(op, [size for size, _ in tensors])
    if shape is not None:
        batch, m, n, k = shape
        written = batch * m * n * item_bytes
        return 2.0 * batch * m * n * k, read + written, written
    written = max(math.prod(size) for size, _ in tensors) * item_bytes
    return None, read + written, written


def product_shape(op: str, dims: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """Return batch, m, n and k of a product [batch, m, k] x [batch, k, n]; None for other operators."""
    sizes = [size for size in dims if _is_size(size) and len(size) >= 2]
    if op not in _PRODUCTS or len(sizes) < 2:
        return None
    first, second = sizes[-2:] if op in {"aten::addmm", "aten::baddbmm"} else sizes[:2]
    out = second[0] if op == "aten::linear" else second[-1]
    batched = len(second) > 2
    batch = math.prod(first[:-2]) if batched else 1
    return batch, math.prod(first[-2:-1] if batched else first[:-1]), out, first[-1]


def bytes_of(dtype: str) -> int:
    """Return the bytes of an element of a type, 0 if it is unknown."""
    return _BYTES.get(dtype.lower(), 0)


def element_count(dims: Sequence[Any]) -> int:
    """Return the elements of the largest of these tensors; 0 if there is none."""
    return max((math.prod(size) for size in dims if _is_size(size)), default=0)


def _is_size(size: Any) -> bool:
    return isinstance(size, list | tuple) and bool(size) and all(type(length) is int and length >= 0 for length in size)


class UnfusedAttention(Struct, frozen=True, eq=False):
    """`group`: the attention that each kernel is part of, -1 for none, [kernels]; `inner`: which kernels only work on
    scores, [kernels]. `fused_s`: how long one fused kernel takes at the card's peak, nan if unknown, [groups].
    """

    group: Ints
    inner: Bools
    fused_s: Floats

    @property
    def kernels(self) -> Bools:
        """Which kernels a fused one replaces, [kernels]."""
        return np.asarray(self.group >= 0)

    def less_s(self, taken_s: Floats, reachable: float) -> tuple[Floats, Floats]:
        """How much less each kernel takes at a share of the peak if attention is fused, and at most; seconds.

        Where a fused kernel's time is unknown: the scores stay out of memory at least, and at most all of it goes.
        """
        groups = len(self.fused_s)
        total_s = np.bincount(self.group[self.kernels], taken_s[self.kernels], groups)
        share = np.append(np.clip(1 - self.fused_s / reachable / np.maximum(total_s, 1e-12), 0.0, 1.0), 0.0)[self.group]
        timed = np.isfinite(share)
        return (taken_s * np.where(timed, share, self.inner), taken_s * np.where(timed, share, self.kernels))


def find_unfused_attention(kernels: pl.DataFrame, lane: Ints, card: Card | None) -> UnfusedAttention:
    """Find attention among kernels.

    `kernels`: `name`, `operator`, `kind`, `inputs`, `start`; null where unknown. `lane`: their streams, [kernels].
    """
    order = np.lexsort((kernels["start"].to_numpy(), lane))
    table, lane = kernels[order], lane[order]
    text = table.select(pl.coalesce("operator", "name").alias("text"))["text"]
    softmax = of_each(lambda name: "softmax" in name.lower() and not _LOG_SOFTMAX.search(name), text) > 0
    other = np.append(0, np.cumsum(of_each(lambda name: bool(_NO_ATTENTION.search(name)), text)))
    split = table["name"].cast(pl.String).str.contains(_PART_OF_PRODUCT)
    product = np.flatnonzero((table["kind"].eq(str(KernelClass.MATRIX_PRODUCT)) & ~split).to_numpy())
    before = np.append(0, np.cumsum(softmax))
    first, second = product[:-1], product[1:]
    around = (lane[first] == lane[second]) & (before[second] > before[first + 1]) & (other[second] == other[first + 1])
    group, inner = np.full(table.height, -1), np.zeros(table.height, np.bool_)
    fused_s: list[float] = []
    for pair in np.flatnonzero(around).tolist():
        low, high = int(product[pair]), int(product[pair + 1])
        middle = low + 1 + int(np.flatnonzero(softmax[low + 1 : high])[0])
        product_before, product_after = _Kernel.of(table, low), _Kernel.of(table, high)
        if group[low] >= 0 or not _scores_pass(product_before, _Kernel.of(table, middle), product_after, high - low):
            continue
        backward = "backward" in text[middle].lower()
        if backward:
            low = _next_to(table, product, lane, pair, -1, product_before)
            high = _next_to(table, product, lane, pair + 1, 1, product_after)
        group[low : high + 1] = np.where(group[low : high + 1] < 0, len(fused_s), group[low : high + 1])
        inner[low : high + 1] = True
        fused_s.append(_fused_s(product_before, product_after, card, backward=backward))
    inner[product] = False
    found_s = _as_others(np.array(fused_s, np.float64), group, numbered(table["name"]), softmax)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return UnfusedAttention(group[back], inner[back], found_s)


class _Kernel(Struct, frozen=True):
    """A kernel: its operator, None if unknown, and the sizes and types of its inputs, empty if unknown."""

    operator: str | None
    dims: tuple[Any, ...] = ()
    types: tuple[Any, ...] = ()

    @classmethod
    def of(cls, table: pl.DataFrame, row: int) -> _Kernel:
        """The kernel of a row."""
        operator, inputs = table["operator"][row], table["inputs"][row]
        dims, types = msgspec.json.decode(inputs) if inputs else ((), ())
        return cls(operator, tuple(dims), tuple(types))

    @property
    def work(self) -> tuple[float | None, float | None, float | None]:
        """As `work_of`."""
        return work_of(self.operator or "", self.dims, self.types)

    @property
    def output(self) -> float:
        """The elements of the output of a product, 0 if unknown."""
        flops, _, written = self.work
        dtype = next((dtype for dtype in self.types if str(dtype)), "")
        return 0.0 if flops is None or written is None else written / (bytes_of(str(dtype)) or math.inf)


def _scores_pass(first: _Kernel, softmax: _Kernel, second: _Kernel, apart: int) -> bool:
    """Whether what one product writes goes through the softmax to the other, as far as the recording shows."""
    scores = first.output
    if scores and softmax.dims and second.dims:
        return scores == element_count(softmax.dims) and any(element_count([size]) == scores for size in second.dims)
    if first.operator is not None and second.operator is not None:
        return first.operator in _BATCHED and second.operator in _BATCHED
    return apart <= _LONGEST


def _next_to(table: pl.DataFrame, product: Ints, lane: Ints, index: int, way: int, like: _Kernel) -> int:
    """The product before or after another one, if both have the same work: gradients of both factors; else that one."""
    row, beside = int(product[index]), index + way
    if not 0 <= beside < len(product):
        return row
    other = int(product[beside])
    it = _Kernel.of(table, other)
    same = it.operator == like.operator and it.work[0] == like.work[0]
    return other if same and lane[other] == lane[row] and abs(other - row) <= _LONGEST else row


def _fused_s(first: _Kernel, second: _Kernel, card: Card | None, *, backward: bool) -> float:
    """How long one kernel takes at the peak that reads and writes all but the scores, seconds; nan if unknown."""
    (flops, moved, scores), (more, more_moved, _) = first.work, second.work
    if card is None or not (flops and moved and scores and more and more_moved):
        return math.nan
    dtype = next((str(dtype) for dtype in first.types if str(dtype)), "")
    flops_factor, wide = (_BACKWARD_FLOPS, _BACKWARD_BYTES) if backward else (1.0, 1.0)
    return roofline_s(flops_factor * (flops + more), wide * max(moved + more_moved - 2 * scores, 0.0), dtype, card)


def _as_others(fused_s: Floats, group: Ints, name: Ints, softmax: Bools) -> Floats:
    """Times of groups, those without one as the others whose softmax has the same kernel, [groups]."""
    if not np.isnan(fused_s).any():
        return fused_s
    of_group = np.zeros(len(fused_s), np.int64)
    inside = np.flatnonzero(softmax & (group >= 0))
    of_group[group[inside]] = name[inside]
    filled = fused_s.copy()
    for kernel in np.unique(of_group[np.isnan(fused_s)]).tolist():
        alike = of_group == kernel
        times = fused_s[alike & ~np.isnan(fused_s)]
        if len(times):
            filled[alike & np.isnan(fused_s)] = np.median(times)
    return filled
