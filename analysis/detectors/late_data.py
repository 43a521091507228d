"""Steps that wait for their data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.detectors.rank_behind import rank_behind
from tracekit.analysis.evidence.data_waits import data_waits_of, late_ranks
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.grids import data_loads
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.whatif.interventions import Scale, ScaleDelays, Together
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import Figure, Place, Spent, Unit, confidence_from
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

#: Data of a stage is late if it is in this share of the steps with late data.
MOST_STEPS_SHARE = 0.5


class LateData(Detector):
    """A step waits for its data.

    Paper: excludes launch delays from the replay, and discards jobs in which they exceed 5 % of the step. tracekit
    keeps them per op: delays of the first forwards, and of the first gathering of parameters, are data loading, priced
    by a replay without them. If the loading itself was recorded, its duration is the wait, and a delay after it has
    another cause.
    """

    kind = "late-data-loading"
    title = "Steps wait for their data"
    signature = "long data loading, or a launch delay before the first ops where loading was not recorded"
    refuted_by = "the delay stays when the loader's workers and prefetch depth are doubled"
    next_check = "the loader's queue depth at the start of a step; host: PSI io, page cache, storage latency"
    suggested_fix = (
        "raise num_workers and prefetch_factor of the data loader on {ranks} until steps no longer wait for it; if that"
        " does not help, see to the storage that it reads from"
    )
    part = "data-loading"
    loss = LossKind.INPUT
    repair = Repair("prefetch-data", "Prefetch data, so that no forward waits for it")

    def find(self, job: Subject) -> Iterator[Candidate]:
        yield from self._in_one_gpu(job)
        late = rank_behind(job, Part.INPUT)
        if late is not None:
            effect = f"waits {seconds(late.spent_s)} for its data loader, its peers {seconds(late.usual_s)}"
            yield late.candidate(self.kind, effect)
        yield from self._before_steps(job)

    @only_in(RecordingSubject)
    def _in_one_gpu(self, job: RecordingSubject) -> Iterator[Candidate]:
        """The loader that the GPU waits for, from the recording of one rank."""
        from tracekit.analysis.detectors.of_one_gpu import candidate, costly, idle_s, share_of
        from tracekit.analysis.evidence.gpu_losses import idle_gpu
        from tracekit.analysis.evidence.host_time import host_time

        gpu = idle_gpu(job)
        if gpu is None:
            return
        for part in costly(job, host_time(job).by_name(IdleReason.LOADER)):
            waits_s = idle_s(gpu, part.names, (IdleReason.LOADER,)) * len(job.ranks)
            spent_on = Spent(IdleReason.LOADER, part.name, part.where, part.names, part.count, part.seconds)
            single = "SingleProcess" in part.name
            workers = "its name says that it has none: give it num_workers" if single else "more num_workers"
            yield candidate(
                self.kind,
                job,
                spent_on,
                f"the GPU waits {share_of(job, waits_s):.0%} of the recording for {code_name(part.name)}",
                host_time(job).less(part.parts),
                title="The GPU waits for the data loader",
                suggested_fix=f"let the loader work ahead ({workers}, prefetch_factor), with pin_memory=True",
            )

    @only_in(PipelineSubject)
    def _before_steps(self, job: PipelineSubject) -> Iterator[Candidate]:
        data = data_waits_of(job)
        if not any(wait.late.any() for wait in data.waits):
            return
        where = _where_late(job)
        cells = _cells_of(job, where)[:, None, None]
        late = [wait.late & cells for wait in data.waits]
        waited = [np.where(late_here, wait.waits_s, 0.0) for late_here, wait in zip(late, data.waits, strict=True)]
        worst = np.sum([waits_s.sum(axis=1) for waits_s in waited], axis=0).max(axis=(0, 2))
        name = "delay before the first ops" if data_loads(job).empty else "data loading of the worst DP rank"
        figures = (Figure(name, float(worst.mean()), data.least_s, Unit.SECONDS),)
        scale = Scale if data.recorded else ScaleDelays
        change = Together(
            tuple(
                scale(wait.ops, np.where(waits_s > 0, data.usual_s / safe(waits_s), 1.0))
                for wait, waits_s in zip(data.waits, waited, strict=True)
            )
        )
        series = 1 + worst / job.unchanged_s
        mean, longest = seconds(float(worst.mean())), seconds(float(worst.max()))
        by_rank = np.logical_or.reduce([late_here.any(axis=(0, 1)) for late_here in late])
        few = by_rank.shape[1] > 1 and 2 * by_rank.sum() <= by_rank.any(axis=1).sum() * by_rank.shape[1]
        changing = ", on changing ranks" if few and where == Place() else ""
        effect = f"data comes {mean} late on average, {longest} in the worst step{changing}"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change, series)


def _cells_of(job: PipelineSubject, where: Place) -> Bools:
    """The workers of a place, [stages, dp_ranks]."""
    if where.workers:
        return job.cells_of(where.workers)
    dp_ranks = np.isin(job.dp_ranks, where.dp_ranks or job.dp_ranks)
    return np.broadcast_to(dp_ranks, (job.stages, len(dp_ranks)))


def _where_late(job: PipelineSubject) -> Place:
    """The DP ranks whose data is late, or the workers if that of only some of their stages is."""
    waits = data_waits_of(job).waits
    late = np.logical_or.reduce([wait.late.any(axis=1) for wait in waits])
    hit = late.any(axis=(0, 2))
    late_s = np.sum([np.where(wait.late, wait.waits_s, 0.0).sum(axis=1) for wait in waits], axis=0)
    ranks = late_ranks(late_s.max(axis=0))
    mostly = (late[:, hit].mean(axis=1) >= MOST_STEPS_SHARE) & ranks
    fetches = np.logical_or.reduce([np.isfinite(wait.waits_s).any(axis=(1, 2)) for wait in waits])
    if data_waits_of(job).recorded and (mostly.any(axis=0) & (mostly != fetches).any(axis=0)).any():
        return Place(workers=job.workers_where(mostly))
    few = not ranks.all() or len(ranks) == 1
    return Place(dp_ranks=tuple(job.dp_ranks[int(at)] for at in np.flatnonzero(ranks)) if few else ())
