"""A GPU's passport: how long kernels take on it, and its peaks; and the question about other GPUs, as people ask it.

In: a Parquet file that `tracekit passport` wrote, or the name of a GPU; `--gpu`, `--gpu-from` and `--precision`. Out:
`Passport`, `HardwareQuestion`. The passports in `passports/` were measured on real cards; of other cards in
`cards.csv`, only the peaks are known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import msgspec
import polars as pl
from msgspec import Meta, Struct

from tracekit.analysis.gpu.roofline import Card
from tracekit.analysis.whatif.selection_text import parse_selection
from tracekit.base.atomic_write import Kind, replacing
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import listed, quoted
from tracekit.trace.canonical import METADATA_KEY, read_columns, read_header

PASSPORT_VERSION = 1
#: A row for each kernel. `batch`, `m`, `n`, `k`: sizes of a matrix product, [batch, m, k] x [batch, k, n]; of another
#: kernel, `batch` and `m` are those of its tensor. `bytes`: read and written, negative if that overflowed.
KERNEL_SCHEMA = pl.Schema(
    {
        "kind": pl.String, "op": pl.String, "dtype": pl.String, "batch": pl.Int64, "m": pl.Int64, "n": pl.Int64,
        "k": pl.Int64, "bytes": pl.Float64, "time_s": pl.Float64,
    }
)  # fmt: skip
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_NotNegative = Annotated[float, Meta(ge=0, le=1e12)]
_NAMES = ("kind", "op", "dtype")
_SIZES = ("batch", "m", "n", "k")
#: No product is faster than so many times the peak, whatever the clock, and the fastest of large ones, operations,
#: reaches this share of it; in another unit than seconds they do not. Chosen.
_MOST_OF_PEAK, _LEAST_OF_PEAK = 2.0, 0.01
_LARGE_FLOP = 1e11
#: Names of types as torch writes them.
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}


class PassportHead(Struct, frozen=True, kw_only=True):
    """What a passport says of its GPU. `memory_gb`: as nvidia-smi counts; 0 for unknown. `peak_tflops`: by type.

    `bandwidth_gb_s`: of its memory, 0 for unknown. `power_limit_w`: now, and the highest possible. `mig`: the slice.
    """

    passport_version: int
    gpu: Annotated[str, Meta(min_length=1, max_length=256)]
    memory_gb: _NotNegative
    peak_tflops: dict[str, _Positive]
    bandwidth_gb_s: _NotNegative
    sm_clock_mhz: _NotNegative | None = None
    power_limit_w: tuple[_Positive, _Positive] | None = None
    mig: str | None = None


class Passport(Struct, frozen=True, eq=False):
    """`head`: the GPU; `kernels`: KERNEL_SCHEMA."""

    head: PassportHead
    kernels: pl.DataFrame

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises FormatError if it is not a passport."""
        header = read_header(path)
        if header is None or "passport_version" not in header:
            raise FormatError(f"{path}: not a passport of a GPU; `tracekit passport --out FILE` measures one")
        if header["passport_version"] != PASSPORT_VERSION:
            raise FormatError(
                f"{path}: a passport of version {quoted(header['passport_version'], 40)}, and this tracekit reads"
                f" version {PASSPORT_VERSION}; measure it again with `tracekit passport`"
            )
        try:
            head = msgspec.convert(header, PassportHead)
        except msgspec.ValidationError as error:
            raise FormatError(f"{path}: damaged passport: {error}; measure it again with `tracekit passport`") from None
        kernels = _checked(path, read_columns(path))
        if (problem := _beyond_peak(head, kernels)) is not None:
            raise FormatError(f"{path}: {problem}: `time_s` is in seconds; measure it again with `tracekit passport`")
        if kernels.is_empty() and not (head.peak_tflops and head.bandwidth_gb_s):
            raise FormatError(f"{path}: holds no kernel and no peaks; measure it again with `tracekit passport`")
        return cls(head, kernels)

    def write(self, path: str | os.PathLike[str], more: dict[str, Any]) -> None:
        """Write the file; replaces only another passport. `more`: what else its head says. Raises OutputError."""
        head = json.dumps(msgspec.to_builtins(self.head) | more)
        with replacing(path, PASSPORT_FILE) as temporary:
            self.kernels.write_parquet(temporary, metadata={METADATA_KEY: head})

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes answers about this card less certain."""
        head, warnings = self.head, []
        if self.kernels.is_empty():
            warnings.append(f"no kernel was measured on {head.gpu}: peaks stand in, which are often off by 60 %")
        if head.power_limit_w is not None and head.power_limit_w[0] < head.power_limit_w[1]:
            now_w, most_w = head.power_limit_w
            warnings.append(f"{head.gpu} was measured at {now_w:.0f} W of {most_w:.0f} W: uncapped cards are faster")
        if head.mig:
            warnings.append(f"{head.gpu} was measured as MIG slice {head.mig}: the whole card is faster")
        return tuple(warnings)


def _is_passport(file: BinaryIO) -> bool:
    try:
        return '"passport_version"' in pl.read_parquet_metadata(file).get(METADATA_KEY, "")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):  # a damaged file
        return False


PASSPORT_FILE = Kind("a passport of a GPU", _is_passport)


def _checked(path: str | os.PathLike[str], table: pl.DataFrame) -> pl.DataFrame:
    """The kernels with the right types. Raises FormatError for a missing column or an impossible value."""
    if missing := [name for name in KERNEL_SCHEMA if name not in table.columns]:
        raise FormatError(f"{path}: lacks the columns {listed(missing)}; measure it again with `tracekit passport`")
    kernels = table.select(pl.col(name).cast(kind, strict=False) for name, kind in KERNEL_SCHEMA.items())
    times = pl.col("time_s").is_between(1e-9, 1e6)
    sizes = [pl.col(name).is_between(0, 1 << 40) for name in _SIZES]
    no_product = pl.col("kind") != "matmul"
    shaped = [no_product | (pl.col(name) >= 1) for name in _SIZES]
    sane = times & pl.col("bytes").is_finite() & pl.all_horizontal(*sizes, *shaped)
    named = pl.all_horizontal(pl.col(name).is_not_null() for name in _NAMES)
    wrong = kernels.select((~(sane & named)).fill_null(value=True).arg_true()).to_series()
    if len(wrong):
        row = quoted(table.row(int(wrong[0])), 160)
        raise FormatError(f"{path}: kernel {wrong[0]} is {row}, with an impossible size or time; measure it again")
    return kernels


def _beyond_peak(head: PassportHead, kernels: pl.DataFrame) -> str | None:
    """The first product that is too fast for its peak, or too slow although it is the fastest of the large ones, as
    times in another unit make it; None if all are possible.
    """
    peaks = pl.col("dtype").replace_strict(dict(head.peak_tflops), default=None, return_dtype=pl.Float64)
    flop = 2.0 * pl.col("batch") * pl.col("m") * pl.col("n") * pl.col("k")
    of_peak = (
        kernels.with_row_index("row")
        .filter(pl.col("kind") == "matmul")
        .select("row", "dtype", is_large=flop >= _LARGE_FLOP, share=flop / 1e12 / pl.col("time_s") / peaks)
        .drop_nulls("share")
    )
    fast = of_peak.filter(pl.col("share") > _MOST_OF_PEAK)["row"]
    if len(fast):
        return f"kernel {fast[0]} is faster than the peak of {head.gpu} allows"
    fastest = of_peak.filter("is_large").sort("share").group_by("dtype", maintain_order=True).last()
    slow = fastest.filter(pl.col("share") < _LEAST_OF_PEAK)["row"]
    return f"kernel {slow[0]} takes over 100 times as long as at the peak of {head.gpu}" if len(slow) else None


@cache
def _shipped() -> tuple[Passport, ...]:
    """The passports that come with tracekit."""
    folder = files("tracekit.analysis.hardware").joinpath("passports")
    paths = sorted(map(str, folder.iterdir()))
    return tuple(Passport.read(path) for path in paths if path.endswith(".parquet"))


def known_passport(gpu: str | None) -> Passport | None:
    """The passport of a GPU of this name; of one that only `cards.csv` has, without kernels; None if it is unknown.

    Raises FormatError if TRACEKIT_CARDS cannot be read.
    """
    card = Card.named(gpu)
    if gpu is None or card is None:
        return None
    measured = next((passport for passport in _shipped() if Card.named(passport.head.gpu) == card), None)
    if measured is not None:
        return measured
    peaks = {"fp16": card.half, "bf16": card.half, "tf32": card.tensor, "fp32": card.single}
    head = PassportHead(
        passport_version=PASSPORT_VERSION,
        gpu=card.name,
        memory_gb=0,
        peak_tflops={dtype: peak / 1e12 for dtype, peak in peaks.items()},
        bandwidth_gb_s=card.bytes_s / 1e9,
    )
    return Passport(head, pl.DataFrame(schema=KERNEL_SCHEMA))


class OtherGpu(Struct, frozen=True, eq=False):
    """A GPU, and the selection of the ops that would run on it, None for all."""

    passport: Passport
    selection: str | None = None

    @classmethod
    def parse(cls, text: str) -> OtherGpu:
        """Read "FILE", "NAME" or "FILE on SELECTION". Raises FormatError or SelectionError."""
        where, on, selection = text.rpartition(" on ")
        if not on or Path(text).exists():
            return cls(passport_of(text, "--gpu"))
        parse_selection(selection)
        return cls(passport_of(where.strip(), "--gpu"), selection.strip())


class HardwareQuestion(Struct, frozen=True, eq=False):
    """`gpus`: in the order asked. `source`: the GPU of the trace, None for a known one of the same name.

    `precision`: None for that of the trace.
    """

    gpus: tuple[OtherGpu, ...]
    source: Passport | None = None
    precision: str | None = None

    @classmethod
    def parse(cls, gpus: Sequence[str], source: str | None, precision: str | None) -> HardwareQuestion:
        """Read what was asked. Raises FormatError or SelectionError."""
        if not gpus and precision is None:
            raise SelectionError("--gpu-from is the GPU of the trace; name another one with --gpu")
        passport = None if source is None else passport_of(source, "--gpu-from")
        others = tuple(map(OtherGpu.parse, gpus))
        measured = {dtype for gpu in others for dtype in gpu.passport.kernels["dtype"].to_list()}
        if precision is not None and precision not in measured:
            precision = precision.strip().lower()
            precision = _PRECISIONS.get(precision, precision)
        return cls(others, passport, precision)


def passport_of(text: str, option: str) -> Passport:
    """The passport in a file, or of the known GPU of that name. Raises FormatError or SelectionError."""
    if not Path(text).is_file() and not {"/", "."} & {*text}:
        passport = known_passport(text)
        if passport is None:
            raise SelectionError(
                f"{option} {quoted(text, 80)}: no such file, and no known GPU; `tracekit passport --out FILE` measures"
                " one"
            )
        return passport
    return Passport.read(text)
