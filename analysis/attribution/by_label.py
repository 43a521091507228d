"""Attribution by one or more labels, such as host, tensor-parallel rank or kernel class.

In: a replay and names of labels. Out: for each value that occurs, the exact S_x of the ops x that have it. Equation:
S_x = T(ideal, x as recorded) / T(ideal), OSDI'25.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.labels import UNLABELLED, LabelledGraph, Mask, Value
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.codes import combinations
from tracekit.analysis.numeric.means import ratio_margins
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import step_times, step_times_each
from tracekit.analysis.whatif.paper import IDEAL, ORIGINAL, addition, removal
from tracekit.analysis.whatif.selection import Context, Selection
from tracekit.base.errors import SelectionError

#: Every value takes a replay of the whole job; more op evaluations than this take minutes.
COSTLIEST_OP_REPLAYS = 20_000_000_000


class Share(Struct, frozen=True):
    """Cost of the ops of one value (or combination of values).

    `ops`: their number. `slowdown`: S_x, nan if the ideal job takes no time, +- `error`, half the width of its 95 %
    interval over the steps, nan if they are too few. Seconds per step: `added_s` = T(ideal, x as recorded) - T(ideal);
    `removed_s` = T(original) - T(original, x ideal), what idealising the ops saves.
    """

    values: tuple[Value, ...]
    ops: int
    slowdown: float
    error: float
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
    for block, of_block in zip(graph.blocks, codes, strict=True):
        if block.present is None:
            labelled, each = of_block[of_block != UNLABELLED], block.start.size // of_block.size
        else:
            labelled, each = np.where(block.present, of_block, UNLABELLED).ravel(), 1
            labelled = labelled[labelled != UNLABELLED]
        counts += np.bincount(labelled, minlength=len(values)) * each
    added_each, removed_each = _step_times(replay, codes, len(values))
    added, removed = added_each.mean(axis=1), removed_each.mean(axis=1)
    ideal_each, original_each = step_times(replay, IDEAL), step_times(replay, ORIGINAL)
    ideal, original = float(ideal_each.mean()), float(original_each.mean())
    errors = ratio_margins(added_each.T, ideal_each, original_each)
    shares = [
        Share(
            value,
            int(counts[at]),
            float(added[at]) / ideal if ideal else math.nan,
            float(errors[at]),
            float(added[at] - ideal),
            float(original - removed[at]),
        )
        for at, value in enumerate(values)
    ]
    return tuple(sorted(shares, key=lambda share: -share.added_s))


def _step_times(replay: GraphReplay, codes: Sequence[Int32s], values: int) -> Iterator[Floats]:
    """The step times of the ideal job with the ops of each value as recorded, and of the original job with those ideal,
    [values, steps] each.
    """
    if replay.has_few_lanes:
        cost, ideal = replay.durations.cost, replay.durations.ideal
        yield replay.step_times_each_choice(ideal, cost, codes, values)
        yield replay.step_times_each_choice(cost, ideal, codes, values)
        return
    chosen = [_Combination(codes, code) for code in range(values)]
    for question in (addition, removal):
        yield step_times_each(replay, [question(selection) for selection in chosen])


def _combined(graph: LabelledGraph, names: Sequence[str]) -> tuple[list[tuple[Value, ...]], list[Int32s]]:
    """The combinations that occur, and per block the index of each op's combination; broadcasts to [rows, lanes]."""
    parts = [[graph.label(number, name) for name in names] for number in range(len(graph.blocks))]
    cells = [np.broadcast_arrays(*(label.codes for label in labels)) for labels in parts]
    columns = [np.concatenate([of[at].ravel() for of in cells]).astype(np.int64) for at in range(len(names))]
    combined, number = combinations(columns)
    split = np.split(number, np.cumsum([of[0].size for of in cells])[:-1])
    codes = [one.reshape(of[0].shape) for one, of in zip(split, cells, strict=True)]
    occurs = np.zeros(len(combined), np.bool_)
    for code, block in zip(codes, graph.blocks, strict=True):
        present = block.present
        occurs[code if present is None else np.broadcast_to(code, present.shape)[present]] = True
    occurs &= (combined != UNLABELLED).all(axis=1)
    values = [
        tuple(label.value(code) for label, code in zip(parts[0], row, strict=True)) for row in combined[occurs].tolist()
    ]
    place = np.where(occurs, np.cumsum(occurs) - 1, UNLABELLED).astype(np.int32)  # UNLABELLED for ops without a label
    return values, [place[code] for code in codes]


class _Combination(Selection, frozen=True, eq=False):
    """The ops of one combination of values. `codes`: the combination of each op, per block."""

    codes: Sequence[Int32s]
    code: int

    def mask(self, context: Context) -> Mask:
        chosen: Mask = self.codes[context.number] == self.code
        return chosen
