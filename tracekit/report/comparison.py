"""Changes between two runs, in sentences, and what a fix that somebody applied has saved.

In: two reports. Out: a `Comparison`, which the terminal prints and `--json` holds; what an `AppliedFix` gave back.
The figures come from `compare.py`, which also feeds the dashboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from tracekit.analysis.numeric.statistics import difference_of_means
from tracekit.base.errors import SelectionError
from tracekit.base.text import cost, seconds, three_digits
from tracekit.report.compare import (
    ChangeEffect,
    CostChange,
    EffectInWords,
    Side,
    causes_of_jobs,
    cost_changes,
    phase_changes,
    verdict,
    whole,
)
from tracekit.report.conclusions import Finding, Fix
from tracekit.report.findings import AppliedFix
from tracekit.report.report import Report

#: Version of the JSON object; it increases whenever readers of the last version could break.
COMPARISON_VERSION = 1
#: Skip op kinds whose cost changed by less than this share of the step, on the side where the step is longer.
SMALLEST_SHARE = 0.01
_SOURCES = {
    "pipeline": "a pipeline trace",
    "ops": "an op trace (docs/traces.md)",
    "recording": "of torch.profiler (docs/kineto.md)",
    "rl": "a run of post-training (docs/rl.md)",
}
#: The largest number of op kinds in the sentence about them.
_MOST_KINDS = 3


class ComparedRun(Struct, frozen=True):
    """One side: seconds of the mean step, S, and tokens a second, None if the loop logs none."""

    name: str
    layout: dict[str, int]
    steps: int
    recorded_s: float
    original_s: float
    ideal_s: float
    slowdown: float
    tokens_per_s: float | None


class Causes(Struct, frozen=True):
    """Causes in sentences."""

    gone: tuple[str, ...]
    new: tuple[str, ...]
    staying: tuple[str, ...]


class CompareOutput(Struct, frozen=True, kw_only=True):
    """What `tracekit compare --json` prints."""

    comparison_version: int = COMPARISON_VERSION
    before: ComparedRun
    after: ComparedRun
    outcome: ChangeEffect
    sentence: str
    notes: tuple[str, ...]
    cost: str
    causes: Causes
    kinds: str | None
    trust: str
    trustworthy: bool
    by_kind: tuple[CostChange, ...]


class Comparison(NamedTuple):
    """Comparison of two runs: its figures, the effect of the change, and what `--json` says of them."""

    before: Side
    after: Side
    effect: EffectInWords
    output: CompareOutput


def compare_runs(reports: tuple[Report, Report]) -> Comparison:
    """Compare two runs, the first before the change. Raises SelectionError for jobs of different sources or methods."""
    sources = [_SOURCES[report.job.source] for report in reports]
    if sources[0] != sources[1]:
        raise SelectionError(f"A is {sources[0]}, B {sources[1]}: compare two of the same source")
    methods = [report.method.name for report in reports if report.method]
    if len(set(methods)) > 1:
        raise SelectionError(
            f"A is a report by --method {methods[0]}, B by {methods[1]}: print both by the same method"
        )
    before, after = (whole(report.name, report) for report in reports)
    effect, change = verdict(before, after), causes_of_jobs(*reports)
    phases = bool(reports[0].phases)
    by_kind = phase_changes(*reports) if phases else cost_changes(*reports, "by_kind", "kind")
    output = CompareOutput(
        before=_compared(before),
        after=_compared(after),
        outcome=effect.outcome,
        sentence=effect.sentence,
        notes=effect.notes,
        cost=_cost(*reports),
        causes=Causes(
            gone=tuple(_cause(reports[0], cause, "cost") for cause in change.gone),
            new=tuple(_cause(reports[1], cause, "costs") for cause in change.new),
            staying=tuple(_remaining(reports, earlier, later) for earlier, later in change.staying),
        ),
        kinds=_changed_kinds(by_kind, max(float(side.recorded_s.mean()) for side in (before, after)), phases=phases),
        trust=_trust(reports),
        trustworthy=before.trustworthy and after.trustworthy,
        by_kind=by_kind,
    )
    return Comparison(before, after, effect, output)


def _compared(side: Side) -> ComparedRun:
    return ComparedRun(
        side.job,
        dict(side.layout),
        len(side.steps) * side.steps_each,
        float(side.recorded_s.mean()),
        float(side.original_s.mean()),
        float(side.ideal_s.mean()),
        side.slowdown,
        side.tokens_per_s,
    )


def _cost(before: Report, after: Report) -> str:
    """The loss of both runs, per day if both say what a day costs."""
    lost = [_a_day(report) for report in (before, after)]
    if None in lost:
        shares = [f"{report.verdict.share:z.0%} of its {report.unit}" for report in (before, after)]
        return f"B loses {shares[1]}; A lost {shares[0]}"
    if lost[0] == lost[1]:
        return f"both lose {lost[0]} GPU-hours a day"
    return f"B loses {lost[1]} GPU-hours a day; A lost {lost[0]}"


def _a_day(report: Report) -> str | None:
    """The GPU-hours that a day loses, of all; None if the report does not show what a day costs."""
    lost, gpus = report.verdict.lost_gpu_hours_per_day, report.job.gpus
    return None if lost is None or gpus is None or not report.daily else f"{three_digits(lost)} of {gpus * 24:,}"


def _cause(report: Report, cause: Finding, word: str) -> str:
    """A cause of one side; `word`: cost or costs."""
    sentence = report.answer.causes[report.findings.index(cause)]
    words = _price(report, cause)
    return sentence if words is None else f"{sentence} ({words.replace('costs', word, 1)})"


def _remaining(reports: tuple[Report, Report], earlier: Finding, later: Finding) -> str:
    """A cause of both sides, described as in the second run, with both costs."""
    sentence = reports[1].answer.causes[reports[1].findings.index(later)]
    old, new = _price(reports[0], earlier), _price(reports[1], later)
    if old == new and old is not None:
        return f"{sentence} ({old})"
    return sentence if old is None or new is None else f"{sentence} ({old.replace('costs', 'cost', 1)}, now {new})"


def _price(report: Report, cause: Finding) -> str | None:
    """The cost of a cause per step, None if it has no price."""
    saved_s, alone_s = (cost_s / report.steps_in_whole for cost_s in (cause.saved_s, cause.alone_s))
    if max(saved_s, alone_s) <= 0:
        return None
    return cost(saved_s, alone_s, report.unit, bound=cause.bound)


def _changed_kinds(changes: tuple[CostChange, ...], step_s: float, *, phases: bool) -> str | None:
    """The op kinds whose stragglers cost more or less than before, or the phases that take more or less."""
    largest_first = sorted(changes, key=lambda change: -abs(change.difference_s))
    relevant = [change for change in largest_first if abs(change.difference_s) >= SMALLEST_SHARE * step_s][:_MOST_KINDS]
    words = [
        f"{change.name} {seconds(abs(change.difference_s))} {'more' if change.difference_s > 0 else 'less'}"
        for change in relevant
    ]
    subject = "what phases take" if phases else "what stragglers cost a step, each op kind alone"
    return f"{subject}: {', '.join(words)}" if words else None


def _trust(reports: tuple[Report, Report]) -> str:
    """The reasons why the figures of both sides are reliable, or why those of one are not."""
    doubts = [
        f"{name}: {report.answer.trust}"
        for name, report in zip("AB", reports, strict=True)
        if not report.trust.trustworthy
    ]
    if doubts:
        return "; ".join(doubts)
    if any(report.job.basis == "phases" for report in reports):
        first, second = (report.answer.trust for report in reports)
        return first if first == second else f"A: {first}; B: {second}"
    error = max(report.trust.replay_error or 0.0 for report in reports)
    return f"both replays are within {error:.1%} of their recordings"


class ComparedOutput(CompareOutput, frozen=True, kw_only=True):
    """What `tracekit compare --json` prints. `fix`: with --fix, what it was expected to save, and what it saved."""

    fix: AppliedFix | None


def total_of(fixes: Sequence[AppliedFix]) -> str:
    """What several fixes gave back together."""
    expected, got = (sum(getattr(fix, f"{name}_gpu_hours_per_day") for fix in fixes) for name in ("expected", "got"))
    many = "1 fix" if len(fixes) == 1 else f"{len(fixes):,} fixes"
    return f"{many} gave back {three_digits(got)} of {three_digits(expected)} GPU-hours a day expected"


def fix_applied(
    reports: tuple[Report, Report], fixes: Sequence[Fix], name: str, noted_at: float, by: str
) -> AppliedFix:
    """What a fix of the first run was expected to save, and what the second shows. `fixes`: those promised
    for the first; `name`: the kind of one, or a part of its title. `noted_at`, `by`: when it was noted, and by whom.

    Raises SelectionError if it is not exactly one fix with a price, or if step times of the runs do not compare.
    """
    before, after = (whole(report.name, report) for report in reports)
    fix = _fix_named(fixes, name)
    if dict(before.layout) != dict(after.layout) or before.whole != after.whole:
        raise SelectionError(f"--fix {name!r:.60}: the layouts of A and B differ, so their step times do not compare")
    change = difference_of_means(before.recorded_s, after.recorded_s)
    return AppliedFix(
        noted_at=noted_at,
        by=by,
        before=before.job,
        after=after.job,
        kind=fix.kind,
        title=fix.title,
        whole=before.whole,
        expected_s=fix.saved_s or 0.0,
        error_s=fix.error_s,
        got_s=-change.difference,
        low_s=None if change.high is None else -change.high,
        high_s=None if change.low is None else -change.low,
        expected_gpu_hours_per_day=fix.saved_gpu_hours_per_day or 0.0,
    )


def _fix_named(fixes: Sequence[Fix], name: str) -> Fix:
    priced = [fix for fix in fixes if fix.withheld is None and (fix.saved_s or 0.0) > 0]
    hits = [fix for fix in priced if fix.kind == name] or [fix for fix in priced if name.lower() in fix.title.lower()]
    if len(hits) == 1:
        return hits[0]
    if hits:
        titles = "; ".join(repr(fix.title) for fix in hits)
        raise SelectionError(f"--fix {name!r:.60}: {len(hits)} fixes of A; give a part of one title: {titles:.400}")
    kinds = ", ".join(dict.fromkeys(fix.kind for fix in priced)) or "none with a price"
    raise SelectionError(f"--fix {name!r:.60}: no fix of A with a price; A has {kinds}")
