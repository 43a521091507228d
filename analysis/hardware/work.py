"""What the ops of a job do, as far as it decides how long they would take on another GPU.

In: the ops of a recording. Out: `Work`, of which many ops do the same.

Autocast to 16 bits is the model for a lower precision: matrix products and what follows them compute in it; norms,
softmax and losses stay in float32, and so do optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.gpu.roofline import element_count, product_shape
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.trace.gpu_activity import KernelClass

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


#: Columns of recordings.
_READ = ("role", "kind", "name", "operator", "inputs")


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
    each = tuple(dict.fromkeys(typed))
    place = {work: index for index, work in enumerate(each)}
    return Works(each, np.array([place[work] for work in typed], np.int64)[number])


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
    both = f"{operator} {name}"
    if _SOFTMAX.search(both):
        return Work("softmax", dtype, elements=elements, keeps_type=True)
    if _NORM.search(both):
        return Work("norm", dtype, elements=elements, keeps_type=True)
    keeps_type = _FLOAT32.search(operator) is not None
    return Work("copy" if _COPY.search(operator) else "elementwise", dtype, elements=elements, keeps_type=keeps_type)


def _type_of(name: str, types: Sequence[Any], *, product: bool) -> str | None:
    """The type in which a kernel computes; None if neither its inputs nor its name say so."""
    stated = next((_TYPES[str(one).lower()] for one in types if str(one).lower() in _TYPES), None)
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
