"""What recorded times tell: the account of a step, its losses and prices, by replay.

In: a `RlTimeline`. Out: `TimedRun`, from the `Steps` that are whole and the `Generations` of their requests. Losses and
prices are differences between two replays, so that what the replay does not explain of the recording is in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.rl.account import RlAccount, Run
from tracekit.analysis.rl.latency import (
    NO_LIMIT,
    Engines,
    Ran,
    Requests,
    decode,
    fit,
    generations,
    partial_generations,
    queued,
    started,
)
from tracekit.analysis.rl.rl_run import (
    CONTRADICTION,
    NO_TRAINING,
    SIDE_BY_SIDE,
    WARM_UP,
    Assumed,
    Gpus,
    Loop,
    PostTrainingRun,
    Scenario,
    contradiction,
)
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import counted, short
from tracekit.report.rl_step import Generation, Loss, LossTime
from tracekit.trace.model import Format
from tracekit.trace.post_training import RlTimeline, Trajectories

#: The losses within a generation.
_OF_REQUESTS: tuple[Loss, ...] = ("queueing", "tail", "engines", "tools")
#: A response is in the tail if it is longer than this percentile of its step. Definition.
TAIL = 95
#: What is recorded less than this apart happens at one time, seconds. Chosen.
_AT_ONCE_S = 1e-3


class TimedRun(PostTrainingRun):
    """The whole steps without the first two. `gpus`: of both roles, as recorded; `slots`: most requests that an engine
    runs at once. None: unknown. Raises FormatError.
    """

    def __init__(self, timeline: RlTimeline, gpus: Gpus | None = None, slots: int | None = None) -> None:
        whole = self.whole = Steps(timeline)
        self.gpus, self.steps, self.recorded = gpus, whole.numbers[WARM_UP:], whole.step_times
        self.step_s, loop = float(self.recorded.mean()), whole.loop()
        self.generation_s = float(loop.generate[WARM_UP:].mean())
        if min(self.step_s, self.generation_s) <= 0:
            raise FormatError(
                f"the mean step takes {self.step_s} s, its generation {self.generation_s} s; expected more than 0 s"
            )
        self.generations = None if whole.trajectories is None else Generations(whole, whole.trajectories, slots)
        self.loop = loop if self.generations is None else loop.replace(generate=self.generations.replayed)
        self.phases = {name: np.nan_to_num(total[WARM_UP:]) for name, (_, _, total) in whole.spans.items()}
        self.phases.setdefault("generate", loop.generate[WARM_UP:])
        one_by_one = [name for name in whole.after_generation if name != "reward"]
        if not loop.staleness:
            one_by_one.append("generate")
        self.flagged = contradiction(math.fsum(self.phases[name].mean() for name in one_by_one), self.step_s)
        if self.flagged is None and self.generations is not None:
            self.flagged = self.generations.clock_off(self.step_s)
        self._without: dict[frozenset[Loss], Floats] = {}
        self._changed: dict[Scenario, tuple[Floats, int]] = {}

    def step_times(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        loop = self.loop
        of_requests = frozenset(without).intersection(_OF_REQUESTS)
        if self.generations is not None and of_requests:
            if of_requests not in self._without:
                self._without[of_requests] = self.generations.without(of_requests)
            loop = loop.replace(generate=self._without[of_requests])
        if "reward" in without:
            loop = loop.replace(reward=np.maximum(loop.reward - self.whole.reward_s, 0.0))
        if "sync" in without:
            loop = loop.replace(sync=np.zeros_like(loop.sync))
        return (loop if scenario is None else self._in_scenario(scenario, loop)[0]).step_times()

    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        generations, whole, losses = self.generations, self.whole, list[LossTime]()
        if not self.flagged:
            kinds: tuple[Loss, ...] = (*(() if generations is None else _OF_REQUESTS), "reward", "sync")
            losses = [LossTime(loss, float((self.unchanged - self.step_times({loss})).mean())) for loss in kinds]
        requests, engines = (0, 0) if generations is None else (generations.count, len(generations.names))
        waits = whole.train_start[WARM_UP:] - whole.sync_end[WARM_UP - 1 : -1]
        return self._account(
            scenarios,
            losses,
            job=Run(
                Format.TRAJECTORIES, len(whole.numbers), requests, engines, "trajectories" if generations else "phases"
            ),
            length_s=float(whole.sync_end[-1] - whole.generate_start[0]),
            replayed_s=float(self.unchanged.mean()),
            generation_s=self.generation_s,
            trainer_wait_s=float(waits.mean()),
            staleness=self.loop.staleness,
            unaccounted_s=whole.unaccounted_s(),
            generation=None if generations is None else generations.fitted(),
            left_out=whole.left_out,
        )

    def assumed(self, scenario: Scenario) -> Assumed:
        if self.generations is None and scenario.regenerates and scenario.generate_s is None:
            return Assumed("needs trajectories, or generate=S: phases do not show what requests take")
        if (
            scenario.train_s is None
            and not self.whole.trains
            and (scenario.staleness is not None or scenario.trainer is not None)
        ):
            return Assumed(NO_TRAINING)
        return self._in_scenario(scenario, self.loop)[1]

    def _in_scenario(self, scenario: Scenario, loop: Loop) -> tuple[Loop, Assumed]:
        generations, engines, assumed, carried, dealing_s = self.generations, scenario.engines, list[str](), 0, 0.0
        changed = loop if scenario.staleness is None else loop.replace(staleness=scenario.staleness)
        if changed.staleness > loop.staleness:
            assumed.append(SIDE_BY_SIDE)
        if scenario.rollout is not None and scenario.trainer is not None:
            if self.gpus is None:
                raise SelectionError(f"{scenario.text}: needs --gpus rollout=A,trainer=B, the GPUs as recorded")
            changed = changed.replace(train=changed.train * (self.gpus.trainer / scenario.trainer))
            if generations is not None:
                engines, rest = divmod(scenario.rollout * len(generations.names), self.gpus.rollout)
                if rest or not engines:
                    raise SelectionError(
                        f"{scenario.text}: {scenario.rollout} GPUs are no whole number of engines;"
                        f" {len(generations.names)} engines have {self.gpus.rollout} GPUs"
                    )
            assumed.append("training time goes with 1 / GPUs")
        if generations is not None and scenario.regenerates and scenario.generate_s is None:
            took, carried = self._generations(scenario, engines)
            changed = changed.replace(generate=took)
            # What dealing the requests anew changes by itself.
            dealt = self.loop.replace(generate=self._generations(Scenario("", engines=len(generations.names)))[0])
            dealing_s = abs(float((self.unchanged - dealt.step_times()).mean()))
            assumed.append("requests are dealt to engines in turn")
            if scenario.longest_first:
                assumed.append("lengths are known beforehand")
            if generations.slots is None:
                assumed.append("no limit on the requests of an engine, as none queued: --slots sets one")
        if scenario.generate_s is not None:
            changed = changed.replace(generate=_with_mean(changed.generate, scenario.generate_s))
        if scenario.train_s is not None:
            changed = changed.replace(train=_with_mean(changed.train, scenario.train_s))
        algorithm = scenario.partial is not None or changed.staleness > self.loop.staleness
        oldest = changed.staleness + carried if algorithm else None
        return changed, Assumed(None, tuple(assumed), dealing_s, oldest)

    def _generations(self, scenario: Scenario, engines: int | None = None) -> tuple[Floats, int]:
        """Seconds of each generation, as `Generations.in_scenario`; kept, as several prices ask for the same ones."""
        assert self.generations is not None, "only requests can be replayed"
        if scenario not in self._changed:
            self._changed[scenario] = self.generations.in_scenario(scenario, engines or scenario.engines)
        return self._changed[scenario]


def _with_mean(seconds: Floats, mean_s: float) -> Floats:
    """Durations of steps, scaled to another mean."""
    now_s = float(seconds[WARM_UP:].mean())
    return seconds * (mean_s / now_s) if now_s > 0 else np.full_like(seconds, mean_s)


class Generations:
    """The generations of a run as requests and engines; `late`: what a phase takes after its last request."""

    def __init__(self, steps: Steps, trajectories: Trajectories, slots: int | None) -> None:
        place = np.searchsorted(steps.numbers, trajectories.step)
        place[place == len(steps.numbers)] = 0
        chosen = steps.numbers[place] == trajectories.step
        begin = steps.generate_start[place]
        ran = Ran(
            place,
            trajectories.engine,
            trajectories.submit - begin,
            trajectories.start - begin,
            trajectories.end - begin,
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
        self.recorded = steps.generate_end - steps.generate_start
        self.requests = Requests(
            ran.step,
            ran.engine,
            np.maximum(np.where(waited, ran.submit, ran.start), 0.0),
            ran.start,
            ran.tokens,
            ran.tool_s,
        )
        ends = np.zeros(len(self.recorded))
        np.maximum.at(ends, ran.step, ran.end)
        self.late = np.maximum(self.recorded - ends, 0.0)
        replayed_end = decode(self.requests, self.engines)[0]
        self.replayed = np.zeros(len(self.recorded))
        np.maximum.at(self.replayed, ran.step, replayed_end)
        self.replayed += self.late
        self.error = float(self.replayed[WARM_UP:].mean() / self.recorded[WARM_UP:].mean()) - 1
        self.error_s = abs(float((self.replayed - self.recorded)[WARM_UP:].mean()))
        # What one engine gets wrong is hidden in a generation that ends with another.
        replayed, took = (np.maximum(end - self.requests.arrives, 1e-9) for end in (replayed_end, ran.end))
        ratio = replayed / took
        usual = pl.DataFrame({"engine": ran.engine, "ratio": ratio}).group_by("engine").median()["ratio"]
        self.engine_error = float(np.abs(usual.to_numpy() - 1).max())

    def fitted(self) -> Generation:
        """How the engines decode, and how well that reproduces the recording."""
        speeds = dict(zip(self.names, self.engines.speeds.tolist(), strict=True))
        reproduced_s = float(self.replayed[WARM_UP:].mean())
        latency = self.engines.base_s, self.engines.per_request_s
        return Generation(*latency, speeds, self.slots, reproduced_s, self.error, self.engine_error)

    def longest(self) -> Floats:
        """The percentile of each step's tokens beyond which a response is in the tail, [steps]."""
        first = np.searchsorted(self.ran.step, np.arange(self.ran.step[-1] + 2))
        tokens = self.requests.tokens
        return np.array([np.percentile(tokens[start:stop], TAIL, method="higher") for start, stop in pairwise(first)])

    def without(self, losses: Set[Loss]) -> Floats:
        """Seconds of each generation without these losses, [steps]."""
        requests, engines = self.requests, self.engines
        if "queueing" in losses:
            requests = requests.replace(arrives=np.maximum(self.ran.submit, 0.0))
            engines = structs.replace(engines, slots=NO_LIMIT)
        if "tail" in losses:
            requests = requests.replace(tokens=np.minimum(requests.tokens, self.longest()[requests.step]))
        if "tools" in losses:
            requests = requests.replace(tool_s=np.zeros(self.count))
        if "engines" in losses:
            requests = requests.balanced(len(engines.speeds)).replace(turn=np.arange(self.count, dtype=np.float64))
            engines = structs.replace(engines, speeds=np.ones_like(engines.speeds))
        return self._seconds(requests, engines)

    def costs_of_pace(self) -> Floats:
        """By how much each engine prolongs the mean generation if all others keep the median pace, s, [engines]."""
        even = structs.replace(self.engines, speeds=np.ones_like(self.engines.speeds))
        last = np.zeros((2, len(self.recorded), len(self.names)))
        for of_pace, engines in zip(last, (self.engines, even), strict=True):
            np.maximum.at(of_pace, (self.ran.step, self.ran.engine), decode(self.requests, engines)[0])
        longer: Floats = np.maximum(last[0] - last[1].max(axis=1, keepdims=True), 0.0)
        return np.asarray(longer[WARM_UP:].mean(axis=0))

    def in_scenario(self, scenario: Scenario, engines: int | None) -> tuple[Floats, int]:
        """Seconds of each generation in a scenario, and the most steps that a request is carried over."""
        changed = self.engines.of_number(engines or len(self.engines.speeds))
        requests = self.requests.dealt(len(changed.speeds), longest_first=scenario.longest_first)
        if scenario.partial is None:
            return self._seconds(requests, changed), 0
        if scenario.longest_first:
            order = np.lexsort((requests.turn, requests.step))
            requests = Requests(*(getattr(requests, name)[order] for name in requests.__struct_fields__))
        took, oldest = partial_generations(requests, changed, scenario.partial)
        return took + self.late, oldest

    def _seconds(self, requests: Requests, engines: Engines) -> Floats:
        return np.asarray(generations(requests, engines) + self.late)

    def clock_off(self, step_s: float) -> str | None:
        """A sentence if an engine's times do not fit the phases, or are those of the others with an offset."""
        slack = CONTRADICTION * step_s
        ran, recorded_s = self.ran, self.recorded[self.ran.step]
        before = np.maximum(np.maximum(-ran.start, ran.submit - ran.start), ran.end - recorded_s)
        first = np.full((len(self.recorded), len(self.names)), np.nan)
        np.fmin.at(first, (ran.step, ran.engine), ran.start)
        used = ~np.isnan(first).all(axis=0)
        # Engines start together; one that is late by the same time in every step has another clock.
        late = np.nanmedian(first[:, used], axis=0)
        late -= late.min()
        late[np.nanmax(first[:, used], axis=0) - np.nanmin(first[:, used], axis=0) > slack] = 0.0
        if before.max() > slack:
            worst = int(before.argmax())
            name, late_s = self.names[ran.engine[worst]], float(before[worst])
        elif late.max() > slack:
            name, late_s = self.names[np.flatnonzero(used)[late.argmax()]], float(late.max())
        else:
            return None
        return (
            f"trajectories of {short(name)} lie {late_s:.2f} s outside their generations: its clock or their steps are"
            " off"
        )


class Steps:
    """The recorded steps that are whole: when their generation, reward, training and sync were, [steps], seconds."""

    def __init__(self, timeline: RlTimeline) -> None:
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
        self.trains = bool(trainer)
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
        self.numbers, self.left_out = numbers[whole], np.delete(numbers, whole).tolist()
        spans = {name: tuple(times[whole] for times in span) for name, span in self.spans.items()}
        self.spans = {name: span for name, span in spans.items() if not np.isnan(span[0]).all()}
        self.generate_start, self.generate_end = generate[0][whole], generate[1][whole]
        self.reward_end = np.fmax(reward[1][whole], self.generate_end)
        self.reward_s = np.nan_to_num(reward[2][whole])
        self.train_start, self.sync_start, self.sync_end = started[whole], sync[0][whole], sync[1][whole]
        early = np.flatnonzero(self.sync_start[1:] < self.sync_end[:-1] - _AT_ONCE_S)
        if len(early):
            first, then = self.numbers[early[0] : early[0] + 2].tolist()
            raise FormatError(
                f"step {then} ends before step {first} has ended: two attempts, or two runs; give the records of one"
            )

    @property
    def after_generation(self) -> list[str]:
        """Phases that begin once the generation of their step has ended."""
        early = {name: np.nanmedian(start - self.generate_end) for name, (start, _, _) in self.spans.items()}
        return [name for name, late_s in early.items() if late_s >= -_AT_ONCE_S]

    @property
    def step_times(self) -> Floats:
        """From the end of a sync to that of the next, after the warm-up."""
        return np.diff(self.sync_end)[WARM_UP - 1 :]

    def staleness(self) -> int:
        """Updates that the weights of a generation lacked: by the recorded versions, else by the times."""
        trajectories = self.trajectories
        if trajectories is not None:
            has_version = (trajectories.version >= 0) & (trajectories.step >= self.numbers[WARM_UP])
            if has_version.any():
                return max(0, int(np.median(trajectories.step[has_version] - trajectories.version[has_version])))
        synced = np.searchsorted(self.sync_end, self.generate_start + _AT_ONCE_S, side="right")
        return max(0, int(np.median((np.arange(len(self.numbers)) - synced)[WARM_UP:])))

    def loop(self) -> Loop:
        """The steps as a loop."""
        staleness = self.staleness()
        never = np.full(len(self.numbers), -np.inf)
        generated, synced, weights = never.copy(), never.copy(), never.copy()
        generated[1:], synced[1:] = self.generate_end[:-1], self.sync_end[:-1]
        weights[1 + staleness :] = self.sync_end[: max(0, len(never) - 1 - staleness)]
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
        present = np.flatnonzero(~np.isnan(starts))
        order = present[np.argsort(starts[present])]
        reached = np.concatenate(([first], np.maximum.accumulate(ends[order])))
        gaps = np.maximum(np.append(starts[order], last) - np.maximum(reached, first), 0.0)
        return float(gaps.sum()) / len(self.step_times)


def _span(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, ...]:
    """Start and end of a phase in each step, and for how long it was in it, nan in steps without it."""
    first, last = _extent(numbers, step, start, end)
    step_index, reached, total = np.searchsorted(numbers, step), first.copy(), last - last
    for row in np.lexsort((start, step_index)).tolist():  # several ranks may record a phase, each its own part
        total[step_index[row]] += max(0.0, end[row] - max(start[row], reached[step_index[row]]))
        reached[step_index[row]] = max(reached[step_index[row]], end[row])
    return first, last, total


def _extent(numbers: Ints, step: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The first start and the last end in each step, nan in steps without any."""
    first, last = np.full(len(numbers), np.nan), np.full(len(numbers), np.nan)
    step_index = np.searchsorted(numbers, step)
    np.fmin.at(first, step_index, start)
    np.fmax.at(last, step_index, end)
    return first, last


def _least(columns: list[Floats], nothing: Floats) -> Floats:
    """The least of several columns, where any has a value."""
    return np.asarray(np.fmin.reduce([nothing, *columns]))
