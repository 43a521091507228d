"""What each fix would save: every fix is a change to the job's costs, replayed.

In: a `Trace`, its `JobReplay`, `Attribution` and `Cause`s. Out: `Fix`es, best first. Savings smaller than their error
are not reported, and none are if unexplained launch delays make up more than 5 % of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY, Attribution
from tracekit.analysis.causes.find import acting
from tracekit.analysis.causes.model import Cause, CauseKind, Where
from tracekit.analysis.causes.naming import Names
from tracekit.analysis.causes.rules_pauses import pauses_in_forwards
from tracekit.analysis.evidence.changes import Change, Scale, step_times_with
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import microbatch_cost
from tracekit.analysis.fixes.balance import best_deal_of_step, deal_job, dealt_cost
from tracekit.analysis.fixes.general import general_plans
from tracekit.analysis.fixes.layers import layer_plans
from tracekit.analysis.fixes.model import Fix, FixKind
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.fixes.workers import worker_plans
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.text import seconds
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind

#: Leave out fixes that save less than this share of the step.
SMALLEST_SAVING_SHARE = 0.01
#: A combination has at most this many fixes.
LONGEST_COMBINATION = 4
#: Count the saving's scatter over the steps with this many standard errors.
CONFIDENCE_ERRORS = 1.96
#: Intervals, in steps, at which to collect garbage; the first one that costs less than this share of the step is
#: proposed.
GC_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
LARGEST_GC_SHARE = 0.005

_DIRECT = {
    CauseKind.SLOW_STEPS: (FixKind.STEADY_STEPS, "Keep all steps as fast as the usual one"),
    CauseKind.SLOW_LINK: (FixKind.REPAIR_LINK, "Repair the link, so that its transfers are as fast as the others'"),
    CauseKind.SLOW_NIC: (
        FixKind.REPAIR_NIC,
        "Repair the network card, so that all that passes it is as fast as elsewhere",
    ),
    CauseKind.CONGESTION: (FixKind.CALM_NETWORK, "Remove the very long transfers"),
    CauseKind.PROCESS_PAUSES: (FixKind.STOP_PAUSES, "Remove the pauses of the process"),
    CauseKind.SLOW_OPTIMIZER: (FixKind.REPLACE_WORKERS, "Make the optimizer as fast as those of its peers"),
    CauseKind.SLOW_RANK_OF_WORKER: (FixKind.REPLACE_WORKERS, "Make the rank as fast as the other ranks of its worker"),
    CauseKind.UNRECORDED_WORKER_LATE: (FixKind.REPLACE_WORKERS, "Get the worker that was not recorded on time"),
    CauseKind.CHECKPOINT_STALLS: (FixKind.ASYNC_CHECKPOINT, "Write checkpoints asynchronously"),
    CauseKind.EVALUATION: (FixKind.EVALUATE_ELSEWHERE, "Evaluate, or generate rollouts, in a job of its own"),
    CauseKind.LATE_DATA: (FixKind.PREFETCH, "Prefetch data, so that no forward waits for it"),
    CauseKind.BUSY_CORES: (FixKind.FREE_CORES, "Give each training thread a core of its own"),
    CauseKind.SLOW_HOST_CODE: (FixKind.SPEED_UP_HOST_CODE, "Make the host code as fast as that of its peers"),
    CauseKind.HOST_BOUND: (FixKind.HIDE_LAUNCHES, "Remove launch delays and host work between ops"),
}
#: What the prices of these fixes assume, if the title does not say it.
ASSUMED = {
    FixKind.CALM_NETWORK: "all very long transfers go",
    FixKind.HIDE_LAUNCHES: "all launch delays go",
}
#: Causes that balancing sequences over DP ranks addresses.
_UNEVEN_DATA = frozenset({CauseKind.SEQUENCE_LENGTH_IMBALANCE, CauseKind.DATA_SKEW})
#: Why a fix of a cause that hides behind another one has no price of its own.
HIDDEN = "saves nothing until the other causes are gone, see the combination"
#: ... and of a cause that hides behind none.
IN_VAIN = "it gives back next to nothing here"
#: Fixes that work around a cause.
_WAYS_AROUND = frozenset({FixKind.SHIFT_WORK})
#: Sets of fixes that exclude each other: a combination contains at most one of each set.
_EXCLUSIVE = ({FixKind.REPLACE_WORKERS, FixKind.DRAIN_HOST, FixKind.SHIFT_WORK},)


def price_fixes(
    trace: Trace,
    replay: JobReplay,
    attribution: Attribution,
    causes: Sequence[Cause],
    *,
    layers: tuple[int, ...] | None = None,
) -> tuple[Fix, ...]:
    """The fixes that would save time: those for a cause, then what any job can try, each by what it saves; last the
    combination.

    `layers`: transformer layers per stage; by default those of the trace's metadata. If neither is known, fixes give
    the amount of work to move and no split. Raises SelectionError if their number differs from that of the stages.
    """
    return fixes_of(Evidence.of(trace, replay, attribution), causes, layers=layers)


def fixes_of(evidence: Evidence, causes: Sequence[Cause], *, layers: tuple[int, ...] | None = None) -> tuple[Fix, ...]:
    """As `price_fixes`, from evidence already gathered."""
    pricer = _Pricer(evidence, _withheld(evidence, causes))
    plans = [
        *_cause_plans(evidence, causes),
        *worker_plans(evidence, causes),
        *layer_plans(evidence, causes, layers),
        *general_plans(evidence),
    ]
    fixes = [pricer.price(plan) for plan in plans]
    least_s = SMALLEST_SAVING_SHARE * evidence.attribution.recorded_s
    paying = [fix for fix in fixes if fix.saved_s >= least_s]
    # Causes hide behind each other: a fix of one alone may save nothing, but all of them together a lot.
    removing = [fix for fix in fixes if _removes_a_cause(fix)]
    why = HIDDEN if len({(fix.cause, fix.where) for fix in removing}) > 1 else IN_VAIN
    hidden = [replace(fix, withheld=why) for fix in removing if fix.saved_s < least_s]
    paying.sort(key=lambda fix: -fix.saved_s)
    combination = _combination(
        pricer, [fix for fix in paying if fix.cause is not None and not fix.bound and fix.change is not None], hidden
    )
    paying.sort(key=lambda fix: (fix.cause is None, fix.withheld is not None))
    return (*paying, *hidden, *combination)


def _removes_a_cause(fix: Fix) -> bool:
    """True for a fix that makes a named cause go away rather than work around it."""
    return fix.cause is not None and fix.change is not None and not fix.bound and fix.kind not in _WAYS_AROUND


def _withheld(evidence: Evidence, causes: Sequence[Cause]) -> str | None:
    """Why no saving can be reported; launch delays that a cause explains do not count against the replay."""
    left = evidence.delay_share_without([cause.change for cause in causes if cause.change is not None])
    if left > LARGEST_DISCREPANCY:
        return (
            f"launch delays that no cause explains make up {left:.1%} of the step (at most"
            f" {LARGEST_DISCREPANCY:.0%}): the replay explains too little"
        )
    slower = -evidence.attribution.discrepancy
    if slower > LARGEST_DISCREPANCY:
        return f"the replay is {slower:.1%} slower than the recording: ops overlapped that the graph orders"
    return None


class _Pricer(Struct, frozen=True, eq=False):
    """Turns plans into fixes."""

    evidence: Evidence
    withheld: str | None

    def price(self, plan: Plan) -> Fix:
        """Replay the plan, unless its step times are known."""
        changed = plan.step_times
        if changed is None:
            assert plan.change is not None, "a plan has a change or step times"
            changed = step_times_with(self.evidence.replay, (plan.change,))
        changed = changed + plan.extra_s
        attribution = self.evidence.attribution
        saving = self.evidence.unchanged - changed
        saved_s = float(saving.mean())
        scatter = float(saving.std(ddof=1)) / np.sqrt(len(saving)) if len(saving) > 1 else 0.0
        error_s = attribution.trust.replay_error * attribution.recorded_s + CONFIDENCE_ERRORS * scatter
        reason, bound, details = self.withheld, plan.bound, plan.details
        if reason is None and saved_s < error_s:
            seen = None if plan.cause is None else self._seen(plan.cause, saving)
            if seen is None:
                reason = f"the saving of {seconds(saved_s)} is below its error of {seconds(error_s)}"
            else:
                bound, details = True, {"assumes": f"as often as in this trace ({seen} steps)", **details}
        return Fix(
            kind=plan.kind,
            title=plan.title,
            where=plan.where,
            new_step_s=self.evidence.recorded_s - saved_s,
            saved_s=saved_s,
            saved_gpu_hours_per_day=saved_s / self.evidence.recorded_s * attribution.world_size * 24,
            error_s=error_s,
            bound=bound,
            withheld=reason,
            details=details,
            change=plan.change,
            cause=None if plan.cause is None else plan.cause.kind,
            confidence=None if plan.cause is None else plan.cause.confidence,
        )

    def _seen(self, cause: Cause, saving: Floats) -> int | None:
        """The number of steps in which a cause acts, if too small to estimate its frequency; None if its size is also
        unknown.

        Its cost in those steps, and the total loss in this trace, are known.
        """
        acts = acting(self.evidence, cause)
        if acts is None or acts.sum() < 2:
            return None
        each = saving[acts]
        error_s = float(each.std(ddof=1)) / np.sqrt(len(each)) * CONFIDENCE_ERRORS
        least_s = error_s + self.evidence.attribution.trust.replay_error * self.evidence.attribution.recorded_s
        return int(acts.sum()) if float(each.mean()) > least_s else None


def _cause_plans(evidence: Evidence, causes: Sequence[Cause]) -> Iterator[Plan]:
    """The fix of each cause that simply goes away, and those for sequences and garbage collection."""
    for cause in causes:
        if cause.change is None:
            continue
        if cause.kind in _DIRECT:
            kind, title = _DIRECT[cause.kind]
            details = {"assumes": ASSUMED[kind]} if kind in ASSUMED else {}
            yield Plan(
                kind,
                title,
                cause.where,
                cause.change,
                step_times=cause.without_s,
                bound=cause.bound,
                details=details,
                cause=cause,
            )
        elif cause.kind is CauseKind.PYTHON_GC:
            yield _planned_gc(evidence, cause)
    uneven = [cause for cause in causes if cause.kind in _UNEVEN_DATA]
    if uneven:
        yield _balanced(evidence, uneven)


def _planned_gc(evidence: Evidence, cause: Cause) -> Plan:
    """No pauses in forwards; all ranks pause together once every N steps, for the length of an average pause."""
    pause_s = float(_pauses(evidence).mean())
    step_s = evidence.attribution.recorded_s
    every = next((count for count in GC_INTERVALS if pause_s / count <= LARGEST_GC_SHARE * step_s), GC_INTERVALS[-1])
    without = evidence.unchanged if cause.without_s is None else cause.without_s
    sweep = [
        {"every_steps": count, "new_step_s": step_s - evidence.unchanged_s + float(without.mean()) + pause_s / count}
        for count in GC_INTERVALS
    ]
    title = (
        f"Collect garbage on all ranks together every {every} steps (gc.disable(), then gc.collect() in those steps)"
    )
    place = Names.of(evidence).place(cause.where)
    if place is not None and cause.every_step:
        title = (
            f"Take out what collects garbage in every step on {place.words}"
            " (gc.collect() in the loop or a callback: py-spy dump); if it is Python itself, collect on all ranks"
            f" together every {every} steps"
        )
    return Plan(
        FixKind.PLANNED_GC,
        title,
        Where(),
        cause.change,
        step_times=cause.without_s,
        extra_s=pause_s / every,
        details={
            "pause_s": pause_s,
            "every_steps": every,
            "sweep": sweep,
            "assumes": "collections as long as now",
        },
        cause=cause,
    )


def _pauses(evidence: Evidence) -> Floats:
    """Seconds of each garbage collection, recorded as an op or found as a pause of a forward."""
    between = np.empty(0) if evidence.collections.empty else evidence.collections.gather(evidence.replay.durations.cost)
    inside = pauses_in_forwards(evidence)
    within = np.empty(0) if inside is None else inside
    every: Floats = np.concatenate([between[between > 0], within[within > 0]])
    lockstep = evidence.lockstep
    if not len(every) and lockstep is not None and lockstep.work_s is not None:  # only other ranks of workers collect
        of_ranks = lockstep.work_of((OpKind.GC,))
        every = of_ranks[of_ranks > 0]
    return every


def _balanced(evidence: Evidence, causes: Sequence[Cause]) -> Plan:
    """Microbatches dealt anew over the DP ranks of each step, for those of `causes` that make them uneven."""
    profile = evidence.profile
    assert profile is not None
    cost = microbatch_cost(evidence)
    load, dealt = cost.sum(axis=0), dealt_cost(cost, deal_job(cost))
    best = dealt_cost(cost, deal_job(cost, best_deal_of_step))
    elastic = profile.elasticity[:, :, :, None, None, None]
    change = Scale(evidence.table, (1 + elastic * (dealt - 1)) / safe(1 + elastic * (cost - 1)))
    cause = max(causes, key=lambda one: one.saved_s)
    gone = [one.change for one in causes if one.change is not None]
    bound_s = float(step_times_with(evidence.replay, gone).mean())
    offset = evidence.attribution.recorded_s - evidence.unchanged_s
    return Plan(
        FixKind.BALANCE_SEQUENCES,
        "Deal microbatches over DP ranks by cost in the sampler: by the sum of squared sequence lengths, not by count",
        Where(),
        change,
        details={
            "busiest_over_mean_now": float((load.max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_then": float((dealt.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_best": float((best.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "bound_step_s": bound_s + offset,
            "assumes": "same cost on any DP rank; the longest first, each to the DP rank with the least work",
        },
        cause=cause,
    )


def _combination(pricer: _Pricer, fixes: Sequence[Fix], hidden: Sequence[Fix]) -> Iterator[Fix]:
    """The best of: the fix that helps most, or those of all named causes; then whatever else helps most on top of that.

    `hidden`: fixes of causes that save nothing alone.
    """
    causes_gone = _compatible([fix for fix in (*fixes, *hidden) if _removes_a_cause(fix)])
    starts = [start for start in (list(fixes[:1]), causes_gone) if start]
    grown = [_grown(pricer, start, fixes) for start in starts]
    if not grown:
        return
    taken, best_times = min(grown, key=lambda one: (round(float(one[1].mean()), 9), len(one[0])))
    sequence, done_s = [], 0.0
    for count, fix in enumerate(taken, 1):
        saved_s = pricer.evidence.unchanged_s - float(_times(pricer.evidence, taken[:count]).mean())
        sequence.append(_step_of(fix, saved_s - done_s))
        done_s = saved_s
    if len(taken) > 1:
        plan = Plan(
            FixKind.COMBINATION,
            " + ".join(fix.title for fix in taken),
            Where(),
            None,
            step_times=best_times,
            details={
                "sequence": sequence,
                "sum_of_single_savings_s": sum(fix.saved_s for fix in taken),
                "assumes": _all_assumed(taken),
            },
        )
        # As certain as its least certain part.
        sure = [fix.confidence for fix in taken if fix.confidence is not None]
        yield replace(pricer.price(plan), confidence=min(sure, default=None))


def _grown(pricer: _Pricer, start: list[Fix], fixes: Sequence[Fix]) -> tuple[list[Fix], Floats]:
    """`start` plus the fixes that help most on top of it, one by one, and the resulting step times, [steps]."""
    taken, times = list(start), _times(pricer.evidence, start)
    while len(taken) < max(LONGEST_COMBINATION, len(start)):
        options = [(fix, _times(pricer.evidence, [*taken, fix])) for fix in fixes if _allowed(fix, taken)]
        if not options:
            break
        fix, then = min(options, key=lambda option: float(option[1].mean()))
        if float(times.mean() - then.mean()) < SMALLEST_SAVING_SHARE * pricer.evidence.unchanged_s / 2:
            break
        taken.append(fix)
        times = then
    return taken, times


def _compatible(fixes: Sequence[Fix]) -> list[Fix]:
    """The fixes without those that exclude an earlier one."""
    taken: list[Fix] = []
    for fix in fixes:
        kinds = {other.kind for other in taken}
        if not any(fix.kind in group and (kinds & group) - {fix.kind} for group in _EXCLUSIVE):
            taken.append(fix)
    return taken


def _all_assumed(fixes: Sequence[Fix]) -> str | None:
    """The assumptions of all these fixes, each once."""
    assumed = dict.fromkeys(fix.assumes for fix in fixes if fix.assumes is not None)
    return "; ".join(assumed) or None


def _times(evidence: Evidence, fixes: Sequence[Fix]) -> Floats:
    changes: list[Change] = [fix.change for fix in fixes if fix.change is not None]
    planned = [fix.details for fix in fixes if fix.kind is FixKind.PLANNED_GC]
    extra_s = sum(float(details["pause_s"]) / int(details["every_steps"]) for details in planned)
    return np.asarray(step_times_with(evidence.replay, changes) + extra_s)


def _allowed(fix: Fix, taken: Sequence[Fix]) -> bool:
    kinds = {other.kind for other in taken}
    return fix.kind not in kinds and not any(fix.kind in group and kinds & group for group in _EXCLUSIVE)


def _step_of(fix: Fix, gain_s: float) -> dict[str, Any]:
    return {"kind": str(fix.kind), "title": fix.title, "alone_saved_s": fix.saved_s, "marginal_saved_s": gain_s}
