"""A diagnosis, its priced fixes, and how those of pipelines, op graphs and post-training differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import Parts, ReplayTrust
from tracekit.analysis.attribution.patterns import SpacePattern, Stall, TimePattern
from tracekit.analysis.evidence.subject import Cause, Plan, Subject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.conclusions import Answer, Fix, Verdict
from tracekit.report.finding import LossKind
from tracekit.report.hardware import MetricsInReport
from tracekit.trace.facts import Lack


class Diagnosis(Struct, frozen=True, eq=False):
    """When, where and why a job is slow, what each fix would save, and whether to believe it.

    `headline`: what the verdict follows from. `answer`: all of it in a few sentences. `stalls`: isolated slow steps.
    `trust`: as that of the attribution, except that launch delays that a named cause explains do not count against the
    replay. `problems`: why plug-ins were left out; `failed`: the kinds of those that failed on this job. `lacks`: what
    its source cannot show.
    """

    trust: ReplayTrust
    answer: Answer
    headline: NamedLoss
    verdict: Verdict
    causes: tuple[Cause, ...]
    fixes: tuple[PricedFix, ...]
    time: TimePattern | None = None
    space: SpacePattern | None = None
    stalls: tuple[Stall, ...] = ()
    problems: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()
    metrics: MetricsInReport | None = None


class PricedFix(Fix, frozen=True, kw_only=True):
    """One fix, with the change that prices it; its figures are there, even if they are `withheld`.

    `reached`: if the title gives a goal and not the way to it, the assumption that it is reached. `around`: it works
    around its cause, which stays. `excludes`: of all fixes with one of these names, a combination has one. `extra_s`:
    seconds that it adds to each step.
    """

    new_step_s: float
    saved_s: float
    saved_gpu_hours_per_day: float
    change: Any = None
    reached: str | None = None
    around: bool = False
    excludes: tuple[str, ...] = ()
    extra_s: float = 0.0

    @property
    def fix(self) -> Fix:
        """What a report has of it: no figures if they are withheld."""
        fix = Fix(**{name: getattr(self, name) for name in Fix.__struct_fields__})
        if self.withheld is None:
            return fix
        return replace(fix, new_step_s=None, saved_s=None, saved_gpu_hours_per_day=None)

    @property
    def share(self) -> float:
        """What it saves, as a share of the step."""
        now_s = self.unprofiled_step_s if self.saves_step_s is not None else self.new_step_s + self.saved_s
        return self.worth_s / (now_s or float("inf"))


class LossWithCauses(Struct, frozen=True, eq=False):
    """The cost of one kind of loss, seconds of the mean step, and its causes in the order in which to address them.

    `explained_s`: the part of `lost_s` that goes when these causes go; the rest has no known cause.
    """

    kind: LossKind
    lost_s: float
    causes: tuple[Cause, ...]
    explained_s: float


class NamedLoss(Struct, frozen=True, eq=False):
    """The kind of loss to name, and the sentence about it.

    `headline_s`: what that kind costs; `lost_s`: what the job loses in all, of `whole_s`, of which `returning_s` will
    be lost again; seconds of the mean step, or of the recording. `step_lost_s`: what each step loses, seconds, [steps].
    `leading`: the findings that cause it, the costliest first. `losses`: each kind of loss, the one to name first.
    `parts`: what S consists of. `of_mean_ops`: whether the loss is relative to ops of mean duration.
    """

    kind: LossKind
    sentence: str
    headline_s: float
    lost_s: float
    whole_s: float
    returning_s: float
    step_lost_s: Floats
    leading: Sequence[Cause]
    losses: tuple[LossWithCauses, ...]
    parts: Parts
    of_mean_ops: bool = False

    @property
    def share(self) -> float:
        """The total loss, of the whole."""
        return self.lost_s / self.whole_s

    @property
    def returning_share(self) -> float:
        """The loss that will be there again, of the whole."""
        return self.returning_s / self.whole_s

    @property
    def first_cause(self) -> Cause | None:
        """The first cause of the largest loss that has one; None if no loss has a known cause."""
        return next((cause for loss in self.losses for cause in loss.causes), None)


class Assessment(Struct, frozen=True, eq=False):
    """A job, and how jobs of its shape are assessed."""

    job: Subject

    @property
    @abstractmethod
    def smallest_cost_s(self) -> float:
        """Findings that cost less, gone alone or with all others gone, are not reported, seconds."""

    def reported(self, findings: Sequence[Cause]) -> tuple[Cause, ...]:
        """Return the findings to report, in this order."""
        return tuple(findings)

    @property
    def undecided(self) -> str | None:
        """What looks slow, but no slower than chance explains, and what would tell."""
        return None

    def ordered(self, causes: tuple[Cause, ...], fixes: Sequence[PricedFix]) -> tuple[Cause, ...]:
        """Return the causes in the order in which to address them."""
        del fixes
        return causes

    def plans(self, causes: Sequence[Cause]) -> Iterable[Plan]:
        """Return plans beside those of each cause: for several causes together, and what any job can try."""
        del causes
        return ()

    @abstractmethod
    def withheld(self, causes: Sequence[Cause]) -> str | None:
        """Return why no saving can be reported; None if it can."""

    def promised(self, fix: PricedFix) -> PricedFix:
        """Return a fix with the saving that can be promised."""
        return fix

    @abstractmethod
    def headline(self, causes: Sequence[Cause]) -> NamedLoss:
        """Return what the job loses to these causes."""

    @abstractmethod
    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        """Return whether the numbers can be trusted, given these causes."""

    @abstractmethod
    def fit(self, trust: ReplayTrust) -> str:
        """Return how well the replay fits the recording, or why it is not trusted, in words."""

    def seen(self, finding: Cause) -> str:
        """Return where exactly a finding is, and when it acts, in words that follow its place."""
        return f", {finding.when}"

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The single slow steps."""
        return ()

    @property
    def time(self) -> TimePattern | None:
        """When the job loses time."""
        return None

    @property
    def space(self) -> SpacePattern | None:
        """Where the job loses time."""
        return None


def changes_of(causes: Iterable[Cause]) -> list[Any]:
    """Return the changes that undo these causes; a fault of the trace has none."""
    return [cause.change for cause in causes if cause.change is not None]


def doubts_of(causes: Iterable[Cause]) -> tuple[str, ...]:
    """Why a report with these causes cannot be trusted: loads of experts that are not known."""
    return tuple(cause.effect for cause in causes if cause.kind == "unknown-loads")


def every_step(lost_s: float, steps: int) -> Floats:
    """Return the same loss for each step, seconds, [steps]."""
    return np.full(steps, lost_s)
