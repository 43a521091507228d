"""Has a run become slower than its baselines, by more than a limit and beyond the noise?

In: what their steps take. Out: a `Gate`: the verdict on the step and on each of its parts, and the ranks that became
slower. Some part is always the noisiest, so the intervals of all of them hold together: identical runs fail with a
probability of at most 1 %, whatever the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.by_label import Spent, SpentPart
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import (
    FEWEST_STEPS,
    MeanDifferences,
    differences_from_runs,
    differences_of_means,
    slowdown_by_step,
)
from tracekit.base.errors import SelectionError
from tracekit.base.text import counted, did_you_mean, listed, ranks_text, seconds, three_digits

#: Version of the JSON object; it increases whenever readers of the last version could break.
GATE_VERSION = 1
#: The name of the whole step among the parts.
STEP = "step"
#: The number of regressions in the sentence about them.
_MOST_NAMED = 3


class GateThresholds(Struct, frozen=True):
    """What the gate judges, and how surely."""

    #: Confidence of all intervals together. Definition.
    confidence: float = 0.99
    #: Judge parts of at least this share of the step, in either run. Chosen: smaller ones change no decision.
    smallest_share: float = 0.01
    #: A part may grow by the limit, or by the limit of this share of the step if it is smaller than that. Chosen.
    smallest_whole: float = 0.1


GATE = GateThresholds()


class Outcome(StrEnum):
    """What the noise allows to say."""

    PASSED = "pass"
    REGRESSION = "regression"
    SLOWER = "slower"  #: than the only baseline, which does not show how far identical runs differ
    CANNOT_TELL = "cannot tell"


#: The first of these that holds for a figure is that of the run.
_WORST_FIRST = (Outcome.REGRESSION, Outcome.SLOWER, Outcome.CANNOT_TELL, Outcome.PASSED)


#: Verdicts on a figure that has grown beyond the noise that is known.
SLOWER = (Outcome.REGRESSION, Outcome.SLOWER)


class Judged(Struct, frozen=True):
    """The verdict on the step, or on a part of it on the mean rank; seconds a step.

    `margin_s`: how far two identical runs may differ, None if there are too few steps to say. `allowed_s`: the largest
    increase that passes. `more_steps`: how many more steps of every run would tell, None if it can be told, or if it
    would take too many. `more_baselines`: how many more of them would tell where more steps do not, else None. `where`:
    which ranks became slower beyond chance, in words, if this did.
    """

    name: str
    outcome: Outcome
    before_s: float
    after_s: float
    margin_s: float | None
    allowed_s: float
    more_steps: int | None = None
    more_baselines: int | None = None
    where: str = ""

    @property
    def change(self) -> str:
        """The change and its margin, in words: as shares of the baseline, if it has this part."""
        change_s, margin_s = self.after_s - self.before_s, self.margin_s
        if not self.before_s:
            return f"{seconds(change_s)} more" + (f" ± {seconds(margin_s)}" if margin_s else "")
        return f"{change_s / self.before_s:+.1%}" + ("" if margin_s is None else f" ± {margin_s / self.before_s:.1%}")

    @property
    def sentence(self) -> str:
        """What it takes now, and where it became slower."""
        subject = "a step" if self.name == STEP else self.name
        change = f"{subject} takes {seconds(self.after_s)} instead of {seconds(self.before_s)} ({self.change})"
        return f"{change}, {self.where}" if self.where else change


class Runs(Struct, frozen=True):
    """One side of a gate: the names of its runs, and how many steps and runs they are."""

    name: str
    steps: int
    runs: int


class Gate(Struct, frozen=True, kw_only=True):
    """The verdict on a run, as `tracekit gate --json` prints it. `rows`: the step, then its parts. `noise`: how far
    identical runs differ, as a share, None if it was not given. `sentence`: without a full stop.
    """

    gate_version: int = GATE_VERSION
    outcome: Outcome
    sentence: str
    baseline: Runs
    run: Runs
    limit: float
    noise: float | None
    confidence: float = GATE.confidence
    rows: tuple[Judged, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, baseline: Runs, run: Runs, rows: tuple[Judged, ...], **fields: Any) -> Gate:
        """The worst verdict on any figure, in words. `fields`: the other fields."""
        outcome = min((row.outcome for row in rows), key=_WORST_FIRST.index)
        chosen = [row for row in rows if row.outcome is outcome]
        if outcome is Outcome.PASSED:
            sentence = f"{chosen[0].sentence}; nothing grew by more than {percent(fields['limit'])}"
        elif outcome in SLOWER:
            more = len(chosen) - _MOST_NAMED
            sentences = [row.sentence for row in chosen[:_MOST_NAMED]]
            sentence = "; ".join([*sentences, *([f"and {counted(more, 'more part')}"] if more > 0 else [])])
        else:
            sentence = _what_would_tell(baseline, run, chosen, fields["noise"])
        return cls(outcome=outcome, sentence=sentence, baseline=baseline, run=run, rows=rows, **fields)


def _what_would_tell(baseline: Runs, run: Runs, rows: Sequence[Judged], noise: float | None) -> str:
    """Why figures cannot be judged, and what to record."""
    several = baseline.runs > 1
    if min(baseline.steps, run.steps) < FEWEST_STEPS:
        where = "baselines" if several else "baseline"
        return f"{counted(run.steps, 'step')}, {baseline.steps} in the {where}: record at least {FEWEST_STEPS} of both"

    def need(row: Judged) -> tuple[bool, int, int]:
        unknown = row.more_steps is None and row.more_baselines is None
        return unknown, row.more_baselines or 0, row.more_steps or 0

    row = max(rows, key=need)
    differ = "more than so few steps show" if row.margin_s is None else f"up to {seconds(row.margin_s)}"
    if row.margin_s is not None and row.before_s:
        differ = f"up to {row.margin_s / row.before_s:.1%}"
    differ = f"the {row.name} of identical runs differs by {differ}"
    if row.more_baselines is not None:
        return f"{differ}: record {counted(row.more_baselines, 'more baseline')}"
    if row.more_steps is not None:
        return f"{differ}: record {counted(row.more_steps, 'more step')} of {'every run' if several else 'both'}"
    return differ if several or noise is not None else f"{differ}: record far more steps of both"


def percent(share: float) -> str:
    """A limit as people type it."""
    return f"{three_digits(100 * share)}%"


def judge(
    baselines: Sequence[Spent], run: Spent, limit: float, parts: Collection[str] = (), noise: float | None = None
) -> tuple[Judged, ...]:
    """The verdict on the step and on its parts, in the order of the first baseline.

    `limit`: the largest increase that passes, as a share. `parts`: what to judge, "step" or names of kinds, phases and
    kernels; by default the step and all parts of at least 1 % of it. `noise`: how far identical runs differ, a share;
    None to learn it from several baselines. Raises SelectionError for a part that no run has.
    """
    sides = (*baselines, run)
    in_any_run = list(dict.fromkeys(part for side in sides for part in side.parts))
    names = [STEP, *dict.fromkeys(part.name for part in in_any_run)]
    if unknown := {*parts} - {*names}:
        meant = did_you_mean(min(unknown), names)
        raise SelectionError(f"no part is called {listed(sorted(unknown))}; there are {listed(names)}{meant}")
    step_s = [float(side.step_s.mean()) for side in sides]

    def counts(part: SpentPart) -> bool:
        shares = [_seconds(side, part).mean() / whole for side, whole in zip(sides, step_s, strict=True)]
        return part.name in parts if parts else max(shares) >= GATE.smallest_share

    wanted = [None] * (not parts or STEP in parts) + [part for part in in_any_run if counts(part)]
    *before, after = (np.stack([_seconds(side, part) for part in wanted], axis=1) for side in sides)
    differences = differences_from_runs(before, after, GATE.confidence)
    whole_s = np.maximum(differences.before, GATE.smallest_whole * float(np.mean(step_s[:-1])))
    if noise is not None:
        differences = replace(differences, noise=noise * whole_s)
    rows = [_judged(differences, row, part, limit * float(whole_s[row])) for row, part in enumerate(wanted)]
    slower = [index for index, row in enumerate(rows) if row.outcome in SLOWER]
    for number in slower:
        kinds = [part for part in wanted if part is not None and part.of == "kind"] if slower == [0] else []
        part = wanted[number]
        rows[number] = replace(rows[number], where=_slower_ranks(sides, kinds if part is None else [part]))
    return tuple(rows)


def unclear_slowdown(original_s: Floats, ideal_s: Floats, bound: float) -> str | None:
    """Why the noise of the steps does not allow to tell S from a bound; None if it does, or if there are too few steps
    to know their noise.
    """
    if len(original_s) < FEWEST_STEPS or not ideal_s.mean() > 0:
        return None
    by_step = slowdown_by_step(original_s, ideal_s)[:, None]
    difference = differences_of_means(np.zeros_like(by_step), by_step, GATE.confidence)
    distance, margin = abs(float(difference.after[0]) - bound), float(difference.margin[0])
    if not distance < margin < np.inf:
        return None
    more = difference.more_steps(0, distance)
    steps = "far more steps" if more is None else counted(more, "more step")
    return f"slowdown is {difference.after[0]:.3f} ± {margin:.3f}: record {steps}"


def _seconds(side: Spent, part: SpentPart | None) -> Floats:
    """What each step takes, or a part of it on the mean rank, seconds, [steps]."""
    return side.step_s if part is None else side.parts.get(part, np.zeros_like(side.step_s))


def _judged(differences: MeanDifferences, column: int, part: SpentPart | None, allowed_s: float) -> Judged:
    """The verdict on one figure: its interval is above the limit, below it, or on both sides."""
    name = STEP if part is None else str(part)
    change_s, margin_s = float(differences.difference[column]), float(differences.margin[column])
    outcome, more, baselines = Outcome.CANNOT_TELL, None, None
    if min(differences.steps) >= FEWEST_STEPS and abs(change_s - allowed_s) >= margin_s:
        grown = Outcome.REGRESSION if differences.noise_is_known else Outcome.SLOWER
        outcome = Outcome.PASSED if change_s <= allowed_s else grown
    else:  # an interval that ends at the limit, or half as wide as that of runs that are equal but for their noise
        wanted_s = max(abs(change_s - allowed_s), allowed_s / 2)
        more = differences.more_steps(column, wanted_s) or None  # 0 if too few show their scatter
        baselines = differences.more_runs(column, wanted_s) if more is None else None
    margin = margin_s if np.isfinite(margin_s) else None
    return Judged(
        name,
        outcome,
        float(differences.before[column]),
        float(differences.after[column]),
        margin,
        allowed_s,
        more,
        baselines,
    )


def _slower_ranks(sides: Sequence[Spent], parts: list[SpentPart]) -> str:
    """The ranks that spend more on some part, beyond chance: on that of these parts that has grown most.

    Of ranks that differ, those that grew at least half as much as the one that grew most.
    """
    ranks = sides[0].ranks
    if not parts or not len(ranks) or any(len(side.ranks) != len(ranks) for side in sides):
        return ""
    *before, after = (np.concatenate([side.by_rank(part) for part in parts], axis=1) for side in sides)
    differences = differences_from_runs(before, after, GATE.confidence)
    slower = (differences.difference > differences.margin).reshape(len(parts), -1)
    grown = np.where(slower, differences.difference.reshape(slower.shape), 0.0).sum(axis=1)
    most = int(grown.argmax())
    if not grown[most] > 0:
        return ""
    more = differences.difference.reshape(slower.shape)[most]
    named = slower[most] & (more >= more.max() / 2)
    on = f"on all {len(ranks)} ranks" if named.all() else f"on {ranks_text(ranks[named].tolist())}"
    return on if len(parts) == 1 else f"mostly {parts[most]} {on}"
