"""Workers that compute slower than their peers and have something in common: a host, or a kind of machine."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Treatment
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.detectors.slow_computes import of_group
from tracekit.analysis.evidence.groups import slow_groups
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.report.finding import Place


class SlowHosts(Detector):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host of their
    rank, because the check and the repair differ. It needs two traced workers on the host, 70 % of them slow: of eight,
    one may not be busy enough to show it.
    """

    kind = "slow-host"
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = Advice(
        gpu="host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet"
        " temperature of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs",
        cpu="host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet"
        " temperature of the chassis",
    )
    suggested_fix = Advice(
        gpu="on {hosts}, check clocks and power (nvidia-smi -q -d PERFORMANCE), busy cores (cat /proc/pressure/cpu),"
        " other jobs: stop what should not run there; drain {hosts} if the GPUs are throttled",
        cpu="on {hosts}, check clocks (turbostat), busy cores (cat /proc/pressure/cpu), other jobs: stop what should"
        " not run there",
    )
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        for group in slow_groups(job)[0]:
            if group.host is not None:
                where = Place(workers=job.workers_where(group.hit), host=group.host)
                yield of_group(self.kind, job, group, where, "their peers on other hosts")


class SlowRankGroup(Detector):
    """Several DP ranks compute slower than the others by one factor: older GPUs, a lower power cap, a warmer rack.

    Paper: no signature. tracekit groups slow DP ranks that are adjacent or half of all DP ranks, are slow on all
    stages, in the same steps, by factors that differ by less than a quarter of their excess and what chance adds, and
    make up a quarter of the DP ranks (or, with a pipeline, have slow optimizers too). Independent faults agree in
    neither factor nor time.
    """

    kind = "slow-rank-group"
    title = "A group of DP ranks computes slower than the others"
    signature = "forwards and backwards of several DP ranks take longer by one factor, on all stages, in the same steps"
    refuted_by = "the factors differ within the group, or follow the tokens of its microbatches"
    next_check = Advice(
        gpu="what the group has in common: GPU model, power cap, driver, rack, inlet temperature",
        cpu="what the group has in common: CPU model, frequency governor, rack, inlet temperature",
    )
    suggested_fix = Advice(
        gpu="compare GPU model, power cap and driver of {ranks} with the others (nvidia-smi -q): make them alike, or"
        " give {it} fewer microbatches",
        cpu="compare CPU model and frequency governor of {ranks} with the others (lscpu, cpupower): make them alike, or"
        " give {it} fewer microbatches",
    )
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        for group in slow_groups(job)[0]:
            if group.dp_ranks:
                yield of_group(self.kind, job, group, Place(dp_ranks=group.dp_ranks), "the other DP ranks")
