"""The true price of each cause and fix: the same job, run again without the cause or with the fix.

All other random draws stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from judges.eventsim.causes import (
    ALWAYS,
    Cause,
    Checkpoints,
    GcPauses,
    HeavyStage,
    LateData,
    Part,
    ProcessPauses,
    RandomPauses,
    SlowFirstMicrobatch,
    SlowHostThread,
    SlowRank,
    SlowSteps,
    SlowWorkers,
    StoppedProcess,
    Wander,
    When,
)
from judges.eventsim.model import Cell, Job
from judges.eventsim.run import run
from judges.eventsim.troubles import BusyUplink, ClockOffset, Congestion, CongestionEpisodes, SlowLink, SlowNic
from judges.eventsim.uneven import SkewedData, UnequalSequences


class TruthKind(StrEnum):
    """True kinds of causes, named as a diagnosis should name them."""

    BAD_WORKER = "bad-worker"
    SLOW_HOST = "slow-host"
    SLOW_RANK_GROUP = "slow-rank-group"
    SLOW_OPTIMIZER = "slow-optimizer"
    UNRECORDED_WORKER_LATE = "unrecorded-worker-late"
    SLOW_RANK_OF_WORKER = "slow-rank-of-worker"
    DATA_SKEW = "data-skew"
    SEQUENCE_LENGTH_IMBALANCE = "sequence-length-imbalance"
    STAGE_IMBALANCE = "stage-imbalance"
    POSITION_EFFECT = "position-effect"
    RANDOM_VARIATION = "random-variation"
    SLOW_STEPS = "slow-steps"
    PROCESS_PAUSES = "process-pauses"
    PYTHON_GC = "python-gc"
    CHECKPOINT_STALLS = "checkpoint-stalls"
    LATE_DATA = "late-data-loading"
    SLOW_HOST_CODE = "slow-host-code"
    SLOW_LINK = "slow-p2p-link"
    SLOW_NIC = "slow-nic"
    CONGESTION = "congestion"
    CLOCK_ERROR = "clock-error"


_KINDS: dict[type[Cause], TruthKind] = {
    SlowRank: TruthKind.SLOW_RANK_OF_WORKER,
    SkewedData: TruthKind.DATA_SKEW,
    UnequalSequences: TruthKind.SEQUENCE_LENGTH_IMBALANCE,
    HeavyStage: TruthKind.STAGE_IMBALANCE,
    SlowFirstMicrobatch: TruthKind.POSITION_EFFECT,
    Wander: TruthKind.RANDOM_VARIATION,
    SlowSteps: TruthKind.SLOW_STEPS,
    ProcessPauses: TruthKind.PROCESS_PAUSES,
    RandomPauses: TruthKind.PROCESS_PAUSES,
    StoppedProcess: TruthKind.PROCESS_PAUSES,
    GcPauses: TruthKind.PYTHON_GC,
    Checkpoints: TruthKind.CHECKPOINT_STALLS,
    LateData: TruthKind.LATE_DATA,
    SlowHostThread: TruthKind.SLOW_HOST_CODE,
    SlowLink: TruthKind.SLOW_LINK,
    SlowNic: TruthKind.SLOW_NIC,
    Congestion: TruthKind.CONGESTION,
    CongestionEpisodes: TruthKind.CONGESTION,
    BusyUplink: TruthKind.CONGESTION,
    ClockOffset: TruthKind.CLOCK_ERROR,
}


@dataclass(frozen=True, slots=True)
class Truth:
    """One cause of a job, with its place and price.

    `cells`: affected workers; `dp_ranks`, `stages`: those affected as a whole; `link`: DP rank and the stage it leaves.
    Empty without such a place. `saved_s`: mean seconds a step that the job runs faster without the cause.
    """

    kind: TruthKind
    cause: Cause
    cells: frozenset[Cell]
    dp_ranks: frozenset[int]
    stages: frozenset[int]
    link: Cell | None
    when: When
    saved_s: float


def truths(job: Job) -> list[Truth]:
    """Causes of a job with their prices, costliest first."""
    step_s = mean_step_s(job)
    unsorted = [_truth(job, cause, step_s - mean_step_s(without(job, cause))) for cause in job.causes]
    return sorted(unsorted, key=lambda truth: -truth.saved_s)


@lru_cache(maxsize=256)
def mean_step_s(job: Job) -> float:
    """Mean step of a job, seconds."""
    return float(run(job).step_s.mean())


def _truth(job: Job, cause: Cause, saved_s: float) -> Truth:
    dp_ranks: frozenset[int] = frozenset()
    stages: frozenset[int] = frozenset()
    match cause:
        case SkewedData(dp=dp):
            dp_ranks = frozenset({dp})
        case LateData(dp_ranks=late):
            dp_ranks = late
        case HeavyStage(stage=stage):
            stages = frozenset({stage})
        case _:
            pass
    link = (cause.dp, cause.stage) if isinstance(cause, SlowLink) else None
    when: When = getattr(cause, "when", ALWAYS)
    return Truth(kind_of(job, cause), cause, cause.cells(job), dp_ranks, stages, link, when, saved_s)


def kind_of(job: Job, cause: Cause) -> TruthKind:
    """The kind of a cause; that of slow workers depends on the set of workers."""
    if not isinstance(cause, SlowWorkers):
        return _KINDS[type(cause)]
    if cause.workers <= job.recording.unrecorded:
        return TruthKind.UNRECORDED_WORKER_LATE
    if cause.part is Part.OPTIMIZER:
        return TruthKind.SLOW_OPTIMIZER
    if len(cause.workers) == 1:
        return TruthKind.BAD_WORKER
    hosts = {job.shape.host(*cell) for cell in cause.workers}
    if len(hosts) == 1 and cause.workers == job.shape.cells_of_host(min(hosts)):
        return TruthKind.SLOW_HOST
    return TruthKind.SLOW_RANK_GROUP


def without(job: Job, *gone: Cause) -> Job:
    """The job without some of its causes."""
    return replace(job, causes=tuple(cause for cause in job.causes if not any(cause is other for other in gone)))


def without_kinds(job: Job, *kinds: TruthKind) -> Job:
    """The job without all causes of some kinds."""
    return without(job, *(cause for cause in job.causes if kind_of(job, cause) in kinds))


def with_workers_replaced(job: Job, cells: frozenset[Cell]) -> Job:
    """The job with average workers in some places: causes of these workers are gone, the network stays."""
    causes: list[Cause] = []
    for cause in job.causes:
        match cause:
            case SlowWorkers(workers=workers) | SlowHostThread(workers=workers) if workers:
                if others := workers - cells:
                    causes.append(replace(cause, workers=others))
            case StoppedProcess(worker=worker) | SlowRank(worker=worker) if worker in cells:
                pass
            case GcPauses(worker=worker) if worker in cells:
                pass
            case _:
                causes.append(cause)
    return replace(job, causes=tuple(causes), replaced=job.replaced | cells)


def with_ranks_replaced(job: Job, ranks: frozenset[int]) -> Job:
    """The job in which some ranks are as fast as the others of their workers."""
    return without(job, *(cause for cause in job.causes if isinstance(cause, SlowRank) and cause.rank(job) in ranks))


def with_links_repaired(job: Job, links: frozenset[Cell]) -> Job:
    """The job with some links (DP rank, stage that they leave) repaired."""
    slow = (cause for cause in job.causes if isinstance(cause, SlowLink) and (cause.dp, cause.stage) in links)
    return without(job, *slow)


def with_cards_repaired(job: Job, cells: frozenset[Cell]) -> Job:
    """The job with the network cards of some workers' hosts repaired."""
    hosts = {job.shape.host(*cell) for cell in cells}
    return without(job, *(cause for cause in job.causes if isinstance(cause, SlowNic) and cause.host in hosts))


def with_data_in_time(job: Job, dp_ranks: frozenset[int]) -> Job:
    """The job with data in time on some DP ranks (empty: all)."""
    spared = dp_ranks or frozenset(range(job.shape.dp))
    causes = (replace(cause, spared=spared) if isinstance(cause, LateData) else cause for cause in job.causes)
    return replace(job, causes=tuple(causes))
