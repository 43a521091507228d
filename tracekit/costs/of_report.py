"""Divides the mean step of a report into parts of a bill.

In: a report. Out: seconds of the mean step: each loss of the verdict with its cause and place, and planned work of the
critical path beyond these. A store keeps them of each window, so that neither a bill nor the verdict of a run reads
reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from tracekit.analysis.detectors.detector import detector_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.costs import ALL, LEAST_S, USEFUL, BillPart, Claim, ClaimedCosts, PlacedLoss
from tracekit.report.conclusions import UNEXPLAINED, Finding, shared_s
from tracekit.report.finding import OF_POST_TRAINING, LossKind
from tracekit.report.hardware import GpuInReport
from tracekit.report.report import Report
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.model import OpKind

#: The part of work that a report finds on the critical path, and that a run directory records.
PLANNED = {
    OpKind.CHECKPOINT: BillPart.CHECKPOINTS,
    OpKind.EVALUATION: BillPart.EVALUATION,
    OpKind.DATA_LOAD: BillPart.INPUT,
}
#: The part of each kind of loss.
PART_OF = {
    LossKind.STRAGGLER: BillPart.STRAGGLERS,
    LossKind.INPUT: BillPart.INPUT,
    LossKind.HOST: BillPart.HOST,
    LossKind.COMMUNICATION: BillPart.COMMUNICATION,
    LossKind.COMPUTE: BillPart.COMPUTE,
    LossKind.IDLE: BillPart.IDLE,
    LossKind.STALLS: BillPart.IDLE,
    LossKind.EVALUATION: BillPart.EVALUATION,
    **dict.fromkeys(OF_POST_TRAINING, BillPart.POST_TRAINING),
}
HIDDEN = "losses that hide each other"
NOT_TRUSTED: Claim = BillPart.UNKNOWN, "analysis not trusted", ALL
#: A step is slow if it loses this share of what the usual slow one loses.
_SLOW_SHARE = 0.5
#: Losses of post-training inside its generation.
_OF_GENERATION = frozenset((LossKind.QUEUEING, LossKind.TAIL, LossKind.ENGINES, LossKind.TOOLS))


def costs_of(report: Report, step_starts: Mapping[int, float] = MappingProxyType({})) -> ClaimedCosts:
    """The costs that a report shows. `step_starts`: of some of its steps, seconds since the epoch."""
    planned = dict.fromkeys(PLANNED.values(), 0.0)
    for op in report.critical_kinds or report.critical_path:
        if op.kind in PLANNED:
            planned[PLANNED[OpKind(op.kind)]] += max(op.recorded_s, 0.0)
    length_s, gpus = report.length_s or None, report.job.gpus
    if not report.trust.trustworthy:
        return ClaimedCosts(planned, (), (NOT_TRUSTED,), gpus, length_s, next(iter(report.trust.reasons), None))
    placed, losses_s = _placed(report, planned)
    losses = _split_planned(planned, placed)
    hidden_s = report.verdict.lost_s - sum(losses_s.values())
    losses.append(PlacedLoss(None, BillPart.UNKNOWN, HIDDEN, hidden_s))
    rest = shown_useful(report, losses_s, _uncounted(report, losses_s))
    timed = when_slow(report, step_starts)
    return ClaimedCosts(
        planned, tuple(timed(loss) for loss in losses if loss.seconds + loss.planned_s > LEAST_S), rest, gpus, length_s
    )


def _placed(report: Report, planned: Mapping[BillPart, float]) -> tuple[list[PlacedLoss], dict[LossKind, float]]:
    """The losses by their causes, and seconds of each kind of loss: together no more than all cost together."""
    lost, places, losses_s = list[PlacedLoss](), _places(report), dict[LossKind, float]()
    loss_of = _kinds_of_loss(report)
    shares_s, rests_s = _shares_s(report, loss_of)
    for kind in dict.fromkeys(loss.kind for loss in report.verdict.losses):
        part = PART_OF.get(kind, BillPart.UNKNOWN)
        causes = [(position, cause) for position, cause in enumerate(report.findings) if loss_of[position] is kind]
        placed = []
        for position, cause in causes:
            work = _planned_part(cause)
            billed = BillPart.CHECKPOINTS if (kind, work) == (LossKind.STALLS, BillPart.CHECKPOINTS) else part
            ranks, hosts, since = places.get(position, (cause.where.ranks, (), cause.since_step))
            loss = PlacedLoss(kind, billed, cause.kind, shares_s[position], 0.0, work, ranks, hosts, since)
            placed.append(replace(loss, saved_s=max(cause.saved_s, 0.0)))
        rest = PlacedLoss(kind, part, UNEXPLAINED if kind is LossKind.STRAGGLER else str(kind), rests_s[kind])
        losses_s[kind] = rest.seconds + sum(loss.seconds for loss in placed)
        if kind is LossKind.STRAGGLER:  # a finding on a rank prices all that the rank does
            on_ranks = [bool(cause.where.ranks) for _, cause in causes]
            uneven_s = sum(_uneven_work_s(report, [*lost, *placed], planned).values())
            rest, placed = _reduced(uneven_s, rest, placed, on_ranks)
        lost += [*placed, rest]
    return lost, losses_s


def _shares_s(report: Report, loss_of: Sequence[LossKind | None]) -> tuple[dict[int, float], dict[LossKind, float]]:
    """Seconds of each finding that the verdict counts, by its place, and what each kind of loss costs beyond its
    causes. `loss_of`: the kind of loss of each finding.
    """
    losses = {loss.kind: loss.lost_s if loss.alone_s is UNSET else loss.alone_s for loss in report.verdict.losses}
    counted = {
        position: (kind, report.findings[position].saved_s, report.findings[position].alone_s)
        for position, kind in enumerate(loss_of)
        if kind is not None and kind in losses
    }
    shares_s, rests_s = shared_s(report.verdict.lost_s, losses, list(counted.values()))
    return dict(zip(counted, shares_s, strict=True)), rests_s


def _places(report: Report) -> dict[int, tuple[tuple[int, ...], tuple[str, ...], int | None]]:
    """Ranks, hosts and first step of each finding that costs time, by its place among them: as the answer says."""
    leading = report.leading_finding
    priced = [(position, cause) for position, cause in enumerate(report.findings) if cause.priced]
    priced.sort(key=lambda finding: finding[1] is not leading)
    return {
        position: (account.ranks, account.hosts, account.first_step)
        for (position, _), account in zip(priced, report.answer.accounts, strict=False)
    }


def _uneven_work_s(
    report: Report, lost: Iterable[PlacedLoss], planned: Mapping[BillPart, float]
) -> dict[BillPart, float]:
    """Seconds of planned work that S counts as stragglers, because only some ranks do it, by part; without what
    findings name, and work that the verdict leaves out of S.
    """
    loss_of = zip(report.findings, _kinds_of_loss(report), strict=True)
    left_out = {_planned_part(cause) for cause, kind in loss_of if kind is not LossKind.STRAGGLER}
    uneven_s = dict[BillPart, float]()
    for op in report.by_kind:
        if op.kind in PLANNED and (work := PLANNED[OpKind(op.kind)]) not in left_out:
            excess_s = ((op.slowdown or 1.0) - 1) * report.step_time_s.ideal
            named_s = sum(loss.seconds for loss in lost if (loss.part, loss.work) == (BillPart.STRAGGLERS, work))
            uneven_s[work] = max(min(excess_s, planned[work]) - named_s, 0.0)
    return uneven_s


def _reduced(
    seconds: float, rest: PlacedLoss, on_causes: Sequence[PlacedLoss], on_ranks: Sequence[bool]
) -> tuple[PlacedLoss, list[PlacedLoss]]:
    """The losses reduced by `seconds`, to 0 at least: first the rest, then those on ranks."""
    taken_s = min(rest.seconds, seconds)
    rest, seconds, losses = replace(rest, seconds=rest.seconds - taken_s), seconds - taken_s, list[PlacedLoss]()
    for loss, on_rank in zip(on_causes, on_ranks, strict=True):
        taken_s = min(loss.seconds, seconds) if on_rank and loss.work is None else 0.0
        seconds -= taken_s
        losses.append(replace(loss, seconds=loss.seconds - taken_s))
    return rest, losses


def _split_planned(planned: Mapping[BillPart, float], losses: Sequence[PlacedLoss]) -> list[PlacedLoss]:
    """The losses, divided where they are planned work of the critical path: the bill has that time as such."""
    work_s = dict.fromkeys(planned, 0.0)
    for loss in losses:
        if loss.work is not None:
            work_s[loss.work] += loss.seconds
    beyond = {work: max(1 - planned[work] / seconds, 0.0) for work, seconds in work_s.items() if seconds}
    return [
        loss
        if loss.work is None
        else replace(
            loss,
            seconds=loss.seconds * beyond.get(loss.work, 1.0),
            planned_s=loss.seconds * (1 - beyond.get(loss.work, 1.0)),
        )
        for loss in losses
    ]


def _uncounted(report: Report, losses_s: Mapping[LossKind, float]) -> tuple[Claim, ...]:
    """The costs of causes whose kind of loss the verdict does not count: in a recording, it counts only the largest."""
    others = dict[tuple[BillPart, str], float]()
    for cause, kind in zip(report.findings, _kinds_of_loss(report), strict=True):
        seconds = min(cause.saved_s, cause.alone_s)
        if kind is not None and kind not in losses_s and seconds > LEAST_S:
            target = PART_OF.get(kind, BillPart.UNKNOWN), cause.kind
            others[target] = others.get(target, 0.0) + seconds
    return tuple((part, kind, seconds) for (part, kind), seconds in others.items())


def _kinds_of_loss(report: Report) -> list[LossKind | None]:
    """The kind of loss of each finding: as the verdict counts it, which of a stall seen once is not that of its kind of
    finding.
    """
    counted = {position: loss.kind for loss in report.verdict.losses for position in loss.causes}
    return [counted.get(position) or _loss_of(cause) for position, cause in enumerate(report.findings)]


def _loss_of(cause: Finding) -> LossKind | None:
    """The kind of its loss; None if it names none, or is of a plug-in that is not installed here."""
    if cause.kind == UNEXPLAINED:
        return None
    try:
        return detector_of(cause.kind).loss_at(cause.where)
    except KeyError:
        return None


def _planned_part(cause: Finding) -> BillPart | None:
    if _loss_of(cause) is None:
        return None
    detector = detector_of(cause.kind)
    if detector.planned is not None:
        return PLANNED.get(detector.planned)
    return BillPart.INPUT if detector.loss is LossKind.INPUT else None


def when_slow(report: Report, step_starts: Mapping[int, float]) -> Callable[[PlacedLoss], PlacedLoss]:
    """A function that adds to a loss of the report which steps it slows down, and when these ran.

    A loss with a `first_step` begins there. `step_starts`: as in `costs_of`.

    A fault that begins or ends within a window is told from one that lasts throughout by what each step loses.
    """
    rows = report.by_step
    if not rows:
        return lambda loss: loss
    steps = np.array([row.step for row in rows])
    took_s = np.array([row.recorded_s for row in rows])
    slow = _slow_steps(np.array([row.lost_s or 0.0 for row in rows]))
    starts = _starts(steps, step_starts)

    def timed(loss: PlacedLoss) -> PlacedLoss:
        in_it = np.flatnonzero(slow & (steps >= (steps[0] if loss.first_step is None else loss.first_step)))
        if not len(in_it):
            in_it = np.arange(len(steps))
        first, last = int(in_it[0]), int(in_it[-1])
        loss = replace(loss, first_step=int(steps[first]), last_step=int(steps[last]))
        if starts is None:
            return loss
        return replace(loss, since=float(starts[first]), until=float(starts[last] + took_s[last]))

    return timed


def _slow_steps(lost_s: Floats) -> Bools:
    """Whether each step is slow. Half of what is lost is lost in steps that lose as much as the usual slow one: a
    single long step among slow ones does not hide them.
    """
    most_first = np.sort(lost_s.clip(min=0.0))[::-1]
    total = np.cumsum(most_first)
    usual_s = most_first[np.searchsorted(total, total[-1] / 2)]
    return np.asarray(lost_s >= _SLOW_SHARE * usual_s, np.bool_)


def _starts(steps: Ints, step_starts: Mapping[int, float]) -> Floats | None:
    """When each step began, as far as known; None if unknown for all."""
    if not step_starts:
        return None
    timed = sorted(step_starts)
    return np.interp(steps, timed, [step_starts[step] for step in timed])


def shown_useful(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """What the rest of the mean step of a trusted report goes to, beyond its losses, seconds by kind.

    `others`: what causes cost whose losses the verdict does not count, because they may share their time with it.
    """
    lack = next((lack for lack in report.lacks if lack.fact is Fact.COMPUTE), None)
    if lack is not None:
        return (*others, (BillPart.UNKNOWN, lack.why, ALL))
    if report.gpu_of_ranks:
        return _computed(report, losses, others)
    if report.job.basis:
        return _generated(report, losses, others)
    # The ops are the work: all is useful but the delays between ops.
    delays_s = max(report.trust.unexplained or 0.0, 0.0) * report.step_time_s.original
    return (*others, (BillPart.UNKNOWN, "launch delays without a cause", delays_s), USEFUL)


def _computed(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """The time in which GPUs compute: of the median rank, as a straggler computes more."""
    gpus = report.gpu_of_ranks
    wasted_s = losses.get(LossKind.COMPUTE, 0.0) + sum(
        seconds for part, _, seconds in others if part is BillPart.COMPUTE
    )
    computed_s = max(median(map(_computed_s, gpus)) - wasted_s, 0.0)
    exposed_s = max(report.verdict.exposed_communication_s or 0.0, 0.0)
    if LossKind.COMMUNICATION in losses or any(part is BillPart.COMMUNICATION for part, *_ in others):
        exposed_s = 0.0
    return (
        (*USEFUL[:2], computed_s),
        *others,
        (BillPart.COMMUNICATION, "exposed-communication", exposed_s),
        (BillPart.UNKNOWN, "the profiler's own cost", _recording_s(report, gpus)),
        (BillPart.UNKNOWN, "no GPU computes, for no known loss", ALL),
    )


def _recording_s(report: Report, gpus: list[GpuInReport]) -> float:
    """A lower bound of the recording's own cost: that of the rank with the lowest."""
    steps = [gpu.unprofiled for gpu in gpus if gpu.unprofiled is not None and gpu.unprofiled.profiled_step_s > 0]
    shares = [step.overhead_s / step.profiled_step_s for step in steps]
    return max(min(shares, default=0.0), 0.0) * report.step_time_s.recorded


def _computed_s(gpu: GpuInReport) -> float:
    kernels_s = sum(kernel.seconds for kernel in gpu.kernels if kernel.of_class != KernelClass.COMMUNICATION)
    return min(kernels_s, gpu.busy_s)


def _generated(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """The decoding time of engines, from trajectories: a log has the duration of phases, not what GPUs do in them."""
    decoded_s = 0.0
    if report.job.basis == "trajectories":
        inside_s = sum(seconds for kind, seconds in losses.items() if kind in _OF_GENERATION)
        inside_s += sum(seconds for _, kind, seconds in others if kind in _OF_GENERATION)
        decoded_s = max((report.generation_s or 0.0) - inside_s, 0.0)
    return (
        *others,
        (BillPart.UNKNOWN, "in no phase", report.unaccounted_s or 0.0),
        (BillPart.USEFUL, "generation", decoded_s),
        (BillPart.UNKNOWN, "phases: the log shows no compute", ALL),
    )
