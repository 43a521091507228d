"""What a finding is made of: its place, its figures, the kind of loss, what time is spent on, and how certain it is.

In: what detectors find. Out: the parts of a `Finding` of a report; `LossKind`, and what a source must show for each.
"""

from __future__ import annotations

from enum import StrEnum
from math import log
from typing import Any

from msgspec import Struct

from tracekit.base.limits import Count, Finite, Ordinal, Seconds
from tracekit.base.text import MOST_CONFIDENT, seconds
from tracekit.trace.facts import Fact
from tracekit.trace.model import Worker

#: Report a cause that has neither culprit nor fix only if it takes at least this share of the step: every job needs an
#: explanation of a loss that large.
SMALLEST_BLAMELESS_SHARE = 0.05


#: What people call a kind of cause or fix, where its name in JSON is no phrase.
_NAMES = {
    "bad-worker": "slow rank",
    "planned-gc": "garbage collection in the same steps",
    "python-gc": "garbage collection",
    "slow-nic": "slow network card",
    "slow-p2p-link": "slow link",
}


def kind_words(kind: str) -> str:
    """A kind of cause, loss or fix as a phrase."""
    return _NAMES.get(kind, kind.replace("-", " "))


class Link(Struct, frozen=True, order=True):
    """The connection of a stage to the next one on one DP rank; the last stage's is to the first."""

    dp_rank: Ordinal  #: data-parallel rank
    pp_rank: Ordinal  #: stage at one end
    next_pp_rank: Ordinal  #: stage at the other

    @property
    def ends(self) -> tuple[Worker, Worker]:
        """The workers that it joins."""
        return Worker(self.dp_rank, self.pp_rank), Worker(self.dp_rank, self.next_pp_rank)

    def __str__(self) -> str:
        return f"dp {self.dp_rank}, stage {self.pp_rank} to {self.next_pp_rank}"


class Place(Struct, frozen=True):
    """The place of a cause. An empty field makes no statement; if all are empty, the cause is in the whole job."""

    workers: tuple[Worker, ...] = ()  #: workers; all lists empty and no host: the whole job
    ranks: tuple[Ordinal, ...] = ()  #: global ranks, where a cause sits on some ranks of a worker only
    pp_ranks: tuple[Ordinal, ...] = ()  #: pipeline stages
    dp_ranks: tuple[Ordinal, ...] = ()  #: data-parallel ranks
    links: tuple[Link, ...] = ()  #: p2p links
    host: str | None = None  #: host
    steps: tuple[Ordinal, ...] = ()  #: steps
    chunks: tuple[Count, ...] = ()  #: model chunks of the stages, if it is in only some of them

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
            of_chunks = f"model chunk {_listed(self.chunks)} of " if self.chunks else ""
            parts.append(f"{of_chunks}stage {_listed(self.pp_ranks)}")
        if self.dp_ranks:
            parts.append("dp " + _listed(self.dp_ranks))
        if self.steps:
            parts.append("steps " + _listed(self.steps))
        return ", ".join(parts) or "whole job"


def _listed(items: tuple[Any, ...]) -> str:
    listed = " ".join(str(item) for item in items[:6])
    return listed if len(items) <= 6 else f"{listed} and {len(items) - 6} more"


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
        needed = f" ({self._value_text(self.needed)} needed)" if self.needed else ""
        return f"{self.name}: {self._value_text(self.value)}{needed}"

    def _value_text(self, value: float) -> str:
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
    """What a GPU, or the host that launches its work, spends time on: the object of a finding in a recording."""

    reason: str  #: a reason of idle time, or `launch-bound`, `kernel`, `recompute`, `transfer`
    name: str  #: what it is about, the longest of `names`: operator, call, function, loader or kernel
    where: str  #: the innermost line of Python outside of torch, "" if unknown
    names: tuple[str, ...]  #: all that belongs to it, longest first
    count: Count  #: how often
    seconds: Seconds  #: host or GPU time in all
    cannot_tell: str | None = None  #: why its price is not sure, and what to record; null if it is


class SeenOnce(Struct, frozen=True):
    """The steps in which most of a loss was seen: one or two, so that no rate follows from it."""

    steps: tuple[Ordinal, ...]  #: the steps
    lost_s: tuple[Finite, ...]  #: what each of them loses beyond what the others lose
    others_s: Finite  #: what the usual one of the others loses
    of_steps: Count  #: number of steps in all

    @property
    def words(self) -> str:
        """Where it was seen, and what is seen of it elsewhere: "step 4: +244.0 ms; the others lose 300 us each"."""
        pairs = zip(self.steps, self.lost_s, strict=True)
        others = f"lose {seconds(self.others_s)} each" if self.others_s > 0 else "lose nothing"
        return f"{'; '.join(f'step {step}: +{seconds(lost_s)}' for step, lost_s in pairs)}; the others {others}"


def confidence_from(figures: tuple[Figure, ...]) -> float:
    """Confidence from the weakest figure: 0.5 at its threshold, 0.75 at twice, 0.97 at five times the threshold."""
    ratios = [item.value / item.needed for item in figures if item.needed > 0]
    return 1 - float(0.5 ** min(ratios, default=1.0))


def as_confidence(value: float) -> float:
    """A confidence as JSON and texts give it: whole percent, and never more than 0.99."""
    return min(round(value, 2), MOST_CONFIDENT)


class LossKind(StrEnum):
    """What most of the lost time is spent on."""

    STRAGGLER = "straggler"
    INPUT = "input-bound"
    HOST = "host-bound"
    COMMUNICATION = "communication-bound"
    COMPUTE = "compute-bound"
    IDLE = "idle"
    STALLS = "stalls"
    EVALUATION = "evaluation"
    QUEUEING = "queueing"
    TAIL = "tail"
    ENGINES = "engines"
    TOOLS = "tools"
    REWARD = "reward"
    SYNC = "sync"
    UNACCOUNTED = "unaccounted"
    PHASES = "phases"
    MINOR = "minor"
    BALANCED = "balanced"
    CONTRADICTION = "contradiction"


#: Losses of post-training.
OF_POST_TRAINING = frozenset(
    (LossKind.QUEUEING, LossKind.TAIL, LossKind.ENGINES, LossKind.TOOLS, LossKind.REWARD, LossKind.SYNC)
)
#: Kinds that name no loss to act on: it is small, or unknown. Only a balanced job loses nothing.
UNNAMED = frozenset((LossKind.UNACCOUNTED, LossKind.PHASES, LossKind.MINOR, LossKind.CONTRADICTION))


#: What a verdict of a kind rests on. It is not given where the source lacks that.
NEEDS = {
    LossKind.STRAGGLER: Fact.RANKS,
    LossKind.INPUT: Fact.COMPUTE,
    LossKind.HOST: Fact.COMPUTE,
    LossKind.COMMUNICATION: Fact.COMPUTE,
    LossKind.COMPUTE: Fact.COMPUTE,
    LossKind.IDLE: Fact.COMPUTE,
    LossKind.QUEUEING: Fact.REQUESTS,
    LossKind.TAIL: Fact.REQUESTS,
    LossKind.ENGINES: Fact.REQUESTS,
}
