"""Attention that runs as separate products with a softmax in between, whose scores go through memory.

In: the kernels of a recording. Out: `UnfusedAttention`: which kernels one fused kernel would replace, and how long that
takes. The forward is two products around a softmax; the backward is four around the gradient of the softmax. A fused
backward computes the scores again: five products in place of four.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.gpu.roofline import Card, bytes_of, element_count, roofline_s, work_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.codes import numbered, of_each
from tracekit.trace.gpu_activity import KernelClass

#: Products of a softmax over classes, or of a router, are no attention.
_LOG_SOFTMAX = re.compile(r"log_?softmax|softmax_warp_(?:for|back)ward<[^>]*\d, true", re.IGNORECASE)
_NO_ATTENTION = re.compile(r"nll_loss|cross_?entropy|top_?k|sort|multinomial", re.IGNORECASE)
#: Kernels that only finish a product.
_PART_OF_PRODUCT = "(?i)reduce"
#: Operators whose products have a batch, as those of attention do for its heads.
_BATCHED = ("aten::bmm", "aten::baddbmm")
#: Where operators were not recorded, so many kernels lie between the two products at most.
_LONGEST = 8
#: The work of a fused backward, as a multiple of the forward's: five products in place of two, and the gradients moved.
_BACKWARD_FLOPS, _BACKWARD_BYTES = 2.5, 2.0


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
        return (
            taken_s * np.where(timed, share, self.inner),
            taken_s * np.where(timed, share, self.kernels),
        )


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
        dtype = next((one for one in self.types if str(one)), "")
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
    dtype = next((str(one) for one in first.types if str(one)), "")
    times, wide = (_BACKWARD_FLOPS, _BACKWARD_BYTES) if backward else (1.0, 1.0)
    return roofline_s(times * (flops + more), wide * max(moved + more_moved - 2 * scores, 0.0), dtype, card)


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
