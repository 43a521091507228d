"""What each fix would save: every fix is a change to the job's costs, replayed.

In: the assessment of a job, and its `Cause`s. Out: `Fix`es, best first. Savings smaller than their error
are not reported, and none are if unexplained launch delays make up more than 5 % of the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.detectors.detector import FINDINGS, detector_of, guarded
from tracekit.analysis.diagnosis.find import DIAGNOSIS, acting
from tracekit.analysis.evidence.subject import Cause, Plan, Subject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.errors import SelectionError
from tracekit.base.text import did_you_mean, hidden, seconds
from tracekit.report.conclusions import Fix
from tracekit.report.finding import Place

if TYPE_CHECKING:
    from tracekit.analysis.diagnosis.diagnosis import Assessment

#: A combination has at most this many fixes.
LONGEST_COMBINATION = 4
#: Why a fix of a cause that hides behind another one has no price of its own.
HIDDEN = "saves nothing until the other causes are gone, see the combination"
#: ... and of a cause that hides behind none.
IN_VAIN = "it gives back next to nothing here"
#: The fix that does several others together.
COMBINATION = "combination"


class PricedFix(Fix, frozen=True, kw_only=True):
    """One fix, with the plan that was priced; its figures are there, even if they are `withheld`."""

    new_step_s: float
    saved_s: float
    saved_gpu_hours_per_day: float | None
    plan: Plan

    @property
    def fix(self) -> Fix:
        """What a report has of it: no figures if they are withheld."""
        fix = Fix(**{name: getattr(self, name) for name in Fix.__struct_fields__})
        if self.withheld is None:
            return fix
        return replace(fix, new_step_s=None, saved_s=None, saved_gpu_hours_per_day=None)

    @property
    def share(self) -> float:
        """What it saves, as a share of the step."""
        now_s = self.unprofiled_step_s if self.saves_step_s is not None else self.new_step_s + self.saved_s
        return self.worth_s / (now_s or float("inf"))


def fixes_of(assessed: Assessment, causes: Sequence[Cause]) -> tuple[PricedFix, ...]:
    """The fixes that would save time: those for a cause, then what any job can try, each by what it saves; last the
    combination.
    """
    job = assessed.job
    pricer = _Pricer(job, assessed.withheld(causes))
    fixes = []
    for cause in causes:
        with guarded(cause.kind):
            # nothing shows that a stall of one or two steps returns
            plans = detector_of(cause.kind).fixes(job, cause) if cause.change and not cause.one_off else ()
            fixes += [pricer.price(plan) for plan in plans]
    fixes += [pricer.price(plan) for plan in assessed.plans(causes)]
    paying = [fix for fix in fixes if _pays(job, fix)]
    # Causes hide behind each other: a fix of one alone may save nothing, but all of them together a lot.
    removing = [fix for fix in fixes if _removes_a_cause(fix)]
    why = HIDDEN if len({(fix.cause, fix.where) for fix in removing}) > 1 else IN_VAIN
    hidden = [replace(fix, withheld=why) for fix in removing if not _pays(job, fix)]
    paying.sort(key=lambda fix: (fix.cause is None, fix.withheld is not None, -fix.worth_s))
    named = _named((*paying, *hidden))
    usable = [
        fix for fix in named[: len(paying)] if fix.cause is not None and not fix.bound and fix.plan.change is not None
    ]
    usable.sort(key=lambda fix: -fix.worth_s)
    priced = (*named, *_combination(pricer, usable, named[len(paying) :]))
    return tuple(assessed.promised(fix) for fix in priced)


def _pays(job: Subject, fix: PricedFix) -> bool:
    """Return whether a fix saves enough to be worth a line, also without a profiler."""
    enough = fix.saved_s >= DIAGNOSIS.smallest_saving * job.measured_s
    return enough and (fix.saves_step_s is None or fix.share >= DIAGNOSIS.smallest_saving)


def _named(fixes: Sequence[PricedFix]) -> tuple[PricedFix, ...]:
    """The fixes with edits that tell those of one kind apart, `fix=KIND` and `fix=KIND:2`."""
    named = []
    for place, fix in enumerate(fixes):
        number = 1 + sum(other.kind == fix.kind for other in fixes[:place])
        same = fix.edit == f"fix={fix.kind}" and number > 1
        named.append(replace(fix, edit=f"{fix.edit}:{number}") if same else fix)
    return tuple(named)


def fix_named(fixes: Sequence[PricedFix], name: str) -> PricedFix:
    """The fix that an edit calls `KIND` or `KIND:NUMBER`. Raises SelectionError if there is none with a change."""
    kind, _, text = name.partition(":")
    of_kind = [fix for fix in fixes if fix.kind == kind]
    number = int(text or 1) if re.fullmatch(r"\d{0,9}", text) else 0
    if not 0 < number <= len(of_kind) or of_kind[number - 1].plan.change is None:
        kinds = sorted({str(fix.kind) for fix in fixes if fix.plan.change is not None})
        raise SelectionError(
            f"fix={name:.80}: the job has no such fix; it has {', '.join(kinds) or 'none'}{did_you_mean(kind, kinds)}"
        )
    return of_kind[number - 1]


def _removes_a_cause(fix: PricedFix) -> bool:
    """True for a fix that makes a named cause go away rather than work around it."""
    return fix.cause is not None and fix.plan.change is not None and not fix.bound and not fix.plan.around


class _Pricer(Struct, frozen=True, eq=False):
    """Turns plans into fixes."""

    job: Subject
    withheld: str | None
    replayed: dict[tuple[int, ...], Floats] = field(default_factory=dict)

    def times(self, fixes: Sequence[PricedFix]) -> Floats:
        """The step times after several fixes, seconds, [steps]; combinations have many in common."""
        changes = [fix.plan.change for fix in fixes if fix.plan.change is not None]
        key = tuple(map(id, changes))
        if key not in self.replayed:
            self.replayed[key] = self.job.step_times(changes)
        return np.asarray(self.replayed[key] + sum(fix.plan.extra_s for fix in fixes))

    def price(self, plan: Plan, *changes: Any) -> PricedFix:
        """Replay the plan, unless its step times are known. `changes`: that it makes, by default its own."""
        changed, changes = plan.step_times, changes or (plan.change,)
        if changed is None:
            assert plan.change is not None, "a plan has a change or step times"
            changed = self.job.step_times((plan.change,))
        changed = changed + plan.extra_s
        saving = self.job.unchanged - changed
        saved_s = float(saving.mean())
        error_s = self.job.saving_error_s(saving, changes)
        step, saves = self.job.unprofiled_step, None
        if plan.cause is not None and plan.change is plan.cause.change:
            saves = plan.cause.saves_step_s
        elif step is not None:
            saves = self.job.saves_step([change for change in changes if change is not None], bound=plan.bound)
        share = saved_s / self.job.recorded_s if step is None or saves is None else saves.value / step.value
        share *= 1.0 if plan.cause is None else plan.cause.returning_share
        reason, details = self.withheld, plan.details
        if reason is None and saved_s < error_s:
            seen = None if plan.cause is None else self._acting_steps(plan.cause, saving)
            if seen is None:
                reason = f"the saving of {seconds(saved_s)} is below its error of {seconds(error_s)}"
            else:
                steps, error_s = seen
                details = {"assumes": f"as often as in this trace ({steps} steps)", **details}
        return PricedFix(
            kind=plan.kind,
            title=plan.title,
            where=plan.where,
            where_text=str(plan.where),
            new_step_s=self.job.recorded_s - saved_s,
            saved_s=saved_s,
            saved_gpu_hours_per_day=self.job.gpu_hours_per_day(share),
            error_s=error_s,
            bound=plan.bound,
            withheld=reason,
            assumes=None if (assumed := details.get("assumes")) is None else str(assumed),
            details=dict(details),
            cause=None if plan.cause is None else plan.cause.kind,
            confidence=None if plan.cause is None else plan.cause.confidence,
            edit=plan.edit or (None if plan.change is None else f"fix={plan.kind}"),
            plan=plan,
            saves_step_s=saves,
            unprofiled_step_s=None if step is None else step.value,
        )

    def _acting_steps(self, cause: Cause, saving: Floats) -> tuple[int, float] | None:
        """The number of steps in which a cause acts, too few to estimate its frequency, and the error of the mean
        saving of this trace, seconds; None if the saving in those steps is below its error, too.
        """
        acts = acting(self.job, cause.time)
        if acts is None or acts.sum() < 2:
            return None
        saving_s = saving[acts]
        least_s = self.job.saving_error_s(saving_s, [cause.change])
        return (int(acts.sum()), least_s * float(acts.mean())) if float(saving_s.mean()) > least_s else None


def _combination(pricer: _Pricer, fixes: Sequence[PricedFix], hidden: Sequence[PricedFix]) -> Iterator[PricedFix]:
    """The best of: the fix that helps most, or those of all named causes; then whatever else helps most on top of that.

    Each of its fixes is promised by itself, or saves more than its error on top of the others, as a pause of one rank
    does once those of other ranks are gone. `hidden`: fixes of causes that save nothing alone.
    """
    causes_gone = _compatible([fix for fix in (*fixes, *hidden) if _removes_a_cause(fix)])
    starts = [start for start in (list(fixes[:1]), causes_gone) if start]
    grown = [_grown(pricer, start, fixes) for start in starts]
    if not grown:
        return
    chosen, _ = min(grown, key=lambda grown_plan: (round(float(grown_plan[1].mean()), 9), len(grown_plan[0])))
    for fix in reversed(chosen):
        others = [other for other in chosen if other is not fix]
        if fix.withheld is not None and not _helps(pricer, fix, others):
            chosen = others
    sequence, done_s = [], 0.0
    for count, fix in enumerate(chosen, 1):
        saved_s = pricer.job.unchanged_s - float(pricer.times(chosen[:count]).mean())
        step = {"kind": str(fix.kind), "title": fix.title, "alone_saved_s": fix.saved_s}
        sequence.append(step | {"marginal_saved_s": saved_s - done_s})
        done_s = saved_s
    if len(chosen) > 1:
        assumed = dict.fromkeys(fix.assumes for fix in chosen if fix.assumes is not None)
        edits = [fix.edit for fix in chosen if fix.edit is not None]
        plan = Plan(
            COMBINATION,
            " + ".join(fix.title for fix in chosen),
            Place(),
            None,
            step_times=pricer.times(chosen),
            details={
                "sequence": sequence,
                "sum_of_single_savings_s": sum(fix.saved_s for fix in chosen),
                "assumes": "; ".join(assumed) or None,
            },
            edit=" + ".join(edits) if len(edits) == len(chosen) else None,
        )
        # As certain as its least certain part.
        sure = [fix.confidence for fix in chosen if fix.confidence is not None]
        changes = [fix.plan.change for fix in chosen if fix.plan.change is not None]
        yield replace(pricer.price(plan, *changes), confidence=min(sure, default=None))


def _helps(pricer: _Pricer, fix: PricedFix, others: Sequence[PricedFix]) -> bool:
    """Whether a fix saves more than its error on top of others."""
    gained = pricer.times(others) - pricer.times([*others, fix])
    return float(gained.mean()) >= pricer.job.saving_error_s(gained, [fix.plan.change])


def _grown(pricer: _Pricer, start: list[PricedFix], fixes: Sequence[PricedFix]) -> tuple[list[PricedFix], Floats]:
    """`start` plus the fixes that help most on top of it, one by one, and the resulting step times, [steps]."""
    chosen, times = list(start), pricer.times(start)
    while len(chosen) < max(LONGEST_COMBINATION, len(start)):
        options = [
            (fix, pricer.times([*chosen, fix]))
            for fix in fixes
            if not any(fix.kind == other.kind or _exclude(fix, other) for other in chosen)
        ]
        if not options:
            break
        fix, times_s = min(options, key=lambda option: float(option[1].mean()))
        if float(times.mean() - times_s.mean()) < DIAGNOSIS.smallest_saving * pricer.job.unchanged_s / 2:
            break
        chosen.append(fix)
        times = times_s
    return chosen, times


def _compatible(fixes: Sequence[PricedFix]) -> list[PricedFix]:
    """The fixes without those that exclude an earlier one."""
    chosen: list[PricedFix] = []
    for fix in fixes:
        if not any(_exclude(fix, other) and fix.kind != other.kind for other in chosen):
            chosen.append(fix)
    return chosen


def _exclude(fix: PricedFix, other: PricedFix) -> bool:
    """Return whether a combination has at most one of these fixes."""
    return not set(fix.plan.excludes).isdisjoint(other.plan.excludes)


def paying_first(causes: Sequence[Cause], fixes: Sequence[PricedFix]) -> tuple[Cause, ...]:
    """The causes, those whose fixes save most first; causes without a fix that saves anything stay in order.

    A cause costs more than its fix saves if the cause cannot just go away: the layers of a stage with too many have to
    go to other stages. A fix that saves less than a cause must cost to be named does not change the order.
    """

    def given_back_s(cause: Cause) -> float:
        fix = best_fix(cause, fixes)
        if fix is None or fix.withheld is not None or fix.share < FINDINGS.smallest_cost_share:
            return 0.0
        return fix.worth_s

    return tuple(sorted(causes, key=lambda cause: -given_back_s(cause)))


def first_fix(cause: Cause, fixes: Sequence[PricedFix]) -> PricedFix | None:
    """What to do first about a cause; if that saves little until others are gone, all fixes together.

    If no fix of the cause saves anything: the fix that any job can try, if it saves enough.
    """
    best = best_fix(cause, fixes)
    if best is not None and best.withheld == IN_VAIN:
        anyway = [fix for fix in fixes if fix.cause is None and fix.withheld is None]
        most = max(anyway, key=lambda fix: fix.worth_s, default=best)
        return most if most.share >= VERDICT.headline_share else best
    combination = next((fix for fix in fixes if fix.kind == COMBINATION and fix.withheld is None), None)
    if best is None or combination is None or best.share >= VERDICT.headline_share:
        return best
    return combination if hidden(best.worth_s, combination.worth_s) else best


def act_of(cause: Cause, fix: PricedFix | None) -> str | None:
    """The action for a person to take: the fix or, if that only gives the goal, how to reach it.

    `fix`: the one for the cause, None if none has a price. Returns None if nothing is known to help.
    """
    if fix is None:
        return _sentence(cause.suggested_fix) or None
    if fix.kind == COMBINATION:
        return f"Fix all causes together, because one fix alone saves little; first {cause.suggested_fix}"
    return _sentence(cause.suggested_fix) if _says_goal(cause, fix) else fix.title


def assumed_by(cause: Cause, fix: PricedFix) -> str | None:
    """Return the assumption behind the saving if somebody follows `act_of`; None if there is none."""
    return fix.assumes or (fix.plan.reached if _says_goal(cause, fix) else None)


def _says_goal(cause: Cause, fix: PricedFix) -> bool:
    return fix.plan.reached is not None and fix.cause == cause.kind


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def best_fix(cause: Cause, fixes: Sequence[PricedFix]) -> PricedFix | None:
    """The best fix of a cause, preferably one at its place.

    A fix with only an upper bound, or without a reported saving, only if there is no other.
    """
    of_cause = [fix for fix in fixes if fix.cause == cause.kind]
    own = [fix for fix in of_cause if fix.plan.change is not None and fix.plan.change is cause.change]
    of_cause = own or [fix for fix in of_cause if not fix.bound] or of_cause
    in_place = [fix for fix in of_cause if fix.where == cause.where] or of_cause
    return next((fix for fix in in_place if fix.withheld is None), in_place[0] if in_place else None)
