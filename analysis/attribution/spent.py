"""What each step of a job takes, and what ranks spend on each part of it.

In: a replay of any job. Out: `StepsSpent`: times of steps, and the seconds of each part in each step. A part is the ops
of one kind, phase or kernel; its time is that of its ops without waiting for other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.labels import UNLABELLED, LabelledBlock, label_values
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.base.errors import SelectionError
from tracekit.base.text import ranks_text

#: The labels that divide a step into parts, and what people call them.
_LABELS = {"kind": "kind", "phase": "phase", "name": "kernel"}
#: The steps within a recording of GPUs, which is one step of its graph.
_MARKED = "profiler_step"


class SpentPart(Struct, frozen=True):
    """The ops with one value of a label: the `name` of a kind, a phase or a kernel (`of`)."""

    of: str
    name: str

    def __str__(self) -> str:
        return self.name if self.of == "kind" else f"{self.of} {self.name}"


class SpentPhases(Struct, frozen=True, eq=False):
    """What steps of post-training take, [steps], as `StepsSpent` says it of other jobs; no ranks are known. `unlike`:
    the steps that differ from the others and are not here, in words; empty if there are none.
    """

    steps: list[int]
    step_s: Floats
    parts: Mapping[SpentPart, Floats]
    ops_a_step: float
    unlike: str = ""
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
    """What the steps of a job take, but for those that are `ignored`."""

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
    def _kept(self) -> Bools:
        return kept_steps(self._steps, self.ignored)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are kept, ascending."""
        return [step for step, kept in zip(self._steps, self._kept.tolist(), strict=True) if kept]

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
            return self.replay.recorded_step_times()[self._kept]
        begin, ends = np.inf, np.full(len(self._steps), -np.inf)
        for block, steps, _ in self._blocks("rank"):
            step = np.broadcast_to(steps, block.start.shape)
            inside = step < len(ends)
            np.maximum.at(ends, step[inside], (block.start + block.duration)[inside])
            begin = min(begin, float(block.start[inside].min(initial=np.inf)))
        return np.diff(np.maximum.accumulate(ends), prepend=begin)[self._kept]

    @cached_property
    def parts(self) -> dict[SpentPart, Floats]:
        """The own time of the ops of each part on the mean rank, seconds, [steps] each."""
        parts_s: dict[SpentPart, Floats] = {}
        for label, word in _LABELS.items():
            if label in self.replay.graph.label_names:
                values, seconds = label_values(self.replay.graph, label), self._seconds(label) / len(self.ranks)
                parts_s |= {SpentPart(word, str(value)): seconds[:, at] for at, value in enumerate(values)}
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
        return seconds[:-1, :-1][self._kept]

    def _blocks(self, label: str) -> Iterator[tuple[LabelledBlock, Ints, Ints]]:
        """Each block with the index of the step, and of the value of a label, of its ops; one beyond the last for ops
        without.
        """
        for number, block in enumerate(self.replay.graph.blocks):
            yield block, self._index(number, self._step_label), self._index(number, label)

    def _index(self, number: int, name: str) -> Ints:
        values = label_values(self.replay.graph, name)
        place = {value: at for at, value in enumerate(values)}
        label = self.replay.graph.label(number, name)
        codes, inverse = np.unique(label.codes, return_inverse=True)
        places = [place[label.value(code)] if code != UNLABELLED else len(values) for code in codes.tolist()]
        return np.array(places, np.int64)[inverse].reshape(label.codes.shape)
