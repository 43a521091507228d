"""Whether the trace of a pipeline has every worker, in every step.

In: a pipeline. Out: whether something is missing.
"""

from __future__ import annotations

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject


@evidence(PipelineSubject)
def all_workers_traced(job: PipelineSubject) -> bool:
    """True if every worker of the layout has ops in the trace."""
    if all_lanes_replayed(job):
        return True
    coverage = job.trace.coverage()
    return coverage.workers_traced == coverage.workers_expected


@evidence(PipelineSubject)
def all_lanes_replayed(job: PipelineSubject) -> bool:
    """True if every DP rank of the layout is replayed in every step, so that nothing is missing."""
    graph = job.replay.graph
    lanes = sum(block.lanes for block in graph.blocks)
    return not graph.dropped_lanes and lanes == len(graph.steps) * graph.layout.dp_ranks
