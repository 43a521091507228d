"""The loads of experts in a job of any graph, and the job in which those that are known are equal.

In: a job with all-to-alls. Out: `ExpertLoads`, the cause of unequal loads, and the pace of ranks without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject

if TYPE_CHECKING:  # only jobs of any graph need these modules
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.analysis.gpu.pace import PaceOfPeers
    from tracekit.report.experts import CauseOfImbalance


@evidence(GraphSubject)
def experts_of(job: GraphSubject) -> ExpertLoads:
    """The loads of experts. Raises FormatError if those that the job logged are of another job."""
    from tracekit.analysis.experts.balance import ExpertJob
    from tracekit.analysis.experts.exchanges import members_of
    from tracekit.analysis.experts.expert_loads import ExpertLoads

    experts = ExpertJob.of_ops(job.ops, job.pace, job.steps_in_whole)
    cut = job.recorded is not None and job.recorded.recording.gpu_ops["received"].cat.ends_with("...]").any()
    loads = ExpertLoads(experts, job.expert_loads, cut)
    if job.expert_loads is not None:
        if "exchanges" not in job.ops.columns and members_of(job.ops).is_empty():
            raise job.expert_loads.without_experts(job.trace.name)
        _ = loads.notes
    return loads


@evidence(GraphSubject)
def uneven_experts(job: GraphSubject) -> CauseOfImbalance | None:
    """Why ranks have unequal loads of experts, if the ops show it and it costs something."""
    return next(iter(experts_of(job).causes()), None)


@evidence(GraphSubject)
def even_where_known(job: GraphSubject) -> PaceOfPeers:
    """The ranks with equal loads of the experts whose loads are known."""
    return job.pace.at(experts_of(job).job.balanced_cost) if experts_of(job).explain else job.pace
