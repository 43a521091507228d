"""A fix that somebody applied: what it was expected to save, and what the next run shows.

In: the reports on two jobs. Out: `AppliedFix`, which a store keeps, and its words.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tracekit.analysis.numeric.means import difference_of_means
from tracekit.base.errors import SelectionError
from tracekit.base.text import seconds, short, three_digits, with_error
from tracekit.report.compare import whole
from tracekit.report.comparison import CompareOutput
from tracekit.report.conclusions import Fix
from tracekit.report.report import Report


class AppliedFix(Struct, frozen=True):
    """A fix for the job `before`, applied in the job `after`.

    `noted_at`: seconds since the epoch. `expected_s`, +- `error_s`: what the report on `before` promised, seconds a
    `whole`. `got_s`: by how much `after` is faster, with its 95 % interval; None if there are too few steps.
    `expected_gpu_hours_per_day`: the same saving at the rate of `before`.
    """

    noted_at: float = msgspec.field(name="at")
    by: str
    before: str
    after: str
    kind: str
    title: str
    whole: str
    expected_s: float
    error_s: float
    got_s: float
    low_s: float | None
    high_s: float | None
    expected_gpu_hours_per_day: float

    @property
    def got_gpu_hours_per_day(self) -> float:
        """What it gives back at the rate of the job before."""
        return self.expected_gpu_hours_per_day * self.got_s / self.expected_s if self.expected_s else 0.0

    @property
    def outcome(self) -> str:
        """Expected and got, without naming the jobs."""
        got = f"{seconds(self.got_s)} less" if self.got_s >= 0 else f"{seconds(-self.got_s)} more"
        if self.low_s is not None and self.high_s is not None:
            got += f" (95% interval {seconds(self.low_s)} to {seconds(self.high_s)})"
        return f"expected {with_error(self.expected_s, self.error_s)} less a {self.whole}, got {got}"

    @property
    def words(self) -> str:
        """Fix, expected and got, with the job that shows it."""
        return f"{self.title}: {self.outcome} in {short(self.after)}"


class ComparedOutput(CompareOutput, frozen=True, kw_only=True):
    """What `tracekit compare --json` prints. `fix`: with --fix, what it was expected to save, and what it saved."""

    fix: AppliedFix | None


def in_all(fixes: Sequence[AppliedFix]) -> str:
    """What several fixes gave back together."""
    expected, got = (sum(getattr(one, f"{name}_gpu_hours_per_day") for one in fixes) for name in ("expected", "got"))
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
    named = [fix for fix in priced if fix.kind == name] or [fix for fix in priced if name.lower() in fix.title.lower()]
    if len(named) == 1:
        return named[0]
    if named:
        titles = "; ".join(repr(fix.title) for fix in named)
        raise SelectionError(f"--fix {name!r:.60}: {len(named)} fixes of A; give a part of one title: {titles:.400}")
    kinds = ", ".join(dict.fromkeys(fix.kind for fix in priced)) or "none with a price"
    raise SelectionError(f"--fix {name!r:.60}: no fix of A with a price; A has {kinds}")
