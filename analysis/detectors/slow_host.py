"""A host whose workers compute slower than those of other hosts."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Treatment
from tracekit.analysis.detectors.slow_computes import of_group
from tracekit.analysis.evidence.groups import slow_groups
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.report.finding import Place


class SlowHost(Detector):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host of their
    rank, because the check and the repair differ. It needs two traced workers on the host, 70 % of them slow: of eight,
    one may not be busy enough to show it.
    """

    kind = "slow-host"
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = (
        "host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet temperature"
        " of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs"
    )
    suggested_fix = (
        "on {hosts}, check clocks and power (nvidia-smi -q -d PERFORMANCE), busy cores (cat /proc/pressure/cpu),"
        " other jobs: stop what should not run there; drain {hosts} if the GPUs are throttled"
    )
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        for group in slow_groups(job)[0]:
            if group.host is not None:
                where = Place(workers=job.workers_where(group.hit), host=group.host)
                yield of_group(self.kind, job, group, where, "their peers on other hosts")
