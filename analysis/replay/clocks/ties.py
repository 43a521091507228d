"""Ties between the clocks of workers: ops that end for several of them at the same time.

In: a `DependencyGraph` as recorded. Out: `Ties` per run of steps: the time at which each worker left the collectives
that it shares with others, and bounds of the offset between the two ends of a link.

A collective ends for all of its members at nearly the same moment, so a member that leaves late has a clock that is
ahead, or a slow network card. A transfer ends on its receiver no earlier than on its sender. So the two directions of a
link bound the offset between its ends from both sides, as in NTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.graph.op_grid import OpGrid, op_grid, transfer_grid
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import median
from tracekit.trace.model import OpKind

#: Collectives over the DP ranks of a stage. They share a network card, so together they are one witness, with less
#: weight than others: a slow card looks like a clock that is ahead.
OF_DP_RANKS = (
    OpKind.PARAMS_ALL_GATHER,
    OpKind.GRADS_REDUCE_SCATTER,
    OpKind.SEPARATE_GRADS_ALL_REDUCE,
    OpKind.ALL_REDUCE,
)
OF_DP_RANKS_WEIGHT = 0.5
#: Look at this many ops of a kind per worker and step.
OPS_PER_STEP = 4


class Group(Struct, frozen=True, eq=False):
    """One kind of collective: when its members left it, seconds, [runs, stages, dp_ranks], nan for workers outside it.

    Times are relative to the median member of the group, which is all DP ranks of a stage or, with `all_stages`, the
    whole job. `weight`: weight of this kind relative to others. `took_s`: duration of the transfer, seconds.
    """

    left_s: Floats
    weight: float
    all_stages: bool
    took_s: float


class Ties(Struct, frozen=True, eq=False):
    """All ties of a job.

    `low`, `high`: bounds of the offset of stage s + 1 from stage s, seconds ahead, [runs, stages, dp_ranks], infinite
    if unbounded; the first stage follows the last. `ends`: offset of the first stage from the last, seconds ahead,
    [runs, dp_ranks], nan if nothing ties them. `link_took_s`: duration of a transfer between stages, seconds.
    """

    groups: tuple[Group, ...]
    low: Floats
    high: Floats
    ends: Floats
    link_took_s: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """Runs, stages, DP ranks."""
        runs, stages, dp_ranks = self.low.shape
        return runs, stages, dp_ranks

    def only(self, dp_indices: Ints) -> Ties:
        """The ties of these DP ranks only."""
        groups = tuple(replace(group, left_s=group.left_s[..., dp_indices]) for group in self.groups)
        low, high, ends = (values[..., dp_indices] for values in (self.low, self.high, self.ends))
        return Ties(groups, low, high, ends, self.link_took_s)

    def linked(self) -> Ints:
        """The lowest number of any worker that each worker is tied to, directly or through others, [stages, dp_ranks].

        Clocks of workers with one number can be compared.
        """
        _, stages, dp_ranks = self.shape
        groups = [(_seen(group.left_s), None if group.all_stages else 1) for group in self.groups]
        links = np.asarray(np.any(np.isfinite(self.low) | np.isfinite(self.high), axis=0))
        ends = _seen(self.ends)
        number = np.arange(stages * dp_ranks).reshape(stages, dp_ranks)
        while True:
            before = number
            for member, axis in groups:
                lowest = np.where(member, number, number.size).min(axis=axis, keepdims=True)
                number = np.where(member, np.minimum(number, lowest), number)
            for stage in range(stages):
                pair = [stage, (stage + 1) % stages]
                number[pair] = np.where(links[stage], number[pair].min(axis=0), number[pair])
            number[[0, -1]] = np.where(ends, number[[0, -1]].min(axis=0), number[[0, -1]])
            # If a member's number was lowered, lower all others that had the old number too.
            number = number.ravel()[number]
            if (number == before).all():
                return number


def _seen(values: Floats) -> np.ndarray:
    """True where any run has a value."""
    return np.asarray(np.isfinite(values).any(axis=0))


class _Tied(Struct, frozen=True, eq=False):
    """Ops that end together: how much later than the median member each left, seconds, [slots, ops, steps, dp_ranks].

    `quickest_s`: the shortest duration of a member, without the last axes.
    """

    left_s: Floats
    quickest_s: Floats

    @classmethod
    def of(cls, graph: DependencyGraph, kind: OpKind, axes: tuple[int, ...], most: int) -> _Tied | None:
        """Ops of a kind, each joining the members along `axes`; None if there are none."""
        grid = op_grid(graph, (kind,), most=most)
        if grid.empty:
            return None
        duration = grid.gather([block.duration for block in graph.blocks])
        ends = grid.gather([block.start for block in graph.blocks]) + duration
        # The last to arrive did not wait: its duration is the shortest, which no clock changes.
        quickest = np.fmin.reduce(duration, axis=axes[-1])
        return cls(ends - np.expand_dims(median(ends, axes), axes), quickest)

    @property
    def took_s(self) -> float:
        """The usual duration of the transfer, seconds."""
        return float(np.nanmedian(self.quickest_s))


class TieSource(Struct, frozen=True, eq=False, dict=True):
    """The ends of the tied ops of a graph, to be aggregated over any runs of steps.

    `shape`: stages, DP ranks. `dp_kinds`, `clip`: collectives over the DP ranks of a stage, and over all workers.
    `embedding`: ends of the exchange of embedding gradients, [stages, ops, steps, dp_ranks]. `lag`: how much later each
    receive ends than its send, [slots, ops, steps, dp_ranks], and `took`: the duration of the transfer. Seconds.
    """

    shape: tuple[int, int]
    dp_kinds: Mapping[OpKind, _Tied]
    clip: _Tied | None
    embedding: Floats | None
    lag: Floats | None
    took: Floats | None

    @classmethod
    def of(cls, graph: DependencyGraph) -> TieSource:
        """Read them."""
        shape = (graph.layout.pp, len(graph.dp_ranks))
        tied = {kind: _Tied.of(graph, kind, (3,), OPS_PER_STEP) for kind in OF_DP_RANKS if graph.rendezvous_count}
        dp_kinds = {kind: one for kind, one in tied.items() if one is not None}
        clip = _Tied.of(graph, OpKind.OPTIMIZER_CLIP_MAIN_GRAD, (0, 3), 1)
        embedding = op_grid(graph, (OpKind.EMBEDDING_GRADS_ALL_REDUCE,), most=OPS_PER_STEP)
        exchanged = None if embedding.empty or graph.layout.pp < 2 else _ends(graph, embedding)
        transfers = transfer_grid(graph, most=OPS_PER_STEP)
        if graph.layout.pp < 2 or transfers.empty:
            return cls(shape, dp_kinds, clip, exchanged, None, None)
        lag = _ends(graph, transfers.recvs) - _ends(graph, transfers.sends)
        return cls(shape, dp_kinds, clip, exchanged, lag, transfers.gather([block.duration for block in graph.blocks]))

    @classmethod
    def joined(cls, parts: Sequence[TieSource], steps: Sequence[int]) -> TieSource:
        """The ties of several batches of so many steps, one after the other."""
        if len(parts) == 1:
            return parts[0]

        def grids(of_batches: Sequence[Floats | None]) -> Floats | None:
            with_ops = [one for one in of_batches if one is not None]
            if not with_ops:
                return None
            slots, _, _, *more = with_ops[0].shape
            grid = np.full((slots, max(one.shape[1] for one in with_ops), sum(steps), *more), np.nan)
            for batch, last, count in zip(of_batches, np.cumsum(steps).tolist(), steps, strict=True):
                if batch is not None:
                    grid[:, : batch.shape[1], last - count : last] = batch
            return grid

        def tied(of_batches: Sequence[_Tied | None]) -> _Tied | None:
            left_s = grids([None if one is None else one.left_s for one in of_batches])
            quickest_s = grids([None if one is None else one.quickest_s for one in of_batches])
            return None if left_s is None or quickest_s is None else _Tied(left_s, quickest_s)

        of_kinds = {kind: tied([part.dp_kinds.get(kind) for part in parts]) for kind in OF_DP_RANKS}
        return cls(
            parts[0].shape,
            {kind: one for kind, one in of_kinds.items() if one is not None},
            tied([part.clip for part in parts]),
            grids([part.embedding for part in parts]),
            grids([part.lag for part in parts]),
            grids([part.took for part in parts]),
        )

    @cached_property
    def _link_took_s(self) -> float:
        return 0.0 if self.took is None else float(np.nanmedian(self.took))

    def ties(self, runs: Sequence[Ints]) -> Ties:
        """The median ties of each of these runs of steps."""
        weight = OF_DP_RANKS_WEIGHT / max(len(self.dp_kinds), 1)
        groups = [Group(_by_run(one.left_s, runs), weight, False, one.took_s) for one in self.dp_kinds.values()]
        if self.clip is not None:
            groups.append(Group(_by_run(self.clip.left_s, runs), 1.0, True, self.clip.took_s))
        stages, dp_ranks = self.shape
        low, high = np.full((2, len(runs), stages, dp_ranks), np.inf) * np.array([-1, 1])[:, None, None, None]
        if self.lag is not None:
            lag = _by_run(self.lag, runs)
            forward, backward = lag[:, ::2], lag[:, 1::2]
            low, high = np.fmin(-backward, forward), np.fmax(-backward, forward)
            # If only one direction was recorded, it bounds one side.
            low = np.where(np.isnan(backward), -np.inf, low)
            high = np.where(np.isnan(forward), np.inf, high)
        ends = np.full((len(runs), dp_ranks), np.nan)
        if self.embedding is not None:
            ends = _by_run(self.embedding[:1] - self.embedding[-1:], runs)[:, 0]
        return Ties(tuple(groups), low, high, ends, self._link_took_s)


def _ends(graph: DependencyGraph, grid: OpGrid) -> Floats:
    """Ends of the ops of a grid, seconds, in the grid's shape."""
    starts = grid.gather([block.start for block in graph.blocks])
    return starts + grid.gather([block.duration for block in graph.blocks])


def _by_run(values: Floats, runs: Sequence[Ints]) -> Floats:
    """Medians over the ops and steps of each run, [runs, slots, dp_ranks]. `values`: [slots, ops, steps, dp_ranks]."""
    if len(runs) == values.shape[2]:
        return median(values, (1,)).transpose(1, 0, 2)
    return np.stack([median(values[:, :, run], (1, 2)) for run in runs])
