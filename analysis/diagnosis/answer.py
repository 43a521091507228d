"""The answer in a few sentences: what is slow, what it costs, who, why, what to do first, and whether to believe it.

In: the diagnosis of a job. Out: an `Answer`. Terminal, notebook, dashboard, metrics and alerts all show these
sentences; none of them interprets a figure itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY, Trust
from tracekit.analysis.attribution.stalls import Stall
from tracekit.analysis.detectors.registry import detector_of
from tracekit.analysis.diagnosis.first_fix import act_of, assumed_by, best_fix, first_fix
from tracekit.analysis.diagnosis.verdict import main_clause, straggling_s
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.naming import Names
from tracekit.base.text import cost, seconds, sure, three_digits, with_error
from tracekit.report.finding import Finding, Place
from tracekit.report.findings import Account
from tracekit.report.fix import Fix
from tracekit.report.verdict import Verdict
from tracekit.trace.model import Worker


class Culprit(Struct, frozen=True):
    """One rank that a cause is on. `part`: what part of it is slow. `cost_s`: of the whole cause, mean seconds per
    step.

    `rank`, `host`, `gpu_uuid`: None if unknown. `first_step`: since when, None if from the beginning. `hardware`:
    whether the recording shows that its machine is at fault.
    """

    rank: int | None
    dp_rank: int
    pp_rank: int
    host: str | None
    gpu_uuid: str | None
    part: str
    cost_s: float
    confidence: float
    first_step: int | None
    hardware: bool


class Answer(Struct, frozen=True):
    """Sentences without a full stop, None if there is nothing to say.

    `headline`: as the verdict's, without its kind. `fix`: what to do first about the leading cause, and what that
    saves; `action` and `saves`: the two parts of it. `check`: where else to look. `others`: the other causes that cost
    time, one sentence each, with the cost. `stalls`: isolated slow steps, by how much and why, longest first. `causes`:
    where each of the diagnosis's causes is and what it does, in the same order; `places`: only where. `accounts`: for
    each cause that costs time, the leading one first, everything to say about it.
    """

    headline: str
    cost: str | None
    who: str | None
    why: str | None
    check: str | None
    fix: str | None
    action: str | None
    saves: str | None
    others: tuple[str, ...]
    stalls: tuple[str, ...]
    causes: tuple[str, ...]
    places: tuple[str, ...]
    trust: str
    culprits: tuple[Culprit, ...]
    accounts: tuple[Account, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        lists: dict[str, tuple[Struct, ...]] = {"culprits": self.culprits, "accounts": self.accounts}
        return asdict(self) | {name: [asdict(one) for one in those] for name, those in lists.items()}


def answer_of(
    evidence: Evidence,
    verdict: Verdict,
    causes: Sequence[Finding],
    fixes: Sequence[Fix],
    stalls: Sequence[Stall],
    trust: Trust,
) -> Answer:
    """The answer for a diagnosed job."""
    leading = next((cause for loss in verdict.losses for cause in loss.causes), None)
    lost = verdict.lost_s > 0
    best = None if leading is None else first_fix(leading, fixes)
    return Answer(
        headline=verdict.sentence,
        cost=_cost(evidence, verdict, causes) if lost else None,
        who=None if leading is None else _who(evidence, leading, trusted=trust.trustworthy),
        why=None if leading is None else leading.effect,
        check=None if leading is None else leading.next_check,
        fix=None if leading is None else _fix(evidence, leading, best),
        action=None if leading is None else act_of(leading, best),
        saves=None if leading is None or best is None else _saves(evidence, leading, best),
        others=tuple(_other(evidence, cause) for cause in causes if cause.change is not None and cause is not leading),
        stalls=tuple(f"step {stall.step}: +{seconds(stall.extra_s)}, {stall.part}" for stall in stalls),
        causes=tuple(_cause(evidence, cause) for cause in causes),
        places=tuple(_place(evidence, cause) for cause in causes),
        trust=_trust(evidence, trust),
        culprits=tuple(_culprits(evidence, causes)),
        accounts=tuple(_accounts(evidence, causes, leading, fixes)),
    )


def _cost(evidence: Evidence, verdict: Verdict, causes: Sequence[Finding]) -> str:
    a_day = evidence.attribution.world_size * 24
    # The saving is another figure: compared with its peers, a slow rank loses more than compared with the mean that
    # includes it.
    than = ", compared with mean ops;" if verdict.lost_s == straggling_s(evidence, causes, verdict.parts) else ","
    part_of_time = any(cause.saved_when_acting_s is not None for cause in causes[:1])
    return (
        f"{seconds(verdict.lost_s)} of {'the mean' if part_of_time else 'every'}"
        f" {seconds(verdict.lost_s / verdict.share)} step{than}"
        f" {three_digits(verdict.lost_gpu_hours_per_day)} of {a_day:,} GPU-hours a day"
    )


def _cause(evidence: Evidence, cause: Finding) -> str:
    """One cause: where, and what it does."""
    place = Names.of(evidence).place(cause.where)
    return f"{place.words}: {main_clause(cause.effect)}" if place else main_clause(cause.effect)


def _place(evidence: Evidence, cause: Finding) -> str:
    """Ranks and nodes of a cause."""
    place = Names.of(evidence).place(cause.where)
    return "all ranks" if place is None else place.words


def _other(evidence: Evidence, cause: Finding) -> str:
    """One more cause, with its cost."""
    return f"{_cause(evidence, cause)} ({cost(cause.saved_s, cause.alone_s)})"


def _who(evidence: Evidence, cause: Finding, *, trusted: bool = True) -> str:
    """Ranks and nodes, then coordinates, since when and, for a `trusted` job, how sure."""
    coordinates = f" ({cause.where.workers[0].coordinates})" if len(cause.where.workers) == 1 else ""
    confidence = f", {sure(cause.confidence)}" if trusted else ""
    return f"{_place(evidence, cause)}{coordinates}, {cause.when}{confidence}"


def _fix(evidence: Evidence, cause: Finding, best: Fix | None) -> str | None:
    """What to do about a cause and, if it has a price, what that saves."""
    act = act_of(cause, best)
    return act if act is None or best is None else f"{act}; {_saves(evidence, cause, best)}"


def _saves(evidence: Evidence, cause: Finding, best: Fix) -> str:
    """What a fix saves, or why that is not reported."""
    if best.withheld is not None:
        return f"no saving promised, {best.withheld}"
    saved = with_error(best.saved_s, 0.0 if best.bound else best.error_s)
    assumed = assumed_by(cause, best)
    assumes = f"; assumes {assumed}" if assumed else ""
    return (
        f"saves {'at most ' if best.bound else ''}{saved} a step"
        f" ({seconds(evidence.recorded_s)} -> {seconds(best.new_step_s)}, {best.saved_s / evidence.recorded_s:.0%}),"
        f" {three_digits(best.saved_gpu_hours_per_day)} GPU-hours a day{assumes}"
    )


def _trust(evidence: Evidence, trust: Trust) -> str:
    if not trust.trustworthy:
        return "; ".join(trust.reasons)
    explained = f"gaps between ops add {trust.discrepancy:.1%}"
    if trust.discrepancy > LARGEST_DISCREPANCY:
        explained += f", all but {trust.unexplained:.1%} explained"
    layout = evidence.replay.graph.layout
    ranks, inside = layout.tp * layout.cp, ""
    if ranks > 1 and evidence.lockstep is None:
        inside = f"; one rank in {ranks} recorded, standing for its worker"
    return f"replay within {trust.replay_error:.1%} of the recording; {explained}{inside}"


def _culprits(evidence: Evidence, causes: Sequence[Finding]) -> Iterator[Culprit]:
    """The ranks that causes are on, costliest cause first."""
    gpus = evidence.trace.metadata.get("gpus")
    for cause in causes:
        part = detector_of(cause.kind).part
        if part is None or cause.change is None:
            continue
        for rank, worker in _places(evidence, cause.where):
            yield Culprit(
                rank=rank,
                dp_rank=worker.dp_rank,
                pp_rank=worker.pp_rank,
                host=None if rank is None else evidence.host_of_rank.get(rank),
                gpu_uuid=_uuid(gpus, rank),
                part=part,
                cost_s=cause.cost_s,
                confidence=cause.confidence,
                first_step=cause.since_step,
                hardware=evidence.hardware_at_fault((worker,)),
            )


def _accounts(
    evidence: Evidence, causes: Sequence[Finding], leading: Finding | None, fixes: Sequence[Fix]
) -> Iterator[Account]:
    """Everything to say about each cause that costs time."""
    gpus = evidence.trace.metadata.get("gpus")
    for cause in sorted(causes, key=lambda cause: cause is not leading):
        if cause.change is None:
            continue
        ranks = tuple(dict.fromkeys(rank for rank, _ in _places(evidence, cause.where) if rank is not None))
        named, best = [evidence.host_of_rank.get(rank) for rank in ranks], best_fix(cause, fixes)
        yield Account(
            kind=str(cause.kind),
            part=detector_of(cause.kind).part,
            what=_other(evidence, cause),
            who=_who(evidence, cause),
            why=cause.effect,
            check=cause.next_check,
            fix=_fix(evidence, cause, best),
            ranks=ranks,
            hosts=tuple(dict.fromkeys(host for host in [cause.where.host, *named] if host)),
            gpu_uuids=tuple(uuid for rank in ranks if (uuid := _uuid(gpus, rank))),
            cost_s=cause.cost_s,
            share=cause.cost_s / evidence.recorded_s,
            confidence=cause.confidence,
            first_step=cause.since_step,
            saved_gpu_hours_per_day=None if best is None or best.withheld else best.saved_gpu_hours_per_day,
        )


def _places(evidence: Evidence, where: Place) -> Iterator[tuple[int | None, Worker]]:
    """The ranks of a place, as far as known, and their workers."""
    for worker in _workers(evidence, where):
        yield evidence.worker_ranks.get(worker), worker
    if where.ranks and evidence.lockstep is not None:
        lockstep = evidence.lockstep
        worker_of = {
            rank: worker for worker, ranks in zip(lockstep.workers, lockstep.ranks, strict=True) for rank in ranks or ()
        }
        yield from ((rank, worker_of[rank]) for rank in where.ranks)


def _workers(evidence: Evidence, where: Place) -> Iterator[Worker]:
    """The workers of a place; none for the whole job."""
    yield from where.workers
    for link in where.links:
        yield from link.ends
    for dp_rank in where.dp_ranks:
        yield from (Worker(dp_rank, stage) for stage in range(evidence.stages))


def _uuid(gpus: object, rank: int | None) -> str | None:
    """The UUID of a rank's GPU, as far as the free metadata says."""
    gpu = gpus.get(str(rank)) if isinstance(gpus, dict) else None
    uuid = gpu.get("uuid") if isinstance(gpu, dict) else None
    return uuid if isinstance(uuid, str) else None
