"""Attribution by one or more labels, such as host, tensor-parallel rank or kernel class.

In: a replay and names of labels. Out: for each value that occurs, the exact S_x of the ops x that have it. Equation:
S_x = T(ideal, x as recorded) / T(ideal), OSDI'25.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.labels import UNLABELLED, LabelledGraph, Value, count_ops
from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs
from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL
from tracekit.base.errors import SelectionError

#: Every value takes a replay of the whole job; more op evaluations than this take minutes.
COSTLIEST_OP_REPLAYS = 20_000_000_000


class Share(Struct, frozen=True):
    """Cost of the ops of one value (or combination of values).

    `ops`: their number. `slowdown`: S_x, nan if the ideal job takes no time. Seconds per step: `added_s` = T(ideal, x
    as recorded) - T(ideal); `removed_s` = T(original) - T(original, x ideal), what idealising the ops saves.
    """

    values: tuple[Value, ...]
    ops: int
    slowdown: float
    added_s: float
    removed_s: float


def attribute_by(replay: GraphReplay, names: Sequence[str]) -> tuple[Share, ...]:
    """Exact S_x by a label or by combinations of several, costliest first. Ops that lack one of the labels are left
    out.

    Raises SelectionError for a label that no op has, or one with too many values to replay.
    """
    graph = replay.graph
    values, codes = _combined(graph, names)
    ops = sum(count_ops(block, np.ones((1, 1), np.bool_)) for block in graph.blocks)
    if 2 * len(values) * ops > COSTLIEST_OP_REPLAYS:
        raise SelectionError(
            f"{' x '.join(names)} has {len(values)} values, and each takes two replays of {ops} ops: choose a"
            " label with fewer values, or fewer steps"
        )
    counts = np.zeros(len(values), np.int64)
    for block, here in zip(graph.blocks, codes, strict=True):
        if block.present is None:
            labelled, each = here[here != UNLABELLED], block.start.size // here.size
        else:
            labelled, each = np.where(block.present, here, UNLABELLED).ravel(), 1
            labelled = labelled[labelled != UNLABELLED]
        counts += np.bincount(labelled, minlength=len(values)) * each
    rows = [_RowsOf(here) for here in codes]
    added = replay.step_times_each([_Only(rows, code, kept=True) for code in range(len(values))]).mean(axis=1)
    removed = replay.step_times_each([_Only(rows, code, kept=False) for code in range(len(values))]).mean(axis=1)
    ideal, original = replay.mean_step_time(IDEAL), replay.mean_step_time(ORIGINAL)
    shares = [
        Share(
            value,
            int(counts[at]),
            float(added[at]) / ideal if ideal else math.nan,
            float(added[at] - ideal),
            float(original - removed[at]),
        )
        for at, value in enumerate(values)
    ]
    return tuple(sorted(shares, key=lambda share: -share.added_s))


def _combined(graph: LabelledGraph, names: Sequence[str]) -> tuple[list[tuple[Value, ...]], list[Ints]]:
    """The combinations that occur, and per block the index of each op's combination; broadcasts to [rows, lanes]."""
    parts = [[graph.label(number, name) for name in names] for number in range(len(graph.blocks))]
    # Numbers of any size, renumbered.
    codes_of = [
        np.unique(np.concatenate([np.unique(labels[at].codes) for labels in parts])) for at in range(len(names))
    ]
    sizes = [len(codes) for codes in codes_of]
    if math.prod(sizes) >= np.iinfo(np.int64).max:
        raise SelectionError(f"{' x '.join(names)}: too many combinations; choose labels with fewer values")
    mixed, occurring = [], []
    for labels, block in zip(parts, graph.blocks, strict=True):
        code = np.zeros((1, 1), np.int64)
        unlabelled = np.zeros((1, 1), np.bool_)
        for label, codes in zip(labels, codes_of, strict=True):
            code = code * len(codes) + np.searchsorted(codes, label.codes)
            unlabelled = unlabelled | (label.codes == UNLABELLED)
        mixed.append(np.where(unlabelled, UNLABELLED, code))
        occurring.append(np.unique(mixed[-1] if block.present is None else np.where(block.present, mixed[-1], -1)))
    found = np.unique(np.concatenate(occurring))
    found = found[found != UNLABELLED]
    digits = np.stack(np.unravel_index(found, sizes), axis=1).tolist()
    values = [
        tuple(label.value(int(codes[at])) for label, codes, at in zip(parts[0], codes_of, row, strict=True))
        for row in digits
    ]
    positions = [
        np.where(np.isin(code, found), np.searchsorted(found, code), UNLABELLED) for code in mixed
    ]  # UNLABELLED for ops without a label
    return values, positions


class _RowsOf:
    """The ops of each value in one block, as rows if all lanes agree."""

    def __init__(self, codes: Ints) -> None:
        self.codes = codes
        self.rows: list[Ints] = []
        if codes.shape[1] == 1:
            order = np.argsort(codes[:, 0], kind="stable")
            bounds = np.searchsorted(codes[order, 0], np.arange(int(codes.max(initial=-1)) + 2))
            self.rows = [order[first:last] for first, last in pairwise(bounds)]


class _Only(Struct, frozen=True):
    """Scenario: the ideal job with only these ops as recorded (`kept`), or the original with only these ops ideal."""

    rows: Sequence[_RowsOf]
    code: int
    kept: bool

    def costs(self, graph: LabelledGraph, durations: Durations, number: int) -> Costs:
        """The costs of block `number`."""
        cost, ideal, chosen = durations.cost[number], durations.ideal[number], self.rows[number]
        none = np.full(graph.blocks[number].template.rows, -1, np.int64)
        if chosen.codes.shape == (len(none), 1) and ideal.ndim == 1:
            rows = chosen.rows[self.code] if self.code < len(chosen.rows) else np.empty(0, np.int64)
            source = none.copy() if self.kept else np.arange(len(none))
            source[rows] = rows if self.kept else -1
            return Costs(cost, source, ideal, NO_MATRIX, none)
        mask = (chosen.codes == self.code) == self.kept
        costs = np.where(mask, cost, ideal[:, None] if ideal.ndim == 1 else ideal)
        return Costs(costs, np.arange(len(none)), np.zeros(len(none)), NO_MATRIX, none)
