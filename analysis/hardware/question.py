"""The question what a job would take on other GPUs, as people ask it.

In: `--gpu`, `--gpu-from` and `--precision`. Out: `HardwareQuestion`, its passports read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from tracekit.analysis.hardware.passport import Passport, known_passport
from tracekit.analysis.whatif.selection_text import parse_selection
from tracekit.base.errors import SelectionError
from tracekit.base.text import quoted

#: Names of types as torch writes them.
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}


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
