"""A run of post-training that can be replayed, whatever was recorded of it, and the changes that have prices.

In: a `PhaseLog`; text, for a `Scenario`. Out: `PostTrainingRun`, the interface of `LoggedRun` (phases as logged, whose
prices need no times of requests) and `TimedRun`; and `Loop`: generation j begins once generation j-1 and the sync of
step j-1-k have ended, where k is the staleness; training j begins once reward j and sync j-1 have.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import saving_error_s
from tracekit.analysis.rl.account import RlAccount, Run, leading, unlike
from tracekit.base.errors import SelectionError
from tracekit.base.text import quoted
from tracekit.report.rl_step import Loss, LossTime, PhaseTime, Price, Sides, ToolsBound
from tracekit.trace.post_training import ROLLOUT_IDLE, TOOL_CALLS, TOOLS, TRAINER_IDLE, TRAINER_WAIT, PhaseLog, StepTime

if TYPE_CHECKING:
    from tracekit.analysis.rl.timed import Generations

#: Phases that exceed the step by this share contradict it. Chosen.
CONTRADICTION = 0.01
#: An assumption of prices with staleness.
SIDE_BY_SIDE = "generation and training take as long side by side"
#: Why nothing that goes on during the training has a price.
NO_TRAINING = "the time of the training is not known; state it with train=S"
#: Why nothing has a price after too few measured steps.
_FEW_STEPS = "{} measured, which {} not show how steps differ; record more"
_COUNTS = {1: ("one step was", "does"), 2: ("two steps were", "do")}
#: What is priced if nothing is asked for; without trajectories, the first alone.
USUAL = ("staleness=1", "partial=0.9", "longest-first")
#: ... and more engines by this share, if requests queue. Chosen.
_MORE_ENGINES = 0.25
_WORDS = re.compile(
    r"staleness=(?P<staleness>-?\d{1,18})|partial=(?P<partial>[-+\w.]+)|engines=(?P<engines>-?\d{1,18})"
    r"|split=(?P<rollout>-?\d{1,18}):(?P<trainer>-?\d{1,18})|(?P<longest_first>longest-first)"
    r"|generate=(?P<generate>[-+\w.]+)|train=(?P<train>[-+\w.]+)"
)
_MOST_STEPS, _MOST_GPUS = 9_999, 999_999
#: Steps at the beginning that are no part of a mean: a run starts with empty pipelines. Chosen.
WARM_UP = 2


class Assumed(Struct, frozen=True):
    """What the price of a scenario rests on. `missing`: why it has none. `error_s`: how far the step can be off because
    of `assumes`. `oldest_sample_steps`: as of `Price`.
    """

    missing: str | None = None
    assumes: tuple[str, ...] = ()
    error_s: float = 0.0
    oldest_sample_steps: int | None = None


class PostTrainingRun(ABC):
    """A run. `steps`: numbers of the steps that count, [steps]; `recorded`: seconds of each, `step_s` in the mean;
    `phases`: seconds of each phase in each of them. `flagged`: why the times contradict each other, None if they do
    not. `generations`: its generations, None without trajectories. `stale`: it generates while it trains. `fewest`:
    fewer steps are no sample of a run; a log shows nothing of what is within them, and needs more.
    """

    steps: Ints
    recorded: Floats
    step_s: float
    phases: Mapping[str, Floats]
    flagged: str | None
    generations: Generations | None = None
    stale: bool = False
    fewest: ClassVar[int] = 2

    @abstractmethod
    def step_times(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        """Return the seconds of each replayed step without some losses and under an alternative, [steps]."""

    @abstractmethod
    def assumed(self, scenario: Scenario) -> Assumed:
        """Return what a price rests on. Raises SelectionError for a scenario without the GPUs that it needs."""

    @abstractmethod
    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        """Return where the mean step went, and what these alternatives save. Raises SelectionError, see `assumed`."""

    def _account(self, scenarios: Sequence[Scenario], losses: list[LossTime], **fields: Any) -> RlAccount:
        """The account with these losses. `fields`: those that depend on what was recorded."""
        usual = self.usual
        spent = [
            PhaseTime(name, float(seconds.mean()), float(seconds[usual].mean()))
            for name, seconds in self.phases.items()
        ]
        return RlAccount(
            step_s=self.step_s,
            phases=sorted(spent, key=lambda phase: -phase.seconds),
            flagged=self.flagged,
            doubt=self.doubt,
            losses=losses,
            leading=leading(losses, self.step_s),
            what_if=[self.price(scenario) for scenario in scenarios],
            **fields,
        )

    @property
    def usual(self) -> Bools:
        """Mask of the steps that are like the others, [steps]."""
        return np.ones(len(self.steps), np.bool_)

    @cached_property
    def unchanged(self) -> Floats:
        """Seconds of each replayed step, [steps]."""
        return self.step_times()

    @property
    def replay_error_s(self) -> float:
        """By how much the replay misses the mean step."""
        return abs(float((self.unchanged - self.recorded).mean()))

    @property
    def replayed_words(self) -> str:
        """How far the replay is off."""
        words = f"the replayed step is off by {self.replay_error_s / self.step_s:.1%}"
        if self.generations is None:
            return words
        error, engine_error = abs(self.generations.error), self.generations.engine_error
        return f"{words}, its generation by {error:.1%}, engines' requests by up to {engine_error:.1%}"

    @property
    def doubt(self) -> str | None:
        """Why nothing has a price: times contradict each other, the replay misses the step or the requests of an
        engine, or no interval is known. None if there are prices.
        """
        engine_error = 0.0 if self.generations is None else self.generations.engine_error
        if self.flagged:
            return self.flagged
        if max(self.replay_error_s / self.step_s, engine_error) > VERDICT.largest_discrepancy:
            return f"{self.replayed_words}, more than {VERDICT.largest_discrepancy:.0%}"
        return _FEW_STEPS.format(*_COUNTS[len(self.recorded)]) if len(self.recorded) < self.fewest else None

    def error_s(self, saving: Floats, scenarios: Sequence[Scenario] = ()) -> float:
        """How far a mean saving, of [steps], can be off under these alternatives: by what the replay misses, by what
        they assume, and by the scatter of steps, each of which has its own prompts.
        """
        replay_s = max(self.replay_error_s, 0.0 if self.generations is None else self.generations.error_s)
        return saving_error_s(saving, replay_s, 1) + sum(self.assumed(scenario).error_s for scenario in scenarios)

    def price(self, scenario: Scenario) -> Price:
        """Return what the step would take. Raises SelectionError, see `assumed`."""
        assumed = Assumed(self.doubt) if self.doubt else self.assumed(scenario)
        if assumed.missing:
            return Price(scenario.text, None, None, None, None, None, assumed.missing)
        saving = self.unchanged - self.step_times(scenario=scenario)
        saved_s, error_s = float(saving.mean()), self.error_s(saving, [scenario])
        step_s = self.step_s - saved_s
        bounds = max(step_s - error_s, 0.0), step_s + error_s
        return Price(
            scenario.text, step_s, *bounds, saved_s, assumed.oldest_sample_steps, "; ".join(assumed.assumes) or None
        )


def contradiction(phases_s: float, step_s: float) -> str | None:
    """A sentence if phases take longer than the step that contains them."""
    if phases_s <= step_s * (1 + CONTRADICTION):
        return None
    return (
        f"the phases of a step take {phases_s:.2f} s, {phases_s / step_s - 1:.1%} more than the step itself:"
        " they overlap, or the timers are of different steps"
    )


def more_engines(engines: int) -> int:
    """The number of engines to price where requests queue."""
    return math.ceil(engines * (1 + _MORE_ENGINES))


class Without(Struct, frozen=True):
    """A run without one of its losses."""

    loss: Loss


class Scenario(Struct, frozen=True):
    """A run changed in some ways; None: as recorded.

    `staleness`: steps that the weights of a generation may lag behind. `partial`: share of its requests after which a
    generation ends. `engines`: their number. `rollout`, `trainer`: GPUs of each. `longest_first`: requests start and
    are dealt out by length. `generate_s`, `train_s`: seconds that these phases take.
    """

    text: str
    staleness: int | None = None
    partial: float | None = None
    engines: int | None = None
    rollout: int | None = None
    trainer: int | None = None
    longest_first: bool = False
    generate_s: float | None = None
    train_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Read a scenario. Raises SelectionError."""
        settings: dict[str, str] = {}
        for part in re.split(r",| \+ ", text):
            match = _WORDS.fullmatch(part.strip())
            if match is None:
                raise SelectionError(
                    f"{quoted(text)}: {quoted(part)} is none of staleness=K, partial=Q, engines=N, split=A:B,"
                    " longest-first, generate=S, train=S"
                )
            stated = {key: value for key, value in match.groupdict().items() if value is not None}
            if not settings.keys().isdisjoint(stated):
                raise SelectionError(f"{quoted(text)}: {quoted(part)} states once more what is stated before")
            settings |= stated

        def whole(key: str, least: int, most: int) -> int | None:
            value = int(settings[key]) if key in settings else None
            if value is not None and not least <= value <= most:
                raise SelectionError(f"{quoted(text)}: {value} is not in the range {least} to {most:,}")
            return value

        def real(key: str, most: float) -> float | None:
            try:
                value = float(settings[key]) if key in settings else None
            except ValueError:
                value = math.nan
            if value is not None and not 0 < value <= most:
                raise SelectionError(f"{quoted(text)}: {settings[key]} is not a number above 0 and at most {most:g}")
            return value

        return cls(
            text,
            staleness=whole("staleness", 0, _MOST_STEPS),
            partial=real("partial", 1.0),
            engines=whole("engines", 1, _MOST_GPUS),
            rollout=whole("rollout", 1, _MOST_GPUS),
            trainer=whole("trainer", 1, _MOST_GPUS),
            longest_first="longest_first" in settings,
            generate_s=real("generate", 1e12),
            train_s=real("train", 1e12),
        )

    @property
    def regenerates(self) -> bool:
        """Whether the generation itself has to be replayed."""
        return bool(self.partial or self.engines or self.rollout or self.longest_first)


class Gpus(Struct, frozen=True):
    """GPUs of the rollout and of the trainer, as recorded."""

    rollout: int
    trainer: int

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """Read `rollout=A,trainer=B`. Raises SelectionError."""
        match = re.fullmatch(r"rollout=([1-9]\d{0,5}),trainer=([1-9]\d{0,5})", text.replace(" ", ""))
        if match is None:
            raise SelectionError(f"--gpus {quoted(text)}: expected the GPUs of both roles, such as rollout=6,trainer=2")
        return cls(int(match[1]), int(match[2]))


class Loop(Struct, frozen=True, eq=False):
    """A run. All arrays are [steps], in seconds.

    `generate_late`, `train_late`: what generation and training start later than the rule says; replays keep it.
    `reward`: from the end of the generation to that of the reward; `train`: from the start of the training to that of
    the sync.
    """

    generate: Floats
    reward: Floats
    train: Floats
    sync: Floats
    generate_late: Floats
    train_late: Floats
    staleness: int

    def replace(self, **changed: Floats | int) -> Loop:
        """The same loop with some durations changed."""
        return msgspec.structs.replace(self, **changed)

    def step_times(self) -> Floats:
        """The replayed steps after the warm-up, from the end of a sync to that of the next."""
        return np.diff(self.sync_ends())[WARM_UP - 1 :]

    def sync_ends(self) -> Floats:
        """When each sync ends, from the start of the first generation."""
        synced: list[float] = []
        generated = last_sync = 0.0
        columns = (self.generate, self.reward, self.train, self.sync, self.generate_late, self.train_late)
        for number, (generate, reward, train, sync, generate_late, train_late) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            weights = synced[number - 1 - self.staleness] if number > self.staleness else 0.0
            generated = max(generated, weights) + generate_late + generate
            last_sync = max(generated + reward, last_sync) + train_late + train + sync
            synced.append(last_sync)
        return np.array(synced)


class LoggedRun(PostTrainingRun):
    """All logged `steps`. With other durations, or in another order, the unaccounted time may go or double."""

    fewest: ClassVar[int] = 3

    def __init__(self, log: PhaseLog) -> None:
        self.log, self.steps, self.recorded, self.phases = log, log.steps, log.step_s, log.phases
        self.step_s = float(log.step_s.mean())
        self.mean = {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}
        accounted_s = float(self._accounted().mean())
        self.unaccounted_s = None if log.step_time is StepTime.SUMMED else self.step_s - accounted_s
        self.flagged = contradiction(accounted_s, self.step_s) or log.contradiction
        self.stale = log.stale or log.step_time is StepTime.OVERLAPPED
        self.unlike = unlike(log.steps, log.step_s, log.phases)

    @property
    def usual(self) -> Bools:
        return np.isin(self.steps, self.unlike.numbers, invert=True)

    def step_times(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        return np.asarray(self.recorded - self._accounted() + self._accounted(without, scenario))

    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        losses: list[LossTime] = []
        if not self.flagged and not self._side_by_side(None):
            losses = [LossTime(loss, self.mean[loss]) for loss in ("reward", "sync") if loss in self.mean]
        return self._account(
            scenarios,
            losses,
            job=Run(self.log.format, len(self.steps), 0, 0, "phases"),
            length_s=float(self.recorded.sum()),
            generation_s=self.mean.get("generate"),
            staleness=None if self._side_by_side(None) or "generate" not in self.mean else 0,
            unaccounted_s=self.unaccounted_s,
            left_out=list(self.log.left_out),
            restarts=list(self.log.restarts),
            unlike=self.unlike,
            sides=self._sides(),
            tools=self._tools(),
        )

    def _sides(self) -> Sides | None:
        """How much each side idles, as logged, or while the trainer waits for samples; None if neither is known."""
        idle = {
            name: float(np.nanmean(self.log.measures[name]))
            for name in (TRAINER_IDLE, ROLLOUT_IDLE)
            if name in self.log.measures
        }
        if self.log.stale and TRAINER_WAIT in self.mean:
            idle.setdefault(TRAINER_IDLE, self.mean[TRAINER_WAIT] / self.step_s)
        return Sides(idle.get(TRAINER_IDLE), idle.get(ROLLOUT_IDLE)) if idle else None

    def _tools(self) -> ToolsBound | None:
        """What tools cost at most; None if the log has no tool calls."""
        most_s, calls_s = self.log.measures.get(TOOLS), self.log.measures.get(TOOL_CALLS)
        mean_s = None if calls_s is None else float(np.nanmean(calls_s))
        if most_s is None:
            return ToolsBound([], None, None, mean_s) if mean_s else None
        most_s = np.minimum(np.nan_to_num(most_s), self.recorded)
        steps, share = self.steps[most_s > 0].tolist(), float(most_s.sum() / self.recorded.sum())
        return ToolsBound(steps, float(most_s.mean()), share, mean_s)

    def assumed(self, scenario: Scenario) -> Assumed:
        if scenario.regenerates and (scenario.generate_s is None or (scenario.rollout and scenario.train_s is None)):
            return Assumed("needs trajectories, or generate=S and train=S: phases do not show what requests take")
        if scenario.staleness is not None and self.log.stale:
            return Assumed("the job trains on stale samples already")
        if "generate" not in self.mean and scenario.generate_s is None:
            return Assumed("the log lacks the time of the generation, or has only what no training hides")
        if scenario.staleness is not None and "train" not in self.mean and scenario.train_s is None:
            return Assumed(NO_TRAINING)
        assumes = [SIDE_BY_SIDE] * self._side_by_side(scenario) + ["no time is spent outside phases"] * (
            self.unaccounted_s is None
        )
        return Assumed(None, tuple(assumes), abs(self.unaccounted_s or 0.0), scenario.staleness or None)

    def _accounted(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        """Seconds of each step that phases make up, [steps]. Side by side, it is what is longer in the mean step."""
        nothing = np.zeros_like(self.recorded)
        phases = {phase: took for phase, took in self.phases.items() if phase not in without}
        generate = phases.pop("generate", nothing)
        others = sum(phases.values(), nothing)
        if scenario is not None:
            generate = generate if scenario.generate_s is None else np.full_like(nothing, scenario.generate_s)
            others = others if scenario.train_s is None else np.full_like(nothing, scenario.train_s)
        if self._side_by_side(scenario):
            return generate if generate.mean() >= others.mean() else others
        return np.asarray(generate + others)

    def _side_by_side(self, scenario: Scenario | None) -> bool:
        """Whether generation and training go side by side."""
        recorded = self.log.step_time is StepTime.OVERLAPPED
        return recorded if scenario is None or scenario.staleness is None else scenario.staleness > 0
