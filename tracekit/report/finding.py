"""Findings: what is wrong, where, since when, how certain, on what evidence, and at what cost.

In: what detectors find. Out: `Finding`, one row of the table that `whatif` prints and that `--json` contains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from typing import Any

from msgspec import Struct

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.base.text import MOST_CONFIDENT, cost, hidden, seconds
from tracekit.report.metrics import MetricTest
from tracekit.trace.model import Worker

#: Report a cause that has neither culprit nor fix only if it takes at least this share of the step: every job needs an
#: explanation of a loss that large.
SMALLEST_BLAMELESS_SHARE = 0.05


class Link(Struct, frozen=True, order=True):
    """The connection of a stage to the next one on one DP rank; the last stage's is to the first."""

    dp_rank: int
    pp_rank: int
    next_pp_rank: int

    @property
    def ends(self) -> tuple[Worker, Worker]:
        """The workers that it joins."""
        return Worker(self.dp_rank, self.pp_rank), Worker(self.dp_rank, self.next_pp_rank)

    def __str__(self) -> str:
        return f"dp {self.dp_rank}, stage {self.pp_rank} to {self.next_pp_rank}"


class Place(Struct, frozen=True):
    """The place of a cause. An empty field makes no statement; if all are empty, the cause is in the whole job.

    `ranks`: global ranks, if a cause is on only some of a worker's ranks. `chunks`: model chunks of the stages, if a
    cause is in only some of them.
    """

    workers: tuple[Worker, ...] = ()
    ranks: tuple[int, ...] = ()
    pp_ranks: tuple[int, ...] = ()
    dp_ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    host: str | None = None
    steps: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.host:
            parts.append(self.host)
        if self.workers:
            parts.append(("worker " if len(self.workers) == 1 else "workers ") + _listed(self.workers))
        if self.ranks:
            parts.append(("rank " if len(self.ranks) == 1 else "ranks ") + _listed(self.ranks))
        if self.links:
            parts.append("; ".join(str(link) for link in self.links))
        if self.pp_ranks:
            of = f"chunk {_listed(self.chunks)} of " if self.chunks else ""
            parts.append(f"{of}stage {_listed(self.pp_ranks)}")
        if self.dp_ranks:
            parts.append("dp " + _listed(self.dp_ranks))
        if self.steps:
            parts.append("steps " + _listed(self.steps))
        return ", ".join(parts) or "whole job"


def _listed(items: tuple[Any, ...]) -> str:
    shown = " ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown} and {len(items) - 6} more"


class Unit(StrEnum):
    """The unit of an evidence figure, which decides how it is displayed."""

    COUNT = ""
    SHARE = "share"
    FACTOR = "times"
    SECONDS = "s"
    NATS = "nats"  # log-likelihood ratio


class Figure(Struct, frozen=True):
    """A figure that supports a cause, with the threshold that it exceeds; a threshold of 0 means that it is only
    informative.
    """

    name: str
    value: float
    needed: float
    unit: Unit = Unit.COUNT

    @property
    def words(self) -> str:
        """The figure in words: `compute beyond that of its peers: 80% (4% needed)`."""
        needed = f" ({self._said(self.needed)} needed)" if self.needed else ""
        return f"{self.name}: {self._said(self.value)}{needed}"

    def _said(self, value: float) -> str:
        match self.unit:
            case Unit.SHARE:
                return f"{value:.0%}" if abs(value) >= 0.1 or value == round(value, 2) else f"{value:.1%}"
            case Unit.FACTOR:
                return f"{value:.3g} times"
            case Unit.SECONDS:
                return seconds(value)
            case Unit.NATS:
                return f"10^{value / log(10):.0f} times"
            case Unit.COUNT:
                return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


class Spent(Struct, frozen=True):
    """What a GPU, or the host that launches its work, spends time on: the object of a finding in a recording.

    `reason`: an `IdleReason`, or transfer, kernel, recompute, launch-bound. `name`: its operator, call, function or
    kernel, the longest of `names`; `where`: the innermost line of Python outside of torch, "" if unknown. `count`: how
    often; `seconds`: in all. `cannot_tell`: why its price is not known for sure and what to record next, None if it is.
    """

    reason: str
    name: str
    where: str
    names: tuple[str, ...]
    count: int
    seconds: float
    cannot_tell: str | None = None


class SeenOnce(Struct, frozen=True):
    """The steps in which most of a loss was seen: one or two, so that no rate follows from it.

    `lost_s`: of each of `steps`, beyond what the others lose; `others_s`: what the usual one of the others loses;
    `of_steps`: how many there are in all.
    """

    steps: tuple[int, ...]
    lost_s: tuple[float, ...]
    others_s: float
    of_steps: int

    @property
    def words(self) -> str:
        """Where it was seen, and what is seen of it elsewhere: "step 4: +244.0 ms; the others lose 300 us each"."""
        each = zip(self.steps, self.lost_s, strict=True)
        others = f"lose {seconds(self.others_s)} each" if self.others_s > 0 else "lose nothing"
        return f"{'; '.join(f'step {step}: +{seconds(lost_s)}' for step, lost_s in each)}; the others {others}"


@dataclass(frozen=True, eq=False)
class Finding:
    """One cause of a job's slowness.

    `effect`: what it does, as a phrase with its size in it; `evidence`: the figures behind it. `saved_s`: mean step
    seconds saved if only this cause goes; `alone_s`: mean step seconds that it costs if all other named causes are
    gone. The two differ if causes hide each other. `confidence`: 0 to 1. `time`: how it develops over the steps, None
    if that is meaningless. `saved_when_acting_s`: as `saved_s`, over the steps in which it acts, None if that is all of
    them. `change`: the job without the cause, None if the trace is at fault
    and not the job; `without_s`: its step times, seconds, [steps]. `bound`: `saved_s` is an
    upper bound. `every_step`: it shows in nearly all steps, though its kind acts by chance; `by_chance`: no step is
    certain to have it. `whole`: what seconds are of, "step" or "recording". `spent`: what the time of a recording is
    spent on. `saves_step_s`: what its end saves of a step as it runs without the profiler, seconds; None if that is not
    known, or if no profiler recorded the job. `once`: the steps in which it was seen, None if it returns. `follows`:
    kinds of finding that have to be seen to first. `excess`: as for a candidate. `tests`: what metrics say of its
    machines; `hardware`: whether they show these at fault, None if nobody asked them.
    """

    kind: str
    where: Place
    title: str
    signature: str
    effect: str
    evidence: tuple[Figure, ...]
    confidence: float
    saved_s: float
    alone_s: float
    refuted_by: str
    next_check: str
    suggested_fix: str
    time: TimePattern | None = None
    saved_when_acting_s: float | None = None
    bound: bool = False
    every_step: bool = False
    by_chance: bool = False
    change: Any = field(default=None, repr=False, compare=False)
    without_s: Floats | None = field(default=None, repr=False, compare=False)
    whole: str = "step"
    spent: Spent | None = None
    saves_step_s: Estimate | None = None
    once: SeenOnce | None = None
    follows: tuple[str, ...] = ()
    excess: float | None = None
    tests: tuple[MetricTest, ...] = ()
    hardware: bool | None = None

    @property
    def worth_s(self) -> float:
        """By what findings are ordered: what a step saves without the profiler, if the job was recorded with one."""
        return self.saved_s if self.saves_step_s is None else self.saves_step_s.value

    @property
    def returning_share(self) -> float:
        """The share of what it costs that returns in other steps, from which a rate follows; 1 if all of it does."""
        if self.once is None:
            return 1.0
        lost_s, others_s = sum(self.once.lost_s), self.once.others_s * self.once.of_steps
        return others_s / (lost_s + others_s)

    @property
    def hidden(self) -> bool:
        """True if the cause costs little until other causes are gone."""
        return hidden(self.saved_s, self.alone_s)

    @property
    def cost_s(self) -> float:
        """Mean step seconds saved without it: in the job as it is or, if it hides behind others, once they are gone."""
        return self.alone_s if self.hidden else self.saved_s

    @property
    def priced(self) -> bool:
        """Whether a replay tells what it costs; else the trace is at fault, or nothing is wrong."""
        return self.change is not None

    @property
    def costs(self) -> str:
        """What it costs, in words."""
        if self.saves_step_s is not None:
            return f"costs {'at most ' * self.bound}{seconds(self.worth_s)} a step without the profiler"
        return cost(self.saved_s, self.alone_s, self.whole, bound=self.bound)

    @property
    def since_step(self) -> int | None:
        """First step of a lasting change or of a run of slow steps; None: from the beginning."""
        if self.time is not None and self.time.since_step is not None:
            return self.time.since_step
        return self.where.steps[0] if self.where.steps else None

    @property
    def when(self) -> str:
        """When it acts, in words."""
        if self.time is not None and self.time.period is not None:
            return f"every {self.time.period} steps"
        if self.time is not None and self.time.since_step is not None:
            return f"since step {self.since_step}"
        steps = self.where.steps or (() if self.time is None else self.time.slow_steps)
        if steps:
            return f"in {len(steps)} steps, {steps[0]} the first" if len(steps) > 1 else f"in step {steps[0]}"
        if self.whole != "step":
            return f"over the {self.whole}"
        return "again and again" if self.by_chance else "in every step"

    @property
    def where_text(self) -> str:
        """Its place in words."""
        return str(self.where)


def confidence_from(figures: tuple[Figure, ...]) -> float:
    """Confidence from the weakest figure: 0.5 at its threshold, 0.75 at twice, 0.97 at five times the threshold."""
    ratios = [item.value / item.needed for item in figures if item.needed > 0]
    return 1 - float(0.5 ** min(ratios, default=1.0))


def as_confidence(value: float) -> float:
    """A confidence as JSON and texts give it: whole percent, and never more than 0.99."""
    return min(round(value, 2), MOST_CONFIDENT)
