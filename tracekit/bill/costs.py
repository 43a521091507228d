"""What the mean step of a report goes to, as parts of a bill.

In: a report. Out: seconds of the mean step by part and cause: each loss of the verdict, and planned work of
the critical path beyond these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.bill.ledger import ALL, LEAST_S, BillPart, Claim
from tracekit.bill.useful import shown_useful
from tracekit.report.conclusions import Finding
from tracekit.report.report import Report
from tracekit.report.verdict import OF_POST_TRAINING, LossKind
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
_UNEXPLAINED = "unexplained"
NOT_TRUSTED: Claim = BillPart.UNKNOWN, "analysis not trusted", ALL
#: Seconds by part, cause, and the part of the planned work that the cause consists of.
_Lost = dict[tuple[BillPart, str, BillPart | None], float]


class ClaimedCosts(Struct, frozen=True):
    """Seconds of the mean step. `planned`: of data loading, checkpoints and evaluation on the critical path; `lost`: of
    the losses, beyond planned work. `rest`: what else the step goes to, in order; the last claim gets all that is left.

    `gpus`: of the job. `length_s`: seconds of all steps, None if they are as many times the mean step. `doubt`: why the
    losses are not known, None if they are.
    """

    planned: Mapping[BillPart, float]
    lost: Mapping[tuple[BillPart, str], float]
    rest: tuple[Claim, ...]
    gpus: int
    length_s: float | None = None
    doubt: str | None = None

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What a step goes to beyond planned work, in order."""
        return (*((*to, seconds) for to, seconds in self.lost.items()), *self.rest)


def costs_of(report: Report) -> ClaimedCosts:
    """The costs that a report shows."""
    planned = dict.fromkeys(PLANNED.values(), 0.0)
    for op in report.critical_kinds or report.critical_path:
        if op.kind in PLANNED:
            planned[PLANNED[OpKind(op.kind)]] += max(op.recorded_s, 0.0)
    length_s, gpus = report.rl.length_s if report.rl else None, report.job.gpus
    if not report.trust.trustworthy:
        return ClaimedCosts(planned, {}, (NOT_TRUSTED,), gpus, length_s, next(iter(report.trust.reasons), None))
    losses_s = _losses_s(report)
    lost = dict[tuple[BillPart, str], float]()
    for (part, cause, _), seconds in _beyond(planned, _divided(report, losses_s, planned)).items():
        lost[part, cause] = lost.get((part, cause), 0.0) + seconds
    lost[BillPart.UNKNOWN, "losses that hide each other"] = report.verdict.lost_s - sum(losses_s.values())
    rest = shown_useful(report, losses_s, _others(report, losses_s))
    return ClaimedCosts(
        planned, {to: seconds for to, seconds in lost.items() if seconds > LEAST_S}, rest, gpus, length_s
    )


def _losses_s(report: Report) -> dict[LossKind, float]:
    """Seconds of each kind of loss, together no more than all cost together: those that lead come first."""
    left_s, losses_s = report.verdict.lost_s, dict[LossKind, float]()
    for loss in report.verdict.losses:
        losses_s[loss.kind] = min(max(loss.lost_s, 0.0), left_s)
        left_s -= losses_s[loss.kind]
    return losses_s


def _divided(report: Report, losses_s: Mapping[LossKind, float], planned: Mapping[BillPart, float]) -> _Lost:
    """The losses by their causes; those of a loss that hide each other share what they cost together."""
    lost: _Lost = {}
    for kind, lost_s in losses_s.items():
        part = PART_OF.get(kind, BillPart.UNKNOWN)
        of_kind = [cause for cause in report.findings if _loss_of(cause) is kind]
        named_s = sum(_cost_s(cause) for cause in of_kind)
        scale = min(1.0, lost_s / named_s) if named_s else 0.0
        for cause in of_kind:
            work = _planned_part(cause)
            to = BillPart.CHECKPOINTS if (kind, work) == (LossKind.STALLS, BillPart.CHECKPOINTS) else part
            _add(lost, (to, cause.kind, work), _cost_s(cause) * scale)
        rest = part, _UNEXPLAINED if kind is LossKind.STRAGGLER else str(kind), None
        _add(lost, rest, max(lost_s - named_s, 0.0))
        if kind is LossKind.STRAGGLER:  # a finding on a rank prices all that the rank does
            on_ranks = [(part, cause.kind, None) for cause in of_kind if cause.where.ranks]
            _take(lost, (rest, *on_ranks), sum(_uneven_work_s(report, lost, planned).values()))
    return lost


def _uneven_work_s(report: Report, lost: _Lost, planned: Mapping[BillPart, float]) -> dict[BillPart, float]:
    """Seconds of planned work that S counts as stragglers, because only some ranks do it, by part; without what
    findings name, and work that the verdict leaves out of S.
    """
    left_out = {_planned_part(cause) for cause in report.findings if _loss_of(cause) is not LossKind.STRAGGLER}
    uneven_s = dict[BillPart, float]()
    for op in report.by_kind:
        if op.kind in PLANNED and (work := PLANNED[OpKind(op.kind)]) not in left_out:
            of_s = ((op.slowdown or 1.0) - 1) * report.step_time_s.ideal
            named_s = sum(
                seconds for (part, _, of), seconds in lost.items() if (part, of) == (BillPart.STRAGGLERS, work)
            )
            uneven_s[work] = max(min(of_s, planned[work]) - named_s, 0.0)
    return uneven_s


def _take(lost: _Lost, of: Iterable[tuple[BillPart, str, BillPart | None]], seconds: float) -> None:
    """Take seconds from losses, as far as they go."""
    for to in of:
        taken_s = min(lost.get(to, 0.0), seconds)
        _add(lost, to, -taken_s)
        seconds -= taken_s


def _beyond(planned: Mapping[BillPart, float], lost: _Lost) -> _Lost:
    """The losses without the planned work of the critical path, which is billed as such: it is the same time."""
    of_work = dict.fromkeys(planned, 0.0)
    for (_, _, work), seconds in lost.items():
        if work is not None:
            of_work[work] += seconds
    share = {work: max(1 - planned[work] / seconds, 0.0) for work, seconds in of_work.items() if seconds}
    return {to: seconds * (1.0 if to[2] is None else share.get(to[2], 1.0)) for to, seconds in lost.items()}


def _add(lost: _Lost, to: tuple[BillPart, str, BillPart | None], seconds: float) -> None:
    lost[to] = lost.get(to, 0.0) + seconds


def _others(report: Report, losses_s: Mapping[LossKind, float]) -> tuple[Claim, ...]:
    """What causes of a kind cost beside others that the verdict counts no loss of: in a recording, only the largest."""
    others = dict[tuple[BillPart, str], float]()
    for cause in report.findings:
        kind = _loss_of(cause)
        seconds = min(cause.saved_s, cause.alone_s)
        if kind is not None and kind not in losses_s and seconds > LEAST_S:
            to = PART_OF.get(kind, BillPart.UNKNOWN), cause.kind
            others[to] = others.get(to, 0.0) + seconds
    return tuple((part, kind, seconds) for (part, kind), seconds in others.items())


def _cost_s(cause: Finding) -> float:
    return max(cause.saved_s, cause.alone_s, 0.0)


def _loss_of(cause: Finding) -> LossKind | None:
    """The kind of its loss; None if it names none, or is of a plug-in that is not installed here."""
    if cause.kind == _UNEXPLAINED:
        return None
    try:
        return detector_of(cause.kind).loss_at(cause.where)
    except KeyError:
        return None


def _planned_part(cause: Finding) -> BillPart | None:
    """The part of the planned work that a cause consists of."""
    if _loss_of(cause) is None:
        return None
    detector = detector_of(cause.kind)
    if detector.planned is not None:
        return PLANNED.get(detector.planned)
    return BillPart.INPUT if detector.loss is LossKind.INPUT else None
