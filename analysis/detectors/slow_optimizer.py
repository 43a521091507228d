"""An optimizer that takes longer than those of its peers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.computes import OTHER_WORK
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.grids import optimizers
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import slow_workers, worker_factor
from tracekit.analysis.fixes.plan import SPEED_OF_PEERS
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, median, nan_mean
from tracekit.analysis.whatif.interventions import NoOverlap, Scale, Together
from tracekit.base.text import ratio, seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.trace.model import OpKind

#: An optimizer is slow if it takes this many times as long as its peers', by this many standard errors.
SMALLEST_OPTIMIZER_FACTOR = 1.5
OPTIMIZER_ERRORS = 6.0
#: The same for a comparison with other stages, which hold different parameters.
SMALLEST_OPTIMIZER_FACTOR_OF_STAGES = 2.0


class SlowOptimizer(Detector):
    """The optimizer of a worker takes longer than those of its peers; its forwards and backwards do not.

    Paper: no signature; an optimizer is a compute op like others. tracekit compares the median optimizer of each worker
    with those of its stage: at least half as long again, and by six standard errors over the steps. Optimizers hold the
    same parameters on all DP ranks of a stage, so they do not differ by design. With one DP rank, it compares stages:
    at least twice as long, beyond what the stage computes longer. A worker that is slow in everything it computes is a
    bad worker.
    """

    kind = "slow-optimizer"
    title = "Optimizer of a worker is slow"
    signature = "the optimizer of one worker takes longer in all steps, its forwards and backwards do not"
    refuted_by = "the worker's optimizer has more parameters than those of its peers"
    next_check = (
        "a profile of the optimizer step on this rank: offloading or swapping to the host, memory bandwidth, fused or"
        " foreach kernels; whether it also logs or writes there"
    )
    suggested_fix = (
        "profile the optimizer step of {ranks} and a peer's (torch.profiler), and take out what runs only there:"
        " offloading, swapping, other kernels, logging"
    )
    part = "optimizer"
    repair = Repair("replace-workers", "Make the optimizer as fast as those of its peers", SPEED_OF_PEERS)

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        among_stages = len(job.dp_ranks) < 2
        if optimizers(job).empty or (among_stages and job.stages < 2):
            return
        axis = 0 if among_stages else 1
        taken_s = optimizers(job).gather(job.computes.costs).sum(axis=1)
        pace = None if job.profile is None else job.profile.core_pace
        if pace is not None:
            taken_s = taken_s / pace[OTHER_WORK.index(OpKind.OPTIMIZER)]
        level = median(taken_s, (1,))
        usual = np.maximum(np.expand_dims(lower_median(level, axis=axis), axis), 1e-9)
        scatter = MAD_TO_SIGMA * median(np.abs(taken_s - level[:, None]), (1,)) / np.sqrt(taken_s.shape[1])
        apart = MAD_TO_SIGMA * np.expand_dims(lower_median(np.abs(level - usual), axis=axis), axis)
        # A stage with more layers has more parameters, too.
        peers = usual * (np.maximum(worker_factor(job), 1.0) if among_stages else 1.0)
        error, factor = np.hypot(scatter, apart) / peers, level / peers
        smallest = SMALLEST_OPTIMIZER_FACTOR_OF_STAGES if among_stages else SMALLEST_OPTIMIZER_FACTOR
        hit = (factor > smallest) & (factor - 1 > OPTIMIZER_ERRORS * error) & ~slow_workers(job)
        if not hit.any():
            return
        figures = (
            Figure("optimizer over that of its peers", float(factor[hit].max()), smallest, Unit.FACTOR),
            Figure("beyond its peers", float((level - peers)[hit].max()), 0.0, Unit.SECONDS),
        )
        as_peers = Scale(optimizers(job), 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        change = Together((as_peers, NoOverlap()))
        series = np.where(hit[:, None], taken_s / peers[:, None], np.nan)
        whose = "those of other stages" if among_stages else "its peers'"
        yield Candidate(
            self.kind,
            Place(workers=job.workers_where(hit)),
            f"optimizer takes {ratio(figures[0].value)} times as long as {whose}, {seconds(figures[1].value)} more",
            figures,
            confidence_from(figures),
            change,
            nan_mean(series, (0, 2)),
            bound=not distances_seen(job),
        )


@evidence(PipelineSubject)
def distances_seen(job: PipelineSubject) -> bool:
    """True if the trace shows how much of the end of a step overlaps the beginning of the next one.

    Starts relative to each step do not, unless workers begin late because they ended the previous step late.
    """
    return bool(job.trace.step_starts) or job.replay.overlap_s is not None
