"""The ops of a pipeline by kind, as grids of stages, ops, steps and DP ranks.

In: a pipeline. Out: an `OpGrid` for each kind of op, empty if the job has none; interventions change the costs of one.
"""

from __future__ import annotations

from collections.abc import Collection

from tracekit.analysis.evidence.evidence import Evidence, evidence
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.graph.op_grid import OpGrid, TransferGrid, op_grid, transfer_grid
from tracekit.trace.model import COMMUNICATION, DP_COLLECTIVES, OpKind


@evidence(PipelineSubject)
def transfers(job: PipelineSubject) -> TransferGrid:
    """The transfers between stages."""
    return transfer_grid(job.replay.graph)


def _grid(kinds: Collection[OpKind], *, most: int | None = None) -> Evidence[PipelineSubject, OpGrid]:
    """The ops of these kinds by stage; `most` as in `op_grid`."""

    def grid(job: PipelineSubject) -> OpGrid:
        return op_grid(job.replay.graph, kinds, most=most)

    return evidence(PipelineSubject)(grid)


#: The data-parallel collectives by stage.
collectives = _grid(DP_COLLECTIVES)
#: The exchange of embedding gradients on the first and the last stage.
embedding_exchanges = _grid((OpKind.EMBEDDING_GRADS_ALL_REDUCE,))
#: The optimizer of each stage.
optimizers = _grid((OpKind.OPTIMIZER,))
#: The forwards of each stage, in row order.
forwards = _grid((OpKind.FORWARD_COMPUTE,))
#: The backwards of each stage, in row order.
backwards = _grid((OpKind.BACKWARD_COMPUTE,))
#: The first forward of each stage.
first_forwards = _grid((OpKind.FORWARD_COMPUTE,), most=1)
#: The first gathering of parameters of each stage; a step with such ops begins with it.
first_gathers = _grid((OpKind.PARAMS_ALL_GATHER,), most=1)
#: The data loading of each stage, if it was recorded.
data_loads = _grid((OpKind.DATA_LOAD,))
#: Host work between other ops, if it was recorded.
host_work = _grid((OpKind.HOST_DELAY,))
#: Garbage collections between computes, if they were recorded.
collections = _grid((OpKind.GC,))
#: Checkpoints, if they were recorded.
checkpoints = _grid((OpKind.CHECKPOINT,))
#: Evaluations between training steps, if they were recorded.
evaluations = _grid((OpKind.EVALUATION,))
#: All ops of a worker.
all_ops = _grid(tuple(OpKind))
#: All communication of a worker.
communicating = _grid(COMMUNICATION)
#: Every op that is not communication; the host causes their launch delays.
computing = _grid(frozenset(OpKind) - COMMUNICATION)
