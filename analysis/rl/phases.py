"""What logged phases tell: the account of a step, and prices that need no times of requests.

In: a `PhaseLog`. Out: an `RlReport`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tracekit.analysis.rl.report import LossTime, PhaseTime, Price, RlReport, Run, leading
from tracekit.analysis.rl.scenario import Scenario
from tracekit.trace.rl import PhaseLog, StepTime

#: Phases that exceed the step by this share contradict it.
CONTRADICTION = 0.01
#: An assumption of prices with staleness.
SIDE_BY_SIDE = "generation and training take as long side by side"


def analyse_phases(log: PhaseLog, scenarios: Sequence[Scenario]) -> RlReport:
    """Means over the logged steps. `low_s` of a price leaves out the unaccounted time, `high_s` includes it."""
    step_s = float(log.step_s.mean())
    phases = {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}
    generate_s = phases.get("generate", 0.0)
    others_s = math.fsum(phases.values()) - generate_s
    beside = log.step_time is StepTime.OVERLAPPED
    accounted_s = max(generate_s, others_s) if beside else generate_s + others_s
    unaccounted_s = None if log.step_time is StepTime.SUMMED else step_s - accounted_s
    flagged = contradiction(accounted_s, step_s)
    losses = [LossTime(loss, phases[loss]) for loss in ("reward", "sync") if loss in phases and not (flagged or beside)]
    return RlReport(
        Run(log.format, len(log.step_s), 0, 0, "phases"),
        step_s,
        None,
        phases.get("generate"),
        None,
        None if beside or "generate" not in phases else 0,
        [PhaseTime(phase, seconds) for phase, seconds in sorted(phases.items(), key=lambda one: -one[1])],
        unaccounted_s,
        flagged,
        losses,
        leading(losses, step_s),
        None,
        [_price(one, log, step_s, generate_s, others_s, unaccounted_s, flagged) for one in scenarios],
    )


def contradiction(phases_s: float, step_s: float) -> str | None:
    """A sentence if phases take longer than the step that contains them."""
    if phases_s <= step_s * (1 + CONTRADICTION):
        return None
    return (
        f"the phases of a step take {phases_s:.2f} s, {phases_s / step_s - 1:.1%} more than the step itself:"
        " they overlap, or the timers are of different steps"
    )


def no_price(scenario: Scenario, why: str) -> Price:
    """A scenario that cannot be priced."""
    return Price(scenario.text, None, None, None, None, scenario.staleness, why)


def _price(
    scenario: Scenario,
    log: PhaseLog,
    step_s: float,
    generate_s: float,
    others_s: float,
    unaccounted_s: float | None,
    flagged: str | None,
) -> Price:
    if flagged:
        return no_price(scenario, flagged)
    if scenario.regenerates and (scenario.generate_s is None or (scenario.rollout and scenario.train_s is None)):
        return no_price(
            scenario, "needs trajectories, or generate=S and train=S: phases do not show what requests take"
        )
    if "generate" not in log.phases and scenario.generate_s is None:
        return no_price(scenario, "the log lacks the time of the generation, or has only what no training hides")
    generate_s, others_s = scenario.generate_s or generate_s, scenario.train_s or others_s
    beside = scenario.staleness if scenario.staleness is not None else log.step_time is StepTime.OVERLAPPED
    low_s = max(generate_s, others_s) if beside else generate_s + others_s
    high_s = low_s + max(unaccounted_s or 0.0, 0.0)
    unknown = "no time is spent outside phases" if unaccounted_s is None else None
    assumes = "; ".join(filter(None, (SIDE_BY_SIDE if beside else None, unknown)))
    price_s = low_s + (unaccounted_s or 0.0)
    return Price(
        scenario.text,
        price_s,
        min(low_s, price_s),
        high_s,
        step_s - price_s,
        scenario.staleness or None,
        assumes or None,
    )
