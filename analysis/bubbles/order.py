"""The order in which the stages of a pipeline compute, and its replay.

In: the computes of each stage in order, recorded or made from a schedule. Out: a `ComputeOrder`, which says what each
compute needs from another stage, and when the last compute ends with these durations.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import NO_RENDEZVOUS, CompiledGraph, Wiring, compile_graphs
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, LanesToReplay, Timeline, replay_lanes, replay_timelines
from tracekit.trace.model import OpKind

#: Kinds of compute, which have these numbers in arrays. A backward is whole if its weight gradients are not separate.
KINDS_OF_COMPUTE = (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT)
FORWARD, BACKWARD, WEIGHT = range(3)


class ComputeOrder(Struct, frozen=True, eq=False, dict=True):
    """The computes of a lane, sorted by stage, then in order: [computes] columns.

    `virtual`: the virtual stage, a model chunk on a stage, numbered in the order of the model; `microbatch`: from 0.
    """

    stage: Ints
    kind: Ints
    virtual: Ints
    microbatch: Ints
    stages: int
    virtual_stages: int
    microbatches: int

    @classmethod
    def of(
        cls, computes: Iterable[tuple[int, int, int, int]], stages: int, chunks: int, microbatches: int
    ) -> ComputeOrder:
        """The order of these (stage, kind, chunk, microbatch), stage by stage; virtual stages wrap around."""
        stage, kind, chunk, microbatch = np.array(list(computes), np.int64).T
        return cls(stage, kind, chunk * stages + stage, microbatch, stages, stages * chunks, microbatches)

    @cached_property
    def cell(self) -> Ints:
        """Position of each compute in an array [kinds, virtual stages, microbatches], [computes]."""
        return (self.kind * self.virtual_stages + self.virtual) * self.microbatches + self.microbatch

    @cached_property
    def needs(self) -> Ints:
        """The compute on another stage whose result each compute needs, [computes]; -1: none."""
        row_at = np.full((3, self.virtual_stages + 2, self.microbatches), -1, np.int64)
        row_at[self.kind, self.virtual + 1, self.microbatch] = np.arange(len(self.kind))
        step = np.where(self.kind == FORWARD, -1, 1)
        needs = row_at[self.kind, self.virtual + 1 + step, self.microbatch]
        waits = (needs >= 0) & (self.kind != WEIGHT)
        return np.where(waits & (self.stage[needs] != self.stage), needs, -1)

    @property
    def v_shaped(self) -> bool:
        """Whether chunks of a stage do not follow each other at equal distances in the model, as in ZBV."""
        return bool((self.virtual % self.stages != self.stage).any())

    @cached_property
    def received(self) -> Ints:
        """The computes that need the result of another stage, [transfers]."""
        return np.flatnonzero(self.needs >= 0)

    @cached_property
    def peak_microbatches(self) -> Floats:
        """The most microbatches that each stage holds, [stages]; a chunk counts as its share of the stage.

        A microbatch is held from the start of its forward to the end of its backward, and of its weight gradients.
        """
        last = WEIGHT if (self.kind == WEIGHT).any() else BACKWARD
        change = np.select([self.kind == FORWARD, self.kind == last], [1, -1], 0)
        held = [np.cumsum(change[self.stage == stage]).max(initial=0) for stage in range(self.stages)]
        return np.array(held) * self.stages / self.virtual_stages

    @cached_property
    def graph(self) -> CompiledGraph:
        """The computes, then the transfers, ready to be replayed. Raises GraphError if the order cannot run."""
        computes, transfers = len(self.kind), len(self.received)
        row, transfer = np.arange(computes), computes + np.arange(transfers)
        follows = np.flatnonzero(np.diff(self.stage) == 0)
        # A link carries one transfer after the other, in the order of its sender's computes.
        kind, sender = self.kind[self.received], self.needs[self.received]
        queue = np.lexsort((sender, self.stage[sender], kind))
        behind = np.flatnonzero((np.diff(kind[queue]) == 0) & (np.diff(self.stage[sender[queue]]) == 0))
        rows = computes + transfers
        wiring = Wiring(
            before=np.concatenate([row[follows], sender, transfer, transfer[queue[behind]]]),
            after=np.concatenate([row[follows + 1], transfer, self.received, transfer[queue[behind + 1]]]),
            group=np.arange(rows),
            rendezvous_key=np.full(rows, -1, np.int64),
            synchronises=np.zeros(rows, np.bool_),
            describe=lambda row: f"compute {row} of the pipeline",
        )
        return compile_graphs([wiring], NO_RENDEZVOUS)[0]

    def windows(
        self, durations: Floats, row: Ints, transfers: Floats | None = None, delays: Floats | None = None
    ) -> Floats:
        """From the first start to the last end of any compute, seconds, [lanes].

        `durations`: [rows, lanes], of which compute c takes row `row[c]`. `transfers`: [transfers, lanes], or
        [transfers] if lanes agree, none: no time. `delays`: launch delays, [computes, lanes].
        """
        costs = self._costs(durations, row, transfers, delays)
        return replay_lanes(self.graph, np.arange(durations.shape[1] + 1), costs)

    def timeline(
        self, durations: Floats, row: Ints, transfers: Floats | None = None, delays: Floats | None = None
    ) -> Timeline:
        """Times of the computes, then of the transfers, of the same replay."""
        costs, lanes = self._costs(durations, row, transfers, delays), np.arange(durations.shape[1] + 1)
        parts = [LanesToReplay(self.graph, lanes[:-1].astype(np.int32), lanes, costs)]
        return replay_timelines(parts, 0, meet=False)[0]

    def _costs(self, durations: Floats, row: Ints, transfers: Floats | None, delays: Floats | None) -> Costs:
        count = len(self.received)
        constant, changed, of_transfer = np.zeros(len(row) + count), NO_MATRIX, np.full(count, -1)
        if transfers is not None and transfers.ndim == 1:
            constant[len(row) :] = transfers
        elif transfers is not None:
            changed, of_transfer = transfers, len(durations) + np.arange(count)
        delay_row = np.full(len(constant), -1)
        if delays is not None:
            delay_row[: len(row)] = np.arange(len(row))
        return Costs(
            matrix=durations,
            matrix_row=np.concatenate([row, of_transfer]),
            constant=constant,
            delay=NO_MATRIX if delays is None else delays,
            delay_row=delay_row,
            changed=changed,
        )
