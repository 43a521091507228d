"""Which cause to address first, and with which fix: the one that saves most.

In: causes with their priced fixes. Out: the causes in that order, and the fix of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analysis.detectors.detector import SMALLEST_COST_SHARE
from tracekit.analysis.diagnosis.find import SMALLEST_FIRST_SHARE
from tracekit.analysis.diagnosis.price import COMBINATION, IN_VAIN
from tracekit.analysis.diagnosis.priced_fix import PricedFix
from tracekit.analysis.evidence.cause import Cause
from tracekit.base.text import hidden


def paying_first(causes: Sequence[Cause], fixes: Sequence[PricedFix]) -> tuple[Cause, ...]:
    """The causes, those whose fixes save most first; causes without a fix that saves anything stay in order.

    A cause costs more than its fix saves if the cause cannot just go away: the layers of a stage with too many have to
    go to other stages. A fix that saves less than a cause must cost to be named does not change the order.
    """

    def given_back_s(cause: Cause) -> float:
        fix = best_fix(cause, fixes)
        if fix is None or fix.withheld is not None or fix.share < SMALLEST_COST_SHARE:
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
        return most if most.share >= SMALLEST_FIRST_SHARE else best
    together = next((fix for fix in fixes if fix.kind == COMBINATION and fix.withheld is None), None)
    if best is None or together is None or best.share >= SMALLEST_FIRST_SHARE:
        return best
    return together if hidden(best.worth_s, together.worth_s) else best


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
    return fix.assumes or (fix.reached if _says_goal(cause, fix) else None)


def _says_goal(cause: Cause, fix: PricedFix) -> bool:
    return fix.reached is not None and fix.cause == cause.kind


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def best_fix(cause: Cause, fixes: Sequence[PricedFix]) -> PricedFix | None:
    """The best fix of a cause, preferably one at its place.

    A fix with only an upper bound, or without a reported saving, only if there is no other.
    """
    of_cause = [fix for fix in fixes if fix.cause == cause.kind]
    own = [fix for fix in of_cause if fix.change is not None and fix.change is cause.change]
    of_cause = own or [fix for fix in of_cause if not fix.bound] or of_cause
    in_place = [fix for fix in of_cause if fix.where == cause.where] or of_cause
    return next((fix for fix in in_place if fix.withheld is None), in_place[0] if in_place else None)
