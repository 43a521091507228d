"""A run of post-training under diagnosis.

In: a `PostTrainingRun`. Out: `RlSubject`. Its changes are `Without` and `Scenario`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.attribution import Parts
from tracekit.analysis.evidence.subject import JobKind, Subject
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.rl.account import RlAccount
from tracekit.analysis.rl.rl_run import USUAL, PostTrainingRun, Scenario, Without, more_engines
from tracekit.base.text import listed
from tracekit.report.finding import Place
from tracekit.trace.facts import RL_LOG, TRAJECTORIES, Lack


class RlSubject(Subject, frozen=True, eq=False):
    """One run, of which `gpus` are known."""

    kind: ClassVar[JobKind] = JobKind.POST_TRAINING
    run: PostTrainingRun
    gpus_known: int | None = None

    @cached_property
    def account(self) -> RlAccount:
        """Where its step went, and the prices of the usual alternatives: without trajectories, of the first of them,
        unless samples are stale already; if queueing leads, of more engines, too.
        """
        logged = () if self.run.stale else USUAL[:1]
        usual = USUAL if self.run.generations is not None else logged
        account = self.run.account([Scenario.parse(text) for text in usual])
        if account.leading != "queueing":
            return account
        more = Scenario.parse(f"engines={more_engines(account.job.engines)}")
        return structs.replace(account, what_if=[*account.what_if, self.run.price(more)])

    @property
    def gpus(self) -> int | None:
        """Those of both roles."""
        return self.gpus_known

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return (RL_LOG if self.run.generations is None else TRAJECTORIES).lacks

    @property
    def daily(self) -> bool:
        return self.gpus_known is not None and len(self.steps) > 1

    @property
    def steps(self) -> Int32s:
        return self.run.steps.astype(np.int32)

    @property
    def everywhere(self) -> str:
        engines = self.account.job.engines
        if engines > 1:
            return f"all {engines:,} engines"
        return "the only engine" if engines else "the whole loop"

    @cached_property
    def where_else(self) -> dict[str, str]:
        """See `Subject`: of uneven engines, those whose pace alone costs at least half of what all of that does."""
        generations = self.run.generations
        lost_s = next((loss.lost_s for loss in self.account.losses if loss.loss == "engines"), 0.0)
        if generations is None or not lost_s > 0:
            return {}
        slow = np.flatnonzero(generations.costs_of_pace() >= lost_s / 2).tolist()
        return {"engines": listed(generations.names[engine] for engine in slow)} if slow else {}

    @property
    def recorded_s(self) -> float:
        return self.account.step_s

    @property
    def slowdown(self) -> float:
        """The replayed step over that without any of the losses that cost something."""
        ideal_s = float(self.ideal.mean())
        return self.unchanged_s / ideal_s if ideal_s > 0 else float("nan")

    @cached_property
    def ideal(self) -> Floats:
        """Seconds of each step without any of the losses that cost something, [steps]."""
        return self.step_times([Without(row.loss) for row in self.account.losses if row.lost_s > 0])

    @property
    def noise(self) -> Parts:
        lost_s = self.unchanged_s - float(self.ideal.mean())
        return Parts(step_s=self.recorded_s, lost_s=lost_s, explained_s=lost_s, noise_s=0.0, error_s=0.0)

    def step_times(self, changes: Sequence[Any]) -> Floats:
        without = frozenset(change.loss for change in changes if isinstance(change, Without))
        return self.run.step_times(without, *_as_one(changes))

    def saving_error_s(self, saving: Floats, changes: Sequence[Any]) -> float:
        return self.run.error_s(saving, _as_one(changes))

    @property
    def replay_error(self) -> float:
        return self.run.replay_error_s / self.run.step_s

    def has(self, where: Place) -> bool:
        return where == Place()


def _as_one(changes: Sequence[Any]) -> list[Scenario]:
    """The scenarios among some changes, as one scenario if there are any."""
    texts = [change.text for change in changes if isinstance(change, Scenario)]
    return [Scenario.parse(",".join(texts))] if texts else []
