"""What operators compute and move, and how long that takes at the peak of a card.

In: an operator's name and the sizes and types of its inputs. Out: `ShapeTime`. The peaks are in `cards.csv`, with their
source; a file of the user's own, named by TRACEKIT_CARDS, adds to them.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tracekit.analysis.gpu.gpu_times import ShapeTime
from tracekit.analysis.numeric.arrays import number
from tracekit.base.errors import FormatError
from tracekit.base.text import quoted

#: Bytes of an element by the name of its type in traces.
_BYTES = {
    "float": 4, "double": 8, "c10::half": 2, "c10::bfloat16": 2, "int": 4, "long int": 8, "long": 8, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
    "c10::float8_e4m3fnuz": 1, "c10::float8_e5m2fnuz": 1,
}  # fmt: skip
_HALF = {"c10::half", "c10::bfloat16"}
_QUARTER = {name for name, wide in _BYTES.items() if wide == 1}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}


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
    own = os.environ.get("TRACEKIT_CARDS")
    built_in = tuple(_cards(files("tracekit.analysis.gpu").joinpath("cards.csv").read_text().splitlines()))
    if not own:
        return built_in
    try:
        return (*_cards(Path(own).read_text(encoding="utf-8-sig").splitlines()), *built_in)
    except OSError as error:
        raise FormatError(f"TRACEKIT_CARDS={own}: {error.strerror or error}; check the path") from None
    except (ValueError, csv.Error) as error:
        raise FormatError(f"TRACEKIT_CARDS={own}: {error}; expected a table with the head {','.join(_HEAD)}") from None


_PEAKS = ("half_tflops", "tensor_tflops", "single_tflops", "memory_gb_s", "link_gb_s")
_HEAD = ("name", *_PEAKS, "processors")


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
    dtype = next((str(one) for one in types if str(one).lower() in _BYTES), "")
    return ShapeTime(
        dims=str([one for one in dims if one]),
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
    read, wide = float(sum(math.prod(size) * wide for size, wide in tensors)), tensors[0][1]
    shape = product_shape(op, [size for size, _ in tensors])
    if shape is not None:
        batch, m, n, k = shape
        written = batch * m * n * wide
        return 2.0 * batch * m * n * k, read + written, written
    written = max(math.prod(size) for size, _ in tensors) * wide
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
    return isinstance(size, list | tuple) and bool(size) and all(type(one) is int and one >= 0 for one in size)
