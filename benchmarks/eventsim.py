"""Precision, recall and price errors of the diagnosis, on jobs of the event-driven simulator.

python -m benchmarks eventsim                               draws every case and writes RESULTS.md
python -m benchmarks eventsim --seed 1 --count 3 --case P3  prints chosen jobs only; --count 1 adds truth and diagnosis
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import tracekit
from benchmarks.measure import table
from judges.eventsim import CASES, draw_job, simulate, truths
from judges.judging import Judgement, Named, judge, must_find
from tracekit.base.errors import TracekitError

#: Published figures come from these seeds, so develop rules on other ones.
SEED, COUNT, HEALTHY = 10_090_000, 5, 100
QUICK = {"COUNT": 1, "HEALTHY": 4, "CASES": ("P1", "P3", "healthy")}
HEALTHY_CASES = ("healthy", "healthy-noisy", "healthy-lockstep", "healthy-loop")
#: Jobs in which no worker is at fault.
BLAMELESS = (*HEALTHY_CASES, "healthy-nvlink", "P14", "P15", "P19", "clock")
#: Larger errors of a price, as a share of the step, are listed as misses.
LARGEST_PRICE_ERROR = 0.03
_PRICE = ("price error, median", "95 % within")


def section() -> str:
    """The Markdown of this section."""
    judged = tuple(corpus(SEED, COUNT, HEALTHY, tuple(CASES)))
    intro = (
        f"Jobs of the event-driven simulator (`judges/eventsim`), which shares no code and no model with the rules:"
        f" {COUNT} of each of {len(CASES)} cases and {HEALTHY} healthy ones, seeds from {SEED}. The truth is the same"
        " job run again without the cause, or with the fix. A cause must be found if it costs 5 % of the step or more."
    )
    return "\n\n".join(["## Diagnosis on an independent simulator", intro, report(judged)])


def main(arguments: Sequence[str]) -> None:
    """Print the table for chosen jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks eventsim", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the first job of each case")
    parser.add_argument("--count", type=int, default=COUNT, help="jobs per case")
    parser.add_argument("--healthy", type=int, help="healthy jobs (default: as many as of any case)")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="a case; repeat it for several")
    chosen = parser.parse_args(arguments)
    healthy = chosen.count * len(HEALTHY_CASES) if chosen.healthy is None else chosen.healthy
    judged = []
    for judgement in corpus(chosen.seed, chosen.count, healthy, tuple(chosen.case or CASES)):
        judged.append(judgement)
        if chosen.count == 1 and chosen.case:
            print(_described(judgement), end="\n\n")
    print(_by_case(judged), report(judged), sep="\n\n")


def corpus(seed: int, count: int, healthy: int, cases: Sequence[str]) -> Iterator[Judgement]:
    """Draw, analyse and judge jobs."""
    for case in cases:
        jobs = -(-healthy // len(HEALTHY_CASES)) if case in HEALTHY_CASES else count
        for number in range(jobs):
            yield judged_job(seed + number, case)


def judged_job(seed: int, case: str) -> Judgement:
    """One job."""
    job = draw_job(seed, case)
    simulated, job_truths = simulate(job), tuple(truths(job))
    step_s = float(simulated.step_s.mean())
    try:
        diagnosis = tracekit.job_of(simulated.trace).whatif().to_dict()
    except TracekitError as error:
        return Judgement(job, step_s, job_truths, problem=str(error), must=must_find(job_truths, step_s))
    return judge(job, job_truths, diagnosis)


@dataclass(frozen=True)
class Totals:
    """Counts and errors over many jobs."""

    judged: tuple[Judgement, ...]

    @property
    def right(self) -> int:
        return sum(len(one.right) for one in self.judged)

    @property
    def wrong(self) -> int:
        return sum(len(one.wrong) for one in self.judged)

    @property
    def must(self) -> int:
        return sum(len(one.must) for one in self.judged)

    @property
    def recalled(self) -> int:
        return sum(len(one.recalled) for one in self.judged)

    @property
    def blamed(self) -> int:
        """Healthy jobs with a false accusation."""
        return sum(bool(one.wrong) for one in self.judged if case_of(one) in BLAMELESS)

    @property
    def cause_errors(self) -> list[float]:
        return [error for one in self.judged for error in one.cause_errors]

    @property
    def fix_errors(self) -> list[float]:
        return [error for one in self.judged for error in one.fix_errors]


def case_of(judgement: Judgement) -> str:
    """The case a job was drawn from."""
    return judgement.job.name.rpartition("-")[0]


def report(judged: Iterable[Judgement]) -> str:
    """Totals, tables by cause and by fix, and each miss with the command that shows it."""
    judged = tuple(judged)
    misses = [line for one in judged if (line := _miss(one)) is not None]
    parts = [_totals(Totals(judged)), _by_cause(judged), _by_fix(judged)]
    if misses:
        parts.append("Misses:\n\n" + "\n".join(misses))
    return "\n\n".join(parts)


def _by_cause(judged: Sequence[Judgement]) -> str:
    must = Counter(str(truth.kind) for one in judged for truth in one.must)
    named = Counter(str(truth.kind) for one in judged for truth in one.recalled)
    wrong = Counter(cause.kind for one in judged for cause in one.wrong)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for judgement in judged:
        for cause, error in zip(judgement.priced, judgement.cause_errors, strict=True):
            errors[str(cause.truths[0].kind)].append(error)
    rows = [
        [kind, str(must[kind]), str(named[kind]), str(wrong[kind]), *_spread(errors[kind])]
        for kind in sorted(must | wrong)
    ]
    return table(["cause", "must be found", "found", "wrongly named", *_PRICE], rows)


def _by_fix(judged: Sequence[Judgement]) -> str:
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for judgement in judged:
        for fix, error in zip(judgement.fixes, judgement.fix_errors, strict=True):
            errors[fix.kind].append(error)
    rows = [[kind, str(len(found)), *_spread(found)] for kind, found in sorted(errors.items())]
    return table(["fix", "priced", *_PRICE], rows)


def _by_case(judged: Sequence[Judgement]) -> str:
    cases = dict.fromkeys(map(case_of, judged))
    rows = [_row(case, Totals(tuple(one for one in judged if case_of(one) == case))) for case in cases]
    header = [
        "case", "jobs", "S", "trusted", "must", "found", "wrongly named", "cause price error", "fix price error",
        "its 95th percentile",
    ]  # fmt: skip
    return table(header, rows)


def _spread(errors: Sequence[float]) -> list[str]:
    return [_quantile(errors, 0.5), _quantile(errors, 0.95)]


def _totals(total: Totals) -> str:
    blameless = sum(case_of(one) in BLAMELESS for one in total.judged)
    fixes = total.fix_errors
    right = [cause for one in total.judged for cause in one.right]
    return "\n".join(
        [
            f"- Jobs: {len(total.judged)}; without a report: {sum(one.problem is not None for one in total.judged)}",
            (
                f"- Precision: **{_ratio(total.right, total.right + total.wrong)}** ({total.right} right, {total.wrong}"
                " wrong)"
            ),
            f"- Recall: **{_ratio(total.recalled, total.must)}** ({total.recalled} of {total.must})",
            f"- Timing right: {sum(not cause.mistimed for cause in right)} of {len(right)} rightly named causes",
            f"- Healthy jobs with a false accusation: **{total.blamed}** of {blameless}",
            (
                f"- Price of a cause rightly named: median {_quantile(total.cause_errors, 0.5)}, 95 % within"
                f" {_quantile(total.cause_errors, 0.95)} of the step ({len(total.cause_errors)})"
            ),
            (
                f"- Price of a fix: median **{_quantile(fixes, 0.5)}**, 95 % within **{_quantile(fixes, 0.95)}** of the"
                f" step ({len(fixes)})"
            ),
        ]
    )


def _row(case: str, total: Totals) -> list[str]:
    judged = total.judged
    return [
        case, str(len(judged)), f"{np.mean([one.slowdown for one in judged]):.2f}",
        str(sum(one.trusted for one in judged)), str(total.must), str(total.recalled), str(total.wrong),
        _quantile(total.cause_errors, 0.5), _quantile(total.fix_errors, 0.5), _quantile(total.fix_errors, 0.95),
    ]  # fmt: skip


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _quantile(errors: Sequence[float], share: float) -> str:
    return f"{np.quantile(errors, share):.2%}" if errors else "-"


def _miss(judgement: Judgement) -> str | None:
    """The errors of a job's report in one line; None if there are none."""
    parts = [] if judgement.problem is None else [f"no report: {judgement.problem}"]
    parts += [f"missed {truth.kind} ({truth.saved_s / judgement.step_s:.0%})" for truth in judgement.missed]
    parts += [
        f"{'misplaced' if cause.misplaced else 'wrong'} {cause.kind} at {cause.place}" for cause in judgement.wrong
    ]
    parts += [
        f"{cause.kind} at {cause.place} mistimed: {cause.timing or 'always'}"
        for cause in judgement.right
        if cause.mistimed
    ]
    prices = [(cause.kind, cause.saved_s, cause.truths[0].saved_s) for cause in judgement.priced]
    prices += [(fix.kind, fix.priced_s, fix.truth_s) for fix in judgement.fixes]
    parts += [
        f"{kind} priced {price_s / judgement.step_s:.1%}, truth {truth_s / judgement.step_s:.1%}"
        for kind, price_s, truth_s in prices
        if abs(price_s - truth_s) > LARGEST_PRICE_ERROR * judgement.step_s
    ]
    if not parts:
        return None
    case, _, seed = judgement.job.name.rpartition("-")
    return f"- {'; '.join(parts)}: `python -m benchmarks eventsim --case '{case}' --seed {seed} --count 1`"


def _error_of(cause: Named) -> str:
    """What is wrong with a named cause; empty if nothing is."""
    if cause.truths:
        return ""
    return " (misplaced)" if cause.misplaced else " (wrong)"


def _described(judgement: Judgement) -> str:
    """A job, its truth and its diagnosis."""
    job, shape = judgement.job, judgement.job.shape
    lines = [
        (
            f"{job.name}: dp {shape.dp} pp {shape.pp} vpp {shape.vpp} tp {shape.tp}, {shape.microbatches} microbatches,"
            f" {shape.steps} steps, {job.schedule}, receives {job.posting}, host {job.host.mode},"
            f" step {judgement.step_s:.4f} s, S {judgement.slowdown:.3f},"
            f" {'trusted' if judgement.trusted else 'not trusted'}"
        )
    ]
    lines += [
        f"  truth  {truth.saved_s / judgement.step_s:7.2%}  {truth.kind}  {truth.cause}" for truth in judgement.truths
    ]
    lines += [
        f"  named  {cause.saved_s / judgement.step_s:7.2%}  {cause.kind} at {cause.place}"
        f"{f', {cause.timing}' if cause.timing else ''}{' (mistimed)' if cause.mistimed else ''}"
        f"{_error_of(cause)}"
        for cause in judgement.named
    ]
    lines += [
        f"  fix    {fix.priced_s / judgement.step_s:7.2%}  {fix.title}: truth {fix.truth_s / judgement.step_s:.2%}"
        for fix in judgement.fixes
    ]
    if judgement.problem:
        lines.append(f"  no report: {judgement.problem}")
    return "\n".join(lines)
