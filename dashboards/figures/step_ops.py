"""The ops of one step, ordered by worker: what timelines draw, and how each op compares with its peers.

In: one step of a `JobReplay`. Out: `StepOps`, columns with a value per op. Pure functions: this module does not know
Flask, Dash or the store.

An op is compared with its peers by its own cost (without waiting): the ratio to the median of its kind over all workers
and microbatches of the step; in the ideal replay all peers are equal. If fewer than half of the workers of a stage ran
a kind (a garbage collection, for example), it has no peers there, and its ratio is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.timeline import compared_frame
from tracekit.trace.chrome import STREAMS
from tracekit.trace.model import KINDS, OpKind

STREAM_NAMES: tuple[str, ...] = tuple(dict.fromkeys(STREAMS.values()))
_STREAM_OF_KIND = np.array([STREAM_NAMES.index(STREAMS[kind]) for kind in KINDS], np.uint8)
_COMPUTE = STREAM_NAMES.index("compute")

_FORWARD, _BACKWARD = (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV), (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV)
#: The sends and receives that go with an op of a microbatch.
_HANDED_ON = dict.fromkeys((OpKind.FORWARD_COMPUTE, *_FORWARD), _FORWARD) | dict.fromkeys(
    (OpKind.BACKWARD_COMPUTE, *_BACKWARD), _BACKWARD
)

#: Peers that take less than this count as if they took this long: below it a ratio is meaningless.
SHORTEST_PEER_S = 1e-6


class Replay(StrEnum):
    """Which times: the recording, its replay without launch delays, or the ideal."""

    RECORDED = "recorded"
    ORIGINAL = "original"
    IDEAL = "ideal"


@dataclass(frozen=True, slots=True)
class StepOps:
    """All ops of one step, ordered by worker (dp_rank, pp_rank) and recorded start. Times are seconds.

    `dp_rank`, `pp_rank`: of each worker, [workers]. `first`: where the ops of each worker begin, [workers + 1]. The
    rest is one value per op; `microbatch` and `chunk` are -1 where they do not apply. `cost`: own cost by replay.
    `median`: median own cost per kind as recorded, NaN for kinds that do not occur. `alone`: [kinds, stages], True if
    fewer than half of the workers of the stage ran the kind. `meeting`: a number that the ops share which start
    together, here a send and its receive; -1 for others.
    """

    step: int
    dp_rank: Ints
    pp_rank: Ints
    first: Ints
    kind: npt.NDArray[np.uint8]
    seq: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    start: Mapping[Replay, Floats]
    duration: Mapping[Replay, npt.NDArray[np.float32]]
    cost: Mapping[Replay, npt.NDArray[np.float32]]
    launch_delay: npt.NDArray[np.float32]
    median: Floats
    alone: npt.NDArray[np.bool_]
    meeting: Ints

    @property
    def workers(self) -> int:
        """The number of workers with ops in the step."""
        return len(self.dp_rank)

    def begin(self) -> float:
        """When the view of the whole step begins, in whole milliseconds: 0, or earlier if a rank was early."""
        return min(0.0, float(np.floor(min(start.min() for start in self.start.values()) * 1e3 + 1e-6)) / 1e3)

    def end(self, replay: Replay) -> float:
        """When the last op ends, seconds from the start of the step."""
        return float((self.start[replay] + self.duration[replay]).max())

    def streams(self) -> tuple[str, ...]:
        """The streams that have an op."""
        present = np.unique(_STREAM_OF_KIND[np.unique(self.kind)])
        return tuple(STREAM_NAMES[stream] for stream in present)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams that there can be."""
        return STREAM_NAMES

    def stream(self, ops: Ints) -> npt.NDArray[Any]:
        """The stream of each op, as an index into `stream_names`."""
        return _STREAM_OF_KIND[self.kind[ops]]

    def computes(self, ops: Ints) -> npt.NDArray[np.bool_]:
        """Which ops the overview shows."""
        return np.asarray(self.stream(ops) == _COMPUTE)

    def peers(self, ops: Ints, replay: Replay) -> Floats:
        """Own cost of each op's peers, seconds: the median of its kind; in the ideal replay, the op's own cost."""
        return self.cost[replay][ops].astype(np.float64) if replay is Replay.IDEAL else self.median[self.kind[ops]]

    def ratios(self, ops: Ints, replay: Replay) -> Floats:
        """Own cost over that of the peers; infinite without peers, 1 in the ideal replay."""
        if replay is Replay.IDEAL:
            return np.ones(len(ops))
        alone = self.alone[self.kind[ops], self.pp_rank[self.worker_of(ops)]]
        peers = np.maximum(self.peers(ops, replay), SHORTEST_PEER_S)
        return np.where(alone, np.inf, np.maximum(self.cost[replay][ops], 0.0) / peers)

    def worker_of(self, ops: Ints) -> Ints:
        """The index of each op's worker."""
        return np.searchsorted(self.first, ops, side="right") - 1

    def named(self, ops: Ints, words: str) -> npt.NDArray[np.bool_]:
        """Which ops have each of these words in their name; a number can be that of the microbatch."""
        matching = np.ones(len(ops), np.bool_)
        for word in words.lower().split():
            fits = np.array([word in name.lower() for name in self.op_names])[self.op_name(ops)]
            number = int(word) if word.isascii() and word.isdecimal() else None
            matching &= fits if number is None else fits | (self.microbatch[ops] == number)
        return matching

    @property
    def op_names(self) -> Sequence[str]:
        """The names of ops."""
        return KINDS

    def op_name(self, ops: Ints) -> npt.NDArray[Any]:
        """The name of each op, as an index into `op_names`."""
        return self.kind[ops]

    def kinds(self, ops: Ints) -> pl.Series:
        """The kind of each op."""
        return pl.Series([str(KINDS[code]) for code in self.kind[ops]], dtype=pl.String)

    def arrows(self, op: int, replay: Replay) -> tuple[Ints, Floats]:
        """The way of the microbatch of an op: the sends of its direction, each with its receive, and when, [arrows, 2].

        An arrow leads from the start of a send to the end of its receive, seconds.
        """
        if (kind := KINDS[self.kind[op]]) not in _HANDED_ON:
            return np.zeros((0, 2), np.int64), np.zeros((0, 2))
        of = self.dp_rank[self.worker_of(np.arange(len(self.kind)))] == self.dp_rank[self.worker_of(np.array([op]))]
        of &= (self.microbatch == self.microbatch[op]) & (self.meeting >= 0)
        sends, receives = (np.flatnonzero(of & (self.kind == end.code)) for end in _HANDED_ON[kind])
        _, sent, received = np.intersect1d(self.meeting[sends], self.meeting[receives], return_indices=True)
        ends = np.column_stack([sends[sent], receives[received]])
        return ends, self.start[replay][ends] + self.duration[replay][ends] * [0, 1]

    def find(self, dp_rank: int, pp_rank: int, kind: str, seq: int) -> int | None:
        """The op with that identity; None if the step has none."""
        worker = np.flatnonzero((self.dp_rank == dp_rank) & (self.pp_rank == pp_rank))
        if not len(worker) or kind not in set(OpKind):
            return None
        ops = np.arange(self.first[worker[0]], self.first[worker[0] + 1])
        matching = ops[(self.kind[ops] == OpKind(kind).code) & (self.seq[ops] == seq)]
        return int(matching[0]) if len(matching) else None


def step_ops(replay: JobReplay) -> StepOps:
    """The ops of a replay that holds a single step (`JobReplay.only_steps`)."""
    frame = compared_frame(replay).sort("dp_rank", "pp_rank", "recorded_start")
    cell = frame["dp_rank"].to_numpy().astype(np.int64) * replay.graph.layout.pp + frame["pp_rank"].to_numpy()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(cell)) + 1])
    kind = frame["kind"].cat.physical().to_numpy().astype(np.uint8)
    recorded_cost = frame["cost"].to_numpy().astype(np.float32)
    dp_rank, pp_rank = np.divmod(cell[begins], replay.graph.layout.pp)
    first = np.append(begins, len(cell))
    return StepOps(
        step=int(replay.graph.steps[0]),
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        first=first,
        kind=kind,
        seq=frame["seq"].to_numpy(),
        microbatch=frame["microbatch"].fill_null(-1).to_numpy(),
        chunk=frame["chunk"].fill_null(-1).to_numpy(),
        start={name: frame[f"{name}_start"].to_numpy() for name in Replay},
        duration={name: frame[f"{name}_duration"].to_numpy().astype(np.float32) for name in Replay},
        cost={
            Replay.RECORDED: recorded_cost,
            Replay.ORIGINAL: recorded_cost,
            Replay.IDEAL: frame["ideal_cost"].to_numpy().astype(np.float32),
        },
        launch_delay=frame["launch_delay"].to_numpy().astype(np.float32),
        median=_medians(kind, recorded_cost),
        alone=_alone(kind, np.repeat(np.arange(len(begins)), np.diff(first)), pp_rank),
        meeting=frame["transfer"].to_numpy(),
    )


def _medians(kind: npt.NDArray[np.uint8], cost: npt.NDArray[np.float32]) -> Floats:
    """Median own cost per kind, [kinds]."""
    median = np.full(len(KINDS), np.nan)
    for code in np.unique(kind):
        median[code] = np.median(cost[kind == code])
    return median


def _alone(kind: npt.NDArray[np.uint8], worker: Ints, stage_of_worker: Ints) -> npt.NDArray[np.bool_]:
    """Which kinds fewer than half of the workers of a stage ran, [kinds, stages]."""
    ran = np.zeros((len(KINDS), len(stage_of_worker)), np.bool_)
    ran[kind, worker] = True
    stages = int(stage_of_worker.max()) + 1
    counts = np.stack([np.bincount(stage_of_worker[row], minlength=stages) for row in ran])
    return (counts > 0) & (2 * counts < np.bincount(stage_of_worker, minlength=stages))
