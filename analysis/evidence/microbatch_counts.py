"""How many microbatches each DP rank ran in each step, where ranks ran unequal numbers of them.

In: a pipeline. Out: `MicrobatchCounts`, with the ops that microbatches consist of, as a grid to change; None if all DP
ranks ran the same number in every step. A rank from which ops of a step are missing has no count there: its recording
was cut, or began late.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, optimizers
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.graph.compiled import GridPart
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.op_grid import COMPUTE_KINDS
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import nan_mean
from tracekit.trace.model import KINDS

_COMPUTE_CODES = [kind.code for kind in COMPUTE_KINDS]


class OpsOfMicrobatches(Struct, frozen=True, eq=False):
    """The ops of each lane that belong to microbatches, as a grid [steps, dp_ranks] that a change can scale.

    `rows`: the rows of each block that hold such ops, [rows] each, with which of them do in each lane, [rows, lanes] or
    [rows, 1].
    """

    graph: DependencyGraph
    rows: tuple[tuple[Ints, Bools], ...]

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """`values`, [steps, dp_ranks], as parts of the blocks."""
        for number, (block, (rows, belong)) in enumerate(zip(self.graph.blocks, self.rows, strict=True)):
            of_lane = values[block.step, self.graph.dp_index(block)]
            if len(rows) and (of_lane != 1).any():
                yield GridPart(number, rows, np.where(belong, of_lane, 1.0))


class MicrobatchCounts(Struct, frozen=True, eq=False):
    """`count`: microbatches of each DP rank in each step, nan where the recording lacks some of its ops, [steps,
    dp_ranks]. `fill`: microbatches that the fill and the drain of the pipeline take, whatever the number of them; 0
    without a pipeline. `ops`: what they consist of.
    """

    count: Floats
    fill: float
    ops: OpsOfMicrobatches

    @property
    def mean(self) -> Floats:
        """The mean over the DP ranks, [steps, 1]; nan in a step without counts."""
        return nan_mean(self.count, (1,))[:, None]

    @property
    def uneven(self) -> Bools:
        """The steps in which DP ranks run unequal numbers, [steps]."""
        return _uneven(self.count)

    @property
    def busiest_over_mean(self) -> Floats:
        """The largest count of each step over the mean one, [steps]; 1 in a step without counts."""
        return np.asarray(np.nan_to_num(self.count / self.mean, nan=1.0).max(axis=1))

    @property
    def to_the_mean(self) -> Floats:
        """The factor that makes a step of each DP rank as long as with the mean number of microbatches, [steps,
        dp_ranks].
        """
        return np.asarray(np.nan_to_num((self.mean + self.fill) / (self.count + self.fill), nan=1.0))


@evidence(PipelineSubject)
def microbatch_counts(job: PipelineSubject) -> MicrobatchCounts | None:
    """The microbatches of each DP rank and step, if their numbers differ between ranks; None if they do not.

    In its first and its last step, a rank may have been recorded in part, so another step has to show the same. Records
    that a recorder dropped may have been those of a microbatch.
    """
    graph = job.replay.graph
    if len(job.dp_ranks) < 2 or not graph.computes_differ or job.metadata.get("dropped_records"):
        return None
    count = np.full((len(graph.steps), len(graph.dp_ranks)), np.nan)
    for block in graph.blocks:
        count[block.step, graph.dp_index(block)] = _microbatches(block, _computing_cells(graph))
    count[_incomplete(job)] = np.nan
    uneven = _uneven(count)
    inner = uneven[1:-1] if len(uneven) > 2 else uneven  # in which no rank was cut off
    if not inner.any():
        return None
    return MicrobatchCounts(count, (job.stages - 1) / graph.layout.vpp, _ops_of_microbatches(graph, count))


def _uneven(count: Floats) -> Bools:
    least, most = np.nan_to_num(count, nan=np.inf).min(axis=1), np.nan_to_num(count, nan=-np.inf).max(axis=1)
    return np.asarray(most > least)


def _computing_cells(graph: DependencyGraph) -> list[tuple[int, int]]:
    """The stages, and the codes of the kinds of computes that they have on any DP rank in any step."""
    runs = np.any([block.by_stage[:, _COMPUTE_CODES] > 0 for block in graph.blocks], axis=0)
    return [(int(stage), _COMPUTE_CODES[kind]) for stage, kind in np.argwhere(runs)]


def _microbatches(block: Block, cells: list[tuple[int, int]]) -> Floats:
    """The microbatches of each lane, [lanes]; nan where forwards, backwards and stages disagree: ops are missing."""
    counts = np.stack([_distinct(block, block_rows(block, stage, code)) for stage, code in cells])
    return np.where((counts == counts[0]).all(axis=0), counts[0], np.nan)


def block_rows(block: Block, stage: int, code: int) -> Ints:
    """The rows of one kind of op, given by its code, on one stage."""
    return np.flatnonzero((block.template.pp_rank == stage) & (block.template.kind == code))


def _distinct(block: Block, rows: Ints) -> Floats:
    """The number of microbatches that some computes of a stage are of, [lanes].

    A compute that was recorded in parts has the same microbatch in all of them, and so have those of several chunks.
    Where microbatches were not recorded, each compute counts.
    """
    label = np.broadcast_to(block.microbatch[rows], (len(rows), block.lanes))
    if not len(rows) or (label < 0).any():
        return np.full(block.lanes, float(len(rows)))
    ordered = np.sort(label, axis=0)
    return np.asarray(1.0 + (np.diff(ordered, axis=0) != 0).sum(axis=0))


def _incomplete(job: PipelineSubject) -> Bools:
    """The DP ranks that lack a collective or an optimizer which others have in that step, [steps, dp_ranks]."""
    graph = job.replay.graph
    lacks = np.zeros((len(graph.steps), len(graph.dp_ranks)), np.bool_)
    for gap in graph.gaps:
        lacks[np.isin(graph.steps, gap.steps), job.dp_index[gap.worker.dp_rank]] = True
    if not optimizers(job).empty:
        ran = np.isfinite(optimizers(job).gather(job.replay.durations.cost)).sum(axis=1)
        lacks |= (ran < ran.max(axis=2, keepdims=True)).any(axis=0)
    return lacks


def _ops_of_microbatches(graph: DependencyGraph, count: Floats) -> OpsOfMicrobatches:
    """The ops with a microbatch, the computes, and kinds of which each lane has one op per microbatch."""
    cells = _cells_per_microbatch(graph, count)
    return OpsOfMicrobatches(graph, tuple(_belonging(block, cells) for block in graph.blocks))


def _cells_per_microbatch(graph: DependencyGraph, count: Floats) -> list[tuple[int, int]]:
    """The stages and codes of kinds of which every lane has as many ops as microbatches; and those of computes."""
    per_microbatch = np.ones((graph.layout.pp, len(KINDS)), np.bool_)
    for block in graph.blocks:
        of_lane = count[block.step, graph.dp_index(block)]
        for stage, code in np.argwhere(per_microbatch):
            rows = block_rows(block, int(stage), int(code))
            ops = len(rows) if block.present is None else block.present[rows].sum(axis=0)
            per_microbatch[stage, code] = (len(rows) > 0) & np.all((ops == of_lane) | np.isnan(of_lane))
    per_microbatch[:, _COMPUTE_CODES] = True
    return [(int(stage), int(code)) for stage, code in np.argwhere(per_microbatch)]


def _belonging(block: Block, cells: list[tuple[int, int]]) -> tuple[Ints, Bools]:
    """The rows of a block with ops of microbatches, and which of them are that in each lane."""
    belong = block.microbatch >= 0
    for stage, code in cells:
        belong[block_rows(block, stage, code)] = True
    rows = np.flatnonzero(belong.any(axis=1))
    return rows, belong[rows]
