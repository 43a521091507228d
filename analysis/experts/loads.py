"""Tokens of each expert, as a training job logs them.

In: a JSONL file, one line per step and layer: `{"step": 3, "layer": 0, "tokens_per_expert": [1232, 48, ...]}`, the
tokens of all source ranks. Out: `Loads`.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.base.errors import FormatError
from tracekit.base.text import quoted

#: Largest file that is read, bytes, and what an expert may have of tokens.
_LARGEST_FILE = 1 << 30
_Tokens = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _LoadsRow(Struct):
    step: _Number
    layer: _Number
    tokens_per_expert: Annotated[list[_Tokens], msgspec.Meta(min_length=1, max_length=1 << 16)]


class Loads(Struct, frozen=True, eq=False):
    """Tokens of each expert of a job, by step and layer: `tokens`, [steps, layers, experts]; `source`: for messages."""

    source: str
    steps: Ints
    layers: Ints
    tokens: Floats

    @classmethod
    def read(cls, path: Path) -> Loads:
        """Read a file. Raises FormatError, with the line, if it is not as the module describes."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a file; loads are read from a file with a line per step and layer")
            if status.st_size > _LARGEST_FILE:
                raise FormatError(f"{path}: larger than {_LARGEST_FILE >> 30} GiB; keep the steps of the recording")
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise FormatError(
                f"{path}: cannot be read: {error.strerror or error}; check path and permissions"
            ) from None
        by_layer: dict[tuple[int, int], Sequence[float]] = {}
        experts = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=_LoadsRow)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FormatError(
                    f'{path}, line {number}: {error}; expected {{"step": 0, "layer": 0, "tokens_per_expert": [12, 7]}}'
                ) from None
            experts = experts or len(row.tokens_per_expert)
            if len(row.tokens_per_expert) != experts:
                raise FormatError(
                    f"{path}, line {number}: {len(row.tokens_per_expert)} experts, the lines before have {experts};"
                    " write one file per kind of layer"
                )
            if (row.step, row.layer) in by_layer:
                raise FormatError(
                    f"{path}, line {number}: step {row.step} has layer {row.layer} twice; add up the microbatches of a"
                    " step, and leave out forwards that are computed again"
                )
            by_layer[row.step, row.layer] = row.tokens_per_expert
        if not by_layer:
            raise FormatError(f"{path}: no loads; expected a line per step and layer")
        steps, layers = (sorted({key[at] for key in by_layer}) for at in (0, 1))
        missing = next(
            (key for key in ((step, layer) for step in steps for layer in layers) if key not in by_layer), None
        )
        if missing is not None:
            raise FormatError(f"{path}: step {missing[0]} lacks layer {missing[1]}; write all layers of each step")
        tokens = np.array([[by_layer[step, layer] for layer in layers] for step in steps])
        return cls(str(path), np.array(steps), np.array(layers), tokens)

    def without_experts(self, job: str) -> FormatError:
        """The error that a job has no experts for these loads."""
        return FormatError(f"{self.source}: {quoted(job)} has no all-to-alls of experts; leave the loads out")

    def at(self, steps: Ints) -> Floats:
        """The tokens in these steps, [steps, layers, experts]. Raises FormatError if there are none of a step."""
        present = np.isin(steps, self.steps)
        if not present.all():
            raise FormatError(
                f"{self.source}: holds steps {self.steps[0]} to {self.steps[-1]}, not step {steps[~present][0]} of the"
                " recording; give the loads of the recorded steps"
            )
        return np.asarray(self.tokens[np.searchsorted(self.steps, steps)])
