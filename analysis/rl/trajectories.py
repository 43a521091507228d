"""What recorded times tell: the account of a step, its losses and prices, by replay.

In: a `Timeline`. Out: an `RlReport`. Losses and prices are differences between two replays, so that what the replay
does not explain of the recording is in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.rl.decoding import NO_LIMIT, Requests, decode, generations, partial_generations
from tracekit.analysis.rl.latency import Ran, fit, queued, started
from tracekit.analysis.rl.loop import WARM_UP, Loop
from tracekit.analysis.rl.phases import CONTRADICTION, SIDE_BY_SIDE, contradiction, no_price
from tracekit.analysis.rl.report import Generation, Loss, LossTime, PhaseTime, Price, RlReport, Run, leading
from tracekit.analysis.rl.scenario import Gpus, Scenario
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import counted, short
from tracekit.trace.rl import Format, Timeline, Trajectories

#: What is recorded less than this apart happens at one time, seconds.
_AT_ONCE_S = 1e-3
#: A response is in the tail if it is longer than this percentile of its step.
TAIL = 95


class _Steps:
    """The recorded steps that are whole: when their generation, reward, training and sync were, [steps], seconds."""

    def __init__(self, timeline: Timeline) -> None:
        phases, trajectories = timeline.phases, timeline.trajectories
        self.trajectories = trajectories
        numbers = np.unique(np.concatenate((phases.step, [] if trajectories is None else trajectories.step)))
        numbers = numbers.astype(np.int64)
        self.spans = {
            name: _span(numbers, phases.step[named], phases.start[named], phases.end[named])
            for name in dict.fromkeys(phases.name.tolist())
            for named in [phases.name == name]
        }
        nothing = np.full(len(numbers), np.nan)
        generate = self.spans.get("generate", (nothing, nothing, nothing))
        if trajectories is not None and "generate" not in self.spans:
            generate = (*_extent(numbers, trajectories.step, trajectories.submit, trajectories.end), nothing)
        reward = self.spans.get("reward", (nothing, nothing, nothing))
        trainer = [span for name, span in self.spans.items() if name not in ("generate", "reward", "sync")]
        # What begins before the generation has ended, such as an evaluation, is no training on it.
        started = _least([np.where(start >= generate[1] - _AT_ONCE_S, start, np.nan) for start, *_ in trainer], nothing)
        finished = -_least([-end for _, end, _ in trainer], nothing)
        sync = self.spans.get("sync", (finished, finished, np.zeros(len(numbers))))
        started = np.where(np.isnan(started), sync[0], started)
        whole = np.flatnonzero(~np.isnan(generate[0] + started + sync[1]))
        if len(whole) < WARM_UP + 1:
            raise FormatError(
                f"{counted(len(whole), 'whole step')}; needs {WARM_UP + 1}, as the first {WARM_UP} are left out. A step"
                " needs a generation, a training and, if others have one, a sync"
            )
        if len(whole) <= whole[-1] - whole[0]:
            missing = np.setdiff1d(np.arange(whole[0], whole[-1]), whole)[0]
            raise FormatError(
                f"step {numbers[missing]} lacks its generation, training or sync, and later steps have it"
            )
        self.numbers = numbers[whole]
        spans = {name: tuple(one[whole] for one in span) for name, span in self.spans.items()}
        self.spans = {name: span for name, span in spans.items() if not np.isnan(span[0]).all()}
        self.generate_start, self.generate_end = generate[0][whole], generate[1][whole]
        self.reward_end = np.fmax(reward[1][whole], self.generate_end)
        self.reward_s = np.nan_to_num(reward[2][whole])
        self.train_start, self.sync_start, self.sync_end = started[whole], sync[0][whole], sync[1][whole]

    @property
    def after_generation(self) -> list[str]:
        """Phases that begin once the generation of their step has ended."""
        early = {name: np.nanmedian(start - self.generate_end) for name, (start, _, _) in self.spans.items()}
        return [name for name, by in early.items() if by >= -_AT_ONCE_S]

    @property
    def step_times(self) -> Floats:
        """From the end of a sync to that of the next, after the warm-up."""
        return np.diff(self.sync_end)[WARM_UP - 1 :]

    def staleness(self) -> int:
        """Updates that the weights of a generation lacked: by the recorded versions, else by the times."""
        trajectories = self.trajectories
        if trajectories is not None:
            known = (trajectories.version >= 0) & (trajectories.step >= self.numbers[WARM_UP])
            if known.any():
                return max(0, int(np.median(trajectories.step[known] - trajectories.version[known])))
        synced = np.searchsorted(self.sync_end, self.generate_start + _AT_ONCE_S, side="right")
        return max(0, int(np.median((np.arange(len(self.numbers)) - synced)[WARM_UP:])))

    def loop(self) -> Loop:
        """The steps as a loop."""
        staleness = self.staleness()
        none = np.full(len(self.numbers), -np.inf)
        generated, synced, weights = none.copy(), none.copy(), none.copy()
        generated[1:], synced[1:] = self.generate_end[:-1], self.sync_end[:-1]
        weights[1 + staleness :] = self.sync_end[: max(0, len(none) - 1 - staleness)]
        could_generate = np.maximum(generated, weights)
        could_generate[0] = self.generate_start[0]
        return Loop(
            self.generate_end - self.generate_start,
            self.reward_end - self.generate_end,
            self.sync_start - self.train_start,
            self.sync_end - self.sync_start,
            np.maximum(self.generate_start - could_generate, 0.0),
            np.maximum(self.train_start - np.maximum(self.reward_end, synced), 0.0),
            staleness,
        )

    def unaccounted_s(self) -> float:
        """Seconds of the mean step in which no phase was."""
        first, last = self.sync_end[WARM_UP - 1], self.sync_end[-1]
        starts, ends = (
            np.clip(np.concatenate([span[side] for span in self.spans.values()]), first, last) for side in (0, 1)
        )
        known = np.flatnonzero(~np.isnan(starts))
        order = known[np.argsort(starts[known])]
        reached = np.concatenate(([first], np.maximum.accumulate(ends[order])))
        gaps = np.maximum(np.append(starts[order], last) - np.maximum(reached, first), 0.0)
        return float(gaps.sum()) / len(self.step_times)


def _span(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, ...]:
    """Start and end of a phase in each step, and for how long it was in it, nan in steps without it."""
    first, last = _extent(numbers, step, start, end)
    at, reached, total = np.searchsorted(numbers, step), first.copy(), last - last
    for one in np.lexsort((start, at)).tolist():  # several ranks may record a phase, each its own part
        total[at[one]] += max(0.0, end[one] - max(start[one], reached[at[one]]))
        reached[at[one]] = max(reached[at[one]], end[one])
    return first, last, total


def _extent(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The first start and the last end in each step, nan in steps without any."""
    first, last = np.full(len(numbers), np.nan), np.full(len(numbers), np.nan)
    at = np.searchsorted(numbers, step)
    np.fmin.at(first, at, start)
    np.fmax.at(last, at, end)
    return first, last


def _least(columns: list[Floats], nothing: Floats) -> Floats:
    """The least of several columns, where any has a value."""
    return np.asarray(np.fmin.reduce([nothing, *columns]))


class _Generations:
    """The generations of a run as requests and engines; `late`: what a phase takes after its last request."""

    def __init__(self, steps: _Steps, trajectories: Trajectories, slots: int | None) -> None:
        place = np.searchsorted(steps.numbers, trajectories.step)
        place[place == len(steps.numbers)] = 0
        chosen = steps.numbers[place] == trajectories.step
        begun = steps.generate_start[place]
        ran = Ran(
            place,
            trajectories.engine,
            trajectories.submit - begun,
            trajectories.start - begun,
            trajectories.end - begun,
            trajectories.tokens,
            trajectories.tool_s,
        ).only(chosen)
        if not np.array_equal(np.unique(ran.step), np.arange(len(steps.numbers))):
            raise FormatError("some steps have trajectories and others none; record all of them or leave them out")
        ran = ran if slots is None else started(ran, slots)
        self.ran, self.count, self.names = ran, int(chosen.sum()), trajectories.engines
        engines = fit(ran, len(trajectories.engines))
        waited, self.slots = queued(ran, engines)
        self.slots = slots or self.slots
        self.engines = structs.replace(engines, slots=self.slots or NO_LIMIT)
        recorded_s = steps.generate_end - steps.generate_start
        self.requests = Requests(
            ran.step,
            ran.engine,
            np.maximum(np.where(waited, ran.submit, ran.start), 0.0),
            ran.start,
            ran.tokens,
            ran.tool_s,
        )
        ends = np.zeros(len(recorded_s))
        np.maximum.at(ends, ran.step, ran.end)
        self.late = np.maximum(recorded_s - ends, 0.0)
        self.replayed = generations(self.requests, self.engines) + self.late
        self.reproduced_s = float(self.replayed[WARM_UP:].mean())
        self.error = self.reproduced_s / float(recorded_s[WARM_UP:].mean()) - 1
        # What one engine gets wrong is hidden in a generation that ends with another.
        replayed_end = decode(self.requests, self.engines)[0]
        replayed, took = (np.maximum(end - self.requests.arrives, 1e-9) for end in (replayed_end, ran.end))
        ratio = replayed / took
        usual = pl.DataFrame({"engine": ran.engine, "ratio": ratio}).group_by("engine").median()["ratio"]
        self.engine_error = float(np.abs(usual.to_numpy() - 1).max())

    def without(self, loss: Loss) -> Floats:
        """Seconds of each generation without a loss."""
        requests, engines = self.requests, self.engines
        match loss:
            case "queueing":
                requests = requests.replace(arrives=np.maximum(self.ran.submit, 0.0))
                engines = structs.replace(engines, slots=NO_LIMIT)
            case "tail":
                first = np.searchsorted(requests.step, np.arange(requests.step[-1] + 2))
                longest = [
                    np.percentile(requests.tokens[start:stop], TAIL, method="higher") for start, stop in pairwise(first)
                ]
                requests = requests.replace(tokens=np.minimum(requests.tokens, np.array(longest)[requests.step]))
            case "engines":
                requests = requests.balanced(len(engines.speeds)).replace(turn=np.arange(self.count, dtype=np.float64))
                engines = structs.replace(engines, speeds=np.ones_like(engines.speeds))
            case "tools":
                requests = requests.replace(tool_s=np.zeros(self.count))
        return np.asarray(generations(requests, engines) + self.late)

    def in_scenario(self, one: Scenario, engines: int | None) -> tuple[Floats, int]:
        """Seconds of each generation in a scenario, and the most steps that a request is carried over."""
        if not one.regenerates:
            return self.replayed, 0
        changed = self.engines.of_number(engines or len(self.engines.speeds))
        requests = self.requests.dealt(len(changed.speeds), longest_first=one.longest_first)
        if one.partial is None:
            return generations(requests, changed) + self.late, 0
        if one.longest_first:
            order = np.lexsort((requests.turn, requests.step))
            requests = Requests(*(getattr(requests, name)[order] for name in requests.__struct_fields__))
        took, oldest = partial_generations(requests, changed, one.partial)
        return took + self.late, oldest

    def clock_off(self, steps: _Steps, step_s: float) -> str | None:
        """A sentence if an engine's times do not fit the phases, or are those of the others with an offset."""
        slack = CONTRADICTION * step_s
        ran, recorded_s = self.ran, (steps.generate_end - steps.generate_start)[self.ran.step]
        before = np.maximum(np.maximum(-ran.start, ran.submit - ran.start), ran.end - recorded_s)
        first = np.full((len(steps.numbers), len(self.names)), np.nan)
        np.fmin.at(first, (ran.step, ran.engine), ran.start)
        used = ~np.isnan(first).all(axis=0)
        # Engines start together; one that is late by the same time in every step has another clock.
        late = np.nanmedian(first[:, used], axis=0)
        late -= late.min()
        late[np.nanmax(first[:, used], axis=0) - np.nanmin(first[:, used], axis=0) > slack] = 0.0
        if before.max() > slack:
            worst = int(before.argmax())
            name, by = self.names[ran.engine[worst]], float(before[worst])
        elif late.max() > slack:
            name, by = self.names[np.flatnonzero(used)[late.argmax()]], float(late.max())
        else:
            return None
        return (
            f"trajectories of {short(name)} lie {by:.2f} s outside their generations: its clock or their steps are off"
        )


def analyse_trajectories(
    timeline: Timeline, scenarios: Sequence[Scenario], gpus: Gpus | None, slots: int | None
) -> RlReport:
    """Means over the whole steps without the first two. `low_s` and `high_s` of a price differ from it by what the
    replay misses of the recording, and by what dealing requests to engines in turn changes if they are dealt anew.

    Raises FormatError, and SelectionError for a scenario without its GPUs.
    """
    steps = _Steps(timeline)
    recorded = steps.step_times
    step_s = float(recorded.mean())
    loop = steps.loop()
    generation_s = float(loop.generate[WARM_UP:].mean())
    if min(step_s, generation_s) <= 0:
        raise FormatError(f"the mean step takes {step_s} s, its generation {generation_s} s; expected more than 0 s")
    made = None if steps.trajectories is None else _Generations(steps, steps.trajectories, slots)
    if made is not None:
        loop = loop.replace(generate=made.replayed)
    phases = {name: float(np.nan_to_num(total[WARM_UP:]).mean()) for name, (_, _, total) in steps.spans.items()}
    phases.setdefault("generate", generation_s)
    times = loop.step_times()
    one_by_one = [name for name in steps.after_generation if name != "reward"]
    if not loop.staleness:
        one_by_one.append("generate")
    flagged = contradiction(math.fsum(phases[name] for name in one_by_one), step_s)
    if flagged is None and made is not None:
        flagged = made.clock_off(steps, step_s)
    losses = [] if flagged else _losses(loop, steps.reward_s, made, times)
    return RlReport(
        Run(
            Format.TRAJECTORIES,
            len(steps.numbers),
            0 if made is None else made.count,
            0 if made is None else len(made.names),
            "phases" if made is None else "trajectories",
        ),
        step_s,
        float(times.mean()),
        generation_s,
        float((steps.train_start[WARM_UP:] - steps.sync_end[WARM_UP - 1 : -1]).mean()),
        loop.staleness,
        [PhaseTime(name, seconds) for name, seconds in sorted(phases.items(), key=lambda one: -one[1])],
        steps.unaccounted_s(),
        flagged,
        losses,
        leading(losses, step_s),
        None
        if made is None
        else Generation(
            made.engines.base_s,
            made.engines.per_request_s,
            dict(zip(made.names, made.engines.speeds.tolist(), strict=True)),
            made.slots,
            made.reproduced_s,
            made.error,
            made.engine_error,
        ),
        [
            no_price(one, flagged) if flagged else _price(one, loop, made, gpus, recorded, generation_s)
            for one in scenarios
        ],
    )


def _losses(loop: Loop, reward_s: Floats, made: _Generations | None, times: Floats) -> list[LossTime]:
    without: dict[Loss, Loop] = {}
    if made is not None:
        of_requests: tuple[Loss, ...] = ("queueing", "tail", "engines", "tools")
        without = {loss: loop.replace(generate=made.without(loss)) for loss in of_requests}
    without["reward"] = loop.replace(reward=np.maximum(loop.reward - reward_s, 0.0))
    without["sync"] = loop.replace(sync=np.zeros_like(loop.sync))
    return [LossTime(loss, float((times - one.step_times()).mean())) for loss, one in without.items()]


def _price(
    one: Scenario,
    loop: Loop,
    made: _Generations | None,
    gpus: Gpus | None,
    recorded: Floats,
    generation_s: float,
) -> Price:
    """What the step takes in a scenario."""
    engines, assumed = one.engines, []
    changed = loop if one.staleness is None else loop.replace(staleness=one.staleness)
    if changed.staleness > loop.staleness:
        assumed.append(SIDE_BY_SIDE)
    if one.rollout is not None and one.trainer is not None:
        if gpus is None:
            raise SelectionError(f"--what-if {one.text}: needs --gpus rollout=A,trainer=B, the GPUs as recorded")
        changed = changed.replace(train=changed.train * (gpus.trainer / one.trainer))
        if made is not None:
            engines, rest = divmod(one.rollout * len(made.names), gpus.rollout)
            if rest or not engines:
                raise SelectionError(
                    f"--what-if {one.text}: {one.rollout} GPUs are no whole number of engines;"
                    f" {len(made.names)} engines have {gpus.rollout} GPUs"
                )
        assumed.append("training time goes with 1 / GPUs")
    carried: int | None = None
    if made is None and one.regenerates and one.generate_s is None:
        return no_price(one, "needs trajectories, or generate=S: phases do not show what requests take")
    if made is not None and one.regenerates and one.generate_s is None:
        took, carried = made.in_scenario(one, engines)
        changed = changed.replace(generate=took)
        assumed.append("requests are dealt to engines in turn")
        if one.longest_first:
            assumed.append("lengths are known beforehand")
        if made.slots is None:
            assumed.append("no limit on the requests of an engine, as none queued: --slots sets one")
    if one.generate_s is not None:
        changed = changed.replace(generate=_with_mean(changed.generate, one.generate_s))
    if one.train_s is not None:
        changed = changed.replace(train=_with_mean(changed.train, one.train_s))
    times = loop.step_times()
    saved_s = float((times - changed.step_times()).mean())
    price_s = float(recorded.mean()) - saved_s
    reach = abs(float((times - recorded).mean()))
    if made is not None:
        reach = max(reach, abs(made.error) * generation_s)
        if carried is not None:
            same = loop.replace(generate=made.in_scenario(Scenario("", engines=len(made.names)), None)[0])
            reach += abs(float((times - same.step_times()).mean()))
    algorithm = one.partial is not None or changed.staleness > 0
    return Price(
        one.text,
        price_s,
        max(price_s - reach, 0.0),
        price_s + reach,
        saved_s,
        changed.staleness + (carried or 0) if algorithm else None,
        "; ".join(assumed) or None,
    )


def _with_mean(seconds: Floats, mean_s: float) -> Floats:
    """Durations of steps, scaled to another mean."""
    now_s = float(seconds[WARM_UP:].mean())
    return seconds * (mean_s / now_s) if now_s > 0 else np.full_like(seconds, mean_s)
