"""The steps of a log: what each takes, and what its phases take.

In: the records of a framework. Out: a `PhaseLog`. Which timers lie within the step is a fact of the framework where it
is one; of validations and checkpoints, which have moved between versions, the times themselves tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.importers.rl.frameworks import (
    CHECKPOINT,
    TOKENS,
    TOLERANCE,
    VALIDATION,
    Framework,
    Record,
)
from tracekit.trace.post_training import (
    ROLLOUT_IDLE,
    TOOL_CALLS,
    TOOLS,
    TRAINER_IDLE,
    TRAINER_WAIT,
    PhaseLog,
    StepTime,
)

_Floats = npt.NDArray[np.float64]
#: A time beyond it is none.
LONGEST_S = 1e12
#: How exact the clock of a console is: it shows whole seconds.
_CLOCK_S = 2.0
#: Units of time differ by more than this factor. What differs by less may have been printed late.
_UNITS = 10
#: Phases that lie in the step of some versions, and behind that of others.
_MOVED = (VALIDATION, CHECKPOINT)
#: A phase explains time if it exceeds that by this share at most, and leaves less than that of it.
_EXPLAINED, _UNEXPLAINED = 0.05, 0.2
#: Values of both sides of a job that generates while it trains -> our names.
_IDLE = {"trainer/idle_ratio": TRAINER_IDLE, "rollouter/idle_ratio": ROLLOUT_IDLE}
#: What verl times within a generation: of the slowest trajectory, and of all.
_SLOWEST, _LONGEST = "timing_s/agent_loop/slowest/{}", "timing_s/agent_loop/{}/max"
_TOOL_CALLS, _SAMPLING = "tool_calls", "generate_sequences"


def read_phases(framework: Framework, records: Iterable[Record], where: str) -> PhaseLog:
    """All steps of a log; from a step on that is logged again, as after a restart, the last attempt alone.

    Raises FormatError.
    """
    steps: dict[int, dict[str, float]] = {}
    values_of: dict[int, dict[str, float]] = {}
    restarts: list[int] = []
    rates: dict[int, list[float | None]] = {}
    for number, values, written_s in records:
        if not 0 <= number < 1 << 31:
            raise FormatError(f"{where}: step {number}; expected a number of at least 0 and below {1 << 31}")
        rates[number] = [values.get(name) for name in TOKENS] + [written_s]
        timers = {match[1]: value for key, value in values.items() if (match := framework.timer.fullmatch(key))}
        for name, value in timers.items():
            if not 0 <= value <= LONGEST_S:
                expected = f"a time of at least 0 and at most {LONGEST_S:g} s"
                took = "is no number" if math.isnan(value) else f"took {value} s"
                raise FormatError(f"{where}: step {number}: {name} {took}; expected {expected}")
        before = steps.get(number, {})
        # slime reports a step in two records: those that have a timer in common are of two attempts.
        if before.keys() & timers.keys() and not timers.items() <= before.items():
            restarts.append(number)
            steps = {step: timers_of for step, timers_of in steps.items() if step < number}
            before = {}
        if timers:
            steps[number] = before | timers
            values_of[number] = (values_of.get(number, {}) if before else {}) | values
    # A log that was cut can lack one of the two: then the generation is unknown, not 0.
    generates = {name for name, phase in framework.phases.items() if phase == "generate"}
    needed = generates if any(generates & timers.keys() for timers in steps.values()) else set()
    numbers = sorted(
        number for number, timers in steps.items() if timers.get(framework.step, 0.0) > 0 and needed <= timers.keys()
    )
    if not numbers:
        raise FormatError(f"{where}: {framework.format} logs no whole step here; expected lines with {framework.step}")
    whole, logged = [steps[number] for number in numbers], [values_of[number] for number in numbers]
    stale = any(map(framework.stale, logged))
    step_s = np.array([timers[framework.step] for timers in whole])
    phases = _phases(framework, whole, stale=stale)
    means = {name: math.fsum(timers.get(name, 0.0) for timers in whole) / len(whole) for name in set().union(*whole)}
    step_time = framework.step_time(means, {phase: float(column.mean()) for phase, column in phases.items()})
    if step_time is StepTime.SERIAL:
        phases = _within(phases | _waits(framework, whole), step_s)
    else:
        phases = {phase: took for phase, took in phases.items() if phase not in _MOVED}
    return PhaseLog(
        framework.format,
        step_time,
        np.array(numbers, dtype=np.int64),
        step_s,
        phases,
        tuple(sorted(steps.keys() - set(numbers))),
        _contradiction(step_s, [rates[number] for number in numbers]),
        tuple(restarts),
        stale or (TRAINER_WAIT in phases and not framework.around),
        _measures(logged),
    )


def _phases(framework: Framework, whole: list[dict[str, float]], *, stale: bool) -> dict[str, _Floats]:
    """The seconds of each phase, [steps]. `stale`: the job generates while it trains, which only waits for samples."""
    seconds: dict[str, _Floats] = {}
    outside = {framework.step, *framework.not_phases, *framework.around}
    for place, timers in enumerate(whole):
        for name, value in timers.items():
            if name not in outside:
                phase = framework.phase(name)
                phase = TRAINER_WAIT if stale and phase == "generate" else phase
                seconds.setdefault(phase, np.zeros(len(whole)))[place] += value
    return seconds


def _waits(framework: Framework, whole: list[dict[str, float]]) -> dict[str, _Floats]:
    """What timers around others take beyond those: the trainer waits."""
    waits = [
        math.fsum(
            max(timers[name] - math.fsum(timers.get(inner, 0.0) for inner in inside), 0.0)
            for name, inside in framework.around.items()
            if name in timers
        )
        for timers in whole
    ]
    return {TRAINER_WAIT: np.array(waits)} if any(waits) else {}


def _within(phases: dict[str, _Floats], step_s: _Floats) -> dict[str, _Floats]:
    """The phases without the validations and checkpoints that lie outside the step.

    Inside, steps that have one take longer by it than the phases of the others explain. Where all steps have one, the
    phases with it add up to the step, and without do not.
    """
    moved = {name: phases[name] for name in _MOVED if name in phases}
    always = {name: took for name, took in phases.items() if name not in moved}
    rest = step_s - sum(always.values(), np.zeros_like(step_s))
    for name, took in moved.items():
        others = sum((more for other, more in moved.items() if other != name), np.zeros_like(step_s))
        has, alone = took > 0, others == 0
        if has.all() or not has.any():
            inside = any(_explains(rest, more) for more in (took, took + others))
        else:
            longer = np.median(rest[has & alone] if (has & alone).any() else rest[has]) - np.median(rest[~has])
            inside = bool(longer > np.median(took[has]) / 2)
        if inside:
            always[name] = took
    return always


def _explains(rest: _Floats, took: _Floats) -> bool:
    """Whether a phase is most of the time that the others do not explain, and no more than that."""
    rest_s, took_s = float(rest.mean()), float(took.mean())
    return 0 < took_s <= rest_s + max(_EXPLAINED * rest_s, 0.0) and rest_s - took_s <= _UNEXPLAINED * rest_s


def _measures(logged: list[dict[str, float]]) -> dict[str, _Floats]:
    """What a log says of each step apart from its phases, [steps], nan where it does not."""
    measured = {name: [_ratio(values, end) for values in logged] for end, name in _IDLE.items()}
    measured[TOOLS] = [_tools_s(values) for values in logged]
    measured[TOOL_CALLS] = [values.get(f"timing_s/agent_loop/{_TOOL_CALLS}/mean", math.nan) for values in logged]
    return {name: np.array(column) for name, column in measured.items() if not np.isnan(column).all()}


def _ratio(values: Mapping[str, float], end: str) -> float:
    """The share whose key ends so: some versions write `fully_async/` before it."""
    return next((value for key, value in values.items() if key.endswith(end) and 0 <= value <= 1), math.nan)


def _tools_s(values: Mapping[str, float]) -> float:
    """At most so much of a step is due to tools: the generation beyond the longest sampling, if the trajectory that
    took longest spent longer in tools than it was sampled; nan if the step has no tools.
    """
    slowest, longest = (
        [values.get(form.format(name), math.nan) for name in (_TOOL_CALLS, _SAMPLING)] for form in (_SLOWEST, _LONGEST)
    )
    tools_s, sampling_s = longest if math.isnan(slowest[0]) else slowest
    longest_s = sampling_s if math.isnan(longest[1]) else longest[1]
    generation_s = values.get("timing_s/gen", math.nan)
    if math.isnan(tools_s + sampling_s + generation_s) or max(tools_s, longest[0]) <= 0:
        return math.nan
    return max(generation_s - longest_s, 0.0) if tools_s > sampling_s else 0.0


def _contradiction(step_s: np.ndarray, others: list[list[float | None]]) -> str | None:
    """Why the steps cannot have taken so many seconds: by the time at which they were printed, or by verl's rate of
    tokens, which is that of each GPU. `others`: rate, tokens, and that time, of each step.
    """
    rate, tokens, written_s = (np.array(column, dtype=np.float64) for column in zip(*others, strict=True))
    order = np.argsort(written_s)
    passed_s, logged_s = written_s[order[-1]] - written_s[order[0]], step_s[order[1:]].sum()
    if logged_s > _UNITS * (passed_s + _CLOCK_S):
        why = f"{len(step_s) - 1} steps take {logged_s:,.0f} s, but were printed within {passed_s:,.0f} s"
    elif (tokens < rate * step_s * (1 - TOLERANCE)).all():
        why = f"{rate.mean():,.0f} tokens a second of each GPU are more than all {tokens.mean():,.0f} of a step"
    else:
        return None
    return f"{why}: the timers do not count seconds"
