"""Work of the host that holds up GPUs: data loading, launches, code between ops, optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.computes import OTHER_WORK
from tracekit.analysis.evidence.host_code import data_waits_of, host_code_of, late_ranks, process_stops_s
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, data_loads, optimizers
from tracekit.analysis.evidence.slow_workers import slow_workers, worker_factor
from tracekit.analysis.evidence.subject import SPEED_OF_PEERS, evidence
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, lower_median, median, nan_mean, safe
from tracekit.analysis.whatif.interventions import NoOverlap, Scale, ScaleDelays, Together, step_times
from tracekit.base.text import ratio, seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.trace.facts import Fact
from tracekit.trace.model import OpKind

#: Where only collectives were recorded: compute, launches and waits look alike.
_PROFILE_BESIDE_PEER = "profile {ranks} and a peer (torch.profiler, py-spy record): what comes before the collective"


class HostThresholds(Struct, frozen=True):
    """When data, launches, code between ops and optimizers of a host are named."""

    #: Share of the step by which the host code of a worker exceeds that of its peers. Chosen; `eventsim`, `causes` and
    #: `frameworks` name it where it is injected, and on no healthy run.
    code_share: float = 0.02
    #: Share of that at one place of the step from which on all of it counts as being there. Chosen: only words follow.
    one_place_share: float = 0.9
    #: Share of the step that launch delays and other host work take, without waits for data. Chosen: below the 5 % from
    #: which on the paper does not trust a replay; `causes` and `eventsim` accuse no healthy job.
    launches_share: float = 0.04
    #: Share of the steps with late data in which that of a stage is. Chosen: most of them.
    late_steps_share: float = 0.5
    #: How many times as long as those of its peers an optimizer takes. Chosen; `frameworks` and `eventsim` find it.
    optimizer_factor: float = 1.5
    #: ... by so many standard errors. Statistic: 1e-9 of a normal one, so that not one of 8,192 workers has it by
    #: chance.
    optimizer_errors: float = 6.0
    #: The same, compared with other stages. Chosen: these hold other parameters, so they differ by design.
    optimizer_factor_of_stages: float = 2.0


HOST = HostThresholds()


def slow_code(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield workers whose training thread takes longer between their ops than those of their peers."""
    code, slow = host_code_of(job), slow_host_code(job)
    if not slow.any():
        return
    hit = np.asarray(slow.any(axis=1))
    by_place = code.beyond_s(slow).reshape(len(code.places), -1)
    worst = int(by_place.sum(axis=0).argmax())
    longer_s, place = float(by_place[:, worst].sum()), int(by_place[:, worst].argmax())
    most = "" if by_place[place, worst] > HOST.one_place_share * longer_s else "mostly "
    stage, dp_index = divmod(worst, hit.shape[1])
    # Its level, not its scatter: chance has already been ruled out.
    by_step = np.where(slow[stage, :, dp_index], 1 + longer_s / job.unchanged_s, 1.0)
    episodes = code.episodes
    figures = (
        Figure("longer than its peers, over the step", longer_s / job.unchanged_s, HOST.code_share, Unit.SHARE),
        Figure("more likely slow than by chance", float(episodes.nats[hit.ravel()].min()), episodes.needed, Unit.NATS),
    )
    effect = f"host code takes {seconds(longer_s)} longer than that of its peers, {most}{code.places[place]}"
    seen = job.shows(Fact.COMPUTE)
    yield Candidate(
        kind,
        Place(workers=job.workers_where(hit)),
        effect if seen else f"it comes to the collective {seconds(longer_s)} after its peers",
        figures,
        confidence_from(figures),
        code.as_peers(slow),
        by_step,
        title=None if seen else "Rank is late to collectives",
        suggested_fix=None if seen else _PROFILE_BESIDE_PEER,
    )


def slow_host_code(job: PipelineSubject) -> Bools:
    """Which workers' host code takes longer than their peers', and when, [stages, steps, dp_ranks].

    Stops of a process make it launch late, too: one problem, one cause. Where the kernel counted them, steps with stops
    are left out; otherwise, launch delays are those without the stops seen in computes.
    """
    return np.asarray(host_code_of(job).slow(HOST.code_share) & ~(process_stops_s(job) > 0))


def launches_and_code(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield launch delays and host work between ops, but for those of single workers, if they are costly."""
    change = host_code_of(job).only_excess(slow_host_code(job))
    share = 1 - float(step_times(job.replay, (change,)).mean()) / job.unchanged_s
    if share < HOST.launches_share:
        return
    figures = (Figure("launch delays and host work, over the step", share, HOST.launches_share, Unit.SHARE),)
    effect = f"launch delays and host work between ops take {share:.0%} of the step"
    yield Candidate(kind, Place(), effect, figures, confidence_from(figures), change)


def late_data(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield data that comes late, by launch delays before the first ops or by recorded loading."""
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
    yield Candidate(kind, where, effect, figures, confidence_from(figures), change, series)


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
    mostly = (late[:, hit].mean(axis=1) >= HOST.late_steps_share) & ranks
    fetches = np.logical_or.reduce([np.isfinite(wait.waits_s).any(axis=(1, 2)) for wait in waits])
    if data_waits_of(job).recorded and (mostly.any(axis=0) & (mostly != fetches).any(axis=0)).any():
        return Place(workers=job.workers_where(mostly))
    few = not ranks.all() or len(ranks) == 1
    return Place(dp_ranks=tuple(job.dp_ranks[int(dp_index)] for dp_index in np.flatnonzero(ranks)) if few else ())


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
        spread = MAD_TO_SIGMA * np.expand_dims(lower_median(np.abs(level - usual), axis=axis), axis)
        # A stage with more layers has more parameters, too.
        peers = usual * (np.maximum(worker_factor(job), 1.0) if among_stages else 1.0)
        error, factor = np.hypot(scatter, spread) / peers, level / peers
        smallest = HOST.optimizer_factor_of_stages if among_stages else HOST.optimizer_factor
        hit = (factor > smallest) & (factor - 1 > HOST.optimizer_errors * error) & ~slow_workers(job)
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
