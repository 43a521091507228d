"""How much longer work takes on another GPU, or in another precision, and how sure that is.

In: the passports of two GPUs, and the ops of a recording. Out: `Work`, of which many ops do the same, and `Scaled`: a
factor for each work, its tier and its error.

The tiers, the best first: `shapes`, products by the nearest shapes that were measured on both; `class`, kernels of
that kind by their size, or the median of the larger half if it is unknown; `roofline`, the peaks of the two cards;
`unchanged`. Autocast to 16 bits is the model for a lower precision: matrix products and what follows them compute in
it; norms, softmax and losses stay in float32, and so do optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.gpu.roofline import element_count, product_shape
from tracekit.analysis.hardware.passport import Passport
from tracekit.analysis.numeric.arrays import Floats, Ints, numbered
from tracekit.base.errors import SelectionError
from tracekit.base.text import listed, quoted
from tracekit.trace.gpu_activity import KernelClass

Tier = Literal["shapes", "class", "roofline", "unchanged"]
#: The weight of a measured shape at distance d, in powers of two: 1 / (d^2 + this)^2. Chosen.
_NEAR = 0.5
#: How badly kernels predict one another shows in more than so many for each of their sizes. Chosen.
_FEWEST = 2
#: The standard error of a normal distribution, in mean and in median absolute errors.
_OF_MEAN, _OF_MEDIAN = 1.2533, 1.4826
#: The 90 % interval of a normal distribution, in standard deviations.
WIDE_90 = 1.645
#: Where nothing was measured on both cards: by how much ratios of peaks are off, in logarithms. In measurements of 11
#: GPUs they were off by 63 % in the mean of all pairs. Statistic.
_OF_PEAKS = 0.49
#: The kind of kernel in a passport that stands for a kind of work that passports lack.
_LIKE = {"compute": "matmul", "attention": "matmul", "optimizer": "elementwise"}
#: Kinds of work that are scaled as matrix products.
PRODUCTS = ("matmul", "attention", "compute")
#: If a passport lacks a kind of memory-bound kernel, the first of these that it has.
_MEMORY_BOUND = ("elementwise", "copy", "norm", "softmax")
_SIZES = ("batch", "m", "n", "k")
#: Bytes of an element; a precision that is not here has 1.
_WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
#: Kinds of work that no other GPU makes faster.
UNCHANGED = ("host", "host copy")
#: Names of types in passports by those in traces.
_TYPES = {
    "float": "fp32", "double": "fp64", "c10::half": "fp16", "c10::bfloat16": "bf16", "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8", "c10::float8_e4m3fnuz": "fp8", "c10::float8_e5m2fnuz": "fp8",
}  # fmt: skip
#: Kernels of float32 on tensor cores: TF32.
_TENSOR_CORES = re.compile(r"tf32|s1688gemm|s16816gemm|nvjet", re.IGNORECASE)
#: The type in the name of a kernel, the first that matches.
_NAMED_TYPES = (
    ("bf16", re.compile(r"bf16|bfloat", re.IGNORECASE)),
    ("fp8", re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE)),
    ("fp16", re.compile(r"fp16|half|hgemm|(?<!b)f16|h884|h1688|h16816", re.IGNORECASE)),
    ("tf32", re.compile(r"tf32|s1688gemm", re.IGNORECASE)),
    ("fp32", re.compile(r"sgemm|simt_s|ffma|float|f32", re.IGNORECASE)),
)
_NORM = re.compile(r"layer_?norm|rms_?norm", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_COPY = re.compile(r"^aten::(copy_|clone|contiguous|cat|stack)$")
_ACROSS = re.compile(r"(HtoD|DtoH|PtoP|HtoH)", re.IGNORECASE)
#: What autocast computes in float32, in part of an operator's name: losses, and sums that would overflow.
_FLOAT32 = re.compile(r"loss|embedding|group_norm|pow|exp|log|cumsum|prod", re.IGNORECASE)
#: Columns of recordings.
_READ = ("role", "kind", "name", "operator", "inputs")


class Scaled(Struct, frozen=True):
    """`factor`: times as long. `error`: standard error of its logarithm. `cast_s`: to convert operands, seconds.

    `group`: works with the same errors.
    """

    tier: Tier
    factor: float
    error: float = 0.0
    cast_s: float = 0.0
    group: tuple[str, ...] = ()


UNSCALED = Scaled("unchanged", 1.0)


class _Pairs(Struct, frozen=True, eq=False, dict=True):
    """Kernels that were measured on both cards, [kernels]. `places`: batch, m, n and k of a product, or the elements of
    a tensor, in powers of two, [kernels, sizes]; `longer`: the logarithm of how much longer they take then.
    """

    places: Floats
    longer: Floats

    def near(self, sizes: Sequence[int]) -> float:
        """The logarithm for a kernel of these sizes."""
        weight = _weights(self.places - np.log2(np.array(sizes, np.float64)))
        return float(weight @ self.longer / weight.sum())

    @cached_property
    def error_near(self) -> float:
        """How badly the other kernels predict each one. The median: of the products of a job, few are the exception."""
        if self._few:
            return self._unknown
        weight = _weights(self.places[:, None] - self.places[None])
        np.fill_diagonal(weight, 0.0)
        errors = weight @ self.longer / weight.sum(axis=1) - self.longer
        return _OF_MEDIAN * float(np.median(np.abs(errors)))

    @cached_property
    def usual(self) -> float:
        """The median logarithm of the larger half."""
        return float(np.median(self.longer[self._larger]))

    def error_of(self, longer: float) -> float:
        """How badly one logarithm predicts the larger half. The mean: a job may consist of the exceptions."""
        if self._few:
            return self._unknown
        return _OF_MEAN * float(np.abs(self.longer[self._larger] - longer).mean())

    @property
    def _larger(self) -> Ints:
        return np.argsort(self.places.sum(axis=1), kind="stable")[len(self.longer) // 2 :]

    @property
    def _few(self) -> bool:
        return len(self.longer) <= _FEWEST * int(self.places.shape[1])

    @property
    def _unknown(self) -> float:
        return _OF_PEAKS if self.longer.any() else 0.0


def _weights(distance: Floats) -> Floats:
    """The weights of kernels that are so far apart, powers of two, [..., sizes]."""
    return np.asarray(1 / ((distance**2).sum(axis=-1) + _NEAR) ** 2)


class Scaling(Struct, frozen=True, eq=False, dict=True):
    """From the GPU of the trace to another one. `precision`: to compute products in, None for that of each work.

    `recorded`: the precision of the trace. Works of other widths than that keep their type: autocast left them so.
    """

    source: Passport
    target: Passport
    precision: str | None = None
    recorded: str | None = None

    def check(self) -> None:
        """Raise SelectionError if the other GPU was not measured in the precision."""
        types = self.target.kernels.filter(kind="matmul")["dtype"].unique().sort().to_list()
        if self.precision is not None and self.precision not in types:
            measured = listed(types) or "no matrix product"
            raise SelectionError(
                f"--precision {quoted(self.precision, 40)}: the passport of {self.target.head.gpu} has {measured};"
                " measure it with `tracekit passport`"
            )

    def of(self, work: Work) -> Scaled:
        """How much longer a work takes."""
        if work.kind in UNCHANGED:
            return UNSCALED
        if work.kind == "collective":
            pairs = self._pairs("collective", None, None)
            return UNSCALED if pairs is None else _by_class(pairs, ("collective",))
        return self._of_product(work) if work.kind in PRODUCTS else self._of_memory_bound(work)

    def _of_product(self, work: Work) -> Scaled:
        source, target = self._types(work)
        pairs = self._pairs("matmul", source, target)
        cast_s = self._cast_s(work, source, target)
        if pairs is None:
            peaks, others = self.source.head.peak_tflops, self.target.head.peak_tflops
            if source in peaks and target in others:
                return Scaled("roofline", peaks[source] / others[target], self._error_of_peaks, cast_s, ("peaks",))
            pairs = self._pairs("matmul", None, None) if source == target else None
        if pairs is None:
            return self._of_bandwidth(1.0)
        group = ("matmul", source or "", target or "")
        if work.shape is None or min(work.shape) < 1:
            return _by_class(pairs, group)
        return Scaled("shapes", float(np.exp(pairs.near(work.shape))), pairs.error_near, cast_s, group)

    def _of_memory_bound(self, work: Work) -> Scaled:
        narrower = 1.0 if work.keeps_type else self._narrower(work.dtype)
        kind = _LIKE.get(work.kind, work.kind)
        for other in (kind, *_MEMORY_BOUND):
            for dtype in (work.dtype, None):
                pairs = self._pairs(other, dtype, dtype)
                if pairs is None:
                    continue
                group = (other, dtype or "")
                if not work.elements:
                    return _by_class(pairs, group, narrower)
                factor = narrower * float(np.exp(pairs.near([work.elements])))
                return Scaled("class", factor, pairs.error_near, group=group)
        return self._of_bandwidth(narrower)

    def _of_bandwidth(self, times: float) -> Scaled:
        now, then = self.source.head.bandwidth_gb_s, self.target.head.bandwidth_gb_s
        if not now or not then:
            return UNSCALED
        return Scaled("roofline", times * now / then, self._error_of_peaks, group=("peaks",))

    def _types(self, work: Work) -> tuple[str | None, str | None]:
        """The types in which a product computes on the GPU of the trace and on the other one."""
        if self.precision is None:
            return work.dtype, work.dtype
        return work.dtype, "fp32" if self.precision == "tf32" and not work.switched else self.precision

    def _narrower(self, dtype: str | None) -> float:
        """The bytes of a tensor in the other precision, as a multiple of what it has; tensors have at least 16 bits."""
        if self.precision is None or dtype not in _WIDTH or _WIDTH[dtype] != _WIDTH.get(self.recorded or dtype):
            return 1.0
        return max(_WIDTH.get(self.precision, 1), min(2, _WIDTH[dtype])) / _WIDTH[dtype]

    def _cast_s(self, work: Work, source: str | None, target: str | None) -> float:
        """How long it takes to convert both operands of a product, seconds."""
        before, after = _WIDTH.get(source or "", 1), _WIDTH.get(target or "", 1)
        if source == target or before <= after or work.shape is None:
            return 0.0
        batch, m, n, k = work.shape
        return batch * k * (m + n) * (before + after) / self._copied_s

    @cached_property
    def _copied_s(self) -> float:
        """Bytes that the other GPU reads and writes a second, copying."""
        for kind in ("copy", "elementwise"):
            rows = self.target.kernels.filter(pl.col("bytes") > 0, kind=kind).sort("bytes")
            if rows.height:
                larger = rows[rows.height // 2 :]
                return float((larger["bytes"] / larger["time_s"]).to_numpy().max())
        return self.target.head.bandwidth_gb_s * 1e9 or np.inf

    @cached_property
    def _error_of_peaks(self) -> float:
        """How badly peaks predict what was measured on both GPUs."""
        if self.source.head == self.target.head and self.precision is None:
            return 0.0
        errors = []
        for dtype in self.source.kernels["dtype"].unique().to_list():
            peaks = [passport.head.peak_tflops.get(dtype) for passport in (self.source, self.target)]
            pairs = self._pairs("matmul", dtype, dtype)
            if pairs is not None and peaks[0] and peaks[1]:
                errors.append(pairs.error_of(float(np.log(peaks[0] / peaks[1]))))
        return float(np.mean(errors)) if errors else _OF_PEAKS

    def _pairs(self, kind: str, source: str | None, target: str | None) -> _Pairs | None:
        """Kernels of a kind that were measured on both GPUs; a type of None is any, the same on both."""
        memo: dict[tuple[str, str | None, str | None], _Pairs | None] = vars(self).setdefault("_memo", {})
        key = (kind, source, target)
        if key not in memo:
            tables = (_of_type(self.source, kind, source), _of_type(self.target, kind, target))
            memo[key] = _joined(*tables, product=kind == "matmul", same_type=source is None)
        return memo[key]


def _of_type(passport: Passport, kind: str, dtype: str | None) -> pl.DataFrame:
    kernels = passport.kernels.filter(kind=kind)
    return kernels if dtype is None else kernels.filter(dtype=dtype)


def _by_class(pairs: _Pairs, group: tuple[str, ...], times: float = 1.0) -> Scaled:
    return Scaled("class", times * float(np.exp(pairs.usual)), pairs.error_of(pairs.usual), group=group)


def _joined(source: pl.DataFrame, target: pl.DataFrame, *, product: bool, same_type: bool) -> _Pairs | None:
    """The kernels that both tables have, None if there are none."""
    same = [*_SIZES, *([] if product else ["op"]), *(["dtype"] if same_type else [])]
    means = [table.group_by(same).agg(pl.col("time_s").log().mean()) for table in (source, target)]
    measured = means[0].join(means[1], on=same, suffix="_then").sort(same)
    if measured.is_empty():
        return None
    sizes = np.log2(np.maximum(measured.select(_SIZES).to_numpy().astype(np.float64), 1.0))
    places = sizes if product else sizes.sum(axis=1, keepdims=True)
    return _Pairs(places, measured["time_s_then"].to_numpy() - measured["time_s"].to_numpy())


class Work(Struct, frozen=True):
    """What one op does. `kind`: as in passports, or attention, optimizer, compute (of any kind), or one of UNCHANGED.

    `dtype`: None if unknown. `shape`: batch, m, n, k of a matrix product. `elements`: of the largest tensor, 0 if
    unknown. `keeps_type`: whether a lower precision leaves it as it is. `switched`: whether it is a product of
    a library that computes in TF32 on demand.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, int, int, int] | None = None
    elements: int = 0
    keeps_type: bool = False
    switched: bool = False


class Works(Struct, frozen=True, eq=False):
    """`each`: different works; `of_op`: which of them each op does, [ops]."""

    each: tuple[Work, ...]
    of_op: Ints


def works_of(ops: pl.DataFrame, taken_s: Floats) -> Works:
    """The work of the ops of a recording, that take so long, seconds, [ops]."""
    lacks = [pl.lit(None, pl.String).alias(name) for name in _READ if name not in ops.columns]
    table = ops.with_columns(lacks).select(pl.col(_READ).cast(pl.String))
    return works_by_row(table, lambda row: kernel_work(*row[1:]) if row[0] == "gpu" else Work("host"), taken_s)


def works_by_row(table: pl.DataFrame, work_of_row: Callable[[tuple[Any, ...]], Work], taken_s: Floats) -> Works:
    """The work of each row, that takes so long, seconds, [rows]; a type that is not known is that of most time."""
    number = numbered(*table.get_columns())
    first = np.zeros(int(number.max(initial=-1)) + 1, np.int64)
    first[number] = np.arange(len(number))
    works = [work_of_row(row) for row in table[first].iter_rows()]
    usual = _usual_type(works, np.bincount(number, taken_s, len(works)).astype(np.float64))
    typed = [msgspec.structs.replace(work, dtype=work.dtype or usual) for work in works]
    distinct = tuple(dict.fromkeys(typed))
    place = {work: index for index, work in enumerate(distinct)}
    return Works(distinct, np.array([place[work] for work in typed], np.int64)[number])


def kernel_work(kind: str | None, name: str | None, operator: str | None, inputs: str | None) -> Work:
    """The work of a GPU op of this class, with the operator that launched it and the sizes and types of its inputs."""
    name, operator = name or "", operator or ""
    if kind == KernelClass.COMMUNICATION:
        return Work("collective")
    if kind == KernelClass.MEMORY:
        return Work("host copy" if _ACROSS.search(name) else "copy", keeps_type=True)
    if kind == KernelClass.OPTIMIZER:
        return Work("optimizer", keeps_type=True)
    dims, types = msgspec.json.decode(inputs) if inputs else ([], [])
    dtype = _type_of(name, types, product=kind == KernelClass.MATRIX_PRODUCT)
    if kind == KernelClass.ATTENTION:
        return Work("attention", dtype)
    if kind == KernelClass.MATRIX_PRODUCT:
        return Work("matmul", dtype, product_shape(operator, dims), switched=True)
    elements = element_count(dims)
    names = f"{operator} {name}"
    if _SOFTMAX.search(names):
        return Work("softmax", dtype, elements=elements, keeps_type=True)
    if _NORM.search(names):
        return Work("norm", dtype, elements=elements, keeps_type=True)
    keeps_type = _FLOAT32.search(operator) is not None
    return Work("copy" if _COPY.search(operator) else "elementwise", dtype, elements=elements, keeps_type=keeps_type)


def _type_of(name: str, types: Sequence[Any], *, product: bool) -> str | None:
    """The type in which a kernel computes; None if neither its inputs nor its name say so."""
    stated = next((_TYPES[str(dtype).lower()] for dtype in types if str(dtype).lower() in _TYPES), None)
    if stated is None:
        return next((dtype for dtype, pattern in _NAMED_TYPES if pattern.search(name)), None)
    return "tf32" if product and stated == "fp32" and _TENSOR_CORES.search(name) else stated


def _usual_type(works: Sequence[Work], taken_s: Floats) -> str | None:
    """The type in which most of the time is spent; None if none is known."""
    total: dict[str, float] = {}
    for work, seconds in zip(works, taken_s.tolist(), strict=True):
        if work.dtype is not None:
            total[work.dtype] = total.get(work.dtype, 0.0) + seconds
    return max(total, key=lambda dtype: total[dtype], default=None)
