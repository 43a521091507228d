"""What recorded times tell: the account of a step, its losses and prices, by replay.

In: a `RlTimeline`. Out: `TimedRun`. Losses and prices are differences between two replays, so that what the replay does
not explain of the recording is in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.rl.account import Loss, LossTime, RlAccount, Run
from tracekit.analysis.rl.generation import Generations
from tracekit.analysis.rl.loop import WARM_UP, Loop
from tracekit.analysis.rl.rl_run import NO_TRAINING, SIDE_BY_SIDE, Assumed, PostTrainingRun, contradiction
from tracekit.analysis.rl.scenario import Gpus, Scenario
from tracekit.analysis.rl.steps import Steps
from tracekit.base.errors import FormatError, SelectionError
from tracekit.trace.post_training import Format, RlTimeline

#: The losses within a generation.
_OF_REQUESTS: tuple[Loss, ...] = ("queueing", "tail", "engines", "tools")


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
        steps, (requests, engines) = (
            len(whole.numbers),
            (0, 0) if generations is None else (generations.count, len(generations.names)),
        )
        waits = whole.train_start[WARM_UP:] - whole.sync_end[WARM_UP - 1 : -1]
        return self._account(
            scenarios,
            losses,
            job=Run(Format.TRAJECTORIES, steps, requests, engines, "trajectories" if generations else "phases"),
            length_s=float(whole.sync_end[-1] - whole.generate_start[0]),
            replayed_s=float(self.unchanged.mean()),
            generation_s=self.generation_s,
            trainer_wait_s=float(waits.mean()),
            staleness=self.loop.staleness,
            unaccounted_s=whole.unaccounted_s(),
            generation=None if generations is None else generations.fitted(),
            left_out=whole.left_out,
            restarts=[],
            unlike=None,
            sides=None,
            tools=None,
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
        algorithm = scenario.partial is not None or changed.staleness > 0
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
