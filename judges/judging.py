"""Judge the diagnosis of an event-simulated job: its causes, their places and timing, and the prices of its fixes.

Takes a job of `judges.eventsim`, its truths, and a report's JSON. Reads nothing but the JSON, so that rules can
change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from judges.eventsim.causes import Checkpoints, LateData, Rise, SlowRank
from judges.eventsim.model import FIRST_STEP, Cell, Job
from judges.eventsim.truth import (
    Truth,
    TruthKind,
    mean_step_s,
    with_cards_repaired,
    with_data_in_time,
    with_links_repaired,
    with_ranks_replaced,
    with_workers_replaced,
    without_kinds,
)
from judges.eventsim.uneven import UnequalSequences

#: A cause that costs this share of the step must be found.
MUST_FIND_SHARE = 0.05
#: Kinds of tracekit's causes that correctly name each true kind. Most have the same name.
ACCEPTED: dict[TruthKind, frozenset[str]] = {
    kind: frozenset({kind.value})
    | {
        TruthKind.BAD_WORKER: {"slow-host"},  # of a host with one worker; the place is checked
        TruthKind.SLOW_RANK_GROUP: {"slow-host", "bad-worker"},  # any label that names exactly these workers
        TruthKind.SLOW_HOST: {"slow-rank-group"},
        TruthKind.SEQUENCE_LENGTH_IMBALANCE: {"data-skew"},  # where a DP rank gets the long ones for some steps
        TruthKind.SLOW_HOST_CODE: {"host-bound-launch"},  # where it is all workers'; the place is checked
    }.get(kind, frozenset())
    for kind in TruthKind
}
#: Kinds that accuse no worker, so that they are never a false accusation.
BLAMES_NOBODY = frozenset(
    {
        "healthy",
        "unexplained",
        "too-little-trace",
        "random-variation",
        "shared-network-card",
        "lockstep-jitter",
        "busy-cores",
    }
)

Where = Mapping[str, Any]
Fix = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Named:
    """A cause of the report and the truths that it answers; one cause may list several bad workers or links.

    `misplaced`: right kind, wrong place. `timing`: the reported first step and period. `mistimed`: wrong timing.
    """

    kind: str
    place: str
    saved_s: float
    truths: tuple[Truth, ...]
    misplaced: bool = False
    timing: str = ""
    mistimed: bool = False


@dataclass(frozen=True, slots=True)
class PricedFix:
    """A fix of the report: its price, and the seconds a step that the job simulated with the fix saves."""

    kind: str
    title: str
    priced_s: float
    truth_s: float


@dataclass(frozen=True)
class Judgement:
    """One job, judged. `problem`: why there is no report, else None. Shares are of the mean step."""

    job: Job
    step_s: float
    truths: tuple[Truth, ...]
    slowdown: float = 1.0
    trusted: bool = False
    named: tuple[Named, ...] = ()
    fixes: tuple[PricedFix, ...] = ()
    problem: str | None = None
    must: tuple[Truth, ...] = field(default=())

    @property
    def recalled(self) -> tuple[Truth, ...]:
        """Truths that had to be found and were."""
        named = [truth for cause in self.named for truth in cause.truths]
        return tuple(truth for truth in self.must if any(truth is other for other in named))

    @property
    def missed(self) -> tuple[Truth, ...]:
        """Truths that had to be found and were not."""
        return tuple(truth for truth in self.must if not any(truth is other for other in self.recalled))

    @property
    def right(self) -> tuple[Named, ...]:
        """Named causes that answer a truth that had to be found."""
        return tuple(
            cause for cause in self.named if any(truth is other for truth in cause.truths for other in self.must)
        )

    @property
    def wrong(self) -> tuple[Named, ...]:
        """Named causes that do not exist, or that are reported in the wrong place."""
        return tuple(cause for cause in self.named if not cause.truths)

    @property
    def priced(self) -> tuple[Named, ...]:
        """Right causes that answer one truth alone, so that their prices can be compared."""
        return tuple(cause for cause in self.right if len(cause.truths) == 1)

    @property
    def cause_errors(self) -> list[float]:
        """Error of the price of each cause in `priced`, as a share of the step."""
        return [abs(cause.saved_s - cause.truths[0].saved_s) / self.step_s for cause in self.priced]

    @property
    def fix_errors(self) -> list[float]:
        """Error of the price of each fix, as a share of the step."""
        return [abs(fix.priced_s - fix.truth_s) / self.step_s for fix in self.fixes]


def judge(job: Job, truths: tuple[Truth, ...], report: Mapping[str, Any]) -> Judgement:
    """Compare a report's JSON with the truth."""
    step_s = mean_step_s(job)
    named = tuple(
        _named(job, truths, cause) for cause in report["causes"] if cause["kind"] not in BLAMES_NOBODY
    ) + tuple(
        _named(job, truths, cause)
        for cause in report["causes"]
        if cause["kind"] == "random-variation" and any(truth.kind is TruthKind.RANDOM_VARIATION for truth in truths)
    )
    return Judgement(
        job=job,
        step_s=step_s,
        truths=truths,
        slowdown=report["slowdown"],
        trusted=report["trust"]["trustworthy"],
        named=named,
        fixes=tuple(priced for fix in report["fixes"] if (priced := _priced(job, fix, report["fixes"])) is not None),
        must=must_find(truths, step_s),
    )


def must_find(truths: tuple[Truth, ...], step_s: float) -> tuple[Truth, ...]:
    """Truths that cost enough to have to be named."""
    return tuple(truth for truth in truths if truth.saved_s >= MUST_FIND_SHARE * step_s)


def _named(job: Job, truths: tuple[Truth, ...], cause: Mapping[str, Any]) -> Named:
    kind, where = cause["kind"], cause["where"]
    candidates = [truth for truth in truths if kind in ACCEPTED[truth.kind]]
    fits = tuple(truth for truth in candidates if _place_is_right(job, truth, candidates, where, kind))
    misplaced = bool(candidates) and not fits
    mistimed = bool(fits) and not any(_when_is_right(truth, cause) for truth in fits)
    return Named(kind, cause["where_text"], float(cause["saved_s"]), fits, misplaced, _timing(cause), mistimed)


def _when_is_right(truth: Truth, cause: Mapping[str, Any]) -> bool:
    """Whether the reported timing is right: since a step, every n-th step, or always."""
    since, period = cause.get("since_step"), (cause.get("time") or {}).get("period")
    every = truth.cause.every if isinstance(truth.cause, Checkpoints) else truth.when.every
    now_and_then = truth.when.burst or (isinstance(truth.cause, LateData) and truth.cause.share < 1)
    if truth.kind is TruthKind.SLOW_STEPS or now_and_then:  # the steps are the place; reports have no timing for bursts
        return True
    if every > 1:
        return bool(period == every)
    if getattr(truth.cause, "rise", Rise.AT_ONCE) is not Rise.AT_ONCE:  # no single step in which it began
        return period is None
    began = FIRST_STEP if since is None else since
    return period is None and abs(began - FIRST_STEP - truth.when.since) <= (1 if truth.when.since else 0)


def _timing(cause: Mapping[str, Any]) -> str:
    since, period = cause.get("since_step"), (cause.get("time") or {}).get("period")
    parts = ([] if since is None else [f"since step {since}"]) + ([] if period is None else [f"every {period} steps"])
    return ", ".join(parts)


def _place_is_right(job: Job, truth: Truth, others: list[Truth], where: Where, kind: str) -> bool:
    """Whether a named place is that of a truth; one cause may list the places of several truths of its kind."""
    match truth.kind:
        case TruthKind.SLOW_LINK:
            named = {(link["dp_rank"], link["pp_rank"]) for link in where["links"]}
            return truth.link in named and named <= {other.link for other in others}
        case TruthKind.STAGE_IMBALANCE:
            named_stages = set(where["pp_ranks"])
            return truth.stages <= named_stages <= frozenset().union(*(other.stages for other in others))
        case TruthKind.SEQUENCE_LENGTH_IMBALANCE if kind == "data-skew":
            return isinstance(truth.cause, UnequalSequences) and truth.cause.shards > 0
        case TruthKind.DATA_SKEW:
            return set(where["dp_ranks"]) == truth.dp_ranks
        case TruthKind.LATE_DATA:
            everywhere = frozenset(range(job.shape.dp))
            named = {cell[0] for cell in _cells(job, where)} or everywhere
            if isinstance(truth.cause, LateData) and truth.cause.in_turn:  # ranks that were never late may be left out
                hit = frozenset(np.flatnonzero(truth.cause.late(job.shape).any(axis=0)).tolist())
                return hit <= named
            return named == (truth.dp_ranks or everywhere)
        case TruthKind.SLOW_STEPS:
            steps = FIRST_STEP + truth.when.mask(job.shape.steps).nonzero()[0]
            return list(where["steps"]) == steps.tolist()
        case TruthKind.UNRECORDED_WORKER_LATE:
            return True
        case TruthKind.SLOW_RANK_OF_WORKER:
            slow = {other.cause.rank(job) for other in (truth, *others) if isinstance(other.cause, SlowRank)}
            return (
                isinstance(truth.cause, SlowRank)
                and truth.cause.rank(job) in where["ranks"]
                and set(where["ranks"]) <= slow
            )
        case _:
            return _workers_are_right(job, truth, others, where, kind)


def _workers_are_right(job: Job, truth: Truth, others: list[Truth], where: Where, kind: str) -> bool:
    """Whether the workers of a place are those of the truth."""
    cells = _cells(job, where)
    if not truth.cells:  # everywhere: naming some workers accuses them
        return not cells or truth.kind is TruthKind.CONGESTION
    if truth.kind is TruthKind.SLOW_RANK_GROUP or kind == "slow-host":
        return cells == truth.cells
    if truth.kind is TruthKind.SLOW_NIC:  # one worker of the host names its card
        return bool(cells & truth.cells) and cells <= frozenset().union(*(other.cells for other in others))
    return truth.cells <= cells <= frozenset().union(*(other.cells for other in others))


def _cells(job: Job, where: Where) -> frozenset[Cell]:
    """Workers of a place given by worker, host, DP rank or stage."""
    if where["workers"]:
        return frozenset((worker["dp_rank"], worker["pp_rank"]) for worker in where["workers"])
    if where["host"]:
        return _cells_of_host(job, where["host"])
    dp_ranks, stages = set(where["dp_ranks"]), set(where["pp_ranks"])
    if not dp_ranks and not stages:
        return frozenset()
    return frozenset(
        cell for cell in job.shape.cells if (not dp_ranks or cell[0] in dp_ranks) and (not stages or cell[1] in stages)
    )


def _cells_of_host(job: Job, host: str) -> frozenset[Cell]:
    return frozenset(cell for cell in job.shape.cells if f"host-{job.shape.host(*cell):04d}" == host)


def _compressed(job: Job, fix: Fix) -> Job:
    return replace(job, dp_bytes=job.dp_bytes / fix["details"]["ratio"])


def _collected_together(job: Job, fix: Fix) -> Job:
    extra_s = fix["details"]["pause_s"] / fix["details"]["every_steps"]
    return replace(without_kinds(job, TruthKind.PYTHON_GC), extra_step_s=extra_s)


def _layers_moved(job: Job, fix: Fix) -> Job:
    what = "layers" if "layers_now" in fix["details"] else "work"
    now, then = fix["details"][f"{what}_now"], fix["details"][f"{what}_then"]
    return replace(job, layer_factor=tuple(after / before for before, after in zip(now, then, strict=True)))


def _names_no_split(fix: Fix) -> bool:
    """Whether a fix moves work between stages without giving layers."""
    return fix["kind"] == "repartition-stages" and "layers_now" not in fix["details"]


def _links_repaired(job: Job, fix: Fix) -> Job:
    links = fix["where"]["links"]
    return with_links_repaired(job, frozenset((link["dp_rank"], link["pp_rank"]) for link in links))


#: The job after a fix that the simulator can make. A combination applies its parts in turn.
FIXED: dict[str, Callable[[Job, Fix], Job]] = {
    "replace-workers": lambda job, fix: with_ranks_replaced(
        with_workers_replaced(job, _cells(job, fix["where"])), frozenset(fix["where"].get("ranks", ()))
    ),
    "speed-up-host-code": lambda job, fix: with_workers_replaced(job, _cells(job, fix["where"])),
    "drain-host": lambda job, fix: with_workers_replaced(job, _cells(job, fix["where"])),
    "repair-link": _links_repaired,
    "repair-nic": lambda job, fix: with_cards_repaired(job, _cells(job, fix["where"])),
    "calm-network": lambda job, _: without_kinds(job, TruthKind.CONGESTION),
    "prefetch-data": lambda job, fix: with_data_in_time(job, frozenset(fix["where"]["dp_ranks"])),
    "steady-steps": lambda job, _: without_kinds(job, TruthKind.SLOW_STEPS),
    "planned-gc": _collected_together,
    "balance-sequences": lambda job, _: replace(job, balanced=True),
    "compress-dp-communication": _compressed,
    "repartition-stages": _layers_moved,
}


def _priced(job: Job, fix: Fix, others: Sequence[Fix]) -> PricedFix | None:
    """The fix with its true price; None if the report gives no price or the simulator cannot make it."""
    if fix["bound"] or fix["withheld"] is not None:
        return None
    parts = [fix]
    if fix["kind"] == "combination":
        titles = [(part["kind"], part["title"]) for part in fix["details"]["sequence"]]
        parts = [other for other in others if (other["kind"], other["title"]) in titles]
    if any(part["kind"] not in FIXED or _names_no_split(part) for part in parts):
        return None
    after = job
    for part in parts:
        after = FIXED[part["kind"]](after, part)
    return PricedFix(fix["kind"], fix["title"], float(fix["saved_s"]), mean_step_s(job) - mean_step_s(after))
