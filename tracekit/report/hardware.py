"""What a job would take on other GPUs: `gpus` of a report for `--gpu`, and its table.

In: what `analysis/hardware/` found. Out: `OnGpu`, plain data. docs/hardware.md explains the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tracekit.base.text import printable, seconds, short
from tracekit.report.section import Table

Limit = Literal["compute", "communication", "host"]


class OtherStep(Struct, frozen=True):
    """A step, seconds: as it is `now`, and as it would be, with a 90 % interval."""

    now: float
    value: float
    low: float
    high: float


class OtherStepTime(OtherStep, frozen=True):
    """`unprofiled`: the same without the profiler that recorded the job; None if its cost is not known."""

    unprofiled: OtherStep | None

    @property
    def in_production(self) -> OtherStep:
        """Without the profiler, as far as that is known."""
        return self.unprofiled or self


class ScaledKind(Struct, frozen=True):
    """Ops of one kind, by how their time was found: the nearest measured `shapes`, the `class` of such kernels, the
    `roofline` of both cards, or `unchanged`. `share`: of the time of all ops; `factor`: times as long.
    """

    kind: str
    tier: Literal["shapes", "class", "roofline", "unchanged"]
    share: float
    factor: float


class MemoryOfGpu(Struct, frozen=True):
    """GB that the job reserves, and that the card has; None if unknown."""

    needed: float | None
    has: float | None


class Balanced(Struct, frozen=True):
    """The same GPUs with the batch shared out by speed. `shares`: of each replica, 1 for an equal share."""

    step_time_s: float
    shares: dict[str, float]


class OnGpu(Struct, frozen=True, kw_only=True, tag="card", tag_field="about"):
    """One answer to `--gpu`. `selection`: the ops that run on that GPU, None for all. `speedup`: now / value, without
    the profiler as far as that is known. `bottleneck`: what most of the step then waits for. `ties`: other answers, by
    the position in `gpus`, -1 for the job as it is, whose intervals overlap with this one.
    """

    gpu: str
    selection: str | None
    precision: str | None
    step_time_s: OtherStepTime
    speedup: float
    tiers: list[ScaledKind]
    fits: bool | None
    memory_gb: MemoryOfGpu
    bottleneck: Limit
    balanced: Balanced | None
    ties: list[int]
    warnings: list[str]


def hardware_table(answers: Sequence[OnGpu]) -> Table:
    """A row for each GPU, in the order asked."""
    rows = tuple(
        (
            _name(answer),
            seconds(answer.step_time_s.in_production.value),
            _interval(answer.step_time_s.in_production),
            "tie" if _NOW in answer.ties else f"{answer.speedup:.2f}x",
            _tier(answer),
            answer.bottleneck,
        )
        for answer in answers
    )
    return Table("Other GPUs", ("GPU", "step", "90% interval", "speedup", "tier", "limit"), rows, _note(answers))


_NOW = -1
_WIDEST = 20


def _name(answer: OnGpu) -> str:
    precision = f" in {answer.precision}" if answer.precision else ""
    place = f" on {printable(answer.selection)}" if answer.selection else ""
    return f"{short(answer.gpu.removeprefix('NVIDIA '), _WIDEST)}{precision}{place}"


def _interval(step: OtherStep) -> str:
    low, high = seconds(step.low), seconds(step.high)
    same_unit = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same_unit else low} to {high}"


def _tier(answer: OnGpu) -> str:
    """The tier of most of the time that is scaled, and its share of that."""
    shares: dict[str, float] = {}
    for kind in answer.tiers:
        if kind.tier != "unchanged":
            shares[kind.tier] = shares.get(kind.tier, 0.0) + kind.share
    if not shares:
        return "unchanged"
    tier = max(shares, key=lambda name: shares[name])
    return f"{tier} {shares[tier] / sum(shares.values()):.0%}"


def _note(answers: Sequence[OnGpu]) -> str:
    """What all rows have in common, and what to know of single ones."""
    now = answers[0].step_time_s
    clock = " without the profiler" if now.unprofiled else ""
    notes = [
        f"a step takes {seconds(now.in_production.now)} now{clock}; overlapping intervals are a tie",
        "tier: how most of the scaled time was found (docs/hardware.md)",
    ]
    for answer in answers:
        if answer.balanced is not None:
            notes.append(
                f"with the batch shared out by speed, {seconds(answer.balanced.step_time_s)} on {_name(answer)}"
            )
        if answer.fits is False:
            needed, has = answer.memory_gb.needed or 0.0, answer.memory_gb.has or 0.0
            notes.append(f"it does not fit on {_name(answer)}: {needed:.1f} GB are reserved, the card has {has:.1f}")
    warnings = dict.fromkeys(printable(warning) for answer in answers for warning in answer.warnings)
    return "; ".join([*notes, *warnings])
