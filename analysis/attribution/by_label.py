"""Times by label: the exact S_x of the ops x with each value of labels, and what each step spends on each part.

In: a replay of any job. Out: `Share`s by one or more labels, such as host, tensor-parallel rank or kernel class, with
S_x = T(ideal, x as recorded) / T(ideal) (OSDI'25); and `StepsSpent`: times of steps, and the seconds of each part in
each step. A part is the ops of one kind, phase or kernel; its time is that of its ops without waiting for other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import UNLABELLED, LabelledBlock, LabelledGraph, Mask, Value, label_values
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, combinations
from tracekit.analysis.numeric.statistics import ratio_margins
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, addition, removal, step_times, step_times_each
from tracekit.analysis.whatif.selection import Context, Selection
from tracekit.base.errors import SelectionError
from tracekit.base.text import ranks_text

#: Every value takes a replay of the whole job; more op evaluations than this take minutes.
COSTLIEST_OP_REPLAYS = 20_000_000_000
#: The labels that divide a step into parts, and what people call them.
_LABELS = {"kind": "kind", "phase": "phase", "name": "kernel"}
#: The steps within a recording of GPUs, which is one step of its graph.
_MARKED = "profiler_step"


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
            labelled, lanes_of_op = of_block[of_block != UNLABELLED], block.start.size // of_block.size
        else:
            labelled, lanes_of_op = np.where(block.present, of_block, UNLABELLED).ravel(), 1
            labelled = labelled[labelled != UNLABELLED]
        counts += np.bincount(labelled, minlength=len(values)) * lanes_of_op
    added_each, removed_each = _step_times(replay, codes, len(values))
    added, removed = added_each.mean(axis=1), removed_each.mean(axis=1)
    ideal_each, original_each = step_times(replay, IDEAL), step_times(replay, ORIGINAL)
    ideal, original = float(ideal_each.mean()), float(original_each.mean())
    errors = ratio_margins(added_each.T, ideal_each, original_each)
    shares = [
        Share(
            value,
            int(counts[code]),
            float(added[code]) / ideal if ideal else math.nan,
            float(errors[code]),
            float(added[code] - ideal),
            float(original - removed[code]),
        )
        for code, value in enumerate(values)
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
    columns = [np.concatenate(list(map(np.ravel, codes))).astype(np.int64) for codes in zip(*cells, strict=True)]
    combined, number = combinations(columns)
    split = np.split(number, np.cumsum([labelled[0].size for labelled in cells])[:-1])
    codes = [part.reshape(labelled[0].shape) for part, labelled in zip(split, cells, strict=True)]
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


class SpentPart(Struct, frozen=True):
    """The ops with one value of a label: the `name` of a kind, a phase or a kernel (`of`)."""

    of: str
    name: str

    def __str__(self) -> str:
        return self.name if self.of == "kind" else f"{self.of} {self.name}"


class SpentPhases(Struct, frozen=True, eq=False):
    """What steps of post-training take, [steps], as `StepsSpent` for other jobs; ranks are unknown. `unlike`: which
    steps are left out because they differ from the others, in words; "" if none do. `warm_up`: how many steps at the
    beginning are left out, too.
    """

    steps: list[int]
    step_s: Floats
    parts: Mapping[SpentPart, Floats]
    ops_a_step: float
    unlike: str = ""
    warm_up: int = 0
    ranks: Ints = np.zeros(0, np.int64)

    def by_rank(self, _: SpentPart) -> Floats:
        return np.zeros((len(self.step_s), 0))


def kept_steps(steps: list[int], ignored: Collection[int]) -> Bools:
    """Mask of the steps to compare, [steps]. Raises SelectionError if all of them are `ignored`."""
    mask = ~np.isin(steps, [*ignored])
    if not mask.any():
        raise SelectionError(f"no step is left; there are {ranks_text(steps, name='step')}")
    return mask


class StepsSpent(Struct, frozen=True, eq=False, dict=True):
    """What the steps of a job take, without those in `ignored`."""

    unlike: ClassVar[str] = ""
    warm_up: ClassVar[int] = 0

    replay: GraphReplay
    ignored: Collection[int] = ()

    @property
    def marked(self) -> bool:
        """Whether these are steps that a profiler marked within one step of the graph."""
        return _MARKED in self.replay.graph.label_names

    @property
    def _step_label(self) -> str:
        return _MARKED if self.marked else "step"

    @cached_property
    def _steps(self) -> list[int]:
        """All step numbers, ascending; of a recording of GPUs, those that it marks."""
        return [int(step) for step in label_values(self.replay.graph, self._step_label)]

    @cached_property
    def _kept_mask(self) -> Bools:
        return kept_steps(self._steps, self.ignored)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are kept, ascending."""
        return [step for step, is_kept in zip(self._steps, self._kept_mask.tolist(), strict=True) if is_kept]

    @property
    def ops_a_step(self) -> float:
        """The number of ops in a step."""
        return sum(block.start.size for block in self.replay.graph.blocks) / len(self.replay.graph.steps)

    @cached_property
    def ranks(self) -> Ints:
        """The recorded ranks, ascending."""
        return np.array(label_values(self.replay.graph, "rank"), np.int64)

    @cached_property
    def step_s(self) -> Floats:
        """How long each step took, seconds, [steps]. A marked step lasts from the end of the one before to its own.

        Raises SelectionError if all steps are ignored.
        """
        if not self.marked:
            return self.replay.recorded_step_times()[self._kept_mask]
        begin, ends = np.inf, np.full(len(self._steps), -np.inf)
        for block, steps, _ in self._blocks("rank"):
            step = np.broadcast_to(steps, block.start.shape)
            inside = step < len(ends)
            np.maximum.at(ends, step[inside], (block.start + block.duration)[inside])
            begin = min(begin, float(block.start[inside].min(initial=np.inf)))
        return np.diff(np.maximum.accumulate(ends), prepend=begin)[self._kept_mask]

    @cached_property
    def parts(self) -> dict[SpentPart, Floats]:
        """The own time of the ops of each part on the mean rank, seconds, [steps] each."""
        parts_s: dict[SpentPart, Floats] = {}
        for label, word in _LABELS.items():
            if label in self.replay.graph.label_names:
                values, seconds = label_values(self.replay.graph, label), self._seconds(label) / len(self.ranks)
                parts_s |= {SpentPart(word, str(value)): seconds[:, column] for column, value in enumerate(values)}
        return parts_s

    def by_rank(self, part: SpentPart) -> Floats:
        """The own time of the ops of a part on each rank, seconds, [steps, ranks]."""
        if part not in self.parts:
            return np.zeros((len(self.step_s), len(self.ranks)))
        label = next(label for label, word in _LABELS.items() if word == part.of)
        return self._seconds("rank", (label, part.name))

    def _seconds(self, label: str, only: tuple[str, str] | None = None) -> Floats:
        """The own time of the ops of each value of a label, of those where a label has that value if `only` is given;
        seconds, [steps, values].
        """
        shape = len(self._steps) + 1, len(label_values(self.replay.graph, label)) + 1
        seconds = np.zeros(shape)
        for number, (block, step, value) in enumerate(self._blocks(label)):
            cost = self.replay.durations.cost[number]
            if only is not None:
                cost = np.where(self.replay.graph.label(number, only[0]).where([only[1]]), cost, 0.0)
            where = np.broadcast_to(step * shape[1] + value, block.start.shape)
            seconds += np.bincount(where.ravel(), cost.ravel(), seconds.size).reshape(shape)
        return seconds[:-1, :-1][self._kept_mask]

    def _blocks(self, label: str) -> Iterator[tuple[LabelledBlock, Ints, Ints]]:
        """Each block with the index of the step, and of the value of a label, of its ops; one beyond the last for ops
        without.
        """
        for number, block in enumerate(self.replay.graph.blocks):
            yield block, self._index(number, self._step_label), self._index(number, label)

    def _index(self, number: int, name: str) -> Ints:
        values = label_values(self.replay.graph, name)
        place = {value: index for index, value in enumerate(values)}
        label = self.replay.graph.label(number, name)
        codes, inverse = np.unique(label.codes, return_inverse=True)
        places = [place[label.value(code)] if code != UNLABELLED else len(values) for code in codes.tolist()]
        return np.array(places, np.int64)[inverse].reshape(label.codes.shape)


#: What the steps of any job take.
Spent = StepsSpent | SpentPhases
