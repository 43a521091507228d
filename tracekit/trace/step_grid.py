"""Where each op of a trace belongs in the order of step, DP rank, stage, kind and seq.

In: the columns of ops. Out: `StepGrid`, which counts them, and finds the place of each.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.trace import _rows
from tracekit.trace.model import KINDS

Number = TypeVar("Number", bound=np.generic)


def distinct_steps(step: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """The step numbers (or other numbers from 0) that occur, ascending."""
    first, last = int(step.min()), int(step.max())
    if last - first > 4 * len(step) + 1_000_000:
        return np.unique(step).astype(np.int32)
    seen = np.zeros(last - first + 1, np.bool_)
    seen[step - first] = True
    return (np.flatnonzero(seen) + first).astype(np.int32)


def step_positions(step: npt.NDArray[np.integer[Any]], steps: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Index of each of `step` in the ascending step numbers `steps`, int32; `step` itself if it counts from 0."""
    first, last = int(steps[0]), int(steps[-1])
    if first == 0 and last == len(steps) - 1:
        return np.ascontiguousarray(step, np.int32)
    if last - first > 4 * len(step) + 1_000_000:
        return np.searchsorted(steps, step).astype(np.int32)
    table = np.zeros(last - first + 1, np.int32)
    table[steps - first] = np.arange(len(steps), dtype=np.int32)
    return np.asarray(table[step - first])


def in_order(values: npt.NDArray[Number], place: npt.NDArray[np.int32]) -> npt.NDArray[Number]:
    """Each of the `values`, of 4 or 8 bytes, in its place."""
    ordered = np.empty_like(values)
    if values.itemsize == 4:
        _rows.put_4_bytes(values.view(np.int32), place, ordered.view(np.int32))
    else:
        _rows.put_8_bytes(values.view(np.int64), place, ordered.view(np.int64))
    return ordered


class StepGrid:
    """What workers do in each step. `steps`, `dp_ranks`, `stages`: all that there are."""

    def __init__(
        self, steps: npt.NDArray[np.int32], dp_ranks: npt.NDArray[np.int32], stages: npt.NDArray[np.int32]
    ) -> None:
        self.numbers = {"step": steps, "dp_rank": dp_ranks, "pp_rank": stages}

    def fit(self, ops: int) -> bool:
        """Whether a table of them takes no more memory than so many ops may."""
        cells, most = math.prod(map(len, self.numbers.values())), np.iinfo(np.int32).max
        return cells <= min(4 * ops + 1_000_000, most) and ops <= most

    @cached_property
    def rank_of(self) -> npt.NDArray[np.int32]:
        """The rank of each worker in each step, -1 if it has no op, [steps, dp_ranks, stages]."""
        return np.full([len(values) for values in self.numbers.values()], -1, np.int32)

    @cached_property
    def counts(self) -> npt.NDArray[np.int32]:
        """Ops of each kind of each worker in each step, [steps x dp_ranks x stages, kinds]."""
        return np.zeros((self.rank_of.size, len(KINDS)), np.int32)

    def cells(self, ops: pl.DataFrame) -> npt.NDArray[np.int32]:
        """The worker and step of each op, an index into `rank_of`, [ops]."""
        cell = np.zeros(ops.height, np.int32)
        for name, values in self.numbers.items():
            cell *= np.int32(len(values))
            cell += step_positions(ops[name].to_numpy(), values)
        return cell

    def place(self, ops: pl.DataFrame, cell: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Count all ops, and return where each belongs in the order of step, DP rank, stage, kind and seq, [ops].

        `ops`: their ranks, kinds and seqs; `cell`: their `cells`. None if a worker has two ranks, two ops belong in one
        place, or one beyond the last of its kind.
        """
        rank, kind, seq = ops["rank"].to_numpy(), ops["kind"].cat.physical().to_numpy(), ops["seq"].to_numpy()
        one_rank = _rows.count(cell, rank, kind, len(KINDS), self.rank_of.reshape(-1), self.counts.reshape(-1))
        if not one_rank or not ((self.rank_of == self.rank_of.max(axis=0)) | (self.rank_of < 0)).all():
            return None
        first, filled = np.append(self.first, len(cell)).astype(np.int32), np.zeros(len(cell) // 8 + 1, np.uint8)
        place = np.empty(len(cell), np.int32)
        return place if _rows.find_places(cell, kind, seq, len(KINDS), first, filled, place) else None

    @cached_property
    def first(self) -> npt.NDArray[np.int64]:
        """Where the ops of each kind of each worker in each step begin, if they are in that order; as `counts`."""
        return (np.cumsum(self.counts, dtype=np.int64) - self.counts.reshape(-1)).reshape(self.counts.shape)

    def places_of(self, counts: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
        """Cell, kind, seq and place of the ops that `counts` has, all or none of a cell and kind, [ops] each."""
        cell, kind = np.nonzero(counts)
        often = counts[cell, kind]
        seq = np.arange(int(often.sum())) - np.repeat(np.cumsum(often, dtype=np.int64) - often, often)
        place = np.repeat(self.first[cell, kind], often) + seq
        return np.repeat(cell, often), np.repeat(kind.astype(np.uint8), often), seq.astype(np.int32), place

    def frame(self, cell: npt.NDArray[np.int64]) -> pl.DataFrame:
        """Step, DP rank, stage and rank of workers in steps, given as indices into `rank_of`."""
        indices = np.unravel_index(cell, self.rank_of.shape)
        columns = {name: values[index] for (name, values), index in zip(self.numbers.items(), indices, strict=True)}
        return pl.DataFrame(columns | {"rank": self.rank_of.reshape(-1)[cell]})
