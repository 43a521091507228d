"""The diagnosis of a job of any shape: an op trace, or a recording of GPUs.

In: `OpEvidence`. Out: a `Diagnosis`, as for a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tracekit.analysis.attribution.attribution import (
    LARGEST_DISCREPANCY,
    SMALLEST_HEADLINE_SHARE,
    SMALLEST_SLOWDOWN,
    Trust,
)
from tracekit.analysis.detectors.detector import Detector
from tracekit.analysis.detectors.registry import detector_of
from tracekit.analysis.detectors.uneven_experts import doubts_of
from tracekit.analysis.diagnosis.answer import answer_of
from tracekit.analysis.diagnosis.diagnose import with_plug_ins
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.price import priced
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.gpu.late_rank import unexplained_waits
from tracekit.analysis.gpu.part import Part
from tracekit.base.text import main_clause, ranks_text, seconds
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.finding import Finding
from tracekit.report.fix import Fix
from tracekit.report.verdict import Loss, LossKind, Verdict
from tracekit.trace.facts import Fact

#: The number of rendezvous with missing members to name.
_MOST_GAPS = 3


def diagnose_ops(evidence: OpEvidence) -> Diagnosis:
    """Return what the job loses, why, and what each fix would save."""
    return with_plug_ins(lambda detectors: _diagnosed(evidence, detectors))


def _diagnosed(evidence: OpEvidence, detectors: Sequence[Detector]) -> Diagnosis:
    causes = causes_of(evidence, detectors)
    doubts = (*_doubts(evidence), *doubts_of(causes))
    of_transfers = _of_transfers(evidence)
    fixes = priced(evidence, causes, withheld=doubts[0] if doubts else None)
    if of_transfers is not None:
        first = next((cause for cause in causes if cause.change is not None), None)
        if not evidence.alone or first is None or _loss_of(first) is LossKind.COMMUNICATION:
            doubts = (*doubts, of_transfers)
        fixes = tuple(_without_promise(evidence, fix, of_transfers) for fix in fixes)
    trust = Trust(
        replay_error=evidence.replay_error,
        discrepancy=evidence.discrepancy,
        unexplained=evidence.discrepancy,
        trustworthy=not doubts,
        reasons=doubts,
    )
    verdict = verdict_of_ops(evidence, causes)
    return Diagnosis(
        trust=trust,
        answer=answer_of(evidence, verdict, causes, fixes, (), trust),
        verdict=verdict,
        causes=causes,
        fixes=fixes,
        lacks=evidence.lacks,
    )


def _without_promise(evidence: OpEvidence, fix: Fix, why: str) -> Fix:
    """The fix without a saving, if transfers are in doubt: of a rank alone, only what is about them is."""
    if evidence.alone and fix.cause is not None and detector_of(fix.cause).loss is not LossKind.COMMUNICATION:
        return fix
    return replace(fix, withheld=fix.withheld or why)


def verdict_of_ops(evidence: OpEvidence, causes: Sequence[Finding]) -> Verdict:
    """Return the verdict on a job with these causes.

    One kind of loss counts, the costliest: the time in which all GPUs are idle, or all transfer, may be the same time.
    """
    whole_s, losses_s = evidence.in_production_s or 1.0, dict(evidence.lost_in_production_s)
    costly = [cause for cause in causes if cause.change is not None and cause.once is None]
    once = [cause for cause in causes if cause.once is not None and cause.saved_s >= SMALLEST_HEADLINE_SHARE * whole_s]
    for cause in costly:
        losses_s[_loss_of(cause)] = max(losses_s.get(_loss_of(cause), 0.0), evidence.worth_s(cause))
    for cause in once:  # the rest of its kind is what returns
        losses_s[_loss_of(cause)] = max(losses_s.get(_loss_of(cause), 0.0) - cause.saved_s, 0.0)
    kind = loss = max(losses_s, key=lambda one: losses_s[one])
    if evidence.alone and costly and evidence.worth_s(costly[0]) >= SMALLEST_HEADLINE_SHARE * whole_s:
        kind = loss = _loss_of(costly[0])  # of one rank, what saves most leads
    if not evidence.shows(Fact.COMPUTE):
        kind, loss, losses_s = LossKind.CONTRADICTION, LossKind.CONTRADICTION, {}
    elif losses_s[loss] < SMALLEST_HEADLINE_SHARE * whole_s:
        kind = loss = LossKind.BALANCED
        if costly or evidence.culprit is not None:
            kind, loss = LossKind.MINOR, _loss_of(costly[0]) if costly else LossKind.STRAGGLER
    leading = tuple(cause for cause in causes if (cause.change or cause.spent) and _loss_of(cause) is loss)
    if once and (not leading or kind in {LossKind.BALANCED, LossKind.MINOR}):  # it is most of what was lost
        kind = loss = LossKind.STALLS
        leading, losses_s[loss] = tuple(once), once[0].saved_s
    lost_s = losses_s.get(loss, 0.0)
    if not leading and evidence.alone and kind not in {LossKind.BALANCED, LossKind.CONTRADICTION}:
        kind = loss = LossKind.BALANCED  # idle in pieces too small to name
    if evidence.kept is not None and leading:
        named_s = _cost_s(evidence, leading[0])
        lost_s = named_s if named_s >= SMALLEST_HEADLINE_SHARE * whole_s else lost_s
    label = detector_of(leading[0].kind).label if leading and kind is LossKind.STRAGGLER else None
    return Verdict(
        kind=kind,
        label=label or str(kind),
        headline_s=lost_s,
        lost_s=lost_s,
        share=lost_s / whole_s,
        step_lost_s=np.full(len(evidence.steps), lost_s),
        lost_gpu_hours=lost_s * len(evidence.steps) * evidence.gpus / 3600,
        lost_gpu_hours_per_day=lost_s / whole_s * evidence.gpus * 24 * (leading[0].returning_share if leading else 1.0),
        sentence=_sentence(evidence, kind, leading, lost_s),
        confidence=leading[0].confidence if leading else None,
        losses=(Loss(loss, lost_s, leading, lost_s if leading else 0.0),) if lost_s > 0 else (),
        parts=evidence.parts,
        of_mean_ops=loss is LossKind.STRAGGLER and not leading,
    )


def _loss_of(cause: Finding) -> LossKind:
    return detector_of(cause.kind).loss_at(cause.where)


def _sentence(evidence: OpEvidence, kind: LossKind, leading: Sequence[Finding], lost_s: float) -> str:
    """What costs most, and what else nobody can explain, without the kind of loss."""
    if kind is LossKind.CONTRADICTION and evidence.kept is not None:
        return f"{evidence.kept.lost}: what costs time cannot be told"
    whole, step = "each step" if evidence.kept is None else "the recording", evidence.unprofiled_step
    if step is not None:
        whole = "each step without the profiler"
    rest = evidence.parts.words(evidence.recorded_s, whole)
    if kind is LossKind.STRAGGLER and not leading:
        lost = f"stragglers cost {lost_s / evidence.recorded_s:.0%} of {whole}"
        return rest if rest and evidence.parts.to_tell else f"{lost}, which the noise of its ops explains"
    said = [_costs_most(evidence, kind, leading, whole), rest]
    if step is not None:
        profiled = seconds(float(np.median(evidence.profiled_steps_s)))
        said.insert(0, f"without the profiler, a step takes {seconds(step.value)} ({profiled} as recorded)")
    return "; ".join(part for part in said if part)


def _costs_most(evidence: OpEvidence, kind: LossKind, leading: Sequence[Finding], whole: str) -> str:
    """What costs most, if that is known."""
    if kind is LossKind.BALANCED:
        nobody = "no rank stands out, and " if len(evidence.ranks) > 1 else ""
        return f"{nobody}nothing costs {SMALLEST_HEADLINE_SHARE:.0%} of {whole}"
    effect, place = main_clause(leading[0].effect), evidence.names.place(leading[0].where)
    if leading[0].once is not None:
        effect = f"{leading[0].once.words}: {effect}"
    if place is None:
        return effect
    share = _cost_s(evidence, leading[0]) / evidence.in_production_s
    return f"{place.words} {place.verb('costs', 'cost')} {share:.0%} of {whole}: {effect}"


def _cost_s(evidence: OpEvidence, cause: Finding) -> float:
    """What a finding costs: of the rank that stands out, all that it does; of what has no price, the time it takes."""
    if cause.change is None and cause.spent is not None:
        return cause.spent.seconds
    culprit = evidence.culprit
    of_culprit = culprit is not None and cause.where.ranks == (culprit.rank,)
    return culprit.saved_s if culprit and of_culprit and cause.saves_step_s is None else evidence.worth_s(cause)


def _doubts(evidence: OpEvidence) -> Iterator[str]:
    """Yield why the numbers cannot be trusted."""
    yield from _of_replay(evidence)
    found, waits = evidence.kept, evidence.waits
    if found is None or waits is None:
        return
    yield from found.doubts
    if found.lost:
        yield f"{found.lost}, so its idle time is not known"
    if evidence.uneven_experts or evidence.unknown_loads:  # others wait for ranks with more tokens
        return
    yield from _of_stacks(evidence, found.without_stacks)
    culprit = evidence.culprit
    named = None if culprit is None else culprit.rank
    yield from unexplained_waits(found.late, waits, named, evidence.recorded_s)


def _of_stacks(evidence: OpEvidence, without_stacks: Sequence[int]) -> Iterator[str]:
    """Yield that a host may be behind because it alone recorded stacks."""
    culprit = evidence.culprit
    if culprit is None or not without_stacks or culprit.rank in without_stacks:
        return
    if culprit.behind and culprit.behind[0].part is Part.HOST:
        yield (
            f"rank {culprit.rank}, whose host is behind, recorded stacks, {ranks_text(without_stacks)} did not:"
            " recording stacks alone slows a host; record all ranks with the same options"
        )


def _of_transfers(evidence: OpEvidence) -> str | None:
    """Why it is not known what transfers cost; None if it is."""
    found = evidence.kept
    if found is None or evidence.waits is None:
        return None
    unseen = [rank for rank in found.left_out if rank not in found.late.accounted]
    if evidence.leads(LossKind.COMMUNICATION):
        recorded = {*evidence.ranks, *found.left_out}
        unseen += [rank for rank in range(found.world_size or 0) if rank not in recorded]
    exposed = evidence.exposed_communication_s / (evidence.recorded_s or 1.0)
    if not unseen or exposed < SMALLEST_HEADLINE_SHARE:
        return None
    return (
        f"transfers cost {exposed:.0%} of the recording, and part of that may be waiting for {ranks_text(unseen)}, of"
        " which nothing is known"
    )


def _of_replay(evidence: OpEvidence) -> Iterator[str]:
    """Yield what the replay does not explain."""
    slowdown, clamped, any_doubt = evidence.slowdown, evidence.clamped, False
    compares = evidence.shows(Fact.RANKS)  # as S does
    if compares and np.isnan(slowdown):
        any_doubt = True
        yield "the job without stragglers takes no time, so S is not known"
    elif compares and slowdown < SMALLEST_SLOWDOWN:
        any_doubt = True
        yield (
            f"S is {slowdown:.2f}: the job without stragglers is slower than the job itself, so these ideal durations"
            " do not fit it"
        )
    if not evidence.replay_error <= LARGEST_DISCREPANCY:
        any_doubt = True
        yield f"the replay with launch delays misses the recording by {evidence.replay_error:.1%}"
    if not abs(evidence.discrepancy) <= LARGEST_DISCREPANCY:
        any_doubt = True
        yield (
            f"launch delays add {evidence.discrepancy:.1%} to the step: time that the stated dependencies leave"
            " unexplained"
        )
    gaps = evidence.graph.ops.gaps
    if gaps:
        any_doubt = True
        named = "; ".join(
            f"rendezvous {gap.rendezvous} of {gap.group} lacks rank {', '.join(map(str, gap.missing[:8]))}"
            + (" ..." if len(gap.missing) > 8 else "")
            for gap in gaps[:_MOST_GAPS]
        )
        more = f" and {len(gaps) - _MOST_GAPS} more" if len(gaps) > _MOST_GAPS else ""
        yield f"members were not recorded, so that nobody waits for them in the replay: {named}{more}"
    if any_doubt and clamped:
        yield f"{clamped} transfers or launch delays lie more than 10 ms below zero (taken as 0)"
