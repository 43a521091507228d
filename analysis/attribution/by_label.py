"""Attribution by one or more labels, such as host, tensor-parallel rank or kernel class.

In: a replay and names of labels. Out: for each value that occurs, the exact S_x of the ops x that have it. Equation:
S_x = T(ideal, x as recorded) / T(ideal), OSDI'25.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.labels import UNLABELLED, LabelledGraph, Mask, Value
from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL, Scenario
from tracekit.analysis.whatif.selection import Context, Selection
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
    ops = sum(block.start.size if block.present is None else int(block.present.sum()) for block in graph.blocks)
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
    chosen = [_Combination(codes, code) for code in range(len(values))]
    added, removed = (
        replay.step_times_each([scenario(one) for one in chosen]).mean(axis=1)
        for scenario in (Scenario.addition, Scenario.removal)
    )
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


class _Combination(Selection, frozen=True, eq=False):
    """The ops of one combination of values. `codes`: the combination of each op, per block."""

    codes: Sequence[Ints]
    code: int

    def mask(self, context: Context) -> Mask:
        chosen: Mask = self.codes[context.number] == self.code
        return chosen
