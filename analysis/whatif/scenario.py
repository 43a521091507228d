"""The scenarios of the paper: ops ideal in the job as it ran, or as recorded in the ideal job.

In: selections (`selection`) and what to do with them. Out: a `Scenario`, and from it the `Costs` of each block for the
replay. Repairs are `interventions`; a scenario only states which rows are recorded and which constant, which is fast.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.graph.labels import LabelledGraph, Mask
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs
from tracekit.analysis.whatif.selection import Context, Everything, Selection


class Action(StrEnum):
    """What happens to the selected ops."""

    KEEP = "keep"
    IDEALISE = "idealise"
    SET = "set"


class Base(StrEnum):
    """The costs a scenario starts from."""

    ORIGINAL = "original"
    IDEAL = "ideal"


class Edit(Struct, frozen=True):
    """One change: `keep` the recorded cost, `idealise` it or `set` it to `amount` seconds."""

    selection: Selection
    action: Action
    amount: float = 0.0


class Scenario(Struct, frozen=True):
    """Costs to replay: a base, edits applied in order, and the ops that keep their launch delays (None: no op)."""

    base: Base
    edits: tuple[Edit, ...] = ()
    launch_delays: Selection | None = None

    @classmethod
    def removal(cls, selection: Selection) -> Scenario:
        """The job as it ran, with the selection idealised: what fixing the selection would save."""
        return cls(Base.ORIGINAL, (Edit(selection, Action.IDEALISE),))

    @classmethod
    def addition(cls, selection: Selection) -> Scenario:
        """The ideal job, with the selection as recorded: what the selection costs alone (S_x in the paper)."""
        return cls(Base.IDEAL, (Edit(selection, Action.KEEP),))

    def costs(self, graph: LabelledGraph, durations: Durations, number: int) -> Costs:
        """The costs of block `number` under this scenario."""
        context = Context(graph, durations, number)
        costs = _Costs(durations.cost[number], durations.ideal[number], self.base)
        present = context.block.present
        for edit in self.edits:
            mask = edit.selection.mask(context)
            if present is not None and edit.action is Action.SET:
                mask = mask & present  # all other edits leave an absent op at 0
            costs.apply(edit, mask)
        delay, delay_row = _delays(self, context)
        return Costs(*costs.rows(), delay, delay_row)


ORIGINAL = Scenario(Base.ORIGINAL)
IDEAL = Scenario(Base.IDEAL)
RECORDED = Scenario(Base.ORIGINAL, launch_delays=Everything())


def _delays(scenario: Scenario, context: Context) -> tuple[Floats, npt.NDArray[np.int64]]:
    rows = context.block.template.rows
    none = np.full(rows, -1)
    if scenario.launch_delays is None:
        return NO_MATRIX, none
    delay = context.durations.launch_delay[context.number]
    mask = scenario.launch_delays.mask(context)
    if mask.shape[1] == 1 and mask.shape[0] == rows:
        return delay, np.where(mask[:, 0], np.arange(rows), none)
    if mask.shape[0] == 1 < mask.shape[1]:
        kept, lanes = np.zeros(delay.shape), np.flatnonzero(mask[0])
        kept[:, lanes] = delay[:, lanes]
        return kept, np.arange(rows)
    return np.where(mask, delay, 0.0), np.arange(rows)


class _Costs:
    """Costs while edits are applied: rows stay recorded or constant as long as possible, then become a full matrix."""

    def __init__(self, cost: Floats, ideal: Floats, base: Base) -> None:
        self.cost = cost
        self.ideal = ideal
        self.recorded = np.full(len(cost), base is Base.ORIGINAL)
        self.constant = ideal if ideal.ndim == 1 else np.zeros(len(cost))
        self.matrix: Floats | None = None
        if ideal.ndim == 2:
            self.matrix = cost if base is Base.ORIGINAL else ideal

    def rows(self) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
        """`matrix`, `matrix_row` and `constant` of `Costs`."""
        number = np.arange(len(self.cost))
        if self.matrix is not None:
            return self.matrix, number, self.constant
        return self.cost, np.where(self.recorded, number, -1), self.constant

    def apply(self, edit: Edit, mask: Mask) -> None:
        """Change the costs under `mask`."""
        whole_rows = mask.shape == (len(self.cost), 1)
        if whole_rows and self.matrix is None:
            chosen = mask[:, 0]
            self.recorded = np.where(chosen, edit.action is Action.KEEP, self.recorded)
            amount = self.ideal if edit.action is Action.IDEALISE else edit.amount
            if edit.action is not Action.KEEP and amount is not self.constant:  # replays know equal costs by identity
                self.constant = np.where(chosen, amount, self.constant)
            return
        if self.matrix is None:
            recorded = self.recorded[:, None]
            self.matrix = self.cost if recorded.all() else np.where(recorded, self.cost, self.constant[:, None])
        if self.matrix is self.cost or self.matrix is self.ideal:
            self.matrix = self.matrix.copy()
        if mask.shape[0] == 1 < mask.shape[1]:  # change whole lanes; all others stay as they are
            lanes = np.flatnonzero(mask[0])
            self.matrix[:, lanes] = self._changed(edit, lanes)
        else:
            np.copyto(self.matrix, self._changed(edit, slice(None)), where=mask)

    def _changed(self, edit: Edit, lanes: npt.NDArray[np.int64] | slice) -> Floats:
        match edit.action:
            case Action.KEEP:
                return self.cost[:, lanes]
            case Action.IDEALISE:
                return self.ideal[:, None] if self.ideal.ndim == 1 else self.ideal[:, lanes]
            case Action.SET:
                return np.full((1, 1), edit.amount)
